// silu(gate) * up of bf16 or fp16 [M, 2K] -> e4m3 [M, K] as operand B of w4_gemm_sm90.cu and w8_gemm_sm90.cu: SwiGLU and the
// quantiser of packed_activations.cu in one kernel.
//
//   w4_swiglu_row(x, packed, scale, enable_pdl)     as w4_quantize_row of silu(gate) * up
//   w8_swiglu_row, w8_swiglu_tensor                 as w8_quantize_row, w8_quantize_tensor
//   w8_swiglu_block(x, packed, scale, enable_pdl)   as w8_quantize_block
//     x       bf16 or fp16 [M, 2K]: K elements of the gate, then K of up. 2K contiguous, K % 16 == 0, row stride a multiple of
//             8, 16-byte aligned
//     packed, scale: as packed_activations.cu has them, for K
//
// The bytes are those of separate kernels: silu(gate) = gate / (1 + exp(-gate)) in f32, rounded to the dtype of x, times
// up in f32, rounded again, as torch does both. So non-finite elements are those of the separate kernels too.
//
// Capture-safe: only launches. With enable_pdl the next kernel may start at once; it must wait before it reads.
#include "quantise/pack_e4m3.h"

namespace fp4d {

__device__ inline __nv_bfloat162 narrow(float a, float b, __nv_bfloat16) {
  return __floats2bfloat162_rn(a, b);
}
__device__ inline __half2 narrow(float a, float b, __half) { return __floats2half2_rn(a, b); }

// gate / (1 + exp(-gate)) with the bits of IEEE division. Both sides are divided by 4, so that no reciprocal is subnormal.
// The steps are those of a division without its branch for numbers that are out of range, which would cost a call and
// registers. Here only infinities and NaN are: they take the quotient of the first step.
__device__ inline float silu(float gate) {
  float const a = gate * 0.25f, b = fmaf(expf(-gate), 0.25f, 0.25f);
  float first;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(first) : "f"(b));
  float const reciprocal = fmaf(first, fmaf(-b, first, 1.f), first);
  float quotient = a * reciprocal;
  quotient = fmaf(fmaf(-b, quotient, a), reciprocal, quotient);
  quotient = fmaf(fmaf(-b, quotient, a), reciprocal, quotient);
  return fabsf(a) < INFINITY && b < INFINITY ? copysignf(quotient, a)
                                             : a * first;  // the steps lose the sign of -0
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
  for (float& value : g) value = silu(value);
  widen(rounded(g), g, T{});
#pragma unroll
  for (int i = 0; i < kVector; ++i) g[i] = __fmul_rn(g[i], u[i]);
  return rounded(g);
}

// A token's gate, then its up.
struct SwiGlu {
  static constexpr int kMostEach = 2;  // 4 do not fit beside the exponentials
  template <class T>
  __device__ static uint4 load(T const* row, int vector, int k) {
    int const vectors = k / kVector;
    auto const* const from = reinterpret_cast<uint4 const*>(row);
    return vector < vectors ? swiglu<T>(from[vector], from[vectors + vector]) : uint4{};
  }
  static void check(TensorView x) { check_input(x, 2 * kTokenMultiple); }
  static int64_t k_of(TensorView x) { return x.size(1) / 2; }
};

}  // namespace fp4d

TVM_FFI_DLL_EXPORT_TYPED_FUNC(w4_swiglu_row, (fp4d::quantize_e4m3<fp4d::SwiGlu, true, true>));
TVM_FFI_DLL_EXPORT_TYPED_FUNC(w8_swiglu_row, (fp4d::quantize_e4m3<fp4d::SwiGlu, true, false>));
TVM_FFI_DLL_EXPORT_TYPED_FUNC(w8_swiglu_tensor, (fp4d::quantize_e4m3<fp4d::SwiGlu, false, false>));
TVM_FFI_DLL_EXPORT_TYPED_FUNC(w8_swiglu_block, fp4d::quantize_block<fp4d::SwiGlu>);
