"""SwiGLU with the quantiser of a down projection, or alone, as one kernel: ``csrc/quantise/swiglu_*.cu``.

A GEMM on e4m3 activations does not see who quantised them. So the kernel takes the place of the quantiser in a launch,
packed for our GEMMs or in rows for those of libraries. It reads ``gate_up`` [M, 2K] where the quantiser reads
``silu(gate) * up`` [M, K]. All other launches get the product of one kernel instead of torch's two; on sm_90 our GEMMs
on 16-bit activations load their first weights meanwhile.

The bytes are those of torch's two operations and the quantiser. torch brings its own compiled ``exp`` and division, so
this is checked where it runs: with every gate that bfloat16 and float16 have, once in a process for each GPU. Where a
result differs, or a kernel cannot be compiled, torch's operations run instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fp4dispatch import formats, jit
from fp4dispatch.backends.activations import swiglu
from fp4dispatch.backends.own.pdl_trial import pdl
from fp4dispatch.backends.own.tensors.operands import QUANTIZER, aligned, arch_of
from fp4dispatch.errors import CacheError, CompileError, FlagsError, ProofError, ToolchainError
from fp4dispatch.formats import round_up
from fp4dispatch.jit.catalog.manifest import installed
from fp4dispatch.machine import capture
from fp4dispatch.machine import log as _log
from fp4dispatch.machine.locks import ForkSafeLock
from fp4dispatch.problem.arch import Arch

PACKED, ROWS = "swiglu_activations", "swiglu_rows"
"""The kernels: packed results, and results in rows. One build reads bfloat16 and float16."""
PRODUCT = "swiglu_product"
"""The function that does not quantise."""
_K_MULTIPLE = 16

_lock = ForkSafeLock()
_known: dict[tuple[torch.device, str], _Loaded | None] = {}


class _Loaded(NamedTuple):
    module: Any
    pdl: bool


class Front(NamedTuple):
    """A function of a kernel, and whether to launch it with PDL."""

    function: Callable[..., None]
    pdl: bool


def kernel_of(function: str) -> str:
    """Return the kernel that has a function."""
    return PACKED if function.startswith(("w4_", "w8_")) else ROWS


def kernels_beside(kernels: Iterable[str]) -> tuple[str, ...]:
    """Return what a layer with these kernels may launch when it is given ``gate_up``."""
    return (ROWS, PACKED) if QUANTIZER in kernels else (ROWS,)


def built_for(kernel: str, arch: Arch, k: int) -> bool:
    """Whether a GPU has a kernel, for K elements of the product."""
    catalog = installed()
    return catalog.target_for(catalog.kernel(kernel), arch) is not None and k % _K_MULTIPLE == 0


def front(function: str, arch: Arch, device: torch.device) -> Front | None:
    """Return a function of a kernel for a GPU; None where its results are not those of torch, or it cannot be compiled.

    The first call on a GPU compiles, proves and tries the kernel.

    Parameters
    ----------
    function
        ``w4_swiglu_row``, ``w8_swiglu_row``, ``w8_swiglu_tensor``, ``w8_swiglu_block``, ``fp8_swiglu_row``,
        ``fp8_swiglu_tensor``, ``fp8_swiglu_1x128`` or ``swiglu_product``.
    arch, device
        A GPU. Its arch has the kernel (:func:`built_for`).

    Raises
    ------
    CaptureError
        If the kernel would have to be loaded while a CUDA graph is being captured.
    """
    key = device, kernel_of(function)
    if key not in _known:
        capture.forbid_in_capture("loading the SwiGLU kernel", capture.warmup_call("..."))
        with _lock:
            if key not in _known:
                _known[key] = _load(key[1], arch, device)
    found = _known[key]
    return None if found is None else Front(getattr(found.module, function), found.pdl)


def product(gate_up: Tensor) -> Tensor:
    """Return ``silu(gate) * up`` of gate_up [..., 2K] by one kernel where there is one; the bits are torch's.

    Any dtype, device, strides and alignment. Safe to capture: there, a kernel that is not loaded yet is not used.
    """
    device, k = gate_up.device, gate_up.shape[-1] // 2
    if not _readable(gate_up) or k % _K_MULTIPLE or (gate_up.requires_grad and torch.is_grad_enabled()):
        return swiglu(gate_up)
    key = device, ROWS
    if key not in _known:
        if capture.is_capturing():
            return swiglu(gate_up)
        arch = arch_of(device)
        if built_for(ROWS, arch, k):
            front(PRODUCT, arch, device)
        else:
            _known[key] = None
    found = _known[key]
    if found is None:
        return swiglu(gate_up)
    out = gate_up.new_empty(*gate_up.shape[:-1], k)
    # Without PDL, since the next kernel may be anyone's: all that is before this one is over when that starts.
    found.module.swiglu_product(aligned(gate_up.reshape(-1, 2 * k), 2 * k), out.view(-1, k), False)
    return out


def _readable(gate_up: Tensor) -> bool:
    return gate_up.is_cuda and gate_up.dtype in (torch.bfloat16, torch.float16) and type(gate_up) is Tensor


def _load(name: str, arch: Arch, device: torch.device) -> _Loaded | None:
    instead = "silu(gate) * up runs as torch's operations"
    try:
        kernel = jit.load(name, "any", arch)
    except (CacheError, CompileError, FlagsError, ProofError, ToolchainError) as error:
        _log.warning("the SwiGLU kernel %s on %s: %s. %s", name, device, error, instead)
        return None
    if not all(as_torch_does(name, kernel.module, dtype, device) for dtype in (torch.bfloat16, torch.float16)):
        _log.warning(
            "the SwiGLU kernel %s on %s gives other bits than torch %s: %s", name, device, torch.__version__, instead
        )
        return None
    return _Loaded(kernel.module, pdl.allowed(kernel, device))


def as_torch_does(name: str, module: Any, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the module of a kernel computes what torch does, for every gate of a dtype. Synchronises.

    A token holds one gate. Packed, its scale tells the magnitude of the product and a code the sign; small products are
    multiplied by 2^64 once more, as there is a least scale.
    """
    with torch.inference_mode():
        gate = torch.arange(-(1 << 15), 1 << 15, device=device).to(torch.int16).view(dtype).view(-1, 1).expand(-1, 16)
        for factor in (1.0, -(2.0**64) if dtype == torch.bfloat16 else 1.7):
            x = torch.cat([gate, torch.full_like(gate, factor)], 1)
            if not bool((_same_rows if name == ROWS else _same_packed)(module, x).all()):
                return False
    return True


def _same_rows(module: Any, x: Tensor) -> Tensor:
    want = swiglu(x)
    found = torch.empty_like(want)
    module.swiglu_product(x, found, False)
    return (found.view(torch.int16) == want.view(torch.int16)) | (found.isnan() & want.isnan())


def _same_packed(module: Any, x: Tensor) -> Tensor:
    m = x.shape[0]
    packed = torch.empty(1, round_up(m, 8) // 8, 1024, dtype=torch.uint8, device=x.device)
    scale = torch.empty(m, dtype=torch.float32, device=x.device)
    module.w8_swiglu_row(x, packed, scale, False)
    want = formats.fp8_quantize(swiglu(x), "row")
    token = torch.arange(m, device=x.device)
    first = packed.view(-1)[token * 128 + token % 8 * 16]  # column 0 of token i is stored at i % 8
    codes = want.data.view(torch.uint8)[:, 0]
    same = (first == codes) | ((first & 0x7F == 0x7F) & (codes & 0x7F == 0x7F))
    return same & (scale == want.scale)
