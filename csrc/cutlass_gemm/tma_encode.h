// TMA descriptors that were made before are not made again: CUTLASS makes three or four at each launch, looks up the
// driver's function by name for each, and asks for the driver's version. It says the first as a function template of
// the types of its arguments; this is the specialisation for those that cute/atom/copy_traits_sm90_tma.hpp passes.
// Include it before CUTLASS, or its version is asked for each time (cute::cudaDriverGetVersion, below).
// tests/compile/test_host_calls.py counts what a launch calls.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include "cutlass/cuda_host_adapter.hpp"

#include "common/driver_version.h"
#include "common/tma_cache.h"

namespace cute {

// CUTLASS asks for each descriptor, unqualified and from this namespace: found here instead, asked once a process. Where the
// driver does not say it, CUTLASS would go on with an older driver's workaround; this throws.
inline cudaError_t cudaDriverGetVersion(int* version) {
  *version = fp4d::driver_version();
  return cudaSuccess;
}

}  // namespace cute

namespace cutlass {

// CUTLASS prints an error of the driver and launches all the same, so it is thrown here.
template <>
inline CUresult call_cuTensorMapEncodeTiled(CUtensorMap* map, CUtensorMapDataType type, int rank,
                                            void* address, uint64_t* sizes, uint64_t* strides, uint32_t* box,
                                            uint32_t* box_strides, CUtensorMapInterleave interleave,
                                            CUtensorMapSwizzle swizzle, CUtensorMapL2promotion promotion,
                                            CUtensorMapFloatOOBfill fill) {
  fp4d::encode_cached(map, type, rank, address, sizes, strides, box, box_strides, interleave, swizzle,
                      promotion, fill);
  return CUDA_SUCCESS;
}

}  // namespace cutlass
