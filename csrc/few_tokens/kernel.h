// out = alpha * (x @ W^T) + bias for few tokens: the kernel of all *_small.cu. Tile::Weights
// (few_tokens/w4/w4a16_weights.h and so on) says how weights and activations are stored and, for wgmma, multiplies
// them.
//
// A CTA takes RB blocks of 64 rows. A producer warp keeps a ring of stages full, each kStageChunks chunks along K
// of every row block and the activations that belong to them; the weights of the first ring are under way before
// the previous grid has finished. Two consumer warps share a row block, 32 rows each: they read words from shared
// memory, dequantise them into fragments of operand A and multiply by the tokens, operand B. Operand B needs no
// shuffle: k is taken in such an order that a lane reads 32 consecutive bytes of a token per step.
// K is split over KG groups of warps in a CTA (each with its producer and ring) and over the CTAs of a cluster. At the
// end each group sends its sums to the CTA that owns the rows, through distributed shared memory. That CTA adds them in
// a fixed order: no workspace, no atomics, the same bits each time.
#pragma once

#include <cuda_runtime.h>

#include "few_tokens/sums.h"
#include "few_tokens/tile.h"
#include "few_tokens/mma.h"

namespace fp4d {

// ---- Producer ----

template <class Tile>
struct Producer {
  using Weights = typename Tile::Weights;
  static constexpr bool kLoadsTokens = !Tile::kWgmma || Weights::kPacked;
  Params<Weights> const& p;
  Ring<Tile> ring;
  Range range;
  int row_block, row_blocks, token, tokens, lane;

  __device__ void load_weights(int i, int slot) const {
    int const chunk = (range.first + i) * Tile::kStageChunks;
    Weights::template load<Tile>(p.w, p.chunks, chunk, row_block, row_blocks, ring.weights(slot, 0),
                                 ring.full(slot), lane);
  }

  __device__ void load_tokens(int i, int slot) const {
    if constexpr (Weights::kPacked) {
      load_packed(i, slot);
    } else {
      load_rows(i, slot);
    }
  }

  // Contiguous; zeros beyond the end of K.
  __device__ void load_packed(int i, int slot) const {
    if (lane != 0) return;
    uint32_t const bytes = min(Tile::kTokens / 8, p.token_blocks - token / 8) * 1024;
    int64_t const block = int64_t(range.first + i) * p.token_blocks + token / 8;
    barrier_arrive_expect(ring.full(slot), bytes + (Weights::kBlocks ? bytes / 32 : 0));
    copy_bulk(ring.tokens(slot), p.x + block * 1024, bytes, ring.full(slot));
    if constexpr (Weights::kBlocks)
      copy_bulk(ring.scales(slot), reinterpret_cast<uint8_t const*>(p.x_scale + block * 8), bytes / 32,
                ring.full(slot));
  }

  // k beyond the end comes as zero, so that nothing meets the zero weights there that is not finite. Tokens beyond
  // the last stay what they are: they touch no other token's sums.
  __device__ void load_rows(int i, int slot) const {
    constexpr int kPieces = Tile::kStageK * 2 / 16;  // of 16 bytes
    int const piece = lane % kPieces, k = (range.first + i) * Tile::kStageK + piece * 8;
    bool const inside = k < p.k;
#pragma unroll 2
    for (int t = lane / kPieces; t < tokens; t += 32 / kPieces) {
      Element const* const from = p.x + (token + t) * p.x_stride + (inside ? k : 0);
      copy_16(ring.tokens(slot) + t * Tile::kTokenPitch + piece * 16, from, inside ? 16 : 0);
    }
    barrier_arrive_after_copies(ring.full(slot));
  }

