// out = alpha * (x @ W^T) + bias for many tokens or many rows on SM90: NVFP4 weights in W4P order, wgmma.
//
//   w4_gemm(x, x_scale, w, alpha, bias, out, enable_pdl)               launch shape from w4_gemm_plan
//   w4_gemm_shaped(x, x_scale, w, alpha, bias, out, shape, enable_pdl)
//     shape   [multicast (1, 2, 4), split (1, 2, 3, 4, 8), raster (1 or more)]; multicast * split <= 8, split <= stages of K
//   w4_gemm_plan(m, n, k, multiprocessors) -> [multicast, split, raster, clocks that a model expects]; pure
//   w4_gemm_tokens() -> tokens of a tile
//     x       uint8, what w4_activations.cu writes, 16-byte aligned:
//             FP4D_ACT == 8   e4m3, [ceil(K/128), ceil(M/8), 1024], and x_scale f32, 1 element or [M]
//             FP4D_ACT == 16  type of out, [ceil(K/64), ceil(M/8), 1024], and x_scale None
//     w       uint8 [ceil(N/64), ceil(K/64), 2304], W4P, contiguous, 16-byte aligned, no NaN and no sign in its scales
//     alpha   f32, 1 element or [N]
//     bias    None or [N], type of out
//     out     bf16 or fp16 (FP4D_OUT) [M, N], contiguous, N % 8 == 0, 16-byte aligned, written
//
// FP4D_TOKENS is the tile's number of tokens (32 for FP8, 64, 128, and 256 for 16 bits); every build takes every M.
// FP4D_ACT == 16: weights are exact. FP4D_ACT == 8: a weight is e4m3(e2m1 * block scale / 8), rounded to nearest even,
// and sums of at most 512 k (64 tokens: 256 k) are what FP8 wgmma keeps (13 bits behind the point of the largest addend,
// truncated at every MMA of 32 k: https://arxiv.org/abs/2412.19437, section 3.3.2); those are added in f32.
// The same inputs give the same bits, whatever ran before; another launch shape may give others (order of sums).
//
// With enable_pdl, w must not be written by the kernel before this one: it is read before that has finished.
// Capture-safe: only launches. The first call on a device asks it for its properties.
#include "gdc_guard.h"

#if !defined(FP4D_OUT) || !defined(FP4D_ACT) || !defined(FP4D_TOKENS)
#error \
    "FP4D_OUT: 0 = bf16, 1 = fp16; FP4D_ACT: 8 or 16 bits of an activation; FP4D_TOKENS: 32, 64, 128 or 256"
#endif

#include <tvm/ffi/container/array.h>
#include <tvm/ffi/extra/c_env_api.h>
#include <tvm/ffi/extra/cuda/device_guard.h>

#include "ffi_checks.h"
#include "per_device.h"
#include "w4_gemm_plan.h"
#include "w4_gemm_sm90.h"

namespace fp4d {

using Used = Tile<FP4D_TOKENS>;
constexpr DLDataType kOut = FP4D_OUT == 0 ? kBF16 : kF16;
constexpr int64_t kStageK = Used::kStageChunks * w4::kChunkK;
constexpr int64_t kTokenBlock = 8, kBlockBytes = 1024;  // of packed activations
constexpr int64_t kMaxRaster = 1 << 20;
// A warp's instructions for a chunk on the half-rate pipe, two clocks each: counted in the machine code.
constexpr double kDequantizeClocks = 2 * (kFp8 ? 35 : 50);

// Measured: bench/NOTES.md, "w4 large M", fourth run.
struct Clocks {
  double alone, stage, pair;
};
constexpr Clocks kClocks = !kFp8                 ? Clocks{0, 0, 0}
                           : Used::kTokens == 32 ? Clocks{650, 590, 600}
                           : Used::kTokens == 64 ? Clocks{880, 720, 740}
                                                 : Clocks{0, 930, 960};

constexpr TileSizes kSizes{Used::kTokens,     Used::kRows,
                           kStageK,           Used::kWeightBytes,
                           Used::kTokenBytes, Used::kCtas,
                           Used::kMostSplit,  kDequantizeClocks * Used::kStageChunks * Used::kConsumers,
                           kClocks.alone,     kClocks.stage,
                           kClocks.pair};

int log2_of(int64_t value) {
  int log = 0;
  while (int64_t(1) << log < value) ++log;
  return log;
}

// Makes the kernel ready on the current device and returns its multiprocessors.
int64_t multiprocessors(int device) {
  static PerDevice<int> counts;
  return counts.of(device, [&] {
    int count = 0;
    TVM_FFI_CHECK_CUDA_ERROR(cudaFuncSetAttribute(
        w4_gemm_kernel<Used>, cudaFuncAttributeMaxDynamicSharedMemorySize, Used::kShared));
    TVM_FFI_CHECK_CUDA_ERROR(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device));
    return count;
  });
}

