// The end of few_tokens/kernel.h: sums of all groups of warps of a cluster, added by the CTA that owns the rows.
#pragma once

#include "common/sm90.h"
#include "few_tokens/tile.h"

namespace fp4d {

// A CTA first adds the sums of its own groups of warps. In a cluster it then sends, four rows at a time, what it has to
// the CTA that owns the rows: an even part of the quads of rows, the parts in the order of the CTAs.
template <class Tile>
struct Reduction {
  static constexpr int kThreads = Tile::kConsumerThreads, kQuads = Tile::kQuads;
  uint32_t factors, barrier;  // in shared memory: alpha and bias, behind them sums
  int cluster, inverse, rank, slots_log2, tokens;

  __device__ uint32_t sums() const { return factors + Tile::kFactorBytes; }

  // The first quad of a CTA; of the last one plus one, kQuads. The product is exact for up to 8 CTAs.
  __device__ int first_of(int cta) const { return kQuads * cta * inverse >> 16; }
  // Of this CTA, the quad in a slot, if there is one: at least first_of(rank + 1) otherwise.
  __device__ int quad_in(int slot) const {
    int const first = first_of(rank);
    return first + ((slot - first) & ((1 << slots_log2) - 1));
  }

  __device__ void init() const {
    barrier_init(barrier, 1);
    int const quads = first_of(rank + 1) - first_of(rank);
    if (cluster > 1) barrier_arrive_expect(barrier, cluster * tokens * quads * 16);
  }

  // Stores a warp's sums beside those of the other groups.
  __device__ void put(Sums<Tile> const& values, int group, int warp, int lane) const {
    constexpr int kPitch = 4 * Tile::kPitch;  // bytes
    uint32_t const at = sums() + (group * Tile::kTokens + lane % 4 * 2) * kPitch + lane / 4 * 4;
#pragma unroll
    for (int u = 0; u < Tile::kUnits; ++u) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {  // rows 0..7 and 8..15 of the unit
        uint32_t const rows = at + ((warp * Tile::kUnits + u) * 16 + half * 8) * 4;
#pragma unroll
        for (int t = 0; t < Tile::kTokens; ++t) {
          if (t % 8 > 1) continue;
          store_4(rows + t * kPitch, values[4 * (u * (Tile::kTokens / 8) + t / 8) + 2 * half + t % 8]);
        }
      }
    }
  }

  // Of all groups of this CTA.
  __device__ float4 own(int token, int quad) const {
    return add<Tile::kGroups>(sums() + (token * Tile::kPitch + quad * 4) * 4,
                              4 * Tile::kTokens * Tile::kPitch);
  }

  // Sends this CTA's sums to the owners of the rows, its own part to itself.
  __device__ void send_all() const {
#pragma unroll 4
    for (int item = threadIdx.x; item < tokens * kQuads; item += kThreads) {
      int const token = item / kQuads, quad = item % kQuads, owner = ((quad + 1) * cluster - 1) / kQuads;
      uint32_t const to = received(rank) + (((token << slots_log2) + (quad & ((1 << slots_log2) - 1))) << 4);
      send_16(address_in(to, owner), own(token, quad), address_in(barrier, owner));
    }
  }

  // What all CTAs have sent.
  __device__ float4 sent(int token, int slot) const {
    uint32_t at = received(0) + (((token << slots_log2) + slot) << 4);
    float4 sum{};
    for (int i = 0; i < cluster; ++i, at += received_bytes()) add(sum, at);
    return sum;
  }

 private:
  __device__ int received_bytes() const { return Tile::kTokens * 16 << slots_log2; }
  __device__ uint32_t received(int cta) const { return sums() + Tile::kSumBytes + cta * received_bytes(); }

  __device__ static void add(float4& sum, uint32_t at) {
    uint4 const raw = load_16(at);
    sum.x += __uint_as_float(raw.x), sum.y += __uint_as_float(raw.y);
    sum.z += __uint_as_float(raw.z), sum.w += __uint_as_float(raw.w);
  }
  template <int count>
  __device__ static float4 add(uint32_t at, int step) {
    float4 sum{};
#pragma unroll
    for (int i = 0; i < count; ++i) add(sum, at + i * step);
    return sum;
  }
};

// Scales of the packed tokens that a thread finishes, on their way before its sums are there.
template <class Tile>
struct TokenScales {
  static constexpr int kMost =
      (Tile::kTokens * Tile::kQuads + Tile::kConsumerThreads - 1) / Tile::kConsumerThreads;
  using Weights = typename Tile::Weights;
  static constexpr bool kScaled =
      Weights::kPacked && !Weights::kBlocks;  // blocks are scaled where they are added
  float of[kMost] = {};

  __device__ TokenScales(Params<Weights> const& p, int token, int tokens, int first, int each) {
    if constexpr (kScaled) {
#pragma unroll
      for (int i = 0; i < kMost; ++i)
        if (first + i * each < tokens) of[i] = p.x_scale[int64_t(token + first + i * each) * p.x_scale_step];
    }
  }
};

// Alpha and bias of one row, that of a thread of the consumers: asked for while they wait for tokens, and in shared memory
// for all when sums are there.
template <class Tile>
struct RowFactors {
  using Weights = typename Tile::Weights;
  static_assert(Tile::kRows <= Tile::kConsumerThreads);
  float alpha = 1.f;
  Element bias = Element(0.f);

  __device__ RowFactors(Params<Weights> const& p, int first) {
    int const row = first + int(threadIdx.x);
    if (threadIdx.x >= Tile::kRows || row >= p.n) return;
    if (!Weights::kBlocks)
      alpha = p.alpha[int64_t(row) * p.alpha_step];  // blocks are scaled where they are added
    if (p.bias != nullptr) bias = p.bias[row];
  }
  __device__ void put(uint32_t at) const {
    if (threadIdx.x >= Tile::kRows) return;
    store_4(at + threadIdx.x * 4, Weights::kBlocks ? alpha : alpha * Weights::kUnscale);
    store_4(at + (Tile::kRows + threadIdx.x) * 4, float(bias));
  }
};

// Four rows that a thread finishes, `first` of the CTA's.
template <class Tile>
struct Quad {
  float4 alpha, bias;

  __device__ Quad(uint32_t factors, int first) {
    uint4 const a = load_16(factors + first * 4), b = load_16(factors + (Tile::kRows + first) * 4);
    alpha = {__uint_as_float(a.x), __uint_as_float(a.y), __uint_as_float(a.z), __uint_as_float(a.w)};
    bias = {__uint_as_float(b.x), __uint_as_float(b.y), __uint_as_float(b.z), __uint_as_float(b.w)};
  }

  // `scale`: of the token, where it has one.
  __device__ void store(Element* to, float4 sum, float scale) const {
    if (TokenScales<Tile>::kScaled) sum.x *= scale, sum.y *= scale, sum.z *= scale, sum.w *= scale;
    *reinterpret_cast<uint2*>(to) =
        make_uint2(pack(fmaf(sum.x, alpha.x, bias.x), fmaf(sum.y, alpha.y, bias.y), Element()),
                   pack(fmaf(sum.z, alpha.z, bias.z), fmaf(sum.w, alpha.w, bias.w), Element()));
  }
};

}  // namespace fp4d
