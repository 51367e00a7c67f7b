"""FlashInfer's runners, each under the name that SGLang and vLLM give it: never replaced by one of ours.

Each backend is data, a :class:`Runner`. NVFP4 calls ``flashinfer.mm_fp4``, FP8 with ``tensor`` scaling ``bmm_fp8`` with
a batch of one, FP8 with ``block128`` scaling ``gemm_fp8_nt_groupwise``; the runner is always named and ``out=`` given.
Our kernels quantise activations (:mod:`fp4dispatch.backends.own.tensors.quantizers`): FlashInfer's round differently.
FlashInfer launches its CUTLASS GEMMs with PDL, right behind our quantiser. Their epilogues may read scales before they
wait, so scales are written before the quantiser runs.

What FlashInfer cannot fuse:

* ``mm_fp4`` takes one alpha. A layer of fused shards runs one GEMM per shard, which is exact.
* ``bmm_fp8`` takes one scale for the whole activation. Scales per token multiply the result, in float32. The result is
  bfloat16 then, as float16 could overflow before scaling, and is rounded twice. A single token has one scale: cuDNN
  fuses it; CUTLASS, launched with PDL, could read it too early.
* No function takes a bias. It is added to the rounded result: one rounding more than with a fused epilogue.

``mm_fp4`` and ``bmm_fp8`` share one scratch buffer per device between all streams (flashinfer#2710): use layers on
these runners on one stream of a device at a time.

Tested: cuDNN's FP8 on an H200. The NVFP4 runners need Blackwell and have not run on hardware; their operands pass
FlashInfer's own Python and requirement checks on the CPU (tests/unit/test_backend_flashinfer.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from fp4dispatch import formats
from fp4dispatch.backends.base import Backend, LinearWeights, Plan, Prepared, QuantizedActivation
from fp4dispatch.backends.libraries import flashinfer_package as package
from fp4dispatch.backends.libraries.fence import Fence
from fp4dispatch.backends.own.tensors import quantizers
from fp4dispatch.backends.own.tensors.quantizers import ToScratch
from fp4dispatch.backends.weight_layout import on_bytes
from fp4dispatch.formats import FP8_BLOCK, NVFP4_BLOCK, round_up, zero_pad
from fp4dispatch.machine import capture
from fp4dispatch.machine.system import System
from fp4dispatch.policy.capability import check
from fp4dispatch.problem import Activation, Op, Problem, Scaling, SfLayout
from fp4dispatch.problem.decision import Reason

_ALIGN = 32
"""Bytes: alignment of A and B that FlashInfer's CuTe DSL kernels assume. torch's allocator aligns to more."""

_EPILOGUE_TILE = 128
"""Rows of the tile that ``nvfp4_quantize(do_shuffle=True)`` shuffles weights for."""

_M_MULTIPLE = 4
"""``gemm_fp8_nt_groupwise`` requires M to be a multiple of this."""


class Runner(NamedTuple):
    """How FlashInfer runs a backend's problems.

    ``fp4``: its name in ``mm_fp4(backend=)``. ``n_multiple``, ``k_multiple``: NVFP4 weights are padded to these.
    ``shuffled``: weights in the row order of trtllm-gen. ``tensor``, ``groupwise``: its names in ``bmm_fp8`` and
    ``gemm_fp8_nt_groupwise``; empty if it has none. ``fp8_multiple``: FP8 weights are padded to it. ``fuses_one``:
    ``bmm_fp8`` may take a scale that the previous kernel writes (cuDNN 9.19's kernels for sm_90 wait for the previous
    kernel before any load).
    """

    fp4: str
    n_multiple: int
    k_multiple: int
    shuffled: bool = False
    tensor: str = ""
    groupwise: str = ""
    fp8_multiple: int = 16
    fuses_one: bool = False


class _Layout(NamedTuple):
    """Sizes of prepared weights. ``shards``: rows and padded rows of each; one shard for FP8."""

    scaling: Scaling
    n: int
    k: int
    kp: int
    shards: tuple[tuple[int, int], ...]
    has_input_scale: bool


class _State(NamedTuple):
    """The quantiser of a plan. ``trial``: the first call of a shape, with all of FlashInfer's checks."""

    quantize: ToScratch
    trial: bool


