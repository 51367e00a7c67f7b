// TMA's description of e4m3 weights [N, K] row by row: boxes of 64 rows by 128 k, swizzled as wgmma reads them.
#pragma once

#include "tma_cache.h"

namespace fp4d {

inline CUtensorMap tensor_map(uint8_t const* rows, int64_t n, int64_t k) {
  CUtensorMap map{};
  uint64_t const sizes[2] = {uint64_t(k), uint64_t(n)}, strides[1] = {uint64_t(k)};
  uint32_t const box[2] = {128, 64}, steps[2] = {1, 1};
  encode_cached(&map, CU_TENSOR_MAP_DATA_TYPE_UINT8, 2, const_cast<uint8_t*>(rows), sizes, strides, box,
                steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return map;
}

}  // namespace fp4d
