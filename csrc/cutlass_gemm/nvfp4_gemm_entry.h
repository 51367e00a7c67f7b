// Exports of an NVFP4 GEMM, the same for every architecture: D[M,N] = alpha * A[M,K] @ B[N,K]^T (+ bias[N]).
//
//   nvfp4_gemm(a, b, a_sf, b_sf, alpha, bias, d, workspace, enable_pdl)
//     a         u8 or e2m1x2 [M, K/2], row-major, even element in the low nibble, 16-byte aligned, K % 32 == 0
//     b         u8 or e2m1x2 [N, K/2], likewise, N % 8 == 0
//     a_sf      u8 or e4m3, ceil(M/128)*128 * ceil(K/64)*4 elements in the 128x4 layout, padding zero,
//               16-byte aligned
//     b_sf      likewise for N
//     alpha     f32, 1 or N elements
//     bias      None or [N] of the output dtype
//     d         bf16 or fp16 (one per build) [M, N], row-major, 16-byte aligned
//     workspace u8, at least workspace_size(m, n, k) bytes
//   workspace_size(m, n, k) -> bytes
//   shared_memory_bytes() -> dynamic shared memory of a block, for the record of what was compiled
//   scale_offsets(rows, k, out): out i32 [rows, K/16] on the CPU receives the position of each block scale in
//     the buffer, from the layout that the collective itself uses.
//
// Capture-safe: only launches. Limits: K % 32 because a TMA row stride is a multiple of 16 bytes, N % 8
// likewise for D.
#pragma once

#include <tvm/ffi/extra/c_env_api.h>
#include <tvm/ffi/extra/cuda/device_guard.h>

#include "cutlass/util/packed_stride.hpp"

#include "cutlass_gemm/launch.h"

namespace fp4d {

constexpr int64_t kNvfp4Block = 16;

inline int64_t round_up(int64_t value, int64_t to) { return (value + to - 1) / to * to; }

inline int64_t scale_bytes(int64_t rows, int64_t k) {
  return round_up(rows, 128) * round_up(k / kNvfp4Block, 4);
}

template <class Gemm>
struct Nvfp4Entry {
  using Kernel = typename Gemm::GemmKernel;
  using Mainloop = typename Kernel::CollectiveMainloop;
  using Layout = typename Mainloop::Sm1xxBlkScaledConfig;
  using Data = typename Mainloop::ArrayElementA;
  using Scale = typename Mainloop::ElementSF;

  static typename Gemm::Arguments arguments(int m, int n, int k) {
    typename Gemm::Arguments args{};
    args.mode = cutlass::gemm::GemmUniversalMode::kGemm;
    args.problem_shape = cute::make_shape(m, n, k, 1);
    args.mainloop.dA = cutlass::make_cute_packed_stride(typename Kernel::StrideA{}, {m, k, 1});
    args.mainloop.dB = cutlass::make_cute_packed_stride(typename Kernel::StrideB{}, {n, k, 1});
    args.mainloop.layout_SFA = Layout::tile_atom_to_shape_SFA(args.problem_shape);
    args.mainloop.layout_SFB = Layout::tile_atom_to_shape_SFB(args.problem_shape);
    args.epilogue.dC = cutlass::make_cute_packed_stride(typename Kernel::StrideC{}, {m, n, 1});
    args.epilogue.dD = cutlass::make_cute_packed_stride(typename Kernel::StrideD{}, {m, n, 1});
    return args;
  }

  static void check_operand(Arg data, Arg scale, int64_t k) {
    int64_t const rows = data.tensor.size(0);
    check_at_most("rows", rows, kMaxRows, data.name);
    check_at_most("block scales", scale_bytes(rows, k), std::numeric_limits<int32_t>::max(), scale.name);
    check_numel(scale, scale_bytes(rows, k), "128x4 layout: ceil(rows/128)*128 * ceil(K/64)*4");
  }

