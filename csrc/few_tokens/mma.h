// Consumers of few_tokens/kernel.h that multiply by mma.sync, on every architecture: a warp has 32 or 64 rows.
#pragma once

#include "few_tokens/tile.h"

namespace fp4d {

// Not volatile: a function of its operands, free to move.
__device__ __forceinline__ void mma(float* d, uint32_t const (&a)[4], uint32_t b0, uint32_t b1) {
#if FP4D_OUT == 0
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
#else
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
#endif
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// What a warp multiplies in one step of a stage: its units and T tokens, 16 k of each a lane.
template <class Tile>
struct Step {
  static constexpr int T = Tile::kTokens, U = Tile::kUnits;
  using Reader = typename Tile::Weights::template Reader<U>;
  typename Tile::Weights::template Packed<U> packed;
  uint4 tokens[2][T / 8];  // 8 k each

  __device__ __forceinline__ void load(Reader const& reader, uint32_t offset, int step) {
    uint32_t const at = reader.tokens_at(offset, step);
    reader.load(offset, step, packed);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int t = 0; t < T / 8; ++t) tokens[half][t] = load_16(at + t * 8 * Tile::kTokenPitch + half * 16);
    }
  }

  // Bits of each load.
  __device__ __forceinline__ uint32_t loaded() const {
    uint32_t bits = packed.loaded();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int t = 0; t < T / 8; ++t) bits |= tokens[half][t].x;
    }
    return bits;
  }

  __device__ __forceinline__ void multiply(Sums<Tile>& sums) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      uint4 const(&b)[T / 8] = tokens[half];
      // Units in pairs, so that two MMAs in a row never add to the same sums.
#pragma unroll
      for (int u = 0; u < U; u += 2) {
        uint32_t a[2][2][4];
        packed.operand_a(u, half, a[0]);
        packed.operand_a(u + 1, half, a[1]);
#pragma unroll
        for (int s = 0; s < 2; ++s) {
#pragma unroll
          for (int t = 0; t < T / 8; ++t) {
#pragma unroll
            for (int i = 0; i < 2; ++i)
              mma(sums + 4 * ((u + i) * (T / 8) + t), a[i][s], s ? b[t].z : b[t].x, s ? b[t].w : b[t].y);
          }
        }
      }
    }
  }
};

// Bits of a sum of each unit and of each 8 tokens: all that a step loaded has been added to one of them.
template <class Tile>
__device__ __forceinline__ uint32_t multiplied(Sums<Tile> const& sums) {
  uint32_t bits = 0;
#pragma unroll
  for (int u = 0; u < Tile::kUnits; ++u) bits |= __float_as_uint(sums[4 * u * (Tile::kTokens / 8)]);
#pragma unroll
  for (int t = 1; t < Tile::kTokens / 8; ++t) bits |= __float_as_uint(sums[4 * t]);
  return bits;
}

template <class Tile>
__device__ __forceinline__ void consume(Params<typename Tile::Weights> const& p, Ring<Tile> ring, Range range,
                                        int warp, int lane, Sums<Tile>& sums) {
  int const block = warp / Tile::kBlockWarps, part = warp % Tile::kBlockWarps;
  typename Tile::Weights::template Reader<Tile::kUnits> const reader(
      ring.weights(0, block), ring.tokens(0) + lane / 4 * Tile::kTokenPitch, part, lane);
  // The last stage of K may be short where a step is a chunk; then it has one.
  bool const short_end =
      Tile::kStageChunks == 2 && (range.first + range.count) * Tile::kStageChunks > p.chunks;
  int const whole = range.count - (short_end ? 1 : 0);
  uint32_t const last = ring.full(ring.stages);
  uint32_t full = ring.full(0), parity = 0, offset = 0;
  // Behind loads that are still under way an arrival comes too early: the next copy overtakes them where other warps keep
  // the load units busy (docs/incidents.md, O-15 and O-16). So it waits for all loads of the stage's last step.
  // Where a thread has the registers, it comes behind a branch on bits of each load, which is never taken: the compiler
  // moves nothing across it, so the stage is refilled while it is multiplied. Elsewhere its address depends on sums to
  // which all that was loaded has been added (bench/notes/few-tokens.md).
  uint32_t const zero = unknown_zero(p);
  auto const give_back = [&](uint32_t wait) {
    __syncwarp();
    if (lane == 0) barrier_arrive(full + 8 + wait);
  };
  auto const multiply_last = [&](Step<Tile> const& step) {
    if constexpr (Tile::Weights::releases_early(Tile::kTokens, Tile::kUnits)) {
      if ((step.loaded() & zero) != 0) asm volatile("trap;");
      give_back(0);
      step.multiply(sums);
    } else {
      step.multiply(sums);
      give_back(multiplied<Tile>(sums) & zero);
    }
  };
#pragma unroll 1
  for (int i = 0; i < whole; ++i) {
    barrier_wait(full, parity);
#pragma unroll
    for (int s = 0; s < Tile::kSteps; ++s) {
      Step<Tile> step;
      step.load(reader, offset, s);
      if (s == Tile::kSteps - 1)
        multiply_last(step);
      else
        step.multiply(sums);
    }
    offset += Tile::kStageBytes, full += 16;
    if (full == last) full = ring.full(0), parity ^= 1, offset = 0;
  }
  if (short_end) {
    barrier_wait(full, parity);
    Step<Tile> step;
    step.load(reader, offset, 0);
    multiply_last(step);  // nothing follows in the ring, but sums may take its place
  }
}

}  // namespace fp4d
