"""SGLang on a CPU for the tests: its plug-ins, its configuration, its loader; no kernels and no server.

It needs an environment of its own, with older versions than the integrations have::

    pip install --no-deps sglang==0.5.23 transformers==5.19.0 compressed-tensors==0.18.0
    pip install torch==2.13.0 <what "import sglang.srt.layers.quantization" asks for>
    python -m pytest tests/unit/test_sglang.py
"""

from __future__ import annotations

import contextlib
import importlib.abc
import importlib.machinery
import importlib.util
import json
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests import tiny_models
from tests.llmcompressor_cases import STORED
from tests.transformers_cases import quantised_modules


class _Stub(types.ModuleType):
    """A module that has every name; SGLang imports torchvision for images, and its wheels are for CUDA."""

    __path__: list[str] = []  # noqa: RUF012

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


class _StubFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        found = name.partition(".")[0] == "torchvision"
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if found else None

    def create_module(self, spec: Any) -> Any:
        return _Stub(spec.name)

    def exec_module(self, module: Any) -> None:
        pass


def prepare() -> None:
    """Load SGLang's plug-ins, ours among them, and build its groups of one process."""
    if importlib.util.find_spec("torchvision") is None:
        sys.meta_path.append(_StubFinder())
    from sglang.srt.plugins import load_plugins

    load_plugins()


def configure(path: Path, *arguments: str) -> Any:
    """Parse a command line, publish its configuration, and return SGLang's configuration of the model."""
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.distributed import parallel_state
    from sglang.srt.layers.quantization.fp4_utils import initialize_fp4_gemm_config
    from sglang.srt.runtime_context import SpawnRanks, publish
    from sglang.srt.server_args import prepare_server_args

    line = ["--model-path", str(path), "--device", "cpu", "--skip-tokenizer-init", "--attention-backend"]
    args = prepare_server_args([*line, "torch_native", *arguments])
    args.resolve_once()
    publish(args, role="scheduler", ranks=SpawnRanks(world_rank=0))
    if not torch.distributed.is_initialized():
        parallel_state.init_distributed_environment(
            world_size=1,
            rank=0,
            local_rank=0,
            backend="gloo",
            distributed_init_method="tcp://127.0.0.1:29671",
        )
        parallel_state.initialize_model_parallel(backend="gloo")
    initialize_fp4_gemm_config()
    return ModelConfig.from_server_args(args)


def load(path: Path, *arguments: str) -> Any:
    """Load a model with SGLang's own loader."""
    from sglang.srt.configs.device_config import DeviceConfig
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.model_loader import get_model

    config = configure(path, *arguments)
    return get_model(model_config=config, load_config=LoadConfig(), device_config=DeviceConfig("cpu"))


def checkpoint(format: str, to: Path) -> Path:
    """Write a tiny Llama; the shards that SGLang fuses have different global scales.

    ``modelopt``, ``modelopt-a16``, ``fp8``, or the name of a directory that llm-compressor wrote.
    """
    if (STORED / format).is_dir():
        to.mkdir()
        for file in (STORED / format).iterdir():
            (to / file.name).write_bytes(file.read_bytes())
    else:
        import transformers

        from fp4dispatch.checkpoints import save_quantized
        from fp4dispatch.models.replace import replace_linears

        model = tiny_models.build("Llama", transformers, torch.bfloat16)
        model.config.architectures = ["LlamaForCausalLM"]
        replace_linears(model, "fp8" if format == "fp8" else "nvfp4", activation="bf16" if "a16" in format else "any")
        for layer in quantised_modules(model).values():
            layer.input_scale = None if "a16" in format else torch.tensor(0.01)
        save_quantized(model, to, "modelopt")
    tensors = load_file(to / "model.safetensors")
    factors = {"k_proj": 0.5, "v_proj": 4.0, "up_proj": 0.25}
    names = ("weight_scale_2", "weight_global_scale", *(("weight_scale",) if format == "fp8" else ()))
    for name in tensors:
        module, last = name.split(".")[-2:]
        if last in names:
            tensors[name] = tensors[name] * factors.get(module, 1.0)
    save_file(tensors, to / "model.safetensors", {"format": "pt"})
    return to


@contextlib.contextmanager
def ranks(rank: int, size: int) -> Iterator[None]:
    """Build layers as one rank of several; SGLang's groups are not built for them."""
    from sglang.srt.layers.linear import _LogicalGroup
    from sglang.srt.runtime_context import get_parallel

    group, named = _LogicalGroup(rank, size), {}
    for name in ("tp", "attn_tp", "moe_tp"):
        named |= {f"{name}_size": size, f"{name}_rank": rank, f"{name}_group": group}
    with get_parallel().override(**named):
        yield


def quant_config(path: Path) -> dict[str, Any]:
    """Return the quantization_config of a directory."""
    block: dict[str, Any] = json.loads((path / "config.json").read_text("utf-8"))["quantization_config"]
    return block
