// The end of few_tokens/kernel.h: sums of all groups of warps of a cluster, added by the CTA that owns the rows.
#pragma once

#include "few_tokens/tile.h"

namespace fp4d {

// Of one CTA, which owns rows / cluster of them.
template <class Tile>
struct Reduction {
  static constexpr int kThreads = Tile::kConsumerThreads, kQuads = Tile::kRows / 4;
  uint32_t sums, barrier;  // in shared memory
  int cluster_log2;

  __device__ int owned() const { return Tile::kRows >> cluster_log2; }
  __device__ int pitch() const { return owned() + Tile::kPadRows; }  // of a token, in floats
  __device__ uint32_t source(int i) const { return sums + i * (4 * Tile::kTokens) * pitch(); }
  __device__ int quads() const { return kQuads >> cluster_log2; }
  __device__ int sources() const { return Tile::kGroups << cluster_log2; }
  __device__ uint32_t expected() const { return (4 * Tile::kTokens * Tile::kGroups) * Tile::kRows; }

  __device__ void init() const {
    barrier_init(barrier, 1);
    if (cluster_log2 > 0) barrier_arrive_expect(barrier, expected());
  }

  // Sends a warp's sums to the owners of their rows. `from` counts the groups of all CTAs of the cluster.
  __device__ void put(Sums<Tile> const& values, int from, int warp, int lane) const {
#pragma unroll
    for (int u = 0; u < Tile::kUnits; ++u) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {  // rows 0..7 and 8..15 of the unit
        int const first = (warp * Tile::kUnits + u) * 16 + half * 8, owner = first / owned();
        uint32_t const here = source(from) + 4 * (first % owned() + lane / 4 + lane % 4 * 2 * pitch());
        uint32_t const to = cluster_log2 > 0 ? address_in(here, owner) : here;
        uint32_t const tells = cluster_log2 > 0 ? address_in(barrier, owner) : 0;
#pragma unroll
        for (int t = 0; t < Tile::kTokens; ++t) {
          if (t % 8 > 1) continue;
          float const value = values[4 * (u * (Tile::kTokens / 8) + t / 8) + 2 * half + t % 8];
          if (cluster_log2 > 0) {
            send(to + 4 * t * pitch(), value, tells);
          } else {
            store_4(to + 4 * t * pitch(), value);
          }
        }
      }
    }
  }

  __device__ float4 get(int token, int quad) const {
    float4 sum{};
    for (int i = 0; i < sources(); ++i) {
      uint4 const raw = load_16(source(i) + 4 * (token * pitch() + 4 * quad));
      sum.x += __uint_as_float(raw.x), sum.y += __uint_as_float(raw.y);
      sum.z += __uint_as_float(raw.z), sum.w += __uint_as_float(raw.w);
    }
    return sum;
  }
};

// Scales of the packed tokens that a thread finishes, on their way before its sums are there.
template <class Tile>
struct TokenScales {
  static constexpr int kMost =
      std::max(1, Tile::kTokens* Reduction<Tile>::kQuads / Reduction<Tile>::kThreads);
  using Weights = typename Tile::Weights;
  static constexpr bool kScaled =
      Weights::kPacked && !Weights::kBlocks;  // blocks are scaled where they are added
  float scales[kMost] = {};

  __device__ TokenScales(Params<Weights> const& p, int token, int tokens, int first, int each) {
    if constexpr (kScaled) {
#pragma unroll
      for (int i = 0; i < kMost; ++i)
        if (first + i * each < tokens)
          scales[i] = p.x_scale[int64_t(token + first + i * each) * p.x_scale_step];
    }
  }
  // No index at run time: the array stays in registers.
  __device__ float of(int i) const {
    float scale = 1.f;
#pragma unroll
    for (int j = 0; j < kMost && kScaled; ++j) scale = i == j ? scales[j] : scale;
    return scale;
  }
};

// Four rows that a thread finishes, with their alpha and bias.
template <class Weights>
struct Quad {
  int row;  // of the output; at least n: nothing to do
  float alpha[4] = {}, bias[4] = {};

  __device__ Quad(Params<Weights> const& p, int first) : row(first) {
    if (row >= p.n) return;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      alpha[i] = Weights::kBlocks ? 1.f : p.alpha[int64_t(row + i) * p.alpha_step] * Weights::kUnscale;
      if (p.bias != nullptr) bias[i] = float(p.bias[row + i]);
    }
  }

  __device__ void store(Params<Weights> const& p, int token, float4 sum, float scale) const {
    float const sums[4] = {sum.x, sum.y, sum.z, sum.w};
    uint16_t bits[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      Element const value(fmaf(Weights::kPacked ? sums[i] * scale : sums[i], alpha[i], bias[i]));
      bits[i] = reinterpret_cast<uint16_t const&>(value);
    }
    *reinterpret_cast<uint2*>(p.out + int64_t(token) * p.n + row) =
        make_uint2(bits[0] | bits[1] << 16, bits[2] | bits[3] << 16);
  }
};

}  // namespace fp4d
