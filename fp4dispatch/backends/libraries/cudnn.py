"""cuDNN, through the graphs of :mod:`fp4dispatch.backends.libraries.cudnn_graphs`.

M: a graph is built for a bucket of M (:func:`m_bucket`, at most 12.5 % above M from 128 on); the activation is padded
to it with zeros and the result is sliced. cuDNN 9.21 can run one graph with other shapes ("override shape"), but that
has given sparse NaN (flashinfer#3140). Graphs are kept for the life of the process: a CUDA graph launches their
kernels, and dropping one is a segfault at replay (flashinfer#1349).

Handles: one per device, made in ``plan``. A launch sets its stream to the current one, under a lock. So a stream that
exists only during a capture needs no handle of its own, which could not be made then.

Each launch lies behind a fence (:mod:`fp4dispatch.backends.libraries.fence`), because some of cuDNN's kernels do not
wait for the kernel before them.

Our kernels quantise activations (:mod:`fp4dispatch.backends.own.tensors.quantizers`), into the rows of the bucket.

Workspaces come from torch's caching allocator on the current stream, sized by the plan, and are zeroed before each
launch: split-K semaphores expect zeros (vllm#55571, flashinfer#4553). Most plans need none.

Tested: FP8 on an H200 with cuDNN 9.19. NVFP4 has not run on hardware: cuDNN compiles its graphs for each arch without
the GPU, and an interpreter compares them with the reference (tests/unit/test_backend_cudnn.py).
"""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from fp4dispatch import formats
from fp4dispatch.backends.base import Backend, LinearWeights, Plan, Prepared, QuantizedActivation
from fp4dispatch.backends.libraries import cudnn_graphs as graphs
from fp4dispatch.backends.libraries.cudnn_graphs import Executable, GraphKey
from fp4dispatch.backends.libraries.fence import Fence
from fp4dispatch.backends.own.tensors import quantizers
from fp4dispatch.backends.own.tensors.quantizers import ToScratch
from fp4dispatch.backends.weight_layout import block_scales_128x4, global_scales, on_bytes, row_scales
from fp4dispatch.errors import BackendUnsupportedError, InputError
from fp4dispatch.formats import NVFP4_BLOCK, round_up, zero_pad
from fp4dispatch.machine import capture
from fp4dispatch.machine.locks import ForkSafeLock
from fp4dispatch.machine.system import System
from fp4dispatch.policy.capability import check
from fp4dispatch.problem import Activation, Op, OutDtype, Problem, Scaling, SfLayout
from fp4dispatch.problem.decision import Reason

_N_MULTIPLE = 16
_K_MULTIPLE: dict[Op, int] = {"nvfp4_gemm": 32, "fp8_gemm": 16}  # 16 bytes a row
_ALIGN = 16
"""Bytes that addresses of tensors are multiples of, as cuDNN assumes."""


def m_bucket(m: int) -> int:
    """Return the M that the graph for ``m`` tokens is built for: a power of two to 16, then in steps of 16 or 1/8."""
    if m <= 16:
        return 1 << max(m - 1, 0).bit_length()
    return round_up(m, max(16, 1 << ((m - 1).bit_length() - 4)))


class _Layout(NamedTuple):
    """Sizes of prepared weights; ``np``, ``kp`` are padded with zeros. ``per_column``: scales of B are f32 [np]."""

    scaling: Scaling
    n: int
    k: int
    np: int
    kp: int
    per_column: bool
    has_input_scale: bool


class _State(NamedTuple):
    """The graph of a plan's bucket of M, and its quantiser."""

    executable: Executable
    quantize: ToScratch


class _Device:
    """State of one GPU: the handle, its lock, and every graph built for it."""

    def __init__(self, cudnn: Any) -> None:
        self.handle = cudnn.create_handle()
        self.lock = ForkSafeLock()
        self.fence = Fence()
        self.executables: dict[GraphKey, Executable] = {}


