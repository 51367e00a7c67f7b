// What w4_gemm_sm90.cu and w8_gemm_sm90.cu export: argument checks, launch shape and launch of many_tokens/kernel.h.
// A .cu file says with a struct `Large`:
//   Used                the tile that it builds
//   sizes()             the tile as the plan sees it
//   stages_of(w)        stages along K
//   source_of(w, n)     w as the kernel takes it, checked
//   ready(source, w)    adds what only a launch needs
#pragma once

#include <algorithm>
#include <utility>

#include <tvm/ffi/container/array.h>
#include <tvm/ffi/extra/c_env_api.h>
#include <tvm/ffi/extra/cuda/device_guard.h>

#include "common/gemm_operands.h"
#include "many_tokens/kernel.h"
#include "many_tokens/plan.h"
#include "common/per_device.h"
#include "quantise/quantize.h"
#include "common/tma_rows.h"

namespace fp4d {

constexpr int64_t kMaxRaster = 1 << 20;

inline int log2_of(int64_t value) {
  int log = 0;
  while (int64_t(1) << log < value) ++log;
  return log;
}

template <class Large>
struct Launch {
  using Used = typename Large::Used;
  using Weights = typename Used::Weights;
  using Params = fp4d::Params<Weights>;

  // Makes the kernel ready on the current device and returns its multiprocessors.
  static int64_t multiprocessors(int device) {
    static PerDevice<int> counts;
    return counts.of(device, [&] {
      int count = 0;
      TVM_FFI_CHECK_CUDA_ERROR(cudaFuncSetAttribute(
          many_tokens_kernel<Used>, cudaFuncAttributeMaxDynamicSharedMemorySize, Used::kShared));
      TVM_FFI_CHECK_CUDA_ERROR(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device));
      return count;
    });
  }

  static void check_scale(Optional<TensorView> x_scale, int64_t m, int64_t stages, int64_t token_blocks) {
    if (kFp8 != x_scale.has_value())
      TVM_FFI_THROW(ValueError) << "x_scale: "
                                << (kFp8 ? "None, needed the scales of e4m3 activations"
                                         : "a tensor, but 16-bit activations have no scale: needed None");
    if (!kFp8) return;
    check_token_scales(*x_scale, m, stages, token_blocks, Weights::kBlocks);
  }

  static void check_tokens(TensorView x, int64_t m, int64_t stages) {
    if (kFp8) {
      check_packed({"x", x}, stages, m);
      return;
    }
    check_input(x, 16);
    check_dtype({"x", x}, {kOutType});
    check_size({"x", x}, 0, m, "M");
    if (m > 1 && x.stride(0) < x.size(1))
      TVM_FFI_THROW(ValueError) << "x: rows are " << x.stride(0) << " elements apart, needed at least K ("
                                << x.size(1) << "): TMA takes no rows that share memory; call .contiguous()";
    if (divide_up(x.size(1), kBoxK) != stages)
      TVM_FFI_THROW(ValueError) << "x: K is " << x.size(1) << ", but w has " << stages
                                << " chunks of 64 along K, needed ceil(K/64) of them";
  }

  static void set_tokens(uint8_t const*& to, TensorView x, int64_t) { to = data_of<uint8_t>(x); }
  static void set_tokens(CUtensorMap& to, TensorView x, int64_t box_tokens) {
    to = map_of_rows(data_of<Out>(x), x.size(0), x.size(1), input_stride(x), box_tokens);
  }

  static Params check(TensorView x, Optional<TensorView> x_scale, TensorView w, TensorView alpha,
                      Optional<TensorView> bias, TensorView out) {
    check_out(out, {kMaxRows, "32-bit problem sizes"}, {kMaxRows, "32-bit problem sizes"});
    int64_t const m = out.size(0), n = out.size(1);
    Params p{};
    p.w = Large::source_of(w, n);
    int64_t const stages = Large::stages_of(w);
    check_tokens(x, m, stages);
    check_scale(x_scale, m, stages, kFp8 ? x.size(1) : 0);
    check_alpha(alpha, n, stages, Weights::kBlocks);
    if (bias.has_value()) check_bias({"bias", *bias}, kOutType, n);
    p.alpha = data_of<float>(alpha);
    p.x_scale = kFp8 ? data_of<float>(*x_scale) : nullptr;
    p.bias = bias.has_value() ? data_of<Out>(*bias) : nullptr;
    p.out = data_of<Out>(out);
    p.m = int(m), p.n = int(n);
    if (kFp8) p.token_blocks = int(x.size(1));
    p.row_blocks = int(divide_up(n, int64_t(kBlockRows))), p.stages = int(stages);
    p.x_scale_step = kFp8 && (*x_scale).numel() != 1, p.alpha_step = alpha.numel() != 1;
    return p;
  }

  // The launch shape in `p`, with the tiles and the grid that follow from it.
  static void set_shape(Params& p, LaunchPlan const& plan, int64_t multiprocessors) {
    auto const [multicast, sharing, split, raster, clocks] = plan;
    p.multicast_log2 = log2_of(multicast), p.sharing_log2 = log2_of(sharing), p.split = int(split);
    int64_t const row_tiles = divide_up(p.row_blocks, Used::kConsumers * multicast);
    int64_t const token_tiles = divide_up(p.m, Used::kTokens * sharing);
    check_at_most("tiles", row_tiles * token_tiles, kMaxRows / kLargestCluster, "32-bit problem sizes");
    p.row_tiles = int(row_tiles), p.token_tiles = int(token_tiles);
    p.raster = int(std::min(raster, token_tiles));
    int64_t const tiles = row_tiles * token_tiles;
    Rounds const rounds = rounds_of(plan, tiles, slots_of(Large::sizes(), plan, multiprocessors));
    p.rounds = int(rounds.whole), p.clusters = int(rounds.clusters);
  }

