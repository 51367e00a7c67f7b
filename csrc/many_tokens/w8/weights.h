// e4m3 weights [N, K] row by row, as a checkpoint holds them, as many_tokens/kernel.h takes them: boxes of 64 rows by
// 128 k, which TMA brings in the order of wgmma's operand A, or by 64 k where 16-bit activations need them in registers.
#pragma once

#include <cstdint>
#include <type_traits>

#include <cuda.h>

#include "weights/early_loads.h"
#include "common/wgmma.h"
#include "many_tokens/output.h"

#include "many_tokens/loop_16bit.h"
#include "many_tokens/w8/blocks_16bit.h"
#include "many_tokens/w8/copies.h"
#include "many_tokens/w8/loop.h"

namespace fp4d {

struct W8Weights {
  template <class Tile>
  using Copies = W8Copies<Tile>;
  template <class Tile>
  using Loop = std::conditional_t<kFp8, W8Loop<Tile>, Loop16Bit<Tile>>;
  using Blocks = W8Blocks16Bit;

  struct Source {
    CUtensorMap map;
  };
  static_assert(sizeof(Source::map) == kWeightsBytes, "before_wait of kernels.toml");
  static constexpr int kStageK = kFp8 ? 128 : 64;  // a byte each
  static constexpr int kBlockBytes = 64 * kStageK, kTableBytes = 0;
  // What the dequantised weights must be multiplied by.
  static constexpr float kFactor = kFp8 ? 1.f : w8::unscale(static_cast<Out const*>(nullptr));
  static constexpr Operand kOperand = kFp8 ? Operand::kE4M3 : FP4D_OUT == 0 ? Operand::kBF16 : Operand::kF16;
  static constexpr bool kBlocks =
      FP4D_SCALING == 1;  // a scale for 128x128 weights and one for 128 k of a token
  static_assert(kFp8 || !kBlocks);
  // A token's scales are two a lane where tokens are rows of wgmma's operand A, and as many as columns where they are
  // operand B.
  static constexpr bool kTokensAreA = kBlocks;

  static constexpr bool kShares = true;  // CTAs of a cluster may share rows

  static constexpr int promote_stages(int) { return 2; }
  static constexpr int head_start(int) { return 0; }
  // Registers for the kernel that packs the next activations (many_tokens/w4/weights.h); a gain with block scales only.
  static constexpr bool leaves_registers(int) { return kBlocks; }
  // Tokens of a tile that are turned at once at its end. They take shared memory from the ring.
  static constexpr int out_tokens(int tokens) {
    return tokens <= 160 ? tokens : tokens <= 192 ? 96 : tokens <= 224 ? 112 : 128;
  }
  static constexpr int ctas(int) { return 1; }
};

}  // namespace fp4d
