// Dense FP8 (e4m3 x e4m3) GEMM for SM90: wgmma, TMA, warp-specialised, persistent, no split-K and no atomics,
// so a result depends on its inputs alone.
//
//   fp8_gemm(a, b, a_scale, b_scale, bias, d, workspace, enable_pdl)
//     D[M,N] = a_scale * b_scale * A[M,K] @ B[N,K]^T (+ bias[N])
//     a         e4m3 [M, K], K contiguous, row stride a multiple of 16 elements, 16-byte aligned, K % 16 == 0
//     b         e4m3 [N, K], likewise, N % 8 == 0
//     d         bf16 or fp16 (FP4D_OUT) [M, N], N contiguous, row stride a multiple of 8 elements, 16-byte
//               aligned
//     bias      None or [N] of the dtype of d
//     workspace u8, at least workspace_size(m, n, k) bytes (0)
//   FP4D_SCALING == 0, one build for per-tensor, per-token and per-channel scales:
//     a_scale   f32, 1 or M elements      b_scale   f32, 1 or N elements
//   FP4D_SCALING == 1, A in blocks of 1x128, B in blocks of 128x128:
//     a_scale   f32 [M, ceil(K/128)], strides (1, s), s >= M and s % 4 == 0, 16-byte aligned: TMA loads it,
//               so M is the contiguous dimension (torch.empty(ceil(K/128), round_up(M, 4)).t()[:M])
//     b_scale   f32 [ceil(N/128), ceil(K/128)], contiguous: as checkpoints store weight_scale_inv
//   fp8_quantize_gemm(quantize, x, a, b, a_scale, b_scale, bias, d, quantize_pdl, enable_pdl)
//     quantize(x, a, a_scale, quantize_pdl), a function of fp8_quantize.cu, and then fp8_gemm, in one call from
//     Python, which costs the host more than either; of a wrong argument neither is launched
//   workspace_size(m, n, k) -> bytes
//   shared_memory_bytes() -> dynamic shared memory of a block
//
// FP4D_SWAP == 1 computes D^T = B A^T: the 64-row side of wgmma takes output channels and the side that can
// be as narrow as 8 takes tokens, so a decode step with few tokens wastes no tensor-core rows and has N/64
// tiles to spread over the SMs. FP4D_TILE_* and FP4D_CLUSTER_M are in the coordinates of the GEMM that runs
// (after the swap).
//
// Accumulation: wgmma keeps about 14 bits for FP8 inputs (https://arxiv.org/abs/2412.19437, section 3.3.2),
// so every FP4D_PROMOTE_K elements of K the partial sum is added to an fp32 accumulator.
//
// Capture-safe: only launches.
#include "common/gdc_guard.h"

#include <tvm/ffi/extra/c_env_api.h>
#include <tvm/ffi/extra/cuda/device_guard.h>
#include <tvm/ffi/function.h>

#include "cutlass_gemm/tma_encode.h"

#include "cutlass/cutlass.h"
#include "cutlass/detail/blockwise_scale_layout.hpp"
#include "cutlass/epilogue/collective/collective_builder.hpp"
#include "cutlass/gemm/collective/collective_builder.hpp"
#include "cutlass/gemm/kernel/gemm_universal.hpp"

#include "cutlass_gemm/epilogue.h"
#include "cutlass_gemm/launch.h"

#if !defined(FP4D_SCALING) || !defined(FP4D_SWAP) || !defined(FP4D_COOPERATIVE) ||                         \
    !defined(FP4D_CLUSTER_M) || !defined(FP4D_TILE_M) || !defined(FP4D_TILE_N) || !defined(FP4D_TILE_K) || \
    !defined(FP4D_PROMOTE_K)
#error \
    "define FP4D_SCALING, _SWAP, _COOPERATIVE, _CLUSTER_M, _TILE_M, _TILE_N, _TILE_K and _PROMOTE_K: see kernels.toml"
#endif

