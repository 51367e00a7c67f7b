// out = x_scale * alpha * (x @ W^T) + bias for few tokens: e4m3 weights as a checkpoint holds them by e4m3 activations
// as packed_activations.cu packs them, f32 sums. The time is the read of the weights, which go from memory to the
// tensor cores without an instruction on them.
//
//   w8a8_small(x, x_scale, w, alpha, bias, out, enable_pdl)                  launch shape from plan()
//   w8a8_small_shaped(x, x_scale, w, alpha, bias, out, shape, enable_pdl)    shape: the 7 numbers of Plan
//   w8a8_small_plan(m, n, k, multiprocessors, shared_sm, shared_block, clusters)    those 7 numbers, pure
//     x        uint8 [ceil(K/128), ceil(M/8), 1024], e4m3 as w8_quantize_row packs it, contiguous, 16-byte aligned
//     x_scale  f32, 1 element or [M]; FP4D_SCALING == 1: [ceil(K/128), 8 ceil(M/8)] as w8_quantize_block writes it, 16-byte
//              aligned
//     w        e4m3 [R, K], contiguous, 16-byte aligned, K % 16 == 0; R is N, or up to 7 less: rows that are not there are
//              zeros
//     alpha    f32, 1 element or [N]; FP4D_SCALING == 1: [ceil(N/128), ceil(K/128)], contiguous, as checkpoints hold
//              weight_scale_inv
//     bias     None or [N], the build's type
//     out      bf16 or fp16 (the build's type) [M, N], contiguous, N % 8 == 0, 16-byte aligned, written
//
// With enable_pdl, w must not be written by the kernel before this one: it is read before that has finished.
// Capture-safe: only launches. The first call on a device asks it for its properties.
#include "common/gdc_guard.h"

#if !defined(FP4D_SCALING)
#define FP4D_SCALING 0  // 1: scales of 128x128 weights and of 128 k of a token
#endif

#include "few_tokens/w8/w8a8_weights.h"

#include "few_tokens/run_packed.h"
#include "few_tokens/w8/rows_launch.h"

namespace fp4d {

struct W8A8Small : W8Rows {
  using Weights = W8A8Weights;

  static Built<Weights> built() {
    static constexpr Instance<Weights> kInstances[] = {
        instance<Weights, 16, 1, 2, 1>(),  instance<Weights, 16, 1, 4, 1>(), instance<Weights, 16, 2, 1, 1>(),
        instance<Weights, 24, 1, 2, 1>(),  instance<Weights, 32, 1, 2, 1>(), instance<Weights, 32, 1, 4, 1>(),
        instance<Weights, 48, 1, 2, 1>(),  instance<Weights, 64, 1, 2, 1>(), instance<Weights, 64, 2, 1, 1>(),
        instance<Weights, 80, 1, 2, 1>(),  instance<Weights, 96, 1, 2, 1>(), instance<Weights, 96, 2, 1, 1>(),
        instance<Weights, 112, 1, 2, 1>(), instance<Weights, 128, 1, 2, 1>()};
    return {std::begin(kInstances), std::end(kInstances)};
  }

  // Measured on an H200 (bench/NOTES.md): one row block, two groups of warps, and where a CTA has its multiprocessor to
  // itself a ring of all its shared memory.
  static Division division(int64_t, int64_t row_blocks, int64_t k, Machine const& on) {
    return {1, 2, 1, false, true, 0, filled_for(row_blocks, k, on)};
  }

  static int64_t k_of(TensorView w) { return w8::k_of(w); }
};

}  // namespace fp4d

TVM_FFI_DLL_EXPORT_TYPED_FUNC(w8a8_small, fp4d::RunPacked<fp4d::W8A8Small>::run);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(w8a8_small_shaped, fp4d::RunPacked<fp4d::W8A8Small>::run_shaped);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(w8a8_small_plan, fp4d::Launch<fp4d::W8A8Small>::plan_numbers);
