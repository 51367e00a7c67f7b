"""Tensor parallel: layers cut among the ranks of a process group. See docs/tensor-parallel.md."""

from fp4dispatch.integrations.tensor_parallel.saving import save
from fp4dispatch.integrations.tensor_parallel.styles import ColwiseParallel, RowwiseParallel
from fp4dispatch.integrations.tensor_parallel.whole_model import parallelize
from fp4dispatch.machine.collectives import guard
from fp4dispatch.models.parallel.layers import ParallelLinear, group_of
from fp4dispatch.models.parallel.plan import Column, Row, TensorParallel

__all__ = [
    "Column",
    "ColwiseParallel",
    "ParallelLinear",
    "Row",
    "RowwiseParallel",
    "TensorParallel",
    "group_of",
    "guard",
    "parallelize",
    "save",
]
