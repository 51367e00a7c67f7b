"""cuDNN graphs of one GEMM, built with the Python API of nvidia-cudnn-frontend, which is imported on first use.

A graph depends on its :class:`GraphKey` alone: sizes, dtypes and the kinds of scales. Scales and alpha are device
tensors, so no value and no address is part of a key (flashinfer#2450, flashinfer#1887).

::

    NVFP4   D = (dequantise(A, A_SF) @ dequantise(B, B_SF)) * A_SCALE * B_SCALE (+ BIAS)
    FP8     D = (A @ B) * A_SCALE * B_SCALE (+ BIAS)

Everything after the product is f32 and fused; D is rounded once. Tensors are 3-D, B is [1, K, N] with K contiguous,
NVFP4 sizes count elements rather than bytes, and block scales in the 128x4 layout are declared with their padded sizes
and the reordering F8_128x4
(https://docs.nvidia.com/deeplearning/cudnn/frontend/latest/operations/BlockScaling.html and Matmul.html).
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import Any, Literal, NamedTuple

from torch import Tensor

from fp4dispatch.errors import BackendUnsupportedError, InputError
from fp4dispatch.formats import NVFP4_BLOCK, round_up
from fp4dispatch.machine import libraries
from fp4dispatch.machine import system as _system
from fp4dispatch.problem import Op, OutDtype

A, B, A_SF, B_SF, A_SCALE, B_SCALE, BIAS, D = range(1, 9)
"""Identifiers of a graph's tensors."""

Scale = Literal["one", "each"]

_DATA_TYPE: dict[OutDtype, str] = {"bfloat16": "BFLOAT16", "float16": "HALF", "float32": "FLOAT"}


class GraphKey(NamedTuple):
    """All that a graph depends on.

    ``m``, ``n``, ``k``: sizes in elements, padded. ``a_scale``: ``one`` scale f32 [] or ``each`` row its own, f32 [M].
    ``b_scale``: ``one``, or ``each`` column its own, f32 [N].
    """

    op: Op
    m: int
    n: int
    k: int
    out_dtype: OutDtype
    a_scale: Scale
    b_scale: Scale
    bias: bool

    def sizes(self) -> dict[int, tuple[tuple[int, int, int], tuple[int, int, int]]]:
        """Return dimensions and strides, in elements, of every tensor of the graph by identifier."""
        m, n, k = self.m, self.n, self.k
        row = ((1, m, 1), (m, 1, 1)) if self.a_scale == "each" else ((1, 1, 1), (1, 1, 1))
        column = ((1, 1, n), (n, n, 1))
        sizes = {
            A: ((1, m, k), (m * k, k, 1)),
            B: ((1, k, n), (n * k, 1, k)),
            A_SCALE: row,
            B_SCALE: column if self.b_scale == "each" else ((1, 1, 1), (1, 1, 1)),
            D: ((1, m, n), (m * n, n, 1)),
        }
        if self.op == "nvfp4_gemm":
            sm, sn, sk = round_up(m, 128), round_up(n, 128), round_up(k // NVFP4_BLOCK, 4)
            sizes |= {A_SF: ((1, sm, sk), (sm * sk, sk, 1)), B_SF: ((1, sk, sn), (sn * sk, 1, sk))}
        if self.bias:
            sizes[BIAS] = column
        return sizes


@functools.cache
def frontend() -> Any:
    """Import nvidia-cudnn-frontend, which loads cuDNN, and return the module ``cudnn``.

    Raises
    ------
    BackendUnsupportedError
        If it cannot be imported, or loads another cuDNN than the one that the choice of backend was based on.
    """
    try:
        import cudnn

        loaded = libraries.cudnn_number(int(cudnn.backend_version()))
    except (ImportError, OSError, RuntimeError, AttributeError) as error:
        raise BackendUnsupportedError(
            f"cudnn: nvidia-cudnn-frontend cannot load cuDNN: {type(error).__name__}: {error}\n"
            "  fix: pip install -U nvidia-cudnn-frontend nvidia-cudnn-cu13 (cu12 for CUDA 12)"
        ) from error
    known = _system.current().cudnn
    if known is not None and known.version and known.version != loaded:
        raise BackendUnsupportedError(
            f"cudnn: nvidia-cudnn-frontend uses cuDNN {loaded}, but cuDNN {known.version} is loaded from {known.path}: "
            "two versions in one process\n  fix: take the other one out of LD_LIBRARY_PATH, or uninstall it"
        )
    return cudnn


def build_graph(cudnn: Any, key: GraphKey, **where: Any) -> Any:
    """Return the graph of a key, lowered to cuDNN's operation graph.

    Parameters
    ----------
    cudnn
        As :func:`frontend` returns it.
    key
        What to compute.
    where
        ``handle=``, or ``device_property=`` to build without the GPU (cuDNN 9.8 and later).
    """
    dtype = cudnn.data_type
    fp4 = key.op == "nvfp4_gemm"
    operand = dtype.FP4_E2M1 if fp4 else dtype.FP8_E4M3
    out = getattr(dtype, _DATA_TYPE[key.out_dtype])
    types = {A: operand, B: operand, A_SF: dtype.FP8_E4M3, B_SF: dtype.FP8_E4M3, BIAS: out}
    graph = cudnn.pygraph(
        name="fp4dispatch",
        io_data_type=dtype.FLOAT,
        intermediate_data_type=dtype.FLOAT,
        compute_data_type=dtype.FLOAT,
        **where,
    )
    tensors = {
        uid: graph.tensor(
            name=f"t{uid}",
            dim=list(dim),
            stride=list(stride),
            data_type=types.get(uid, dtype.FLOAT),
            reordering_type=cudnn.tensor_reordering.F8_128x4 if uid in (A_SF, B_SF) else cudnn.tensor_reordering.NONE,
        )
        for uid, (dim, stride) in key.sizes().items()
        if uid != D
    }
    for uid, tensor in tensors.items():
        tensor.set_uid(uid)
    a, b = tensors[A], tensors[B]
    if fp4:
        a = graph.block_scale_dequantize(a, tensors[A_SF], block_size=[1, NVFP4_BLOCK])
        b = graph.block_scale_dequantize(b, tensors[B_SF], block_size=[NVFP4_BLOCK, 1])
    result = graph.matmul(a, b, compute_data_type=dtype.FLOAT, name="product")
    for uid in (A_SCALE, B_SCALE):
        result = graph.mul(a=result, b=tensors[uid], compute_data_type=dtype.FLOAT, name=f"scale{uid}")
    if key.bias:
        result = graph.add(a=result, b=tensors[BIAS], compute_data_type=dtype.FLOAT, name="bias")
    result.set_output(True).set_data_type(out).set_uid(D)
    graph.validate()
    graph.build_operation_graph()
    return graph


def build_plans(cudnn: Any, key: GraphKey, **where: Any) -> Iterator[Executable]:
    """Yield compiled plans for a key, cuDNN's first choice first. Deterministic kernels of cuDNN itself only.

    Skipped: the frontend's own engines (CuTe DSL), which may compile in a launch, and the engine that calls cuBLASLt,
    which is a backend of its own here and takes a workspace of 32 MiB in each launch (flashinfer#4666).

    Raises
    ------
    BackendUnsupportedError
        When the last has been yielded, with cuDNN's reasons against the others.
    """
    refused: list[str] = []
    try:
        graph = build_graph(cudnn, key, **where)
        graph.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
        graph.deselect_numeric_notes([cudnn.numerical_note.NONDETERMINISTIC])
        if hasattr(cudnn.behavior_note, "CUBLASLT_DEPENDENCY"):  # named by frontends later than 1.13
            graph.deselect_behavior_notes([cudnn.behavior_note.CUBLASLT_DEPENDENCY])
        entries = getattr(graph, "plans", None)  # frontends that have engines of their own list both kinds here
        for index in range(graph.get_execution_plan_count()):
            if entries is not None and getattr(entries[index], "cpp_index", None) is None:
                continue
            try:
                graph.build_plan_at_index(index)
                workspace = int(graph.get_workspace_size_plan_at_index(index))
            except Exception as error:  # the frontend's errors have no common base class
                refused.append(f"plan {index}: {_short(error)}")
                continue
            yield Executable(key, graph, index, workspace)
    except (RuntimeError, cudnn.cudnnGraphNotSupportedError) as error:
        refused.append(_short(error))
    raise BackendUnsupportedError(
        f"cudnn: cuDNN {cudnn.backend_version()} has no (other) plan for {key}: {'; '.join(refused) or 'none offered'}"
    )


def _short(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:400]}"


