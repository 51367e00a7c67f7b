// Exports of a dense FP8 GEMM, the same for every Blackwell architecture:
// D[M,N] = a_scale[m] * b_scale[n] * A[M,K] @ B[N,K]^T (+ bias[N]).
//
//   fp8_gemm(a, b, a_scale, b_scale, bias, d, workspace, enable_pdl)
//     a         e4m3 [M, K], row-major, 16-byte aligned, K % 16 == 0
//     b         e4m3 [N, K], likewise, N % 8 == 0
//     a_scale   f32, 1 element (per tensor) or M (per token)
//     b_scale   f32, 1 element (per tensor) or N (per output channel)
//     bias      None or [N] of the output dtype
//     d         bf16 or fp16 (one per build) [M, N], row-major, 16-byte aligned
//     workspace u8, at least workspace_size(m, n, k) bytes
//   workspace_size(m, n, k) -> bytes
//   shared_memory_bytes() -> dynamic shared memory of a block, for the record of what was compiled
//
// Capture-safe: only launches. Limits: TMA row strides of A, B and D are multiples of 16 bytes.
#pragma once

#include <tvm/ffi/extra/c_env_api.h>
#include <tvm/ffi/extra/cuda/device_guard.h>

#include "cutlass/util/packed_stride.hpp"

#include "cutlass_gemm/launch.h"

namespace fp4d {

template <class Gemm>
struct Fp8Entry {
  using Kernel = typename Gemm::GemmKernel;
  using Data = cutlass::float_e4m3_t;

  static typename Gemm::Arguments arguments(int m, int n, int k) {
    typename Gemm::Arguments args{};
    args.mode = cutlass::gemm::GemmUniversalMode::kGemm;
    args.problem_shape = cute::make_shape(m, n, k, 1);
    args.mainloop.dA = cutlass::make_cute_packed_stride(typename Kernel::StrideA{}, {m, k, 1});
    args.mainloop.dB = cutlass::make_cute_packed_stride(typename Kernel::StrideB{}, {n, k, 1});
    args.epilogue.dC = cutlass::make_cute_packed_stride(typename Kernel::StrideC{}, {m, n, 1});
    args.epilogue.dD = cutlass::make_cute_packed_stride(typename Kernel::StrideD{}, {m, n, 1});
    return args;
  }

  static void check(TensorView a, TensorView b, TensorView a_scale, TensorView b_scale,
                    Optional<TensorView> bias, TensorView d, TensorView workspace) {
    check_dtype({"a", a}, {kE4M3});
    check_dtype({"b", b}, {kE4M3});
    check_dtype({"a_scale", a_scale}, {kF32});
    check_dtype({"b_scale", b_scale}, {kF32});
    check_dtype({"d", d}, {kOut});
    check_dtype({"workspace", workspace}, {kU8});
    check_ndim({"a", a}, 2);
    check_ndim({"b", b}, 2);
    check_ndim({"d", d}, 2);
    int64_t const m = a.size(0), n = b.size(0), k = a.size(1);
    check_at_most("M", m, kMaxRows, "32-bit problem sizes");
    check_at_most("N", n, kMaxRows, "32-bit problem sizes");
    check_at_most("K", k, kMaxRows, "32-bit problem sizes");
    check_at_least("K", k, 16, "a");
    check_multiple("K", k, 16, "row strides of a and b are multiples of 16 bytes");
    check_at_least("N", n, 8, "b");
    check_multiple("N", n, 8, "row strides of d are multiples of 16 bytes");
    check_size({"b", b}, 1, k, "K of a");
    check_scalar_or_vector({"a_scale", a_scale}, m, "per tensor or per row of a");
    check_scalar_or_vector({"b_scale", b_scale}, n, "per tensor or per row of b");
    check_size({"d", d}, 0, m, "M");
    check_size({"d", d}, 1, n, "N");
    for (Arg const& arg : {Arg{"a", a}, Arg{"b", b}, Arg{"d", d}, Arg{"workspace", workspace}}) {
      check_contiguous(arg);
      check_aligned(arg, 16);
    }
    check_contiguous({"a_scale", a_scale});
    check_contiguous({"b_scale", b_scale});
    if (bias.has_value()) check_bias({"bias", *bias}, kOut, n);
  }

  static void run(TensorView a, TensorView b, TensorView a_scale, TensorView b_scale,
                  Optional<TensorView> bias, TensorView d, TensorView workspace, bool enable_pdl) {
    check(a, b, a_scale, b_scale, bias, d, workspace);
    int const device = check_one_cuda_device({{"a", a},
                                              {"b", b},
                                              {"a_scale", a_scale},
                                              {"b_scale", b_scale},
                                              {"bias", bias.has_value() ? *bias : a},
                                              {"d", d},
                                              {"workspace", workspace}});
    int const m = int(a.size(0)), n = int(b.size(0)), k = int(a.size(1));
    if (m == 0) return;

    tvm::ffi::CUDADeviceGuard guard(device);
    auto args = arguments(m, n, k);
    args.mainloop.ptr_A = data_of<Data>(a);
    args.mainloop.ptr_B = data_of<Data>(b);
    args.epilogue.ptr_D = data_of<Out>(d);
    args.epilogue.thread = {{data_of<float>(a_scale), 0.f, {a_scale.numel() != 1, cute::_0{}, 0}},
                            {{data_of<float>(b_scale), 0.f, {cute::_0{}, b_scale.numel() != 1, 0}},
                             {} /*accumulator*/,
                             {} /*multiply*/},
                            {bias.has_value() ? data_of<Out>(*bias) : nullptr},
                            {} /*multiply-add*/};
    auto const stream = static_cast<cudaStream_t>(TVMFFIEnvGetStream(kDLCUDA, device));
    launch_checked<Gemm>(args, workspace, device, stream, enable_pdl);
  }

  static int64_t shared_memory_bytes() { return Kernel::SharedStorageSize; }

  static int64_t workspace_size(int64_t m, int64_t n, int64_t k) {
    return static_cast<int64_t>(Gemm::get_workspace_size(arguments(int(m), int(n), int(k))));
  }
};

}  // namespace fp4d
