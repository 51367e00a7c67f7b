"""What one eager call costs the host: our layers on each backend beside nn.Linear, torch's and FlashInfer's functions.

    python -m bench.host_cost --commit HASH --json bench/results/host-cost-CARD.json

Calls are launched in blocks without waiting for the GPU, so that the time is the host's alone; methods take turns, and
the median of the blocks is reported. Every method is first held to the exact product: what is wrong is not timed. Each
block starts with calls that no clock sees: those after another method find the caches of the core cold, which showed as
half a microsecond for whichever layer came first of its kind.

Where a kernel takes longer than its launch, as some do at 512 tokens, the GPU falls behind and the host does not, until
the queue of the driver is full: a block and what goes before it are ``CALLS`` calls of two launches, half of a queue.

FlashInfer's functions compile before their first call, DeepGEMM's for minutes. A record has at least one of them for
each number of tokens: exits with 1 where ``--peers`` asked for them and none could run, and says why not. Exits with 1
too if a layer on the backend that auto chooses costs more than ``--limit`` times nn.Linear. ``nothing launched`` is the
layer with a backend that does nothing: what this package itself costs, on any machine. ``an output`` is a module that
only allocates: the least that any layer can cost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from bench.shared import commandline
from fp4dispatch import formats
from fp4dispatch.benchmark import machine
from fp4dispatch.benchmark.check import QUANTISED_TILE_ERROR, worst_tile
from fp4dispatch.benchmark.methods.base import Card
from fp4dispatch.benchmark.reports import records
from fp4dispatch.errors import Fp4DispatchError
from fp4dispatch.models.linear import FP4Linear, FP8Linear
from fp4dispatch.models.quantized_linear import QuantizedLinear
from fp4dispatch.tune.timing import Sample, WallEngine, take_turns

BASELINE = "nn.Linear"
TOKENS = (1, 16, 128, 512)
CALLS, UNTIMED = 200, 20
"""Of a block: those that are timed, and those before. Of two launches each, under the thousand that a driver queues."""
FLASHINFER = "flashinfer"
PEERS = {
    "none": (),
    "quick": ("flashinfer.bmm_fp8 (cublas)",),
    "deepgemm": ("flashinfer.fp8_blockscale_gemm_sm90",),
    "slow": ("flashinfer.bmm_fp8 (cublas)", "flashinfer.fp8_blockscale_gemm_sm90"),
}
"""FlashInfer's functions by what ``--peers`` asks for."""


@dataclass(frozen=True)
class Method:
    """One kind of call. ``backend``: what runs it; ``limited``: held to the limit. ``error``: of its worst tile."""

    call: Callable[[], Tensor]
    backend: str = "torch"
    limited: bool = False
    error: float | None = None


def layer_methods(linear: nn.Linear, x: Tensor) -> tuple[dict[str, Method], dict[str, str]]:
    """Return our layers on the backend that auto chooses, on each by name, and on none."""
    found: dict[str, Method] = {}
    lacks: dict[str, str] = {}
    kinds: dict[str, Callable[..., QuantizedLinear]] = {
        "FP8Linear row": lambda **how: FP8Linear.from_linear(linear, scaling="row", **how),
        "FP8Linear tensor": lambda **how: FP8Linear.from_linear(linear, scaling="tensor", **how),
        "FP8Linear block128": lambda **how: FP8Linear.from_linear(linear, scaling="block128", **how),
        "FP4Linear": lambda **how: FP4Linear.from_linear(linear, **how),
    }
    for kind, make in kinds.items():
        decision = make().decisions()[0][1]
        for name in (None, *(v.backend for v in decision.verdicts if v.can_run)):
            label = kind if name is None else f"{kind}, {name}"
            try:
                layer = make(backend=name)
                spec = layer.bind(x.dtype).spec
                route = spec.routes[spec.index(x.shape[0])]
                error = _error(layer(x), linear, x)
            except Exception as raised:  # a backend that cannot run is listed with its reason
                lacks[label] = f"{type(raised).__name__}: {str(raised).splitlines()[0]}"
                continue
            coarser = "nvfp4" if kind == "FP4Linear" else "fp8"
            if error > QUANTISED_TILE_ERROR[coarser]:
                lacks[label] = f"WRONG: a tile is off by {error:.3f}"
                continue
            found[label] = Method(_of(layer, x), f"{route.backend} ({route.activation})", name is None, error)
    idle = kinds["FP8Linear row"]()
    idle(x)
    idle.bind(x.dtype).ready[x.shape[0]] = (lambda *operands: None, *idle.bind(x.dtype).ready[x.shape[0]][1:])
    found["FP8Linear row, nothing launched"] = Method(_of(idle, x), "none")
    return found, lacks


