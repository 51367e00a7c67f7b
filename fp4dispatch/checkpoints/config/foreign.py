"""Recognise formats that this package cannot read, so that the error names the format.

A tensor that does not fit has one of three causes, and the errors tell which: the checkpoint has an *unsupported*
format, is of *another model* (its layers are consistent, but do not fit the model), or is *damaged*.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from fp4dispatch.checkpoints.files.reader import TensorInfo
from fp4dispatch.checkpoints.schemes import Scheme, Spec, logical_k
from fp4dispatch.errors import CheckpointError, CheckpointUnsupportedError
from fp4dispatch.formats import NVFP4_BLOCK

INSTEAD = (
    "quantise the original 16-bit model with `fp4dispatch quantize`, or take a ModelOpt, NVFP4 or FP8 export of it"
)
"""What to do about a checkpoint in another format."""

Stored = Mapping[str, tuple[str, tuple[int, ...]]]
"""safetensors dtype and shape of a layer's tensors, by name below the layer's."""

METHODS: dict[str, str] = {
    "awq": "AWQ, integers of 4 bits",
    "gptq": "GPTQ, integers of 2 to 8 bits",
    "mxfp4": "MXFP4, blocks of 32 with scales that are powers of two",
    "bitsandbytes": "bitsandbytes, NF4 or INT8",
    "torchao": "a torchao format",
    "quark": "an AMD Quark format",
    "hqq": "HQQ, integers of 1 to 8 bits",
    "aqlm": "AQLM, codebooks",
    "eetq": "EETQ, INT8",
    "quanto": "a quanto format",
    "bitnet": "BitNet, ternary weights",
}
"""``quant_method`` of config.json -> description of the format."""


def unsupported_method(method: object, source: str) -> CheckpointUnsupportedError:
    """Return the error for an unsupported ``quant_method``."""
    what = METHODS.get(method.lower()) if isinstance(method, str) else None
    return CheckpointUnsupportedError(
        f"{source}: quant_method {repr(method)[:80]} is not supported{f' ({what})' if what else ''}: expected "
        f"modelopt, compressed-tensors, fp8 or fbgemm_fp8: {INSTEAD}"
    )


def foreign_format(tensors: Stored) -> str | None:
    """Return the unsupported format of a layer's tensors; None if no such format is recognised.

    Only tensor names and dtypes count that no supported scheme has. A wrong shape alone can be damage.
    """
    if "qweight" in tensors:
        kind = "GPTQ" if "g_idx" in tensors else "AWQ or GPTQ"
        return f"{kind}: packed integers (qweight)" if "qzeros" in tensors or "g_idx" in tensors else "packed integers"
    if any(name.startswith(("weight.absmax", "weight.quant_map", "weight.quant_state", "SCB")) for name in tensors):
        return "bitsandbytes"
    if "weight_zero_point" in tensors:
        return "integers with zero points (weight_zero_point)"
    if "pre_quant_scale" in tensors:
        return "AWQ or SmoothQuant: a scale on the input channels (pre_quant_scale)"
    packed_name = "weight_packed" if "weight_packed" in tensors else "weight"
    packed, shape = tensors.get(packed_name, ("", ()))
    if packed == "I32":
        return "integers packed into 32 bits"
    if packed == "I8":
        return "INT8" if "weight_scale" in tensors or "weight_scale_inv" in tensors else None
    if packed == "F8_E5M2":
        return "FP8 with e5m2 values"
    if packed == "F4":
        return "FP4 stored as a dtype of safetensors"
    scale, scale_shape = tensors.get("weight_scale", ("", ()))
    if packed == "U8" and scale:
        return _foreign_bytes(tensors, shape, scale, scale_shape)
    rows = len(scale_shape) == len(shape) == 2 and scale_shape[0] == shape[0] > 1  # not a grid of 128x128 blocks
    if packed == "F8_E4M3" and scale in ("U8", "F8_E8M0") and rows:
        return "MXFP8: blocks of 32 with scales that are powers of two"
    return None


def _foreign_bytes(tensors: Stored, shape: tuple[int, ...], scale: str, scale_shape: tuple[int, ...]) -> str | None:
    """Recognise formats other than NVFP4 that store weights as bytes."""
    if len(shape) != 2 or len(scale_shape) != 2 or not scale_shape[1]:
        return None
    group, rest = divmod(2 * shape[1], scale_shape[1])
    if scale in ("U8", "F8_E8M0") and scale_shape[0] == shape[0]:
        return f"MXFP4: blocks of {group} with scales that are powers of two"
    globals_ = "weight_scale_2" in tensors or "weight_global_scale" in tensors
    whole = scale_shape[0] == shape[0] and not rest and group in (8, 32, 64, 128, 256)
    if scale == "F8_E4M3" and globals_ and whole:
        return f"NVFP4-like blocks of {group}; NVFP4 has blocks of {NVFP4_BLOCK}"
    if scale in ("F32", "F16", "BF16") and not globals_:
        return "integers of 4 bits"
    return None


def unsupported_layer(name: str, tensors: Stored, where: str) -> CheckpointUnsupportedError | None:
    """Return the error for a layer in an unsupported format; None if no such format is recognised."""
    what = foreign_format(tensors)
    if what is None:
        return None
    found = ", ".join(f"{key} {dtype} {list(shape)}" for key, (dtype, shape) in sorted(tensors.items()))
    return CheckpointUnsupportedError(
        f"{where}: layer {name!r} is stored as {what}, which is not supported (found {found}); expected NVFP4 in "
        f"blocks of {NVFP4_BLOCK}, or FP8: {INSTEAD}"
    )


def unsupported_slot(info: TensorInfo, dtype: torch.dtype) -> CheckpointUnsupportedError | None:
    """Return the error for a tensor outside the linear layers that is stored quantised; None for any other."""
    if not dtype.is_floating_point or info.dtype not in ("F8_E4M3", "F8_E5M2", "U8", "I8", "F4"):
        return None
    return CheckpointUnsupportedError(
        f"{info.file}: tensor {info.name!r} is {info}, expected {str(dtype).removeprefix('torch.')}: it belongs to no "
        f"linear layer of the model and is stored quantised, which is not supported: {INSTEAD}"
    )


def misfit(info: TensorInfo, spec: Spec, scheme: Scheme, stored: Stored, expected: tuple[int, int]) -> CheckpointError:
    """Return the error for a tensor that does not fit its layer. A layer that is consistent is of another model.

    Parameters
    ----------
    info, spec
        The tensor, and what it should be.
    scheme, stored
        How the layer is stored, and all its tensors.
    expected
        N and K of the model's layer.
    """
    shape = stored.get(scheme.weight, ("", ()))[1]
    own = (shape[0], logical_k(scheme, shape)) if len(shape) == 2 else None
    whole = own is not None and all(
        suffix not in stored or (stored[suffix][0] in s.dtypes and stored[suffix][1] in s.shapes)
        for suffix, s in scheme.specs(*own).items()
    )
    reason = "the checkpoint is damaged: the tensors of this layer do not belong together: fetch or export it again"
    if own is not None and whole and own != expected:
        reason = (
            f"the checkpoint is of another model: its layer is {own[0]} x {own[1]}, the model's "
            f"{expected[0] or own[0]} x {expected[1]}"
        )
    return CheckpointError(f"{info.file}: tensor {info.name!r} is {info}, expected {spec} ({scheme.name}): {reason}")
