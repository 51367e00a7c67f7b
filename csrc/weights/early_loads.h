// What kernels.toml declares to the proof (`before_wait`, docs/proof.md): which bytes of a kernel's argument are the
// pointer or the tensor map of the weights, and which are numbers that may be added to that pointer. The build defines
// these from that file; assertions beside the structures that are meant keep them true.
#pragma once

#include <cstddef>

#if !defined(FP4D_WEIGHTS_FIRST) || !defined(FP4D_WEIGHTS_LAST)
#error "kernels.toml declares no before_wait for this kernel, which loads weights before the grid barrier"
#endif

namespace fp4d {

constexpr size_t kWeightsAt = FP4D_WEIGHTS_FIRST, kWeightsBytes = FP4D_WEIGHTS_LAST - FP4D_WEIGHTS_FIRST;
#if defined(FP4D_NUMBERS_FIRST)
constexpr size_t kNumbersAt = FP4D_NUMBERS_FIRST, kNumbersEnd = FP4D_NUMBERS_LAST;
#endif

}  // namespace fp4d
