// out = alpha * (x @ W^T) + bias for many tokens or many rows on SM90: NVFP4 weights in W4P order, wgmma.
//
//   w4_gemm(x, x_scale, w, alpha, bias, out, shape, enable_pdl)
//   w4_gemm_even(x, x_scale, w, alpha, bias, out, shape, room, enable_pdl)    FP4D_EVEN == 1, in its place
//   w4_gemm_tile() -> [tokens, rows, k of a stage, bytes of its weights, CTAs of a multiprocessor, most parts of K,
//                      whether CTAs can share rows]
//     x       FP4D_ACT == 8   e4m3 as packed_activations.cu packs it, uint8 [ceil(K/128), ceil(M/8), 1024], 16-byte aligned, and
//                             x_scale f32, 1 element or [M]
//             FP4D_ACT == 16  type of out, [M, K], K contiguous, K % 16 == 0, row stride a multiple of 8 and at least K,
//                             16-byte aligned, and x_scale None
//     w       uint8 [ceil(N/64), ceil(K/64), 2304], W4P, contiguous, 16-byte aligned, no NaN and no sign in its scales
//     alpha   f32, 1 element or [N]
//     bias    None or [N], type of out
//     out     bf16 or fp16 (FP4D_OUT) [M, N], contiguous, N % 8 == 0, 16-byte aligned, written
//     shape   LaunchShape of many_tokens/launch.h: [multicast (1, 2, 4), split (1, 2, 3, 4, 8), raster (1 or more), 1,
//             rounds, clusters]; multicast * split <= 8, split <= stages of K; covers every tile
//             FP4D_EVEN == 1: split 1; each cluster does `rounds` whole tiles and its share of the others, by stages along K.
//             There is at least 1 of these, at most `clusters`, and 5 stages for each cluster
//     room    uint8, multicast * sharing * clusters * (4 * tokens * rows + 64) bytes, contiguous, 16-byte aligned, written;
//             what it holds before does not matter, but no other launch may use it meanwhile
//
// FP4D_TOKENS is the tile's number of tokens (for FP8 32, 64 and 96 to 208, for 16 bits 64 to 256, in steps of 16); every
// build takes every M. FP4D_ACT == 16: weights are exact. FP4D_ACT == 8: a weight is
// e4m3(e2m1 * block scale / 8), rounded to nearest even, and sums of at most 384 k (tiles of up to 64 tokens: 256 k) are
// what FP8 wgmma keeps (13 bits behind the point of the largest addend, truncated at every MMA of 32 k:
// https://arxiv.org/abs/2412.19437, section 3.3.2); those are added in f32. The same inputs give the same bits,
// whatever ran before; another launch shape may give others (order of sums).
//
// With enable_pdl, w must not be written by the kernel before this one: it is read before that has finished.
// Capture-safe: only launches. The first call on a device asks it for its properties.
#include "common/gdc_guard.h"

#if !defined(FP4D_OUT) || !defined(FP4D_ACT) || !defined(FP4D_TOKENS)
#error \
    "FP4D_OUT: 0 = bf16, 1 = fp16; FP4D_ACT: 8 or 16 bits of an activation; FP4D_TOKENS: 32, or 64 to 256 in steps of 16"
#endif

#include "many_tokens/w4/weights.h"

#include "many_tokens/launch.h"
#include "weights/w4_checks.h"

namespace fp4d {

struct W4Gemm {
  using Weights = W4Weights;
  using Used = Tile<FP4D_TOKENS, Weights>;

  static constexpr int64_t kStageK = Weights::kStageChunks * w4::kChunkK;

  static int64_t stages_of(TensorView w) { return divide_up(w.size(1), int64_t(Weights::kStageChunks)); }

  static Weights::Source source_of(TensorView w, int64_t n) {
    w4::check_weights(w, n, w4::k_of(w));
    return {data_of<uint8_t>(w), int(w.size(1))};
  }

  static void check_k(int64_t k, TensorView w) {
    if (divide_up(k, int64_t(w4::kChunkK)) != w.size(1))
      TVM_FFI_THROW(ValueError) << "x: K is " << k << ", but w has " << w.size(1)
                                << " chunks of 64 along K, needed ceil(K/64) of them";
  }

  static void ready(Weights::Source&, TensorView) {}
};

}  // namespace fp4d

#if FP4D_EVEN
TVM_FFI_DLL_EXPORT_TYPED_FUNC(w4_gemm_even, fp4d::Launch<fp4d::W4Gemm>::run_evenly);
#else
TVM_FFI_DLL_EXPORT_TYPED_FUNC(w4_gemm, fp4d::Launch<fp4d::W4Gemm>::run);
#endif
TVM_FFI_DLL_EXPORT_TYPED_FUNC(w4_gemm_tile, fp4d::Launch<fp4d::W4Gemm>::tile);
