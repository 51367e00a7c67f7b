// The weights of w8_rows.h at a launch: checked, and their tensor map for TMA. After few_tokens_launch.h.
#pragma once

#include "few_tokens_launch.h"
#include "w8_rows.h"

namespace fp4d {

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
  cuuint32_t const box[2] = {w8::kStageK, w8::kRows}, steps[2] = {1, 1};
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
