"""Save a model whose layers are cut: as the same files that one GPU would write."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fp4dispatch.backends.base import LinearWeights
from fp4dispatch.checkpoints.save import SaveFormat, save_quantized
from fp4dispatch.errors import InputError
from fp4dispatch.machine import collectives
from fp4dispatch.machine.collectives import Team, team
from fp4dispatch.machine.ranks import Ranks
from fp4dispatch.models.linear import layer_of
from fp4dispatch.models.parallel.cut import join, join_weights
from fp4dispatch.models.parallel.layers import ParallelLinear, Part, group_of, parallel_layers
from fp4dispatch.models.parallel.plan import dim_of
from fp4dispatch.models.quantized_linear import QuantizedLinear


def save(model: nn.Module, out_dir: str | Path, format: SaveFormat = "modelopt", **options: Any) -> tuple[Path, ...]:
    """Save a model whose layers are cut, as :func:`fp4dispatch.save_quantized` saves the whole one. A collective call.

    The parts are put together on rank 0 of the group, one layer after the other, in CPU memory; rank 0 needs room
    there for all quantised weights. It writes the files that one GPU would write. The model stays as it is.

    Parameters
    ----------
    model, out_dir, format, options
        As of :func:`fp4dispatch.save_quantized`.

    Returns
    -------
    tuple of Path
        The safetensors files, on all ranks.

    Raises
    ------
    InputError
        If no layer is cut, or layers belong to several groups.
    CheckpointError
        As :func:`fp4dispatch.save_quantized`, on rank 0.
    RankError
        If another rank failed, rank 0 while it wrote among them.
    """
    layers = dict(parallel_layers(model))
    if not layers:
        raise InputError("no layer of the model is cut: use fp4dispatch.save_quantized")
    members = team(group_of(model))
    ranks = Ranks(members.group)
    whole = ranks.attempt("gathering layers", lambda: _gather(layers, members))

    def write() -> tuple[Path, ...]:
        if members.rank:
            return ()
        with _swapped(model, whole):
            return save_quantized(model, out_dir, format, **options)

    return ranks.gather(ranks.attempt("saving the model", write))[0]


def _gather(layers: dict[str, ParallelLinear], members: Team) -> dict[str, nn.Module]:
    """Return the whole layers on rank 0, and nothing on others."""
    found = {}
    with torch.no_grad():
        for name, layer in layers.items():
            whole = _whole(name, layer, layer.part)
            if members.rank == 0:
                found[name] = whole
            del whole
    return found


def _whole(name: str, layer: ParallelLinear, part: Part) -> nn.Module:
    """Return the whole layer, on the CPU."""
    dim = dim_of(part.kind)

    def everyone(tensor: Tensor) -> list[Tensor]:
        raw = tensor.detach().contiguous()
        raw = raw.view(torch.uint8) if raw.element_size() == 1 else raw
        return [t.view(tensor.dtype).cpu() for t in collectives.all_gather(raw, part.team, lambda: name)]

    held: Any = layer.bias
    bias = None
    if held is not None:
        biases = everyone(held)
        bias = join(biases, 0, part.cuts) if dim == "N" else biases[0]
    if not isinstance(layer, QuantizedLinear):
        return _whole_plain(layer, join(everyone(layer.weight), 0 if dim == "N" else 1, part.cuts), bias)  # type: ignore[arg-type]
    mine = layer.weights(lend=False)
    weights = [
        _on_cpu(mine, weight, scale) for weight, scale in zip(everyone(mine.weight), everyone(mine.scale), strict=True)
    ]
    rows = part.shard_rows if mine.op == "nvfp4_gemm" else ()
    return layer_of(
        join_weights(weights, dim, part.cuts, rows),
        bias,
        activation=layer.activation,
        backend=layer.backend,
        dtype=layer.dtype,
        name=layer.name,
    )


def _on_cpu(like: LinearWeights, weight: Tensor, scale: Tensor) -> LinearWeights:
    def cpu(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else tensor.cpu()

    return LinearWeights(
        like.op, like.scaling, like.n, like.k, weight, scale, cpu(like.global_scale), like.shard_rows,
        cpu(like.input_scale),
    )  # fmt: skip


def _whole_plain(layer: ParallelLinear, weight: Tensor, bias: Tensor | None) -> nn.Linear:
    whole = nn.Linear(weight.shape[1], weight.shape[0], bias is not None, device="meta")
    whole.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        whole.bias = nn.Parameter(bias, requires_grad=False)
    return whole


@contextmanager
def _swapped(model: nn.Module, whole: dict[str, nn.Module]) -> Iterator[None]:
    """Put whole layers in the places of the parts, for one block."""
    done: list[tuple[dict[str, Any], str, nn.Module]] = []
    try:
        for name, layer in whole.items():
            parent, _, last = name.rpartition(".")
            place = model.get_submodule(parent)._modules
            done.append((place, last, place[last]))  # type: ignore[arg-type]
            place[last] = layer
        yield
    finally:
        for place, last, old in reversed(done):
            place[last] = old
