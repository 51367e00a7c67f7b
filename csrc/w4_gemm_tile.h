// What the parts of w4_gemm_sm90.h share: its arguments, its tile, the ring of stages, places in a cluster.
#pragma once

#include <algorithm>

#include "gdc_guard.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include "async_copy.h"
#include "w4_dequant.h"
#include "w4_sm90.h"
#include "w4_to_fp8.h"
#include "w4_wgmma.h"

namespace fp4d {

#if FP4D_OUT == 0
using Out = __nv_bfloat16;
#else
using Out = __half;
#endif

// What activations are; 16-bit ones have the type of the output.
constexpr bool kFp8 = FP4D_ACT == 8;
constexpr Operand kOperand = kFp8 ? Operand::kE4M3 : FP4D_OUT == 0 ? Operand::kBF16 : Operand::kF16;
// What the dequantised weights must be multiplied by.
constexpr float kWeightFactor = kFp8 ? 8.f : w4::Dequant<Out>::kUnscale;

struct Params {
  uint8_t const *x, *w;
  float const *x_scale, *alpha;
  Out const* bias;
  Out* out;
  int m, n;
  int token_blocks;              // of 8 tokens in x
  int row_blocks, chunks;        // of w
  int stages;                    // along K
  int x_scale_step, alpha_step;  // 0: one for all
  int multicast_log2, split;     // CTAs of a cluster
  int row_tiles, token_tiles;    // clusters that cover N, and M
  int raster;                    // token tiles that are done before the next rows
  int clusters;                  // of the grid
};

template <int T>
struct Tile {
  static constexpr int kTokens = T;
  static constexpr int kConsumers = kFp8 || T == 256 ? 2 : 4;  // warpgroups
  static constexpr int kCtas =
      kFp8 && T <= 64 ? 2 : 1;  // of a multiprocessor: one's ends hide under the other
  static constexpr int kThreads = 128 * (1 + kConsumers);
  static constexpr int kRows = 64 * kConsumers;
  static constexpr int kMostSplit = T == 32 ? 4 : 8;  // each part of K adds up 8 tokens at least
  // 65536 registers, shared out evenly at the start; the producer gives its up.
  static constexpr int kProducerRegisters = kConsumers == 2 && kCtas == 1 ? 40 : 32;
  static constexpr int kConsumerRegisters = kCtas == 2 ? 104 : kConsumers == 2 ? 232 : 112;
  // 256 k. Sums of one sign end up 0.18 % low, measured on an H200; after 512 k 0.51 %, for 1 % of speed.
  static constexpr int kPromoteStages = 2;

  static constexpr int kStageChunks = kFp8 ? 2 : 1;  // a stage is 128 bytes of activations along K
  static constexpr int kTokenBytes = T * 128;
  static constexpr int kBlockBytes = kStageChunks * w4::kChunkBytes;  // weights of a warpgroup in a stage
  static constexpr int kWeightBytes = kConsumers * kBlockBytes;

  // Where a warpgroup turns 32 tokens of its output, twice. 16 bytes more a token keep 8 tokens off each other's banks.
  static constexpr int kPieceTokens = 32, kPitch = 64 * sizeof(Out) + 16, kPieceBytes = kPieceTokens * kPitch;
  static constexpr int kPieces = T / kPieceTokens;
  static constexpr int kOutBytes = kConsumers * 2 * kPieceBytes;

  static constexpr int kLutBytes = kFp8 ? w4::kLutTableBytes : 0;

  static constexpr int kBarrierBytes = 128, kMaxShared = kCtas == 2 ? 115712 : 232448;
  // Tokens, then weights; the next stage's tokens at a multiple of 1024.
  static constexpr int kStageBytes = (kTokenBytes + kWeightBytes + 1023) / 1024 * 1024;
  static constexpr int kStages =
      std::min(8, (kMaxShared - kOutBytes - kLutBytes - kBarrierBytes) / kStageBytes);
  static constexpr int kOutAt = kStages * kStageBytes, kLutAt = kOutAt + kOutBytes,
                       kBarriersAt = kLutAt + kLutBytes, kShared = kBarriersAt + kBarrierBytes;
  static_assert(kStages >= 4 && kStages * 16 <= kBarrierBytes);
  static_assert(kRows * T * 4 <= kOutAt, "the sums of a split take the place of the ring");
};

constexpr int kWeightThreads = 2;  // that copy weights

template <class Tile>
struct Ring {
  uint32_t base;  // in shared memory

  __device__ uint32_t tokens(int slot) const { return base + slot * Tile::kStageBytes; }
  __device__ uint32_t weights(int slot, int warpgroup) const {
    return tokens(slot) + Tile::kTokenBytes + warpgroup * Tile::kBlockBytes;
  }
  __device__ uint32_t full(int slot) const { return base + Tile::kBarriersAt + slot * 16; }
  __device__ uint32_t empty(int slot) const { return full(slot) + 8; }

  // An arrival with its bytes of each copying thread; one of each consumer warp of each CTA with the same activations.
  __device__ void init(int multicast) const {
    for (int slot = 0; slot < Tile::kStages; ++slot) {
      barrier_init(full(slot), 1 + kWeightThreads);
      barrier_init(empty(slot), multicast * Tile::kConsumers * 4);
    }
  }
};

// Place in the ring.
template <class Tile>
struct Position {
  int slot = 0;
  uint32_t parity = 0;

  __device__ void advance() {
    if (++slot == Tile::kStages) slot = 0, parity ^= 1;
  }
};

// This CTA's place in its cluster and its share of K, in stages.
struct Place {
  int cluster, multicast, split;  // number of the cluster; ranks
  int first, count;

  __device__ explicit Place(Params const& p) {
    int const ctas = p.split << p.multicast_log2, rank = blockIdx.x % ctas;
    cluster = blockIdx.x / ctas;
    multicast = rank & ((1 << p.multicast_log2) - 1);
    split = rank >> p.multicast_log2;
    first = int(int64_t(p.stages) * split / p.split);
    count = int(int64_t(p.stages) * (split + 1) / p.split) - first;
  }
  // Rank in the cluster of a CTA with the same tokens, or the same rows.
  __device__ int with_multicast(Params const& p, int rank) const {
    return (split << p.multicast_log2) + rank;
  }
  __device__ int with_split(Params const& p, int rank) const {
    return (rank << p.multicast_log2) + multicast;
  }
};

// Where a tile begins.
struct Corner {
  int row_block, token;
};

// Tiles in the order in which clusters take them: `raster` token tiles side by side for all rows, then the next ones.
template <class Tile>
__device__ __forceinline__ Corner corner_of(Params const& p, Place const& place, int tile) {
  int const band = tile / (p.row_tiles * p.raster), in_band = tile - band * p.row_tiles * p.raster;
  int const width = min(p.raster, p.token_tiles - band * p.raster), row = in_band / width;
  return {((row << p.multicast_log2) + place.multicast) * Tile::kConsumers,
          (band * p.raster + in_band - row * width) * Tile::kTokens};
}

}  // namespace fp4d
