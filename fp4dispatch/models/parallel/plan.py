"""Say how the linear layers of a model are cut: ``Column`` along N, ``Row`` along K, by patterns of their names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from fp4dispatch.errors import InputError
from fp4dispatch.machine.collectives import Team
from fp4dispatch.models.name_patterns import NamePatterns
from fp4dispatch.models.parallel.cut import Cut, Dim, cut
from fp4dispatch.models.projections import QKV
from fp4dispatch.models.quantized_linear import QuantizedLinear


@dataclass(frozen=True)
class Column:
    """Cut the outputs (N): each rank computes some of them from the whole input.

    Parameters
    ----------
    gather_output
        Whether the layer returns the whole output on all ranks, not the rank's part.
    fused
        Sizes of the layers that are fused along N. Each is cut by itself. Empty: what the layer knows
        (``shard_rows``), or one layer.
    pad
        Fill up the last ranks with zeros where N does not divide. For layers of an MLP, whose ``Row`` pads too; heads
        of attention cannot be padded.
    """

    gather_output: bool = False
    fused: tuple[int, ...] = ()
    pad: bool = False


@dataclass(frozen=True)
class Row:
    """Cut the inputs (K): each rank multiplies its part, and the ranks add up their results.

    Parameters
    ----------
    split_input
        Whether the layer gets the whole input and takes its part, as after a ``Column`` with ``gather_output``.
    pad
        Fill up the last ranks with zeros where K does not divide.
    """

    split_input: bool = False
    pad: bool = False


Kind = Column | Row
Plan = Mapping[str, "Kind | str | None"]
"""From patterns of module names to how to cut; None leaves a layer whole. The first match counts."""

STYLES: dict[str, Kind] = {
    "colwise": Column(),
    "colwise_gather_output": Column(gather_output=True),
    "colwise_rep": Column(gather_output=True),
    "rowwise": Row(),
    "rowwise_split_input": Row(split_input=True),
    "rowwise_rep": Row(split_input=True),
}
"""Names of Transformers (``distributed/tensor_parallel.py``) for the kinds."""


@dataclass(frozen=True)
class TensorParallel:
    """How to cut a model, and among which ranks.

    Parameters
    ----------
    group
        A ``DeviceMesh`` of one dimension, a ``ProcessGroup``, or None for all ranks.
    plan
        ``auto``: the plan that a Transformers model has (``model.tp_plan``); or patterns of module names to
        :class:`Column`, :class:`Row`, a name in ``STYLES``, or None. Patterns are globs, or regular expressions behind
        ``re:``.
    """

    group: Any = None
    plan: Plan | str = "auto"


def dim_of(kind: Kind) -> Dim:
    """Return the dimension that is cut."""
    return "N" if isinstance(kind, Column) else "K"


def fused_rows(kind: Kind, shard_rows: tuple[int, ...], what: str) -> tuple[int, ...]:
    """Return the sizes of the shards to cut along N, each by itself.

    Raises
    ------
    InputError
        If the plan says otherwise than the layer, whose shards have their own global scales.
    """
    asked = kind.fused if isinstance(kind, Column) else ()
    known = shard_rows if len(shard_rows) > 1 and isinstance(kind, Column) else ()
    if asked and known and tuple(asked) != tuple(known):
        raise InputError(f"{what}: fused={list(asked)}, but the layer is fused from {list(known)}: leave fused out")
    return tuple(asked or known)


def cut_for(kind: Kind, size: int, unit: int, shards: tuple[int, ...], members: Team, what: str) -> list[Cut]:
    """Return what each rank holds, in rank order. Raises as :func:`fp4dispatch.models.parallel.cut.cut`."""
    ranks = range(members.size)
    options: dict[str, Any] = {"unit": unit, "shards": shards, "pad": kind.pad, "what": what, "dim": dim_of(kind)}
    return [cut(size, rank, members.size, **options) for rank in ranks]


def planned(model: nn.Module, plan: Plan | str, ranks: int) -> dict[str, Kind]:
    """Return how to cut each linear layer that the plan names, by its first name in the model.

    Raises
    ------
    InputError
        A plan or a style that does not exist, a pattern that names no linear layer, or heads of attention that the
        ranks cannot share.
    """
    automatic = isinstance(plan, str)
    entries = _of_model(model, str(plan)) if isinstance(plan, str) else _entries(plan)
    found: dict[str, Kind] = {}
    matched: set[str] = set()
    for name, module in linears(model):
        pattern = next((p for p, match, _ in entries if match(name)), None)
        if pattern is None:
            continue
        matched.add(pattern)
        kind = next(kind for p, _, kind in entries if p == pattern)
        # The head is often tied to the embedding, and its output is gathered anyway: it stays whole.
        gathered = isinstance(kind, Column) and kind.gather_output
        head = automatic and gathered and not isinstance(module, QuantizedLinear)
        if kind is not None and not head:
            found[name] = kind
    idle = [p for p, _, _ in entries if p not in matched]
    if idle and not automatic:
        raise InputError(f"the plan's pattern {idle[0]!r} names no linear layer of {type(model).__name__}")
    if not found:
        raise InputError(f"the plan names no linear layer of {type(model).__name__}: nothing would be parallel")
    _check_heads(model, found, ranks)
    return found


def linears(model: nn.Module) -> Iterator[tuple[str, nn.Linear | QuantizedLinear]]:
    """Yield every linear layer once, with its first name."""
    for name, module in model.named_modules():
        if isinstance(module, (nn.Linear, QuantizedLinear)):
            yield name, module


def _entries(plan: Plan) -> list[tuple[str, NamePatterns, Kind | None]]:
    if not isinstance(plan, Mapping) or not plan:
        raise InputError(f"plan={plan!r:.80}; need 'auto', or a mapping from patterns of module names to styles")
    return [(pattern, NamePatterns(pattern), _kind(pattern, style)) for pattern, style in plan.items()]


def _kind(pattern: str, style: Any) -> Kind | None:
    kind = getattr(style, "kind", style)  # the styles for parallelize_module hold a kind
    if kind is None or isinstance(kind, (Column, Row)):
        return kind
    if isinstance(kind, str) and kind in STYLES:
        return STYLES[kind]
    raise InputError(f"plan: {pattern!r} is {style!r:.80}; need Column(), Row(), None, or one of {', '.join(STYLES)}")


def _of_model(model: nn.Module, plan: str) -> list[tuple[str, NamePatterns, Kind | None]]:
    """Return the entries of a Transformers model's plan that are about linear layers."""
    if plan != "auto":
        raise InputError(f"plan={plan!r}; need 'auto', or a mapping from patterns of module names to styles")
    own = getattr(model, "tp_plan", None)
    if not own:
        raise InputError(
            f"{type(model).__name__} has no tp_plan, as models of Transformers have: pass a plan, e.g. "
            "{'*.up_proj': Column(), '*.down_proj': Row()}"
        )
    names = [name for name, _ in linears(model)]
    entries: list[tuple[str, NamePatterns, Kind | None]] = []
    for pattern, style in own.items():
        match = NamePatterns(pattern)
        if style in STYLES:
            entries.append((pattern, match, STYLES[style]))
        elif any(map(match, names)):
            raise InputError(
                f"{type(model).__name__}.tp_plan cuts {pattern!r} as {style!r}, which is not supported: pass a plan; "
                f"known: {', '.join(STYLES)}"
            )
    return entries


def _check_heads(model: nn.Module, found: Mapping[str, Kind], ranks: int) -> None:
    """Refuse ranks that would get a part of a head: the model would compute garbage, or fail on a shape."""
    if not any(name.rpartition(".")[2] in QKV for name, kind in found.items() if kind == Column()):
        return
    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    for key in ("num_attention_heads", "num_key_value_heads"):
        heads = getattr(text, key, None)
        if isinstance(heads, int) and heads % ranks:
            works = [n for n in range(1, heads + 1) if heads % n == 0]
            raise InputError(
                f"{key}={heads} cannot be shared by {ranks} ranks, which need whole heads: use "
                f"{', '.join(map(str, works))} ranks, or leave the attention whole"
            )
