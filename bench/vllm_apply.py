"""Layers called through ``apply`` of our LinearMethod of vLLM, under a CUDA graph, beside Humming and ``FP4Linear``.

The layer is vLLM's own where vLLM is installed. Elsewhere stand-ins take the place of the few names of vLLM that our
method imports (base classes, parameters without sharding, no tensor parallelism); the record says which. The method,
its loading and ``apply`` are ours either way. This measures layers, not an engine: no tokens per second.

    python -m bench.vllm_apply --json out.json --commit HASH
    python -m bench.vllm_apply --device cpu --shape 256x128 -m 4      # that the script works
"""

from __future__ import annotations

import argparse
import importlib.util
import logging
import sys
import tempfile
import types
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from bench.shared import commandline
from fp4dispatch.benchmark import machine, roofline, run
from fp4dispatch.benchmark.methods.base import Card, Launch, Method, Prepared
from fp4dispatch.benchmark.methods.ours import Layer, chosen
from fp4dispatch.benchmark.methods.peers import HummingNvfp4
from fp4dispatch.benchmark.methods.roster import everything
from fp4dispatch.benchmark.problems import shapes
from fp4dispatch.benchmark.problems.operands import Entering, Format, Operands
from fp4dispatch.benchmark.reports import records, report
from fp4dispatch.checkpoints.schemes import SCHEMES, from_linear
from fp4dispatch.cli.bench import parse_shape

REAL = importlib.util.find_spec("vllm") is not None
SUBJECT = "layers of vllm"
TOKENS = (1, 2, 4, 8, 16, 64, 256, 1024, 2048)


class StandInParameter(nn.Parameter):
    """A parameter of vLLM on one rank: a checkpoint's tensor is copied into it."""

    def __new__(cls, data: Tensor, **kwargs: Any) -> Any:
        """Make the parameter; what only matters for sharding is dropped."""
        return super().__new__(cls, data, requires_grad=False)

    def __init__(self, data: Tensor, **kwargs: Any) -> None:
        pass

    def weight_loader(self, parameter: nn.Parameter, loaded: Tensor) -> None:
        """Copy."""
        parameter.data.copy_(loaded.reshape(parameter.shape))


def stand_in() -> None:
    """Put modules with the names that our method imports in place of vLLM."""
    kinds = (
        "ChannelQuantScaleParameter",
        "GroupQuantScaleParameter",
        "ModelWeightParameter",
        "PerTensorScaleParameter",
    )
    content: dict[str, dict[str, Any]] = {
        "vllm": {},
        "vllm.config": {"get_current_vllm_config_or_none": lambda: None},
        "vllm.distributed": {"get_tp_group": None},
        "vllm.logger": {"init_logger": logging.getLogger},
        "vllm.model_executor": {},
        "vllm.model_executor.layers": {},
        "vllm.model_executor.layers.linear": {
            "LinearMethodBase": object,
            "register_weight_loader_v2_supported_method": lambda kind: kind,
        },
        "vllm.model_executor.parameter": dict.fromkeys(kinds, StandInParameter),
    }
    for name, names in content.items():
        sys.modules[name] = types.ModuleType(name)
        vars(sys.modules[name]).update(names)


class StandInLayer(nn.Module):
    """What our method reads and writes of a ``ReplicatedLinear``."""

    def __init__(self, k: int, n: int, method: Any) -> None:
        super().__init__()
        self.input_size, self.tp_rank, self.tp_size, self.quant_method = k, 0, 1, method
        method.create_weights(self, k, [n], k, n, torch.bfloat16, weight_loader=None)


def make_layer(k: int, n: int, config: Any) -> Any:
    """Return a layer of vLLM, or the stand-in."""
    if not REAL:
        from fp4dispatch.integrations.vllm.engine import Engine
        from fp4dispatch.integrations.vllm.stored import Fp4DispatchLinearMethod

        return StandInLayer(k, n, Fp4DispatchLinearMethod(Engine(), "layer", SCHEMES["modelopt-nvfp4"], "any", False))
    from vllm.model_executor.layers.linear import ReplicatedLinear

    return ReplicatedLinear(k, n, bias=False, params_dtype=torch.bfloat16, quant_config=config, prefix="layer")


class VllmApply(Method):
    """``layer.quant_method.apply(layer, x)``: weights of a ModelOpt checkpoint, the policy's choice."""

    name, ours = "vllm/apply", True
    format: Format = "nvfp4"
    what = f"apply of our LinearMethod, {'a layer of vLLM' if REAL else 'stand-ins for the classes of vLLM'}"

    def lacks(self, card: Card) -> str:
        """Return an empty text: the reference backend runs anywhere."""
        return ""

    def prepare(self, operands: Operands, copies: int, card: Card) -> Prepared:
        """Load the layer ``copies`` times, as vLLM does it."""
        config = None
        if REAL:
            from fp4dispatch.integrations.vllm.config import Fp4DispatchConfig

            config = Fp4DispatchConfig({"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": []})
        tensors = from_linear(SCHEMES["modelopt-nvfp4"], operands.weights("nvfp4"))
        layers = []
        for _ in range(copies):
            with card.device:
                layer = make_layer(operands.k, operands.n, config)
            for name, tensor in tensors.items():
                parameter = getattr(layer, name)
                parameter.weight_loader(parameter, tensor)
            layer.quant_method.process_weights_after_loading(layer)
            layers.append(layer)
        bound = layers[0].fp4dispatch.bind(torch.bfloat16)

        def at(x: Tensor) -> Launch:
            backend, activation = chosen(bound, x.shape[0])
            entering: Entering = "row" if activation == "fp8" else "nvfp4" if activation == "nvfp4" else "bf16"
            return Launch(lambda i: layers[i].quant_method.apply(layers[i], x), entering, f"{backend} ({activation})")

        return at


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Measure and return the record."""
    card = machine.card(args.device)
    engine = machine.engine_for(card)
    suite = shapes.catalogue().suite("quick" if card.arch else "cpu")
    asked = tuple(map(parse_shape, args.shape)) or suite.shapes
    suite = replace(suite, shapes=asked, m=tuple(sorted(set(args.m or TOKENS))))
    methods = [everything()[0], HummingNvfp4(), Layer("nvfp4", None), VllmApply()]
    runner = run.Runner(card, engine, methods, rounds=args.rounds)
    runner.peaks = roofline.measure(card, engine)
    outcome = runner.run(suite.shapes, suite.m)
    return report.document(suite, machine.facts(card, args.commit), runner.peaks, methods, outcome, [])


def main(words: Sequence[str] | None = None) -> None:
    """Run, print the table and write the record."""
    parser = commandline.parser(__doc__)
    commandline.takes_record(parser)
    parser.add_argument("--device")
    parser.add_argument("--shape", action="append", default=[], metavar="NxK")
    parser.add_argument("-m", type=int, action="append", default=[])
    parser.add_argument("--rounds", type=int, default=15)
    args = commandline.parse(parser, words)
    if not REAL:
        stand_in()
        measured = measure(args)
    else:
        from vllm.config import VllmConfig, set_current_vllm_config
        from vllm.distributed import init_distributed_environment, initialize_model_parallel

        init_distributed_environment(1, 0, f"file://{tempfile.mktemp()}", 0, backend="gloo")
        with set_current_vllm_config(VllmConfig()):
            initialize_model_parallel(1, 1)
            measured = measure(args)
    print(report.text(measured))
    if args.json:
        records.write(args.json, "bench", measured["facts"], measured, SUBJECT)


if __name__ == "__main__":
    main()
