"""Tensor parallel on 1, 2 and 4 GPUs: one GPU against N in one run, with CUDA graphs and without, and the error.

    python -m bench.tensor_parallel --json bench/results --commit HASH
    python -m bench.tensor_parallel --tiny --device cpu            # gloo, a small stack: that the script works

The layers have the sizes of Llama-3.1-8B and random weights: fused q, k and v, output, fused gate and up, down. A stack
of ``DEPTH`` such layers, with norms, an activation and a stand-in for attention (each token sees itself), is built on
every rank: whole, cut among the ranks, and dequantised in float32. All run on the same input. Before a time counts, the
error of the cut stack against float32 is compared with that of the whole one, and its graph with its eager call, bit
for bit: a row that is wrong prints WRONG and no time.

All ranks run the whole stack at the same time, each by itself: that is one GPU. Times are medians of the slowest rank.
"""

from __future__ import annotations

import argparse
import copy
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import fp4dispatch
from bench.shared import commandline
from fp4dispatch import formats
from fp4dispatch.benchmark import machine
from fp4dispatch.benchmark.check import relative_error
from fp4dispatch.benchmark.reports import records
from fp4dispatch.integrations.tensor_parallel import Column, Row, parallelize
from fp4dispatch.machine.ranks import Ranks
from fp4dispatch.models.quantized_linear import QuantizedLinear

SIZES = {"hidden": 4096, "heads": 32, "kv_heads": 8, "intermediate": 14336}
"""https://huggingface.co/meta-llama/Llama-3.1-8B/blob/main/config.json"""
TINY = {"hidden": 1024, "heads": 8, "kv_heads": 4, "intermediate": 1024}
DEPTH = 4
FORMATS = ("bf16", "nvfp4", "fp8_row", "fp8_block", "fp8")
TOKENS = (1, 16, 64, 256, 2048)
REPEATS = 7
CALLS = 10
"""Calls, or replays, in one timing."""
SLACK = (1.25, 3e-3)
"""How much larger the error may be than one GPU's: a factor, and bfloat16 sums of the ranks' results."""


class Layer(nn.Module):
    """The linear layers of one decoder layer. It runs whole, and cut: it asks its layers for their sizes."""

    def __init__(self, sizes: dict[str, int], generator: torch.Generator) -> None:
        super().__init__()
        hidden, self.head = sizes["hidden"], sizes["hidden"] // sizes["heads"]
        self.group = sizes["heads"] // sizes["kv_heads"]
        rows = sum(fused(sizes)["*qkv"])
        self.qkv, self.o = _linear(rows, hidden, generator), _linear(hidden, hidden, generator)
        self.gate_up = _linear(2 * sizes["intermediate"], hidden, generator)
        self.down = _linear(hidden, sizes["intermediate"], generator)

    def forward(self, x: Tensor) -> Tensor:
        """Return [tokens, hidden]."""
        qkv = self.qkv(_norm(x)).view(x.shape[0], -1, self.head)
        kv = qkv.shape[1] // (self.group + 2)
        q, k, v = qkv.split([self.group * kv, kv, kv], dim=1)
        k, v = k.repeat_interleave(self.group, 1), v.repeat_interleave(self.group, 1)
        weight = (q * k).sum(-1, keepdim=True).div(self.head**0.5).sigmoid()
        x = x + self.o((weight * v).flatten(1))
        gate, up = self.gate_up(_norm(x)).chunk(2, dim=-1)
        return x + self.down(nn.functional.silu(gate) * up)


def _norm(x: Tensor) -> Tensor:
    return nn.functional.rms_norm(x, x.shape[-1:])


def _linear(n: int, k: int, generator: torch.Generator) -> nn.Linear:
    linear = nn.Linear(k, n, bias=False, device=generator.device, dtype=torch.bfloat16)
    linear.weight.requires_grad_(False).normal_(0.0, 0.02, generator=generator)
    return linear


def fused(sizes: dict[str, int]) -> dict[str, tuple[int, ...]]:
    """Return the rows of the layers that are fused into one, by pattern."""
    head = sizes["hidden"] // sizes["heads"]
    kv = sizes["kv_heads"] * head
    return {"*qkv": (sizes["hidden"], kv, kv), "*gate_up": (sizes["intermediate"], sizes["intermediate"])}


