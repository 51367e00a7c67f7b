"""An NVFP4 model is on the GPU once: while it is replaced, warmed up and loaded, it and one layer."""

from __future__ import annotations

import gc
from typing import NamedTuple

import pytest
import torch
from torch import nn

from fp4dispatch import replace_linears, report, warmup
from fp4dispatch.checkpoints import load_quantized, save_quantized
from tests.gpu.sm90 import needs_sm90

pytestmark = [pytest.mark.gpu, needs_sm90]

HIDDEN, HEADS, MLP, VOCABULARY = 4096, 1024, 14336, 128256
SHAPES = {
    "q_proj": (HIDDEN, HIDDEN),
    "k_proj": (HIDDEN, HEADS),
    "v_proj": (HIDDEN, HEADS),
    "o_proj": (HIDDEN, HIDDEN),
    "gate_proj": (HIDDEN, MLP),
    "up_proj": (HIDDEN, MLP),
    "down_proj": (MLP, HIDDEN),
}
"""K and N of the linear layers of a decoder layer of Llama-3.1-8B."""
LARGEST = 2 * HIDDEN * MLP
"""Bytes of a layer in bfloat16."""
PACKING = 1 << 28
"""What it takes to quantise and pack a layer, some rows at a time."""
TOKENS = (1, 16, 64)


def decoder(layers, device="cuda", *, ends=False):
    torch.manual_seed(0)
    options = {"device": device, "dtype": torch.bfloat16}
    blocks = [
        nn.ModuleDict({name: nn.Linear(k, n, bias=False, **options) for name, (k, n) in SHAPES.items()})
        for _ in range(layers)
    ]
    parts = {"layers": nn.ModuleList(blocks)}
    if ends:
        parts["embed_tokens"] = nn.Embedding(VOCABULARY, HIDDEN, **options)
        parts["lm_head"] = nn.Linear(HIDDEN, VOCABULARY, bias=False, **options)
    return nn.ModuleDict({"model": nn.ModuleDict(parts)})


def weights(layers):
    return layers * sum(k * n for k, n in SHAPES.values())


@pytest.fixture
def scratch():
    """Kernels are built and checked, and scratch is there: what one decoder layer of these sizes leaves behind.

    The workspace of cuBLAS too, which checks call: not those of this process, where another has checked before.
    """
    square = torch.ones(16, 16, device="cuda", dtype=torch.bfloat16)
    square @ square
    first = decoder(1)
    replace_linears(first)
    warmup(first, tokens=TOKENS)
    del first
    return settled()


class Held(NamedTuple):
    """Bytes: ``requested`` for tensors, and ``allocated``, which has what the allocator rounds up and peaks are in.

    It hands out a whole 32 MiB block for a tensor of 31.5 MiB, because it splits off no rest of up to 1 MiB.
    """

    requested: int
    allocated: int


def settled():
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    return Held(torch.cuda.memory_stats()["requested_bytes.all.current"], torch.cuda.memory_allocated())


def test_an_8b_model_takes_its_packed_weights_and_its_embeddings(scratch):
    model = decoder(32, ends=True)
    before = settled()
    found = replace_linears(model)
    assert torch.cuda.max_memory_allocated() < before.allocated + LARGEST + PACKING
    del found
    dense = settled()
    warmup(model, tokens=TOKENS)
    warm = torch.cuda.max_memory_allocated()
    held = settled().requested - scratch.requested
    assert warm < dense.allocated + 2 * LARGEST + PACKING
    packed, ends = weights(32) * 9 // 16, 2 * 2 * VOCABULARY * HIDDEN
    print(f"held {held / 1e9:.3f} GB: packed {packed / 1e9:.3f}, embedding and head {ends / 1e9:.3f}")
    assert held < 6.5e9
    assert held < 1.01 * (packed + ends)
    whole = report(model)
    assert whole.dropped_bytes == packed
    assert 0.99 * held < whole.model_bytes < 1.01 * held


def test_loading_needs_the_model_and_one_layer(scratch, tmp_path):
    model = decoder(3)
    replace_linears(model)
    save_quantized(model, tmp_path / "out", format="modelopt")
    x = torch.randn(5, HIDDEN, device="cuda", dtype=torch.bfloat16)
    with torch.inference_mode():
        want = [block["up_proj"](x) for block in model["model"]["layers"]]
    del model
    empty, before = decoder(3, "meta"), settled()
    load_quantized(empty, tmp_path / "out", device="cuda")
    peak, after = torch.cuda.max_memory_allocated(), settled()
    assert after.requested - before.requested < 1.01 * weights(3) * 9 // 16
    assert peak < after.allocated + LARGEST + PACKING
    with torch.inference_mode():
        assert all(
            torch.equal(block["up_proj"](x), out) for block, out in zip(empty["model"]["layers"], want, strict=True)
        )


def test_weights_that_are_read_are_freed_by_the_next_call(scratch):
    model = decoder(1)
    replace_linears(model)
    layer = model["model"]["layers"][0]["up_proj"]
    x = torch.randn(5, HIDDEN, device="cuda", dtype=torch.bfloat16)
    with torch.inference_mode():
        out = layer(x)
        before = settled()
        assert layer.weight.numel() == HIDDEN * MLP // 2
        assert torch.cuda.memory_allocated() - before.allocated >= layer.stored_nbytes() - 4
        assert torch.equal(layer(x), out)
        assert settled().allocated - before.allocated < 1 << 20
        layer.weight.zero_()
        assert not layer(x).any()
        assert settled().allocated - before.allocated < 1 << 20
