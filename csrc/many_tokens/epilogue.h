// The end of a tile of many_tokens/kernel.h: sums to the output, and the sums of a split of K added up.
#pragma once

#include <type_traits>

#include "many_tokens/tile.h"

namespace fp4d {

// What a warpgroup writes where weights are operand A: 64 rows of the weight, which are columns of the output. e4m3
// tokens are scaled here. Sums are turned in shared memory, and TMA takes them from there while the next tile begins.
// Stores of the warps themselves, behind a barrier for every 16 or 32 tokens, held it up for 1 to 2 us
// (bench/notes/many-tokens.md).
template <class Tile>
struct OutputByRow {
  static constexpr int kColumns = 8;  // of wgmma, in a block: tokens; two blocks make a matrix store
  static constexpr int kTokenBytes = kBlockRows * int(sizeof(Out));  // of the staging, swizzled as TMA does
  Params<typename Tile::Weights> const& p;
  int warpgroup, warp, lane;
  uint32_t staging, scales;  // in shared memory
  int row = 0;               // first of the warpgroup

  __device__ OutputByRow(Params<typename Tile::Weights> const& p, int warpgroup, int warp, int lane,
                         uint32_t base)
      : p(p),
        warpgroup(warpgroup),
        warp(warp),
        lane(lane),
        staging(base + Tile::kOutAt + warpgroup * Tile::kOutTokens * kTokenBytes),
        scales(base + Tile::kOutScalesAt + warpgroup * Tile::kOutScaleBytes) {
    if (warp == 0 && lane == 0) prefetch_map(&p.out_map);
  }

  // Asks for a tile's scales, which lie in shared memory: alpha of the rows, then those of the tokens. What is not there
  // gets the last one's.
  __device__ void start(Corner corner) {
    row = (corner.row_block + warpgroup) * kBlockRows;
    int const thread = warp * 32 + lane;
    if (thread < kBlockRows) {
      copy_4(scales + thread * 4, p.alpha + int64_t(min(row + thread, p.n - 1)) * p.alpha_step);
    }
    if constexpr (kFp8) {
#pragma unroll
      for (int i = 0; i < (Tile::kTokens + 127) / 128; ++i) {
        int const t = i * 128 + thread;
        if (t < Tile::kTokens) {
          copy_4(scales + (kBlockRows + t) * 4,
                 p.x_scale + int64_t(min(corner.token + t, p.m - 1)) * p.x_scale_step);
        }
      }
    }
  }

  // Blocks of columns that are there.
  __device__ int blocks(Corner corner) const { return (p.m - corner.token + 7) / 8; }

  struct Factors {
    float alpha[2], bias[2];  // of a lane's rows
  };

  // Before the first put(): scales have come, and what was put before has been read.
  __device__ Factors begin() const {
    copies_wait();
    stores_have_read();
    sync_threads(1 + warpgroup, 128);
    Factors f;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      int const in_block = warp * 16 + half * 8 + lane / 4, mine = row + in_block;
      f.alpha[half] = __uint_as_float(load_4(scales + in_block * 4)) * Tile::Weights::kFactor;
      f.bias[half] = p.bias != nullptr && mine < p.n ? float(p.bias[mine]) : 0.f;
    }
    return f;
  }

  // Scales of a lane's two tokens of a block of columns.
  __device__ __forceinline__ uint2 scales_of(int block) const {
    if constexpr (!kFp8) return {};
    return load_8(scales + (kBlockRows + block * kColumns + lane % 4 * 2) * 4);
  }

