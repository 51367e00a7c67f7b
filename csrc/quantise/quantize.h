// What the quantisers share: the grid barrier, 16-byte loads, launches, checks. The arithmetic follows
// fp4dispatch/formats/nvfp4.py and fp8.py operation by operation (IEEE division, round half to even), so the bits are equal.
#pragma once

#include "common/gdc_guard.h"

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

#include "common/ffi_checks.h"
#include "common/launch_attributes.h"

namespace fp4d {

constexpr int kVector = 8;  // bf16 or fp16 elements in a 16-byte load
constexpr float kE4m3Max = 448.f;
// Least usable fp32 scale: fp4dispatch/formats/amax.py says why.
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

// Elements stay two in a word, 16 bits each, as long as possible; magnitudes order like their bits.
template <class T>
using Pair = std::conditional_t<std::is_same_v<T, __nv_bfloat16>, __nv_bfloat162, __half2>;
template <class T>
constexpr uint32_t kInfinityBits = std::is_same_v<T, __nv_bfloat16> ? 0x7f80 : 0x7c00;

// The greater magnitudes of `so_far` and of 8 elements, even and odd ones apart. Infinities are the greatest, and NaN
// stays; or, with `finite_only`, neither enters.
template <class T, bool finite_only>
__device__ inline uint32_t greater_magnitudes(uint4 raw, uint32_t so_far) {
  uint32_t const words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    Pair<T> magnitudes = __habs2(reinterpret_cast<Pair<T> const&>(words[i]));
    uint32_t pair = reinterpret_cast<uint32_t&>(magnitudes);
    if constexpr (finite_only) {
      uint32_t const infinities = kInfinityBits<T> * 0x10001u;
      pair &= __hlt2_mask(magnitudes, reinterpret_cast<Pair<T> const&>(infinities));
    }
    magnitudes = __hmax2_nan(reinterpret_cast<Pair<T>&>(pair), reinterpret_cast<Pair<T> const&>(so_far));
    so_far = reinterpret_cast<uint32_t&>(magnitudes);
  }
  return so_far;
}

// What a thread knows of the elements it holds: the bits of the greatest finite magnitude, and whether any is not.
struct Amax {
  uint32_t bits;
  bool finite;
};

template <class T, int count>
__device__ inline Amax amax_of(uint4 const (&raw)[count]) {
  auto const greater = [](uint32_t pair) { return max(pair & 0xffffu, pair >> 16); };
  uint32_t pair = 0;
#pragma unroll
  for (int i = 0; i < count; ++i) pair = greater_magnitudes<T, false>(raw[i], pair);
  Amax amax{greater(pair), true};
  if (amax.bits >= kInfinityBits<T>) {  // rare
    pair = 0;
#pragma unroll
    for (int i = 0; i < count; ++i) pair = greater_magnitudes<T, true>(raw[i], pair);
    amax = {greater(pair), false};
  }
  return amax;
}

// b to a / b: high + low is 1/b to about 46 bits, so fma(a, high, a * low) is at most an ulp from the IEEE quotient.
// That it gives the same e4m3 code is checked for all significands of 24 bits of b and 11 of a: no quotient is on
// another side of a number of 5 bits, or wrongly such a number (bench/e4m3_division.cpp). high is rounded
// towards zero, so low is not negative and -0 stays -0. Of the exponents: for b in [2^-125, 2^100] high and low are
// normal, or low is exact enough; greater b are divided by 2^64 first, and so must `a` be ("far"). What is lost there
// when `a` becomes subnormal is far below the least code, as are quotients that underflow.
class E4m3Divisor {
 public:
  __device__ explicit E4m3Divisor(float b) {
    far_ = b > 0x1p64f;
    float const near =
        far_ ? fminf(b * 0x1p-64f, 0x1p100f) : b;  // 2^100: all codes are zero, as for infinity
    high_ = __frcp_rz(near);
    low_ = fmaf(-high_, near, 1.f) *
           __uint_as_float(__float_as_uint(high_) + 1);  // not too small: 1 / (2 - 2^-23)
  }

  // 8 quotients to be converted to e4m3. Non-finite elements give NaN if `finite` is false, which may be said of any.
  template <class T>
  __device__ void divide(uint4 raw, bool finite, float (&quotients)[kVector]) const {
    widen(raw, quotients, T{});
    if (!finite || far_) {
#pragma unroll
      for (float& value : quotients) {
        value = fabsf(value) < INFINITY ? value * (far_ ? 0x1p-64f : 1.f) : NAN;
      }
    }
#pragma unroll
    for (float& value : quotients) value = fmaf(value, high_, __fmul_rn(value, low_));
  }

 private:
  float high_, low_;
  bool far_;
};

// From bits of T; with the divisor 448 as above, exhaustively checked too.
template <class T>
__device__ inline float scale_of(uint32_t amax_bits) {
  constexpr float high = 0x1.249248p-9f, low = 0x1.249248p-33f;  // 1 / 448
  float const amax = float(reinterpret_cast<T const&>(amax_bits));
  return amax == 0.f ? 1.f : fmaxf(fmaf(amax, high, __fmul_rn(amax, low)), kMinScale);
}

