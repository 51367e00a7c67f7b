// How the producers of many_tokens/kernel.h bring e4m3 weights: a thread a consumer warpgroup. Of CTAs with the same
// rows each copies one warpgroup's block to all of them. Rows and k that are not there come as zeros.
#pragma once

#include "many_tokens/tile.h"

namespace fp4d {

template <class Tile>
struct W8Copies {
  using Weights = typename Tile::Weights;
  static constexpr int kWarpgroups = 1;
  static_assert(Tile::kConsumers == kWeightThreads);
  Params<typename Tile::Weights> const& p;
  Place const& place;
  Ring<Tile> ring;
  int first;  // warpgroup
  int row = 0;

  __device__ void start(Corner corner, int) { row = (corner.row_block + first) * kBlockRows; }

  __device__ void copy(int stage, int slot) {
    uint32_t const full = ring.full(slot), to = ring.weights(slot, first);
    barrier_arrive_expect(full, Tile::kBlockBytes);
    if (p.sharing_log2 == 0) {
      copy_box(to, &p.w.map, stage * Weights::kStageK, row, full);
    } else if ((first & 1) == place.sharing) {
      uint32_t const both = 1u << place.with_sharing(p, 0) | 1u << place.with_sharing(p, 1);
      copy_box_multicast(to, &p.w.map, stage * Weights::kStageK, row, full, both);
    }
  }
};

}  // namespace fp4d
