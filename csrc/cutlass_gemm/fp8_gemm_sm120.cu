// Dense FP8 (e4m3 x e4m3) GEMM for SM120 and SM121 (warp-level f8f6f4 MMA, TMA, warp-specialised,
// persistent).
#include "common/gdc_guard.h"

#include "cutlass/cutlass.h"
#include "cutlass/epilogue/collective/collective_builder.hpp"
#include "cutlass/gemm/collective/collective_builder.hpp"
#include "cutlass/gemm/kernel/gemm_universal.hpp"

#include "cutlass_gemm/epilogue.h"
#include "cutlass_gemm/fp8_gemm_entry.h"

namespace fp4d {

using Tile = cute::Shape<cute::Int<FP4D_TILE_M>, cute::Int<FP4D_TILE_N>, cute::Int<FP4D_TILE_K>>;
using Cluster = cute::Shape<cute::_1, cute::_1, cute::_1>;  // SM120 has no multicast
using Arch = cutlass::arch::Sm120;
using OpClass = cutlass::arch::OpClassTensorOp;
using Operand = cutlass::float_e4m3_t;
using Row = cutlass::layout::RowMajor;
using Column = cutlass::layout::ColumnMajor;

using Epilogue = typename cutlass::epilogue::collective::CollectiveBuilder<
    Arch, OpClass, Tile, Cluster, cutlass::epilogue::collective::EpilogueTileAuto, float, float,  //
    void, Row, 8, Out, Row, 8, cutlass::epilogue::TmaWarpSpecializedCooperative,
    RowColumnScaleBias<Tile>>::CollectiveOp;

using Mainloop = typename cutlass::gemm::collective::CollectiveBuilder<
    Arch, OpClass, Operand, Row, 16, Operand, Column, 16, float, Tile, Cluster,
    cutlass::gemm::collective::StageCountAutoCarveout<static_cast<int>(
        sizeof(typename Epilogue::SharedStorage))>,
    cutlass::gemm::KernelTmaWarpSpecializedCooperative>::CollectiveOp;

using Kernel = cutlass::gemm::kernel::GemmUniversal<cute::Shape<int, int, int, int>, Mainloop, Epilogue>;

// The automatic stage count does not know the 1,024-byte alignment of the mainloop's buffers
// (https://github.com/NVIDIA/cutlass/issues/3096): a kernel that asks for too much would fail at its first
// launch.
static_assert(Kernel::SharedStorageSize <= 101376, "more shared memory than a block of SM120 has");
static_assert(Mainloop::DispatchPolicy::Stages >= 3, "too few stages to hide the loads");

using Entry = Fp8Entry<cutlass::gemm::device::GemmUniversalAdapter<Kernel>>;

}  // namespace fp4d

TVM_FFI_DLL_EXPORT_TYPED_FUNC(fp8_gemm, fp4d::Entry::run);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(workspace_size, fp4d::Entry::workspace_size);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(shared_memory_bytes, fp4d::Entry::shared_memory_bytes);
