// NVFP4 GEMM for SM100, SM103 and SM110 (tcgen05 block-scaled MMA, TMA, warp-specialised, persistent).
#include "common/gdc_guard.h"

#include "cutlass/cutlass.h"
#include "cutlass/epilogue/collective/collective_builder.hpp"
#include "cutlass/gemm/collective/collective_builder.hpp"
#include "cutlass/gemm/kernel/gemm_universal.hpp"

#include "cutlass_gemm/epilogue.h"
#include "cutlass_gemm/nvfp4_gemm_entry.h"

namespace fp4d {

// FP4D_SMS: SMs that share one MMA. Two of them form a cluster and each holds half of the tile's rows.
static_assert(FP4D_SMS == 1 || FP4D_SMS == 2);
using Sms = cute::Int<FP4D_SMS>;
using Tile = cute::Shape<cute::Int<FP4D_TILE_M>, cute::Int<FP4D_TILE_N>, cute::Int<FP4D_TILE_K>>;
using CtaTile =
    cute::Shape<cute::Int<FP4D_TILE_M / FP4D_SMS>, cute::Int<FP4D_TILE_N>, cute::Int<FP4D_TILE_K>>;
using Cluster = cute::Shape<Sms, cute::_1, cute::_1>;
using Arch = cutlass::arch::Sm100;
using OpClass = cutlass::arch::OpClassBlockScaledTensorOp;
using Operand = cutlass::nv_float4_t<cutlass::float_e2m1_t>;
using Row = cutlass::layout::RowMajor;
using Column = cutlass::layout::ColumnMajor;

using EpilogueSchedule = cute::conditional_t<Sms::value == 2, cutlass::epilogue::TmaWarpSpecialized2Sm,
                                             cutlass::epilogue::TmaWarpSpecialized1Sm>;
using MainloopSchedule =
    cute::conditional_t<Sms::value == 2, cutlass::gemm::KernelTmaWarpSpecialized2SmNvf4Sm100,
                        cutlass::gemm::KernelTmaWarpSpecialized1SmNvf4Sm100>;

using Epilogue = typename cutlass::epilogue::collective::CollectiveBuilder<
    Arch, OpClass, Tile, Cluster, cutlass::epilogue::collective::EpilogueTileAuto, float, float,  //
    void, Row, 8, Out, Row, 8, EpilogueSchedule, AlphaBias<CtaTile>>::CollectiveOp;

using Mainloop = typename cutlass::gemm::collective::CollectiveBuilder<
    Arch, OpClass, Operand, Row, 32, Operand, Column, 32, float, Tile, Cluster,
    cutlass::gemm::collective::StageCountAutoCarveout<static_cast<int>(
        sizeof(typename Epilogue::SharedStorage))>,
    MainloopSchedule>::CollectiveOp;

using Kernel = cutlass::gemm::kernel::GemmUniversal<cute::Shape<int, int, int, int>, Mainloop, Epilogue>;
static_assert(Mainloop::DispatchPolicy::Stages >= 3, "too few stages to hide the loads");

using Entry = Nvfp4Entry<cutlass::gemm::device::GemmUniversalAdapter<Kernel>>;

}  // namespace fp4d

TVM_FFI_DLL_EXPORT_TYPED_FUNC(nvfp4_gemm, fp4d::Entry::run);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(workspace_size, fp4d::Entry::workspace_size);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(shared_memory_bytes, fp4d::Entry::shared_memory_bytes);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(scale_offsets, fp4d::Entry::scale_offsets);
