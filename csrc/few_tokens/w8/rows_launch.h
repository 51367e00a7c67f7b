// The weights of weights/w8_rows.h at a launch: checked, and their tensor map for TMA. After few_tokens/launch.h.
#pragma once

#include "few_tokens/launch.h"
#include "common/tma_rows.h"
#include "weights/w8_checks.h"
#include "weights/w8_rows.h"

namespace fp4d {

// Of a `Small` (few_tokens/launch.h).
struct W8Rows {
  static w8::Source source_of(TensorView w, int64_t n, int64_t k) {
    w8::check_weights(w, n, k);
    w8::Source source{};
    source.rows = data_of<uint8_t>(w), source.n = int(w.size(0)), source.k = int(k);
    return source;
  }

  static void ready(w8::Source& source, Machine const& on) {
    if (on.clusters) source.map = map_of_rows(source.rows, source.n, source.k, source.k, w8::kRows);
  }
};

}  // namespace fp4d
