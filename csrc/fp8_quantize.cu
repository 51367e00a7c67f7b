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
#include "quantize.h"

namespace fp4d {

constexpr int kBlock = 128;
constexpr int kLanes = kBlock / kVector;  // threads that share a 1x128 block
constexpr int kCached = 8;  // vectors a thread keeps in registers between the two passes of a row

constexpr int kRowThreads = 512;   // at most, so that the cached vectors fit the registers
constexpr int64_t kFewRows = 256;  // about two for each SM

template <class T>
__device__ inline void load(uint4 const* row, int64_t vector, float (&values)[kVector]) {
  widen(row[vector], values, T{});
}

// One block a row.
template <class T>
__global__ void __launch_bounds__(kRowThreads)
    quantize_row(T const* x, int64_t x_stride, uint8_t* q, float* scale, int k) {
  __shared__ uint32_t warp_amax[kRowThreads / 32];
  grid_dependency_wait();
  int64_t const row = blockIdx.x;
  int const vectors = k / kVector;
  auto const* in = reinterpret_cast<uint4 const*>(x + row * x_stride);
  auto* out = reinterpret_cast<uint2*>(q + row * k);

  uint4 cached[kCached];
  float values[kVector];
  float amax = 0.f;
#pragma unroll
  for (int i = 0; i < kCached; ++i) {
    int const v = threadIdx.x + i * blockDim.x;
    cached[i] = v < vectors ? in[v] : uint4{};
  }
#pragma unroll
  for (int i = 0; i < kCached; ++i) {
    widen(cached[i], values, T{});
    amax = finite_amax(values, amax);
  }
  for (int v = threadIdx.x + kCached * blockDim.x; v < vectors; v += blockDim.x) {
    load<T>(in, v, values);
    amax = finite_amax(values, amax);
  }

  // Magnitudes order like their bits.
  uint32_t bits = __reduce_max_sync(~0u, __float_as_uint(amax));
  if (threadIdx.x % 32 == 0) warp_amax[threadIdx.x / 32] = bits;
  __syncthreads();
  bits = threadIdx.x % 32 < blockDim.x / 32 ? warp_amax[threadIdx.x % 32] : 0;
  float const row_scale = scale_of(__uint_as_float(__reduce_max_sync(~0u, bits)));
  if (threadIdx.x == 0) scale[row] = row_scale;
  Divisor const divisor(row_scale);

#pragma unroll
  for (int i = 0; i < kCached; ++i) {
    int const v = threadIdx.x + i * blockDim.x;
    if (v < vectors) {
      widen(cached[i], values, T{});
      out[v] = quantize(values, divisor);
    }
  }
  for (int v = threadIdx.x + kCached * blockDim.x; v < vectors; v += blockDim.x) {
    load<T>(in, v, values);
    out[v] = quantize(values, divisor);
  }
  grid_dependency_launch_dependents();
}

template <class T>
__global__ void __launch_bounds__(kThreads)
    quantize_tensor(T const* x, int64_t x_stride, uint8_t* q, float const* scale, int rows, int k) {
  grid_dependency_wait();
  int64_t const row = int64_t(blockIdx.x) * blockDim.y + threadIdx.y;
  int64_t const vector = int64_t(blockIdx.y) * blockDim.x + threadIdx.x;
  if (row < rows && vector < k / kVector) {
    float values[kVector];
    load<T>(reinterpret_cast<uint4 const*>(x + row * x_stride), vector, values);
    Divisor const divisor(*scale >= kMinScale ? *scale : NAN);
    reinterpret_cast<uint2*>(q + row * k)[vector] = quantize(values, divisor);
  }
  grid_dependency_launch_dependents();
}

template <class T>
__global__ void __launch_bounds__(kThreads)
    quantize_1x128(T const* x, int64_t x_stride, uint8_t* q, float* scale, int64_t scale_row,
                   int64_t scale_block, int rows, int k) {
  grid_dependency_wait();
  int64_t const row = int64_t(blockIdx.x) * blockDim.y + threadIdx.y;
  int64_t const vector = int64_t(blockIdx.y) * blockDim.x + threadIdx.x;
  bool const inside = row < rows && vector < k / kVector;
  float values[kVector] = {};
  if (inside) load<T>(reinterpret_cast<uint4 const*>(x + row * x_stride), vector, values);
  float amax = finite_amax(values, 0.f);
#pragma unroll
  for (int lane = kLanes / 2; lane > 0; lane /= 2) amax = fmaxf(amax, __shfl_xor_sync(~0u, amax, lane));
  float const block_scale = scale_of(amax);
  if (inside) {
    reinterpret_cast<uint2*>(q + row * k)[vector] = quantize(values, Divisor(block_scale));
    if (vector % kLanes == 0) scale[row * scale_row + vector / kLanes * scale_block] = block_scale;
  }
  grid_dependency_launch_dependents();
}

// Returns the device, or -1 when there is nothing to do.
int check(TensorView x, TensorView q, TensorView scale) {
  check_input(x, kVector);
  check_dtype({"q", q}, {kE4M3});
  check_ndim({"q", q}, 2);
  check_size({"q", q}, 0, x.size(0), "M");
  check_size({"q", q}, 1, x.size(1), "K");
  check_contiguous({"q", q});
  check_aligned({"q", q}, 8);
  check_dtype({"scale", scale}, {kF32});
  int const device = check_one_cuda_device({{"x", x}, {"q", q}, {"scale", scale}});
  return x.size(0) == 0 ? -1 : device;
}

template <class Launch>
void dispatch(TensorView x, Launch&& launch) {
  if (same(x.dtype(), kBF16)) {
    launch(data_of<__nv_bfloat16>(x));
  } else {
    launch(data_of<__half>(x));
  }
}

void row(TensorView x, TensorView q, TensorView scale, bool enable_pdl) {
  int const device = check(x, q, scale);
  check_numel({"scale", scale}, x.size(0), "M");
  check_contiguous({"scale", scale});
  if (device < 0) return;
  tvm::ffi::CUDADeviceGuard guard(device);
  int64_t const m = x.size(0), k = x.size(1);
  // Few rows: many threads each, for latency. Many rows: a row just fits the registers, so that several share
  // an SM.
  int64_t const vectors_each = m <= kFewRows ? 2 : kCached;
  int64_t const threads = std::min<int64_t>(
      kRowThreads, std::max<int64_t>(128, round_up((k / kVector + vectors_each - 1) / vectors_each, 32)));
  dispatch(x, [&](auto const* data) {
    launch(quantize_row<std::decay_t<decltype(*data)>>, Shape{dim3(unsigned(m)), dim3(unsigned(threads))},
           device, enable_pdl, data, input_stride(x), data_of<uint8_t>(q), data_of<float>(scale), k);
  });
}

void tensor(TensorView x, TensorView q, TensorView scale, bool enable_pdl) {
  int const device = check(x, q, scale);
  check_numel({"scale", scale}, 1, "per tensor");
  if (device < 0) return;
  tvm::ffi::CUDADeviceGuard guard(device);
  int64_t const m = x.size(0), k = x.size(1);
  dispatch(x, [&](auto const* data) {
    launch(quantize_tensor<std::decay_t<decltype(*data)>>, shape_of(m, k / kVector, 1), device, enable_pdl,
           data, input_stride(x), data_of<uint8_t>(q), data_of<float>(scale), m, k);
  });
}

void block(TensorView x, TensorView q, TensorView scale, bool enable_pdl) {
  int const device = check(x, q, scale);
  int64_t const m = x.size(0), k = x.size(1), blocks = (k + kBlock - 1) / kBlock;
  check_ndim({"scale", scale}, 2);
  check_size({"scale", scale}, 0, m, "M");
  check_size({"scale", scale}, 1, blocks, "ceil(K/128)");
  if (device < 0) return;
  tvm::ffi::CUDADeviceGuard guard(device);
  // Whole blocks along K and whole warps: every lane takes part in the shuffles.
  Shape shape = shape_of(m, blocks * kLanes, kLanes);
  dispatch(x, [&](auto const* data) {
    launch(quantize_1x128<std::decay_t<decltype(*data)>>, shape, device, enable_pdl, data, input_stride(x),
           data_of<uint8_t>(q), data_of<float>(scale), scale.stride(0), scale.stride(1), m, k);
  });
}

}  // namespace fp4d

TVM_FFI_DLL_EXPORT_TYPED_FUNC(fp8_quantize_row, fp4d::row);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(fp8_quantize_tensor, fp4d::tensor);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(fp8_quantize_1x128, fp4d::block);
