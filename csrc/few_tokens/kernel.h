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

#include "common/sm90.h"
#include "few_tokens/sums.h"
#include "few_tokens/tile.h"
#include "few_tokens/mma.h"

namespace fp4d {

// ---- Loads ----

// Puts tokens into the ring of one group of warps.
template <class Tile>
struct TokenLoads {
  using Weights = typename Tile::Weights;
  Params<Weights> const& p;
  Ring<Tile> ring;
  Range range;
  int token, tokens, lane;

  __device__ void load(int i, int slot) const {
    if constexpr (Weights::kPacked) {
      load_packed(i, slot);
    } else if constexpr (Tile::kBoxes) {
      load_boxes(i, slot);
    } else {
      load_rows(i, slot);
    }
  }

 private:
  // Contiguous; zeros beyond the end of K.
  __device__ void load_packed(int i, int slot) const {
    if (!elected(lane)) return;
    uint32_t const bytes = min(Tile::kTokens / 8, p.token_blocks - token / 8) * 1024;
    int64_t const block = int64_t(range.first + i) * p.token_blocks + token / 8;
    barrier_arrive_expect(ring.full(slot), bytes + (Weights::kBlocks ? bytes / 32 : 0));
    copy_bulk(ring.tokens(slot), p.x + block * 1024, bytes, ring.full(slot));
    if constexpr (Weights::kBlocks)
      copy_bulk(ring.scales(slot), reinterpret_cast<uint8_t const*>(p.x_scale + block * 8), bytes / 32,
                ring.full(slot));
  }

  // Tokens and k that are not there come as zeros.
  __device__ void load_boxes(int i, int slot) const {
    if (!elected(lane)) return;
    constexpr int kBoxK = 64, kBoxBytes = Tile::kTokens * kBoxK * 2;
    barrier_arrive_expect(ring.full(slot), Tile::kStageK / kBoxK * kBoxBytes);
#pragma unroll
    for (int box = 0; box < Tile::kStageK / kBoxK; ++box)
      copy_box_kept(ring.tokens(slot) + box * kBoxBytes, &p.x_map,
                    (range.first + i) * Tile::kStageK + box * kBoxK, token, ring.full(slot));
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
};

// For the rings of some groups, `producer`, + kProducers and so on, which get their stages in turn.
template <class Tile>
struct Producer {
  using Weights = typename Tile::Weights;
  static constexpr int G = Tile::kGroups / Tile::kProducers;
  Params<Weights> const& p;
  Ring<Tile> const& first_ring;
  int producer, row_block, row_blocks, token, tokens, lane;
  Range ranges[G] = {};

  __device__ Ring<Tile> ring_of(int g) const { return first_ring.of_group(producer + g * Tile::kProducers); }

  __device__ void load_weights(int group, int i, int slot) const {
    Ring<Tile> const ring = ring_of(group);
    int const chunk = (ranges[group].first + i) * Tile::kStageChunks;
    Weights::template load<Tile>(p.w, p.chunks, chunk, row_block, row_blocks, ring.weights(slot, 0),
                                 ring.full(slot), lane);
  }
  __device__ void load_tokens(int group, int i, int slot) const {
    TokenLoads<Tile>{p, ring_of(group), ranges[group], token, tokens, lane}.load(i, slot);
  }

  // Lets the next grid start when the last `trigger` stages are next, but never before the previous grid has ended. With
  // three grids under way a launch took up to 1.5 times as long (bench/notes/few-tokens.md).
  __device__ void run() {
    int most = 0;
#pragma unroll
    for (int g = 0; g < G; ++g) {
      ranges[g] = range_of<Tile>(p, producer + g * Tile::kProducers);
      most = max(most, ranges[g].count);
    }
    int const ahead = min(most, first_ring.stages), trigger_at = max(most - p.trigger, ahead);
#pragma unroll 1
    for (int i = 0; i < ahead; ++i) {
#pragma unroll
      for (int g = 0; g < G; ++g)
        if (i < ranges[g].count) load_weights(g, i, i);
    }
    grid_dependency_wait();
#pragma unroll 1
    for (int i = 0; i < ahead; ++i) {
#pragma unroll
      for (int g = 0; g < G; ++g)
        if (i < ranges[g].count) load_tokens(g, i, i);
    }
    if (producer == 0 && trigger_at == ahead) grid_dependency_launch_dependents();
    int slot = 0;
    uint32_t parity = 0;
#pragma unroll 1
    for (int i = ahead; i < most; ++i) {
      if (producer == 0 && i == trigger_at && i > ahead) grid_dependency_launch_dependents();
#pragma unroll
      for (int g = 0; g < G; ++g) {
        if (i >= ranges[g].count) continue;
        barrier_wait(ring_of(g).empty(slot), parity);
        load_weights(g, i, slot);
        load_tokens(g, i, slot);
      }
      if (++slot == first_ring.stages) slot = 0, parity ^= 1;
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
  bool const clustered = p.cluster > 1;
  int const producer = warp - Tile::kGroups * Tile::kConsumers;
  uint32_t const base = shared_address(shared), tables = base + Tile::kBarrierBytes;
  Ring<Tile> const first_ring{base, base + Tile::kRingsAt, p.stages};
  uint32_t const factors =
      first_ring.stages_at + (Tile::kReuse ? 0 : Tile::kGroups * p.stages * Tile::kStageBytes);
  Reduction<Tile> const reduction{
      factors, factors + Tile::kFactorBytes, tables - 16, p.cluster, p.inverse, cluster_rank, p.slots_log2,
      tokens};

  if (producer >= 0) {
    if (lane == 0) {
      for (int g = producer; g < Tile::kGroups; g += Tile::kProducers)
        first_ring.of_group(g).init(row_blocks);
      if (producer == 0) reduction.init();
      barriers_visible();
    }
    __syncwarp();
    if (clustered && !Tile::kReuse) cluster_arrive();
    asm volatile("bar.arrive 1, %0;" ::"n"(Tile::kThreads) : "memory");
    Producer<Tile>{p, first_ring, producer, row_block, row_blocks, token, tokens, lane}.run();
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
  int const group = warp / Tile::kConsumers, group_warp = warp % Tile::kConsumers;
  Ring<Tile> const ring = first_ring.of_group(group);
  Range const range = range_of<Tile>(p, group);
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
  own_row.put(factors);
  sync_consumers<Tile::kConsumerThreads>();
  if (clustered) {
    cluster_wait();
    reduction.send_all();
    barrier_wait_cluster(reduction.barrier, 0);
  }
  int const quad = reduction.quad_in(slot), row = row_block * Weights::kRows + quad * 4;
  if (quad >= reduction.first_of(cluster_rank + 1) || row >= p.n) return;
  Quad<Tile> const rows(factors, quad * 4);
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
