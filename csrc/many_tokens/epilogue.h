// The end of a tile of many_tokens/kernel.h: sums to the output, and the sums of a split of K added up.
#pragma once

#include <type_traits>

#include "many_tokens/tile.h"

namespace fp4d {

// What a warpgroup writes where weights are operand A: 64 rows of the weight, which are columns of the output. e4m3
// tokens are scaled here.
template <class Tile>
struct OutputByRow {
  Params<typename Tile::Weights> const& p;
  int warpgroup, warp, lane;
  uint32_t staging;  // in shared memory
  int row = 0;       // first of the warpgroup
  float alpha[2] = {}, bias[2] = {};
  int buffer = 0;

  struct Scales {  // of a tile's tokens, a lane each
    float of[Tile::kPieces];
  };

  __device__ void start(Corner corner, Scales& scales) {
    row = (corner.row_block + warpgroup) * kBlockRows;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      int const mine = row + warp * 16 + half * 8 + lane / 4;
      alpha[half] = mine < p.n ? p.alpha[int64_t(mine) * p.alpha_step] * Tile::Weights::kFactor : 0.f;
      bias[half] = p.bias != nullptr && mine < p.n ? float(p.bias[mine]) : 0.f;
    }
#pragma unroll
    for (int j = 0; j < Tile::kPieces; ++j) scales.of[j] = token_scale(corner.token + j * Tile::kPieceTokens);
  }

  // Of token `first` + lane.
  __device__ float token_scale(int first) const {
    if (!kFp8 || lane >= Tile::kPieceTokens || first + lane >= p.m) return 0.f;
    return p.x_scale[int64_t(first + lane) * p.x_scale_step];
  }

  // Of 8 of wgmma's columns, those that are there.
  __device__ int blocks(Corner corner) const { return (p.m - corner.token + 7) / 8; }

  __device__ void tile(float const (&sums)[Tile::kTokens / 2], Corner corner, Scales const& scales) {
#pragma unroll
    for (int j = 0; j < Tile::kPieces; ++j) {
      if (corner.token + j * Tile::kPieceTokens < p.m) {
        constexpr int kSums = Tile::kPieceTokens / 2;
        float some[kSums];
#pragma unroll
        for (int v = 0; v < kSums; ++v) some[v] = sums[j * kSums + v];
        piece(some, scales.of[j], corner.token + j * Tile::kPieceTokens, Tile::kPieceTokens);
      }
    }
  }

  // `count` blocks from block `j` on.
  __device__ void part(float const (&sums)[Tile::kPieceTokens / 2], Corner corner, int j, int count) {
    piece(sums, token_scale(corner.token + j * 8), corner.token + j * 8, count * 8);
  }

  // A piece from token `first` on: sums as the loop leaves them, `count` tokens of them wanted.
  __device__ void piece(float const (&sums)[Tile::kPieceTokens / 2], float scale, int first, int count) {
    uint32_t const to = staging + buffer * Tile::kPieceBytes;
    uint32_t const mine =
        to + (lane / 16 * 8 + lane % 8) * Tile::kPitch + (warp * 16 + lane / 8 % 2 * 8) * int(sizeof(Out));
#pragma unroll
    for (int j = 0; j < Tile::kPieceTokens / 8; j += 2) {
      uint32_t pairs[4];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float scales[2] = {1.f, 1.f};
#pragma unroll
        for (int t = 0; t < 2 && kFp8; ++t)
          scales[t] = __shfl_sync(~0u, scale, (j + i) * 8 + lane % 4 * 2 + t);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          float values[2];
#pragma unroll
          for (int t = 0; t < 2; ++t)
            values[t] =
                fmaf(sums[(4 * (j + i) + 2 * half + t) ^ kOtherBank] * alpha[half], scales[t], bias[half]);
          pairs[2 * i + half] = pack(values[0], values[1], Out{});
        }
      }
      store_matrices_transposed(mine + j * 8 * Tile::kPitch, pairs);
    }
    sync_threads(1 + warpgroup, 128);
#pragma unroll
    for (int i = 0; i < Tile::kPieceTokens * 8 / 128; ++i) {
      int const unit = i * 128 + warp * 32 + lane, t = unit / 8, column = row + unit % 8 * 8;
      if (t < count && first + t < p.m && column < p.n) {
        *reinterpret_cast<uint4*>(p.out + int64_t(first + t) * p.n + column) =
            load_16(to + t * Tile::kPitch + unit % 8 * 16);
      }
    }
    buffer ^= 1;
  }
};

// What a warp writes where tokens are operand A: 16 tokens, by itself. Sums have been scaled.
template <class Tile>
struct OutputByToken {
  static constexpr int kColumns = 64;  // of the output, at a time
  // Of what a warpgroup has to turn its output in.
  static constexpr int kWarpBytes = 2 * Tile::kPieceBytes / 4;
  Params<typename Tile::Weights> const& p;
  int warpgroup, warp, lane;
  uint32_t staging;           // in shared memory, of the warpgroup
  int token = 0, column = 0;  // first of the warp
  static_assert(16 * (kColumns * int(sizeof(Out)) + 16) <= kWarpBytes);

