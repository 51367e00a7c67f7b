// How few_tokens/kernel.h brings weights and tokens into the rings of its groups of warps, one producer warp for each.
#pragma once

#include "common/sm90.h"
#include "few_tokens/tile.h"

namespace fp4d {

// Puts the tokens of a stage into the ring of one group of warps, by a warp.
template <class Tile>
struct TokenLoads {
  using Weights = typename Tile::Weights;
  Params<Weights> const& p;
  Ring<Tile> ring;
  Range range;
  int token, tokens, lane;

  __device__ void operator()(int i, int slot) const {
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

// Keeps the ring of one group full, by a warp.
template <class Tile>
struct Producer {
  using Weights = typename Tile::Weights;
  Params<Weights> const& p;
  Ring<Tile> ring;
  Range range;
  int row_block, row_blocks, token, tokens, lane;

  __device__ void load_weights(int i, int slot) const {
    int const chunk = (range.first + i) * Tile::kStageChunks;
    Weights::template load<Tile>(p.w, p.chunks, chunk, row_block, row_blocks, ring.weights(slot, 0),
                                 ring.full(slot), lane);
  }

  // `triggers`: this warp lets the next grid start, when its last `trigger` stages are next, but never before the
  // previous grid has ended. With three grids under way a launch took up to 1.5 times as long (bench/notes/few-tokens.md).
  __device__ void run(bool triggers) const {
    TokenLoads<Tile> const load_tokens{p, ring, range, token, tokens, lane};
    int const ahead = min(range.count, ring.stages);
    int const trigger_at = max(range.count - p.trigger, ahead);
#if FP4D_BULK
    for (int i = 0; i < ahead; ++i) load_weights(i, i);
    grid_dependency_wait();
    for (int i = 0; i < ahead; ++i) load_tokens(i, i);
#else
    // A stage is reported once all copies that its lanes have started so far are done. So its tokens come before the next
    // stage's weights: else the first stage would wait for the weights of all.
    grid_dependency_wait();
    for (int i = 0; i < ahead; ++i) {
      load_weights(i, i);
      load_tokens(i, i);
    }
#endif
    if (triggers && trigger_at == ahead) grid_dependency_launch_dependents();
    int slot = 0;
    uint32_t parity = 0;
    for (int i = ahead; i < range.count; ++i) {
      if (triggers && i == trigger_at && i > ahead) grid_dependency_launch_dependents();
      barrier_wait(ring.empty(slot), parity);
      load_weights(i, slot);
      load_tokens(i, slot);
      if (++slot == ring.stages) slot = 0, parity ^= 1;
    }
    __syncwarp();
  }
};

}  // namespace fp4d
