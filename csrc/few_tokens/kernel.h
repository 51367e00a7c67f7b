// out = alpha * (x @ W^T) + bias for few tokens: the kernel of all *_small.cu. Tile::Weights
// (few_tokens/w4/w4a16_weights.h and so on) says how weights and activations are stored and, for wgmma, multiplies
// them.
//
// A CTA takes RB blocks of 64 rows and T tokens. K is split over KG groups of warps in a CTA and over the CTAs of a
// cluster. A group has a producer warp, which keeps a ring of stages full (few_tokens/loads.h), and consumer warps, which
// multiply: weights are operand A, dequantised into registers where they need it, tokens are operand B. Two or one warps
// share a row block by mma.sync (few_tokens/mma.h), or four by wgmma. The weights of the first ring are under way before
// the previous grid has finished.
//
// At the end a CTA adds up the sums of its groups, and sends those of rows that another CTA of the cluster owns there,
// through distributed shared memory (few_tokens/sums.h). All are added in a fixed order: no workspace, no atomics, the
// same bits each time.
#pragma once

#include <cuda_runtime.h>

#include "few_tokens/loads.h"
#include "few_tokens/mma.h"
#include "few_tokens/sums.h"
#include "few_tokens/tile.h"

namespace fp4d {

template <int threads>
__device__ __forceinline__ void sync_consumers() {
  asm volatile("bar.sync 2, %0;" ::"n"(threads) : "memory");
}

template <class Tile>
__global__ void __launch_bounds__(Tile::kThreads, Tile::kCtas)
    few_tokens_kernel(__grid_constant__ Params<typename Tile::Weights> const p) {
  using Weights = typename Tile::Weights;
  static_assert(lies_as_declared<Params<Weights>>(), "before_wait of kernels.toml");
  extern __shared__ __align__(1024) uint8_t shared[];
  constexpr int T = Tile::kTokens;
  // A uniform warp index puts the addresses for wgmma into uniform registers. mma.sync gains nothing by it.
  int const warp = Tile::kWgmma ? __shfl_sync(~0u, threadIdx.x / 32, 0) : threadIdx.x / 32;
  int const lane = threadIdx.x % 32;
  // Tiles of tokens of the same rows follow each other: what one reads from memory the next finds in L2.
  int const cluster_rank = blockIdx.x, row_block = blockIdx.z * Tile::kRowBlocks;
  int const row_blocks = min(Tile::kRowBlocks, p.row_blocks - row_block);
  int const token = blockIdx.y * T, tokens = min(T, p.m - token);
  bool const consumes = warp < Tile::kGroups * Tile::kConsumers, clustered = p.cluster > 1;
  int const group = consumes ? warp / Tile::kConsumers : warp - Tile::kGroups * Tile::kConsumers;
  int const group_warp = warp % Tile::kConsumers;  // of the consumers
  Range const range = range_of<Tile>(p, group);
  uint32_t const base = shared_address(shared), tables = base + Tile::kBarrierBytes,
                 rings = base + Tile::kRingsAt;
  Ring<Tile> const ring{base + group * p.stages * 16, rings + group * p.stages * Tile::kStageBytes, p.stages};
  Reduction<Tile> const reduction{rings + (Tile::kReuse ? 0 : Tile::kGroups * p.stages * Tile::kStageBytes),
                                  tables - 16,
                                  p.cluster,
                                  p.inverse,
                                  cluster_rank,
                                  p.slots_log2,
                                  tokens};

  if (!consumes) {
    if (lane == 0) {
      ring.init(row_blocks);
      if (group == 0) reduction.init();
      barriers_visible();
    }
    __syncwarp();
    if (clustered && !Tile::kReuse) cluster_arrive();
    asm volatile("bar.arrive 1, %0;" ::"n"(Tile::kThreads) : "memory");
    Producer<Tile>{p, ring, range, row_block, row_blocks, token, tokens, lane}.run(group == 0);
    if (clustered && Tile::kReuse) cluster_arrive();
    if (clustered) cluster_wait();
    return;
  }

  if (clustered && !Tile::kReuse) cluster_arrive();
  if constexpr (Weights::kTableBytes > 0)
    Weights::template make_tables<Tile::kConsumerThreads>(tables, threadIdx.x);
  asm volatile("bar.sync 1, %0;" ::"n"(Tile::kThreads) : "memory");
  grid_dependency_wait();
  RowFactors<Tile> const own_row(p, row_block * Weights::kRows);
  Sums<Tile> sums = {};
  if (group_warp < row_blocks * Tile::kBlockWarps) {
    if constexpr (Tile::kWgmma) {
      Weights::Wgmma::template consume<Tile>(p, ring, range, tables, group_warp, lane, sums);
    } else {
      consume<Tile>(p, ring, range, group_warp, lane, sums);
    }
  }
  __syncwarp();

  // Tokens and four rows that a thread finishes.
  int const slots_log2 = p.slots_log2, slot = threadIdx.x & ((1 << slots_log2) - 1);
  int const first = threadIdx.x >> slots_log2, each = Tile::kConsumerThreads >> slots_log2;
  TokenScales<Tile> const scales(p, token, tokens, first, each);
  __syncwarp();
  if (clustered && Tile::kReuse) cluster_arrive();
  if (Tile::kReuse) sync_consumers<Tile::kConsumerThreads>();
  reduction.put(sums, group, group_warp, lane);
  own_row.put(reduction.factors);
  sync_consumers<Tile::kConsumerThreads>();
  if (clustered) {
    cluster_wait();
    reduction.send_all();
    barrier_wait_cluster(reduction.barrier, 0);
  }
  int const quad = reduction.quad_in(slot), row = row_block * Weights::kRows + quad * 4;
  if (quad >= reduction.first_of(cluster_rank + 1) || row >= p.n) return;
  Quad<Tile> const rows(reduction.factors, quad * 4);
  auto const finish = [&](auto const& sum_of) {
#pragma unroll
    for (int i = 0; i < TokenScales<Tile>::kMost; ++i) {
      int const t = first + i * each;
      if (t < tokens) rows.store(p.out + int64_t(token + t) * p.n + row, sum_of(t), scales.of[i]);
    }
  };
  if (clustered) {
    finish([&](int t) { return reduction.sent(t, slot); });
  } else {
    finish([&](int t) { return reduction.own(t, quad); });
  }
}

}  // namespace fp4d
