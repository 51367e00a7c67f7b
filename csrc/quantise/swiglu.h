// silu(gate) * up of bf16 or fp16, 8 elements of a token at a time. x [M, 2K]: K elements of the gate, then K of up.
//
// The bits are those of separate operations: silu(gate) = gate / (1 + exp(-gate)) in f32, rounded to the dtype of x, times up
// in f32, rounded again, as torch does both. So non-finite elements are those of separate operations too.
#pragma once

#include "quantise/quantize.h"

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

// gate / (1 + exp(-gate)). After rounding to 16 bits it has the bits of torch, which divides by IEEE, for each of the 65536
// gates of a type. They are tried on the GPU that runs it (fp4dispatch/backends/own/swiglu.py). Both sides are divided by 4, so
// that no reciprocal is subnormal.
__device__ inline float silu(float gate, __half) {
  float const a = gate * 0.25f, b = fmaf(expf(-gate), 0.25f, 0.25f), r = reciprocal(b);
  float const first = a * r, quotient = fmaf(fmaf(-b, first, a), r, first);
  return fabsf(a) < INFINITY && b < INFINITY ? copysignf(quotient, a)
                                             : first;  // the last step loses the sign of -0
}

// Between two bf16 numbers are 2^16 steps of f32, so some steps beside the quotient round alike: no gate is wrong on SM90,
// where this was tried. Between fp16 numbers are 2^13, and two gates would be.
__device__ inline float silu(float gate, __nv_bfloat16) {
#if __CUDA_ARCH__ == 900
  float exponential;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(exponential) : "f"(gate * -1.44269504f));
  return gate * 0.25f * reciprocal(fmaf(exponential, 0.25f, 0.25f));
#else
  return silu(gate, __half{});
#endif
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

// A token's gate, then its up, as a source of elements (`Rows` in quantise/quantize.h).
template <int multiple>
struct SwiGlu {
  template <class T>
  static constexpr int kMostVectors = std::is_same_v<T, __half> ? 4 : 8;  // 8 do not fit beside expf
  static constexpr int64_t kWarps = 2 * kWaveWarps;  // each element takes a thread longer than loading it
  template <bool once = false, class T, class Index>
  __device__ static uint4 at(T const* row, Index vector, int k) {
    auto const* const from = reinterpret_cast<uint4 const*>(row) + vector;
    return swiglu<T>(load_vector<once>(from), load_vector<once>(from + k / kVector));
  }
  static void check(TensorView x) { check_input(x, 2 * multiple); }
  static int64_t k_of(TensorView x) { return x.size(1) / 2; }
};

}  // namespace fp4d
