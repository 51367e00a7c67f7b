// out = x_scale * alpha * (x @ W^T) + bias for few tokens: NVFP4 weights in W4P order, folded to e4m3
// (weights/w4_dequant.h), by e4m3 activations as packed_activations.cu packs them, f32 sums. For so few tokens that the
// read of the weights is most of the time; w4_gemm_sm90.cu is for more.
//
//   w4a8_small(x, x_scale, w, alpha, bias, out, enable_pdl)                  launch shape from plan()
//   w4a8_small_shaped(x, x_scale, w, alpha, bias, out, shape, enable_pdl)    shape: the 7 numbers of Plan
//   w4a8_small_plan(m, n, k, multiprocessors, shared_sm, shared_block, clusters)    those 7 numbers, pure
//     x        uint8 [ceil(K/128), ceil(M/8), 1024], e4m3 as w4_quantize_row packs it, contiguous, 16-byte aligned
//     x_scale  f32, 1 element or [M]
//     w        uint8 [ceil(N/64), ceil(K/64), 2304], W4P, contiguous, 16-byte aligned
//     alpha    f32, 1 element or [N]
//     bias     None or [N], the build's type
//     out      bf16 or fp16 (the build's type) [M, N], contiguous, N % 8 == 0, 16-byte aligned, written
//
// With enable_pdl, w must not be written by the kernel before this one: it is read before that has finished.
// Capture-safe: only launches. The first call on a device asks it for its properties.
#include "common/gdc_guard.h"

#include "few_tokens/w4/w4a8_weights.h"

#include "few_tokens/run_packed.h"
#include "weights/w4_checks.h"

namespace fp4d {

struct W4A8Small {
  using Weights = W4A8Weights;

  static Built<Weights> built() {
    static constexpr Instance<Weights> kInstances[] = {
        instance<Weights, 16, 1, 2, 1>(),  instance<Weights, 16, 1, 4, 1>(),
        instance<Weights, 16, 2, 1, 1>(),  instance<Weights, 24, 1, 2, 1>(),
        instance<Weights, 24, 1, 4, 1>(),  instance<Weights, 32, 1, 2, 1>(),
        instance<Weights, 32, 1, 4, 1>(),  instance<Weights, 48, 1, 2, 1>(),
        instance<Weights, 48, 1, 4, 1>(),  instance<Weights, 48, 2, 2, 1>(),
        instance<Weights, 64, 1, 2, 1>(),  instance<Weights, 64, 1, 4, 1>(),
        instance<Weights, 64, 2, 2, 1>(),  instance<Weights, 80, 1, 2, 1>(),
        instance<Weights, 96, 1, 2, 1>(),  instance<Weights, 96, 2, 1, 1>(),
        instance<Weights, 112, 1, 2, 1>(), instance<Weights, 128, 1, 2, 1>(),
    };
    return {std::begin(kInstances), std::end(kInstances)};
  }

  static constexpr int64_t kLongK = 2048;

  // Measured on an H200 (bench/NOTES.md): one row block; four groups of warps where a CTA has a multiprocessor to itself
  // and much of K. Four stages, or five where two CTAs share a multiprocessor or tokens take little of a stage.
  static Division division(int64_t tokens, int64_t row_blocks, int64_t k, Machine const& on) {
    double const share = filled_for(row_blocks, k, on);
    int64_t const cluster = cluster_of(row_blocks, kMaxCluster, on, share), ctas = row_blocks * cluster;
    if (ctas > on.multiprocessors) return {1, 2, 1, false, false, 5, share};
    bool const four = k > kLongK * cluster && tokens <= 64;  // more tokens leave no room for four rings
    return {1, four ? 4 : 2, 1, false, false, tokens == 16 ? 5 : 4, share};
  }

  static Weights::Source source_of(TensorView w, int64_t n, int64_t k) {
    w4::check_weights(w, n, k);
    return data_of<uint8_t>(w);
  }

  static void ready(Weights::Source&, Machine const&) {}

  static int64_t k_of(TensorView w) { return w4::k_of(w); }
};

}  // namespace fp4d

TVM_FFI_DLL_EXPORT_TYPED_FUNC(w4a8_small, fp4d::RunPacked<fp4d::W4A8Small>::run);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(w4a8_small_shaped, fp4d::RunPacked<fp4d::W4A8Small>::run_shaped);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(w4a8_small_plan, fp4d::Launch<fp4d::W4A8Small>::plan_numbers);
