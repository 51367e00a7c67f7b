// What w4a16_small.cu and w8a16_small.cu export: few_tokens/launch.h for activations as a model holds them.
#pragma once

#include <algorithm>

#include "few_tokens/launch.h"

namespace fp4d {

template <class Small>
struct RunRows : Launch<Small> {
  using Base = Launch<Small>;
  using Weights = typename Small::Weights;
  using Params = typename Base::Params;

  static Params check(TensorView x, TensorView w, TensorView alpha, Optional<TensorView> bias,
                      TensorView out) {
    check_dtype({"x", x}, {kOutType});
    check_input(x, 16);
    Params p = Base::check_all_but_x(w, alpha, bias, out, x.size(1));
    check_size({"out", out}, 0, x.size(0), "M");
    p.x = data_of<Element>(x);
    p.x_stride = input_stride(x);
    return p;
  }

  // For tiles of so many tokens. Those that bring tokens without TMA take rows at any distance.
  static void check_apart(TensorView x, int64_t tokens) {
    auto const built = Small::built();
    auto const by_tma = [&](auto const& used) { return used.tokens == tokens && used.boxes; };
    if (std::any_of(built.begin(), built.end(), by_tma)) check_rows_apart({"x", x});
  }

  static int device_of(TensorView x, TensorView w, TensorView alpha, Optional<TensorView> bias,
                       TensorView out) {
    return check_one_cuda_device(
        {{"x", x}, {"w", w}, {"alpha", alpha}, {"bias", bias.has_value() ? *bias : x}, {"out", out}});
  }

  static void run(TensorView x, TensorView w, TensorView alpha, Optional<TensorView> bias, TensorView out,
                  bool enable_pdl) {
    Params const params = check(x, w, alpha, bias, out);
    check_apart(x, Base::tokens_of(params.m));
    Base::launch_planned(params, device_of(x, w, alpha, bias, out), enable_pdl);
  }

  static void run_shaped(TensorView x, TensorView w, TensorView alpha, Optional<TensorView> bias,
                         TensorView out, tvm::ffi::Array<int64_t> shape, bool enable_pdl) {
    Params const params = check(x, w, alpha, bias, out);
    Plan const chosen = Base::shape_of(shape);
    check_apart(x, chosen.tokens);
    Base::launch_shaped(params, chosen, device_of(x, w, alpha, bias, out), enable_pdl);
  }
};

}  // namespace fp4d
