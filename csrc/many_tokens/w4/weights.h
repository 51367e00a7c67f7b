// NVFP4 weights in W4P order, as many_tokens/kernel.h takes them: chunks of 64 rows by 64 k, dequantised into registers.
#pragma once

#include <cstdint>
#include <type_traits>

#include "weights/early_loads.h"
#include "many_tokens/output.h"
#include "weights/w4_dequant.h"
#include "common/sm90.h"
#include "weights/w4_to_fp8.h"
#include "common/wgmma.h"

#include "many_tokens/loop_16bit.h"
#include "many_tokens/w4/blocks_16bit.h"
#include "many_tokens/w4/copies.h"
#include "many_tokens/w4/loop_fp8.h"

namespace fp4d {

struct W4Weights {
  template <class Tile>
  using Copies = W4Copies<Tile>;
  template <class Tile>
  using Loop = std::conditional_t<kFp8, W4LoopFp8<Tile>, Loop16Bit<Tile>>;
  using Blocks = W4Blocks16Bit;

  struct Source {
    uint8_t const* chunks;
    int count;  // along K
  };
  static_assert(offsetof(Source, chunks) == 0 && sizeof(Source::chunks) == kWeightsBytes &&
                    offsetof(Source, count) == kNumbersAt,
                "before_wait of kernels.toml");
  static constexpr int kStageChunks = kFp8 ? 2 : 1;
  static constexpr int kBlockBytes = kStageChunks * w4::kChunkBytes;
  static constexpr int kTableBytes = kFp8 ? w4::kLutTableBytes : 0;
  // What the dequantised weights must be multiplied by.
  static constexpr float kFactor = kFp8 ? 8.f : w4::Dequant<Out>::kUnscale;
  static constexpr Operand kOperand = kFp8 ? Operand::kE4M3 : FP4D_OUT == 0 ? Operand::kBF16 : Operand::kF16;

  static constexpr bool kBlocks = false, kTokensAreA = false;
  static constexpr bool kShares = false;  // CTAs of a cluster may share rows

  // Stages after which FP8 sums are added to f32 ones. Accuracy against time: sums of one sign end up 0.18 % low after
  // 256 k (2 stages) and 0.51 % after 512 k (measured on an H200).
  static constexpr int promote_stages(int tokens) { return tokens >= 96 ? 3 : 2; }
  // Clocks by which the first warpgroup runs ahead of the second where a CTA does many tiles: one multiplies while the
  // other stores. Tuned on an H200 for 128 and 176 tokens (bench/NOTES.md); the others take values near these.
  static constexpr int head_start(int tokens) {
    return !kFp8 || tokens < 96 ? 0 : tokens <= 128 ? 2000 : tokens <= 160 ? 1200 : 800;
  }
  // Whether a CTA leaves registers for the kernel that packs the next launch's activations (packed_activations.cu). That
  // kernel then already waits on the same multiprocessor when this launch ends.
  static constexpr bool leaves_registers(int tokens) { return kFp8 && tokens >= 96 && tokens <= 128; }
  // Tokens of a tile that are turned at once at its end. They take shared memory from the ring.
  static constexpr int out_tokens(int tokens) {
    return tokens <= 176 ? tokens : tokens == 192 ? 96 : tokens <= 224 ? 112 : 128;
  }
  static constexpr int ctas(int tokens) { return kFp8 && tokens <= 64 ? 2 : 1; }

  template <int threads>
  __device__ static void make_tables(uint32_t at, int thread) {
    w4::make_lut_table<threads>(at, thread);
  }
};

}  // namespace fp4d
