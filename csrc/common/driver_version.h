// The CUDA version of the driver, 1000 * major + 10 * minor, asked once a process. Throws where the driver does not say it;
// the next call asks again.
#pragma once

#include <atomic>

#include <cuda_runtime.h>

#include <tvm/ffi/tvm_ffi.h>

namespace fp4d {

inline int driver_version() {
  static std::atomic<int> known{0};
  int version = known.load(std::memory_order_relaxed);
  if (version != 0) return version;
  cudaError_t const error = cudaDriverGetVersion(&version);
  if (error != cudaSuccess)
    TVM_FFI_THROW(RuntimeError) << "cudaDriverGetVersion failed with CUDA error " << int(error);
  known.store(version, std::memory_order_relaxed);
  return version;
}

}  // namespace fp4d
