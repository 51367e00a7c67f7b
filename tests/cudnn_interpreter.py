"""A stand-in for the module ``cudnn`` that runs its graphs on the CPU, by what the documentation says they mean.

Tensors are read from raw memory as the graph declares them (dimensions, strides, element type, reordering), so that a
wrong stride, scale layout or identifier gives wrong numbers here as it would on a GPU. Written from
https://docs.nvidia.com/deeplearning/cudnn/frontend/latest/operations/ and the scale layout of
https://docs.nvidia.com/cuda/cublas/index.html#d-block-scaling-factors-layout, not from the code under test.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import math
import threading
from types import SimpleNamespace

import torch
from torch.utils._python_dispatch import _disable_current_modes

E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=torch.float64)
DTYPE = {
    "FP8_E4M3": torch.float8_e4m3fn,
    "FLOAT": torch.float32,
    "BFLOAT16": torch.bfloat16,
    "HALF": torch.float16,
    "FP4_E2M1": torch.uint8,
}


class NotSupportedError(Exception):
    """cudnnGraphNotSupportedError: no subclass of RuntimeError, as in the frontend."""


def _names(*names):
    return SimpleNamespace(**{name: name for name in names})


def _memory(pointer: int, nbytes: int) -> torch.Tensor:
    return torch.frombuffer((ctypes.c_uint8 * nbytes).from_address(pointer), dtype=torch.uint8)


class Tensor:
    def __init__(self, dim=None, stride=None, data_type=None, reordering="NONE", value=None):
        self.dim, self.stride, self.data_type, self.reordering, self.value = dim, stride, data_type, reordering, value
        self.uid, self.output = None, False

    def set_uid(self, uid):
        self.uid = uid
        return self

    def set_output(self, flag):
        self.output = flag
        return self

    def set_data_type(self, data_type):
        self.data_type = data_type
        return self

    def read(self, pointers):
        """Return the logical tensor in float64."""
        if self.value is not None:
            return self.value(pointers)
        numel = math.prod(self.dim)
        if self.data_type == "FP4_E2M1":
            data = _memory(pointers[self.uid], numel // 2)
            flat = E2M1[torch.stack([data & 15, data >> 4], 1).reshape(-1).long()]
        else:
            dtype = DTYPE[self.data_type]
            flat = _memory(pointers[self.uid], numel * dtype.itemsize).view(dtype).double()
        if self.reordering == "F8_128x4":
            return self._reordered(flat)
        return flat.as_strided(self.dim, self.stride)

    def _reordered(self, flat):
        _, rows, cols = self.dim
        rows_inner = self.stride[1] == 1  # the scales of B: [1, K/16, N]
        r, c = torch.meshgrid(torch.arange(rows), torch.arange(cols), indexing="ij")
        r, c, tiles = (c, r, rows // 4) if rows_inner else (r, c, cols // 4)
        tile = (r // 128) * tiles + c // 4
        return flat[tile * 512 + (r % 32) * 16 + (r % 128 // 32) * 4 + c % 4].reshape(self.dim)


class Graph:
    def __init__(self, module, **kwargs):
        self.module, self.kwargs = module, kwargs
        self.inputs, self.out, self.built, self.barred = [], None, set(), set()
        self.m = None
        if module.python_plans:
            self.plans = [SimpleNamespace(cpp_index=None)] * module.python_plans
            self.plans = self.plans + [SimpleNamespace(cpp_index=i) for i in range(module.count)]

    def tensor(self, name, dim, stride, data_type, reordering_type):
        self.inputs.append(Tensor(dim, stride, data_type, reordering_type))
        return self.inputs[-1]

    def block_scale_dequantize(self, x, scale, block_size):
        def value(pointers):
            s = scale.read(pointers)
            for axis, size in zip((1, 2), block_size, strict=True):
                s = s.repeat_interleave(size, axis)
            v = x.read(pointers)
            return v * s[:, : v.shape[1], : v.shape[2]]

        return Tensor(value=value)

    def matmul(self, a, b, compute_data_type, name):
        self.m = self.inputs[0].dim[1]
        return self._result(lambda p: a.read(p) @ b.read(p))

    def mul(self, a, b, compute_data_type, name):
        return self._result(lambda p: a.read(p) * b.read(p))

    def add(self, a, b, compute_data_type, name):
        return self._result(lambda p: a.read(p) + b.read(p))

    def _result(self, value):
        self.out = Tensor(value=value)
        return self.out

    def validate(self):
        assert self.out.output
        assert len({t.uid for t in self.inputs} | {self.out.uid}) == len(self.inputs) + 1

    def build_operation_graph(self):
        self.module.graphs.append(self)

    def create_execution_plans(self, modes):
        if self.module.count == 0:
            raise NotSupportedError("No valid engine configs")

    def deselect_numeric_notes(self, notes):
        assert notes == ["NONDETERMINISTIC"]
        self.barred |= {"NONDETERMINISTIC"}

    def deselect_behavior_notes(self, notes):
        assert notes == ["CUBLASLT_DEPENDENCY"]
        self.barred |= {"CUBLASLT_DEPENDENCY"}

    def get_execution_plan_count(self):
        return self.module.python_plans + self.module.count

    def get_plan_name_at_index(self, index):
        return f"eng{index}"

    def build_plan_at_index(self, index):
        assert self.barred == {"NONDETERMINISTIC", "CUBLASLT_DEPENDENCY"}
        if index in self.module.does_not_build:
            raise NotSupportedError(f"Plan index {index} is invalid")
        self.built.add(index)

    def get_workspace_size_plan_at_index(self, index):
        return self.module.workspace_bytes

    def execute_plan_at_index(self, tensors, workspace, index, handle):
        pointers = {uid: tensor.data_ptr() for uid, tensor in tensors.items()}
        assert index in self.built
        assert self.m is not None
        if index in self.module.does_not_run:
            raise RuntimeError(f"eng{index} failed to launch")
        with self.module.exclusive(handle), _disable_current_modes():
            if self.module.workspace_bytes:
                scratch = _memory(workspace.data_ptr(), self.module.workspace_bytes)
                assert int(scratch.max()) == 0, "the workspace is not zeroed"
                scratch.fill_(255)
            d = self.out.read(pointers)[0].to(DTYPE[self.out.data_type])
            _memory(pointers[self.out.uid], d.nbytes).copy_(d.contiguous().view(torch.uint8).reshape(-1))
            self.module.launches.append((self.m, index, handle.stream))


class Cudnn:
    """The module. ``graphs`` built and ``launches`` (M of the graph, index, stream) are there to be looked at."""

    data_type = _names(*DTYPE)
    tensor_reordering = _names("NONE", "F8_128x4")
    heur_mode = _names("A", "FALLBACK")
    numerical_note = _names("NONDETERMINISTIC")
    behavior_note = _names("CUBLASLT_DEPENDENCY")
    cudnnGraphNotSupportedError = NotSupportedError  # noqa: N815

    def __init__(self, count=2, python_plans=0, workspace_bytes=0, does_not_build=(), does_not_run=(), version=92301):
        self.count, self.python_plans, self.workspace_bytes = count, python_plans, workspace_bytes
        self.does_not_build, self.does_not_run, self.version = does_not_build, does_not_run, version
        self.graphs, self.launches, self.handles = [], [], itertools.count()

    def backend_version(self):
        return self.version

    def create_handle(self):
        return SimpleNamespace(id=next(self.handles), stream=None, busy=threading.Lock())

    def set_stream(self, handle, stream):
        assert not handle.busy.locked(), "the stream of a handle was changed during a launch"
        handle.stream = stream

    def pygraph(self, **kwargs):
        return Graph(self, **kwargs)

    @contextlib.contextmanager
    def exclusive(self, handle):
        assert handle.busy.acquire(blocking=False), "two threads use one handle"
        stream = handle.stream
        try:
            yield
            assert handle.stream == stream
        finally:
            handle.busy.release()
