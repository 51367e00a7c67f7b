// The type of activations and outputs of few_tokens/kernel.h, one a build.
#pragma once

#include <cstdint>

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#ifndef FP4D_OUT
#error "FP4D_OUT: 0 = bf16, 1 = fp16"
#endif

namespace fp4d {

#if FP4D_OUT == 0
using Element = __nv_bfloat16;
#else
using Element = __half;
#endif

// In device code.
#if FP4D_OUT == 1 && defined(__CUDA_ARCH__) && __CUDA_ARCH__ == 900
constexpr bool kFp16OnHopper = true;
#else
constexpr bool kFp16OnHopper = false;
#endif

}  // namespace fp4d
