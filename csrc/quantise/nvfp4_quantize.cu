// bf16 or fp16 [M, K] -> NVFP4, value = q * sf * global_scale.
//
//   nvfp4_quantize(x, global_scale, q, sf, enable_pdl)
//     x            bf16 or fp16 [M, K], K contiguous, K % 16 == 0, row stride a multiple of 8, 16-byte aligned
//     global_scale f32, 1 element, on the device
//     q            u8 or e2m1x2 [M, K/2], contiguous, 8-byte aligned, even element in the low nibble, written
//     sf           u8 or e4m3, round_up(M, 128) * round_up(K/16, 4) elements in the 128x4 layout, contiguous,
//                  4-byte aligned; every byte is written, padding zero
//
// sf = amax / (6 * global_scale) clamped to [2^-9, 448]; 1 for a block of zeros; NaN for a block with a NaN
// or an Inf, or where global_scale is not at least 2^-116. Elements: x / (sf * global_scale), half to even,
// saturating at 6. Capture-safe: only launches.
#include "quantise/quantize.h"

namespace fp4d {

constexpr int kBlock = 16;
constexpr float kE2m1Max = 6.f;
constexpr float kE4m3Min = 0x1p-9f;

// The e2m1 conversion is in every architecture- or family-specific target from SM100 on.
#if defined(__CUDA_ARCH_FAMILY_SPECIFIC__) || defined(__CUDA_ARCH_SPECIFIC__)
#if __CUDA_ARCH__ >= 1000
#define FP4D_HARDWARE_E2M1 1
#endif
#endif

// Two codes, `low` in the low nibble. NaN becomes code 7; a quotient of -0 becomes code 0 like +0.
__device__ inline uint32_t encode_e2m1(float low, float high) {
#ifdef FP4D_HARDWARE_E2M1
  uint32_t pair;
  asm("{\n.reg .b8 byte;\ncvt.rn.satfinite.e2m1x2.f32 byte, %2, %1;\ncvt.u32.u8 %0, byte;\n}"
      : "=r"(pair)
      : "f"(low + 0.f), "f"(high + 0.f));  // -0 + 0 = +0
  return pair;
#else
  auto const encode = [](float value) {
    float const magnitude = fminf(fabsf(value), kE2m1Max);  // NaN: 6
    // Codes against values are three straight lines, .5, 1 and 2 apart, bending downwards: the least is
    // right.
    float code = rintf(magnitude * 2.f);
    code = fminf(code, rintf(magnitude) + 2.f);
    code = fminf(code, rintf(magnitude * .5f) + 4.f);
    return uint32_t(code) | (value < 0.f ? 8u : 0u);
  };
  return encode(low) | encode(high) << 4;
#endif
}

__device__ inline uint8_t scale_of(float amax, bool finite, float global_scale) {
  if (!finite || !(global_scale >= kMinScale)) return 0x7f;
  float const raw = __fdiv_rn(amax, global_scale * kE2m1Max);
  return to_e4m3(raw == 0.f ? 1.f : fminf(fmaxf(raw, kE4m3Min), kE4m3Max));
}

// Quantises the block of 16 that starts at `in`; returns its scale.
template <class T>
__device__ inline uint8_t quantize_block(uint4 const* in, uint2* out, float global_scale) {
  float values[2][kVector];
  uint4 const first = in[0], second = in[1];
  widen(first, values[0], T{});
  widen(second, values[1], T{});
  float amax = 0.f;
  bool finite = true;
#pragma unroll
  for (int i = 0; i < kBlock; ++i) {
    float const magnitude = fabsf(values[i / kVector][i % kVector]);
    finite &= magnitude < INFINITY;
    amax = fmaxf(amax, magnitude);
  }
  uint8_t const sf = scale_of(amax, finite, global_scale);
  Divisor const divisor(from_e4m3(sf) * global_scale);
  uint32_t words[2] = {0, 0};
#pragma unroll
  for (int i = 0; i < kBlock; i += 2) {
    float const* pair = &values[i / kVector][i % kVector];
    words[i / kVector] |= encode_e2m1(divisor.divide(pair[0]), divisor.divide(pair[1])) << (i % kVector * 4);
  }
  *out = make_uint2(words[0], words[1]);
  return sf;
}

// One thread a block of 16, over the padded scale matrix; four neighbours write one word of scales.
template <class T>
__global__ void __launch_bounds__(kThreads)
    quantize_nvfp4(T const* x, int64_t x_stride, float const* global_scale, uint8_t* q, uint32_t* sf,
                   int rows, int padded_rows, int k) {
  grid_dependency_wait();
  int64_t const row = int64_t(blockIdx.x) * blockDim.y + threadIdx.y;
  int const column = blockIdx.y * blockDim.x + threadIdx.x;
  int const columns = k / kBlock, words = (columns + 3) / 4;
  uint32_t scales = 0;
  if (row < rows && column < columns) {
    auto const* in = reinterpret_cast<uint4 const*>(x + row * x_stride) + column * 2;
    auto* out = reinterpret_cast<uint2*>(q + row * (k / 2)) + column;
    scales = uint32_t(quantize_block<T>(in, out, *global_scale)) << (column % 4 * 8);
  }
  scales |= __shfl_xor_sync(~0u, scales, 1);
  scales |= __shfl_xor_sync(~0u, scales, 2);
  if (row < padded_rows && column % 4 == 0 && column / 4 < words) {
    // 128 words a tile of 128x4 scales; word (r % 32) * 4 + r / 32 of it holds the four scales of row r.
    int64_t const tile = row / 128 * words + column / 4;
    sf[tile * 128 + row % 32 * 4 + row % 128 / 32] = scales;
  }
  grid_dependency_launch_dependents();
}

void run(TensorView x, TensorView global_scale, TensorView q, TensorView sf, bool enable_pdl) {
  check_input(x, kBlock);
  int64_t const m = x.size(0), k = x.size(1);
  int64_t const padded_rows = (m + 127) / 128 * 128, words = (k / kBlock + 3) / 4;
  check_dtype({"global_scale", global_scale}, {kF32});
  check_numel({"global_scale", global_scale}, 1, "per tensor");
  check_dtype({"q", q}, {kU8, kE2M1x2});
  check_ndim({"q", q}, 2);
  check_size({"q", q}, 0, m, "M");
  check_size({"q", q}, 1, k / 2, "K/2");
  check_contiguous({"q", q});
  check_aligned({"q", q}, 8);
  check_dtype({"sf", sf}, {kU8, kE4M3});
  check_numel({"sf", sf}, padded_rows * words * 4, "128x4 layout: round_up(M, 128) * round_up(K/16, 4)");
  check_contiguous({"sf", sf});
  check_aligned({"sf", sf}, 4);
  int const device = check_one_cuda_device({{"x", x}, {"global_scale", global_scale}, {"q", q}, {"sf", sf}});
  if (m == 0) return;
  tvm::ffi::CUDADeviceGuard guard(device);
  Shape const shape = shape_of(padded_rows, words * 4, 4);
  with_elements(x, [&](auto const* data) {
    launch(quantize_nvfp4<std::decay_t<decltype(*data)>>, shape, device, enable_pdl, data, input_stride(x),
           data_of<float>(global_scale), data_of<uint8_t>(q), data_of<uint32_t>(sf), m, padded_rows, k);
  });
}

}  // namespace fp4d

TVM_FFI_DLL_EXPORT_TYPED_FUNC(nvfp4_quantize, fp4d::run);
