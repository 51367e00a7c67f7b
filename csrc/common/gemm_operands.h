// Checks of a GEMM's output, scales and packed activations, for the launches of few and of many tokens.
#pragma once

#include "common/divide_up.h"
#include "common/packed_tokens.h"
#include "common/scale_block.h"

namespace fp4d {

constexpr DLDataType kOutType = FP4D_OUT == 0 ? kBF16 : kF16;  // of the output and the bias

// Of a problem's rows or columns: how many, and what says so.
struct Most {
  int64_t count;
  char const* why;
};

// [M, N], N a multiple of 8, contiguous, 16-byte aligned.
inline void check_out(TensorView out, Most m, Most n) {
  check_dtype({"out", out}, {kOutType});
  check_ndim({"out", out}, 2);
  check_at_most("M", out.size(0), m.count, m.why);
  check_at_most("N", out.size(1), n.count, n.why);
  check_at_least("N", out.size(1), 8, "out");
  check_multiple("N", out.size(1), 8, "16-byte rows of out");
  check_contiguous({"out", out});
  check_aligned({"out", out}, 16);
}

// f32, one or N; in blocks [ceil(N/128), ceil(K/128)].
inline void check_alpha(TensorView alpha, int64_t n, int64_t k_blocks, bool in_blocks) {
  check_dtype({"alpha", alpha}, {kF32});
  if (in_blocks) {
    check_ndim({"alpha", alpha}, 2);
    check_size({"alpha", alpha}, 0, divide_up(n, kScaleBlock), "ceil(N/128)");
    check_size({"alpha", alpha}, 1, k_blocks, "ceil(K/128)");
  } else {
    check_scalar_or_vector({"alpha", alpha}, n, "N");
  }
  check_contiguous({"alpha", alpha});
}

// Of e4m3 tokens: f32, one or M; in blocks as w8_quantize_block writes them, 16-byte aligned.
inline void check_token_scales(TensorView x_scale, int64_t m, int64_t k_blocks, int64_t token_blocks,
                               bool in_blocks) {
  if (in_blocks) {
    check_block_scales({"x_scale", x_scale}, k_blocks, token_blocks);
    check_aligned({"x_scale", x_scale}, 16);
  } else {
    check_dtype({"x_scale", x_scale}, {kF32});
    check_scalar_or_vector({"x_scale", x_scale}, m, "M");
  }
  check_contiguous({"x_scale", x_scale});
}

}  // namespace fp4d
