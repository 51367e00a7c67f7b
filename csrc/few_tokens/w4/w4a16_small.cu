// out = alpha * (x @ W^T) + bias for few tokens: NVFP4 weights in W4P order, bf16 or fp16 activations, exact
// dequantisation, fp32 sums. A decode step is the read of the weights, so everything here serves that stream.
//
//   w4a16_small(x, w, alpha, bias, out, enable_pdl)                   launch shape from plan()
//   w4a16_small_shaped(x, w, alpha, bias, out, shape, enable_pdl)     shape: the 7 numbers of Plan
//   w4a16_small_plan(m, n, k, multiprocessors, shared_sm, shared_block, clusters)    those 7 numbers, pure
//     x      bf16 or fp16 (the build's type) [M, K], K contiguous, K % 16 == 0, rows 16-byte aligned
//     w      uint8 [ceil(N/64), ceil(K/64), 2304], W4P, contiguous, 16-byte aligned
//     alpha  f32, 1 element or [N]
//     bias   None or [N], type of x
//     out    type of x, [M, N], contiguous, N % 8 == 0, 16-byte aligned, written
//
// With enable_pdl, w must not be written by the kernel before this one: it is read before that has finished.
// Capture-safe: only launches. The first call on a device asks it for its properties.
#include "common/gdc_guard.h"

#include "few_tokens/w4/w4a16_weights.h"

#include "few_tokens/run_rows.h"
#include "weights/w4_checks.h"

namespace fp4d {

struct W4A16Small {
  using Weights = W4A16Weights;

  static Built<Weights> built() {
    static constexpr Instance<Weights> kInstances[] = {
        instance<Weights, 8, 1, 4, 2>(),  instance<Weights, 8, 2, 2, 4>(),  instance<Weights, 8, 2, 4, 4>(),
        instance<Weights, 16, 1, 4, 2>(), instance<Weights, 16, 2, 2, 4>(), instance<Weights, 16, 2, 4, 4>(),
#if defined(CUTLASS_ENABLE_GDC_FOR_SM90)  // the build for 90a, which has wgmma
        instance<Weights, 32, 1, 2, 1>(), instance<Weights, 48, 1, 2, 1>(), instance<Weights, 48, 1, 4, 1>(),
        instance<Weights, 48, 2, 1, 1>(), instance<Weights, 64, 1, 2, 1>(), instance<Weights, 64, 1, 4, 1>(),
        instance<Weights, 64, 2, 2, 1>(), instance<Weights, 96, 1, 2, 1>(), instance<Weights, 96, 2, 1, 1>(),
#else
        instance<Weights, 32, 1, 4, 2>(), instance<Weights, 32, 2, 2, 4>(),
#endif
    };
    return {std::begin(kInstances), std::end(kInstances)};
  }

  static constexpr int64_t kLongK = 16384;

  // Measured on an H200 (bench/NOTES.md): two row blocks that share the activations where pairs of them are enough for
  // the GPU, more groups of warps in a CTA where a CTA has the multiprocessor to itself for long.
  static Division division(int64_t tokens, int64_t row_blocks, int64_t k, Machine const& on) {
    int64_t const pairs = divide_up(row_blocks, 2);
#if defined(CUTLASS_ENABLE_GDC_FOR_SM90)
    if (tokens > 16) return {1, 2, 1};
#endif
    if (many(pairs, on)) return {2, 2, 4};
    if (pairs >= on.multiprocessors) return {2, tokens == 8 ? 4 : 2, 4};
    if (tokens <= 16 && on.clusters && k >= kLongK && filled(2 * pairs, on) && !filled(pairs, on))
      return {2, 4, 4};
    return {1, 4, 2};
  }

  static Weights::Source source_of(TensorView w, int64_t n, int64_t k) {
    w4::check_weights(w, n, k);
    return data_of<uint8_t>(w);
  }

  static void ready(Weights::Source&, Machine const&) {}
};

}  // namespace fp4d

TVM_FFI_DLL_EXPORT_TYPED_FUNC(w4a16_small, fp4d::RunRows<fp4d::W4A16Small>::run);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(w4a16_small_shaped, fp4d::RunRows<fp4d::W4A16Small>::run_shaped);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(w4a16_small_plan, fp4d::Launch<fp4d::W4A16Small>::plan_numbers);
