// What w4a8_small.cu and w8a8_small.cu export: few_tokens/launch.h for e4m3 activations as packed_activations.cu packs
// them.
#pragma once

#include "few_tokens/launch.h"

namespace fp4d {

// `Small` (few_tokens/launch.h) has one thing more, k_of(w): K as the weights say it, checked as far as that takes.
template <class Small>
struct RunPacked : Launch<Small> {
  using Base = Launch<Small>;
  using Weights = typename Small::Weights;
  using Params = typename Base::Params;

  static Params check(TensorView x, TensorView x_scale, TensorView w, TensorView alpha,
                      Optional<TensorView> bias, TensorView out) {
    Params p = Base::check_all_but_x(w, alpha, bias, out, Small::k_of(w));
    check_packed({"x", x}, divide_up(p.chunks, Weights::kStageChunks), p.m);
    check_token_scales(x_scale, p.m, x.size(0), x.size(1), Weights::kBlocks);
    p.x = data_of<uint8_t>(x), p.x_scale = data_of<float>(x_scale);
    p.token_blocks = int(x.size(1)), p.x_scale_step = x_scale.numel() == 1 ? 0 : 1;
    return p;
  }

  static int device_of(TensorView x, TensorView x_scale, TensorView w, TensorView alpha,
                       Optional<TensorView> bias, TensorView out) {
    return check_one_cuda_device({{"x", x},
                                  {"x_scale", x_scale},
                                  {"w", w},
                                  {"alpha", alpha},
                                  {"bias", bias.has_value() ? *bias : x},
                                  {"out", out}});
  }

  static void run(TensorView x, TensorView x_scale, TensorView w, TensorView alpha, Optional<TensorView> bias,
                  TensorView out, bool enable_pdl) {
    Params const params = check(x, x_scale, w, alpha, bias, out);
    Base::launch_planned(params, device_of(x, x_scale, w, alpha, bias, out), enable_pdl);
  }

  static void run_shaped(TensorView x, TensorView x_scale, TensorView w, TensorView alpha,
                         Optional<TensorView> bias, TensorView out, tvm::ffi::Array<int64_t> shape,
                         bool enable_pdl) {
    Params const params = check(x, x_scale, w, alpha, bias, out);
    Plan const chosen = Base::shape_of(shape);
    Base::launch_shaped(params, chosen, device_of(x, x_scale, w, alpha, bias, out), enable_pdl);
  }
};

}  // namespace fp4d
