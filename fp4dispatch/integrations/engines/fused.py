"""What the configuration of a checkpoint says of an engine's layers. The engine may fuse several layers into one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from fp4dispatch.checkpoints.config.quant_config import QuantConfig
from fp4dispatch.checkpoints.config.readers import Group
from fp4dispatch.checkpoints.schemes import SCHEMES, Scheme
from fp4dispatch.errors import CheckpointUnsupportedError
from fp4dispatch.integrations.engines.refusals import Host


def scheme_of(group: Group) -> Scheme:
    """Return how the layers of a group are stored."""
    return SCHEMES[group.schemes[0]]


def shard_names(prefix: str, packed: Mapping[str, Sequence[str]]) -> tuple[str, ...]:
    """Return the names of a layer's shards in the checkpoint; its own name if the engine does not fuse it.

    Parameters
    ----------
    prefix
        Name in the engine.
    packed
        The engine's ``packed_modules_mapping``: last part of a fused name to those of its shards.
    """
    parent, _, last = prefix.rpartition(".")
    return tuple(f"{parent}.{shard}" if parent else shard for shard in packed.get(last) or [last])


def group_of(config: QuantConfig, names: Sequence[str], prefix: str, host: Host) -> Group | None:
    """Return how the checkpoint stores the shards of a layer; None: they are not quantised.

    Parameters
    ----------
    config
        What the checkpoint says.
    names
        The shards, by their names in the checkpoint.
    prefix
        The layer's name in the engine.
    host
        The engine.

    Raises
    ------
    CheckpointUnsupportedError
        Only some shards are quantised, or they have different formats.
    """
    groups = [_group_of(config, name) for name in names]
    kinds = {None if group is None else (group.schemes, group.activation) for group in groups}
    if len(kinds) > 1:
        found = ", ".join(
            f"{name}: {'not quantised' if group is None else f'{scheme_of(group).name}, {group.activation}'}"
            for name, group in zip(names, groups, strict=True)
        )
        raise CheckpointUnsupportedError(
            f"{prefix}: {host.name} fuses {len(names)} layers of the checkpoint, which need one format; found {found}: "
            f"export it with one format for these layers, or {host.leave_out}"
        )
    return groups[0]


def _group_of(config: QuantConfig, name: str) -> Group | None:
    """Return how the checkpoint stores a layer. ``lm_head`` has that name below any model."""
    known = (name, "lm_head") if name.endswith(".lm_head") else (name,)
    if any(config.excludes(each) for each in known):
        return None
    found = (config.group_for(each) for each in known)
    return next((group for group in found if group is not None), None)


def with_engine_names(config: QuantConfig, rename: Callable[[list[str]], list[str]]) -> QuantConfig:
    """Return what the checkpoint says, with the engine's names of modules beside its own (:func:`renamed`)."""
    groups = tuple(replace(group, targets=renamed(group.targets, rename)) for group in config.groups)
    return replace(config, groups=groups, ignore=renamed(config.ignore, rename))


def renamed(patterns: Iterable[str], rename: Callable[[list[str]], list[str]]) -> tuple[str, ...]:
    """Return patterns with their names in the engine beside them. Regular expressions and class names stay as they are.

    ModelOpt writes ``module*`` for all below a module; ``rename`` knows ``module`` and ``module.`` only.
    """
    patterns = tuple(patterns)
    split = [
        part for p in patterns for part in ((p[:-1], f"{p[:-1]}.*") if p[-2:-1].isalnum() and p[-1] == "*" else (p,))
    ]
    named = [p for p in split if not p.startswith("re:") and ("." in p or p == p.lower())]
    return tuple(dict.fromkeys((*patterns, *rename(named))))
