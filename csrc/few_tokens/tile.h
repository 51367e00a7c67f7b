// What the parts of few_tokens/kernel.h share: its arguments, its tile, a ring of stages. All are templates over
// `Weights`, the format of the weights (few_tokens/w4/w4a16_weights.h and so on).
#pragma once

#include <algorithm>
#include <cstdint>

#include "common/async_copy.h"
#include "weights/early_loads.h"
#include "few_tokens/element.h"
#include "common/gdc_guard.h"

#include <cuda.h>

namespace fp4d {

template <class Weights>
struct Params {
  typename Weights::Source w;
  typename Weights::Activation const* x;
  float const *x_scale, *alpha;  // x_scale: of packed tokens
  Element const* bias;
  Element* out;
  int64_t x_stride;
  int token_blocks, x_scale_step;  // packed tokens: of 8 tokens; 0: one scale
  int m, n, k;
  int row_blocks, chunks;  // of w
  int alpha_step;          // 0: one alpha
  int cluster, stages, trigger;
  int slots_log2, inverse;                                       // of cluster: Reduction of few_tokens/sums.h
  std::conditional_t<Weights::kPacked, int, CUtensorMap> x_map;  // of x, in boxes of a tile's tokens by 64 k
};

// 0, which the compiler does not know: a mask that leaves nothing of a value, but waits for it.
template <class Weights>
__device__ __forceinline__ uint32_t unknown_zero(Params<Weights> const& p) {
  return uint32_t(p.cluster) >> 8;
}

// Whether Params lie as kernels.toml declares to the proof.
template <class P>
constexpr bool lies_as_declared() {
#if defined(FP4D_NUMBERS_FIRST)  // all from x_stride on
  if (sizeof(P::w) != kWeightsBytes || offsetof(P, x_stride) != kNumbersAt ||
      offsetof(P, inverse) + 4 != kNumbersEnd)
    return false;
#endif
  return offsetof(P, w) == kWeightsAt;
}

// T tokens, RB row blocks, KG groups. U: units of 16 rows of a consumer warp. With 2 or 4 it multiplies by mma.sync,
// with 1 the four warps of a row block multiply together by wgmma (few_tokens/w4/w4a16_wgmma.h,
// few_tokens/w4/w4a8_wgmma.h).
template <int T, int RB, int KG, int U, class W>
struct Tile {
  using Weights = W;
  static constexpr int kStageChunks = W::kStageChunks, kStageK = kStageChunks * W::kChunkK;
  // A lane takes 16 k of each of its rows in a step: a warp 64.
  static constexpr int kSteps = 2;
  static_assert(kStageK == 64 * kSteps);
  static_assert((RB & (RB - 1)) == 0 && (KG & (KG - 1)) == 0 && (U == 1 || U == 2 || U == 4));
  static constexpr int kTokens = T, kRowBlocks = RB, kGroups = KG, kUnits = U;
  static constexpr bool kWgmma = U == 1;
  static constexpr int kRows = RB * Weights::kRows;
  static constexpr int kBlockWarps = Weights::kUnits / U;  // warps that share a row block
  static constexpr int kConsumers = RB * kBlockWarps;      // warps of a group
  static constexpr int kConsumerThreads = 32 * KG * kConsumers;
  static_assert(kWgmma || !Weights::kPacked);
  // 16-bit tokens that wgmma reads come by TMA, in boxes of 64 k.
  static constexpr bool kBoxes = kWgmma && !Weights::kPacked;
  static constexpr int kThreads = kConsumerThreads + 32 * KG;               // a producer warp for each group
  static constexpr int kWeightBytes = kStageChunks * Weights::kChunkBytes;  // of a row block in a stage
  // Pitch of a token in a stage. The 16 bytes more keep 8 lanes that read two tokens off each other's banks.
  static constexpr int kTokenPitch = kStageK * 2 + 16;
  static constexpr int kTokenBytes =
      (T * (kWgmma ? kStageK * int(sizeof(typename W::Activation)) + (Weights::kBlocks ? 4 : 0)
                   : kTokenPitch) +
       Weights::kAlign - 1) /
      Weights::kAlign * Weights::kAlign;
  static constexpr int kStageAlign = kWgmma ? 1024 : Weights::kAlign;
  static constexpr int kStageBytes =
      (RB * kWeightBytes + kTokenBytes + kStageAlign - 1) / kStageAlign * kStageAlign;
  static constexpr int kBarrierBytes =
      kStageAlign == 1024 ? 1024 : 512;                     // of shared memory, before everything else
  static constexpr int kMaxSlots = kBarrierBytes / 16 - 1;  // stages of all rings together
  static constexpr int kRingsAt = kBarrierBytes + Weights::kTableBytes;
  static constexpr int kFewestStages = kWgmma ? 2 : 1;  // wgmma still reads a stage when the next one begins
  // fp32: alpha and bias of the rows; sums of the groups, [group][token][row]; those that the CTAs of the cluster
  // send, [CTA][token][slot of four rows]. The 4 floats more keep tokens two apart 8 banks apart. With many tokens all
  // this takes the place of the ring.
  static constexpr int kPitch = kRows + 4, kQuads = kRows / 4;
  static constexpr bool kReuse = T >= Weights::kReuseTokens;
  static constexpr int kFactorBytes = 8 * kRows, kSumBytes = 4 * KG * T * kPitch;
  // Slots for the quads of rows that a CTA of a cluster owns: a power of two, so that no division finds them.
  static constexpr int slots_log2(int cluster) {
    int log2 = 0;
    while ((1 << log2) * cluster < kQuads) ++log2;
    return log2;
  }
  static constexpr int received_bytes(int cluster) {
    return cluster == 1 ? 0 : cluster * T * 16 << slots_log2(cluster);
  }
  static constexpr int ring_bytes(int stages) { return KG * stages * kStageBytes; }
  static int shared_bytes(int cluster, int stages) {
    int const ring = ring_bytes(stages), sums = kFactorBytes + kSumBytes + received_bytes(cluster);
    return kRingsAt + (kReuse ? std::max(ring, sums) : ring + sums);
  }
  // About what the compiler takes.
  static constexpr int kRegisters = Weights::registers(T, U);
  // For the compiler, which counts whole warpgroups: two CTAs an SM, so that the next grid's loads start under this
  // one, where the registers allow it. And what really fits, for the ring.
  static constexpr int kCtas = 65536 / ((kThreads + 127) / 128 * 128 * kRegisters) >= 2 ? 2 : 1;
  static constexpr int kResident = 65536 / (kThreads * kRegisters) >= 2 ? 2 : 1;
};

// ---- Ring ----

// The part of K that one group of warps adds up, in stages.
struct Range {
  int first, count;
};

// Of a group of this CTA.
template <class Tile>
__device__ __forceinline__ Range range_of(Params<typename Tile::Weights> const& p, int group) {
  int const stages = (p.chunks + Tile::kStageChunks - 1) / Tile::kStageChunks;
  int const part = blockIdx.x * Tile::kGroups + group, parts = p.cluster * Tile::kGroups;
  int const first = stages * part / parts, last = stages * (part + 1) / parts;
  return {first, last - first};
}

template <class Tile>
struct Ring {
  uint32_t barriers, stages_at;  // of this group, in shared memory
  int stages;

  __device__ uint32_t full(int slot) const { return barriers + slot * 16; }
  __device__ uint32_t empty(int slot) const { return barriers + slot * 16 + 8; }
  __device__ uint32_t tokens(int slot) const { return stages_at + slot * Tile::kStageBytes; }
  // In blocks, of the stage's tokens, behind them.
  __device__ uint32_t scales(int slot) const { return tokens(slot) + Tile::kTokens * Tile::kStageK; }
  __device__ uint32_t weights(int slot, int row_block) const {
    return tokens(slot) + Tile::kTokenBytes + row_block * Tile::kWeightBytes;
  }

  // One arrival for the weights and one for each lane's tokens, or for all; one of each consumer warp that has rows.
  __device__ void init(int row_blocks) const {
#pragma unroll 1
    for (int slot = 0; slot < stages; ++slot) {
      barrier_init(full(slot), 1 + (Tile::kWgmma ? 1 : 32));
      barrier_init(empty(slot), row_blocks * Tile::kBlockWarps);
    }
  }
};

// ---- Sums ----

// [unit][8 tokens][row c0, c1; row + 8: c2, c3]
template <class Tile>
using Sums = float[Tile::kUnits * Tile::kTokens / 2];

}  // namespace fp4d