def torch_methods(linear: nn.Linear, x: Tensor) -> dict[str, Method]:
    """Return nn.Linear, torch.mm, torch._scaled_mm on operands that are quantised already, and the least there is."""
    weight = linear.weight.detach()
    transposed = weight.t()
    found = {
        BASELINE: Method(_of(linear, x)),
        "torch.mm": Method(lambda: torch.mm(x, transposed)),
        "an output": Method(_of(_Allocate(weight.shape[0]), x), "none"),
    }
    if not x.is_cuda or torch.cuda.get_device_capability() < (8, 9):
        return found
    for scaling in ("tensor", "row"):
        a, b = formats.fp8_quantize(x, scaling), formats.fp8_quantize(weight, scaling)
        scales = (a.scale, b.scale) if scaling == "tensor" else (a.scale.view(-1, 1), b.scale.view(1, -1))
        found[f"torch._scaled_mm {scaling}"] = Method(_scaled_mm(a.data, b.data.t(), *scales, x.dtype))
    return found


def flashinfer_methods(linear: nn.Linear, x: Tensor, peers: str) -> tuple[dict[str, Method], dict[str, str]]:
    """Return FlashInfer's functions that ``--peers`` names, where they can be imported and run."""
    found: dict[str, Method] = {}
    lacks: dict[str, str] = {}
    weight = linear.weight.detach()

    def bmm_fp8() -> Callable[[], Tensor]:
        import flashinfer

        a, b = formats.fp8_quantize(x, "tensor"), formats.fp8_quantize(weight, "tensor")
        left, right = a.data.unsqueeze(0), b.data.t().unsqueeze(0)
        out = x.new_empty(1, x.shape[0], weight.shape[0])
        return lambda: flashinfer.bmm_fp8(left, right, a.scale, b.scale, x.dtype, out, "cublas")[0]

    def blockscale() -> Callable[[], Tensor]:
        from flashinfer.gemm import fp8_blockscale_gemm_sm90

        b = formats.fp8_quantize(weight, "block128")
        return lambda: fp8_blockscale_gemm_sm90(x, b.data, None, b.scale)

    makers = {"flashinfer.bmm_fp8 (cublas)": bmm_fp8, "flashinfer.fp8_blockscale_gemm_sm90": blockscale}
    for name in PEERS[peers]:
        make = makers[name]
        try:
            call = make()
            error = _error(call(), linear, x)
        except Exception as error_:  # another's package may fail in any way
            lacks[name] = f"{type(error_).__name__}: {str(error_).splitlines()[0] if str(error_) else ''}"
            continue
        if error > QUANTISED_TILE_ERROR["fp8"]:
            lacks[name] = f"WRONG: a tile is off by {error:.3f}"
        else:
            found[name] = Method(call, FLASHINFER, error=error)
    return found, lacks


class _Allocate(nn.Module):
    """Allocates the output and nothing else."""

    def __init__(self, n: int) -> None:
        super().__init__()
        self.n = n

    def forward(self, x: Tensor) -> Tensor:
        return x.new_empty(x.shape[0], self.n)


def _of(module: nn.Module, x: Tensor) -> Callable[[], Tensor]:
    return lambda: module(x)


def _scaled_mm(a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, dtype: torch.dtype) -> Callable[[], Tensor]:
    return lambda: torch._scaled_mm(a, b, a_scale, b_scale, out_dtype=dtype)


def _error(out: Tensor, linear: nn.Linear, x: Tensor) -> float:
    bias = linear.bias.float() if linear.bias is not None else None
    return worst_tile(out, nn.functional.linear(x.float(), linear.weight.float(), bias)).error


def measure(methods: dict[str, Method], card: Card, calls: int, rounds: int) -> dict[str, Sample]:
    """Time blocks of calls in turns, after some that are not timed; between blocks the device is waited for."""
    wall, engine = WallEngine(), machine.engine_for(card)

    def block(method: Method) -> Callable[[], float]:
        replay = wall.record(lambda i: method.call(), calls, 1).replay

        def run() -> float:
            engine.finish()
            for _ in range(UNTIMED):
                method.call()
            took = replay()
            engine.finish()
            return took

        return run

    replays = {name: block(method) for name, method in methods.items()}
    return take_turns(replays, dict.fromkeys(methods, calls), rounds=rounds, limit_us=6e7)


