// Producers of many_tokens/kernel.h: one thread for the activations, two for the weights.
#pragma once

#include "many_tokens/tile.h"
#include "many_tokens/packed_copies.h"
#include "many_tokens/rows_copies.h"

namespace fp4d {

template <class Tile>
using TokenCopies = std::conditional_t<kFp8, PackedCopies<Tile>, RowsCopies<Tile>>;
template <class Tile>
using WeightCopies = typename Tile::Weights::template Copies<Tile>;

// Where a copying thread is: in the ring, in its CTA's items, in the stages of one.
template <class Tile>
struct Cursor {
  Position<Tile> at = {};
  int done = 0, item = 0, stage = 0,
      left = 0;  // stages over all items; the next item; the next stage, how many are left
};

// Goes on until `to` stages are done.
template <class Tile, class Copies>
__device__ __forceinline__ void copy_stages(Copies& copies, Cursor<Tile>& cursor, int to) {
#pragma unroll 1
  for (; cursor.done < to; ++cursor.done) {
    if (cursor.left == 0) {
      Item const item = item_of<Tile>(copies.p, copies.place, cursor.item++);
      cursor.stage = item.first, cursor.left = item.count;
      copies.start(item.corner, item.first);
    }
    if (cursor.done >= Tile::kStages) barrier_wait(copies.ring.empty(cursor.at.slot), cursor.at.parity ^ 1);
    copies.copy(cursor.stage, cursor.at.slot);
    cursor.at.advance();
    ++cursor.stage, --cursor.left;
  }
}

// One thread of each producer warp: the first copies activations.
template <class Tile>
__device__ __forceinline__ void produce(Params<typename Tile::Weights> const& p, Place const& place,
                                        Ring<Tile> ring, int warp, bool clustered) {
  int const all = place.stages(p), ahead = min(all, Tile::kStages);
  Cursor<Tile> cursor;
  if (warp == 0) {
    if (clustered) cluster_wait_acquire();
    grid_dependency_wait();
    TokenCopies<Tile> tokens{p, place, ring};
    copy_stages<Tile>(tokens, cursor, all);
  } else {
    WeightCopies<Tile> weights{p, place, ring, (warp - 1) * WeightCopies<Tile>::kWarpgroups};
    bool const copies = warp <= kWeightThreads, to_others = p.sharing_log2 > 0;
    if (to_others) cluster_wait_acquire();
    copy_stages<Tile>(weights, cursor, copies ? ahead : 0);  // before the previous grid has finished
    if (clustered && !to_others) cluster_wait_acquire();
    grid_dependency_wait();
    copy_stages<Tile>(weights, cursor, copies ? all : 0);
  }
}

}  // namespace fp4d
