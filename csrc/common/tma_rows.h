// TMA's description of a matrix row by row: boxes of 128 bytes of so many rows, swizzled as wgmma reads them, or of 64
// bytes and swizzled so that 8 rows lie in all banks. What is not there comes as zeros.
#pragma once

#include <type_traits>

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "common/ffi_checks.h"
#include "common/tma_cache.h"

namespace fp4d {

// Of a matrix [rows, K] of 16 bits that TMA is to read.
inline void check_rows_apart(Arg arg) {
  TensorView const& t = arg.tensor;
  if (t.size(0) > 1 && t.stride(0) < t.size(1))
    TVM_FFI_THROW(ValueError) << arg.name << ": rows are " << t.stride(0)
                              << " elements apart, needed at least K (" << t.size(1)
                              << "): TMA takes no rows that share memory; call .contiguous()";
}

// e4m3 as bytes.
template <class T>
constexpr CUtensorMapDataType kMapType = sizeof(T) == 1              ? CU_TENSOR_MAP_DATA_TYPE_UINT8
                                         : std::is_same_v<T, __half> ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16
                                                                     : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;

// [rows, k], rows `stride` elements apart.
template <class T, int kBoxBytes = 128>
CUtensorMap map_of_rows(T const* first, int64_t rows, int64_t k, int64_t stride, int64_t box_rows) {
  static_assert(kBoxBytes == 128 || kBoxBytes == 64);
  CUtensorMap map{};
  uint64_t const sizes[2] = {uint64_t(k), uint64_t(rows)}, strides[1] = {uint64_t(stride) * sizeof(T)};
  uint32_t const box[2] = {kBoxBytes / sizeof(T), uint32_t(box_rows)}, steps[2] = {1, 1};
  encode_cached(&map, kMapType<T>, 2, const_cast<T*>(first), sizes, strides, box, steps,
                CU_TENSOR_MAP_INTERLEAVE_NONE,
                kBoxBytes == 128 ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_64B,
                CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return map;
}

}  // namespace fp4d
