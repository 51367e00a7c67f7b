// The weights of w8_rows.h at a launch: checked, and their tensor map for TMA. After few_tokens_launch.h.
#pragma once

#include "few_tokens_launch.h"
#include "tma_driver.h"
#include "w8_rows.h"

namespace fp4d {

CUtensorMap tensor_map(uint8_t const* rows, int64_t n, int64_t k) {
  CUtensorMap map{};
  cuuint64_t const sizes[2] = {cuuint64_t(k), cuuint64_t(n)}, strides[1] = {cuuint64_t(k)};
  cuuint32_t const box[2] = {w8::kStageK, w8::kRows}, steps[2] = {1, 1};
  CUresult const result =
      encode_tiled()(&map, CU_TENSOR_MAP_DATA_TYPE_UINT8, 2, const_cast<uint8_t*>(rows), sizes, strides, box,
                     steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                     CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
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
