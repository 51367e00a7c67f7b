// bf16 or fp16 [M, K] -> e4m3, value = q * scale. Non-finite elements become NaN and do not enter a scale.
//
//   fp8_quantize_row(x, q, scale, enable_pdl)     dynamic, one scale a row (token)
//     scale f32 [M], written
//   fp8_quantize_tensor(x, q, scale, enable_pdl)  static
//     scale f32, 1 element, read; NaN, negative or under 2^-116 gives NaN everywhere
//   fp8_quantize_1x128(x, q, scale, enable_pdl)   dynamic, one scale per 128 elements along K
//     scale f32 [M, ceil(K/128)], any strides, written: row-major as formats.fp8_quantize returns it, or
//     contiguous along M with 16-byte columns (torch.empty(ceil(K/128), round_up(M, 4)).t()[:M]) as the
//     block128 GEMM needs it
//   x bf16 or fp16 [M, K], K contiguous, K % 8 == 0, row stride a multiple of 8, 16-byte aligned
//   q e4m3 [M, K], contiguous, 8-byte aligned, written
//
// scale = amax / 448, at least 2^-116, 1 where all is zero. Capture-safe: only launches.
//
// With it comes the host code that multiplies on cuBLASLt what was quantised here (cublaslt/cublaslt_gemm.h), which has
// no kernel:
//   cublaslt_version(cuda_major)
//   cublaslt_fp8_plan(cuda_major, device, m, n, k, scales, fp16, biased, enable_pdl) -> (gemm, bytes of workspace)
//     scales: 0 one for each operand, 1 a row of A and of B, 2 blocks: 1x128 of A, 128x128 of B, m a multiple of 4
//   gemm(x, x_scale, a, a_scale, b, b_scale, bias, d, workspace) quantises x into a and launches on the current stream
//     x as above, of d's dtype; of blocks it may have up to 3 rows less than m: what the others of a hold enters d's
//     same rows alone. Or None: a is ready, and a_scale is read
//     x_scale f32, 1 element: a is quantised with it, a_scale is read; or None: with its own scales, a_scale is written
//     a e4m3 [M, K], b e4m3 [N, K], d bf16 or fp16 [M, N]: contiguous, 16-byte aligned, on `device`
//     a_scale f32 [M], b_scale f32 [N] of rows; one element each of one scale; of blocks a_scale f32 [M, ceil(K/128)]
//     with strides 1 and M, b_scale f32 [ceil(N/128), ceil(K/128) up to a multiple of 4], both 16-byte aligned
//     bias [N] of d's dtype, or None; workspace u8, or None where it needs none
#include "cublaslt/cublaslt_gemm.h"
#include "quantise/rows_e4m3.h"

namespace fp4d {

using Elements = Rows<kVector>;

// The first rows of a GEMM's operands; `q` and `scale` are checked.
void first_rows(TensorView x, TensorView q, TensorView scale, int device, bool enable_pdl) {
  Elements::check(x);
  check_size({"x", x}, 1, q.size(1), "K of the plan");
  int64_t const more = q.size(0) - x.size(0);
  if (more < 0 || more >= cublaslt::kBlockTokens)
    TVM_FFI_THROW(ValueError) << "x: has " << x.size(0) << " rows, the plan is for "
                              << q.size(0) - cublaslt::kBlockTokens + 1 << " to " << q.size(0);
  if (int const found = check_one_cuda_device({{"x", x}, {"a", q}}); found != device)
    TVM_FFI_THROW(ValueError) << "x: is on cuda:" << found << ", the plan is for cuda:" << device;
  launch_1x128<Elements>(x, q, scale, device, enable_pdl);
}

tvm::ffi::Array<tvm::ffi::Any> cublaslt_plan(int64_t major, int64_t device, int64_t m, int64_t n, int64_t k,
                                             int64_t scales, bool fp16, bool biased, bool enable_pdl) {
  if (scales < 0 || scales > int64_t(cublaslt::Scales::kBlock))
    TVM_FFI_THROW(ValueError) << "scales: " << scales << ", needed 0 (tensor), 1 (row) or 2 (block)";
  auto const made = cublaslt::plan(major, device, m, n, k, cublaslt::Scales(scales), fp16, biased);
  auto const gemm = tvm::ffi::Function::FromTyped(
      [made, enable_pdl](Optional<TensorView> x, Optional<TensorView> x_scale, TensorView a,
                         TensorView a_scale, TensorView b, TensorView b_scale, Optional<TensorView> bias,
                         TensorView d, Optional<TensorView> workspace) {
        cublaslt::Operands const operands{a, b, a_scale, b_scale, bias, d, workspace};
        made->check_operands(operands);
        if (x.has_value()) check_dtype({"x", *x}, {made->fp16 ? kF16 : kBF16});
        tvm::ffi::CUDADeviceGuard guard(made->device);
        if (!x.has_value()) {
          if (x_scale.has_value()) TVM_FFI_THROW(ValueError) << "x_scale: is for x, which is None";
        } else if (x_scale.has_value()) {
          quantize_by_tensor<Elements>(*x, a, *x_scale, enable_pdl);
        } else if (made->scales == cublaslt::Scales::kBlock) {
          first_rows(*x, a, a_scale, made->device, enable_pdl);
        } else {
          quantize_by_row<Elements>(*x, a, a_scale, enable_pdl);
        }
        made->launch(operands);
      });
  return {gemm, int64_t(made->chosen.workspace)};
}

}  // namespace fp4d

TVM_FFI_DLL_EXPORT_TYPED_FUNC(fp8_quantize_row, fp4d::quantize_by_row<fp4d::Elements>);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(fp8_quantize_tensor, fp4d::quantize_by_tensor<fp4d::Elements>);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(fp8_quantize_1x128, fp4d::quantize_by_1x128<fp4d::Elements>);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(cublaslt_version, fp4d::cublaslt::version);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(cublaslt_fp8_plan, fp4d::cublaslt_plan);
