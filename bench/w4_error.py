"""What w4a16, w4a8 and w4a4 lose against the exact product of the same NVFP4 weights. Numbers only, on a CPU.

    python -m bench.w4_error --json bench/results/w4-error-x86_64.json

The weights are quantised once; every format multiplies these same weights. "Exact" is the float64 product of the
bfloat16 activations and the dequantised weights, so w4a16 shows what one rounding to bfloat16 costs. The formats are
the reference backend's, which defines them: w4a8 is what the kernels compute, w4a4 is emulated here. ``weights`` is
what quantising the weights costs in the first place, against the product with the weights before it.

Data: ``gaussian``; ``heavy-tailed`` (Student's t with 3 degrees of freedom, weights and activations); ``outlier
channels`` (Gaussian, 1 % of the input channels 30 times as large, as in decoders); and the linear layers of
all-MiniLM-L6-v2 on the demo's sentences, layer by layer on the inputs that they really get, and end to end.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from bench.shared import commandline
from fp4dispatch import formats
from fp4dispatch.backends.base import LinearWeights
from fp4dispatch.backends.reference import ReferenceBackend
from fp4dispatch.benchmark import machine
from fp4dispatch.benchmark.reports import records
from fp4dispatch.cli.demos import minilm as demo
from fp4dispatch.models.replace import replace_linears
from fp4dispatch.problem import Problem

FORMATS = {"w4a16": "bf16", "w4a8": "fp8", "w4a4": "nvfp4"}
SIZES = (256, 1024, 4096)
"""M, N, K of the drawn problems."""


class Silent:
    """A progress bar that shows nothing."""

    def note(self, text: str) -> None:
        """Ignore."""

    def step(self, count: int = 1) -> None:
        """Ignore."""


def errors(x: Tensor, w: Tensor) -> dict[str, dict[str, float]]:
    """Return relative errors of each format: of the whole product (root mean square), and of the worst token."""
    m, (n, k) = x.shape[0], w.shape
    q = formats.nvfp4_quantize(w)
    weights = LinearWeights("nvfp4_gemm", "nvfp4", n, k, q.data, q.sf, q.global_scale.reshape(1), (n,))
    backend = ReferenceBackend()
    prepared = backend.prepare(weights)
    exact = x.double() @ formats.nvfp4_dequantize(*q).double().t()
    found = {"weights": _relative(exact, x.double() @ w.double().t())}
    for name, activation in FORMATS.items():
        problem = Problem("nvfp4_gemm", m, n, k, activation)
        out = torch.empty(m, n, dtype=torch.bfloat16)
        backend.run(backend.plan(problem, prepared), prepared, x, out)
        found[name] = _relative(out.double(), exact)
    return found


def _relative(got: Tensor, want: Tensor) -> dict[str, float]:
    token = (got - want).norm(dim=1) / want.norm(dim=1).clamp(min=1e-300)
    return {"rms": float((got - want).norm() / want.norm()), "worst token": float(token.max())}


def drawn() -> Iterator[dict[str, Any]]:
    """Yield a row for each kind of drawn data."""
    student = torch.distributions.StudentT(3.0)

    def channels(*shape: int) -> Tensor:
        x = torch.randn(shape)
        x[:, torch.randperm(shape[1])[: shape[1] // 100]] *= 30
        return x

    kinds: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor]]] = {
        "gaussian": (torch.randn, torch.randn),
        "heavy-tailed (t, 3)": (lambda *s: student.sample(s), lambda *s: student.sample(s)),
        "outlier channels": (channels, torch.randn),
    }
    m, n, k = SIZES
    for name, (activations, weights) in kinds.items():
        torch.manual_seed(0)
        yield {"data": name, "layers": 1, "m": m, "n": n, "k": k} | errors(activations(m, k).bfloat16(), weights(n, k))


def model() -> dict[str, Any]:
    """Return the errors of the embedding model: the layers' (root mean square over all of them), and end to end."""
    tokenizer, original = demo.load(demo.model_dir(), torch.device("cpu"))
    pairs = demo.sentence_pairs()
    seen: dict[str, list[Tensor]] = {}
    hooks = [
        layer.register_forward_pre_hook(
            lambda layer, args, name=name: seen.setdefault(name, []).append(args[0].reshape(-1, args[0].shape[-1]))
        )
        for name, layer in original.named_modules()
        if isinstance(layer, nn.Linear)
    ]
    before, _ = demo.embed(tokenizer, original, pairs, Silent(), "original")
    for hook in hooks:
        hook.remove()
    layers = [
        errors(torch.cat(inputs)[:512].bfloat16(), original.get_submodule(name).weight.detach())
        for name, inputs in seen.items()
        if "pooler" not in name
    ]
    row: dict[str, Any] = {"data": "all-MiniLM-L6-v2", "layers": len(layers), "m": 512}
    for name in ("weights", *FORMATS):
        row[name] = {
            "rms": (sum(layer[name]["rms"] ** 2 for layer in layers) / len(layers)) ** 0.5,
            "worst token": max(layer[name]["worst token"] for layer in layers),
        }
    row["embedding"] = {}
    for name, activation in FORMATS.items():
        tokenizer, quantised = demo.load(demo.model_dir(), torch.device("cpu"))
        replace_linears(quantised, "nvfp4", activation=activation, backend="reference")
        after, _ = demo.embed(tokenizer, quantised, pairs, Silent(), name)
        quality = demo.compare(before, after)
        row["embedding"][name] = {
            "mean cosine": quality.cosine_mean,
            "lowest cosine": min(quality.cosines),
            "rank correlation": quality.spearman,
        }
    return row


def main(words: Sequence[str] | None = None) -> None:
    """Measure, print, and write the file."""
    parser = commandline.parser(__doc__)
    commandline.takes_record(parser)
    arguments = commandline.parse(parser, words)
    rows = [*drawn(), model()]
    for row in rows:
        print(f"{row['data']:<20}", *(f"{name} {row[name]['rms']:.4f}" for name in ("weights", *FORMATS)), sep="  ")
    print(json.dumps(rows[-1]["embedding"], indent=1))
    if arguments.json:
        facts = machine.facts(machine.card("cpu"), arguments.commit)
        records.write(arguments.json, "w4 error", facts, {"w4_error": rows})


if __name__ == "__main__":
    main()
