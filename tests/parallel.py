"""Ranks in real processes, and what they do with layers that are cut: over gloo on the CPU, over NCCL on GPUs.

Each scenario runs on every rank, and returns plain data. One start of the processes serves all scenarios of a file.
"""

from __future__ import annotations

import copy
import multiprocessing
import os
import queue
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

import fp4dispatch
from fp4dispatch.checkpoints.schemes import fuse_shards
from fp4dispatch.errors import CheckpointError, RankError
from fp4dispatch.integrations.tensor_parallel import (
    Column,
    ColwiseParallel,
    ParallelLinear,
    Row,
    RowwiseParallel,
    parallelize,
    save,
)
from fp4dispatch.machine.ranks import Ranks
from fp4dispatch.models.linear import FP4Linear, FP8Linear
from fp4dispatch.models.parallel.layers import parallel_layers

FORMATS = ("nvfp4", "fp8", "fp8_row", "fp8_block")
SCALING = {"fp8": "tensor", "fp8_row": "row", "fp8_block": "block128"}
FAMILIES = ("Llama", "Qwen3", "Gemma3")


@dataclass
class World:
    """What a scenario knows of its rank."""

    rank: int
    size: int
    device: torch.device
    folder: Path

    @property
    def dtype(self) -> torch.dtype:
        """float32 on the CPU, to see errors that rounding to bfloat16 would hide."""
        return torch.float32 if self.device.type == "cpu" else torch.bfloat16


Scenario = Callable[[World], Any]


def start(scenarios: Sequence[Scenario], size: int, device: str, seconds: float = 240) -> list[dict[str, Any]]:
    """Run scenarios on new ranks. Return the results of each rank by name. Fails with the errors of the ranks."""
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        work = [context.Process(target=_main, args=(r, size, device, folder, scenarios, answers)) for r in range(size)]
        for process in work:
            process.start()
        found: dict[int, dict[str, Any]] = {}
        deadline = time.monotonic() + seconds
        while len(found) < size and time.monotonic() < deadline:
            try:
                rank, result = answers.get(timeout=0.5)
                found[rank] = result
                if len(result) < len(scenarios) or any(isinstance(value, str) for value in result.values()):
                    deadline = min(deadline, time.monotonic() + 15)  # the others may wait for it
            except queue.Empty:
                if all(not process.is_alive() for process in work):
                    break
        for process in work:
            process.join(10)
            if process.is_alive():
                process.kill()
                process.join()
    faults = [f"rank {r}, {name}: {v}" for r in found for name, v in found[r].items() if isinstance(v, str)]
    assert not faults, "\n".join(faults)
    assert len(found) == size, f"only ranks {sorted(found)} of {size} answered within {seconds:.0f} s"
    return [found[rank] for rank in range(size)]


def _main(rank: int, size: int, device: str, folder: str, scenarios: Sequence[Scenario], answers: Any) -> None:
    torch.set_num_threads(1)
    where = torch.device(device, rank) if device == "cuda" else torch.device(device)
    options = {}
    if device == "cuda":
        torch.cuda.set_device(where)
        options = {"device_id": where}
    backend = "nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=rank, world_size=size, **options)
    world = World(rank, size, where, Path(folder))
    found = {}
    for scenario in scenarios:
        try:
            with torch.inference_mode():
                found[scenario.__name__] = scenario(world)
        except Exception as error:
            found[scenario.__name__] = f"{type(error).__name__}: {error}\n{traceback.format_exc()}"
            break  # the ranks may be out of step
    answers.put((rank, found))
    answers.close()
    answers.join_thread()
    if len(found) == len(scenarios):
        dist.barrier()  # rank 0 may hold the store
    os._exit(0)  # at the exit of a process a group can wait for the other ranks


# -------------------------------------------------------------------------------------------------------------- layers


