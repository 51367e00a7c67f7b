// How few_tokens/kernel.h brings weights and tokens into the rings of its groups of warps.
#pragma once

#include "common/sm90.h"
#include "few_tokens/tile.h"

namespace fp4d {

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

}  // namespace fp4d
