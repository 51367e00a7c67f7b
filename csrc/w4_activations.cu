// bf16 or fp16 [M, K] -> operand B of w4_gemm_sm90.cu, and for FP8 its quantisation. Non-finite elements become NaN in
// e4m3 and do not enter a scale.
//
//   w4_quantize_row(x, packed, scale, enable_pdl)     e4m3, dynamic, one scale a token; scale f32 [M], written
//   w4_quantize_tensor(x, packed, scale, enable_pdl)  e4m3, static; scale f32, 1 element, read; NaN, negative or under
//                                                     2^-116 gives NaN everywhere
//   w4_pack(x, packed, enable_pdl)                    the 16 bits as they are
//     x       bf16 or fp16 [M, K], K contiguous, K % 16 == 0, row stride a multiple of 8, 16-byte aligned
//     packed  uint8, contiguous, 16-byte aligned, written: e4m3 [ceil(K/128), ceil(M/8), 1024], 16 bits [ceil(K/64),
//             ceil(M/8), 1024]. Tokens beyond M and k beyond K are zero.
//
// scale = amax / 448, at least 2^-116, 1 where all is zero: the numbers are those of fp8_quantize.cu, bit for bit.
//
// 1024 bytes hold 8 tokens of 128 bytes each (128 k in e4m3, 64 k in 16 bits) as wgmma reads them with 128-byte
// swizzle: the 16-byte column j of token i is stored at j ^ i. Within 64 k = 16 c + r, c = 0..3, the order is that of
// the weights' registers (w4_dequant.h), so that a lane there holds whole scale blocks:
//   e4m3     column 4 (k / 64 % 2) + 2 s + o, byte 4 c + j:       k = 16 c + 8 s + 2 j + o
//   16 bits  column 2 s + h,                  bytes 4 c .. 4c+3:  k = 16 c + 4 s + 2 h, + 1
// A thread packs 32 k: r in 8 v .. 8 v + 7 for all c. It reads four times 16 bytes and writes whole columns.
//
// Capture-safe: only launches. With enable_pdl the next kernel may start at once; it must wait before it reads.
#include "quantize.h"

namespace fp4d {

constexpr int kUnitK = 32;  // of a thread
constexpr int64_t kBlockTokens = 8, kBlockBytes = 1024;
constexpr int kCachedUnits = 2;  // that a thread keeps in registers between the two passes of a row
constexpr int kMaxThreads = 512;
constexpr int64_t kFewTokens = 256;  // about two blocks for each SM

// A thread's 32 k.
struct Unit {
  int chunk, half;  // k / 64, v