  static void launch(Params const& p, int device, bool enable_pdl) {
    int const cluster = p.split << (p.multicast_log2 + p.sharing_log2);
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
    TVM_FFI_CHECK_CUDA_ERROR(cudaLaunchKernelEx(&config, many_tokens_kernel<Used>, p));
  }

  static int device_of(TensorView x, Optional<TensorView> x_scale, TensorView w, TensorView alpha,
                       Optional<TensorView> bias, TensorView out) {
    return check_one_cuda_device({{"x", x},
                                  {"x_scale", x_scale.has_value() ? *x_scale : x},
                                  {"w", w},
                                  {"alpha", alpha},
                                  {"bias", bias.has_value() ? *bias : x},
                                  {"out", out}});
  }

  static void run_as(Params& p, TensorView x, TensorView w, LaunchPlan const& plan, int64_t multiprocessors,
                     int device, bool enable_pdl) {
    set_shape(p, plan, multiprocessors);
    set_tokens(p.x, x, Used::kTokens >> p.multicast_log2);
    Large::ready(p.w, w);
    launch(p, device, enable_pdl);
  }

  static void run(TensorView x, Optional<TensorView> x_scale, TensorView w, TensorView alpha,
                  Optional<TensorView> bias, TensorView out, bool enable_pdl) {
    Params p = check(x, x_scale, w, alpha, bias, out);
    int const device = device_of(x, x_scale, w, alpha, bias, out);
    if (p.m == 0) return;
    tvm::ffi::CUDADeviceGuard guard(device);
    int64_t const sms = multiprocessors(device);
    run_as(p, x, w, plan_launch(Large::sizes(), p.m, p.n, p.stages * Large::sizes().stage_k, sms), sms,
           device, enable_pdl);
  }

  // A launch shape from a caller: multicast, split, raster and, where rows can be shared, sharing.
  static constexpr size_t kShapeNumbers = Weights::kShares ? 4 : 3;

  static LaunchPlan shape_of(tvm::ffi::Array<int64_t> const& shape, int64_t stages) {
    if (shape.size() != kShapeNumbers)
      TVM_FFI_THROW(ValueError) << "shape: has " << shape.size() << " numbers, needed " << kShapeNumbers;
    int64_t const multicast = shape[0], split = shape[1], raster = shape[2];
    int64_t const sharing = Weights::kShares ? shape[3] : 1;
    if (multicast != 1 && multicast != 2 && multicast != 4)
      TVM_FFI_THROW(ValueError) << "shape: multicast is " << multicast << ", needed 1, 2 or 4";
    if (std::find(std::begin(kSplits), std::end(kSplits), split) == std::end(kSplits))
      TVM_FFI_THROW(ValueError) << "shape: split is " << split << ", needed 1, 2, 3, 4 or 8";
    if (sharing != 1 && sharing != 2)
      TVM_FFI_THROW(ValueError) << "shape: sharing is " << sharing << ", needed 1 or 2";
    check_at_most("shape: split", split, Used::kMostSplit, "parts of K for a tile of so few tokens");
    check_at_most(Weights::kShares ? "shape: multicast * split * sharing" : "shape: multicast * split",
                  multicast * split * sharing, kLargestCluster, "CTAs of a cluster");
    check_at_most("shape: split", split, stages, "parts of K with at least one stage");
    check_at_least("shape: raster", raster, 1, "token tiles");
    check_at_most("shape: raster", raster, kMaxRaster, "token tiles");
    return {multicast, sharing, split, raster};
  }

  static void run_shaped(TensorView x, Optional<TensorView> x_scale, TensorView w, TensorView alpha,
                         Optional<TensorView> bias, TensorView out, tvm::ffi::Array<int64_t> shape,
                         bool enable_pdl) {
    Params p = check(x, x_scale, w, alpha, bias, out);
    LaunchPlan const plan = shape_of(shape, p.stages);
    int const device = device_of(x, x_scale, w, alpha, bias, out);
    if (p.m == 0) return;
    tvm::ffi::CUDADeviceGuard guard(device);
    run_as(p, x, w, plan, multiprocessors(device), device, enable_pdl);
  }

  static tvm::ffi::Array<int64_t> plan_numbers(int64_t m, int64_t n, int64_t k, int64_t multiprocessors) {
    for (auto const& [name, value] :
         {std::pair{"m", m}, {"n", n}, {"k", k}, {"multiprocessors", multiprocessors}}) {
      check_at_least(name, value, 1, "plan");
      check_at_most(name, value, kMaxRows, "32-bit problem sizes");
    }
    LaunchPlan const plan = plan_launch(Large::sizes(), m, n, k, multiprocessors);
    if (Weights::kShares)
      return {plan.multicast, plan.split, plan.raster, plan.sharing, int64_t(plan.clocks)};
    return {plan.multicast, plan.split, plan.raster, int64_t(plan.clocks)};
  }

  static int64_t tokens() { return Used::kTokens; }
};

}  // namespace fp4d
