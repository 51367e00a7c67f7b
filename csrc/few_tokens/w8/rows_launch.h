// The weights of weights/w8_rows.h at a launch: checked, and their tensor map for TMA. After few_tokens/launch.h.
#pragma once

#include "few_tokens/launch.h"
#include "common/tma_rows.h"
#include "weights/w8_rows.h"

namespace fp4d {

// Of a `Small` (few_tokens/launch.h).
struct W8Rows {
  static w8::Source source_of(TensorView w, int64_t n, int64_t k) {
    check_dtype({"w", w}, {kE4M3});
    check_ndim({"w", w}, 2);
    if (w.size(0) > n || w.size(0) <= n - 8)
      TVM_FFI_THROW(ValueError) << "w: size of dimension 0 is " << w.size(0) << ", needed " << n
                                << " (N), or up to 7 less";
    check_size({"w", w}, 1, k, "K");
    check_contiguous({"w", w});
    check_aligned({"w", w}, 16);
    w8::Source source{};
    source.rows = data_of<uint8_t>(w), source.n = int(w.size(0)), source.k = int(k);
    return source;
  }

  static void ready(w8::Source& source, Machine const& on) {
    if (on.clusters) source.map = map_of_rows(source.rows, source.n, source.k, source.k, w8::kRows);
  }
};

}  // namespace fp4d