  // Two blocks of columns to token `to` of the staging.
  __device__ __forceinline__ void put(Factors const& f, float const* sums, uint2 first, uint2 second,
                                      int to) const {
    float const of[4] = {__uint_as_float(first.x), __uint_as_float(first.y), __uint_as_float(second.x),
                         __uint_as_float(second.y)};
    uint32_t pairs[4];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float values[2];
#pragma unroll
        for (int t = 0; t < 2; ++t)
          values[t] = fmaf(sums[(4 * i + 2 * half + t) ^ kOtherBank] * f.alpha[half],
                           kFp8 ? of[2 * i + t] : 1.f, f.bias[half]);
        pairs[2 * i + half] = pack(values[0], values[1], Out{});
      }
    }
    int const t = lane / 16 * 8 + lane % 8, unit = warp * 2 + lane / 8 % 2;
    store_matrices_transposed(staging + (to + t) * kTokenBytes + (unit ^ lane % 8) * 16, pairs);
  }

  // `kBlocks` blocks of columns, of which `count` are wanted and the first is block `j` of the tile, to block `to`.
  template <int kBlocks>
  __device__ void part(Factors const& f, float const (&sums)[kBlocks * 4], int j, int to, int count) const {
#pragma unroll
    for (int i = 0; i < kBlocks; i += 2) {
      if (i < count) put(f, sums + 4 * i, scales_of(j + i), scales_of(j + i + 1), (to + i) * kColumns);
    }
  }

  // `count` tokens of the staging, which are tokens from `first` on. TMA takes them while the next tile begins.
  template <int kMost>
  __device__ void write(int first, int count) const {
    writes_for_copies();
    sync_threads(1 + warpgroup, 128);
    if (lane == 0 && row < p.n) {
#pragma unroll
      for (int i = 0; i < (kMost / kColumns + 3) / 4; ++i) {
        int const t = (i * 4 + warp) * kColumns;
        if (t < count && first + t < p.m) store_box(&p.out_map, row, first + t, staging + t * kTokenBytes);
      }
      stores_commit();
    }
  }

  __device__ void tile(float const (&sums)[Tile::kTokens / 2], Corner corner) const {
    constexpr int kTokens = Tile::kTokens, kAtOnce = Tile::kOutTokens;
#pragma unroll
    for (int from = 0; from < kTokens; from += kAtOnce) {
      Factors const f = begin();
      uint2 of[kAtOnce / kColumns];
#pragma unroll
      for (int i = 0; i < kAtOnce / kColumns; ++i) of[i] = scales_of(from / kColumns + i);
#pragma unroll
      for (int t = 0; t < kAtOnce && from + t < kTokens; t += 2 * kColumns)
        put(f, sums + (from + t) / 2, of[t / kColumns], of[t / kColumns + 1], t);
      write<kAtOnce>(corner.token + from, min(kAtOnce, kTokens - from));
    }
  }

  // Before the CTA ends: its shared memory has been read.
  __device__ void finish() const { stores_have_read(); }
};

// What a warp writes where tokens are operand A: 16 tokens, by itself. Sums have been scaled.
template <class Tile>
struct OutputByToken {
  static constexpr int kColumns = kPieceColumns;  // of the output, at a time
  Params<typename Tile::Weights> const& p;
  int warpgroup, warp, lane;
  uint32_t staging;           // in shared memory, of the warpgroup
  int token = 0, column = 0;  // first of the warp

  __device__ OutputByToken(Params<typename Tile::Weights> const& p, int warpgroup, int warp, int lane,
                           uint32_t base)
      : p(p),
        warpgroup(warpgroup),
        warp(warp),
        lane(lane),
        staging(base + Tile::kOutAt + warpgroup * 4 * kPieceBytes) {}

  struct Factors {};

  __device__ void start(Corner corner) {
    token = corner.token + warpgroup * 64 + warp * 16, column = corner.row_block * kBlockRows;
  }
  __device__ int blocks(Corner) const { return (p.n - column + 7) / 8; }

  __device__ void tile(float const (&sums)[Tile::kTokens / 2], Corner) const {
    constexpr int kSums = kColumns / 2;
#pragma unroll
    for (int j = 0; j < Tile::kTokens / kColumns; ++j) {
      float some[kSums];
#pragma unroll
      for (int v = 0; v < kSums; ++v) some[v] = sums[j * kSums + v];
      piece(some, column + j * kColumns, kColumns);
    }
  }
  __device__ Factors begin() const { return {}; }
  template <int kBlocks>
  __device__ void part(Factors, float const (&sums)[kBlocks * 4], int j, int, int count) const {
    piece(sums, column + j * 8, count * 8);
  }
  template <int>
  __device__ void write(int, int) const {}
  __device__ void finish() const {}

  // Columns from `first` on: sums as the loop leaves them, `count` columns of them wanted.
  template <int kSums>
  __device__ void piece(float const (&sums)[kSums], int first, int count) const {
    constexpr int kUnits = kSums / 4;  // of 8 columns
    constexpr int kPitch = kUnits * 16 + 16;
    uint32_t const to = staging + warp * kPieceBytes;
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
  constexpr int kAtOnce = kMost >= 4 ? 4 : kMost >= 2 ? 2 : 1;
  constexpr int kBatch = std::min(kAtOnce, split >= 8 ? 1 : split >= 3 ? 2 : 4);  // about 8 loads under way
  static_assert(Tile::Weights::kTokensAreA || (kMost + 1) / 2 * 16 <= Tile::kOutTokens);
  static_assert(kAtOnce % kBatch == 0);
  uint32_t const own =
      sums_at + output.warpgroup * kBlocks * 128 * 16 + (output.warp * 32 + output.lane) * 16;
  uint32_t parts[split];
#pragma unroll
  for (int i = 0; i < split; ++i) parts[i] = address_in(own, place.with_split(p, i));
  int const blocks = min(kBlocks, output.blocks(corner)), end = blocks * (place.split + 1) / split,
            start = blocks * place.split / split;
  auto const factors = output.begin();
#pragma unroll 1
  for (int j = start; j < end; j += kAtOnce) {
    constexpr int kTotals = std::max(kAtOnce, 2);
    float total[kTotals * 4] = {};
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
    output.template part<kTotals>(factors, total, j, j - start, min(kAtOnce, end - j));
  }
  output.template write<(kMost + 1) / 2 * 16>(corner.token + start * 8, (end - start) * 8);
}

}  // namespace fp4d
