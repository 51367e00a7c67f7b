// Producers of many_tokens.h: one thread for the activations, two for the weights.
#pragma once

#include "many_tokens_tile.h"
#include FP4D_WEIGHT_COPIES

namespace fp4d {

// This CTA's share of the activations, to all that have the same tokens; each expects all of them.
template <class Tile>
struct TokenCopies {
  Params const& p;
  Place const& place;
  Ring<Tile> ring;
  uint8_t const* from = nullptr;
  uint32_t all = 0, mine = 0, skip = 0;  // bytes

  __device__ void start(Corner corner, int in_tile) {
    int const tokens = max(0, min(Tile::kTokens, p.token_blocks * 8 - corner.token));
    int const share = Tile::kTokens >> p.multicast_log2;
    all = tokens * 128, skip = place.multicast * share * 128;
    mine = max(0, min(share, tokens - place.multicast * share)) * 128;
    from = p.x + (int64_t(place.first + in_tile) * p.token_blocks * 8 + corner.token) * 128 + skip;
  }
  __device__ void copy(int, int slot) {
    uint32_t const full = ring.full(slot), to = ring.tokens(slot) + skip;
    barrier_arrive_expect(full, all);
    if (mine > 0) {
      if (p.multicast_log2 == 0) {
        copy_bulk(to, from, mine, full);
      } else {
        uint32_t const ctas = (1 << (1 << p.multicast_log2)) - 1;
        copy_bulk_multicast(to, from, mine, full, ctas << place.with_multicast(p, 0));
      }
    }
    from += int64_t(p.token_blocks) * 1024;
  }
};

// Stages from number `from` to before `to`, counted over all tiles of this CTA.
template <class Tile, class Copies>
__device__ __forceinline__ void copy_stages(Copies& copies, int from, int to) {
  if (from >= to) return;
  Params const& p = copies.p;
  Place const& place = copies.place;
  int in_tile = from % place.count, tile = place.cluster + from / place.count * p.clusters;
  Position<Tile> at{from % Tile::kStages, uint32_t(from / Tile::kStages) & 1};
  copies.start(corner_of<Tile>(p, place, tile), in_tile);
#pragma unroll 1
  for (int i = from; i < to; ++i) {
    if (i >= Tile::kStages) barrier_wait(copies.ring.empty(at.slot), at.parity ^ 1);
    copies.copy(place.first + in_tile, at.slot);
    at.advance();
    if (++in_tile == place.count && i + 1 < to) {
      in_tile = 0;
      tile += p.clusters;
      copies.start(corner_of<Tile>(p, place, tile), 0);
    }
  }
}

// One thread of each producer warp: the first copies activations.
template <class Tile>
__device__ __forceinline__ void produce(Params const& p, Place const& place, Ring<Tile> ring, int warp,
                                        bool clustered) {
  int const tiles = p.row_tiles * p.token_tiles;
  int const mine = place.cluster < tiles ? (tiles - 1 - place.cluster) / p.clusters + 1 : 0;
  int const all = mine * place.count, ahead = min(all, Tile::kStages);
  if (warp == 0) {
    if (clustered) cluster_wait_acquire();
    grid_dependency_wait();
    TokenCopies<Tile> tokens{p, place, ring};
    copy_stages<Tile>(tokens, 0, all);
  } else {
    WeightCopies<Tile> weights{p, place, ring, (warp - 1) * WeightCopies<Tile>::kWarpgroups};
    bool const copies = warp <= kWeightThreads, to_others = p.sharing_log2 > 0;
    if (to_others) cluster_wait_acquire();
    copy_stages<Tile>(weights, 0, copies ? ahead : 0);  // before the previous grid has finished
    if (clustered && !to_others) cluster_wait_acquire();
    grid_dependency_wait();
    copy_stages<Tile>(weights, ahead, copies ? all : 0);
  }
}

}  // namespace fp4d
