"""The module that holds fused layers: its class, and its ``state_dict`` under the names from before.

A fused layer ``qkv_proj`` is a child of its module like any other, and holds its weights once. The module gets a
subclass of its class with a rewritten ``forward``. ``isinstance`` holds, and the subclass has the name of its base.
``state_dict`` and ``load_state_dict`` use the keys ``q_proj.weight``, ... So a state moves between fused models and
others.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator, Mapping
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from fp4dispatch.errors import FormatError, InputError
from fp4dispatch.models.fusing.rewrite import Gated, fused_forward
from fp4dispatch.models.fusing.rows import join_tensors, split_tensors
from fp4dispatch.models.quantized_linear import QuantizedLinear

Groups = tuple[tuple[str, tuple[str, ...]], ...]
"""Name of each fused layer of a module, with the names of the layers that it replaces, in the order of its rows."""


class FusedProjections(nn.Module):
    """Base of the subclasses that modules with fused layers get. ``isinstance`` tells such a module."""

    fused_base: type[nn.Module]
    """The class that the module had before."""
    fused_groups: Groups
    fused_downs: tuple[Gated, ...]
    """Layers whose call the rewritten ``forward`` makes through :meth:`_fused_down`."""
    _fused_rows: dict[str, list[int]]
    """Rows of the shards of each fused layer, by its name. The rewritten ``forward`` reads it."""

    def _fused_down(self, down: Any, act: Any, gate_up: Tensor, rows: list[int]) -> Any:
        """Return ``down(act(gate) * up)``, with the same bits; as one operator where ``act`` is SiLU.

        This asks at each call: hooks may come, and modules may be replaced, after the layers were fused.
        """
        if is_silu(act) and takes_gate_up(down) and rows == [down.in_features, down.in_features]:
            return down.swiglu(gate_up)
        gate, up = gate_up.split(rows, -1)  # type: ignore[no-untyped-call]
        return down(act(gate) * up)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the state with the names of the layers before they were fused; arguments as of ``nn.Module``.

        Tensors are views of those of the fused layer, but for scales that its shards have in common: these are copies.
        """
        state = super().state_dict(*args, **kwargs)
        prefix = kwargs.get("prefix", args[1] if len(args) > 1 else "")
        if not any(key.startswith(prefix + fused + ".") for key in state for fused, _ in self.fused_groups):
            return state
        mine = {key: state.pop(key) for key in [key for key in state if key.startswith(prefix)]}
        whole: dict[str, dict[str, Tensor]] = {fused: {} for fused, _ in self.fused_groups}
        order: dict[str, str] = {}
        for key in mine:
            fused, _, last = key.removeprefix(prefix).partition(".")
            if fused in whole and last:
                whole[fused][last] = mine[key]
            order[fused if fused in whole else key] = key
        shards = dict(self.fused_groups)
        for name, key in order.items():
            if name not in whole:
                state[key] = mine[key]
                continue
            parts = split_tensors(whole[name], self._fused_rows[name])
            for shard, part in zip(shards[name], parts, strict=True):
                state |= {f"{prefix}{shard}.{last}": tensor for last, tensor in part.items()}
        return state

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        """Put the tensors of the shards together, for the fused layer, which torch loads after this module."""
        for fused, shards in self.fused_groups:
            found = [_taken(state_dict, f"{prefix}{shard}.") for shard in shards]
            if not any(found):
                continue
            if any(part.keys() != found[0].keys() for part in found):
                error_msgs.append(
                    f"{prefix}{fused} is fused from {', '.join(shards)}: load the same tensors of all of them; found "
                    + "; ".join(
                        f"{s}: {', '.join(sorted(part)) or 'none'}" for s, part in zip(shards, found, strict=True)
                    )
                )
                continue
            layer = self._modules[fused]
            assert isinstance(layer, QuantizedLinear)
            try:
                joined = join_tensors([_shaped(part, layer) for part in found], self._fused_rows[fused])
                if joined.get("weight_scale_2") is not None:
                    joined["weight_scale_2"] = _like_held(joined["weight_scale_2"], layer)
            except (FormatError, RuntimeError) as error:
                error_msgs.append(f"{prefix}{fused} is fused from {', '.join(shards)} and cannot hold this: {error}")
                continue
            state_dict |= {f"{prefix}{fused}.{last}": tensor for last, tensor in joined.items()}
        faults = (missing_keys, unexpected_keys, error_msgs)
        super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, *faults)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle and copy by the class from before: that of this module has no name to import it by."""
        reduced: Any = super().__reduce_ex__(max(2, int(protocol)))
        made, arguments, *rest = reduced
        if arguments[:1] != (type(self),):
            return (made, arguments, *rest)
        return (empty_module, (self.fused_base, self.fused_groups), *rest)


def is_silu(act: Any) -> bool:
    """Whether a module of this kind, or a function, computes ``torch.nn.functional.silu`` and nothing else."""
    if act is nn.functional.silu:
        return True
    cls = type(act)
    theirs = cls.__name__ == "SiLUActivation" and cls.__module__ == "transformers.activations"
    return (cls is nn.SiLU or theirs) and _is_called_plainly(act)


def takes_gate_up(down: Any) -> TypeGuard[QuantizedLinear]:
    """Whether :meth:`QuantizedLinear.swiglu` of a module does all that a call of it does."""
    return (
        isinstance(down, QuantizedLinear) and type(down).forward is QuantizedLinear.forward and _is_called_plainly(down)
    )


def _is_called_plainly(module: nn.Module) -> bool:
    """Whether a call of a module runs the ``forward`` of its class alone: no hooks, nothing wrapped around it."""
    return not (
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or "forward" in module.__dict__
        or module._compiled_call_impl is not None
        or _any_global_hook()  # type: ignore[no-untyped-call]
    )


_any_global_hook = torch.nn.modules.module._has_any_global_hook


def fused_class(base: type[nn.Module], groups: Groups) -> type[FusedProjections]:
    """Return the subclass of a module's class with these fused layers.

    Raises
    ------
    CannotFuse
        If the source of its ``forward`` does not show that the results stay the same.
    """
    key: Any = base  # a class is hashable, which mypy does not see
    return _made(key, groups, inspect.getattr_static(base, "forward", None))


@functools.cache
def _made(base: type[nn.Module], groups: Groups, forward: object) -> type[FusedProjections]:
    """Return the class for the ``forward`` that its base has now."""
    forward_of_all, gated = fused_forward(base, groups)
    body = {
        "forward": forward_of_all,
        "fused_downs": gated,
        "fused_base": base,
        "fused_groups": groups,
        "__module__": base.__module__,
        "__qualname__": base.__qualname__,
        "__doc__": base.__doc__,
    }
    return type(base.__name__, (FusedProjections, base), body)


def downs(module: nn.Module, cls: type[FusedProjections]) -> Iterator[QuantizedLinear]:
    """Yield the layers of a module that take ``gate_up`` where it has this class."""
    for gated in cls.fused_downs:
        down = getattr(module, gated.down, None)
        if takes_gate_up(down) and is_silu(getattr(module, gated.act, None)):
            yield down


def parents(model: nn.Module) -> Iterator[tuple[str, FusedProjections]]:
    """Yield every module with fused layers once, with its first name."""
    for name, module in model.named_modules():
        if isinstance(module, FusedProjections):
            yield name, module


def shards_in(model: nn.Module) -> dict[str, dict[str, int]]:
    """Return the fused layers of a model by name: names of their shards, with their rows, in order."""
    return {
        _below(name, fused): dict(
            zip((_below(name, shard) for shard in shards), module._fused_rows[fused], strict=True)
        )
        for name, module in model.named_modules(remove_duplicate=False)
        if isinstance(module, FusedProjections)
        for fused, shards in module.fused_groups
    }


def refuse_fused(model: nn.Module) -> None:
    """Refuse to cut a model with fused layers among ranks.

    Raises
    ------
    InputError
        If there is one.
    """
    if (fused := next(iter(shards_in(model)), None)) is not None:
        raise InputError(
            f"{fused} was fused by fp4dispatch.fuse, and plans name the layers that it replaced: cut the model among "
            "ranks without fusing it (fuse=False)"
        )


def empty_module(base: type[nn.Module], groups: Groups) -> nn.Module:
    """Return a module to restore a pickle or a copy into. Pickles name this function."""
    cls = fused_class(base, groups)
    made: nn.Module = cls.__new__(cls)
    return made


def _below(name: str, child: str) -> str:
    return f"{name}.{child}" if name else child


def _taken(state: dict[str, Any], prefix: str) -> dict[str, Tensor]:
    """Take the tensors under a prefix out of a state."""
    keys = [key for key in state if key.startswith(prefix) and isinstance(state[key], torch.Tensor)]
    return {key.removeprefix(prefix): state.pop(key) for key in keys}


def _like_held(scales: Tensor, layer: QuantizedLinear) -> Tensor:
    """Return global scales, one a shard, in the number that the layer has."""
    held = layer._buffers["weight_scale_2"]
    if held is None or held.ndim == 1:
        return scales
    if not bool((scales == scales[0]).all()):
        found = ", ".join(f"{float(scale):g}" for scale in scales)
        raise FormatError(f"the layer has one global scale, and these are {found}: load the state, then fuse")
    return scales[0].clone()


def _shaped(part: Mapping[str, Tensor], layer: nn.Module) -> dict[str, Tensor]:
    """Return tensors with [1] as [] where the layer has one value."""
    # Not through attributes: they would unpack weights that the layer dropped.
    single = {name for name, held in layer._buffers.items() if held is not None and held.ndim == 0} | {"input_scale"}
    return {name: t.reshape(()) if name in single and t.numel() == 1 else t for name, t in part.items()}
