"""Each rank reads its own part of a checkpoint, and only that. The parts of all ranks are read in one process."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import nn

import fp4dispatch
from fp4dispatch.checkpoints.files.reader import Checkpoint
from fp4dispatch.errors import CheckpointError, InputError
from fp4dispatch.integrations.tensor_parallel import Column, ParallelLinear, Row, TensorParallel
from fp4dispatch.machine.collectives import Team
from fp4dispatch.models.linear import FP4Linear
from fp4dispatch.models.parallel.cut import cut_weights, join, join_weights
from fp4dispatch.models.quantized_linear import QuantizedLinear

PLAN = {"*_proj": Column(), "o": Row(), "plain": Column(), "plain_row": Row()}
CASES = [
    *(("nvfp4", "modelopt"), ("nvfp4", "compressed-tensors"), ("fp8", "modelopt"), ("fp8_row", "modelopt")),
    *(("fp8", "compressed-tensors"), ("fp8_row", "compressed-tensors"), ("fp8_block", "compressed-tensors")),
    *(("fp8", "fp8"), ("fp8_row", "fp8"), ("fp8_block", "fp8")),
]


class Net(nn.Module):
    def __init__(self, fused: bool = False) -> None:
        super().__init__()
        if fused:
            self.qkv_proj = nn.Linear(256, 1024)
        else:
            self.q_proj, self.k_proj, self.v_proj = nn.Linear(256, 512), nn.Linear(256, 256), nn.Linear(256, 256)
        self.o = nn.Linear(512, 256)
        self.plain, self.plain_row = nn.Linear(256, 64), nn.Linear(64, 256)


def saved(fmt, method, folder):
    torch.manual_seed(0)
    net = Net().requires_grad_(False)
    fp4dispatch.replace_linears(net, fmt, exclude=["plain*"], activation="bf16" if fmt == "nvfp4" else "any")
    for scale, name in zip((1.0, 4.0, 0.25), ("q_proj", "k_proj", "v_proj"), strict=True):
        if fmt == "nvfp4":
            net.get_submodule(name).weight_scale_2.mul_(scale)  # powers of two: exact in every format
    for name in ("q_proj", "k_proj", "v_proj", "o") if (fmt, method) == ("fp8", "modelopt") else ():
        net.get_submodule(name).input_scale = torch.tensor(0.02)  # ModelOpt has no FP8 without
    fp4dispatch.save_quantized(net, folder / "ckpt", method)
    return folder / "ckpt", net


def of(rank, size, plan=None):
    return TensorParallel(Team(None, "", rank, size), PLAN if plan is None else plan)


def loaded(path, rank, size, *, fused=False, plan=None):
    with torch.device("meta"):
        net = Net(fused).requires_grad_(False)
    fp4dispatch.load_quantized(net, path, tp=of(rank, size, plan))
    return net


def same(a, b):
    return (
        a.shape == b.shape
        and a.dtype == b.dtype
        and torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))
    )


@pytest.mark.parametrize(("fmt", "method"), CASES)
def test_the_parts_of_all_ranks_are_the_checkpoint(fmt, method, tmp_path):
    path, whole = saved(fmt, method, tmp_path)
    ranks = [loaded(path, rank, 2) for rank in range(2)]
    for name in ("q_proj", "k_proj", "v_proj", "o"):
        want = whole.get_submodule(name)
        parts = [net.get_submodule(name) for net in ranks]
        dim = "K" if name == "o" else "N"
        for part in parts:
            assert isinstance(part, ParallelLinear)
            assert isinstance(part, QuantizedLinear)
            mine = cut_weights(want.weights(), dim, part.part.mine)
            for key in ("weight", "scale", "global_scale", "input_scale"):
                if getattr(mine, key) is not None:
                    assert same(getattr(part.weights(), key), getattr(mine, key)), (name, key)
        joined = join_weights([part.weights() for part in parts], dim, parts[0].part.cuts, want.weights().shard_rows)
        assert same(joined.weight, want.weight)
        assert same(joined.scale, want.weights().scale)
        if dim == "N":
            assert torch.equal(join([part.bias for part in parts], 0, parts[0].part.cuts), want.bias)
        else:
            assert torch.equal(parts[0].bias, want.bias)
            assert not parts[1].bias.any()
    for name, axis in (("plain", 0), ("plain_row", 1)):
        parts = [net.get_submodule(name) for net in ranks]
        assert torch.equal(torch.cat([part.weight for part in parts], axis), whole.get_submodule(name).weight)
    assert set(ranks[0].state_dict()) == set(whole.state_dict())


@pytest.mark.parametrize(("fmt", "method"), [("nvfp4", "modelopt"), ("fp8", "modelopt"), ("fp8_block", "fp8")])
def test_a_fused_layer_takes_the_rank_s_part_of_each_shard(fmt, method, tmp_path):
    path, whole = saved(fmt, method, tmp_path)
    for rank in range(2):
        net = loaded(path, rank, 2, fused=True)
        parts = [whole.get_submodule(f"{name}_proj").weight.chunk(2)[rank] for name in "qkv"]
        assert same(net.qkv_proj.weight, torch.cat([p.view(torch.uint8) for p in parts]).view(parts[0].dtype))
        biases = [whole.get_submodule(f"{name}_proj").bias.chunk(2)[rank] for name in "qkv"]
        assert torch.equal(net.qkv_proj.bias, torch.cat(biases))
        if isinstance(net.qkv_proj, FP4Linear):
            assert net.qkv_proj.shard_rows == (256, 128, 128)
            scales = [whole.get_submodule(f"{name}_proj").weight_scale_2 for name in "qkv"]
            assert torch.equal(net.qkv_proj.weight_scale_2, torch.stack(scales))


def test_no_tensor_that_is_cut_is_read_whole(tmp_path, monkeypatch):
    path, _ = saved("nvfp4", "modelopt", tmp_path)
    read = {}
    tensor, part = Checkpoint.tensor, Checkpoint.part

    def spy_tensor(self, name):
        found = tensor(self, name)
        read[name] = read.get(name, 0) + found.numel() * found.element_size()
        return found

    def spy_part(self, name, *where):
        found = part(self, name, *where)
        read[name] = read.get(name, 0) + found.numel() * found.element_size()
        return found

    monkeypatch.setattr(Checkpoint, "tensor", spy_tensor)
    monkeypatch.setattr(Checkpoint, "part", spy_part)
    loaded(path, 1, 4)
    with fp4dispatch.open_checkpoint(path) as checkpoint:
        large = {name: checkpoint[name].nbytes for name in checkpoint if checkpoint[name].nbytes > 2048}
    assert {name: read[name] for name in large} == {name: nbytes // 4 for name, nbytes in large.items()}


MEMORY = """
import sys, torch
from torch import nn
import fp4dispatch
from fp4dispatch.integrations.tensor_parallel import Column, TensorParallel
from fp4dispatch.machine.collectives import Team

