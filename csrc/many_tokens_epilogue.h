// The end of a tile of many_tokens.h: sums to the output, and the sums of a split of K added up.
#pragma once

#include "many_tokens_tile.h"

namespace fp4d {

// What a warpgroup writes: 64 rows of the weight, which are columns of the output.
constexpr bool kScaledTokens =
    kFp8 && !Weights::kBlocks;  // at the end; blocks are scaled where they are added

template <class Tile>
struct Output {
  Params const& p;
  int warpgroup, warp, lane;
  uint32_t staging;  // in shared memory
  int row = 0;       // first of the warpgroup
  float alpha[2] = {}, bias[2] = {};
  int buffer = 0;

  __device__ void start(int row_block) {
    row = (row_block + warpgroup) * kBlockRows;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      int const mine = row + warp * 16 + half * 8 + lane / 4;
      alpha[half] = Weights::kBlocks ? 1.f
                    : mine < p.n     ? p.alpha[int64_t(mine) * p.alpha_step] * Weights::kFactor
                                     : 0.f;
      bias[half] = p.bias != nullptr && mine < p.n ? float(p.bias[mine]) : 0.f;
    }
  }

  // Of token `token` + lane.
  __device__ float token_scale(int token) const {
    if (!kScaledTokens || lane >= Tile::kPieceTokens || token + lane >= p.m) return 0.f;
    return p.x_scale[int64_t(token + lane) * p.x_scale_step];
  }

  // A piece from `token` on: sums as wgmma leaves them, `count` tokens of them wanted.
  __device__ void piece(float const (&sums)[Tile::kPieceTokens / 2], float scale, int token, int count) {
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
        for (int t = 0; t < 2 && kScaledTokens; ++t)
          scales[t] = __shfl_sync(~0u, scale, (j + i) * 8 + lane % 4 * 2 + t);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          float values[2];
#pragma unroll
          for (int t = 0; t < 2; ++t)
            values[t] = fmaf(sums[4 * (j + i) + 2 * half + t] * alpha[half], scales[t], bias[half]);
          pairs[2 * i + half] = pack(values[0], values[1], Out{});
        }
      }
      store_matrices_transposed(mine + j * 8 * Tile::kPitch, pairs);
    }
    sync_threads(1 + warpgroup, 128);
#pragma unroll
    for (int i = 0; i < Tile::kPieceTokens * 8 / 128; ++i) {
      int const unit = i * 128 + warp * 32 + lane, t = unit / 8, column = row + unit % 8 * 8;
      if (t < count && token + t < p.m && column < p.n) {
        *reinterpret_cast<uint4*>(p.out + int64_t(token + t) * p.n + column) =
            load_16(to + t * Tile::kPitch + unit % 8 * 16);
      }
    }
    buffer ^= 1;
  }
};

// Adds the parts of K in their order; this CTA does about 1 / split of the tokens. Sums lie in shared memory as threads
// hold them: [warpgroup][8 tokens][thread][4].
template <class Tile, int split>
__device__ __forceinline__ void add_and_store(Params const& p, Place const& place, uint32_t sums_at,
                                              Output<Tile>& output, int token) {
  constexpr int kBlocks = Tile::kTokens / 8, kMost = (kBlocks + split - 1) / split;  // of 8 tokens
  constexpr int kAtOnce = std::min(kMost >= 4 ? 4 : kMost >= 2 ? 2 : 1, Tile::kPieceTokens / 8);
  constexpr int kBatch = std::min(kAtOnce, split >= 8 ? 1 : split >= 3 ? 2 : 4);  // about 8 loads under way
  static_assert(kAtOnce % kBatch == 0);
  uint32_t const own =
      sums_at + output.warpgroup * kBlocks * 128 * 16 + (output.warp * 32 + output.lane) * 16;
  uint32_t parts[split];
#pragma unroll
  for (int i = 0; i < split; ++i) parts[i] = address_in(own, place.with_split(p, i));
  int const blocks = min(kBlocks, (p.m - token + 7) / 8), end = blocks * (place.split + 1) / split;
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
    output.piece(total, output.token_scale(token + j * 8), token + j * 8, min(kAtOnce, end - j) * 8);
  }
}

}  // namespace fp4d
