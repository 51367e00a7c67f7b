// out = alpha * (x @ W^T) + bias for few tokens: e4m3 weights as a checkpoint holds them, bf16 or fp16 activations that
// are not quantised, exact products, fp32 sums. A decode step is the read of the weights, so everything here serves
// that stream.
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
// A NaN in the weights reads as +-480. If weights may hold NaN, give their rows an alpha of NaN.
// With enable_pdl, w must not be written by the kernel before this one: it is read before that has finished.
// Capture-safe: only launches. The first call on a device asks it for its properties.
#include "common/gdc_guard.h"

#include "few_tokens/w8/w8a16_weights.h"

#include "few_tokens/run_rows.h"
#include "few_tokens/w8/rows_launch.h"

namespace fp4d {

struct W8A16Small : W8Rows {
  using Weights = W8A16Weights;

  static Built<Weights> built() {
    static constexpr Instance<Weights> kInstances[] = {
        instance<Weights, 8, 1, 4, 2>(),
        instance<Weights, 8, 2, 2, 4>(),
        instance<Weights, 8, 2, 4, 4>(),
        instance<Weights, 16, 1, 4, 2>(),
        instance<Weights, 16, 2, 2, 4>(),
        instance<Weights, 16, 2, 4, 4>(),
        instance<Weights, 32, 1, 4, 2>(),
        instance<Weights, 32, 2, 2, 4>(),
        instance<Weights, 16, 4, 2, 4>(),
        instance<Weights, 32, 2, 4, 4>(),
        instance<Weights, 32, 4, 2, 4>(),
        instance<Weights, 32, 1, 2, 2>(),  // where 100 KB of shared memory are all there is
    };
    return {std::begin(kInstances), std::end(kInstances)};
  }

  // Measured on an H200 (bench/NOTES.md): two row blocks that share the activations where these are many bytes beside the
  // weights' and pairs are enough for the GPU.
  static Division division(int64_t tokens, int64_t row_blocks, int64_t, Machine const& on) {
    int64_t const pairs = divide_up(row_blocks, 2);
    bool const in_pairs = (tokens == 16 && pairs >= on.multiprocessors && !many(pairs, on)) ||
                          (tokens == 32 && filled(2 * pairs, on));
    return in_pairs ? Division{2, 2, 4, false, true} : Division{1, 4, 2, false, true};
  }
};

}  // namespace fp4d

TVM_FFI_DLL_EXPORT_TYPED_FUNC(w8a16_small, fp4d::RunRows<fp4d::W8A16Small>::run);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(w8a16_small_shaped, fp4d::RunRows<fp4d::W8A16Small>::run_shaped);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(w8a16_small_plan, fp4d::Launch<fp4d::W8A16Small>::plan_numbers);
