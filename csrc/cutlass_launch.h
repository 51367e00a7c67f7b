// Launch of a CUTLASS 3.x GEMM with the caller's workspace and stream: no allocation, no synchronisation, the
// kernel parameters are made once per launch.
#pragma once

#include <cuda_runtime.h>

#include "cutlass/gemm/device/gemm_universal_adapter.h"

#include "ffi_checks.h"

namespace fp4d {

inline void check_status(cutlass::Status status, char const* step) {
  if (status != cutlass::Status::kSuccess)
    TVM_FFI_THROW(RuntimeError) << "CUTLASS " << step << " failed: " << cutlassGetStatusString(status)
                                << " (is this the GPU that the kernel was compiled for?)";
}

template <class Gemm>
void launch(typename Gemm::Arguments const& arguments, TensorView workspace, cudaStream_t stream,
            bool enable_pdl) {
  int64_t const needed = static_cast<int64_t>(Gemm::get_workspace_size(arguments));
  if (workspace.numel() < needed)
    TVM_FFI_THROW(ValueError) << "workspace: has " << workspace.numel() << " bytes, needed " << needed;
  check_status(Gemm::can_implement(arguments), "can_implement");
  check_status(Gemm().run(arguments, data_of<void>(workspace), stream, /*cuda_adapter=*/nullptr, enable_pdl),
               "launch");
}

}  // namespace fp4d
