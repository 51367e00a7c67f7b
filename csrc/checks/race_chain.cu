// The two neighbours of a kernel under test: producer -> kernel -> consumer, each launched with PDL.
//
//   produce(source, target, delay_cycles, enable_pdl)
//     Releases its dependents at once, spins, and only then copies source to target: a kernel that does not wait
//     reads what was in target before.
//   consume(from, to, source, target, enable_pdl)
//     Waits, copies `from` to `to`, and overwrites target with source. If the kernel ended without waiting for the
//     producer, the producer's writes can land after these.
//
// Equal bytes in each pair, a multiple of 16; contiguous, 16-byte aligned, on one device. Capture-safe: only
// launches.
#include "quantise/quantize.h"

namespace fp4d {

constexpr int kCopyThreads = 256;
constexpr int kCopyBlocks = 32;  // few, so that GEMM and producer are on the SMs at the same time

__device__ inline void copy(uint4 const* from, uint4* to, int64_t vectors) {
  int64_t const first = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  for (int64_t i = first; i < vectors; i += int64_t(gridDim.x) * blockDim.x) to[i] = from[i];
}

__global__ void produce_kernel(uint4 const* source, uint4* target, int64_t vectors, int64_t delay_cycles) {
  grid_dependency_launch_dependents();
  grid_dependency_wait();
  int64_t const start = clock64();
  while (clock64() - start < delay_cycles) {
  }
  copy(source, target, vectors);
}

__global__ void consume_kernel(uint4 const* from, uint4* to, int64_t vectors, uint4 const* source,
                               uint4* target, int64_t overwritten) {
  grid_dependency_wait();
  copy(from, to, vectors);
  copy(source, target, overwritten);
}

inline int64_t bytes_of(TensorView const& t) { return t.numel() * t.dtype().bits * t.dtype().lanes / 8; }

inline int64_t check_copy(Arg from, Arg to) {
  int64_t const bytes = bytes_of(from.tensor);
  check_multiple("bytes", bytes, 16, from.name);
  if (bytes_of(to.tensor) != bytes)
    TVM_FFI_THROW(ValueError) << to.name << ": has " << bytes_of(to.tensor) << " bytes, needed " << bytes;
  for (Arg const& arg : {from, to}) {
    check_contiguous(arg);
    check_aligned(arg, 16);
  }
  return bytes / 16;
}

void produce(TensorView source, TensorView target, int64_t delay_cycles, bool enable_pdl) {
  int64_t const vectors = check_copy({"source", source}, {"target", target});
  int const device = check_one_cuda_device({{"source", source}, {"target", target}});
  tvm::ffi::CUDADeviceGuard guard(device);
  launch(produce_kernel, Shape{dim3(kCopyBlocks), dim3(kCopyThreads)}, device, enable_pdl,
         data_of<uint4>(source), data_of<uint4>(target), vectors, delay_cycles);
}

void consume(TensorView from, TensorView to, TensorView source, TensorView target, bool enable_pdl) {
  int64_t const vectors = check_copy({"from", from}, {"to", to});
  int64_t const overwritten = check_copy({"source", source}, {"target", target});
  int const device =
      check_one_cuda_device({{"from", from}, {"to", to}, {"source", source}, {"target", target}});
  tvm::ffi::CUDADeviceGuard guard(device);
  launch(consume_kernel, Shape{dim3(kCopyBlocks), dim3(kCopyThreads)}, device, enable_pdl,
         data_of<uint4>(from), data_of<uint4>(to), vectors, data_of<uint4>(source), data_of<uint4>(target),
         overwritten);
}

}  // namespace fp4d

TVM_FFI_DLL_EXPORT_TYPED_FUNC(produce, fp4d::produce);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(consume, fp4d::consume);
