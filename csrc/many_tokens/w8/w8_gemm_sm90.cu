// out = x_scale * alpha * (x @ W^T) + bias for many tokens on SM90: e4m3 weights as a checkpoint holds them, wgmma, f32
// sums.
//
//   w8_gemm(x, x_scale, w, alpha, bias, out, shape, enable_pdl)
//   w8_gemm_tile() -> [tokens, rows, k of a stage, bytes of its weights, CTAs of a multiprocessor, most parts of K,
//                      whether CTAs can share rows]
//     x       FP4D_ACT == 8   e4m3 as w8_quantize_row packs it, uint8 [ceil(K/128), ceil(M/8), 1024], contiguous, 16-byte
//                             aligned, and x_scale f32, 1 element or [M]; FP4D_SCALING == 1: [ceil(K/128), 8 ceil(M/8)] as
//                             w8_quantize_block writes it, 16-byte aligned
//             FP4D_ACT == 16  type of out, [M, K], K contiguous, row stride a multiple of 8 and at least K, 16-byte
//                             aligned, and x_scale None
//     w       e4m3 [R, K], contiguous, 16-byte aligned, K % 16 == 0; R is N, or up to 7 less: rows that are not there are
//             zeros. FP4D_ACT == 16: no NaN, which would be read as a number
//     alpha   f32, 1 element or [N]; FP4D_SCALING == 1: [ceil(N/128), ceil(K/128)], contiguous, as checkpoints hold
//             weight_scale_inv
//     bias    None or [N], type of out
//     out     bf16 or fp16 (FP4D_OUT) [M, N], contiguous, N % 8 == 0, 16-byte aligned, written
//     shape   LaunchShape of many_tokens/launch.h: [multicast (1, 2, 4), split (1, 2, 3, 4, 8), raster (1 or more),
//             sharing (1, 2), rounds, clusters]; multicast * split * sharing <= 8, split <= stages of K; covers every tile
//
// FP4D_TOKENS is the tile's number of tokens (for FP8 96 to 224, for 16 bits 64 to 256, in steps of 16; FP4D_SCALING == 1:
// 128); every build takes every M. FP4D_ACT == 16: weights and products are exact. FP4D_ACT == 8: sums of at most 256 k are
// what FP8 wgmma keeps (13 bits behind the point of the largest addend, truncated at every MMA of 32 k:
// https://arxiv.org/abs/2412.19437, section 3.3.2); those are added in f32. The same inputs give the same bits,
// whatever ran before; another launch shape may give others (order of sums).
//
// With enable_pdl, w must not be written by the kernel before this one: it is read before that has finished.
// Capture-safe: only launches. The first call on a device asks it for its properties.
#include "common/gdc_guard.h"

#if !defined(FP4D_OUT) || !defined(FP4D_ACT) || !defined(FP4D_TOKENS)
#error \
    "FP4D_OUT: 0 = bf16, 1 = fp16; FP4D_ACT: 8 or 16 bits of an activation; FP4D_TOKENS: 64 to 256 in steps of 16"
#endif

#if !defined(FP4D_SCALING)
#define FP4D_SCALING 0  // 1: scales of 128x128 weights and of 128 k of a token
#endif

#include "many_tokens/w8/weights.h"

#include "many_tokens/launch.h"
#include "common/tma_rows.h"
#include "weights/w8_checks.h"

namespace fp4d {

struct W8Gemm {
  using Weights = W8Weights;
  using Used = Tile<FP4D_TOKENS, Weights>;
  static_assert(!Weights::kBlocks || Used::kRows == kScaleBlock, "a tile has one scale a stage");

  static constexpr int64_t kStageK = Weights::kStageK;

  static int64_t stages_of(TensorView w) { return divide_up(w.size(1), kStageK); }

  static Weights::Source source_of(TensorView w, int64_t n) {
    w8::check_weights(w, n, w8::k_of(w));
    return {};
  }

  static void check_k(int64_t k, TensorView w) {
    if (k != w.size(1))
      TVM_FFI_THROW(ValueError) << "x: K is " << k << ", but that of w is " << w.size(1)
                                << ", needed the same";
  }

  static void ready(Weights::Source& source, TensorView w) {
    source.map = map_of_rows<uint8_t, Weights::kStageK>(data_of<uint8_t>(w), w.size(0), w.size(1), w.size(1),
                                                        kBlockRows);
  }
};

}  // namespace fp4d

TVM_FFI_DLL_EXPORT_TYPED_FUNC(w8_gemm, fp4d::Launch<fp4d::W8Gemm>::run);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(w8_gemm_tile, fp4d::Launch<fp4d::W8Gemm>::tile);