void check_scale(Optional<TensorView> x_scale, int64_t m) {
  if (kFp8 != x_scale.has_value())
    TVM_FFI_THROW(ValueError) << "x_scale: "
                              << (kFp8 ? "None, needed the scales of e4m3 activations"
                                       : "a tensor, but 16-bit activations have no scale: needed None");
  if (!kFp8) return;
  check_dtype({"x_scale", *x_scale}, {kF32});
  check_scalar_or_vector({"x_scale", *x_scale}, m, "M");
  check_contiguous({"x_scale", *x_scale});
}

Params check(TensorView x, Optional<TensorView> x_scale, TensorView w, TensorView alpha,
             Optional<TensorView> bias, TensorView out) {
  check_dtype({"out", out}, {kOut});
  check_ndim({"out", out}, 2);
  int64_t const m = out.size(0), n = out.size(1);
  check_at_most("M", m, kMaxRows, "32-bit problem sizes");
  check_at_most("N", n, kMaxRows, "32-bit problem sizes");
  check_at_least("N", n, 8, "out");
  check_multiple("N", n, 8, "16-byte rows of out");
  check_contiguous({"out", out});
  check_aligned({"out", out}, 16);
  check_dtype({"w", w}, {kU8});
  check_ndim({"w", w}, 3);
  check_size({"w", w}, 0, divide_up(n, w4::kChunkRows), "ceil(N/64)");
  check_size({"w", w}, 2, w4::kChunkBytes, "bytes of a W4P chunk");
  check_at_least("chunks of w along K", w.size(1), 1, "w");
  check_at_most("chunks of w along K", w.size(1), kMaxRows / w4::kChunkK, "32-bit problem sizes");
  check_contiguous({"w", w});
  check_aligned({"w", w}, 16);
  check_dtype({"x", x}, {kU8});
  check_ndim({"x", x}, 3);
  check_size({"x", x}, 0, divide_up(w.size(1), Used::kStageChunks), kFp8 ? "ceil(K/128)" : "ceil(K/64)");
  check_size({"x", x}, 1, divide_up(m, kTokenBlock), "ceil(M/8)");
  check_size({"x", x}, 2, kBlockBytes, "bytes of 8 tokens");
  check_contiguous({"x", x});
  check_aligned({"x", x}, 16);
  check_scale(x_scale, m);
  check_dtype({"alpha", alpha}, {kF32});
  check_scalar_or_vector({"alpha", alpha}, n, "N");
  check_contiguous({"alpha", alpha});
  if (bias.has_value()) check_bias({"bias", *bias}, kOut, n);
  Params p{};
  p.x = data_of<uint8_t>(x), p.w = data_of<uint8_t>(w), p.alpha = data_of<float>(alpha);
  p.x_scale = kFp8 ? data_of<float>(*x_scale) : nullptr;
  p.bias = bias.has_value() ? data_of<Out>(*bias) : nullptr;
  p.out = data_of<Out>(out);
  p.m = int(m), p.n = int(n), p.token_blocks = int(x.size(1));
  p.row_blocks = int(w.size(0)), p.chunks = int(w.size(1)), p.stages = int(x.size(0));
  p.x_scale_step = kFp8 && (*x_scale).numel() != 1, p.alpha_step = alpha.numel() != 1;
  return p;
}

// The launch shape in `p`, with the tiles and the grid that follow from it.
void set_shape(Params& p, int64_t multicast, int64_t split, int64_t raster, int64_t multiprocessors) {
  p.multicast_log2 = log2_of(multicast), p.split = int(split);
  int64_t const row_tiles = divide_up(p.row_blocks, Used::kConsumers * multicast);
  int64_t const token_tiles = divide_up(p.m, Used::kTokens);
  check_at_most("tiles", row_tiles * token_tiles, kMaxRows / kLargestCluster, "32-bit problem sizes");
  p.row_tiles = int(row_tiles), p.token_tiles = int(token_tiles);
  p.raster = int(std::min(raster, token_tiles));
  int64_t const tiles = row_tiles * token_tiles;
  // A split's sums take the place of the ring: one tile a cluster.
  p.clusters = int(
      split > 1 ? tiles : std::min(tiles, std::max<int64_t>(multiprocessors * Used::kCtas / multicast, 1)));
}

