// Checks of e4m3 weights [N, K] row by row, as a checkpoint holds them, for all kernels that read them.
#pragma once

#include "common/ffi_checks.h"

namespace fp4d::w8 {

// e4m3 [N, K] or up to 7 rows less, contiguous, 16-byte aligned.
inline void check_weights(TensorView w, int64_t n, int64_t k) {
  check_dtype({"w", w}, {kE4M3});
  check_ndim({"w", w}, 2);
  if (w.size(0) > n || w.size(0) <= n - 8)
    TVM_FFI_THROW(ValueError) << "w: size of dimension 0 is " << w.size(0) << ", needed " << n
                              << " (N), or up to 7 less";
  check_size({"w", w}, 1, k, "K");
  check_contiguous({"w", w});
  check_aligned({"w", w}, 16);
}

// K, where w alone says it.
inline int64_t k_of(TensorView w) {
  check_ndim({"w", w}, 2);
  check_at_least("K", w.size(1), 16, "w");
  check_at_most("K", w.size(1), kMaxRows, "32-bit problem sizes");
  check_multiple("K", w.size(1), 16, "rows of w that start on 16 bytes");
  return w.size(1);
}

}  // namespace fp4d::w8