class CudnnBackend(Backend):
    """NVFP4 x NVFP4, and FP8 scaled per tensor or per row, on cuDNN's fused matmul engines."""

    name = "cudnn"
    activations: ClassVar[dict[Op, tuple[Activation, ...]]] = {"nvfp4_gemm": ("nvfp4",), "fp8_gemm": ("fp8",)}

    def __init__(self) -> None:
        self._devices: dict[torch.device, _Device] = {}
        self._lock = ForkSafeLock()

    def supports(self, problem: Problem, system: System) -> tuple[Reason, ...]:
        """Collect every reason why this backend cannot run the problem."""
        return check(self.name, problem, system)

    def builds(self, problem: Problem, device: torch.device) -> tuple[tuple[str, str], ...]:
        """Name the quantiser that a plan will load."""
        return quantizers.builds(problem)

    def prepare(self, weights: LinearWeights) -> Prepared:
        """Pad with zeros to 16-byte rows and bring block scales into 128x4; weights that fit are not copied.

        Tensors: weight [np, kp] (nvfp4: uint8 [np, kp/2]); scale of B, f32 [1] or [np]; nvfp4: block scales in 128x4;
        input scale.
        """
        w = weights
        np, kp = round_up(w.n, _N_MULTIPLE), round_up(w.k, _K_MULTIPLE[w.op])
        if w.op == "nvfp4_gemm":
            per_column = len(w.shard_rows) > 1
            tensors = [zero_pad(w.weight, np, kp // 2), global_scales(w, np), block_scales_128x4(w, np, kp)]
        else:
            per_column = w.scaling == "row"
            scale = row_scales(w.scale, np) if per_column else w.scale.reshape(1)
            tensors = [zero_pad(w.weight, np, kp), scale]
        if w.input_scale is not None:
            tensors.append(w.input_scale)
        layout = _Layout(w.scaling, w.n, w.k, np, kp, per_column, w.input_scale is not None)
        return Prepared(self.name, tuple(on_bytes(tensor, _ALIGN) for tensor in tensors), tuple(layout))

    def plan(self, problem: Problem, prepared: Prepared) -> Plan:
        """Build the graph of M's bucket, compile it and launch it once, so that its kernels are loaded; load ours.

        Raises
        ------
        CaptureError
            During capture.
        BackendUnsupportedError
            If cuDNN cannot be loaded or has no plan that runs, with its reasons.

        Notes
        -----
        Where our kernels cannot be compiled, torch's operations quantise: a warning and the plan's ``note`` say so.
        """
        capture.forbid_in_capture(f"building a cuDNN graph for {problem}", "fp4dispatch.warmup(model, tokens=[...])")
        cudnn = graphs.frontend()
        device = prepared.tensors[0].device
        layout = _Layout(*prepared.layout)
        key = _key(problem, layout)
        quantize = ToScratch(device, layout.scaling, layout.kp, static=layout.has_input_scale, rows=m_bucket)
        with self._lock, _on(device):
            state = self._devices.get(device)
            if state is None:
                state = self._devices[device] = _Device(cudnn)
            executable = state.executables.get(key)
            if executable is None:
                executable = state.executables[key] = _first_that_runs(cudnn, key, state, prepared)
        return Plan(self.name, problem, _State(executable, quantize), quantize.note)

    def release(self, plan: Plan) -> None:
        """Forget the graph of a plan; plans that share it keep it alive."""
        executable = _state(plan).executable
        with self._lock:
            for state in self._devices.values():
                if state.executables.get(executable.key) is executable:
                    del state.executables[executable.key]

    def run(
        self,
        plan: Plan,
        prepared: Prepared,
        x: Tensor | QuantizedActivation,
        out: Tensor,
        bias: Tensor | None = None,
    ) -> None:
        """Quantise the activation if it is not quantised yet, and launch the graph on the current stream.

        A bias of another dtype than ``out`` is rounded to that of ``out`` first.
        """
        layout = _Layout(*prepared.layout)
        executable = _state(plan).executable
        key = executable.key
        m = out.shape[0]
        direct = (key.m, key.n) == (m, layout.n) and out.is_contiguous() and out.data_ptr() % 16 == 0
        d = out if direct else out.new_empty(key.m, key.n)
        tensors = {graphs.B: prepared.tensors[0], graphs.B_SCALE: prepared.tensors[1], graphs.D: d}
        if key.op == "nvfp4_gemm":
            tensors |= _nvfp4_operands(plan, layout, prepared, x)
        else:
            tensors |= _fp8_operands(plan, layout, prepared, x)
        if bias is not None:
            tensors[graphs.BIAS] = on_bytes(zero_pad(bias.to(out.dtype).reshape(1, -1), 1, key.n), _ALIGN)
        _launch(executable, self._devices[out.device], tensors)
        if not direct:
            out.copy_(d[:m, : layout.n])


# ---------------------------------------------------------------------------------------------------------------- plan


def _key(problem: Problem, layout: _Layout) -> GraphKey:
    """Return the key of a problem's graph: plain data without scales, so that layers of one shape share it."""
    one_scale = problem.op == "nvfp4_gemm" or layout.has_input_scale
    return GraphKey(
        problem.op,
        m_bucket(problem.m),
        layout.np,
        layout.kp,
        problem.out_dtype,
        "one" if one_scale else "each",
        "each" if layout.per_column else "one",
        problem.bias,
    )


def _first_that_runs(cudnn: Any, key: GraphKey, state: _Device, prepared: Prepared) -> Executable:
    """Launch each candidate once, on zeros, until one runs. The first launch loads kernels, so it must be eager."""
    tensors = _scratch(key, prepared)
    failed: list[str] = []
    try:
        for executable in graphs.build_plans(cudnn, key, handle=state.handle):
            try:
                _launch(executable, state, tensors)
            except (RuntimeError, cudnn.cudnnGraphNotSupportedError) as error:
                failed.append(f"{executable.name}: {error}")
            else:
                return executable
    except BackendUnsupportedError as error:
        if not failed:
            raise
        raise BackendUnsupportedError(f"{error}; built, but did not run: {'; '.join(failed)}") from error
    raise AssertionError("build_plans ends with an exception")


def _scratch(key: GraphKey, prepared: Prepared) -> dict[int, Tensor]:
    """Return every tensor of a graph: the layer's weights and scales, and zeros for the others."""
    w = prepared.tensors
    dtypes = {graphs.A: w[0].dtype, graphs.BIAS: _TORCH[key.out_dtype], graphs.D: _TORCH[key.out_dtype]}
    own = {graphs.B: w[0], graphs.B_SCALE: w[1]}
    packed = {graphs.A: 2} if key.op == "nvfp4_gemm" else {}
    if key.op == "nvfp4_gemm":
        own[graphs.B_SF] = w[2]
        dtypes[graphs.A_SF] = torch.float8_e4m3fn
    return {
        uid: own[uid]
        if uid in own
        else w[0].new_zeros(dim[0] * dim[1] * dim[2] // packed.get(uid, 1), dtype=dtypes.get(uid, torch.float32))
        for uid, (dim, _) in key.sizes().items()
    }


_TORCH: dict[OutDtype, torch.dtype] = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
}


# ----------------------------------------------------------------------------------------------------------------- run


def _on(device: torch.device) -> Any:
    return torch.cuda.device(device)


def _current_stream(device: torch.device) -> int:
    return int(torch.cuda.current_stream(device).cuda_stream)


def _launch(executable: Executable, state: _Device, tensors: dict[int, Tensor]) -> None:
    d = tensors[graphs.D]
    workspace = d.new_zeros(executable.workspace_bytes, dtype=torch.uint8) if executable.workspace_bytes else None
    state.fence(d)
    with state.lock:
        graphs.frontend().set_stream(handle=state.handle, stream=_current_stream(d.device))
        executable.execute(tensors, workspace, state.handle)


def _state(plan: Plan) -> _State:
    state: _State = plan.state
    return state


def _fp8_operands(
    plan: Plan, layout: _Layout, prepared: Prepared, x: Tensor | QuantizedActivation
) -> dict[int, Tensor]:
    """Return A [key.m, kp] and its scale, f32 [1] or [key.m]; scales of padding rows do not matter."""
    if isinstance(x, Tensor):
        x = _state(plan).quantize(x, prepared.tensors[-1] if layout.has_input_scale else None)
        return {graphs.A: on_bytes(x.data, _ALIGN), graphs.A_SCALE: on_bytes(x.scale.reshape(-1), _ALIGN)}
    key, m = _state(plan).executable.key, x.data.shape[0]
    scale = x.scale.reshape(-1)
    if key.a_scale == "each":
        scale = zero_pad(scale.expand(m).reshape(1, m), 1, key.m)
    elif scale.numel() != 1:
        raise InputError(
            f"cudnn: a_scale has {scale.numel()} elements; this layer has a static input_scale, and so takes one scale "
            "for the whole activation"
        )
    return {graphs.A: on_bytes(zero_pad(x.data, key.m, key.k), _ALIGN), graphs.A_SCALE: on_bytes(scale, _ALIGN)}


def _nvfp4_operands(
    plan: Plan, layout: _Layout, prepared: Prepared, x: Tensor | QuantizedActivation
) -> dict[int, Tensor]:
    """Return A uint8 [key.m, kp/2], its block scales in 128x4, its global scale f32 [1], and the block scales of B."""
    key = _state(plan).executable.key
    if isinstance(x, Tensor):
        x = _state(plan).quantize(x, prepared.tensors[-1] if layout.has_input_scale else formats.nvfp4_global_scale(x))
        sf = x.scale
    else:
        m, columns = x.data.shape[0], layout.k // NVFP4_BLOCK
        sf_layout: SfLayout = plan.problem.sf_layout or "linear"
        linear = formats.from_128x4(x.scale, m, columns) if sf_layout == "128x4" else x.scale
        sf = formats.to_128x4(zero_pad(linear, key.m, key.k // NVFP4_BLOCK))
    scale = x.data.new_ones(1, dtype=torch.float32) if x.global_scale is None else x.global_scale.reshape(1)
    return {
        graphs.A: on_bytes(zero_pad(x.data, key.m, key.k // 2), _ALIGN),
        graphs.A_SF: on_bytes(sf, _ALIGN),
        graphs.A_SCALE: on_bytes(scale, _ALIGN),
        graphs.B_SF: prepared.tensors[2],
    }
