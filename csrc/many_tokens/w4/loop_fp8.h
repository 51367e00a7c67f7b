// Main loop of many_tokens/kernel.h for FP8 activations.
//
// A stage is two chunks along K, each two MMAs with their registers of operand A. While MMAs run, the next chunk is
// dequantised, a step between any two of them: the two steps of an operand in a row would leave the tensor cores idle.
// Words and tables were asked for one chunk earlier, and the loop goes on from tile to tile without a break, so that a
// warp, which issues these instructions in order, waits for few of them. Where a CTA has its multiprocessor to itself,
// and nobody else issues while it waits, it asks earlier still; with two CTAs that costs time.
//
// Wide tiles, whose MMAs take longer and whose sums take most registers, hold two operands instead of four: while one is
// multiplied, the other is dequantised.
//
// FP8 wgmma keeps 13 bits of a sum. So every kPromoteStages stages the partial sums, which the first MMA has started
// from zero, are added to f32 ones. A warpgroup that adds has no MMA under way, so the two do it half an interval apart:
// one multiplies while the other adds.
#pragma once

#include "many_tokens/tile.h"
#include "weights/w4_to_fp8.h"

namespace fp4d {

template <class Tile>
struct W4LoopFp8 {
  static constexpr int T = Tile::kTokens;
  // Faster in tiles of 176 tokens, not in narrower ones (bench/notes/many-tokens.md).
  static constexpr w4::UpperHalf kUpper = T > 160 ? w4::UpperHalf::kDotProduct : w4::UpperHalf::kShift;
  static constexpr bool kWide = T > 128;  // measured: bench/notes/many-tokens.md
  Params<typename Tile::Weights> const& p;
  Place const& place;
  Ring<Tile> ring;
  int warpgroup, warp, lane;  // warp of the warpgroup
  // Operands A: of a stage's four MMAs, of which the first two are dequantised, or in wide tiles of the MMA at hand and the
  // next one. The words of a stage's two chunks.
  uint32_t a[kWide ? 2 : 4][4] = {};
  w4::Fp8Chunk first = {}, second = {};
  using Stage = Offsets<Tile>;
  Stage at = {};
  // The lane's words and scales of the first stage, its table, the barrier that it releases, if it does.
  uint32_t words_at = 0, scales_at = 0, luts_at = 0, empty_at = 0;

  __device__ void start() {
    words_at = ring.weights(0, warpgroup) + warp * w4::kUnitBytes + lane * 16;
    scales_at = ring.weights(0, warpgroup) + w4::kScaleOffset + lane * 8 + warp * 2;
    luts_at = ring.base + Tile::kLutAt + lane % w4::kLutCopies * 8;
    bool const releases = lane < Place::sources(p);
    empty_at = releases ? address_in(ring.empty(0), place.source(p, lane)) : 0;
    keep(words_at), keep(scales_at), keep(luts_at), keep(empty_at);
    barrier_wait(ring.full(0), 0);
    load(first, 0);
    load(second, w4::kChunkBytes);
    first.look_up(luts_at);
    if constexpr (!kWide) second.look_up(luts_at);
    first.dequantize<0, kUpper>(a[0]);
    if constexpr (!kWide) first.dequantize<1, kUpper>(a[1]);
  }

  __device__ void load(w4::Fp8Chunk& chunk, uint32_t at) const { chunk.load(words_at + at, scales_at + at); }

  // `add` == 0: sums start from zero.
  __device__ static void multiply(float (&sums)[T / 2], uint32_t const (&operand)[4], uint64_t b, int add) {
    wgmma_fence();
    wgmma_e4m3<T>(sums, operand, b, add);
    wgmma_commit();
  }

  __device__ uint32_t full(Stage stage) const { return ring.full(0) + stage.barrier; }

