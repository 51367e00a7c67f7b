// bf16 or fp16 [M, K] -> e4m3, packed for w4a8_small.cu and w4_gemm_sm90.cu (w4_*), w8a8_small.cu and w8_gemm_sm90.cu
// (w8_*). Non-finite elements become NaN and do not enter a scale.
//
//   w4_quantize_row(x, packed, scale, enable_pdl)     e4m3, dynamic, one scale a token; scale f32 [M], written
//   w4_quantize_tensor(x, packed, scale, enable_pdl)  e4m3, static; scale f32, 1 element, read; NaN, negative or under
//                                                     2^-116 gives NaN everywhere
//   w8_quantize_row, w8_quantize_tensor               the same two, k in their own order
//   w8_quantize_block(x, packed, scale, enable_pdl)   e4m3, dynamic, k in their own order, one scale for 128 k of a token; scale
//                                                     f32 [ceil(K/128), 8 ceil(M/8)], contiguous, written, 1 beyond M
//     x       bf16 or fp16 [M, K], K contiguous, K % 16 == 0, row stride a multiple of 8, 16-byte aligned
//     packed  uint8 [ceil(K/128), ceil(M/8), 1024], contiguous, 16-byte aligned, written. Tokens beyond M and k beyond K are
//             zero.
//
// scale = amax / 448, at least 2^-116, 1 where all is zero: the numbers are those of fp8_quantize.cu, bit for bit.
//
// Capture-safe: only launches. With enable_pdl the next kernel may start at once; it must wait before it reads.
#include "quantise/pack_e4m3.h"

TVM_FFI_DLL_EXPORT_TYPED_FUNC(w4_quantize_row,
                              (fp4d::quantize_e4m3<fp4d::Rows<fp4d::kTokenMultiple>, true, true>));
TVM_FFI_DLL_EXPORT_TYPED_FUNC(w4_quantize_tensor,
                              (fp4d::quantize_e4m3<fp4d::Rows<fp4d::kTokenMultiple>, false, true>));
TVM_FFI_DLL_EXPORT_TYPED_FUNC(w8_quantize_row,
                              (fp4d::quantize_e4m3<fp4d::Rows<fp4d::kTokenMultiple>, true, false>));
TVM_FFI_DLL_EXPORT_TYPED_FUNC(w8_quantize_tensor,
                              (fp4d::quantize_e4m3<fp4d::Rows<fp4d::kTokenMultiple>, false, false>));
TVM_FFI_DLL_EXPORT_TYPED_FUNC(w8_quantize_block, fp4d::quantize_block<fp4d::Rows<fp4d::kTokenMultiple>>);