def layer(fmt: str, n: int, k: int, bias: bool, world: World, **options: Any) -> FP4Linear | FP8Linear:
    """Return a whole layer, the same on all ranks."""
    generator = torch.Generator().manual_seed(n + k)
    linear = nn.Linear(k, n, bias, dtype=torch.float32)
    for parameter in linear.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator))
    linear = linear.to(world.device, world.dtype)
    if fmt == "nvfp4":
        return FP4Linear.from_linear(linear, **options)
    return FP8Linear.from_linear(linear, scaling=SCALING[fmt], **options)


def tokens(m: int, k: int, world: World) -> Tensor:
    x = torch.randn(m, k, generator=torch.Generator().manual_seed(m))
    return x.to(world.device, world.dtype)


def off(got: Tensor, want: Tensor) -> float:
    """Relative error; infinite for other shapes or NaN."""
    if got.shape != want.shape:
        return float("inf")
    error = float((got.double() - want.double()).norm() / want.double().norm())
    return error if error == error else float("inf")


def pairs(world: World) -> dict[str, float]:
    """Every format, with and without bias: a column layer and a row layer behind it are the whole ones."""
    found = {}
    for fmt in FORMATS:
        for bias in (True, False):
            up, down = (layer(fmt, *s, bias, world, activation="bf16") for s in ((512, 256), (384, 512)))
            x = tokens(3, 256, world)
            between = up(x)
            want = down(between)
            net = nn.ModuleDict({"up": up, "down": down})
            parallelize(net, None, {"up": Column(), "down": Row()})
            mine = up(x)
            rows = slice(world.rank * 512 // world.size, (world.rank + 1) * 512 // world.size)
            found[f"{fmt} bias={bias} column"] = off(mine, between[:, rows])
            found[f"{fmt} bias={bias} row"] = off(down(mine), want)
    return found


def gathered(world: World) -> dict[str, float]:
    """Column layers that gather, row layers that split, through torch's own parallelize_module."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import parallelize_module

    mesh = init_device_mesh(world.device.type, (world.size,))
    found = {}
    for fmt in FORMATS:
        net = nn.ModuleDict({"a": layer(fmt, 512, 256, True, world, activation="bf16")})
        net["b"] = layer(fmt, 256, 512, True, world, activation="bf16")
        x = tokens(2, 256, world).view(1, 2, 256)
        between = net["a"](x)
        want = net["b"](between)
        plan = {"a": ColwiseParallel(output_layouts=Replicate()), "b": RowwiseParallel(input_layouts=Replicate())}
        parallelize_module(net, mesh, plan)
        got = net["a"](x)
        found[f"{fmt} gathered"] = off(got, between)
        found[f"{fmt} split"] = off(net["b"](got), want)
        found[f"{fmt} empty"] = float(net["b"](net["a"](x[:, :0])).numel())
    return found


def fused_layers(world: World) -> dict[str, float]:
    """Shards with global scales of their own: each is cut by itself, and keeps its scale."""
    found = {}
    for fmt in FORMATS:
        rows = (512, 1024, 512) if fmt == "fp8_block" else (64, 32, 96)
        parts = [layer(fmt, n, 256, False, world) for n in rows]
        for part, factor in zip(parts, (1.0, 1000.0, 0.01), strict=True):
            if fmt == "nvfp4":
                part.weight_scale_2.mul_(factor)
        weights = fuse_shards([part.weights() for part in parts])
        bias = torch.randn(sum(rows), generator=torch.Generator().manual_seed(0)).to(world.device, world.dtype)
        make = FP4Linear if fmt == "nvfp4" else FP8Linear
        whole = make.from_weights(weights, bias, dtype=world.dtype, activation="bf16")
        x = tokens(2, 256, world)
        want = whole(x)
        net = nn.ModuleDict({"qkv": whole})
        parallelize(net, None, {"qkv": Column(fused=() if fmt == "nvfp4" else rows)})
        mine = whole(x).split([n // world.size for n in rows], dim=-1)
        theirs = [w.chunk(world.size, -1)[world.rank] for w in want.split(rows, dim=-1)]
        found[fmt] = max(off(a, b) for a, b in zip(mine, theirs, strict=True))
        again = nn.ModuleDict({"qkv": make.from_weights(weights, bias, dtype=world.dtype, activation="bf16")})
        parallelize(again, None, {"qkv": Column(gather_output=True, fused=() if fmt == "nvfp4" else rows)})
        found[f"{fmt} gathered"] = off(again["qkv"](x), want)
    return found


def padded(world: World) -> dict[str, Any]:
    """Sizes that do not divide: padded with zeros where asked, and equal to the whole layers."""
    found: dict[str, Any] = {}
    for fmt in FORMATS:
        middle = 640 if fmt == "fp8_block" else 5 * 16  # five blocks: no even number of ranks divides them
        net = nn.ModuleDict({"up": layer(fmt, middle, 256, True, world, activation="bf16")})
        net["down"] = layer(fmt, 256, middle, True, world, activation="bf16")
        x = tokens(3, 256, world)
        want = net["down"](net["up"](x))
        if fmt in ("nvfp4", "fp8_block"):
            parallelize(net, None, {"up": Column(pad=True), "down": Row(pad=True)})
            hidden = net["up"](x)
            mine = max(0, min(hidden.shape[-1], middle - world.rank * hidden.shape[-1]))
            found[f"{fmt} zeros"] = float(hidden[:, mine:].abs().sum())
        else:
            parallelize(net, None, {"up": Column(), "down": Row()})
            hidden = net["up"](x)
        found[fmt] = off(net["down"](hidden), want)
    return found


# -------------------------------------------------------------------------------------------------------------- models


def model(family: str, world: World, **sizes: Any) -> nn.Module:
    """Return a tiny model of transformers, the same on all ranks; its heads and blocks can be cut for four."""
    import transformers

    name = f"{family}Text" if family == "Gemma3" else family
    numbers = {"hidden_size": 64, "intermediate_size": 512, "num_hidden_layers": 1, "vocab_size": 128, "head_dim": 128}
    numbers |= {"num_attention_heads": 4, "num_key_value_heads": 4, "attention_bias": family != "Gemma3"} | sizes
    config = getattr(transformers, f"{name}Config")(**numbers)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        net = getattr(transformers, f"{family}ForCausalLM")(config).eval().requires_grad_(False)
        for parameter in net.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))  # biases too
    return net.to(world.device, world.dtype)


def ids(world: World) -> Tensor:
    return torch.arange(1, 11, device=world.device).view(2, 5)


def models(world: World) -> dict[str, float]:
    """Whole models, cut by the plan that they have: logits are those of one process."""
    found = {}
    for family in FAMILIES:
        for fmt in ("nvfp4", "fp8_block") if family == "Llama" else ("nvfp4",):
            net = model(family, world)
            fp4dispatch.replace_linears(net, fmt, activation="bf16")
            want = net(ids(world)).logits
            kinds = parallelize(net)
            found[f"{family} {fmt}"] = off(net(ids(world)).logits, want)
            found[f"{family} {fmt} layers"] = len(kinds)
    return found


def saving(world: World) -> dict[str, float]:
    """A cut model is saved as the whole one was, byte for byte, and stays cut; a part alone is refused."""
    found = {}
    for fmt in FORMATS:
        net = nn.ModuleDict({"q_proj": layer(fmt, 512, 256, True, world), "o_proj": layer(fmt, 256, 512, True, world)})
        if fmt == "nvfp4":
            parts = [layer(fmt, n, 256, False, world).weights() for n in (64, 32, 32)]
            net["attn"] = nn.ModuleDict({"qkv_proj": FP4Linear.from_weights(fuse_shards(parts), dtype=world.dtype)})
        net["plain"] = nn.Linear(256, 64).to(world.device, world.dtype)
        for parameter in net["plain"].parameters():
            parameter.fill_(0.5)
        method = "modelopt" if fmt == "nvfp4" else "fp8"
        folder = world.folder / f"{fmt}-whole-{world.rank}"
        fp4dispatch.save_quantized(net, folder, method)
        keys = set(net.state_dict())
        parallelize(net, None, {"o_proj": Row(), "*": Column()})
        try:
            fp4dispatch.save_quantized(net, world.folder / "part", method)
        except CheckpointError as error:
            found[f"{fmt} refused"] = float("is cut" not in str(error))
        (file,) = save(net, world.folder / fmt, method)
        found[f"{fmt} bytes"] = float(file.read_bytes() != (folder / "model.safetensors").read_bytes())
        found[f"{fmt} keys"] = float(set(net.state_dict()) != keys)
        found[f"{fmt} cut"] = float(len(list(parallel_layers(net))) != len(net))
        again = copy.deepcopy(net)
        again.load_state_dict(net.state_dict())
        x = tokens(2, 256, world)
        found[f"{fmt} copy"] = off(again["o_proj"](again["q_proj"](x)), net["o_proj"](net["q_proj"](x)))
    return found


def saving_fails(world: World) -> dict[str, float]:
    """Rank 0 cannot write: all ranks raise, and the model is as it was."""
    net = nn.ModuleDict({"o_proj": layer("nvfp4", 256, 512, True, world)})
    parallelize(net, None, {"o_proj": Row()})
    taken = world.folder / "taken"
    if world.rank == 0:
        taken.mkdir()
        (taken / "file").touch()
    try:
        save(net, taken)
    except CheckpointError as error:
        return {"raised": float(world.rank != 0 or "taken" not in str(error)), "cut": off_if_whole(net)}
    except RankError as error:
        return {"raised": float("rank 0: CheckpointError" not in str(error)), "cut": off_if_whole(net)}
    return {"raised": 1.0}


def off_if_whole(net: nn.Module) -> float:
    return float(not isinstance(net["o_proj"], ParallelLinear))


def two_groups(world: World) -> dict[str, float]:
    """Each half of the ranks shares a model of its own: warmup agrees within the half, without being told."""
    half = world.size // 2
    groups = [dist.new_group(range(half)), dist.new_group(range(half, world.size))]
    mine = groups[world.rank >= half]
    n = 256 if world.rank < half else 384
    net = nn.ModuleDict({"a": layer("nvfp4", n, 256, True, world), "b": layer("fp8_row", 256, n, True, world)})
    want = net["b"](net["a"](tokens(2, 256, world)))
    parallelize(net, mine, {"a": Column(), "b": Row()})
    asked = []
    gather = Ranks.gather

    def spy(self: Ranks, value: Any) -> list[Any]:
        asked.append(self.size)
        return gather(self, value)

    with mock.patch.object(Ranks, "gather", spy):
        fp4dispatch.warmup(net, tokens=[2])
    return {"result": off(net["b"](net["a"](tokens(2, 256, world))), want), "others asked": float(set(asked) != {half})}


def compiled(world: World) -> dict[str, float]:
    """torch.compile traces the collectives into one graph."""
    net = nn.ModuleDict({"up": layer("nvfp4", 256, 256, True, world), "down": layer("fp8_row", 256, 256, True, world)})
    net["out"] = layer("nvfp4", 128, 256, True, world)
    parallelize(net, None, {"up": Column(), "down": Row(), "out": Column(gather_output=True)})
    x = tokens(4, 256, world)

    def run(x: Tensor) -> Tensor:
        return net["out"](net["down"](net["up"](x)))

    want = run(x)
    backend = "inductor" if world.device.type == "cuda" else "aot_eager"
    return {"compiled": off(torch.compile(run, fullgraph=True, backend=backend)(x), want)}
