// What the quantisers share: the grid barrier, 16-byte loads, launches, checks. The arithmetic follows
// fp4dispatch/formats.py operation by operation (IEEE division, round half to even), so the bits are equal.
#pragma once

#include "gdc_guard.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <type_traits>

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <cuda_runtime.h>

#include <tvm/ffi/extra/c_env_api.h>
#include <tvm/ffi/extra/cuda/device_guard.h>

#include "ffi_checks.h"

namespace fp4d {

constexpr int kVector = 8;  // bf16 or fp16 elements in a 16-byte load
constexpr float kE4m3Max = 448.f;
// Least usable fp32 scale: formats.py explains the value.
constexpr float kMinScale = 0x1p-116f;

__device__ inline void widen(uint4 raw, float (&out)[kVector], __nv_bfloat16) {
  uint32_t const words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    out[2 * i] = __uint_as_float(words[i] << 16);
    out[2 * i + 1] = __uint_as_float(words[i] & 0xffff0000u);
  }
}

__device__ inline void widen(uint4 raw, float (&out)[kVector], __half) {
  uint32_t const words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    float2 const pair = __half22float2(*reinterpret_cast<__half2 const*>(&words[i]));
    out[2 * i] = pair.x;
    out[2 * i + 1] = pair.y;
  }
}

__device__ inline uint8_t to_e4m3(float value) {
  return __nv_cvt_float_to_fp8(value, __NV_SATFINITE, __NV_E4M3);
}

__device__ inline float from_e4m3(uint8_t value) {
  return __half2float(__half(__nv_cvt_fp8_to_halfraw(value, __NV_E4M3)));
}

// Division by one number many times, with the bits of IEEE division.
//
// With r = RN(1/b), each step q += RN(a - b q) r squares the error, and the last one rounds correctly once q
// is within an ulp (Markstein 1990; Muller et al., Handbook of Floating-Point Arithmetic, section 4.7): two
// steps, 5 instructions in place of about 10 and a branch. Bounds on b keep every step clear of underflow
// that could be seen in a code (a quotient that small rounds to zero with the sign of a); a quotient that
// saturates anyway is left alone, because a - b q would be inf - inf.
class Divisor {
 public:
  __device__ explicit Divisor(float b) {
    b_ = b;
    reciprocal_ = __frcp_rn(b);
    plain_ = !(b >= 0x1p-60f && b <= 0x1p15f);
  }

  __device__ float divide(float a) const {
    if (plain_) return __fdiv_rn(a, b_);
    float const first = a * reciprocal_;
    float const second = fmaf(fmaf(-first, b_, a), reciprocal_, first);
    float const third = fmaf(fmaf(-second, b_, a), reciprocal_, second);
    return fabsf(first) < 0x1p20f ? copysignf(third, a) : first;  // the steps lose the sign of -0
  }

 private:
  float b_, reciprocal_;
  bool plain_;
};

// ---- To e4m3: value = q * scale, scale = amax / 448 ----

__device__ inline float finite_amax(float const (&values)[kVector], float amax) {
#pragma unroll
  for (int i = 0; i < kVector; ++i) {
    float const magnitude = fabsf(values[i]);
    if (magnitude < INFINITY) amax = fmaxf(amax, magnitude);
  }
  return amax;
}

__device__ inline float scale_of(float amax) {
  return amax == 0.f ? 1.f : fmaxf(__fdiv_rn(amax, kE4m3Max), kMinScale);
}

__device__ inline uint2 quantize(float const (&values)[kVector], Divisor scale) {
  uint32_t words[2] = {0, 0};
#pragma unroll
  for (int i = 0; i < kVector; i += 2) {
    float q[2];
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      float const value = values[i + j];
      // Saturation is the conversion's; a NaN scale stays NaN, and so must a non-finite element.
      q[j] = fabsf(value) < INFINITY ? scale.divide(value) : NAN;
    }
    uint32_t const pair = __nv_cvt_float2_to_fp8x2(make_float2(q[0], q[1]), __NV_SATFINITE, __NV_E4M3);
    words[i / 4] |= pair << (i % 4 * 8);
  }
  return make_uint2(words[0], words[1]);
}

// ---- Launches and checks ----

struct Shape {
  dim3 grid, block;
};

constexpr int kThreads = 256;

// Blocks of kThreads: a power of two of threads along K (at least `group`, which work together), the rest
// along rows.
inline Shape shape_of(int64_t rows, int64_t width, int group) {
  int64_t x = group;
  while (x < width && x < kThreads) x *= 2;
  int64_t const y = kThreads / x;
  return {dim3(unsigned((rows + y - 1) / y), unsigned((width + x - 1) / x)), dim3(unsigned(x), unsigned(y))};
}

template <class... Params, class... Args>
void launch(void (*kernel)(Params...), Shape shape, int device, bool enable_pdl, Args... args) {
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = shape.grid;
  config.blockDim = shape.block;
  config.stream = static_cast<cudaStream_t>(TVMFFIEnvGetStream(kDLCUDA, device));
  config.attrs = &attribute;
  config.numAttrs = enable_pdl ? 1 : 0;
  TVM_FFI_CHECK_CUDA_ERROR(cudaLaunchKernelEx(&config, kernel, static_cast<Params>(args)...));
}

// x: bf16 or fp16 [M, K], K contiguous and a multiple of `multiple`, rows 16-byte aligned.
inline void check_input(TensorView x, int64_t multiple) {
  Arg const arg{"x", x};
  check_dtype(arg, {kBF16, kF16});
  check_ndim(arg, 2);
  check_at_most("M", x.size(0), kMaxRows, "32-bit problem sizes");
  check_at_most("K", x.size(1), kMaxRows, "32-bit problem sizes");
  check_at_least("K", x.size(1), multiple, "x");
  check_multiple("K", x.size(1), multiple, "whole blocks and 16-byte accesses");
  if (x.stride(1) != 1)
    TVM_FFI_THROW(ValueError) << "x: the last dimension has stride " << x.stride(1)
                              << ", needed 1; call .contiguous()";
  if (x.size(0) > 1) check_multiple("row stride of x", x.stride(0), kVector, "16-byte accesses");
  check_aligned(arg, 16);
}

// A positive multiple of `to`.
inline int64_t round_up(int64_t value, int64_t to) { return std::max(to, (value + to - 1) / to * to); }

inline int64_t input_stride(TensorView x) { return x.size(0) > 1 ? x.stride(0) : x.size(1); }

}  // namespace fp4d
