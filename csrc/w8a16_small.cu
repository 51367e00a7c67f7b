// out = alpha * (x @ W^T) + bias for few tokens: e4m3 weights as a checkpoint holds them, bf16 or fp16 activations that are
// not quantised, exact products, fp32 sums. A decode step is the read of the weights, so everything here serves that stream.
//
//   w8a16_small(x, w, alpha, bias, out, enable_pdl)                   launch shape from plan()
//   w8a16_small_shaped(x, w, alpha, bias, out, shape, enable_pdl)     shape: the 7 numbers of Plan
//   w8a16_small_plan(m, n, k, multiprocessors, shared_sm, shared_block, clusters)    those 7 numbers, pure
//     x      bf16 or fp16 (the build's type) [M, K], K contiguous, K % 16 == 0, rows 16-byte aligned
//     w      e4m3 [R, K], contiguous, 16-byte aligned; R is N, or up to 7 less: rows that are not there are zeros
//     alpha  f32, 1 element or [N]
//     bias   None or [N], type of x
//     out    type of x, [M, N], contiguous, N % 8 == 0, 16-byte aligned, written
//
// NaN among the weights reads as +-480: who may have such gives their rows an alpha of NaN.
// With enable_pdl, w must not be written by the kernel before this one: it is read before that has finished.
// Capture-safe: only launches. The first call on a device asks it for its properties.
#include "gdc_guard.h"

#include "w8a16_small_weights.h"

#include "few_tokens_rows.h"

namespace fp4d {

Built built() {
  static constexpr Instance kInstances[] = {
      instance<8, 1, 4, 2>(),  instance<8, 2, 2, 4>(),
      instance<8, 2, 4, 4>(),  instance<16, 1, 4, 2>(),
      instance<16, 2, 2, 4>(), instance<16, 2, 4, 4>(),
      instance<32, 1, 4, 2>(), instance<32, 2, 2, 4>(),
      instance<16, 4, 2, 4>(), instance<32, 2, 4, 4>(),
      instance<32, 4, 2, 4>(), instance<32, 1, 2, 2>(),  // where 100 KB of shared memory are all there is
  };
  return {std::begin(kInstances), std::end(kInstances)};
}

// What won on an H200 (bench/NOTES.md): two row blocks that share the activations where these are many bytes beside the
// weights' and pairs are enough for the GPU.
Division division(int64_t tokens, int64_t row_blocks, int64_t, Machine const& on) {
  int64_t const pairs = divide_up(row_blocks, 2);
  bool const in_pairs = (tokens == 16 && pairs >= on.multiprocessors && !many(pairs, on)) ||
                        (tokens == 32 && filled(2 * pairs, on));
  return in_pairs ? Division{2, 2, 4, false, true} : Division{1, 4, 2, false, true};
}

using EncodeTiled = decltype(&cuTensorMapEncodeTiled);

// The driver's encoder, found at run time: a library that links libcuda cannot be loaded where there is none.
EncodeTiled find_encoder() {
  void* found = nullptr;
  cudaDriverEntryPointQueryResult result{};
#if CUDART_VERSION >= 12050
  cudaError_t const error =
      cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000, cudaEnableDefault, &result);
#else
  cudaError_t const error =
      cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &found, cudaEnableDefault, &result);
#endif
  TVM_FFI_CHECK_CUDA_ERROR(error);
  if (result != cudaDriverEntryPointSuccess || found == nullptr)
    TVM_FFI_THROW(RuntimeError)
        << "the driver has no cuTensorMapEncodeTiled, which TMA needs: install a driver for "
           "CUDA 12.0 or later";
  return reinterpret_cast<EncodeTiled>(found);
}

CUtensorMap tensor_map(uint8_t const* rows, int64_t n, int64_t k) {
  static EncodeTiled const encode = find_encoder();
  CUtensorMap map{};
  cuuint64_t const sizes[2] = {cuuint64_t(k), cuuint64_t(n)}, strides[1] = {cuuint64_t(k)};
  cuuint32_t const box[2] = {Weights::kChunkK, Weights::kRows}, steps[2] = {1, 1};
  CUresult const result =
      encode(&map, CU_TENSOR_MAP_DATA_TYPE_UINT8, 2, const_cast<uint8_t*>(rows), sizes, strides, box, steps,
             CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
             CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS)
    TVM_FFI_THROW(RuntimeError) << "cuTensorMapEncodeTiled refuses a weight [" << n << ", " << k
                                << "]: CUresult " << int(result);
  return map;
}

Weights::Source source_of(TensorView w, int64_t n, int64_t k) {
  check_dtype({"w", w}, {kE4M3});
  check_ndim({"w", w}, 2);
  if (w.size(0) > n || w.size(0) <= n - 8)
    TVM_FFI_THROW(ValueError) << "w: size of dimension 0 is " << w.size(0) << ", needed " << n
                              << " (N), or up to 7 less";
  check_size({"w", w}, 1, k, "K");
  check_contiguous({"w", w});
  check_aligned({"w", w}, 16);
  Weights::Source source{};
  source.rows = data_of<uint8_t>(w), source.n = int(w.size(0)), source.k = int(k);
  return source;
}

void ready(Weights::Source& source, Machine const& on) {
  if (on.clusters) source.map = tensor_map(source.rows, source.n, source.k);
}

}  // namespace fp4d

TVM_FFI_DLL_EXPORT_TYPED_FUNC(w8a16_small, fp4d::run);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(w8a16_small_shaped, fp4d::run_shaped);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(w8a16_small_plan, fp4d::plan_numbers);