void launch(Params const& p, int device, bool enable_pdl) {
  int const cluster = p.split << p.multicast_log2;
  cudaLaunchAttribute attributes[2]{};
  int count = 0;
  if (enable_pdl) {
    attributes[count].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[count++].val.programmaticStreamSerializationAllowed = 1;
  }
  if (cluster > 1) {
    attributes[count].id = cudaLaunchAttributeClusterDimension;
    attributes[count++].val.clusterDim = {unsigned(cluster), 1, 1};
  }
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(unsigned(p.clusters * cluster));
  config.blockDim = dim3(Used::kThreads);
  config.dynamicSmemBytes = Used::kShared;
  config.stream = static_cast<cudaStream_t>(TVMFFIEnvGetStream(kDLCUDA, device));
  config.attrs = attributes;
  config.numAttrs = unsigned(count);
  TVM_FFI_CHECK_CUDA_ERROR(cudaLaunchKernelEx(&config, w4_gemm_kernel<Used>, p));
}

int device_of(TensorView x, Optional<TensorView> x_scale, TensorView w, TensorView alpha,
              Optional<TensorView> bias, TensorView out) {
  return check_one_cuda_device({{"x", x},
                                {"x_scale", x_scale.has_value() ? *x_scale : x},
                                {"w", w},
                                {"alpha", alpha},
                                {"bias", bias.has_value() ? *bias : x},
                                {"out", out}});
}

void run(TensorView x, Optional<TensorView> x_scale, TensorView w, TensorView alpha,
         Optional<TensorView> bias, TensorView out, bool enable_pdl) {
  Params p = check(x, x_scale, w, alpha, bias, out);
  int const device = device_of(x, x_scale, w, alpha, bias, out);
  if (p.m == 0) return;
  tvm::ffi::CUDADeviceGuard guard(device);
  int64_t const sms = multiprocessors(device);
  LaunchPlan const plan = plan_launch(kSizes, p.m, p.n, p.stages * kStageK, sms);
  set_shape(p, plan.multicast, plan.split, plan.raster, sms);
  launch(p, device, enable_pdl);
}

void check_shape(tvm::ffi::Array<int64_t> const& shape, int64_t stages) {
  if (shape.size() != 3) TVM_FFI_THROW(ValueError) << "shape: has " << shape.size() << " numbers, needed 3";
  int64_t const multicast = shape[0], split = shape[1], raster = shape[2];
  if (multicast != 1 && multicast != 2 && multicast != 4)
    TVM_FFI_THROW(ValueError) << "shape: multicast is " << multicast << ", needed 1, 2 or 4";
  if (std::find(std::begin(kSplits), std::end(kSplits), split) == std::end(kSplits))
    TVM_FFI_THROW(ValueError) << "shape: split is " << split << ", needed 1, 2, 3, 4 or 8";
  check_at_most("shape: split", split, Used::kMostSplit, "parts of K for a tile of so few tokens");
  check_at_most("shape: multicast * split", multicast * split, kLargestCluster, "CTAs of a cluster");
  check_at_most("shape: split", split, stages, "parts of K with at least one stage");
  check_at_least("shape: raster", raster, 1, "token tiles");
  check_at_most("shape: raster", raster, kMaxRaster, "token tiles");
}

void run_shaped(TensorView x, Optional<TensorView> x_scale, TensorView w, TensorView alpha,
                Optional<TensorView> bias, TensorView out, tvm::ffi::Array<int64_t> shape, bool enable_pdl) {
  Params p = check(x, x_scale, w, alpha, bias, out);
  check_shape(shape, p.stages);
  int const device = device_of(x, x_scale, w, alpha, bias, out);
  if (p.m == 0) return;
  tvm::ffi::CUDADeviceGuard guard(device);
  set_shape(p, shape[0], shape[1], shape[2], multiprocessors(device));
  launch(p, device, enable_pdl);
}

tvm::ffi::Array<int64_t> plan_numbers(int64_t m, int64_t n, int64_t k, int64_t multiprocessors) {
  for (auto const& [name, value] :
       {std::pair{"m", m}, {"n", n}, {"k", k}, {"multiprocessors", multiprocessors}}) {
    check_at_least(name, value, 1, "w4_gemm_plan");
    check_at_most(name, value, kMaxRows, "32-bit problem sizes");
  }
  LaunchPlan const plan = plan_launch(kSizes, m, n, k, multiprocessors);
  return {plan.multicast, plan.split, plan.raster, int64_t(plan.clocks)};
}

int64_t tokens() { return Used::kTokens; }

}  // namespace fp4d

TVM_FFI_DLL_EXPORT_TYPED_FUNC(w4_gemm, fp4d::run);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(w4_gemm_shaped, fp4d::run_shaped);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(w4_gemm_plan, fp4d::plan_numbers);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(w4_gemm_tokens, fp4d::tokens);
