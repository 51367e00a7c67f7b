"""Register operators of ``torch.ops.fp4dispatch``: schema, implementation, fake, and a backward that raises."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from fp4dispatch.errors import BackwardError, InputError
from fp4dispatch.machine import transforms

_library = torch.library.Library("fp4dispatch", "DEF")  # type: ignore[no-untyped-call]


def _save_shapes(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.operands = [(x.shape, x.dtype) if isinstance(x, Tensor) else x for x in inputs]


def _backward(ctx: Any, *grads: Any) -> Any:
    """Call an operator that raises when it runs. ``torch.compile`` traces backwards that never run."""
    grad = next(g for g in grads if g is not None)
    return tuple(
        [None] * len(operand)
        if isinstance(operand, list)
        else torch.ops.fp4dispatch.refuse_backward.default(grad, *operand)
        if needed
        else None
        for operand, needed in zip(ctx.operands, ctx.needs_input_grad, strict=True)
    )


def gradient_error() -> BackwardError:
    """Return the error for code that asks for a gradient."""
    return BackwardError(
        "a gradient was asked for through fp4dispatch, which is for inference: run the model under "
        "torch.inference_mode() or torch.no_grad(), or keep this layer unquantised for training"
    )


def _refuse_backward(grad: Tensor, shape: list[int], dtype: torch.dtype) -> Tensor:
    raise gradient_error()


def refuse_gradients(operands: Iterable[object]) -> None:
    """Refuse operands of ``torch.func.grad``, ``jvp`` and the like, and those with tangents.

    The backward of an operator does not see them. Torch would drop the tangents, so that a derivative would be zero.

    Raises
    ------
    BackwardError
        If there is one.
    """
    if transforms.active() and any(isinstance(operand, Tensor) and _differentiated(operand) for operand in operands):
        raise gradient_error()


def _differentiated(tensor: Tensor) -> bool:
    while _functorch.is_batchedtensor(tensor):
        tensor = _functorch.get_unwrapped(tensor)
    if _functorch.is_gradtrackingtensor(tensor):
        return True
    return transforms.forward_gradients() and _unpack_dual(tensor).tangent is not None


_functorch = torch._C._functorch
_unpack_dual: Callable[[Tensor], forward_ad.UnpackedDualTensor] = forward_ad.unpack_dual


def define(schema: str, impl: Callable[..., Any], fake: Callable[..., Any], *, autograd: bool = True) -> None:
    """Register an operator. ``autograd``: give it the backward that raises BackwardError.

    Tangents are refused where it runs too: compiled and exported programs call it without our Python functions. Only
    ``torch.func.jvp`` of such a program, or of ``torch.ops``, hides them there: its derivative is zero.
    """
    _library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))  # type: ignore[no-untyped-call]
    name = schema[: schema.index("(")]

    def checked(*operands: Any) -> Any:
        refuse_gradients(operands)
        return impl(*operands)

    _library.impl(name, checked, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
    torch.library.register_fake(f"fp4dispatch::{name}", fake, lib=_library)
    if autograd:
        torch.library.register_autograd(f"fp4dispatch::{name}", _backward, setup_context=_save_shapes, lib=_library)


def batch_rows(name: str) -> None:
    """Let ``torch.vmap`` batch the first operand of an operator: all but its last dimension are rows anyway.

    A call in which other operands are batched raises InputError: each layer would need a launch of its own. Where a
    backend gives an activation one scale, that is one for all samples.
    """

    def batched(info: Any, in_dims: tuple[Any, ...], x: Tensor, *others: Any) -> tuple[Tensor, int]:
        dims = [dim for dim in in_dims[1:] if dim is not None]
        if any(dim is not None for each in dims for dim in (each if isinstance(each, (list, tuple)) else [each])):
            raise InputError(f"{name}: under vmap only the input may be batched, not weights or bias: call each layer")
        return getattr(torch.ops.fp4dispatch, name).default(x.movedim(in_dims[0], 0), *others), 0

    torch.library.register_vmap(f"fp4dispatch::{name}", batched, lib=_library)


define(
    "refuse_backward(Tensor grad, SymInt[] shape, ScalarType dtype) -> Tensor",
    _refuse_backward,
    lambda grad, shape, dtype: grad.new_empty(shape, dtype=dtype),
    autograd=False,
)
