// How many parts of `b` cover `a`.
#pragma once

#include <cstdint>

namespace fp4d {

constexpr int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

}  // namespace fp4d
