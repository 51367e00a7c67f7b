// The driver's encoder of TMA descriptors, found at run time: a library that links libcuda cannot be loaded where there
// is none.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include "common/ffi_checks.h"

namespace fp4d {

using EncodeTiled = decltype(&cuTensorMapEncodeTiled);

inline EncodeTiled find_encode_tiled() {
  void* found = nullptr;
  cudaDriverEntryPointQueryResult result = cudaDriverEntryPointSymbolNotFound;
#if CUDART_VERSION >= 12050
  cudaError_t const error =
      cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000, cudaEnableDefault, &result);
#else
  cudaError_t const error =
      cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &found, cudaEnableDefault, &result);
#endif
  if (error != cudaSuccess || result != cudaDriverEntryPointSuccess || found == nullptr)
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
