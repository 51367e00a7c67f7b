// Epilogues of the CUTLASS GEMMs: scales and bias are read from device memory and applied in fp32, the
// result is rounded once to the output type.
#pragma once

#include "cutlass/bfloat16.h"
#include "cutlass/half.h"
#include "cutlass/arch/grid_dependency_control.h"
#include "cutlass/epilogue/fusion/callbacks.hpp"
#include "cutlass/epilogue/fusion/sm90_visitor_tma_warpspecialized.hpp"
#include "cutlass/epilogue/fusion/sm90_visitor_load_tma_warpspecialized.hpp"
#include "cutlass/epilogue/fusion/sm90_visitor_compute_tma_warpspecialized.hpp"

#include "common/ffi_checks.h"

#ifndef FP4D_OUT
#error "define FP4D_OUT: 0 = bf16 output, 1 = fp16 output"
#endif

namespace fp4d {

#if FP4D_OUT == 0
using Out = cutlass::bfloat16_t;
constexpr DLDataType kOut = kBF16;
#elif FP4D_OUT == 1
using Out = cutlass::half_t;
constexpr DLDataType kOut = kF16;
#else
#error "FP4D_OUT must be 0 (bf16) or 1 (fp16)"
#endif

namespace fusion = cutlass::epilogue::fusion;

// Waits for the previous kernel before the epilogue reads its vectors.
//
// The stock SM100 kernel calls griddepcontrol.wait in its load and scheduler warps alone, and its epilogue
// warps read their broadcast vectors before they wait for the accumulator
// (sm100_epilogue_tma_warpspecialized.hpp, CUTLASS 4.5: `cst_callbacks.begin()` precedes
// `acc_pipeline.consumer_wait`). Under PDL a scale written by the previous kernel, such as a per-token
// activation scale, would be read too early. Waiting here closes that hole; on SM120, where the same warps do
// the MMA first, the wait is already satisfied and costs an instruction.
template <class Tree>
struct AfterPreviousGrid : Tree {
  CUTLASS_HOST_DEVICE AfterPreviousGrid() {}
  CUTLASS_HOST_DEVICE AfterPreviousGrid(typename Tree::Params const& params,
                                        typename Tree::SharedStorage const& shared_storage)
      : Tree(params, shared_storage) {}

  template <class Callbacks>
  struct Waiting : Callbacks {
    CUTLASS_DEVICE explicit Waiting(Callbacks const& callbacks) : Callbacks(callbacks) {}
    CUTLASS_DEVICE void begin() {
      cutlass::arch::wait_on_dependent_grids();
      Callbacks::begin();
    }
  };

  template <bool ReferenceSrc, class... Args>
  CUTLASS_DEVICE auto get_consumer_store_callbacks(fusion::ConsumerStoreArgs<Args...> const& args) {
    auto callbacks = Tree::template get_consumer_store_callbacks<ReferenceSrc>(args);
    return Waiting<decltype(callbacks)>(callbacks);
  }
};

// f32[1] or f32[N]: the bool stride chooses at run time, so one build serves both.
//
// A constructor runs before any wait. That of Sm90ScalarBroadcast reads the scalar and keeps it, so it is not an
// option. Those of Sm90RowBroadcast and Sm90ColBroadcast read a single scale, too (CUTLASS 4.5), but only to answer
// is_zero(). These trees do not ask it, so the compiler drops the load. The proof looks for loads before the wait, and
// would refuse a build that has one.
template <class CtaTile>
using PerColumn = fusion::Sm90RowBroadcast<0, CtaTile, float, float, cute::Stride<cute::_0, bool, int64_t>, 4,
                                           /*EnableNullptr=*/false>;

// f32[1] or f32[M].
template <class CtaTile>
using PerRow = fusion::Sm90ColBroadcast<0, CtaTile, float, float, cute::Stride<bool, cute::_0, int64_t>, 1,
                                        /*EnableNullptr=*/false>;

// Out[N] or null (then zero is added).
template <class CtaTile>
using Bias = fusion::Sm90RowBroadcast<0, CtaTile, Out, float, cute::Stride<cute::_0, cute::_1, int64_t>>;

template <template <class> class Fn, class Result>
using Compute = fusion::Sm90Compute<Fn, Result, float, cutlass::FloatRoundStyle::round_to_nearest>;

// D = alpha[n] * acc + bias[n]
template <class CtaTile>
using AlphaBias = AfterPreviousGrid<fusion::Sm90EVT<Compute<cutlass::homogeneous_multiply_add, Out>,
                                                    PerColumn<CtaTile>, fusion::Sm90AccFetch, Bias<CtaTile>>>;

// D = a_scale[m] * (b_scale[n] * acc) + bias[n]
template <class CtaTile>
using RowColumnScaleBias = AfterPreviousGrid<fusion::Sm90EVT<
    Compute<cutlass::homogeneous_multiply_add, Out>, PerRow<CtaTile>,
    fusion::Sm90EVT<Compute<cutlass::multiplies, float>, PerColumn<CtaTile>, fusion::Sm90AccFetch>,
    Bias<CtaTile>>>;

}  // namespace fp4d
