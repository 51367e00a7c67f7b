// The two neighbours of the GEMM in the race test: producer -> GEMM -> consumer, all launched with PDL.
//
//   produce(source, scale_source, a, a_scale, delay_cycles, enable_pdl)
//     Releases its dependents at once, spins, and only then copies source to a and scale_source to a_scale: a
//     GEMM that does not wait reads what was there before. Bytes of source and a: equal, a multiple of 16;
//     scales f32.
//   consume(d, out, enable_pdl)
//     Waits, then copies d to out (equal bytes, a multiple of 16).
//
// All contiguous, on one device. Capture-safe: only launches.
#include "quantize.h"

namespace fp4d {

constexpr int kCopyThreads = 256;
constexpr int kCopyBlocks = 32;  // few, so that GEMM and producer are on the SMs at the same time

__device__ inline void copy(uint4 const* from, uint4* to, int64_t vectors) {
  int64_t const first = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  for (int64_t i = first; i < vectors; i += int64_t(gridDim.x) * blockDim.x) to[i] = from[i];
}

__global__ void produce_kernel(uint4 const* source, uint4* a, int64_t vectors, float const* scale_source,
                               float* a_scale, int64_t scales, int64_t delay_cycles) {
  grid_dependency_launch_dependents();
  grid_dependency_wait();
  int64_t const start = clock64();
  while (clock64() - start < delay_cycles) {
  }
  copy(source, a, vectors);
  if (blockIdx.x == 0)
    for (int64_t i = threadIdx.x; i < scales; i += blockDim.x) a_scale[i] = scale_source[i];
}

__global__ void consume_kernel(uint4 const* d, uint4* out, int64_t vectors) {
  grid_dependency_wait();
  copy(d, out, vectors);
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

void produce(TensorView source, TensorView scale_source, TensorView a, TensorView a_scale,
             int64_t delay_cycles, bool enable_pdl) {
  int64_t const vectors = check_copy({"source", source}, {"a", a});
  check_dtype({"scale_source", scale_source}, {kF32});
  check_dtype({"a_scale", a_scale}, {kF32});
  check_numel({"a_scale", a_scale}, scale_source.numel(), "scale_source");
  int const device = check_one_cuda_device(
      {{"source", source}, {"scale_source", scale_source}, {"a", a}, {"a_scale", a_scale}});
  tvm::ffi::CUDADeviceGuard guard(device);
  launch(produce_kernel, Shape{dim3(kCopyBlocks), dim3(kCopyThreads)}, device, enable_pdl,
         data_of<uint4>(source), data_of<uint4>(a), vectors, data_of<float>(scale_source),
         data_of<float>(a_scale), scale_source.numel(), delay_cycles);
}

void consume(TensorView d, TensorView out, bool enable_pdl) {
  int64_t const vectors = check_copy({"d", d}, {"out", out});
  int const device = check_one_cuda_device({{"d", d}, {"out", out}});
  tvm::ffi::CUDADeviceGuard guard(device);
  launch(consume_kernel, Shape{dim3(kCopyBlocks), dim3(kCopyThreads)}, device, enable_pdl, data_of<uint4>(d),
         data_of<uint4>(out), vectors);
}

}  // namespace fp4d

TVM_FFI_DLL_EXPORT_TYPED_FUNC(produce, fp4d::produce);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(consume, fp4d::consume);
