"""Humming (humming-kernels 0.1.19) without a GPU: what its modules take, return and check, as far as we use them.

A test puts :func:`modules` into ``sys.modules``. :func:`package` is for processes that a test starts: a folder for the
search path. With a folder in ``HUMMING_FAKE``, each kernel is recorded there when it is compiled, and a layer waits for
its kernel as for the lock of Humming's cache. ``HUMMING_FAKE_FAULT`` plants a fault into compiling.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import time
import types
from pathlib import Path
from typing import ClassVar

import pytest
import torch

from fp4dispatch import formats

NO_TABLE_K = 896
"""For layers of this K there are no choices, as for some small layers of the real one."""
WAIT_S = 60.0


class LayerConfig:
    def __init__(self, n, k):
        self.n, self.k = n, k

    def to_str(self):
        return json.dumps({"shape_n": self.n, "shape_k": self.k})


class Schema:
    """The schema of the stored weights, and that of the transformed ones."""

    @classmethod
    def from_config(cls, config):
        assert config == {"quant_method": "modelopt", "quant_algo": "nvfp4"}
        return cls()

    def to_humming_schema(self, dtype):
        assert dtype == torch.bfloat16
        return self


def prepare_layer_config(shape_n, shape_k, weight_schema, *, torch_dtype, device):
    assert (type(weight_schema), torch_dtype) == (Schema, torch.bfloat16)
    assert isinstance(device, torch.device)
    return LayerConfig(shape_n, shape_k)


def get_heuristics_config(config, *, device):
    """Return choices by range of M; the block depends on the layer, so that layers share no kernel by accident."""
    assert isinstance(device, torch.device)
    if config.k == NO_TABLE_K:
        raise AssertionError
    return [[0, 1, {"block": 8}], [1, 37, {"block": 16}], [37, 1 << 30, {"block": 64}]]


def _recorded(layer, tuning):
    if "HUMMING_FAKE" not in os.environ:
        return None
    key = json.dumps([json.loads(layer), tuning])
    return Path(os.environ["HUMMING_FAKE"]) / hashlib.md5(key.encode()).hexdigest()


def compiled(folder):
    """Return (N, K, block, process) of each kernel, in the order of compiling."""
    in_order = sorted(json.loads(file.read_text()) for file in folder.iterdir())
    return [tuple(kernel) for _, *kernel in in_order]


class HummingKernel:
    """Compiles when it is made, then loads the kernel, which only the process that measures may do."""

    @classmethod
    def prepare_kernels(cls, layer_config, compute_config, tuning_config, device):
        assert compute_config is None
        assert isinstance(device, torch.device)
        return [cls(layer_config, each).kernel_id for _, _, each in json.loads(tuning_config)]

    def __init__(self, layer, tuning):
        if fault := os.environ.get("HUMMING_FAKE_FAULT"):
            Path(os.environ["HUMMING_FAKE"], "pid").write_text(str(os.getpid()))
            if fault == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            if fault == "hangs":
                time.sleep(120)
            raise RuntimeError(fault)
        sizes = json.loads(layer)
        if (file := _recorded(layer, tuning)) is not None:
            assert not file.exists(), "compiled twice"
            part = file.with_suffix(".part")
            kernel = (sizes["shape_n"], sizes["shape_k"], tuning["block"], os.getpid())
            part.write_text(json.dumps([time.monotonic_ns(), *kernel]))
            part.rename(file)
        self.register_kernel()

    def register_kernel(self):
        raise AssertionError("a kernel was loaded onto the GPU")


class HummingLayer(torch.nn.Module):
    """Takes and checks what the real one takes (layer.py, schema/modelopt.py)."""

    chosen: ClassVar = []

    def __init__(self, shape_n, shape_k, weight_config, *, torch_dtype):
        super().__init__()
        assert weight_config == {"quant_method": "modelopt", "quant_algo": "nvfp4"}
        assert torch_dtype == torch.bfloat16
        sizes = {
            "weight": ((shape_n, shape_k // 2), torch.uint8),
            "weight_scale": ((shape_n, shape_k // 16), torch.float8_e4m3fn),
            "weight_scale_2": ((1,), torch.float32),
        }
        for name, (shape, dtype) in sizes.items():
            setattr(self, name, torch.nn.Parameter(torch.empty(shape, dtype=dtype), requires_grad=False))
        self.humming_config = None

    def load_from_tensors(self, tensors):
        assert set(tensors) == {"weight", "weight_scale", "weight_scale_2"}
        self.load_state_dict(tensors, strict=False)

    def transform(self):
        n, half = self.weight.shape
        self.humming_config = LayerConfig(n, 2 * half)

    def forward(self, x, outputs=None, tuning_config=None):
        HummingLayer.chosen.append(tuning_config)
        self._wait(tuning_config)
        w = formats.nvfp4_dequantize(self.weight, self.weight_scale, self.weight_scale_2)
        outputs.copy_(x.float() @ w.t())
        return outputs

    def _wait(self, tuning):
        file = _recorded(self.humming_config.to_str(), tuning)
        until = time.monotonic() + WAIT_S
        while file is not None and not file.exists() and not _is_over(file.with_name("pid")):
            if time.monotonic() > until:  # not an Exception, which a run would only write down
                pytest.fail(f"nobody compiled {self.humming_config.to_str()} {tuning} ahead")
            time.sleep(0.01)


def _is_over(pid):
    """Whether the process that compiles has ended; nobody has asked for its status yet, or it is gone."""
    try:
        return "zombie" in Path("/proc", pid.read_text(), "status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return pid.exists() and bool(pid.read_text())


def modules():
    """Return name -> module; only what ours imports."""
    names = {
        "humming.layer": {"HummingLayer": HummingLayer},
        "humming.schema": {"BaseWeightSchema": Schema},
        "humming.transform": {"prepare_layer_config": prepare_layer_config},
        "humming.tune": {"get_heuristics_config": get_heuristics_config},
        "humming.kernel": {},
        "humming.kernel.humming": {"HummingKernel": HummingKernel},
    }
    found = {}
    for name, members in names.items():
        found[name] = types.ModuleType(name)
        vars(found[name]).update(members)
    return found


def package(folder):
    """Write a package ``humming`` that stands for the fake, for the search path of other processes."""
    (folder / "humming").mkdir(parents=True)
    text = "import sys\nfrom tests import humming_fake\nsys.modules.update(humming_fake.modules())\n"
    (folder / "humming" / "__init__.py").write_text(text)
    return folder