  __device__ explicit Unit(int index) : chunk(index / 2), half(index % 2) {}
  __device__ int k(int c) const { return chunk * 64 + c * 16 + half * 8; }
};

__device__ inline void load_unit(void const* row, Unit unit, int k, uint4 (&raw)[4]) {
#pragma unroll
  for (int c = 0; c < 4; ++c) {
    raw[c] = row != nullptr && unit.k(c) < k ? static_cast<uint4 const*>(row)[unit.k(c) / kVector] : uint4{};
  }
}

// Where a token's 128 bytes start.
__device__ inline uint8_t* token_bytes(uint8_t* packed, int64_t block_k, int64_t token_blocks,
                                       int64_t token) {
  return packed + (block_k * token_blocks + token / kBlockTokens) * kBlockBytes + token % kBlockTokens * 128;
}

__device__ inline void store_column(uint8_t* bytes, int64_t token, int column, uint4 value) {
  reinterpret_cast<uint4*>(bytes)[column ^ int(token % kBlockTokens)] = value;
}

template <class T>
__device__ inline void store_e4m3(uint4 const (&raw)[4], Divisor scale, uint8_t* packed, Unit unit,
                                  int64_t token_blocks, int64_t token) {
  uint32_t even[4], odd[4];
#pragma unroll
  for (int c = 0; c < 4; ++c) {
    float values[kVector];
    widen(raw[c], values, T{});
    uint2 const q = quantize(values, scale);
    even[c] = __byte_perm(q.x, q.y, 0x6420);
    odd[c] = __byte_perm(q.x, q.y, 0x7531);
  }
  uint8_t* const bytes = token_bytes(packed, unit.chunk / 2, token_blocks, token);
  int const column = unit.chunk % 2 * 4 + unit.half * 2;
  store_column(bytes, token, column, make_uint4(even[0], even[1], even[2], even[3]));
  store_column(bytes, token, column + 1, make_uint4(odd[0], odd[1], odd[2], odd[3]));
}

template <class T>
__device__ inline float unit_amax(uint4 const (&raw)[4], float amax) {
#pragma unroll
  for (int c = 0; c < 4; ++c) {
    float values[kVector];
    widen(raw[c], values, T{});
    amax = finite_amax(values, amax);
  }
  return amax;
}

// One block a token; `units` of 32 k cover the padded K.
template <class T, bool dynamic>
__global__ void __launch_bounds__(kMaxThreads)
    quantize_tokens(T const* x, int64_t x_stride, uint8_t* packed, float* scale, int64_t token_blocks,
                    int rows, int k, int units) {
  __shared__ uint32_t warp_amax[kMaxThreads / 32];
  grid_dependency_launch_dependents();
  grid_dependency_wait();
  int64_t const token = blockIdx.x;
  T const* const row = token < rows ? x + token * x_stride : nullptr;

  uint4 cached[kCachedUnits][4];
#pragma unroll
  for (int i = 0; i < kCachedUnits; ++i) {
    load_unit(row, Unit(threadIdx.x + i * blockDim.x), k, cached[i]);
  }
  float token_scale;
  if constexpr (dynamic) {
    float amax = 0.f;
#pragma unroll
    for (int i = 0; i < kCachedUnits; ++i) amax = unit_amax<T>(cached[i], amax);
    for (int u = threadIdx.x + kCachedUnits * blockDim.x; u < units; u += blockDim.x) {
      uint4 raw[4];
      load_unit(row, Unit(u), k, raw);
      amax = unit_amax<T>(raw, amax);
    }
    // Magnitudes order like their bits.
    uint32_t bits = __reduce_max_sync(~0u, __float_as_uint(amax));
    if (threadIdx.x % 32 == 0) warp_amax[threadIdx.x / 32] = bits;
    __syncthreads();
    bits = threadIdx.x % 32 < blockDim.x / 32 ? warp_amax[threadIdx.x % 32] : 0;
    token_scale = scale_of(__uint_as_float(__reduce_max_sync(~0u, bits)));
    if (threadIdx.x == 0 && token < rows) scale[token] = token_scale;
  } else {
    token_scale = *scale >= kMinScale ? *scale : NAN;
    if (token >= rows) token_scale = 1.f;
  }
  // Zeros of the padding stay zero under any scale but NaN.
  Divisor const divisor(token_scale);
#pragma unroll
  for (int i = 0; i < kCachedUnits; ++i) {
    int const u = threadIdx.x + i * blockDim.x;
    if (u < units) store_e4m3<T>(cached[i], divisor, packed, Unit(u), token_blocks, token);
  }
  for (int u = threadIdx.x + kCachedUnits * blockDim.x; u < units; u += blockDim.x) {
    uint4 raw[4];
    load_unit(row, Unit(u), k, raw);
    store_e4m3<T>(raw, divisor, packed, Unit(u), token_blocks, token);
  }
}

// A thread a unit.
__global__ void __launch_bounds__(kThreads) pack_tokens(uint16_t const* x, int64_t x_stride, uint8_t* packed,
                                                        int64_t token_blocks, int rows, int k, int units) {
  grid_dependency_launch_dependents();
  grid_dependency_wait();
  int64_t const token = int64_t(blockIdx.x) * blockDim.y + threadIdx.y;
  int const index = blockIdx.y * blockDim.x + threadIdx.x;
  if (token >= token_blocks * kBlockTokens || index >= units) return;
  Unit const unit(index);
  uint4 raw[4];
  load_unit(token < rows ? x + token * x_stride : nullptr, unit, k, raw);
  uint8_t* const bytes = token_bytes(packed, unit.chunk, token_blocks, token);
  store_column(bytes, token, unit.half * 4, make_uint4(raw[0].x, raw[1].x, raw[2].x, raw[3].x));
  store_column(bytes, token, unit.half * 4 + 1, make_uint4(raw[0].y, raw[1].y, raw[2].y, raw[3].y));
  store_column(bytes, token, unit.half * 4 + 2, make_uint4(raw[0].z, raw[1].z, raw[2].z, raw[3].z));
  store_column(bytes, token, unit.half * 4 + 3, make_uint4(raw[0].w, raw[1].w, raw[2].w, raw[3].w));
}

// `block_k`: elements of a token in 128 bytes.
void check_packed(TensorView x, TensorView packed, int64_t block_k) {
  check_input(x, 16);
  check_dtype({"packed", packed}, {kU8});
  check_ndim({"packed", packed}, 3);
  check_size({"packed", packed}, 0, (x.size(1) + block_k - 1) / block_k,
             block_k == 128 ? "ceil(K/128)" : "ceil(K/64)");
  check_size({"packed", packed}, 1, (x.size(0) + kBlockTokens - 1) / kBlockTokens, "ceil(M/8)");
  check_size({"packed", packed}, 2, kBlockBytes, "bytes of 8 tokens");
  check_contiguous({"packed", packed});
  check_aligned({"packed", packed}, 16);
}

template <bool dynamic>
void quantize_e4m3(TensorView x, TensorView packed, TensorView scale, bool enable_pdl) {
  check_packed(x, packed, 128);
  check_dtype({"scale", scale}, {kF32});
  check_numel({"scale", scale}, dynamic ? x.size(0) : 1, dynamic ? "M" : "per tensor");
  check_contiguous({"scale", scale});
  int const device = check_one_cuda_device({{"x", x}, {"packed", packed}, {"scale", scale}});
  if (x.size(0) == 0) return;
  tvm::ffi::CUDADeviceGuard guard(device);
  int64_t const units = packed.size(0) * 128 / kUnitK, tokens = packed.size(1) * kBlockTokens;
  // Few tokens: many threads each, for latency. Many: a token just fits the registers, and several share an SM.
  int64_t const each = x.size(0) <= kFewTokens ? 1 : kCachedUnits;
  int64_t const threads = std::min<int64_t>(kMaxThreads, round_up((units + each - 1) / each, 32));
  Shape const shape{dim3(unsigned(tokens)), dim3(unsigned(threads))};
  auto const go = [&](auto const* data) {
    launch(quantize_tokens<std::decay_t<decltype(*data)>, dynamic>, shape, device, enable_pdl, data,
           input_stride(x), data_of<uint8_t>(packed), data_of<float>(scale), packed.size(1), x.size(0),
           x.size(1), units);
  };
  if (same(x.dtype(), kBF16)) {
    go(data_of<__nv_bfloat16>(x));
  } else {
    go(data_of<__half>(x));
  }
}

void quantize_row(TensorView x, TensorView packed, TensorView scale, bool enable_pdl) {
  quantize_e4m3<true>(x, packed, scale, enable_pdl);
}

void quantize_tensor(TensorView x, TensorView packed, TensorView scale, bool enable_pdl) {
  quantize_e4m3<false>(x, packed, scale, enable_pdl);
}

void pack(TensorView x, TensorView packed, bool enable_pdl) {
  check_packed(x, packed, 64);
  int const device = check_one_cuda_device({{"x", x}, {"packed", packed}});
  if (x.size(0) == 0) return;
  tvm::ffi::CUDADeviceGuard guard(device);
  int64_t const units = packed.size(0) * 64 / kUnitK;
  launch(pack_tokens, shape_of(packed.size(1) * kBlockTokens, units, 1), device, enable_pdl,
         data_of<uint16_t>(x), input_stride(x), data_of<uint8_t>(packed), packed.size(1), x.size(0),
         x.size(1), units);
}

}  // namespace fp4d

TVM_FFI_DLL_EXPORT_TYPED_FUNC(w4_quantize_row, fp4d::quantize_row);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(w4_quantize_tensor, fp4d::quantize_tensor);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(w4_pack, fp4d::pack);
