// Checks of NVFP4 weights in W4P order, for all kernels that read them.
#pragma once

#include "common/divide_up.h"
#include "common/ffi_checks.h"
#include "weights/w4_dequant.h"

namespace fp4d::w4 {

// uint8 [ceil(N/64), ceil(K/64), 2304], contiguous, 16-byte aligned.
inline void check_weights(TensorView w, int64_t n, int64_t k) {
  check_dtype({"w", w}, {kU8});
  check_ndim({"w", w}, 3);
  check_size({"w", w}, 0, divide_up(n, int64_t(kChunkRows)), "ceil(N/64)");
  check_size({"w", w}, 1, divide_up(k, int64_t(kChunkK)), "ceil(K/64)");
  check_size({"w", w}, 2, kChunkBytes, "bytes of a W4P chunk");
  check_contiguous({"w", w});
  check_aligned({"w", w}, 16);
}

// K in whole chunks, where w alone says it.
inline int64_t k_of(TensorView w) {
  check_ndim({"w", w}, 3);
  check_at_least("chunks of w along K", w.size(1), 1, "w");
  check_at_most("chunks of w along K", w.size(1), kMaxRows / kChunkK, "32-bit problem sizes");
  return w.size(1) * kChunkK;
}

}  // namespace fp4d::w4
