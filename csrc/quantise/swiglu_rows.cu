// silu(gate) * up of bf16 or fp16 [M, 2K] in rows [M, K]: as it is, or SwiGLU and a quantiser of fp8_quantize.cu in one kernel.
//
//   fp8_swiglu_row(x, q, scale, enable_pdl)  as fp8_quantize_row of silu(gate) * up
//   fp8_swiglu_tensor, fp8_swiglu_1x128      as fp8_quantize_tensor, fp8_quantize_1x128
//   swiglu_product(x, out, enable_pdl)       not quantised: out [M, K] in the dtype of x, contiguous, 16-byte aligned
//     x         bf16 or fp16 [M, 2K]: K elements of the gate, then K of up. 2K contiguous, K % 8 == 0, row stride a multiple
//               of 8, 16-byte aligned
//     q, scale: as fp8_quantize.cu has them, for K
//
// The bytes are those of separate kernels (quantise/swiglu.h).
//
// Capture-safe: only launches. With enable_pdl the next kernel may start at once, after swiglu_product when the kernel
// before has ended; it must wait before it reads. A GEMM of ours on 16-bit activations loads its first weights meanwhile,
// which it cannot beside torch's kernels.
#include "quantise/rows_e4m3.h"
#include "quantise/swiglu.h"

namespace fp4d {

using Gated = SwiGlu<kVector>;

// `tiles` blocks a token, 8 elements a thread. The GEMM is let in when gate_up has ended: before, it would find room on some
// SMs alone, and run two CTAs on each of these.
template <class T>
__global__ void __launch_bounds__(kThreads)
    swiglu_rows(T const* x, int64_t x_stride, T* out, int k, int tiles) {
  grid_dependency_wait();
  grid_dependency_launch_dependents();
  int64_t const token = blockIdx.x / unsigned(tiles);
  int const vector = int(blockIdx.x % unsigned(tiles)) * kThreads + int(threadIdx.x);
  if (vector >= k / kVector) return;
  reinterpret_cast<uint4*>(out + token * k)[vector] = Gated::at(x + token * x_stride, vector, k);
}

void swiglu_product(TensorView x, TensorView out, bool enable_pdl) {
  Gated::check(x);
  int64_t const k = Gated::k_of(x);
  check_dtype({"out", out}, {x.dtype()});
  check_ndim({"out", out}, 2);
  check_size({"out", out}, 0, x.size(0), "M");
  check_size({"out", out}, 1, k, "K");
  check_contiguous({"out", out});
  check_aligned({"out", out}, 16);
  int const device = check_one_cuda_device({{"x", x}, {"out", out}});
  if (x.size(0) == 0) return;
  tvm::ffi::CUDADeviceGuard guard(device);
  int64_t const tiles = divide_up(k / kVector, int64_t(kThreads));
  Shape const shape{dim3(unsigned(x.size(0) * tiles)), dim3(kThreads), 1};
  with_elements(x, [&](auto const* data) {
    using T = std::decay_t<decltype(*data)>;
    launch(swiglu_rows<T>, shape, device, enable_pdl, data, input_stride(x), data_of<T>(out), k, tiles);
  });
}

}  // namespace fp4d

TVM_FFI_DLL_EXPORT_TYPED_FUNC(fp8_swiglu_row, fp4d::quantize_by_row<fp4d::Gated>);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(fp8_swiglu_tensor, fp4d::quantize_by_tensor<fp4d::Gated>);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(fp8_swiglu_1x128, fp4d::quantize_by_1x128<fp4d::Gated>);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(swiglu_product, fp4d::swiglu_product);
