// What w4_gemm_sm90.cu and w8_gemm_sm90.cu export: argument checks, launch shape and launch of many_tokens/kernel.h.
// A .cu file says with a struct `Large`:
//   Used                the tile that it builds
//   kStageK             k of a stage
//   stages_of(w)        stages along K
//   source_of(w, n)     w as the kernel takes it, checked
//   check_k(k, w)       refuses K of 16-bit activations that is not that of w
//   ready(source, w)    adds what only a launch needs
#pragma once

#include <algorithm>
#include <atomic>
#include <random>
#include <string>
#include <utility>

#include <tvm/ffi/container/array.h>
#include <tvm/ffi/extra/c_env_api.h>
#include <tvm/ffi/extra/cuda/device_guard.h>

#include "common/gemm_operands.h"
#include "common/launch_attributes.h"
#include "many_tokens/kernel.h"
#include "common/per_device.h"
#include "quantise/quantize.h"
#include "common/tma_rows.h"

namespace fp4d {

// How a problem is shared out over the GPU, as launch_model.py chooses it. A caller gives the numbers in this order.
struct LaunchShape {
  int64_t multicast;  // CTAs of a cluster that share activations
  int64_t split;      // parts of K
  int64_t raster;     // token tiles that are done before the next rows
  int64_t sharing;    // CTAs of a cluster that share rows
  int64_t rounds;     // whole tiles of each CTA before its cluster splits K of one; evenly: beside its share
  int64_t clusters;   // of the grid
};

constexpr int64_t kShapeNumbers = 6;
constexpr int64_t kSplits[] = {1, 2, 3, 4, 8};
constexpr int64_t kLargestCluster = 8;  // what every GPU with clusters has
constexpr int64_t kMaxRaster = 1 << 20;

inline int log2_of(int64_t value) {
  int log = 0;
  while (int64_t(1) << log < value) ++log;
  return log;
}

// Of an even launch; no two are the same, nor likely to lie in memory that a launch is given.
inline uint64_t next_token() {
  static std::atomic<uint64_t> last = [] {
    std::random_device random;
    return uint64_t(random()) << 32 | random();
  }();
  return ++last;
}

template <class Large>
struct Launch {
  using Used = typename Large::Used;
  using Weights = typename Used::Weights;
  using Params = fp4d::KernelParams<Weights>;