def run(
    card: Card, n: int, k: int, tokens: tuple[int, ...], calls: int, rounds: int, peers: str
) -> Iterator[dict[str, Any]]:
    """Measure every method for each number of tokens; yield all that is known after each, as plain data."""
    torch.manual_seed(0)
    linear = nn.Linear(k, n, bias=False, device=card.device, dtype=torch.bfloat16).requires_grad_(False)
    method = (
        f"median of {rounds} blocks of {calls} calls in turns, each after {UNTIMED} untimed, wall clock, N={n}, K={k}"
    )
    rows: list[dict[str, Any]] = []
    left_out: dict[str, str] = {}
    for m in tokens:
        x = torch.randn(m, k, device=card.device, dtype=torch.bfloat16)
        with torch.inference_mode():
            methods = torch_methods(linear, x)
            ours, lacks = layer_methods(linear, x)
            methods |= ours
            theirs, more = flashinfer_methods(linear, x, peers)
            methods, lacks = methods | theirs, lacks | more
            samples = measure(methods, card, calls, rounds)
        left_out |= {f"{name}, M={m}": why for name, why in lacks.items()}
        base = samples[BASELINE].us
        for name, used in methods.items():
            sample = samples[name]
            row = {"m": m, "what": name, "backend": used.backend, "us": sample.us, "spread": sample.spread}
            rows.append(row | {"ratio": sample.us / base, "limited": used.limited, "tile_error": used.error})
        yield {"n": n, "k": k, "rows": rows, "left_out": left_out, "method": method, "calls": calls, "rounds": rounds}


def table(result: dict[str, Any]) -> str:
    """Return the kept rows as markdown: microseconds and the ratio to nn.Linear for each number of tokens."""
    cost = result["host_cost"]
    tokens = list(dict.fromkeys(row["m"] for row in cost["rows"]))
    names = list(dict.fromkeys(row["what"] for row in cost["rows"]))
    cells = {(row["what"], row["m"]): row for row in cost["rows"]}
    heads = [text for m in tokens for text in (f"M={m}, us", "of nn.Linear")]
    lines = [f"| call | runs on | {' | '.join(heads)} |", "|---|---|" + "---|" * len(heads)]
    for name in names:
        found = [cells.get((name, m)) for m in tokens]
        backend = next(row["backend"] for row in found if row)
        columns = [text for row in found for text in ((f"{row['us']:.1f}", f"{row['ratio']:.2f}") if row else ("", ""))]
        lines.append(f"| {name} | {backend} | {' | '.join(columns)} |")
    return "\n".join(lines)


def over(result: dict[str, Any], limit: float) -> list[str]:
    """Return one sentence for each layer, as auto runs it, that costs more than the limit."""
    return [
        f"{row['what']} on {row['backend']} at M={row['m']}: {row['ratio']:.2f} times nn.Linear, limit {limit}"
        for row in result["host_cost"]["rows"]
        if row["limited"] and not row["ratio"] <= limit
    ]


def lacking(result: dict[str, Any], peers: str) -> list[str]:
    """Return one sentence for each number of tokens without a function of FlashInfer's, where they were asked for."""
    if peers == "none":
        return []
    cost = result["host_cost"]
    tokens = dict.fromkeys(row["m"] for row in cost["rows"])
    have = {row["m"] for row in cost["rows"] if row["backend"] == FLASHINFER}
    lines = []
    for m in (m for m in tokens if m not in have):
        left = cost["left_out"].items()
        why = "; ".join(
            f"{name}: {said}" for name, said in left if name.startswith("flashinfer.") and name.endswith(f", M={m}")
        )
        lines.append(
            f"no function of FlashInfer's at M={m}, which --peers {peers} asks for (none leaves them out): {why}"
        )
    return lines


def main(words: Sequence[str] | None = None) -> int:
    """Measure, print the table, write the record."""
    parser = commandline.parser(__doc__)
    commandline.takes_record(parser, needed=True)
    parser.add_argument("--device")
    parser.add_argument("-n", type=int, default=4096)
    parser.add_argument("-k", type=int, default=4096)
    parser.add_argument("--tokens", type=int, nargs="+", default=list(TOKENS))
    parser.add_argument("--calls", type=int, default=CALLS, help="in a block; under the thousand that a driver queues")
    parser.add_argument("--rounds", type=int, default=31)
    parser.add_argument(
        "--peers",
        choices=tuple(PEERS),
        default="slow",
        help="FlashInfer's functions; deepgemm: its block-scale GEMM, which compiles for minutes; slow: bmm_fp8 too",
    )
    parser.add_argument("--limit", type=float, default=1.2)
    arguments = commandline.parse(parser, words)
    try:
        card = machine.card(arguments.device)
    except Fp4DispatchError as error:
        parser.error(str(error))
    sizes = (arguments.n, arguments.k, tuple(arguments.tokens), arguments.calls, arguments.rounds)
    facts, result = machine.facts(card, arguments.commit), {}
    for result["host_cost"] in run(card, *sizes, arguments.peers):  # a time limit loses what it did not reach
        records.write(arguments.json, "host cost", facts, result)
    for name, why in result["host_cost"]["left_out"].items():
        print(f"left out: {name}: {why[:200]}")
    print(table(result))
    missed, lacks = over(result, arguments.limit), lacking(result, arguments.peers)
    print("\n".join(missed) or f"every layer that auto runs costs at most {arguments.limit} times nn.Linear")
    for line in lacks:
        print(line)
    return 1 if missed or lacks else 0


if __name__ == "__main__":
    raise SystemExit(main())