def peak():
    lines = open("/proc/self/status").read().splitlines()
    return int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) / 1024

with torch.device("meta"):
    small, large = (nn.ModuleDict({"o": nn.Linear(4096, n, bias=False)}) for n in (2048, 32768))
tp = lambda size: TensorParallel(Team(None, "", size - 1, size), {"o": Column()})
fp4dispatch.load_quantized(small, sys.argv[1], tp=tp(1))  # a whole layer of the part's size: imports, checks, layouts
before = peak()
fp4dispatch.load_quantized(large, sys.argv[2], tp=tp(int(sys.argv[3])))
print(peak() - before, large.o.weight.numel() / 2**20)
"""


def grown(tmp_path, size):
    """MiB by which the peak grows while one rank loads its part of 64 MiB of codes, beyond a layer of that size."""
    for name, n in (("small", 2048), ("large", 32768)):
        if not (tmp_path / name).exists():
            layer = FP4Linear(4096, n, bias=False)
            fp4dispatch.save_quantized(nn.ModuleDict({"o": layer}), tmp_path / name)
    command = [sys.executable, "-c", MEMORY, str(tmp_path / "small"), str(tmp_path / "large"), str(size)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert ran.returncode == 0, ran.stderr
    return [float(word) for word in ran.stdout.split()]


def test_the_peak_of_memory_is_that_of_the_part(tmp_path):
    peak, part = grown(tmp_path, 16)
    assert part == 4
    assert peak < 16
    assert grown(tmp_path, 1)[0] > 64  # the measurement sees a whole tensor


def test_sizes_that_cannot_be_cut_are_refused_before_anything_is_read(tmp_path):
    path, _ = saved("fp8_block", "fp8", tmp_path)
    with torch.device("meta"):
        net = Net()
    before = dict(net.named_modules())
    with pytest.raises(InputError, match=r"o: K=512 cannot be cut for 8 ranks.*128 of them share a scale.*1, 2, 4"):
        fp4dispatch.load_quantized(net, path, tp=of(0, 8, {"o": Row()}))
    assert dict(net.named_modules()) == before


def test_saving_a_part_is_refused(tmp_path):
    path, _ = saved("nvfp4", "modelopt", tmp_path)
    with pytest.raises(CheckpointError, match=r"'q_proj' is cut.*tensor_parallel\.save"):
        fp4dispatch.save_quantized(loaded(path, 0, 2), tmp_path / "again")
    assert not (tmp_path / "again").exists()