  // Makes the kernel ready on the current device.
  static void make_ready(int device) {
    static PerDevice<bool> ready;
    ready.of(device, [] {
      TVM_FFI_CHECK_CUDA_ERROR(cudaFuncSetAttribute(
          many_tokens_kernel<Used>, cudaFuncAttributeMaxDynamicSharedMemorySize, Used::kShared));
      return true;
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

  static void check_tokens(TensorView x, TensorView w, int64_t m, int64_t stages) {
    if (kFp8) {
      check_packed({"x", x}, stages, m);
      return;
    }
    check_input(x, 16);
    check_dtype({"x", x}, {kOutType});
    check_size({"x", x}, 0, m, "M");
    check_rows_apart({"x", x});
    Large::check_k(x.size(1), w);
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
    check_tokens(x, w, m, stages);
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

  // The launch shape in `p`, with the tiles that follow from it; refused unless it covers each of them once.
  static void set_shape(Params& p, LaunchShape const& shape) {
    auto const [multicast, split, raster, sharing, rounds, clusters] = shape;
    p.multicast_log2 = log2_of(multicast), p.sharing_log2 = log2_of(sharing), p.split = int(split);
    int64_t const row_tiles = divide_up(p.row_blocks, Used::kConsumers * multicast);
    int64_t const token_tiles = divide_up(p.m, Used::kTokens * sharing), tiles = row_tiles * token_tiles;
    check_at_most("tiles", tiles, kMaxRows / kLargestCluster, "32-bit problem sizes");
    if (!kEvenly) {
      check_at_most("shape: clusters", clusters, tiles, "tiles");
      check_at_most("shape: rounds", rounds, split == 1 ? 0 : tiles, "tiles; 0 where K is not split");
    }
    int64_t const whole = rounds * clusters * split, left = tiles - whole;
    if (kEvenly) {
      check_at_most("shape: split", split, 1, "parts of K that clusters share out: this build is even");
      check_at_most("shape: rounds", rounds, tiles, "tiles");
      check_at_least("shape: tiles beside whole ones", left, 1, "to share out");
      check_at_most("shape: tiles beside whole ones", left, clusters, "clusters");
      static std::string const shares = "shares of " + std::to_string(kFewestShare) + " stages";
      check_at_most("shape: clusters", clusters, left * p.stages / kFewestShare, shares.c_str());
      check_at_most("shape: tiles * stages * clusters", left * p.stages * clusters, kMaxRows,
                    "32-bit problem sizes");
    }
    if (split > 1 && (left < 0 || left > clusters))
      TVM_FFI_THROW(ValueError) << "shape: " << rounds << " rounds of " << clusters << " clusters do "
                                << whole << " whole tiles and split up to " << clusters << ", but there are "
                                << tiles << " tiles";
    p.row_tiles = int(row_tiles), p.token_tiles = int(token_tiles);
    p.raster = int(std::min(raster, token_tiles));
    p.rounds = int(rounds), p.clusters = int(clusters);
  }

  // Of an even build: memory for the sums and marks of all CTAs.
  static void set_room(Params& p, LaunchShape const& shape, TensorView room) {
    constexpr int64_t kMarks = 4 * Used::kConsumers * sizeof(uint64_t);  // of a CTA
    static_assert(kMarks % 16 == 0);
    int64_t const ctas = shape.clusters * shape.multicast * shape.sharing;
    check_dtype({"room", room}, {kU8});
    check_ndim({"room", room}, 1);
    check_contiguous({"room", room});
    check_aligned({"room", room}, 16);
    check_at_least("bytes of room", room.numel(), ctas * (int64_t(Used::kRows) * Used::kTokens * 4 + kMarks),
                   "sums and marks of all CTAs");
    p.room.marks = reinterpret_cast<uint64_t*>(data_of<uint8_t>(room));
    p.room.sums = reinterpret_cast<float*>(data_of<uint8_t>(room) + ctas * kMarks);
    p.room.token = next_token();
  }

  static void launch(Params const& p, int device, bool enable_pdl) {
    int const cluster = p.split << (p.multicast_log2 + p.sharing_log2);
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(unsigned(p.clusters * cluster));
    config.blockDim = dim3(Used::kThreads);
    config.dynamicSmemBytes = Used::kShared;
    config.stream = static_cast<cudaStream_t>(TVMFFIEnvGetStream(kDLCUDA, device));
    LaunchAttributes attributes(enable_pdl, dim3(unsigned(cluster)));
    attributes.give(config);
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

  static LaunchShape shape_of(tvm::ffi::Array<int64_t> const& shape, int64_t stages) {
    if (int64_t(shape.size()) != kShapeNumbers)
      TVM_FFI_THROW(ValueError) << "shape: has " << shape.size() << " numbers, needed " << kShapeNumbers;
    LaunchShape const s{shape[0], shape[1], shape[2], shape[3], shape[4], shape[5]};
    if (s.multicast != 1 && s.multicast != 2 && s.multicast != 4)
      TVM_FFI_THROW(ValueError) << "shape: multicast is " << s.multicast << ", needed 1, 2 or 4";
    if (std::find(std::begin(kSplits), std::end(kSplits), s.split) == std::end(kSplits))
      TVM_FFI_THROW(ValueError) << "shape: split is " << s.split << ", needed 1, 2, 3, 4 or 8";
    if (s.sharing != 1 && !(s.sharing == 2 && Weights::kShares))
      TVM_FFI_THROW(ValueError) << "shape: sharing is " << s.sharing << ", needed "
                                << (Weights::kShares ? "1 or 2" : "1: this kernel cannot share rows");
    check_at_most("shape: split", s.split, Used::kMostSplit, "parts of K for a tile of so few tokens");
    check_at_most("shape: multicast * split * sharing", s.multicast * s.split * s.sharing, kLargestCluster,
                  "CTAs of a cluster");
    check_at_most("shape: split", s.split, stages, "parts of K with at least one stage");
    check_at_least("shape: raster", s.raster, 1, "token tiles");
    check_at_most("shape: raster", s.raster, kMaxRaster, "token tiles");
    check_at_least("shape: rounds", s.rounds, 0, "tiles");
    check_at_least("shape: clusters", s.clusters, 1, "tiles");
    return s;
  }

  static void run(TensorView x, Optional<TensorView> x_scale, TensorView w, TensorView alpha,
                  Optional<TensorView> bias, TensorView out, tvm::ffi::Array<int64_t> shape,
                  bool enable_pdl) {
    run_in(x, x_scale, w, alpha, bias, out, shape, x, enable_pdl);
  }

  // Of an even build.
  static void run_evenly(TensorView x, Optional<TensorView> x_scale, TensorView w, TensorView alpha,
                         Optional<TensorView> bias, TensorView out, tvm::ffi::Array<int64_t> shape,
                         TensorView room, bool enable_pdl) {
    run_in(x, x_scale, w, alpha, bias, out, shape, room, enable_pdl);
  }

  // `room`: read only by even builds.
  static void run_in(TensorView x, Optional<TensorView> x_scale, TensorView w, TensorView alpha,
                     Optional<TensorView> bias, TensorView out, tvm::ffi::Array<int64_t> const& shape,
                     [[maybe_unused]] TensorView room, bool enable_pdl) {
    Params p = check(x, x_scale, w, alpha, bias, out);
    LaunchShape const chosen = shape_of(shape, p.stages);
    if (p.m > 0) set_shape(p, chosen);
    if constexpr (kEvenly) set_room(p, chosen, room);
    int const device = device_of(x, x_scale, w, alpha, bias, out);
    if constexpr (kEvenly) check_one_cuda_device({{"x", x}, {"room", room}});
    if (p.m == 0) return;
    tvm::ffi::CUDADeviceGuard guard(device);
    make_ready(device);
    set_tokens(p.x, x, Used::kTokens >> p.multicast_log2);
    Large::ready(p.w, w);
    if (!Weights::kTokensAreA) p.out_map = map_of_rows(p.out, p.m, p.n, p.n, 8);
    launch(p, device, enable_pdl);
  }

  // What launch_model.py must know of the tile.
  static tvm::ffi::Array<int64_t> tile() {
    return {Used::kTokens, Used::kRows,      Large::kStageK,           Used::kWeightBytes,
            Used::kCtas,   Used::kMostSplit, int64_t(Weights::kShares)};
  }
};

}  // namespace fp4d