  // `triggers`: this warp lets the next grid start, when its last `trigger` stages are next, but never before the
  // previous grid has ended. With three grids under way a launch took up to 1.5 times as long (bench/notes/few-tokens.md).
  __device__ void run(bool triggers) const {
    int const ahead = min(range.count, ring.stages);
    int const trigger_at = max(range.count - p.trigger, ahead);
    for (int i = 0; i < ahead; ++i) load_weights(i, i);
    grid_dependency_wait();
    if constexpr (kLoadsTokens) {
      for (int i = 0; i < ahead; ++i) load_tokens(i, i);
    }
    if (triggers && trigger_at == ahead) grid_dependency_launch_dependents();
    int slot = 0;
    uint32_t parity = 0;
    for (int i = ahead; i < range.count; ++i) {
      if (triggers && i == trigger_at && i > ahead) grid_dependency_launch_dependents();
      barrier_wait(ring.empty(slot), parity);
      load_weights(i, slot);
      if constexpr (kLoadsTokens) load_tokens(i, slot);
      if (++slot == ring.stages) slot = 0, parity ^= 1;
    }
    __syncwarp();
  }
};

// ---- The kernel ----

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
  bool const produces = warp >= Tile::kGroups * Tile::kConsumers, clustered = p.cluster > 1;
  int const helper = warp - Tile::kGroups * Tile::kConsumers;  // producers, then loaders
  int const group = produces ? helper % Tile::kGroups : warp / Tile::kConsumers;
  int const source = cluster_rank * Tile::kGroups + group;
  Range const range = range_of<Tile>(p.chunks, source, p.cluster * Tile::kGroups);
  uint32_t const base = shared_address(shared), tables = base + Tile::kBarrierBytes,
                 rings = base + Tile::kRingsAt;
  Ring<Tile> const ring{base + group * p.stages * 16, rings + group * p.stages * Tile::kStageBytes, p.stages};
  Reduction<Tile> const reduction{rings + (Tile::kReuse ? 0 : Tile::kGroups * p.stages * Tile::kStageBytes),
                                  tables - 16,
                                  p.cluster,
                                  cluster_rank,
                                  p.slots_log2,
                                  tokens};

  if constexpr (Tile::kLoaders > 0) {
    if (helper >= Tile::kGroups) {
      if (clustered && !Tile::kReuse) cluster_arrive();
      asm volatile("bar.sync 1, %0;" ::"n"(Tile::kThreads) : "memory");
      typename Weights::template Loader<Tile>{p, ring, range, token, tokens, lane}.run();
      __syncwarp();
      if (clustered && Tile::kReuse) cluster_arrive();
      if (clustered) cluster_wait();
      return;
    }
  }
  if (produces) {
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
  prefetch_rows<Tile>(p, row_block * Weights::kRows);
  Sums<Tile> sums = {};
  int const group_warp = warp % Tile::kConsumers;
  if (group_warp < row_blocks * Tile::kBlockWarps) {
    if constexpr (Tile::kWgmma) {
      Weights::Wgmma::template consume<Tile>(p, ring, range, tables, group_warp, lane, sums);
    } else {
      consume<Tile>(p, ring, range, group_warp, lane, sums);
    }
  }
  __syncwarp();

  // Tokens and four rows that a thread finishes, with their scales under way before the sums are there.
  int const slots_log2 = p.slots_log2, slot = threadIdx.x & ((1 << slots_log2) - 1);
  int const first = threadIdx.x >> slots_log2, each = Tile::kConsumerThreads >> slots_log2;
  TokenScales<Tile> const scales(p, token, tokens, first, each);
  int const quad = reduction.quad_in(slot);
  bool const mine = quad < reduction.first_of(cluster_rank + 1);
  Quad<Weights> const rows(p, mine ? row_block * Weights::kRows + quad * 4 : p.n);
  __syncwarp();
  if (clustered && Tile::kReuse) cluster_arrive();
  if (Tile::kReuse) sync_consumers<Tile::kConsumerThreads>();
  reduction.put(sums, group, group_warp, lane);
  sync_consumers<Tile::kConsumerThreads>();
  if (clustered) {
    cluster_wait();
    reduction.send_all();
    barrier_wait_cluster(reduction.barrier, 0);
  }
  if (rows.row >= p.n) return;
#pragma unroll 1
  for (int i = 0, t = first; t < tokens; ++i, t += each)
    rows.store(p, token + t, clustered ? reduction.sent(t, slot) : reduction.own(t, quad), scales.of(i));
}

}  // namespace fp4d