namespace fp4d {

constexpr bool kBlockScaled = FP4D_SCALING == 1;
constexpr bool kSwap = FP4D_SWAP == 1;
constexpr bool kCooperative = FP4D_COOPERATIVE == 1;
constexpr int64_t kBlock = 128;

static_assert(FP4D_PROMOTE_K > 0, "what wgmma keeps of a sum over all K is too coarse");
// CUTLASS promotes when its count of MMAs *equals* the interval, and counts a K tile at a time: with an
// interval that is not a multiple of the tile it would never promote, without a word.
static_assert(FP4D_PROMOTE_K % FP4D_TILE_K == 0, "the accumulator is promoted after whole K tiles");
static_assert(!kBlockScaled || FP4D_PROMOTE_K == kBlock, "block scales are applied at every promotion");
constexpr int kMmaK = 32;

using Tile = cute::Shape<cute::Int<FP4D_TILE_M>, cute::Int<FP4D_TILE_N>, cute::Int<FP4D_TILE_K>>;
using Cluster = cute::Shape<cute::Int<FP4D_CLUSTER_M>, cute::_1, cute::_1>;
using Arch = cutlass::arch::Sm90;
using OpClass = cutlass::arch::OpClassTensorOp;
using Operand = cutlass::float_e4m3_t;
using Row = cutlass::layout::RowMajor;
using Column = cutlass::layout::ColumnMajor;
using OutLayout = cute::conditional_t<kSwap, Column, Row>;

// Out[N] or null, along the rows of D^T. One element a load: a bias may start anywhere.
template <class CtaTile>
using RowBias =
    fusion::Sm90ColBroadcast<0, CtaTile, Out, float, cute::Stride<cute::_1, cute::_0, int64_t>, 1>;

// D^T = a_scale[m] * (b_scale[n] * acc) + bias[n]: the same operations in the same order as
// RowColumnScaleBias.
using SwappedScaleBias = AfterPreviousGrid<fusion::Sm90EVT<
    Compute<cutlass::homogeneous_multiply_add, Out>, PerColumn<Tile>,
    fusion::Sm90EVT<Compute<cutlass::multiplies, float>, PerRow<Tile>, fusion::Sm90AccFetch>, RowBias<Tile>>>;

using BlockScaledBias =
    AfterPreviousGrid<fusion::Sm90EVT<Compute<cutlass::plus, Out>, fusion::Sm90AccFetch,
                                      cute::conditional_t<kSwap, RowBias<Tile>, Bias<Tile>>>>;

using Fusion = cute::conditional_t<kBlockScaled, BlockScaledBias,
                                   cute::conditional_t<kSwap, SwappedScaleBias, RowColumnScaleBias<Tile>>>;

using EpilogueSchedule = cute::conditional_t<kCooperative, cutlass::epilogue::TmaWarpSpecializedCooperative,
                                             cutlass::epilogue::TmaWarpSpecialized>;
using PlainSchedule = cute::conditional_t<kCooperative, cutlass::gemm::KernelTmaWarpSpecializedCooperative,
                                          cutlass::gemm::KernelTmaWarpSpecializedPingpong>;
using BlockSchedule =
    cute::conditional_t<kCooperative, cutlass::gemm::KernelTmaWarpSpecializedCooperativeFP8Blockwise,
                        cutlass::gemm::KernelTmaWarpSpecializedPingpongFP8Blockwise>;
using MainloopSchedule = cute::conditional_t<kBlockScaled, BlockSchedule, PlainSchedule>;

// Activation scales one a row and contiguous along rows, weight scales one a 128x128 block, as checkpoints
// have them.
using ScaleConfig =
    cutlass::detail::Sm90BlockwiseScaleConfig<kSwap ? kBlock : 1, kSwap ? 1 : kBlock, kBlock,
                                              kSwap ? cute::GMMA::Major::K : cute::GMMA::Major::MN,
                                              kSwap ? cute::GMMA::Major::MN : cute::GMMA::Major::K>;
using LayoutSFA = decltype(ScaleConfig::deduce_layoutSFA());
using LayoutSFB = decltype(ScaleConfig::deduce_layoutSFB());
using LayoutA = cute::conditional_t<kBlockScaled, cute::tuple<Row, LayoutSFA>, Row>;
using LayoutB = cute::conditional_t<kBlockScaled, cute::tuple<Column, LayoutSFB>, Column>;

using Epilogue = typename cutlass::epilogue::collective::CollectiveBuilder<
    Arch, OpClass, Tile, Cluster, cutlass::epilogue::collective::EpilogueTileAuto, float, float,  //
    void, OutLayout, 8, Out, OutLayout, 8, EpilogueSchedule, Fusion>::CollectiveOp;

// Waits for the previous kernel before block scales are loaded with cp.async.
//
// CUTLASS 4.5's cooperative kernel loads scales that are too few for TMA in a warp that never executes
// griddepcontrol.wait (sm90_gemm_tma_warpspecialized_cooperative.hpp, role MainloopAux; the pingpong kernel
// does wait).
template <class Collective>
struct AuxiliaryAfterPreviousGrid : Collective {
  template <class... Args>
  CUTLASS_DEVICE void load_auxiliary(Args&&... args) {
    cutlass::arch::wait_on_dependent_grids();
    Collective::load_auxiliary(static_cast<Args&&>(args)...);
  }
};

using StockMainloop = typename cutlass::gemm::collective::CollectiveBuilder<
    Arch, OpClass, Operand, LayoutA, 16, Operand, LayoutB, 16, float, Tile, Cluster,
    cutlass::gemm::collective::StageCountAutoCarveout<static_cast<int>(
        sizeof(typename Epilogue::SharedStorage))>,
    MainloopSchedule>::CollectiveOp;

using Mainloop = cute::conditional_t<kBlockScaled, AuxiliaryAfterPreviousGrid<StockMainloop>, StockMainloop>;

using Kernel = cutlass::gemm::kernel::GemmUniversal<cute::Shape<int, int, int, int>, Mainloop, Epilogue>;
using Gemm = cutlass::gemm::device::GemmUniversalAdapter<Kernel>;

static_assert(Kernel::SharedStorageSize <= 232448, "more shared memory than a block of SM90 has");
static_assert(Mainloop::DispatchPolicy::Stages >= 3, "too few stages to hide the loads");

struct Problem {
  int m, n, k;
};

// Elements between rows; a single row has no meaningful stride.
inline int64_t row_stride(TensorView const& t) { return t.size(0) > 1 ? t.stride(0) : t.size(1); }

inline void check_rows(Arg arg, int64_t multiple, char const* why) {
  if (arg.tensor.size(1) > 1 && arg.tensor.stride(1) != 1)
    TVM_FFI_THROW(ValueError) << arg.name << ": the last dimension has stride " << arg.tensor.stride(1)
                              << ", needed 1; call .contiguous()";
  check_at_least("row stride", row_stride(arg.tensor), arg.tensor.size(1), arg.name);
  check_multiple("row stride", row_stride(arg.tensor), multiple, why);
  check_aligned(arg, 16);
}

inline void check_block_scales(TensorView a_scale, TensorView b_scale, Problem p) {
  int64_t const blocks = (p.k + kBlock - 1) / kBlock;
  check_ndim({"a_scale", a_scale}, 2);
  check_size({"a_scale", a_scale}, 0, p.m, "M");
  check_size({"a_scale", a_scale}, 1, blocks, "ceil(K/128)");
  if ((p.m > 1 && a_scale.stride(0) != 1) ||
      (p.m > 0 && blocks > 1 && (a_scale.stride(1) < p.m || a_scale.stride(1) % 4 != 0)))
    TVM_FFI_THROW(ValueError) << "a_scale: strides are (" << a_scale.stride(0) << ", " << a_scale.stride(1)
                              << "), needed (1, s) with s >= M and s a multiple of 4: "
                                 "torch.empty(ceil(K/128), round_up(M, 4)).t()[:M]";
  check_aligned({"a_scale", a_scale}, 16);
  check_ndim({"b_scale", b_scale}, 2);
  check_size({"b_scale", b_scale}, 0, (p.n + kBlock - 1) / kBlock, "ceil(N/128)");
  check_size({"b_scale", b_scale}, 1, blocks, "ceil(K/128)");
  check_contiguous({"b_scale", b_scale});
}

inline void check_vector_scales(TensorView a_scale, TensorView b_scale, Problem p) {
  check_scalar_or_vector({"a_scale", a_scale}, p.m, "per tensor or per row of a");
  check_scalar_or_vector({"b_scale", b_scale}, p.n, "per tensor or per row of b");
  check_contiguous({"a_scale", a_scale});
  check_contiguous({"b_scale", b_scale});
}

Problem check(TensorView a, TensorView b, TensorView a_scale, TensorView b_scale, Optional<TensorView> bias,
              TensorView d) {
  check_dtype({"a", a}, {kE4M3});
  check_dtype({"b", b}, {kE4M3});
  check_dtype({"a_scale", a_scale}, {kF32});
  check_dtype({"b_scale", b_scale}, {kF32});
  check_dtype({"d", d}, {kOut});
  check_ndim({"a", a}, 2);
  check_ndim({"b", b}, 2);
  check_ndim({"d", d}, 2);
  int64_t const m = a.size(0), n = b.size(0), k = a.size(1);
  check_at_most("M", m, kMaxRows, "32-bit problem sizes");
  check_at_most("N", n, kMaxRows, "32-bit problem sizes");
  check_at_most("K", k, kMaxRows, "32-bit problem sizes");
  check_at_least("K", k, 16, "a");
  check_multiple("K", k, 16, "TMA rows of a and b are multiples of 16 bytes");
  check_at_least("N", n, 8, "b");
  check_multiple("N", n, 8, "TMA rows of d are multiples of 16 bytes");
  check_size({"b", b}, 1, k, "K of a");
  check_size({"d", d}, 0, m, "M");
  check_size({"d", d}, 1, n, "N");
  check_rows({"a", a}, 16, "TMA rows of a are multiples of 16 bytes");
  check_rows({"b", b}, 16, "TMA rows of b are multiples of 16 bytes");
  check_rows({"d", d}, 8, "TMA rows of d are multiples of 16 bytes");
  if (bias.has_value()) check_bias({"bias", *bias}, kOut, n);
  Problem const p{int(m), int(n), int(k)};
  if (kBlockScaled) {
    check_block_scales(a_scale, b_scale, p);
  } else {
    check_vector_scales(a_scale, b_scale, p);
  }
  return p;
}

template <class Arguments>
void set_block_scales(Arguments& mainloop, TensorView a_scale, TensorView b_scale, Problem p) {
  int const blocks = int((p.k + kBlock - 1) / kBlock);
  int const stride = int(blocks > 1 ? a_scale.stride(1) : (p.m + 3) / 4 * 4);
  auto const shape = kSwap ? cute::make_shape(p.n, p.m, p.k, 1) : cute::make_shape(p.m, p.n, p.k, 1);
  mainloop.layout_SFA = ScaleConfig::tile_atom_to_shape_SFA(shape);
  mainloop.layout_SFB = ScaleConfig::tile_atom_to_shape_SFB(shape);
  auto& activation_layout = [&]() -> auto& {
    if constexpr (kSwap) {
      return mainloop.layout_SFB;
    } else {
      return mainloop.layout_SFA;
    }
  }();
  cute::get<1, 1>(activation_layout.stride()) = stride;
  cute::get<2>(activation_layout.stride()) =
      stride * blocks;  // of the batch; TMA checks its alignment all the same
  mainloop.ptr_SFA = data_of<float>(kSwap ? b_scale : a_scale);
  mainloop.ptr_SFB = data_of<float>(kSwap ? a_scale : b_scale);
}

template <class Arguments>
void set_mainloop(Arguments& mainloop, TensorView a_scale, TensorView b_scale, Problem p) {
  if constexpr (kBlockScaled) {
    set_block_scales(mainloop, a_scale, b_scale, p);
  } else {
    mainloop.mma_promotion_interval = FP4D_PROMOTE_K / kMmaK;
  }
}

// The arguments of the epilogue tree follow its nesting.
template <class Arguments>
void set_epilogue(Arguments& thread, TensorView a_scale, TensorView b_scale, Optional<TensorView> bias) {
  Out const* const bias_data = bias.has_value() ? data_of<Out>(*bias) : nullptr;
  bool const per_token = a_scale.numel() != 1, per_channel = b_scale.numel() != 1;
  if constexpr (kBlockScaled) {
    thread = {{} /*accumulator*/, {bias_data}, {} /*plus*/};
  } else if constexpr (kSwap) {
    thread = {
        {data_of<float>(a_scale), 0.f, {cute::_0{}, per_token, 0}},
        {{data_of<float>(b_scale), 0.f, {per_channel, cute::_0{}, 0}}, {} /*accumulator*/, {} /*multiply*/},
        {bias_data},
        {} /*multiply-add*/};
  } else {
    thread = {
        {data_of<float>(a_scale), 0.f, {per_token, cute::_0{}, 0}},
        {{data_of<float>(b_scale), 0.f, {cute::_0{}, per_channel, 0}}, {} /*accumulator*/, {} /*multiply*/},
        {bias_data},
        {} /*multiply-add*/};
  }
}

// Of operands that were checked, on their device.
void multiply(Problem p, int device, TensorView a, TensorView b, TensorView a_scale, TensorView b_scale,
              Optional<TensorView> bias, TensorView d, bool enable_pdl) {
  tvm::ffi::CUDADeviceGuard guard(device);
  typename Gemm::Arguments args{};
  args.mode = cutlass::gemm::GemmUniversalMode::kGemm;
  args.problem_shape = kSwap ? cute::make_shape(p.n, p.m, p.k, 1) : cute::make_shape(p.m, p.n, p.k, 1);
  TensorView const first = kSwap ? b : a, second = kSwap ? a : b;
  args.mainloop.ptr_A = data_of<Operand>(first);
  args.mainloop.ptr_B = data_of<Operand>(second);
  cute::get<0>(args.mainloop.dA) = row_stride(first);
  cute::get<0>(args.mainloop.dB) = row_stride(second);
  args.epilogue.ptr_D = data_of<Out>(d);
  cute::get<kSwap ? 1 : 0>(args.epilogue.dD) = row_stride(d);
  set_mainloop(args.mainloop, a_scale, b_scale, p);
  set_epilogue(args.epilogue.thread, a_scale, b_scale, bias);
  // No can_implement(): it wants M % 4 == 0 for block scales, where TMA wants aligned strides alone. check()
  // has covered what TMA needs.
  auto const stream = static_cast<cudaStream_t>(TVMFFIEnvGetStream(kDLCUDA, device));
  launch<Gemm>(args, nullptr, device, stream, enable_pdl);
}

void run(TensorView a, TensorView b, TensorView a_scale, TensorView b_scale, Optional<TensorView> bias,
         TensorView d, TensorView workspace, bool enable_pdl) {
  check_dtype({"workspace", workspace}, {kU8});
  Problem const p = check(a, b, a_scale, b_scale, bias, d);
  int const device = check_one_cuda_device({{"a", a},
                                            {"b", b},
                                            {"a_scale", a_scale},
                                            {"b_scale", b_scale},
                                            {"bias", bias.has_value() ? *bias : a},
                                            {"d", d},
                                            {"workspace", workspace}});
  if (p.m != 0) multiply(p, device, a, b, a_scale, b_scale, bias, d, enable_pdl);
}

void quantize_and_run(tvm::ffi::Function quantize, TensorView x, TensorView a, TensorView b,
                      TensorView a_scale, TensorView b_scale, Optional<TensorView> bias, TensorView d,
                      bool quantize_pdl, bool enable_pdl) {
  Problem const p = check(a, b, a_scale, b_scale, bias, d);
  int const device = check_one_cuda_device({{"a", a},
                                            {"b", b},
                                            {"a_scale", a_scale},
                                            {"b_scale", b_scale},
                                            {"bias", bias.has_value() ? *bias : a},
                                            {"d", d}});
  if (p.m == 0) return;
  quantize(x, a, a_scale, quantize_pdl);
  multiply(p, device, a, b, a_scale, b_scale, bias, d, enable_pdl);
}

// The data-parallel scheduler needs none.
int64_t workspace_size(int64_t, int64_t, int64_t) { return 0; }

int64_t shared_memory_bytes() { return Kernel::SharedStorageSize; }

}  // namespace fp4d

TVM_FFI_DLL_EXPORT_TYPED_FUNC(fp8_gemm, fp4d::run);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(fp8_quantize_gemm, fp4d::quantize_and_run);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(workspace_size, fp4d::workspace_size);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(shared_memory_bytes, fp4d::shared_memory_bytes);
