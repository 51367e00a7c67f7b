// e4m3 weights [N, K] row by row, as a checkpoint holds them, as many_tokens/kernel.h takes them: boxes of 64 rows by
// 128 k, which TMA brings in the order of wgmma's operand A.
#pragma once

#include <cstdint>

#include <cuda.h>

#include "weights/early_loads.h"
#include "many_tokens/output.h"

#include "many_tokens/w8/copies.h"
#include "many_tokens/w8/loop.h"

namespace fp4d {

struct W8Weights {
  template <class Tile>
  using Copies = W8Copies<Tile>;
  template <class Tile>
  using Loop = W8Loop<Tile>;

  struct Source {
    CUtensorMap map;
  };
  static_assert(sizeof(Source::map) == kWeightsBytes, "before_wait of kernels.toml");
  static constexpr int kBlockBytes = 64 * 128, kTableBytes = 0;
  static constexpr float kFactor = 1.f;
  static constexpr bool kBlocks =
      FP4D_SCALING == 1;  // a scale for 128x128 weights and one for 128 k of a token
  // A token's scales are two a lane where tokens are rows of wgmma's operand A, and as many as columns where they are
  // operand B.
  static constexpr bool kTokensAreA = kBlocks;

  static constexpr bool kShares = true;  // CTAs of a cluster may share rows

  static constexpr int promote_stages(int) { return 2; }
  static constexpr int head_start(int) { return 0; }
  // Registers for the kernel that packs the next activations (many_tokens/w4/weights.h); a gain with block scales only.
  static constexpr bool leaves_registers(int) { return kBlocks; }
  // Tokens of a tile that are turned at once at its end. They take shared memory from the ring.
  static constexpr int out_tokens(int tokens) { return tokens <= 160 ? tokens : tokens <= 192 ? 96 : 112; }
  static constexpr int ctas(int) { return 1; }
};

}  // namespace fp4d
