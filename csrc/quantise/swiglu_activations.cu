// silu(gate) * up of bf16 or fp16 [M, 2K] -> e4m3, packed for the kernels that packed_activations.cu names: SwiGLU and
// the quantiser there in one kernel.
//
//   w4_swiglu_row(x, packed, scale, enable_pdl)     as w4_quantize_row of silu(gate) * up
//   w8_swiglu_row, w8_swiglu_tensor                 as w8_quantize_row, w8_quantize_tensor
//   w8_swiglu_block(x, packed, scale, enable_pdl)   as w8_quantize_block
//     x       bf16 or fp16 [M, 2K]: K elements of the gate, then K of up. 2K contiguous, K % 16 == 0, row stride a multiple of
//             8, 16-byte aligned
//     packed, scale: as packed_activations.cu has them, for K
//
// The bytes are those of separate kernels (quantise/swiglu.h).
//
// Capture-safe: only launches. With enable_pdl the next kernel may start at once; it must wait before it reads.
#include "quantise/pack_e4m3.h"
#include "quantise/swiglu.h"

namespace fp4d {

using Gated = SwiGlu<kTokenMultiple>;

}  // namespace fp4d

TVM_FFI_DLL_EXPORT_TYPED_FUNC(w4_swiglu_row, (fp4d::quantize_e4m3<fp4d::Gated, true, true>));
TVM_FFI_DLL_EXPORT_TYPED_FUNC(w8_swiglu_row, (fp4d::quantize_e4m3<fp4d::Gated, true, false>));
TVM_FFI_DLL_EXPORT_TYPED_FUNC(w8_swiglu_tensor, (fp4d::quantize_e4m3<fp4d::Gated, false, false>));
TVM_FFI_DLL_EXPORT_TYPED_FUNC(w8_swiglu_block, fp4d::quantize_block<fp4d::Gated>);
