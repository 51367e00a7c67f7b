// TMA descriptors without a look-up by name for each: CUTLASS asks the driver for cuTensorMapEncodeTiled every time
// that it makes one, three or four times a launch. It says so as a function template of the types of its arguments;
// this is the specialisation for those that cute/atom/copy_traits_sm90_tma.hpp passes.
// tests/compile/test_host_calls.py counts what a launch calls.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include "cutlass/cuda_host_adapter.hpp"

#include "ffi_checks.h"

namespace fp4d {

using EncodeTiled = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, cuuint64_t const*,
                                 cuuint64_t const*, cuuint32_t const*, cuuint32_t const*,
                                 CUtensorMapInterleave, CUtensorMapSwizzle, CUtensorMapL2promotion,
                                 CUtensorMapFloatOOBfill);

inline EncodeTiled find_encode_tiled() {
  void* found = nullptr;
  cudaDriverEntryPointQueryResult result = cudaDriverEntryPointSymbolNotFound;
#if CUDART_VERSION >= 13000
  cudaError_t const error =
      cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000, cudaEnableDefault, &result);
#else
  cudaError_t const error =
      cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &found, cudaEnableDefault, &result);
#endif
  if (error != cudaSuccess || result != cudaDriverEntryPointSuccess)
    TVM_FFI_THROW(RuntimeError) << "cuTensorMapEncodeTiled: not in this driver (CUDA error " << int(error)
                                << ", query result " << int(result)
                                << "), needed a driver for CUDA 12.0 or newer";
  return reinterpret_cast<EncodeTiled>(found);
}

// One for the process, whatever the device; a look-up that throws is done again by the next call.
inline EncodeTiled encode_tiled() {
  static EncodeTiled const found = find_encode_tiled();
  return found;
}

}  // namespace fp4d

namespace cutlass {

// CUTLASS prints an error of the driver and launches all the same, so it is thrown here.
template <>
inline CUresult call_cuTensorMapEncodeTiled(CUtensorMap* map, CUtensorMapDataType type, int rank,
                                            void* address, uint64_t* sizes, uint64_t* strides, uint32_t* box,
                                            uint32_t* box_strides, CUtensorMapInterleave interleave,
                                            CUtensorMapSwizzle swizzle, CUtensorMapL2promotion promotion,
                                            CUtensorMapFloatOOBfill fill) {
  static_assert(sizeof(uint64_t) == sizeof(cuuint64_t) && sizeof(uint32_t) == sizeof(cuuint32_t));
  CUresult const error = fp4d::encode_tiled()(
      map, type, static_cast<cuuint32_t>(rank), address, reinterpret_cast<cuuint64_t const*>(sizes),
      reinterpret_cast<cuuint64_t const*>(strides), reinterpret_cast<cuuint32_t const*>(box),
      reinterpret_cast<cuuint32_t const*>(box_strides), interleave, swizzle, promotion, fill);
  if (error != CUDA_SUCCESS)
    TVM_FFI_THROW(RuntimeError) << "cuTensorMapEncodeTiled failed with CUDA driver error " << int(error)
                                << " for a tensor of rank " << rank << " at " << address
                                << ": sizes and strides must be what TMA takes";
  return error;
}

}  // namespace cutlass