class Executable:
    """One compiled plan of one graph, executed by its index in that graph only.

    A plan tuned for one M and applied to the graph of another gave sparse NaN (flashinfer#3140, flashinfer#3260).
    """

    def __init__(self, key: GraphKey, graph: Any, index: int, workspace_bytes: int) -> None:
        self.key = key
        self.workspace_bytes = workspace_bytes
        self._graph = graph
        self._index = index
        self._numel = {uid: dim[0] * dim[1] * dim[2] for uid, (dim, _) in key.sizes().items()}

    @property
    def name(self) -> str:
        """Name of the plan in cuDNN: engine and knobs."""
        return str(self._graph.get_plan_name_at_index(self._index))

    def execute(self, tensors: Mapping[int, Tensor], workspace: Tensor | None, handle: Any) -> None:
        """Launch on the handle's stream.

        Parameters
        ----------
        tensors
            Every tensor of the graph by identifier, contiguous in the order of its strides, 16-byte aligned.
        workspace
            uint8 [workspace_bytes], zero; None where none is needed.
        handle
            cuDNN handle, its stream set, not in use by another thread.

        Raises
        ------
        InputError
            If a tensor is missing or has another size than the graph was built for. No sync; safe to capture.
        """
        for uid, numel in self._numel.items():
            tensor = tensors.get(uid)
            packed = 2 if uid in (A, B) and self.key.op == "nvfp4_gemm" else 1
            if tensor is None or tensor.numel() * packed != numel or not tensor.is_contiguous():
                found = None if tensor is None else f"{list(tensor.shape)} with strides {list(tensor.stride())}"
                raise InputError(f"cudnn: tensor {uid} of {self.key} is {found}; need {numel} elements, contiguous")
        # tensors, not addresses: frontend 1.32 describes a bare address in Python, 8 us each
        pack = {uid: tensors[uid] for uid in self._numel}
        self._graph.execute_plan_at_index(pack, 0 if workspace is None else workspace, self._index, handle)
