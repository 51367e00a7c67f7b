"""Breakable CUDA graphs around whole decoders: eager against graphs, capture time, memory, and torch.compile beside it.

    python -m bench.breakable --json bench/results --commit HASH

Models have the layer sizes of Llama-3.1-8B and Qwen3-8B and random weights. A prefill is a batch of requests of one
length, without a cache; its logits are compared with those of the model without graphs before any time counts. Calls
that eager runs faster stay eager, as `enable` has measured: they are counted apart from other rejects. Decode steps use
a static cache, and the state of a step does not depend on the previous token.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from bench import decoder
from bench.shared import commandline
from fp4dispatch import graphs as breakable_graphs
from fp4dispatch.benchmark import machine
from fp4dispatch.benchmark.check import relative_error
from fp4dispatch.benchmark.reports import records
from fp4dispatch.graphs.model import Graphs

QWEN = {
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
}
"""https://huggingface.co/Qwen/Qwen3-8B/blob/main/config.json"""
MODELS = {"Llama-3.1-8B": ("Llama", decoder.SIZES), "Qwen3-8B": ("Qwen3", QWEN)}
REQUESTS = (1, 4, 32)
TOKENS = (32, 64, 128, 256, 512, 1024, 4096)
RAGGED = (48, 200, 777, 3000)
"""Numbers of tokens that no bucket has: padded to the next."""
DECODE = (1, 16, 64)
REPEATS = 7


def milliseconds(work: Callable[[], object], repeats: int = REPEATS) -> float:
    """Return the median time of a call, host and device, after one that does not count."""
    work()
    times = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        start = time.perf_counter()
        work()
        torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times)


