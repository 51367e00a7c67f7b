// e4m3 weights [N, K] row by row, as a checkpoint holds them, into the stages of few_tokens/kernel.h: 64 rows by 128 k,
// 128 bytes a row. TMA swizzles (column j of 16 bytes of row r is at j ^ r % 8) and fills with zeros what is beyond N
// and K.
#pragma once

#include <cuda.h>

#include "common/async_copy.h"
#include "weights/early_loads.h"

namespace fp4d::w8 {

constexpr int kRows = 64, kStageK = 128, kBlockBytes = kRows * kStageK;

// `map` for TMA, `rows` [n, k] for what has none.
struct Source {
  CUtensorMap map;
  uint8_t const* rows;
  int n, k;
};
static_assert(offsetof(Source, map) == 0 && sizeof(Source::map) == kWeightsBytes,
              "before_wait of kernels.toml");

// Stage `stage` along K of `row_blocks` blocks of rows, by a warp; reports to the barrier, once.
__device__ __forceinline__ void load_rows(Source const& w, int stage, int row_block, int row_blocks,
                                          uint32_t to, uint32_t barrier, int lane) {
#if FP4D_BULK
  if (elected(lane)) {
    barrier_arrive_expect(barrier, row_blocks * kBlockBytes);
#pragma unroll 1
    for (int block = 0; block < row_blocks; ++block)
      copy_box(to + block * kBlockBytes, &w.map, stage * kStageK, (row_block + block) * kRows, barrier);
  }
#else
  if (lane == 0) barrier_arrive(barrier);
  int const column = lane % 8, k = stage * kStageK + column * 16;
#pragma unroll 4
  for (int r = lane / 8; r < row_blocks * kRows; r += 4) {
    int64_t const row = int64_t(row_block) * kRows + r;
    bool const inside = row < w.n && k < w.k;
    copy_16(to + r * kStageK + ((column ^ (r % 8)) * 16), w.rows + (inside ? row * w.k + k : 0),
            inside ? 16 : 0);
  }
#endif
}

}  // namespace fp4d::w8
