// Type of the output of many_tokens/kernel.h, of its bias and of 16-bit activations.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

namespace fp4d {

#if FP4D_OUT == 0
using Out = __nv_bfloat16;
#else
using Out = __half;
#endif

constexpr bool kFp8 = FP4D_ACT == 8;  // activations

}  // namespace fp4d