def build(fmt: str, sizes: dict[str, int], depth: int, device: torch.device) -> nn.Sequential:
    """Return the stack, quantised; the same weights for the same sizes."""
    generator = torch.Generator(device).manual_seed(0)
    stack = nn.Sequential(*(Layer(sizes, generator) for _ in range(depth)))
    if fmt != "bf16":
        name, _, activation = fmt.partition(":")
        fp4dispatch.replace_linears(stack, name, activation=activation or "any")
    return stack


def cut(stack: nn.Module, sizes: dict[str, int]) -> nn.Module:
    """Cut the stack among all ranks."""
    columns = {pattern: Column(fused=rows) for pattern, rows in fused(sizes).items()}
    parallelize(stack, None, {**columns, "*.o": Row(), "*.down": Row()})
    return stack


def exact(stack: nn.Module) -> nn.Module:
    """Return a copy of the stack with the same weights in float32."""
    found = copy.deepcopy(stack)
    for name, layer in list(found.named_modules()):
        if isinstance(layer, QuantizedLinear):
            w = layer.weights()
            linear = nn.Linear(w.k, w.n, bias=False, device="meta")
            dense = (
                formats.nvfp4_dequantize(w.weight, w.scale, w.global_scale, dtype=torch.float32)
                if w.scaling == "nvfp4"
                else formats.fp8_dequantize(w.weight, w.scale, w.scaling, torch.float32)
            )
            linear.weight = nn.Parameter(dense, requires_grad=False)
            found.set_submodule(name, linear)
    return found.float()


# ---------------------------------------------------------------------------------------------------------------- times