def prefills(tokens: tuple[int, ...]) -> list[tuple[int, int]]:
    """Return (requests, tokens of each)."""
    return [(r, n // r) for r in REQUESTS for n in sorted({*tokens, *RAGGED}) if n // r > 1]


def eagerly(graphs: Graphs, work: Callable[[], Any]) -> Any:
    """Run work as if there were no graphs."""
    with graphs.declare({"decode_verify": True}):
        return work()


class Wanted:
    """Runs work in graphs, and counts by reason its calls that ran eagerly all the same."""

    def __init__(self, graphs: Graphs) -> None:
        self._graphs, self.rejects = graphs, Counter[str]()

    def __call__(self, work: Callable[[], Any]) -> Any:
        """Return what the work returns."""
        before = Counter(self._graphs.stats.as_dict()["reasons"])
        found = work()
        self.rejects += Counter(self._graphs.stats.as_dict()["reasons"]) - before
        return found


def measure(model: nn.Module, graphs: Graphs, vocabulary: int, tokens: tuple[int, ...]) -> dict[str, Any]:
    """Compare and time every prefill and every decode step."""
    rows = []
    wanted = Wanted(graphs)
    for requests, length in prefills(tokens):
        ids = torch.randint(vocabulary, (requests, length), device="cuda")

        def call(ids: Tensor = ids) -> Tensor:
            return model(input_ids=ids, use_cache=False, logits_to_keep=1).logits

        want = eagerly(graphs, call).clone()
        error = relative_error(wanted(call), want)
        rows.append(
            {
                "requests": requests,
                "tokens": requests * length,
                "error": error,
                "eager_ms": eagerly(graphs, lambda call=call: milliseconds(call)),
                "graph_ms": wanted(lambda call=call: milliseconds(call)),
                "runs_eagerly": [r.condition for r in graphs.why_not(requests * length, {})],
            }
        )
    steps = []
    for batch in DECODE:
        prompts = torch.randint(vocabulary, (batch, 128), device="cuda")
        held = decoder.Decoder(model, prompts, 256)

        def run(call: Callable[[Callable[[], Any]], Any], held: decoder.Decoder = held) -> list[tuple[Tensor, Tensor]]:
            eagerly(graphs, held.start)  # the steps start from the same cache
            found = []
            for _ in range(4):
                call(held.step)
                found.append((held.logits.float().clone(), held.token.clone()))
            return found

        want = run(lambda step: eagerly(graphs, step))
        error = decoder.difference(run(wanted), want)
        steps.append(
            {
                "batch": batch,
                "error": error,
                "eager_ms": eagerly(graphs, lambda held=held: milliseconds(held.step)),
                "graph_ms": wanted(lambda held=held: milliseconds(held.step)),
            }
        )
    return {"prefill": rows, "decode": steps, "rejects": dict(wanted.rejects)}


def compiled(model: nn.Module, vocabulary: int, tokens: int) -> list[dict[str, Any]]:
    """Time torch.compile of the same model: seconds of the first calls, and a call afterwards."""
    found = []
    ids = torch.randint(vocabulary, (1, tokens), device="cuda")
    for mode in ("reduce-overhead", "default"):
        torch._dynamo.reset()
        fn = torch.compile(model.model, mode=mode)

        def call(fn: Any = fn) -> Tensor:
            torch.compiler.cudagraph_mark_step_begin()
            return fn(input_ids=ids, use_cache=False).last_hidden_state

        start = time.perf_counter()
        for _ in range(3):  # warm-up and recording of its graphs
            call()
        torch.cuda.synchronize()
        row = {"mode": mode, "tokens": tokens, "compile_s": time.perf_counter() - start}
        if mode == "default":
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                call()
            row |= {"mode": "default, one graph", "ms": milliseconds(graph.replay)}
        else:
            row["ms"] = milliseconds(call)
        found.append(row)
    torch._dynamo.reset()
    return found


def run(name: str, fmt: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Build, quantise, capture and measure one model in one format."""
    family, sizes = MODELS[name]
    sizes = dict(sizes) | ({"num_hidden_layers": arguments.layers} if arguments.layers else {})
    began = time.perf_counter()
    model = decoder.build(sizes, torch.device("cuda"), family=family)
    backends = decoder.quantise(model, fmt)
    gc.collect()
    torch.cuda.empty_cache()
    built = time.perf_counter() - began
    held = torch.cuda.memory_reserved()
    start = time.perf_counter()
    graphs = breakable_graphs.enable(model, arguments.tokens, decode=DECODE, measure=not arguments.no_measure)
    took = time.perf_counter() - start
    if graphs.layers is None:
        raise SystemExit(f"{name} {fmt}: {graphs.disabled}")
    buckets = [
        {"tokens": rows, "capture_s": bucket.seconds, "bytes": bucket.nbytes, "pays_from": bucket.pays_from}
        for rows, bucket in sorted(graphs.layers.buckets.items())
    ]
    gc.collect()
    torch.cuda.empty_cache()  # activations of the eager calls
    extra = torch.cuda.memory_reserved() - held
    result = {"model": name, "format": fmt, "backends": backends, "build_s": built}
    result |= {"capture_s": took - graphs.measure_seconds, "measure_s": graphs.measure_seconds}
    result |= {"buckets": buckets, "extra_bytes": extra, "bridge_bytes": graphs.layers.bridges.nbytes()}
    result |= measure(model, graphs, sizes["vocab_size"], tuple(arguments.tokens))
    result["segments"], result["steps"] = graphs.stats.as_dict(), graphs.decode_stats.as_dict()
    breakable_graphs.disable(model)
    if fmt in arguments.compile:
        result["compile"] = compiled(model, sizes["vocab_size"], 256)
    return result


def table(results: list[dict[str, Any]]) -> str:
    """Return what was measured, one line for each model, format and batch."""
    lines = []
    for each in results:
        ran, mb = each["segments"], 1 / 2**20
        lines.append(
            f"{each['model']} {each['format']}: capture {each['capture_s']:.1f} s, measuring "
            f"{each['measure_s']:.1f} s, extra "
            f"{each['extra_bytes'] * mb:.0f} MB, of it bridges {each['bridge_bytes'] * mb:.0f} MB; "
            f"{ran['replays']} replays, {ran['rejects']} rejects {ran['reasons']}, of calls that should run in graphs "
            f"{each['rejects'] or 0}"
        )
        for b in each["buckets"]:
            lines.append(
                f"  bucket {b['tokens']}: {b['capture_s']:.2f} s, {b['bytes'] * mb:.0f} MB, "
                f"pays from {b['pays_from']} tokens on"
            )
        for row in each["prefill"]:
            lines.append(f"  prefill {row['requests']:>2} requests {row['tokens']:>5} tokens: {_speed(row)}")
        lines += [f"  decode {row['batch']:>3}: {_speed(row)}" for row in each["decode"]]
        for row in each.get("compile", ()):
            lines.append(f"  torch.compile {row['mode']} {row['tokens']}: {row['compile_s']:.1f} s, {row['ms']:.2f} ms")
    return "\n".join(lines)


def _speed(row: dict[str, Any]) -> str:
    ratio = row["eager_ms"] / row["graph_ms"]
    eagerly = f", runs eagerly: {', '.join(row['runs_eagerly'])}" if row.get("runs_eagerly") else ""
    return f"{row['eager_ms']:8.2f} -> {row['graph_ms']:8.2f} ms, {ratio:.2f}x, error {row['error']:.1e}{eagerly}"


def main(words: Sequence[str] | None = None) -> int:
    """Measure every model and format."""
    parser = commandline.parser(__doc__)
    commandline.takes_record(parser)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--formats", nargs="+", default=["bf16", "fp8_row", "nvfp4"])
    parser.add_argument("--tokens", nargs="+", type=int, default=list(TOKENS))
    parser.add_argument("--layers", type=int, help="fewer layers, to try the script")
    parser.add_argument(
        "--no-measure", action="store_true", help="replay all calls that fit, also where eager is faster"
    )
    parser.add_argument("--compile", nargs="*", default=[], help="formats for which torch.compile is measured too")
    arguments = commandline.parse(parser, words)
    facts = machine.facts(machine.card("cuda"), arguments.commit)
    results = []
    with torch.inference_mode(), decoder.repeatable_attention():
        for name in arguments.models:
            for fmt in arguments.formats:
                results.append(run(name, fmt, arguments))
                print(table(results[-1:]), flush=True)
                gc.collect()
                torch.cuda.empty_cache()
                if arguments.json:
                    records.write(arguments.json, "breakable graphs", facts, {"models": results})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
