// NVFP4 weights in W4P order -> e4m3 [N, K] row by row: e4m3_rn(q * s / 8), the weights of the FP8 path. For many
// tokens this read and write costs less than what a GEMM on ready FP8 weights gains over dequantising in its loop.
//
//   w4_to_e4m3(w, out, enable_pdl)
//     w    uint8 [ceil(N/64), ceil(K/64), 2304], W4P, contiguous, 16-byte aligned
//     out  e4m3 [N, K], contiguous, 16-byte aligned, K % 16 == 0, written
//
// Capture-safe: only launches.
#include "quantise/quantize.h"
#include "weights/w4_checks.h"
#include "weights/w4_dequant.h"

namespace fp4d {

constexpr int kWarps = w4::kUnits;  // a warp has 16 rows of the chunk
constexpr int kRunChunks = 8;       // along K, in a block; all loads are under way before the first store

__global__ void __launch_bounds__(kWarps * 32)
    w4_to_e4m3_kernel(uint8_t const* w, uint8_t* out, int n, int k, int chunks) {
  grid_dependency_wait();
  int const unit = threadIdx.x / 32, lane = threadIdx.x % 32;
  int const first = blockIdx.x * kRunChunks;
  uint8_t const* from = w + (int64_t(blockIdx.y) * chunks + first) * w4::kChunkBytes;
  uint4 codes[kRunChunks];
  uint32_t scales[kRunChunks];
#pragma unroll
  for (int i = 0; i < kRunChunks; ++i) {
    if (first + i >= chunks) break;
    uint8_t const* const chunk = from + i * w4::kChunkBytes;
    codes[i] = reinterpret_cast<uint4 const*>(chunk + unit * w4::kUnitBytes)[lane];
    scales[i] = *reinterpret_cast<uint16_t const*>(chunk + w4::kScaleOffset + lane * 8 + unit * 2);
  }
  int const row = blockIdx.y * w4::kChunkRows + unit * 16 + lane / 4;
#pragma unroll
  for (int i = 0; i < kRunChunks; ++i) {
    int const column = (first + i) * w4::kChunkK + lane % 4 * 16;
    if (column >= k) break;
    w4::Lut luts[2];
    w4::e4m3_luts(__byte_perm(scales[i], 0, w4::kLowPair), luts);
    uint32_t const words[2][2] = {{codes[i].x, codes[i].z}, {codes[i].y, codes[i].w}};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (row + 8 * half >= n) continue;
      uint4 bytes;
      w4::to_e4m3(words[half][0], luts[half], bytes.x, bytes.y);
      w4::to_e4m3(words[half][1], luts[half], bytes.z, bytes.w);
      *reinterpret_cast<uint4*>(out + int64_t(row + 8 * half) * k + column) = bytes;
    }
  }
  grid_dependency_launch_dependents();
}

void w4_to_e4m3(TensorView w, TensorView out, bool enable_pdl) {
  check_dtype({"out", out}, {kE4M3});
  check_ndim({"out", out}, 2);
  int64_t const n = out.size(0), k = out.size(1);
  check_at_most("N", n, int64_t(65535) * w4::kChunkRows, "the grid");
  check_at_least("N", n, 1, "out");
  check_at_most("K", k, kMaxRows, "32-bit problem sizes");
  check_at_least("K", k, 16, "out");
  check_multiple("K", k, 16, "whole blocks");
  check_contiguous({"out", out});
  check_aligned({"out", out}, 16);
  w4::check_weights(w, n, k);
  int64_t const row_blocks = w.size(0), chunks = w.size(1);
  int const device = check_one_cuda_device({{"w", w}, {"out", out}});
  tvm::ffi::CUDADeviceGuard guard(device);
  dim3 const grid(unsigned((chunks + kRunChunks - 1) / kRunChunks), unsigned(row_blocks));
  launch(w4_to_e4m3_kernel, Shape{grid, dim3(kWarps * 32)}, device, enable_pdl, data_of<uint8_t>(w),
         data_of<uint8_t>(out), int(n), int(k), int(chunks));
}

}  // namespace fp4d

TVM_FFI_DLL_EXPORT_TYPED_FUNC(w4_to_e4m3, fp4d::w4_to_e4m3);