class Clock:
    """Times calls on all ranks at once; the slowest rank counts."""

    def __init__(self, ranks: Ranks, device: torch.device) -> None:
        self.ranks, self.device = ranks, device

    def start_together(self) -> None:
        """Wait until all ranks are here and idle."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.ranks.gather(0)

    def once(self, work: Callable[[], object]) -> float:
        """Return microseconds of one call."""
        self.start_together()
        if self.device.type == "cuda":
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            for _ in range(CALLS):
                work()
            end.record()
            torch.cuda.synchronize(self.device)
            mine = 1e3 * start.elapsed_time(end) / CALLS
        else:
            began = time.perf_counter()
            work()
            mine = 1e6 * (time.perf_counter() - began)
        return max(self.ranks.gather(mine))

    def compare(self, works: dict[str, Callable[[], object]]) -> dict[str, float]:
        """Return the median microseconds of each, measured in turn."""
        times: dict[str, list[float]] = {name: [] for name in works}
        for repeat in range(REPEATS + 1):
            for name, work in works.items():
                took = self.once(work)
                times[name] += [took] if repeat else []
        return {name: round(statistics.median(found), 2) for name, found in times.items()}


def captured(work: Callable[[], Tensor]) -> tuple[torch.cuda.CUDAGraph, Tensor]:
    """Capture a call; it ran before, so communicators and plans exist."""
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # NCCL's watchdog thread queries events
        out = work()
    return graph, out


def measure(whole: nn.Module, mine: nn.Module, reference: nn.Module, x: Tensor, clock: Clock) -> dict[str, Any]:
    """Compare and time one number of tokens."""
    want, one, got = reference(x.float()), whole(x), mine(x)
    row: dict[str, Any] = {"tokens": x.shape[0], "error": relative_error(got, want)}
    row["one_error"] = relative_error(one, want)
    row["largest"] = float((got.float() - one.float()).abs().max() / one.float().abs().max())
    works: dict[str, Callable[[], object]] = {"one_eager_us": lambda: whole(x), "eager_us": lambda: mine(x)}
    same = torch.equal(mine(x), got)
    if x.is_cuda:
        (one_graph, _), (cut_graph, out) = captured(lambda: whole(x)), captured(lambda: mine(x))
        for _ in range(2):
            cut_graph.replay()
            torch.cuda.synchronize()
            same = same and torch.equal(out, got)
        works |= {"one_graph_us": one_graph.replay, "graph_us": cut_graph.replay}
    everyone = clock.ranks.gather((row["error"], row["largest"], same, got[0].float().cpu()))
    row["error"], row["largest"] = (max(each[i] for each in everyone) for i in range(2))
    row["repeats"] = all(each[2] for each in everyone)
    row["ranks_agree"] = all(torch.equal(each[3], everyone[0][3]) for each in everyone)
    factor, more = SLACK
    good = row["error"] <= factor * row["one_error"] + more and row["repeats"] and row["ranks_agree"]
    row["status"] = "ok" if good else "WRONG"
    return row | (clock.compare(works) if row["status"] == "ok" else {})


# ---------------------------------------------------------------------------------------------------------------- ranks


def work(rank: int, size: int, folder: str, arguments: argparse.Namespace) -> None:
    """Run one rank. On an error end at once: the exit handlers of a process group can wait for the other ranks."""
    try:
        measure_all(rank, size, folder, arguments)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)


def measure_all(rank: int, size: int, folder: str, arguments: argparse.Namespace) -> None:
    """Measure every format with every number of tokens. Rank 0 writes what is done so far."""
    began = time.perf_counter()
    gpu = arguments.device != "cpu"
    device = torch.device("cuda", rank) if gpu else torch.device("cpu")
    if gpu:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    store = f"file://{folder}/store-{size}"
    options = {"device_id": device} if gpu else {}
    dist.init_process_group("nccl" if gpu else "gloo", init_method=store, rank=rank, world_size=size, **options)
    ranks, sizes = Ranks(), TINY if arguments.tiny else SIZES
    clock = Clock(ranks, device)
    results: list[dict[str, Any]] = []
    with torch.inference_mode():
        for fmt in arguments.formats:
            if any(ranks.gather(time.perf_counter() - began > arguments.seconds)):
                break
            start = time.perf_counter()
            whole = build(fmt, sizes, arguments.depth, device)
            reference = exact(whole)
            mine = cut(build(fmt, sizes, arguments.depth, device), sizes)
            if fmt != "bf16":
                for stack in (whole, mine):
                    fp4dispatch.warmup(stack, tokens=arguments.tokens)
            generator = torch.Generator(device).manual_seed(1)
            rows = []
            for tokens in arguments.tokens:
                x = torch.randn(tokens, sizes["hidden"], device=device, generator=generator).bfloat16()
                rows.append(measure(whole, mine, reference, x, clock))
            held = [sum(t.numel() * t.element_size() for t in s.state_dict().values()) for s in (whole, mine)]
            results.append({"format": fmt, "bytes_whole": held[0], "bytes_rank": held[1], "rows": rows})
            results[-1] |= {"backends": backends(mine), "seconds": round(time.perf_counter() - start, 1)}
            if rank == 0:
                part = Path(folder, f"result-{size}.json")
                part.with_suffix(".new").write_text(json.dumps(results))
                part.with_suffix(".new").rename(part)
            del whole, mine, reference
            if gpu:
                torch.cuda.empty_cache()
    ranks.gather(0)
    dist.destroy_process_group()


def backends(stack: nn.Module) -> dict[str, str]:
    """Return what runs each kind of layer."""
    layers = [(name, m) for name, m in stack.named_modules() if isinstance(m, QuantizedLinear)]
    return {name.rpartition(".")[2]: layer.backend_text() for name, layer in layers}


def run(size: int, folder: Path, arguments: argparse.Namespace, seconds: float) -> list[dict[str, Any]]:
    """Run all ranks; return what was measured until the end, the first failure, or the limit."""
    context = multiprocessing.get_context("spawn")
    workers = [
        context.Process(target=work, args=(rank, size, str(folder), arguments), daemon=True) for rank in range(size)
    ]
    for worker in workers:
        worker.start()
    deadline = time.monotonic() + seconds
    while any(worker.is_alive() for worker in workers) and time.monotonic() < deadline:
        if any(worker.exitcode for worker in workers):
            deadline = min(deadline, time.monotonic() + 20)  # the others notice
        time.sleep(0.1)
    for worker in workers:
        if worker.is_alive():
            worker.kill()
        worker.join()
    codes = [worker.exitcode for worker in workers]
    if any(codes):
        print(f"{size} ranks: exit codes {codes} (-9: stopped at the limit of {seconds:.0f} s)", flush=True)
    result = folder / f"result-{size}.json"
    found: list[dict[str, Any]] = json.loads(result.read_text()) if result.exists() else []
    return found


# ---------------------------------------------------------------------------------------------------------------- table


def table(document: dict[str, Any]) -> str:
    """Return the results as a Markdown table: microseconds of a layer's linears, one GPU and N, and the speed-up."""
    head = "| ranks | format | tokens | 1 GPU, us | N GPUs, us | speed-up | in graphs: 1 GPU | N GPUs | speed-up |"
    lines = [f"{head} error of 1 GPU | error | largest difference |", "|---:|---|" + "---:|" * 10]
    depth = document["depth"]
    for world in document["ranks"]:
        for each in world["formats"]:
            for row in each["rows"]:
                cells = [str(world["ranks"]), each["format"], str(row["tokens"])]
                if row["status"] != "ok":
                    cells += ["WRONG"] + ["-"] * 5
                else:
                    for prefix in ("eager_us", "graph_us"):
                        cells += _pair(row.get(f"one_{prefix}"), row.get(prefix), depth)
                cells += [f"{row[key]:.1e}" for key in ("one_error", "error", "largest")]
                lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _pair(one: float | None, many: float | None, depth: int) -> list[str]:
    if one is None or many is None:
        return ["-"] * 3
    return [f"{one / depth:.1f}", f"{many / depth:.1f}", f"{one / many:.2f}x"]


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = commandline.parser(__doc__)
    commandline.takes_record(parser)
    parser.add_argument("--ranks", nargs="+", type=int, default=[2, 4], help="more than there are GPUs are left out")
    parser.add_argument("--formats", nargs="+", default=list(FORMATS), help="FORMAT or FORMAT:ACTIVATION")
    parser.add_argument("--tokens", nargs="+", type=int, default=list(TOKENS))
    parser.add_argument("--depth", type=int, default=DEPTH, help="decoder layers in the stack")
    parser.add_argument("--seconds", type=float, default=220, help="of the whole run; no format starts after 2/3 of it")
    parser.add_argument("--tiny", action="store_true", help="small layers, to try the script")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="the GPUs where torch sees one, by default")
    return commandline.parse(parser, words)


