// What w4a8_small.cu and w8a8_small.cu export: few_tokens_launch.h for e4m3 activations as w4_activations.cu packs them.
#pragma once

#include "few_tokens_launch.h"

namespace fp4d {

constexpr int64_t kBlockTokens = 8, kBlockBytes = 1024;  // of packed activations

// K as the weights say it, checked as far as that takes.
int64_t k_of(TensorView w);

Params check(TensorView x, TensorView x_scale, TensorView w, TensorView alpha, Optional<TensorView> bias,
             TensorView out) {
  Params p = check_all_but_x(w, alpha, bias, out, k_of(w));
  check_dtype({"x", x}, {kU8});
  check_ndim({"x", x}, 3);
  check_size({"x", x}, 0, divide_up(p.chunks, Weights::kStageChunks), "ceil(K/128)");
  check_size({"x", x}, 1, divide_up(p.m, kBlockTokens), "ceil(M/8)");
  check_size({"x", x}, 2, kBlockBytes, "bytes of 8 tokens");
  check_contiguous({"x", x});
  check_aligned({"x", x}, 16);
  check_dtype({"x_scale", x_scale}, {kF32});
  if (Weights::kBlocks) {
    check_ndim({"x_scale", x_scale}, 2);
    check_size({"x_scale", x_scale}, 0, x.size(0), "ceil(K/128)");
    check_size({"x_scale", x_scale}, 1, x.size(1) * kBlockTokens, "8 ceil(M/8)");
    check_aligned({"x_scale", x_scale}, 16);
  } else {
    check_scalar_or_vector({"x_scale", x_scale}, p.m, "M");
  }
  check_contiguous({"x_scale", x_scale});
  p.x = data_of<uint8_t>(x), p.x_scale = data_of<float>(x_scale);
  p.token_blocks = int(x.size(1)), p.x_scale_step = x_scale.numel() == 1 ? 0 : 1;
  return p;
}

int device_of(TensorView x, TensorView x_scale, TensorView w, TensorView alpha, Optional<TensorView> bias,
              TensorView out) {
  return check_one_cuda_device({{"x", x},
                                {"x_scale", x_scale},
                                {"w", w},
                                {"alpha", alpha},
                                {"bias", bias.has_value() ? *bias : x},
                                {"out", out}});
}

void run(TensorView x, TensorView x_scale, TensorView w, TensorView alpha, Optional<TensorView> bias,
         TensorView out, bool enable_pdl) {
  Params const params = check(x, x_scale, w, alpha, bias, out);
  launch_planned(params, device_of(x, x_scale, w, alpha, bias, out), enable_pdl);
}

void run_shaped(TensorView x, TensorView x_scale, TensorView w, TensorView alpha, Optional<TensorView> bias,
                TensorView out, tvm::ffi::Array<int64_t> shape, bool enable_pdl) {
  Params const params = check(x, x_scale, w, alpha, bias, out);
  Plan const chosen = shape_of(shape);
  launch_shaped(params, chosen, device_of(x, x_scale, w, alpha, bias, out), enable_pdl);
}

}  // namespace fp4d