// The scale of what `lanes` neighbours have, and whether all that this lane has is finite. For whole warps.
struct SharedScale {
  float scale;
  bool finite;
};

template <class T, int lanes, int count>
__device__ inline SharedScale scale_among(uint4 const (&raw)[count]) {
  Amax const amax = amax_of<T>(raw);
  uint32_t bits = amax.bits;
#pragma unroll
  for (int other = lanes / 2; other > 0; other /= 2) bits = max(bits, __shfl_xor_sync(~0u, bits, other));
  return {scale_of<T>(bits), amax.finite};
}

// Four codes, the first in the lowest byte. Saturates; NaN stays NaN.
__device__ inline uint32_t to_e4m3(float a, float b, float c, float d) {
  uint32_t const low = __nv_cvt_float2_to_fp8x2(make_float2(a, b), __NV_SATFINITE, __NV_E4M3);
  uint32_t const high = __nv_cvt_float2_to_fp8x2(make_float2(c, d), __NV_SATFINITE, __NV_E4M3);
  return low | high << 16;
}

// ---- Launches and checks ----

struct Shape {
  dim3 grid, block;
  unsigned cluster = 1;  // along x
};

constexpr int kThreads = 256;

constexpr int64_t kWaveWarps = 4096;  // about 32 for each SM

// Steps and vectors of a lane that quantises in blocks, as few as let all warps run at once, at most two each. `warps`:
// with one vector a step; `of_two`: with two, where `wide`, which is whether a lane may have two.
template <class Go>
void sized_for_a_wave(int64_t warps, int64_t of_two, bool wide, Go&& go) {
  using One = std::integral_constant<int, 1>;
  using Two = std::integral_constant<int, 2>;
  if (!wide || warps < kWaveWarps) {
    go(One{}, One{});
  } else if (of_two < kWaveWarps) {
    go(One{}, Two{});
  } else {
    go(Two{}, Two{});
  }
}

// Blocks of kThreads: a power of two of threads along K (at least `group`, which work together), the rest
// along rows.
inline Shape shape_of(int64_t rows, int64_t width, int group) {
  int64_t x = group;
  while (x < width && x < kThreads) x *= 2;
  int64_t const y = kThreads / x;
  return {dim3(unsigned((rows + y - 1) / y), unsigned((width + x - 1) / x)), dim3(unsigned(x), unsigned(y)),
          1};
}

template <class... Params, class... Args>
void launch(void (*kernel)(Params...), Shape shape, int device, bool enable_pdl, Args... args) {
  cudaLaunchConfig_t config{};
  config.gridDim = shape.grid;
  config.blockDim = shape.block;
  config.stream = static_cast<cudaStream_t>(TVMFFIEnvGetStream(kDLCUDA, device));
  LaunchAttributes attributes(enable_pdl, dim3(shape.cluster));
  attributes.give(config);
  TVM_FFI_CHECK_CUDA_ERROR(cudaLaunchKernelEx(&config, kernel, static_cast<Params>(args)...));
}

// `go` gets the data of x, bf16 or fp16.
template <class Go>
void with_elements(TensorView x, Go&& go) {
  if (same(x.dtype(), kBF16)) {
    go(data_of<__nv_bfloat16>(x));
  } else {
    go(data_of<__half>(x));
  }
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

// At least `to`.
inline int64_t round_up_positive(int64_t value, int64_t to) {
  return std::max(to, (value + to - 1) / to * to);
}

inline int64_t input_stride(TensorView x) { return x.size(0) > 1 ? x.stride(0) : x.size(1); }

// 16 bytes. `once`: L2 forgets them first, so that it keeps what is written instead.
template <bool once>
__device__ inline uint4 load_vector(uint4 const* from) {
  if constexpr (once) return __ldcs(from);
  return *from;
}

// What is quantised, as a policy of the kernels and their launches: `at` returns 8 of a token's `k` elements (`once` as above),
// `check` refuses tensors that it cannot read, and `k_of` returns the elements of a token. Where a token has two passes, a thread
// keeps up to `kMostVectors` times 8 elements in registers between them, as few as let `kWarps` run at once. This one has the
// elements as they are, K a multiple of `multiple`.
template <int multiple>
struct Rows {
  template <class T>
  static constexpr int kMostVectors = 8;
  static constexpr int64_t kWarps = kWaveWarps;
  template <bool once = false, class T, class Index>
  __device__ static uint4 at(T const* row, Index vector, int) {
    return load_vector<once>(reinterpret_cast<uint4 const*>(row) + vector);
  }
  static void check(TensorView x) { check_input(x, multiple); }
  static int64_t k_of(TensorView x) { return x.size(1); }
};

// Zeros beyond a token's `k` elements, a multiple of kVector.
template <class Source, bool once, class T>
__device__ inline uint4 load_padded(T const* row, int vector, int k) {
  return vector < k / kVector ? Source::template at<once>(row, vector, k) : uint4{};
}

}  // namespace fp4d
