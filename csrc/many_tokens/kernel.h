// The kernel of w4_gemm_sm90.cu and w8_gemm_sm90.cu. Tile::Weights (many_tokens/w4/weights.h, many_tokens/w8/weights.h)
// says how weights are stored, copied and multiplied.
//
// Weights are operand A of wgmma, dequantised into registers where they need it; tokens are operand B: e4m3 as
// packed_activations.cu packs them, 16 bits as they are. Under block scales they change places. A CTA takes 64 rows a
// consumer warpgroup and T tokens. One thread of each producer warp keeps a ring of stages full: of the weights one
// copy a warpgroup, of the activations one, because they are packed in the order of the stages or come as a TMA box.
// Three threads share the copies: one thread could not issue them fast enough.
//
// A cluster is `multicast` CTAs, which take neighbouring rows and the same tokens and copy a part of the activations
// each to all of them, times `split`, which share out K. Sums of the parts of K meet in shared memory and are added in
// the order of the parts, each CTA doing a range of tokens: the same bits every time, no workspace, no atomics. The
// grid is persistent: a CTA does whole tiles, and the ring runs ahead into the next one during an epilogue. With a
// split, what is left of a wave comes last, a tile a cluster, because its sums take the place of the ring. Even builds share
// out what is left by stages, however many tiles it is (Stream-K, https://arxiv.org/abs/2301.03598): many_tokens/even.h.
#pragma once

#include "many_tokens/epilogue.h"
#include "many_tokens/even.h"
#include "many_tokens/producer.h"

namespace fp4d {

// Waits until `clocks` after the first stage has arrived.
__device__ __forceinline__ void wait_clocks(uint32_t first_full, int clocks) {
  barrier_wait(first_full, 0);
  for (uint32_t const from = clock(); clock() - from < uint32_t(clocks);) {
  }
}

template <class Tile>
__device__ __forceinline__ void consume(KernelParams<typename Tile::Weights> const& p, Place const& place,
                                        Ring<Tile> ring, int warpgroup, int warp, int lane) {
  using Weights = typename Tile::Weights;
  constexpr int T = Tile::kTokens;
  Output<Tile> output{p, warpgroup, warp, lane, ring.base};
  typename Weights::template Loop<Tile> loop{p, place, ring, warpgroup, warp, lane};
  int const items = place.items();
  if (items > 0) loop.start();
  if constexpr (Weights::head_start(T) > 0) {
    if (warpgroup > 0 && place.whole > 1) wait_clocks(ring.full(0), Weights::head_start(T));
  }
#pragma unroll 1
  for (int i = 0; i < items; ++i) {
    Item const item = item_of<Tile>(p, place, i);
    Corner const corner = item.corner;
    float sums[T / 2];
#pragma unroll
    for (float& sum : sums) sum = 0.f;
    bool const ended_later = kEvenly && item.first + item.count < p.stages;  // by another CTA
    if (!ended_later) output.start(corner);
    // Blocks: the scales of this tile's rows, or of the last where it has none, from the item's first stage on.
    int const row_tile = min(corner.row_block, p.row_blocks - 1) / Tile::kConsumers;
    float const* const scales_at = p.alpha + int64_t(row_tile) * p.stages + item.first;
    loop.run(i + 1 == items, item.count, sums, scales_at);
    if constexpr (kEvenly) {
      if (ended_later) {
        leave<Tile>(p.room, sums, warpgroup, warp, lane);
      } else {
        if (item.first > 0) take<Tile>(p, place, sums, warpgroup, warp, lane);
        output.tile(sums, corner);
      }
    } else if (i < place.whole) {
      output.tile(sums, corner);
    } else {  // the last: nothing is loaded into the ring any more
      sync_threads(1 + Tile::kConsumers, 128 * Tile::kConsumers);
#pragma unroll
      for (int j = 0; j < T / 8; ++j) {
        store_16(ring.base + ((warpgroup * (T / 8) + j) * 128 + warp * 32 + lane) * 16, sums[4 * j],
                 sums[4 * j + 1], sums[4 * j + 2], sums[4 * j + 3]);
      }
      cluster_arrive_release();
      cluster_wait_acquire();
      if (p.split == 2) add_and_store<Tile, 2>(p, place, ring.base, output, corner);
      if (p.split == 3) add_and_store<Tile, 3>(p, place, ring.base, output, corner);
      if (p.split == 4) add_and_store<Tile, 4>(p, place, ring.base, output, corner);
      if constexpr (Tile::kMostSplit == 8) {
        if (p.split == 8) add_and_store<Tile, 8>(p, place, ring.base, output, corner);
      }
    }
  }
  output.finish();
}

// ---- The kernel ----

template <class Tile>
__global__ void __launch_bounds__(Tile::kSharingThreads, Tile::kCtas)
    many_tokens_kernel(__grid_constant__ KernelParams<typename Tile::Weights> const p) {
  using Weights = typename Tile::Weights;
  static_assert(lies_as_declared<Params<Weights>>(), "before_wait of kernels.toml");
  extern __shared__ __align__(1024) uint8_t shared[];
  Ring<Tile> const ring{shared_address(shared)};
  bool const clustered = p.multicast_log2 + p.sharing_log2 > 0 || p.split > 1;
  int const warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
  if (threadIdx.x == 0) {
    ring.init(Place::sources(p));
    barriers_visible();
  }
  __syncthreads();
  if (clustered) cluster_arrive_relaxed();

  if (warp < 4) {
    give_registers<Tile::kProducerRegisters>();
    Place const place(p);
    if (threadIdx.x % 32 == 0) {
      produce(p, place, ring, warp, clustered);
    } else if (clustered) {
      cluster_wait_acquire();
    }
    __syncwarp();
    if constexpr (kEvenly) {
      if (warp == 3 && place.leaves) {
        grid_dependency_wait();
        mark_left<Tile>(p.room, threadIdx.x % 32);
      }
    }
    if (place.parts > 0) {  // the consumers' sums
      cluster_arrive_release();
      cluster_wait_acquire();
    }
    if (clustered) {
      cluster_arrive_relaxed();
      cluster_wait_acquire();
    }
    grid_dependency_wait();  // no thread ends before it has waited (docs/proof.md); those that copy have
  } else {
    take_registers<Tile::kConsumerRegisters>();
    if constexpr (Tile::kLutBytes > 0) {
      Weights::template make_tables<128 * Tile::kConsumers>(ring.base + Tile::kLutAt, threadIdx.x - 128);
      sync_threads(1 + Tile::kConsumers, 128 * Tile::kConsumers);
    }
    if (clustered) cluster_wait_acquire();
    grid_dependency_wait();
    // Not earlier: with three grids under way all of them take longer (bench/notes/few-tokens.md).
    grid_dependency_launch_dependents();
    int const lane = threadIdx.x % 32;
    Place const place(p);
    consume<Tile>(p, place, ring, warp / 4 - 1, warp % 4, lane);
    // Nobody leaves while others of the cluster may still write to its shared memory, or read it.
    if (clustered) {
      cluster_arrive_relaxed();
      cluster_wait_acquire();
    }
  }
}

}  // namespace fp4d
