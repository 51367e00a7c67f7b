// Launch of a CUTLASS 3.x GEMM with the caller's workspace and stream: no allocation, no synchronisation, the
// kernel parameters are made once per launch. What a kernel needs once on each device is done once: CUTLASS's own
// adapter does it, and asks for errors twice, at every launch.
#pragma once

#include <cuda_runtime.h>

#include <tvm/ffi/extra/cuda/base.h>

#include "cutlass/device_kernel.h"
#include "cutlass/gemm/device/gemm_universal_adapter.h"

#include "common/ffi_checks.h"
#include "common/gdc_guard.h"
#include "common/launch_attributes.h"
#include "common/per_device.h"
#include "cutlass_gemm/tma_encode.h"

namespace fp4d {

inline void check_status(cutlass::Status status, char const* step) {
  if (status != cutlass::Status::kSuccess)
    TVM_FFI_THROW(RuntimeError) << "CUTLASS " << step << " failed: " << cutlassGetStatusString(status)
                                << " (is this the GPU that the kernel was compiled for?)";
}

// cutlass::device_kernel, and then every thread waits for the previous grid. In CUTLASS some warps end without having
// waited; a proof that all have needs no thought about which (docs/proof.md). For those that have it is one instruction.
template <class Kernel>
__global__ void __launch_bounds__(Kernel::MaxThreadsPerBlock, Kernel::MinBlocksPerMultiprocessor)
    device_kernel(CUTLASS_GRID_CONSTANT typename Kernel::Params const params) {
  extern __shared__ char shared[];
  Kernel{}(params, shared);
  grid_dependency_wait();
}

// Makes a kernel ready on the current device and returns its multiprocessors.
template <class Kernel>
int ready(int device) {
  static PerDevice<int> counts;
  return counts.of(device, [&] {
    int count = 0;
    TVM_FFI_CHECK_CUDA_ERROR(cudaFuncSetAttribute(
        device_kernel<Kernel>, cudaFuncAttributeMaxDynamicSharedMemorySize, Kernel::SharedStorageSize));
    TVM_FFI_CHECK_CUDA_ERROR(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device));
    return count;
  });
}

// `arguments` complete but for the device, which is the current one.
template <class Gemm>
void launch(typename Gemm::Arguments arguments, void* workspace, int device, cudaStream_t stream,
            bool enable_pdl) {
  using Kernel = typename Gemm::GemmKernel;
  using Cluster = typename Kernel::DispatchPolicy::ClusterShape;
  static_assert(cute::is_static_v<Cluster> && cute::size(Cluster{}) <= 8, "a cluster that every GPU allows");
  arguments.hw_info.device_id = device;
  arguments.hw_info.sm_count = ready<Kernel>(device);
  check_status(Kernel::initialize_workspace(arguments, workspace, stream), "initialize_workspace");
  typename Kernel::Params params = Kernel::to_underlying_arguments(arguments, workspace);

  cudaLaunchConfig_t config{};
  config.gridDim = Kernel::get_grid_shape(params);
  config.blockDim = Kernel::get_block_shape();
  config.dynamicSmemBytes = Kernel::SharedStorageSize;
  config.stream = stream;
  LaunchAttributes attributes(enable_pdl,
                              dim3(unsigned(cute::size<0>(Cluster{})), unsigned(cute::size<1>(Cluster{})),
                                   unsigned(cute::size<2>(Cluster{}))));
  attributes.give(config);
  void* kernel_arguments[] = {&params};
  void const* const kernel = reinterpret_cast<void const*>(device_kernel<Kernel>);
  TVM_FFI_CHECK_CUDA_ERROR(cudaLaunchKernelExC(&config, kernel, kernel_arguments));
}

// The same, after CUTLASS's own check of the arguments.
template <class Gemm>
void launch_checked(typename Gemm::Arguments const& arguments, TensorView workspace, int device,
                    cudaStream_t stream, bool enable_pdl) {
  int64_t const needed = static_cast<int64_t>(Gemm::get_workspace_size(arguments));
  if (workspace.numel() < needed)
    TVM_FFI_THROW(ValueError) << "workspace: has " << workspace.numel() << " bytes, needed " << needed;
  check_status(Gemm::can_implement(arguments), "can_implement");
  launch<Gemm>(arguments, data_of<void>(workspace), device, stream, enable_pdl);
}

}  // namespace fp4d