def main(words: Sequence[str] | None = None) -> int:
    """Measure with every number of ranks; 1 where something is wrong or missing."""
    arguments = parse(words)
    arguments.device = arguments.device or ("cuda" if torch.cuda.is_available() else "cpu")
    limit, count = arguments.seconds, torch.cuda.device_count() if arguments.device == "cuda" else os.cpu_count() or 1
    sizes = [n for n in arguments.ranks if arguments.device == "cpu" or n <= count]
    for left in sorted(set(arguments.ranks) - set(sizes)):
        print(f"{left} ranks: left out, torch sees {count} GPUs", flush=True)
    if not sizes:
        return 1
    facts = machine.facts(machine.card(arguments.device), arguments.commit)
    layer = TINY if arguments.tiny else SIZES
    document: dict[str, Any] = {"depth": arguments.depth, "layers": layer, "ranks": []}
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        for number, size in enumerate(sizes):
            left = (limit - (time.monotonic() - began)) / (len(sizes) - number)
            arguments.seconds = left * 2 / 3
            formats = run(size, Path(folder), arguments, left)
            document["ranks"].append({"ranks": size, "formats": formats})
            if arguments.json:
                records.write(arguments.json, "tensor parallel", facts, document)
            for each in formats:
                print(f"{size} ranks, {each['format']}: {each['seconds']} s, {each['backends']}", flush=True)
    print(f"microseconds of the linear layers of one decoder layer, mean of {arguments.depth} in a row")
    print(table(document))
    missing = [w["ranks"] for w in document["ranks"] if len(w["formats"]) < len(arguments.formats)]
    if missing:
        print(f"not all formats were measured with {missing} ranks")
    rows = [row for w in document["ranks"] for each in w["formats"] for row in each["rows"]]
    return 1 if missing or any(row["status"] != "ok" for row in rows) else 0


if __name__ == "__main__":
    raise SystemExit(main())