class FlashInferBackend(Backend):
    """Base of the backends on FlashInfer's runners."""

    runner: ClassVar[Runner]

    def supports(self, problem: Problem, system: System) -> tuple[Reason, ...]:
        """Collect every reason why this backend cannot run the problem."""
        return check(self.name, problem, system)

    def builds(self, problem: Problem, device: torch.device) -> tuple[tuple[str, str], ...]:
        """Name the quantiser that a plan will load."""
        return quantizers.builds(problem)

    def prepare(self, weights: LinearWeights) -> Prepared:
        """Pad with zeros; bring NVFP4 weights into the runner's layout, shard by shard. What fits is not copied.

        Tensors, nvfp4: of each shard uint8 [np, kp/2] and block scales in 128x4, rows shuffled where the runner wants
        it; then the global scales, f32 [S]. FP8: weight [np, kp], scale f32 [1] or [np/128, kp/128]. Last, the input
        scale.
        """
        w = weights
        if w.op == "nvfp4_gemm":
            tensors, layout = self._prepare_nvfp4(w)
        else:
            multiple = FP8_BLOCK if w.scaling == "block128" else self.runner.fp8_multiple
            np, kp = round_up(w.n, multiple), round_up(w.k, multiple)
            layout = _Layout(w.scaling, w.n, w.k, kp, ((w.n, np),), w.input_scale is not None)
            scale = w.scale if w.scaling == "block128" else w.scale.reshape(1)
            tensors = [zero_pad(w.weight, np, kp), scale]
        if w.input_scale is not None:
            tensors.append(w.input_scale)
        return Prepared(self.name, tuple(on_bytes(tensor, _ALIGN) for tensor in tensors), tuple(layout))

    def plan(self, problem: Problem, prepared: Prepared) -> Plan:
        """Import FlashInfer, load our quantiser, and make the first call of this shape, eagerly, with all checks.

        Raises
        ------
        CaptureError
            During capture.
        BackendUnsupportedError
            With what FlashInfer says against it.

        Notes
        -----
        Where our kernels cannot be compiled, torch's operations quantise: a warning and the plan's ``note`` say so.
        """
        capture.forbid_in_capture(
            f"loading FlashInfer's kernels for {problem}", "fp4dispatch.warmup(model, tokens=[...])"
        )
        package.gemm_module()
        dtype = getattr(torch, problem.out_dtype)
        weight = prepared.tensors[0]
        x = weight.new_zeros(problem.m, problem.k, dtype=dtype)
        out = weight.new_empty(problem.m, problem.n, dtype=dtype)
        layout = _Layout(*prepared.layout)
        with package.on(weight.device):
            quantize = ToScratch(
                weight.device, layout.scaling, layout.kp, static=layout.has_input_scale, rows=_rows(layout.scaling)
            )
            self.run(Plan(self.name, problem, _State(quantize, trial=True)), prepared, x, out)
        return Plan(self.name, problem, _State(quantize, trial=False), quantize.note)

    def run(
        self,
        plan: Plan,
        prepared: Prepared,
        x: Tensor | QuantizedActivation,
        out: Tensor,
        bias: Tensor | None = None,
    ) -> None:
        """Quantise the activation if it is not quantised yet, launch, and do what FlashInfer cannot fuse.

        Raises
        ------
        CaptureError
            If ``flashinfer.autotune()`` is on during capture.
        """
        package.refuse_tuning_in_capture(self.name)
        layout = _Layout(*prepared.layout)
        if layout.scaling == "nvfp4":
            self._run_nvfp4(plan, layout, prepared, x, out)
        elif layout.scaling == "block128":
            self._run_groupwise(plan, layout, prepared, x, out)
        else:
            self._run_tensor(plan, layout, prepared, x, out)
        if bias is not None:
            out.add_(bias)

    # ---------------------------------------------------------------------------------------------------------- nvfp4

    def _prepare_nvfp4(self, w: LinearWeights) -> tuple[list[Tensor], _Layout]:
        assert w.global_scale is not None
        runner, columns = self.runner, w.k // NVFP4_BLOCK
        kp = round_up(w.k, runner.k_multiple)
        shards = tuple((rows, round_up(rows, runner.n_multiple)) for rows in w.shard_rows or (w.n,))
        layout = _Layout(w.scaling, w.n, w.k, kp, shards, w.input_scale is not None)
        fits = shards == ((w.n, w.n),) and kp == w.k and not runner.shuffled
        if fits and w.sf_layout == "128x4":
            return [w.weight, w.scale, w.global_scale.reshape(-1)], layout
        linear = formats.from_128x4(w.scale, w.n, columns) if w.sf_layout == "128x4" else w.scale
        tensors, start = [], 0
        for rows, np in shards:
            data = zero_pad(w.weight[start : start + rows], np, kp // 2)
            sf = zero_pad(linear[start : start + rows], np, kp // NVFP4_BLOCK)
            if runner.shuffled:
                data, sf = package.shuffle_rows(data, sf, _EPILOGUE_TILE)
            tensors += [data, formats.to_128x4(sf)]
            start += rows
        return [*tensors, w.global_scale.reshape(-1)], layout

    def _run_nvfp4(
        self, plan: Plan, layout: _Layout, prepared: Prepared, x: Tensor | QuantizedActivation, out: Tensor
    ) -> None:
        scale = _global_scale(layout, prepared, x)
        alphas = prepared.tensors[2 * len(layout.shards)] * scale  # before the quantiser: an epilogue may not wait
        a, sf = _nvfp4_activation(plan, layout, scale, x)
        start = 0
        for i, (rows, np) in enumerate(layout.shards):
            data, data_sf = prepared.tensors[2 * i : 2 * i + 2]

            def launch(d: Tensor, data: Tensor = data, data_sf: Tensor = data_sf, i: int = i) -> None:
                package.gemm_module().mm_fp4(
                    a,
                    data.t(),
                    sf.view(torch.uint8),
                    data_sf.view(torch.uint8).t(),
                    alphas[i : i + 1],
                    d.dtype,
                    out=d,
                    block_size=NVFP4_BLOCK,
                    use_8x4_sf_layout=False,
                    backend=self.runner.fp4,
                    use_nvfp4=True,
                    skip_check=not _state(plan).trial,
                )

            _into(self.name, plan, launch, out[:, start : start + rows], np)
            start += rows

    # ------------------------------------------------------------------------------------------------------------ fp8

    def _run_tensor(
        self, plan: Plan, layout: _Layout, prepared: Prepared, x: Tensor | QuantizedActivation, out: Tensor
    ) -> None:
        weight, w_scale = prepared.tensors[:2]
        if isinstance(x, Tensor):
            per_token = not layout.has_input_scale and (x.shape[0] > 1 or not self.runner.fuses_one)
        else:
            per_token = x.scale.numel() > 1
        one = w_scale.new_ones(1) if per_token else None  # before the quantiser: an epilogue may not wait
        if isinstance(x, Tensor):
            x = _state(plan).quantize(x, prepared.tensors[-1] if layout.has_input_scale else None)
        a = on_bytes(zero_pad(x.data, x.data.shape[0], layout.kp), _ALIGN)
        a_scale = x.scale.reshape(1) if one is None else one

        def launch(d: Tensor) -> None:
            package.gemm_module().bmm_fp8(
                a.unsqueeze(0),
                weight.t().unsqueeze(0),
                a_scale,
                w_scale,
                d.dtype,
                out=d.unsqueeze(0),
                backend=self.runner.tensor,
                skip_check=not _state(plan).trial,
            )

        _into(self.name, plan, launch, out, layout.shards[0][1])
        if per_token:
            out.mul_(x.scale.reshape(-1, 1))

    def _run_groupwise(
        self, plan: Plan, layout: _Layout, prepared: Prepared, x: Tensor | QuantizedActivation, out: Tensor
    ) -> None:
        weight, w_scale = prepared.tensors[:2]
        if isinstance(x, Tensor):
            x = _state(plan).quantize(x)
        mp = round_up(out.shape[0], _M_MULTIPLE)
        a = on_bytes(zero_pad(x.data, mp, layout.kp), _ALIGN)
        a_scale = on_bytes(zero_pad(x.scale, mp, w_scale.shape[1]), _ALIGN)

        def launch(d: Tensor) -> None:
            package.gemm_module().gemm_fp8_nt_groupwise(
                a,
                weight,
                a_scale,
                w_scale,
                scale_major_mode="K",
                scale_granularity_mnk=(1, FP8_BLOCK, FP8_BLOCK),
                out=d,
                backend=self.runner.groupwise,
                skip_check=not _state(plan).trial,
            )

        _into(self.name, plan, launch, out, layout.shards[0][1], mp)


# ------------------------------------------------------------------------------------------------------------- helpers


_FENCED = frozenset({"flashinfer_cudnn"})
"""Backends whose kernels may start before the kernels before them have ended."""
_fence = Fence()


def _into(name: str, plan: Plan, launch: Callable[[Tensor], None], out: Tensor, np: int, mp: int | None = None) -> None:
    """Launch into ``out`` [M, N] if it is [mp, np], contiguous and aligned; else into scratch, and copy."""
    m, n = out.shape
    mp = m if mp is None else mp
    direct = (mp, np) == (m, n) and out.is_contiguous() and out.data_ptr() % _ALIGN == 0
    d = out if direct else out.new_empty(mp, np)
    if name in _FENCED:
        _fence(d)
    if _state(plan).trial:
        package.try_out(name, plan.problem, launch, d)
    else:
        with package.LOCK:
            launch(d)
    if not direct:
        out.copy_(d[:m, :n])


def _state(plan: Plan) -> _State:
    state: _State = plan.state
    return state


def _rows(scaling: Scaling) -> Callable[[int], int]:
    """Return the function from M to the rows of the quantised activation."""
    return (lambda m: round_up(m, _M_MULTIPLE)) if scaling == "block128" else (lambda m: m)


def _global_scale(layout: _Layout, prepared: Prepared, x: Tensor | QuantizedActivation) -> Tensor:
    """Return the global scale of an NVFP4 activation, f32 with one element."""
    if isinstance(x, Tensor):
        return prepared.tensors[-1] if layout.has_input_scale else formats.nvfp4_global_scale(x)
    return x.data.new_ones(1, dtype=torch.float32) if x.global_scale is None else x.global_scale


def _nvfp4_activation(
    plan: Plan, layout: _Layout, scale: Tensor, x: Tensor | QuantizedActivation
) -> tuple[Tensor, Tensor]:
    """Return A uint8 [M, kp/2] and its block scales in 128x4 with zero padding."""
    if isinstance(x, Tensor):
        x = _state(plan).quantize(x, scale)
        sf = x.scale
    else:
        m, columns = x.data.shape[0], layout.k // NVFP4_BLOCK
        sf_layout: SfLayout = plan.problem.sf_layout or "linear"
        linear = formats.from_128x4(x.scale, m, columns) if sf_layout == "128x4" else x.scale
        sf = formats.to_128x4(zero_pad(linear, m, layout.kp // NVFP4_BLOCK))
    return on_bytes(zero_pad(x.data, x.data.shape[0], layout.kp // 2), _ALIGN), on_bytes(sf, _ALIGN)


# ------------------------------------------------------------------------------------------------------------- runners


class FlashInferCutlassBackend(FlashInferBackend):
    """FlashInfer's CUTLASS kernels."""

    name = "flashinfer_cutlass"
    activations: ClassVar[dict[Op, tuple[Activation, ...]]] = {"nvfp4_gemm": ("nvfp4",), "fp8_gemm": ("fp8",)}
    runner = Runner("cutlass", 32, 32, tensor="cutlass", groupwise="cutlass", fp8_multiple=128)


class FlashInferCudnnBackend(FlashInferBackend):
    """cuDNN, as FlashInfer drives it."""

    name = "flashinfer_cudnn"
    activations: ClassVar[dict[Op, tuple[Activation, ...]]] = {"nvfp4_gemm": ("nvfp4",), "fp8_gemm": ("fp8",)}
    runner = Runner("cudnn", 16, 32, tensor="cudnn", fuses_one=True)


class FlashInferTrtllmBackend(FlashInferBackend):
    """TensorRT-LLM's generated kernels; with 128x4 scales for any M, never the 8x4 layout (flashinfer#2861)."""

    name = "flashinfer_trtllm"
    activations: ClassVar[dict[Op, tuple[Activation, ...]]] = {"nvfp4_gemm": ("nvfp4",)}
    runner = Runner("trtllm", 128, 256, shuffled=True)


class FlashInferCuteDslBackend(FlashInferBackend):
    """FlashInfer's CuTe DSL kernels."""

    name = "flashinfer_cutedsl"
    activations: ClassVar[dict[Op, tuple[Activation, ...]]] = {"nvfp4_gemm": ("nvfp4",)}
    runner = Runner("cute-dsl", 64, 64)


class FlashInferB12xBackend(FlashInferBackend):
    """The b12x kernels for consumer Blackwell."""

    name = "flashinfer_b12x"
    activations: ClassVar[dict[Op, tuple[Activation, ...]]] = {"nvfp4_gemm": ("nvfp4",)}
    runner = Runner("b12x", 8, 32)