  static void check(TensorView a, TensorView b, TensorView a_sf, TensorView b_sf, TensorView alpha,
                    Optional<TensorView> bias, TensorView d, TensorView workspace) {
    check_dtype({"a", a}, {kU8, kE2M1x2});
    check_dtype({"b", b}, {kU8, kE2M1x2});
    check_dtype({"a_sf", a_sf}, {kU8, kE4M3});
    check_dtype({"b_sf", b_sf}, {kU8, kE4M3});
    check_dtype({"alpha", alpha}, {kF32});
    check_dtype({"d", d}, {kOut});
    check_dtype({"workspace", workspace}, {kU8});
    check_ndim({"a", a}, 2);
    check_ndim({"b", b}, 2);
    check_ndim({"d", d}, 2);
    int64_t const m = a.size(0), n = b.size(0), k = a.size(1) * 2;
    check_at_least("K", k, 32, "a");
    check_at_most("K", k, kMaxRows, "32-bit problem sizes");
    check_multiple("K", k, 32, "row strides of packed e2m1 are multiples of 16 bytes");
    check_at_least("N", n, 8, "b");
    check_multiple("N", n, 8, "row strides of d are multiples of 16 bytes");
    check_size({"b", b}, 1, k / 2, "K/2 of a");
    check_operand({"a", a}, {"a_sf", a_sf}, k);
    check_operand({"b", b}, {"b_sf", b_sf}, k);
    check_scalar_or_vector({"alpha", alpha}, n, "per tensor or per output column");
    check_size({"d", d}, 0, m, "M");
    check_size({"d", d}, 1, n, "N");
    for (Arg const& arg : {Arg{"a", a}, Arg{"b", b}, Arg{"a_sf", a_sf}, Arg{"b_sf", b_sf}, Arg{"d", d}}) {
      check_contiguous(arg);
      check_aligned(arg, 16);
    }
    check_contiguous({"alpha", alpha});
    check_contiguous({"workspace", workspace});
    check_aligned({"workspace", workspace}, 16);
    if (bias.has_value()) check_bias({"bias", *bias}, kOut, n);
  }

  static void run(TensorView a, TensorView b, TensorView a_sf, TensorView b_sf, TensorView alpha,
                  Optional<TensorView> bias, TensorView d, TensorView workspace, bool enable_pdl) {
    check(a, b, a_sf, b_sf, alpha, bias, d, workspace);
    int const device = check_one_cuda_device({{"a", a},
                                              {"b", b},
                                              {"a_sf", a_sf},
                                              {"b_sf", b_sf},
                                              {"alpha", alpha},
                                              {"bias", bias.has_value() ? *bias : a},
                                              {"d", d},
                                              {"workspace", workspace}});
    int const m = int(a.size(0)), n = int(b.size(0)), k = int(a.size(1) * 2);
    if (m == 0) return;

    tvm::ffi::CUDADeviceGuard guard(device);
    auto args = arguments(m, n, k);
    args.mainloop.ptr_A = data_of<Data>(a);
    args.mainloop.ptr_B = data_of<Data>(b);
    args.mainloop.ptr_SFA = data_of<Scale>(a_sf);
    args.mainloop.ptr_SFB = data_of<Scale>(b_sf);
    args.epilogue.ptr_D = data_of<Out>(d);
    args.epilogue.thread = {{data_of<float>(alpha), 0.f, {cute::_0{}, alpha.numel() != 1, 0}},  // alpha
                            {},                                                                 // accumulator
                            {bias.has_value() ? data_of<Out>(*bias) : nullptr},                 // bias
                            {}};  // multiply-add
    auto const stream = static_cast<cudaStream_t>(TVMFFIEnvGetStream(kDLCUDA, device));
    launch_checked<Gemm>(args, workspace, device, stream, enable_pdl);
  }

  static int64_t shared_memory_bytes() { return Kernel::SharedStorageSize; }

  static int64_t workspace_size(int64_t m, int64_t n, int64_t k) {
    return static_cast<int64_t>(Gemm::get_workspace_size(arguments(int(m), int(n), int(k))));
  }

  static void scale_offsets(int64_t rows, int64_t k, TensorView out) {
    check_dtype({"out", out}, {DLDataType{kDLInt, 32, 1}});
    check_ndim({"out", out}, 2);
    check_size({"out", out}, 0, rows, "rows");
    check_size({"out", out}, 1, k / kNvfp4Block, "K/16");
    check_contiguous({"out", out});
    if (out.device().device_type != kDLCPU) TVM_FFI_THROW(ValueError) << "out: needed a CPU tensor";
    auto const layout = Layout::tile_atom_to_shape_SFA(cute::make_shape(int(rows), 1, int(k), 1));
    int32_t* offsets = data_of<int32_t>(out);
    for (int row = 0; row < rows; ++row)
      for (int block = 0; block < k / kNvfp4Block; ++block)
        *offsets++ = int32_t(layout(row, int(block * kNvfp4Block), 0));
  }
};

}  // namespace fp4d
