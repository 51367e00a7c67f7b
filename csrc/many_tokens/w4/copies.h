// How the producers of many_tokens/kernel.h bring NVFP4 weights.
#pragma once

#include "many_tokens/tile.h"
#include "weights/w4_dequant.h"

namespace fp4d {

// Weights of the consumer warpgroups that a thread copies for. A warpgroup beyond the last row block takes that one
// again, and so does the second half of a last stage with one chunk: its activations are zero.
template <class Tile>
struct W4Copies {
  using Weights = typename Tile::Weights;
  static constexpr int kWarpgroups = Tile::kConsumers / kWeightThreads, kBytes = Tile::kBlockBytes;
  Params<typename Tile::Weights> const& p;
  Place const& place;
  Ring<Tile> ring;
  int first;  // warpgroup
  uint8_t const* from[kWarpgroups] = {};

  __device__ void start(Corner corner, int stage) {
#pragma unroll
    for (int i = 0; i < kWarpgroups; ++i) {
      int const block = min(corner.row_block + first + i, p.row_blocks - 1);
      int64_t const chunk = int64_t(block) * p.w.count + stage * Weights::kStageChunks;
      from[i] = p.w.chunks + chunk * w4::kChunkBytes;
    }
  }
  __device__ void copy(int stage, int slot) {
    uint32_t const full = ring.full(slot);
    bool const whole = Weights::kStageChunks == 1 || (stage + 1) * Weights::kStageChunks <= p.w.count;
    barrier_arrive_expect(full, kWarpgroups * kBytes);
#pragma unroll
    for (int i = 0; i < kWarpgroups; ++i) {
      uint32_t const to = ring.weights(slot, first + i);
      copy_bulk_once(to, from[i], whole ? kBytes : w4::kChunkBytes, full);
      if (!whole) copy_bulk_once(to + w4::kChunkBytes, from[i], w4::kChunkBytes, full);
      from[i] += kBytes;
    }
  }
};

}  // namespace fp4d
