"""When a kernel lets the next grid in (PDL): quantisers at their start, SwiGLU alone when the grid before has ended.

At its start SwiGLU would let a GEMM in that finds room on some SMs alone, and runs two CTAs on each of these
(bench/notes/few-tokens.md).
"""

from __future__ import annotations

import pytest

from fp4dispatch import jit
from fp4dispatch.jit.catalog.manifest import installed
from fp4dispatch.jit.compiler.toolchain import disassembler
from tests.compile import built_kernels, scoreboards

pytestmark = built_kernels.NEEDS_NVCC


@pytest.mark.parametrize("kernel", ["swiglu_rows", "swiglu_activations", "w4_activations"])
def test_who_lets_the_next_grid_in_before_it_has_waited(kernel: str) -> None:
    library = jit.build(kernel, "any", "90a").entry.library
    read = dict(scoreboards.functions(disassembler(installed().common.minimum["disassembler"]).cuobjdump, library))
    late = {name for name in read if "swiglu_rows" in name}  # the kernel of swiglu_product
    assert len(late) == (2 if kernel == "swiglu_rows" else 0), "of bf16 and fp16"
    assert set(read) > late
    for name, code in read.items():
        order = [i.name for i in code if i.name.startswith(("ACQBULK", "PREEXIT"))]
        assert order == (["ACQBULK", "PREEXIT"] if name in late else ["PREEXIT", "ACQBULK"]), name