  struct Scales {};

  __device__ void start(Corner corner, Scales) {
    token = corner.token + warpgroup * 64 + warp * 16, column = corner.row_block * kBlockRows;
  }
  __device__ int blocks(Corner) const { return (p.n - column + 7) / 8; }

  __device__ void tile(float const (&sums)[Tile::kTokens / 2], Corner, Scales) {
    constexpr int kSums = kColumns / 2;
#pragma unroll
    for (int j = 0; j < Tile::kTokens / kColumns; ++j) {
      float some[kSums];
#pragma unroll
      for (int v = 0; v < kSums; ++v) some[v] = sums[j * kSums + v];
      piece(some, column + j * kColumns, kColumns);
    }
  }
  __device__ void part(float const (&sums)[Tile::kPieceTokens / 2], Corner, int j, int count) {
    piece(sums, column + j * 8, count * 8);
  }

  // Columns from `first` on: sums as the loop leaves them, `count` columns of them wanted.
  template <int kSums>
  __device__ void piece(float const (&sums)[kSums], int first, int count) {
    constexpr int kUnits = kSums / 4;  // of 8 columns
    constexpr int kPitch = kUnits * 16 + 16;
    uint32_t const to = staging + warp * kWarpBytes;
    uint32_t const mine = to + lane % 16 * kPitch + lane / 16 * 16;
    __syncwarp();  // the piece before has been read
#pragma unroll
    for (int j = 0; j < kUnits; j += 2) {
      uint32_t pairs[4];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float bias[2] = {};
#pragma unroll
        for (int t = 0; t < 2; ++t) {
          int const at = first + (j + i) * 8 + lane % 4 * 2 + t;
          if (p.bias != nullptr && at < p.n) bias[t] = float(p.bias[at]);
        }
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          int const v = 4 * (j + i) + 2 * half;
          pairs[2 * i + half] =
              pack(sums[v ^ kOtherBank] + bias[0], sums[(v + 1) ^ kOtherBank] + bias[1], Out{});
        }
      }
      store_matrices(mine + j * 16, pairs);
    }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < 16 * kUnits / 32; ++i) {
      int const unit = i * 32 + lane, t = unit / kUnits, at = unit % kUnits * 8;
      if (token + t < p.m && at < count && first + at < p.n) {
        *reinterpret_cast<uint4*>(p.out + int64_t(token + t) * p.n + first + at) =
            load_16(to + t * kPitch + at * int(sizeof(Out)));
      }
    }
  }
};

template <class Tile>
using Output = std::conditional_t<Tile::Weights::kTokensAreA, OutputByToken<Tile>, OutputByRow<Tile>>;

// Adds the parts of K in their order; this CTA does about 1 / split of wgmma's columns. Sums lie in shared memory as
// threads hold them: [warpgroup][8 columns][thread][4].
template <class Tile, int split>
__device__ __forceinline__ void add_and_store(Params<typename Tile::Weights> const& p, Place const& place,
                                              uint32_t sums_at, Output<Tile>& output, Corner corner) {
  constexpr int kBlocks = Tile::kTokens / 8, kMost = (kBlocks + split - 1) / split;  // of 8 columns
  constexpr int kAtOnce = std::min(kMost >= 4 ? 4 : kMost >= 2 ? 2 : 1, Tile::kPieceTokens / 8);
  constexpr int kBatch = std::min(kAtOnce, split >= 8 ? 1 : split >= 3 ? 2 : 4);  // about 8 loads under way
  static_assert(kAtOnce % kBatch == 0);
  uint32_t const own =
      sums_at + output.warpgroup * kBlocks * 128 * 16 + (output.warp * 32 + output.lane) * 16;
  uint32_t parts[split];
#pragma unroll
  for (int i = 0; i < split; ++i) parts[i] = address_in(own, place.with_split(p, i));
  int const blocks = min(kBlocks, output.blocks(corner)), end = blocks * (place.split + 1) / split;
#pragma unroll 1
  for (int j = blocks * place.split / split; j < end; j += kAtOnce) {
    float total[Tile::kPieceTokens / 2] = {};
#pragma unroll
    for (int batch = 0; batch < kAtOnce; batch += kBatch) {
      float4 part[kBatch][split] = {};
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
#pragma unroll
        for (int s = 0; s < split; ++s)
          if (j + batch + i < end) part[i][s] = load_cluster_16(parts[s] + (j + batch + i) * 128 * 16);
      }
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
#pragma unroll
        for (int s = 0; s < split; ++s) {
          float const values[4] = {part[i][s].x, part[i][s].y, part[i][s].z, part[i][s].w};
#pragma unroll
          for (int v = 0; v < 4; ++v) total[4 * (batch + i) + v] += values[v];
        }
      }
    }
    output.part(total, corner, j, min(kAtOnce, end - j));
  }
}

}  // namespace fp4d