  // Adds an item's stages to `sums`.
  __device__ void run(bool last_item, int count, float (&sums)[T / 2], float const*) {
    constexpr bool kAhead = Tile::kCtas == 1;
    float partial[T / 2];
#pragma unroll
    for (float& sum : partial) sum = 0.f;
    int phase = warpgroup * (Tile::kPromoteStages / 2), left = count;
    Stage previous = at, next = at;
    next.advance();
    uint32_t release = 0;  // nothing before the first stage has been multiplied
    bool ready = false;    // the next stage, without a wait
#pragma unroll 1
    do {
      // Both give the same value; the machine code differs.
      uint64_t const b = kAhead ? operand_b(ring.base) + (at.slot >> 4) : operand_b(ring.base + at.slot);
      multiply(partial, a[0], b, phase);  // the tile's first sums are zero anyway
      --left;
      if (++phase == Tile::kPromoteStages) phase = 0;
      // `last`: after the CTA's last stage the same one again, for nothing. There must be no branch around registers that a
      // wgmma reads.
      if constexpr (kWide) {
        second.look_up(luts_at);
        wgmma_wait<1>();
        if (release != 0) barrier_arrive_in(empty_at + previous.barrier);
        release = empty_at;
        first.dequantize<1, kUpper>(a[1]);
        multiply(partial, a[1], b + kDescriptorStep, 1);
        bool const last = last_item && left == 0;
        previous = at;
        if (!ready && !last) barrier_wait(full(next), next.parity);
        at = last ? at : next;
        load(first, at.slot);
        wgmma_wait<1>();
        second.dequantize<0, kUpper>(a[0]);
        multiply(partial, a[0], b + 2 * kDescriptorStep, 1);
        first.look_up(luts_at);
        wgmma_wait<1>();
        second.dequantize<1, kUpper>(a[1]);
        multiply(partial, a[1], b + 3 * kDescriptorStep, 1);
        load(second, at.slot + w4::kChunkBytes);
        next = at;
        next.advance();
        // Where no stage follows the question would be answered after microseconds.
        ready = !(last_item && left < 2) && barrier_done(full(next), next.parity);
        wgmma_wait<1>();
        first.dequantize<0, kUpper>(a[0]);
      } else {
        bool const last = last_item && left == 0;
        Stage const current = at;
        if constexpr (kAhead) {
          if (!ready && !last) barrier_wait(full(next), next.parity);
          at = last ? at : next;
          load(first, at.slot);
        } else {
          at.advance(last);
        }
        wgmma_wait<1>();
        if (release != 0) barrier_arrive_in(empty_at + previous.barrier);
        release = empty_at;
        second.dequantize<0, kUpper>(a[2]);
        multiply(partial, a[1], b + kDescriptorStep, 1);
        if constexpr (kAhead) first.look_up(luts_at);
        second.dequantize<1, kUpper>(a[3]);
        if constexpr (!kAhead) {
          barrier_wait(full(at), at.parity);
          load(first, at.slot);
          load(second, at.slot + w4::kChunkBytes);
        }
        multiply(partial, a[2], b + 2 * kDescriptorStep, 1);
        if constexpr (kAhead) {
          load(second, at.slot + w4::kChunkBytes);
          next = at;
          next.advance();
        } else {
          first.look_up(luts_at);
        }
        wgmma_wait<1>();
        first.dequantize<0, kUpper>(a[0]);
        multiply(partial, a[3], b + 3 * kDescriptorStep, 1);
        // Where no stage follows the question would be answered after microseconds.
        if constexpr (kAhead) ready = !(last_item && left < 2) && barrier_done(full(next), next.parity);
        first.dequantize<1, kUpper>(a[1]);
        second.look_up(luts_at);
        previous = current;
      }
      if (phase == 0) {
        wgmma_wait<0>();
        add(partial, sums);
      }
    } while (left > 0);
    wgmma_wait<0>();
    if (phase != 0) add(partial, sums);
    if (empty_at != 0) barrier_arrive_in(empty_at + previous.barrier);
  }
};

}  // namespace fp4d
