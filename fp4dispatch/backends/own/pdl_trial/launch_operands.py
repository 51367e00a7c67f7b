"""Operands for tests of a launch: the role of every argument of our kernels, and random data for it.

A test of PDL must know, for each exported function, which tensors the kernel reads, which it writes, and which it may
read before the previous kernel has finished (weights). :data:`ENTRIES` lists that for every kernel of
``csrc/kernels.toml``. A kernel that is not listed cannot be tested, so it is never launched with PDL
(:mod:`fp4dispatch.backends.own.pdl_trial.pdl`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from fp4dispatch.backends.own.tensors.w4_layout import CHUNK_BYTES, CODE_BYTES, COLUMNS, ROWS
from fp4dispatch.backends.own.tiling.launch_model import TileSpeed
from fp4dispatch.backends.own.tiling.tiles import speed_of
from fp4dispatch.formats import FP8_BLOCK, NVFP4_BLOCK, round_up
from fp4dispatch.jit.catalog.manifest import Kernel, Variant

Fill = Callable[[Tensor, torch.Generator], None]


class Sizes(NamedTuple):
    """Sizes of one launch, and the dtype of 16-bit activations and of the output."""

    m: int
    n: int
    k: int
    dtype: torch.dtype = torch.bfloat16


class Role(NamedTuple):
    """One argument: its stored shape and dtype, how it is filled (None: the kernel writes it), and its view."""

    shape: Callable[[Sizes], tuple[int, ...]]
    dtype: torch.dtype | None
    """None: that of the activations."""
    fill: Fill | None = None
    view: Callable[[Tensor, Sizes], Tensor] = lambda stored, _: stored


class Entry(NamedTuple):
    """One exported function that launches; ``enable_pdl`` comes after ``arguments``.

    ``arguments`` names roles of :data:`ROLES`, ``none``, ``workspace`` or ``shape``. ``early``: those that the kernel
    may read before its grid barrier. ``tile``: what the launch shape depends on, where the function takes one.
    """

    function: str
    arguments: tuple[str, ...]
    early: tuple[str, ...] = ()
    tile: TileSpeed | None = None


def _normal(tensor: Tensor, generator: torch.Generator) -> None:
    tensor.copy_(torch.randn(tensor.shape, device=tensor.device, generator=generator, dtype=torch.float32))


def _scales(tensor: Tensor, generator: torch.Generator) -> None:
    tensor.uniform_(0.5, 1.5, generator=generator)


def _bytes(tensor: Tensor, generator: torch.Generator) -> None:
    tensor.random_(0, 256, generator=generator)


def _block_scales(tensor: Tensor, generator: torch.Generator) -> None:
    """Bytes that are e4m3 values from 0.25 to 4."""
    tensor.random_(0x28, 0x49, generator=generator)


def _packed_e4m3(tensor: Tensor, generator: torch.Generator) -> None:
    _normal(tensor.view(torch.float8_e4m3fn), generator)


def _w4p(tensor: Tensor, generator: torch.Generator) -> None:
    _bytes(tensor, generator)
    _block_scales(tensor[..., CODE_BYTES:], generator)


def _blocks(size: int) -> int:
    return -(-size // FP8_BLOCK)


_F32, _U8, _E4M3 = torch.float32, torch.uint8, torch.float8_e4m3fn

ROLES: dict[str, Role] = {
    "x": Role(lambda s: (s.m, s.k), None, _normal),
    "gate_up": Role(lambda s: (s.m, 2 * s.k), None, _normal),
    "bias": Role(lambda s: (s.n,), None, _normal),
    "alpha": Role(lambda s: (s.n,), _F32, _scales),
    "alpha_blocks": Role(lambda s: (_blocks(s.n), _blocks(s.k)), _F32, _scales),
    "one": Role(lambda _: (1,), _F32, _scales),
    "token_scale": Role(lambda s: (s.m,), _F32, _scales),
    "token_blocks": Role(lambda s: (_blocks(s.k), round_up(s.m, 8)), _F32, _scales),
    "packed": Role(lambda s: (_blocks(s.k), -(-s.m // 8), 1024), _U8, _packed_e4m3),
    "a8": Role(lambda s: (s.m, s.k), _E4M3, _normal),
    "w8": Role(lambda s: (s.n, s.k), _E4M3, _normal),
    "a8_blocks": Role(lambda s: (_blocks(s.k), round_up(s.m, 4)), _F32, _scales, lambda t, s: t.t()[: s.m]),
    "w4p": Role(lambda s: (-(-s.n // ROWS), -(-s.k // COLUMNS), CHUNK_BYTES), _U8, _w4p),
    "a4": Role(lambda s: (s.m, s.k // 2), _U8, _bytes),
    "w4": Role(lambda s: (s.n, s.k // 2), _U8, _bytes),
    "a4_sf": Role(lambda s: (round_up(s.m, 128), round_up(s.k // NVFP4_BLOCK, 4)), _U8, _block_scales),
    "w4_sf": Role(lambda s: (round_up(s.n, 128), round_up(s.k // NVFP4_BLOCK, 4)), _U8, _block_scales),
    "out": Role(lambda s: (s.m, s.n), None),
    "out_product": Role(lambda s: (s.m, s.k), None),
    "out_packed": Role(lambda s: (_blocks(s.k), -(-s.m // 8), 1024), _U8),
    "out_token_scale": Role(lambda s: (s.m,), _F32),
    "out_token_blocks": Role(lambda s: (_blocks(s.k), round_up(s.m, 8)), _F32),
    "out_a8": Role(lambda s: (s.m, s.k), _E4M3),
    "out_a8_blocks": Role(lambda s: (s.m, _blocks(s.k)), _F32),
    "out_w8": Role(lambda s: (s.n, s.k), _E4M3),
    "out_a4": Role(lambda s: (s.m, s.k // 2), _U8),
    "out_a4_sf": Role(lambda s: (round_up(s.m, 128), round_up(s.k // NVFP4_BLOCK, 4)), _U8),
}

_GEMM_END = ("bias", "out")
_FP8_GEMM = (Entry("fp8_gemm", ("a8", "w8", "token_scale", "alpha", *_GEMM_END, "workspace")),)
_NVFP4_GEMM = (Entry("nvfp4_gemm", ("a4", "w4", "a4_sf", "w4_sf", "alpha", *_GEMM_END, "workspace")),)

ENTRIES: dict[str, tuple[Entry, ...]] = {
    "w4a16_small": (Entry("w4a16_small", ("x", "w4p", "alpha", *_GEMM_END), ("w4p",)),),
    "w8a16_small": (Entry("w8a16_small", ("x", "w8", "alpha", *_GEMM_END), ("w8",)),),
    "w4a8_small": (Entry("w4a8_small", ("packed", "token_scale", "w4p", "alpha", *_GEMM_END), ("w4p",)),),
    "w8a8_small": (Entry("w8a8_small", ("packed", "token_scale", "w8", "alpha", *_GEMM_END), ("w8",)),),
    "w8_gemm_sm90": (Entry("w8_gemm", ("packed", "token_scale", "w8", "alpha", *_GEMM_END, "shape"), ("w8",)),),
    "w4_gemm_sm90": (Entry("w4_gemm", ("packed", "token_scale", "w4p", "alpha", *_GEMM_END, "shape"), ("w4p",)),),
    "w4_activations": (
        Entry("w4_quantize_row", ("x", "out_packed", "out_token_scale")),
        Entry("w4_quantize_tensor", ("x", "out_packed", "one")),
        Entry("w8_quantize_row", ("x", "out_packed", "out_token_scale")),
        Entry("w8_quantize_tensor", ("x", "out_packed", "one")),
        Entry("w8_quantize_block", ("x", "out_packed", "out_token_blocks")),
    ),
    "swiglu_activations": (
        Entry("w4_swiglu_row", ("gate_up", "out_packed", "out_token_scale")),
        Entry("w8_swiglu_row", ("gate_up", "out_packed", "out_token_scale")),
        Entry("w8_swiglu_tensor", ("gate_up", "out_packed", "one")),
        Entry("w8_swiglu_block", ("gate_up", "out_packed", "out_token_blocks")),
    ),
    "swiglu_rows": (
        Entry("fp8_swiglu_row", ("gate_up", "out_a8", "out_token_scale")),
        Entry("fp8_swiglu_tensor", ("gate_up", "out_a8", "one")),
        Entry("fp8_swiglu_1x128", ("gate_up", "out_a8", "out_a8_blocks")),
        Entry("swiglu_product", ("gate_up", "out_product")),
    ),
    "w4_to_e4m3": (Entry("w4_to_e4m3", ("w4p", "out_w8")),),
    "nvfp4_quantize": (Entry("nvfp4_quantize", ("x", "one", "out_a4", "out_a4_sf")),),
    "fp8_quantize": (
        Entry("fp8_quantize_row", ("x", "out_a8", "out_token_scale")),
        Entry("fp8_quantize_tensor", ("x", "out_a8", "one")),
        Entry("fp8_quantize_1x128", ("x", "out_a8", "out_a8_blocks")),
    ),
    "fp8_gemm_sm90": _FP8_GEMM,
    "fp8_gemm_sm100": _FP8_GEMM,
    "fp8_gemm_sm120": _FP8_GEMM,
    "nvfp4_gemm_sm100": _NVFP4_GEMM,
    "nvfp4_gemm_sm120": _NVFP4_GEMM,
}

# By a build's macro and kernel: arguments that replace those of ENTRIES.
_BY_DEFINE: dict[str, dict[str, dict[str, str]]] = {
    "FP4D_SCALING=1": {
        "fp8_gemm_sm90": {"token_scale": "a8_blocks", "alpha": "alpha_blocks"},
        "w8a8_small": {"token_scale": "token_blocks", "alpha": "alpha_blocks"},
        "w8_gemm_sm90": {"token_scale": "token_blocks", "alpha": "alpha_blocks"},
    },
    "FP4D_ACT=16": {
        "w4_gemm_sm90": {"packed": "x", "token_scale": "none"},
        "w8_gemm_sm90": {"packed": "x", "token_scale": "none"},
    },
}


def entries(kernel: Kernel, variant: Variant) -> tuple[Entry, ...]:
    """Return the launching functions of one build, with its own arguments; empty where none is known."""
    changed: dict[str, str] = {}
    for define in variant.defines:
        changed |= _BY_DEFINE.get(define, {}).get(kernel.name, {})
    tile = speed_of(kernel.name, variant.id)
    suffix, room = ("_even", ("room",)) if tile is not None and tile.even else ("", ())
    return tuple(
        entry._replace(
            function=entry.function + suffix,
            arguments=(*(changed.get(name, name) for name in entry.arguments), *room),
            tile=tile,
        )
        for entry in ENTRIES.get(kernel.name, ())
    )


def dtype_of(variant: Variant) -> torch.dtype:
    """Return the dtype of a build's activations and output; bfloat16 where one build takes both."""
    return torch.float16 if "FP4D_OUT=1" in variant.defines else torch.bfloat16
