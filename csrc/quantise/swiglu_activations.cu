// silu(gate) * up of bf16 or fp16 [M, 2K] -> e4m3 [M, K], SwiGLU and a quantiser in one kernel: packed as operand B of
// w4_gemm_sm90.cu and w8_gemm_sm90.cu (packed_activations.cu), or in rows for cuBLASLt (fp8_quantize.cu). And not quantised,
// for GEMMs on 16-bit activations: the GEMM loads its first weights meanwhile (PDL), which it cannot beside torch's kernels.
//
//   w4_swiglu_row(x, packed, scale, enable_pdl)     as w4_quantize_row of silu(gate) * up
//   w8_swiglu_row, w8_swiglu_tensor                 as w8_quantize_row, w8_quantize_tensor
//   w8_swiglu_block(x, packed, scale, enable_pdl)   as w8_quantize_block
//   fp8_swiglu_row(x, q, scale, enable_pdl)         as fp8_quantize_row
//   fp8_swiglu_tensor, fp8_swiglu_1x128             as fp8_quantize_tensor, fp8_quantize_1x128
//   swiglu_product(x, out, enable_pdl)              not quantised: out [M, K] in the dtype of x, contiguous, 16-byte aligned
//     x       bf16 or fp16 [M, 2K]: K elements of the gate, then K of up. 2K contiguous, K % 16 == 0, row stride a multiple of
//             8, 16-byte aligned
//     packed, q, scale: as those files have them, for K
//
// The bytes are those of separate kernels: silu(gate) = gate / (1 + exp(-gate)) in f32, rounded to the dtype of x, times
// up in f32, rounded again, as torch does both. So non-finite elements are those of the separate kernels too.
//
// Capture-safe: only launches. With enable_pdl the next kernel may start at once, after swiglu_product when the kernel
// before has ended; it must wait before it reads.
#include "quantise/pack_e4m3.h"
#include "quantise/rows_e4m3.h"

namespace fp4d {

__device__ inline __nv_bfloat162 narrow(float a, float b, __nv_bfloat16) {
  return __floats2bfloat162_rn(a, b);
}
__device__ inline __half2 narrow(float a, float b, __half) { return __floats2half2_rn(a, b); }

__device__ inline float reciprocal(float b) {
  float result;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(b));
  return result;
}

// gate / (1 + exp(-gate)); after rounding to the type of the gate it has the bits of torch, which divides by IEEE. That holds
// for each of its 65536 gates, which are tried where it runs (fp4dispatch/backends/own/swiglu.py): approximations that are off
// by some of the 2^16 steps between two bf16 numbers in f32 round alike. Both sides are divided by 4, so that no reciprocal is
// subnormal.
__device__ inline float silu(float gate, __nv_bfloat16) {
  float exponential;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(exponential) : "f"(gate * -1.44269504f));
  return gate * 0.25f * reciprocal(fmaf(exponential, 0.25f, 0.25f));
}

// Between two fp16 numbers are 2^13 steps, which is too few for that: of 65536 gates two are wrong. With a step of Newton and
// exp of the math library none is.
__device__ inline float silu(float gate, __half) {
  float const a = gate * 0.25f, b = fmaf(expf(-gate), 0.25f, 0.25f), r = reciprocal(b);
  float const first = a * r, quotient = fmaf(fmaf(-b, first, a), r, first);
  return fabsf(a) < INFINITY && b < INFINITY ? copysignf(quotient, a) : first;  // a step loses the sign of -0
}

// 8 elements, rounded twice.
template <class T>
__device__ inline uint4 swiglu(uint4 gate, uint4 up) {
  float g[kVector], u[kVector];
  widen(gate, g, T{});
  widen(up, u, T{});
  auto const rounded = [](float const(&values)[kVector]) {
    uint32_t words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      Pair<T> const pair = narrow(values[2 * i], values[2 * i + 1], T{});
      words[i] = reinterpret_cast<uint32_t const&>(pair);
    }
    return make_uint4(words[0], words[1], words[2], words[3]);
  };
