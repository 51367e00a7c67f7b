"""The launch of GEMMs on activations that are not quantised."""

from __future__ import annotations

from torch import Tensor

from fp4dispatch.backends.own.compiled import Launch, State, Weights


def launch_weight_only(s: State, weights: Weights = ()) -> Launch:
    """Return the launch of a GEMM on a weight and its scales; with a launch shape, if the plan has one."""
    gemm, pdl, shape = s.gemm, s.gemm_pdl, s.shape

    def small(x: Tensor, out: Tensor, bias: Tensor | None, w: Weights = weights) -> None:
        gemm(x, w[0], w[1], bias, out, pdl)

    def large(x: Tensor, out: Tensor, bias: Tensor | None, w: Weights = weights) -> None:
        gemm(x, None, w[0], w[1], bias, out, shape, pdl)

    return small if shape is None else large
