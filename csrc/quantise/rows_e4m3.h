// Tokens quantised to e4m3 in rows, [M, K] as libraries multiply them: the kernels and launches of fp8_quantize.cu, which says
// what q and scale are. Of any source of elements (`Rows` in quantise/quantize.h).
#pragma once

#include "common/divide_up.h"
#include "common/scale_block.h"
#include "quantise/quantize.h"

namespace fp4d {

constexpr int kRowThreads = 512;

template <class T>
__device__ inline uint2 quantize(uint4 raw, E4m3Divisor divisor, bool finite) {
  float q[kVector];
  divisor.divide<T>(raw, finite, q);
  return make_uint2(to_e4m3(q[0], q[1], q[2], q[3]), to_e4m3(q[4], q[5], q[6], q[7]));
}

// One block a row.
template <class Source, class T, int each>
__global__ void __launch_bounds__(kRowThreads)
    quantize_row(T const* x, int64_t x_stride, uint8_t* q, float* scale, int k) {
  __shared__ uint32_t warp_amax[kRowThreads / 32];
  grid_dependency_launch_dependents();
  grid_dependency_wait();
  int64_t const row = blockIdx.x;
  int const vectors = k / kVector;
  auto const load = [in = x + row * x_stride, k](int vector) { return Source::at(in, vector, k); };
  auto* out = reinterpret_cast<uint2*>(q + row * k);

  uint4 cached[each];
#pragma unroll
  for (int i = 0; i < each; ++i) {
    int const v = threadIdx.x + i * blockDim.x;
    cached[i] = v < vectors ? load(v) : uint4{};
  }
  Amax amax = amax_of<T>(cached);
  for (int v = threadIdx.x + each * blockDim.x; v < vectors; v += blockDim.x) {
    uint4 const raw[1] = {load(v)};
    Amax const other = amax_of<T>(raw);
    amax = {max(amax.bits, other.bits), amax.finite && other.finite};
  }

  uint32_t bits = __reduce_max_sync(~0u, amax.bits);
  if (threadIdx.x % 32 == 0) warp_amax[threadIdx.x / 32] = bits;
  __syncthreads();
  bits = threadIdx.x % 32 < blockDim.x / 32 ? warp_amax[threadIdx.x % 32] : 0;
  float const row_scale = scale_of<T>(__reduce_max_sync(~0u, bits));
  if (threadIdx.x == 0) scale[row] = row_scale;
  E4m3Divisor const divisor(row_scale);

#pragma unroll
  for (int i = 0; i < each; ++i) {
    int const v = threadIdx.x + i * blockDim.x;
    if (v < vectors) out[v] = quantize<T>(cached[i], divisor, amax.finite);
  }
  for (int v = threadIdx.x + each * blockDim.x; v < vectors; v += blockDim.x) {
    out[v] = quantize<T>(load(v), divisor, amax.finite);
  }
}

template <class Source, class T>
__global__ void __launch_bounds__(kThreads)
    quantize_tensor(T const* x, int64_t x_stride, uint8_t* q, float const* scale, int rows, int k) {
  grid_dependency_launch_dependents();
  grid_dependency_wait();
  int64_t const row = int64_t(blockIdx.x) * blockDim.y + threadIdx.y;
  int64_t const vector = int64_t(blockIdx.y) * blockDim.x + threadIdx.x;
  if (row < rows && vector < k / kVector) {
    uint4 const raw[1] = {Source::at(x + row * x_stride, vector, k)};
    E4m3Divisor const divisor(*scale >= kMinScale ? *scale : NAN);
    reinterpret_cast<uint2*>(q + row * k)[vector] = quantize<T>(raw[0], divisor, amax_of<T>(raw).finite);
  }
}

// A thread has `vectors` times 8 elements of a step, `steps` of them along K. Two vectors share what a scale costs and
// need `q` aligned to 16 bytes, one lets more warps run.
template <class Source, class T, int steps, int vectors>
__global__ void __launch_bounds__(kThreads)
    quantize_1x128(T const* x, int64_t x_stride, uint8_t* q, float* scale, int64_t scale_row,
                   int64_t scale_block, int rows, int k) {
  constexpr int kLanes = kScaleBlock / (vectors * kVector);  // that share a scale
  grid_dependency_launch_dependents();
  grid_dependency_wait();
  int64_t const row = int64_t(blockIdx.x) * blockDim.y + threadIdx.y;
  int64_t const first = int64_t(blockIdx.y) * steps * blockDim.x + threadIdx.x;
  T const* const from = x + row * x_stride;
  uint4 raw[steps][vectors] = {};
#pragma unroll
  for (int i = 0; i < steps; ++i) {
#pragma unroll
    for (int v = 0; v < vectors; ++v) {
      int64_t const vector = (first + i * int64_t(blockDim.x)) * vectors + v;
      if (row < rows && vector < k / kVector) raw[i][v] = Source::at(from, vector, k);
    }
  }
#pragma unroll
  for (int i = 0; i < steps; ++i) {
    auto const [block_scale, finite] = scale_among<T, kLanes>(raw[i]);
    E4m3Divisor const divisor(block_scale);
    int64_t const unit = first + i * int64_t(blockDim.x);
    if (row >= rows || unit >= k / (vectors * kVector)) continue;
    if constexpr (vectors == 1) {
      reinterpret_cast<uint2*>(q + row * k)[unit] = quantize<T>(raw[i][0], divisor, finite);
    } else {
      uint2 const low = quantize<T>(raw[i][0], divisor, finite),
                  high = quantize<T>(raw[i][1], divisor, finite);
      reinterpret_cast<uint4*>(q + row * k)[unit] = make_uint4(low.x, low.y, high.x, high.y);
    }
    if (unit % kLanes == 0) scale[row * scale_row + unit / kLanes * scale_block] = block_scale;
  }
}

// Returns the device, or -1 when there is nothing to do.
template <class Source>
int check_rows(TensorView x, TensorView q, TensorView scale) {
  Source::check(x);
  check_dtype({"q", q}, {kE4M3});
  check_ndim({"q", q}, 2);
  check_size({"q", q}, 0, x.size(0), "M");
  check_size({"q", q}, 1, Source::k_of(x), "K");
  check_contiguous({"q", q});
  check_aligned({"q", q}, 8);
  check_dtype({"scale", scale}, {kF32});
  int const device = check_one_cuda_device({{"x", x}, {"q", q}, {"scale", scale}});
  return x.size(0) == 0 ? -1 : device;
}

template <class Source>
void quantize_by_row(TensorView x, TensorView q, TensorView scale, bool enable_pdl) {
  int const device = check_rows<Source>(x, q, scale);
  check_numel({"scale", scale}, x.size(0), "M");
  check_contiguous({"scale", scale});
  if (device < 0) return;
  tvm::ffi::CUDADeviceGuard guard(device);
  int64_t const m = x.size(0), k = Source::k_of(x);
  // As few vectors a thread as let all rows run at once, for latency; with more rows a row just fits the
  // registers, so that several share an SM.
  int64_t const vectors = k / kVector;
  int64_t const wanted =
      std::max(m * vectors / 32 / Source::kWarps + 1, (vectors + kRowThreads - 1) / kRowThreads);
  with_elements(x, [&](auto const* data) {
    using T = std::decay_t<decltype(*data)>;
    auto const go = [&](auto each) {
      int64_t const threads =
          std::min<int64_t>(kRowThreads, round_up_positive((vectors + each - 1) / each, 32));
      launch(quantize_row<Source, T, each>, Shape{dim3(unsigned(m)), dim3(unsigned(threads)), 1}, device,
             enable_pdl, data, input_stride(x), data_of<uint8_t>(q), data_of<float>(scale), k);
    };
    if (wanted <= 2) {
      go(std::integral_constant<int, 2>{});
    } else if (wanted <= 4) {
      go(std::integral_constant<int, 4>{});
    } else {
      go(std::integral_constant<int, Source::template kMostVectors<T>>{});
    }
  });
}

template <class Source>
void quantize_by_tensor(TensorView x, TensorView q, TensorView scale, bool enable_pdl) {
  int const device = check_rows<Source>(x, q, scale);
  check_numel({"scale", scale}, 1, "per tensor");
  if (device < 0) return;
  tvm::ffi::CUDADeviceGuard guard(device);
  int64_t const m = x.size(0), k = Source::k_of(x);
  with_elements(x, [&](auto const* data) {
    launch(quantize_tensor<Source, std::decay_t<decltype(*data)>>, shape_of(m, k / kVector, 1), device,
           enable_pdl, data, input_stride(x), data_of<uint8_t>(q), data_of<float>(scale), m, k);
  });
}

// On checked operands, with their device current.
template <class Source>
void launch_1x128(TensorView x, TensorView q, TensorView scale, int device, bool enable_pdl) {
  int64_t const m = x.size(0), k = Source::k_of(x), blocks = divide_up(k, int64_t(kScaleBlock));
  int64_t const warps = m * (k / kVector) / 32;
  bool const wide = k % (2 * kVector) == 0 && reinterpret_cast<uintptr_t>(data_of<uint8_t>(q)) % 16 == 0;
  with_elements(x, [&](auto const* data) {
    using T = std::decay_t<decltype(*data)>;
    sized_for_a_wave(warps, warps / 2, wide, [&](auto steps, auto vectors) {
      // Whole blocks along K and whole warps: every lane takes part in the shuffles.
      int const lanes = kScaleBlock / (vectors * kVector);
      Shape shape = shape_of(m, divide_up(blocks, int64_t(steps)) * lanes, lanes);
      launch(quantize_1x128<Source, T, steps, vectors>, shape, device, enable_pdl, data, input_stride(x),
             data_of<uint8_t>(q), data_of<float>(scale), scale.stride(0), scale.stride(1), m, k);
    });
  });
}

template <class Source>
void quantize_by_1x128(TensorView x, TensorView q, TensorView scale, bool enable_pdl) {
  int const device = check_rows<Source>(x, q, scale);
  check_ndim({"scale", scale}, 2);
  check_size({"scale", scale}, 0, x.size(0), "M");
  check_size({"scale", scale}, 1, divide_up(Source::k_of(x), int64_t(kScaleBlock)), "ceil(K/128)");
  if (device < 0) return;
  tvm::ffi::CUDADeviceGuard guard(device);
  launch_1x128<Source>(x, q, scale, device, enable_pdl);
}

}  // namespace fp4d