#pragma unroll
  for (float& value : g) value = silu(value, T{});
  widen(rounded(g), g, T{});
#pragma unroll
  for (int i = 0; i < kVector; ++i) g[i] = __fmul_rn(g[i], u[i]);
  return rounded(g);
}

// A token's gate, then its up.
struct SwiGlu {
  template <class T>
  static constexpr int kMostVectors = std::is_same_v<T, __half> ? 4 : 8;  // 8 do not fit beside expf
  static constexpr int64_t kWarps = 2 * kWaveWarps;  // each element takes a thread longer than loading it
  template <class T, class Index>
  __device__ static uint4 at(T const* row, Index vector, int k) {
    auto const* const from = reinterpret_cast<uint4 const*>(row);
    return swiglu<T>(from[vector], from[k / kVector + vector]);
  }
  static void check(TensorView x) { check_input(x, 2 * kTokenMultiple); }
  static int64_t k_of(TensorView x) { return x.size(1) / 2; }
};

// `tiles` blocks a token, 8 elements a thread. The GEMM is let in when gate_up has ended: before, it would find room on some
// SMs alone, and run two CTAs on each of these.
template <class T>
__global__ void __launch_bounds__(kMaxThreads)
    swiglu_rows(T const* x, int64_t x_stride, T* out, int k, int tiles) {
  grid_dependency_wait();
  grid_dependency_launch_dependents();
  int64_t const token = blockIdx.x / unsigned(tiles);
  int const vector = int(blockIdx.x % unsigned(tiles)) * kMaxThreads + int(threadIdx.x);
  if (vector >= k / kVector) return;
  reinterpret_cast<uint4*>(out + token * k)[vector] = SwiGlu::at(x + token * x_stride, vector, k);
}

void swiglu_product(TensorView x, TensorView out, bool enable_pdl) {
  SwiGlu::check(x);
  int64_t const k = SwiGlu::k_of(x);
  check_dtype({"out", out}, {x.dtype()});
  check_ndim({"out", out}, 2);
  check_size({"out", out}, 0, x.size(0), "M");
  check_size({"out", out}, 1, k, "K");
  check_contiguous({"out", out});
  check_aligned({"out", out}, 16);
  int const device = check_one_cuda_device({{"x", x}, {"out", out}});
  if (x.size(0) == 0) return;
  tvm::ffi::CUDADeviceGuard guard(device);
  int64_t const tiles = divide_up(k / kVector, int64_t(kMaxThreads));
  Shape const shape{dim3(unsigned(x.size(0) * tiles)), dim3(kMaxThreads), 1};
  auto const go = [&](auto const* data) {
    using T = std::decay_t<decltype(*data)>;
    launch(swiglu_rows<T>, shape, device, enable_pdl, data, input_stride(x), data_of<T>(out), k, tiles);
  };
  if (same(x.dtype(), kBF16)) {
    go(data_of<__nv_bfloat16>(x));
  } else {
    go(data_of<__half>(x));
  }
}

}  // namespace fp4d

TVM_FFI_DLL_EXPORT_TYPED_FUNC(w4_swiglu_row, (fp4d::quantize_e4m3<fp4d::SwiGlu, true, true>));
TVM_FFI_DLL_EXPORT_TYPED_FUNC(w8_swiglu_row, (fp4d::quantize_e4m3<fp4d::SwiGlu, true, false>));
TVM_FFI_DLL_EXPORT_TYPED_FUNC(w8_swiglu_tensor, (fp4d::quantize_e4m3<fp4d::SwiGlu, false, false>));
TVM_FFI_DLL_EXPORT_TYPED_FUNC(w8_swiglu_block, fp4d::quantize_block<fp4d::SwiGlu>);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(fp8_swiglu_row, fp4d::quantize_by_row<fp4d::SwiGlu>);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(fp8_swiglu_tensor, fp4d::quantize_by_tensor<fp4d::SwiGlu>);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(fp8_swiglu_1x128, fp4d::quantize_by_1x128<fp4d::SwiGlu>);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(swiglu_product, fp4d::swiglu_product);
