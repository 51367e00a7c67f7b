// Checks of activations in the layout of packed_activations.cu, for the kernels that write and read them.
#pragma once

#include "common/divide_up.h"
#include "common/ffi_checks.h"

namespace fp4d {

constexpr int64_t kBlockTokens = 8, kBlockBytes = 1024;  // 128 bytes of a token

// uint8 [ceil(K/128), ceil(M/8), 1024], contiguous, 16-byte aligned.
inline void check_packed(Arg arg, int64_t blocks, int64_t m) {
  check_dtype(arg, {kU8});
  check_ndim(arg, 3);
  check_size(arg, 0, blocks, "ceil(K/128)");
  check_size(arg, 1, divide_up(m, kBlockTokens), "ceil(M/8)");
  check_size(arg, 2, kBlockBytes, "bytes of 8 tokens");
  check_contiguous(arg);
  check_aligned(arg, 16);
}

// f32 [ceil(K/128), 8 ceil(M/8)], the scales of 128 k of each token.
inline void check_block_scales(Arg arg, int64_t blocks, int64_t token_blocks) {
  check_dtype(arg, {kF32});
  check_ndim(arg, 2);
  check_size(arg, 0, blocks, "ceil(K/128)");
  check_size(arg, 1, token_blocks * kBlockTokens, "8 ceil(M/8)");
}

}  // namespace fp4d
