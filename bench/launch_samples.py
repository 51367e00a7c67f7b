"""Time every launch of our kernels on random problems: what the launch model is fitted to, and judged on.

For each problem: every launch shape of every build, the quantisers alone, the fastest launch of each family with its
quantiser, cuBLASLt's FP8 GEMM alone, bf16 cuBLAS, and the layers as the policy runs them. A launch is the GEMM alone,
its activations quantised before; with ``--whole`` it is the quantiser and the GEMM, as layers run them. Every launch is
checked tile by tile first. Cold weights, CUDA graphs, methods in turns, medians.

    python -m bench.launch_samples --seed 1 --commit HASH --json FOLDER [--problems 100] [--m 17 1024] [--seconds 280]

The same command again goes on where the last one ended. Fit on some seeds, judge on others.
"""

from __future__ import annotations

import contextlib
import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.shared import commandline
from bench.shared.graphs import watched
from fp4dispatch import jit
from fp4dispatch.backends.base import Prepared
from fp4dispatch.backends.own.compiled import State
from fp4dispatch.backends.own.tiling import launch_model, predict, speeds
from fp4dispatch.backends.own.tiling.few_tokens import KERNELS
from fp4dispatch.backends.own.tiling.launch_model import LaunchShape
from fp4dispatch.backends.own.tiling.tiles import speed_of
from fp4dispatch.benchmark import check, machine, roofline
from fp4dispatch.benchmark.methods.base import Card, tolerance
from fp4dispatch.benchmark.methods.launches import FAMILIES, Family, Launcher, OwnLaunch, builds
from fp4dispatch.benchmark.methods.ours import Layer
from fp4dispatch.benchmark.problems import sampling
from fp4dispatch.benchmark.problems.operands import Operands, Truth
from fp4dispatch.benchmark.reports import records
from fp4dispatch.benchmark.reports.standing import RANGES, geometric_mean, quantile
from fp4dispatch.machine import gpu_models, system
from fp4dispatch.tune import timing
from fp4dispatch.tune.timing import Call, Engine, Recording

KIND = "launch samples"
ROUNDS, REPLAY_US = 5, 600.0
EACH = 2
"""Numbers of tokens of one (N, K)."""
FIRST = 6
"""Times ``near``: launches of a build that are timed whatever their tile."""
BLOCK_CUBLASLT = Layer("block128", None, "cublaslt")
"""Its quantiser included. Its GEMM alone is not timed."""
LAYERS = (Layer("nvfp4", None), Layer("row", None), Layer("block128", None), BLOCK_CUBLASLT)
METHOD = (
    "us; CUDA graph replay, cold weights (over 3 L2 caches rotated), other data in L2 before each replay, 5 rounds in "
    "turns, medians; launches: {what}, every output right by tile before it was timed; [shape, us], shape null: the "
    "kernel's own"
)

WHAT = {False: "the GEMM alone", True: "the quantiser, if there is one, and the GEMM"}


@dataclass
class Timed:
    """A recorded series of calls, and what it reads."""

    recording: Recording
    calls: int
    alive: Call


class Sampler:
    """Times one problem after the other."""

    def __init__(
        self,
        card: Card,
        engine: Engine,
        families: Sequence[Family] = FAMILIES,
        near: int | None = None,
        whole: bool = False,
    ) -> None:
        self.card, self.engine, self.families, self.near, self.whole = card, engine, families, near, whole

    def record(self, call: Call, copies: int) -> Timed:
        """Record calls on rotating copies."""
        calls = timing.calls_for(copies, None, self.engine.once(call), REPLAY_US)
        return Timed(self.engine.record(call, calls, copies), calls, call)

    def times(self, timed: dict[Any, Timed]) -> dict[Any, float]:
        """Replay all in turns; return medians of one call."""
        replays = {key: each.recording.replay for key, each in timed.items()}
        calls = {key: each.calls for key, each in timed.items()}
        found = timing.take_turns(replays, calls, rounds=ROUNDS, least=ROUNDS, warmup=1)
        return {key: round(sample.us, 3) for key, sample in found.items()}

    def shape(self, layer: sampling.Drawn, ms: tuple[int, ...], over: Callable[[], bool]) -> Iterator[dict[str, Any]]:
        """Yield the record of each number of tokens."""
        operands = Operands(layer.n, layer.k, self.card.device)
        launcher = Launcher(operands, self.engine.cache_bytes, self.card, self.families)
        copies = {fmt: timing.copies_for(operands.n * operands.k * size, self.engine.cache_bytes) for fmt, size in SIZE}
        layers = {
            each.name: each.prepare(operands, copies[each.format], self.card)
            for each in LAYERS
            if not each.lacks(self.card)
        }
        dense = [operands.bf16, *(operands.bf16.clone() for _ in range(copies["bf16"] - 1))]
        for m in ms:
            if over():
                return
            yield {"n": layer.n, "k": layer.k, "m": m, "owner": layer.owner} | self.problem(
                Truth(operands, m), launcher, layers, dense, copies
            )

    def problem(
        self, truth: Truth, launcher: Launcher, layers: dict[str, Any], dense: list[Tensor], copies: dict[str, int]
    ) -> dict[str, Any]:
        """Check and time everything on one problem."""
        x, n = truth.x, truth.operands.n
        out = x.new_empty(x.shape[0], n)
        timed: dict[Any, Timed] = {"bf16": self.record(lambda i: torch.mm(x, dense[i].t(), out=out), len(dense))}
        for name, at in layers.items():
            timed["layer", name] = self.record(at(x).call, copies[next(e.format for e in LAYERS if e.name == name)])
        if (scaled := _scaled_mm(truth, launcher, out)) is not None:
            timed["scaled_mm"] = self.record(scaled, copies["row"])
        wrong: dict[str, str] = {}
        for launch in self.worth_timing(launcher, x.shape[0]):
            try:
                with watched(f"{launch.name}, M={x.shape[0]} {n}x{truth.operands.k}"):
                    gemm, quantise = parts_of(launcher, launch, x, out)
                    fault = self.fault(truth, launch, gemm, out)
            except ValueError as error:  # a launch shape that this GPU does not fit: refused before the launch
                wrong[launch.name] = f"refused: {error}"
                continue
            if fault:
                wrong[launch.name] = fault
                continue
            call = launcher.at(launch, x, out).call if self.whole else gemm
            timed[launch] = self.record(call, launcher.copies(launch.family))
            if quantise is not None and ("quantise", launch.family, launch.build[0]) not in timed:
                timed["quantise", launch.family, launch.build[0]] = self.record(quantise, 1)
        us = self.times(timed)
        best = fastest(us)
        if self.whole:
            whole = {family: us[launch] for family, launch in best.items()}
        else:
            calls = {
                family: self.record(launcher.at(launch, x, out).call, launcher.copies(family))
                for family, launch in best.items()
            }
            whole = self.times(calls)
        found = summary(us) | {"with_quantiser": {name_of(family): time_ for family, time_ in whole.items()}}
        return found | ({"whole": True} if self.whole else {}) | ({"wrong": wrong} if wrong else {})

    def worth_timing(self, launcher: Launcher, m: int) -> Iterator[OwnLaunch]:
        """Yield all launches, or of each tile only the ``near`` that the launch models put first.

        Kernels for few tokens have many shapes for a tile, and what is far from the fastest will not be chosen: of
        each also the :data:`FIRST` times ``near`` that are first of all tiles.
        """
        found = list(launcher.all(m))
        if self.near is None:
            yield from found
            return
        predicted = {launch: us for launch in found if (us := self.predicted(launcher, launch, m)) is not None}
        groups: dict[tuple[Any, ...], list[OwnLaunch]] = {}
        for launch in predicted:
            few = launch.shape is not None and launch.build[0] in KERNELS
            for tile in (launch.shape[:4], ()) if few and launch.shape else ((),):
                groups.setdefault((launch.family, launch.build, few, tile), []).append(launch)
        kept: set[OwnLaunch] = set()
        for (_, _, few, tile), group in groups.items():
            count = self.near * FIRST if few and not tile else self.near
            kept |= set(sorted(group, key=predicted.__getitem__)[:count])
        yield from (launch for launch in found if launch in kept or launch not in predicted)

    def predicted(self, launcher: Launcher, launch: OwnLaunch, m: int) -> float | None:
        """Return the predicted microseconds of a launch of a kernel that takes a shape; None without a model."""
        n, k = launcher.operands.n, launcher.operands.k
        if launch.shape is None:
            return None
        if (tile := speed_of(*launch.build)) is not None:
            gpu = constants_of(self.card)
            return float(launch_model.clocks(tile, LaunchShape(*launch.shape), m, n, k, gpu) / gpu.clock_mhz)
        known = known_speeds(self.card)
        return (
            None
            if known is None
            else predict.launch(*launch.build, None, launch.shape, launch.family.problem(m, n, k), known)
        )

    def fault(self, truth: Truth, launch: OwnLaunch, gemm: Call, out: Tensor) -> str:
        """Run a launch into NaN and return what is wrong with the output, or nothing."""
        out.fill_(torch.nan)
        gemm(0)
        self.engine.finish()
        family = launch.family
        worst = check.worst_tile(out, truth.want(family.format, family.entering))
        limit = tolerance(family.format, family.entering, truth.operands.k)
        return "" if worst.error <= limit else f"WRONG: tile {worst.tile} is off by {worst.error:.2g}"


def known_speeds(card: Card) -> speeds.Speeds | None:
    """Return the constants of a GPU's time models; None where its model is not known."""
    gpu = gpu_models.named(card.name)
    return speeds.of(gpu) if gpu is not None else None


def constants_of(card: Card) -> launch_model.Gpu:
    """Return the launch model's constants of a GPU; those of any with so many SMs where its model is not known."""
    known = known_speeds(card)
    return launch_model.gpu_with(card.sms) if known is None else known.many_tokens


def name_of(family: Family) -> str:
    """Return how records and options call a family."""
    return f"{family.backend} {family.format}"


SIZE = (("bf16", 2.0), ("nvfp4", 0.5625), ("row", 1.0), ("block128", 1.0))


def parts_of(launcher: Launcher, launch: OwnLaunch, x: Tensor, out: Tensor) -> tuple[Call, Call | None]:
    """Return the GEMM of a launch alone, its activation quantised once, and the quantiser alone, if it has one."""
    plan, held = launcher.plan(launch, x.shape[0])
    state: State = plan.state
    kept = tuple(torch.empty_like(part) for part in state.scratch())
    fixed = replace(state, scratch=lambda: kept)
    fixed.launch(x, out, None, held[0].tensors)
    alone = replace(fixed, quantize=_nothing) if kept else fixed
    quantise, pdl = state.quantize, state.quantize_pdl

    def gemm(i: int, launched: Any = alone.launch, weights: tuple[Prepared, ...] = held) -> None:
        launched(x, out, None, weights[i].tensors)

    return gemm, (lambda i: quantise(x, kept[0], kept[1], pdl)) if kept else None


def _nothing(*_: object) -> None:
    """Stand in for a quantiser."""


def _scaled_mm(truth: Truth, launcher: Launcher, out: Tensor) -> Call | None:
    """Return cuBLASLt's row-wise FP8 GEMM alone; None on a CPU, and where no family has weights by row."""
    by_row = next((launch for launch in launcher.all(1) if launch.family.format == "row"), None)
    if truth.x.device.type != "cuda" or by_row is None:
        return None
    from fp4dispatch import formats

    q = formats.fp8_quantize(truth.x, "row")
    _, held = launcher.plan(by_row, 1)
    scale = q.scale.view(-1, 1)

    def call(i: int) -> None:
        weight, columns = held[i].tensors[:2]
        torch._scaled_mm(q.data, weight.t(), scale, columns.view(1, -1), out_dtype=out.dtype, out=out)

    return call


def fastest(us: dict[Any, float]) -> dict[Family, OwnLaunch]:
    """Return the fastest launch of each family."""
    found: dict[Family, OwnLaunch] = {}
    for key, time_ in us.items():
        if isinstance(key, OwnLaunch) and (key.family not in found or time_ < us[found[key.family]]):
            found[key.family] = key
    return found


def summary(us: dict[Any, float]) -> dict[str, Any]:
    """Return the times of one problem as plain data."""
    launches: dict[str, list[list[Any]]] = {}
    for key, time_ in us.items():
        if isinstance(key, OwnLaunch):
            shape = list(key.shape) if key.shape else None
            launches.setdefault(f"{key.family.backend} {'/'.join(key.build)}", []).append([shape, time_])
    return {
        "bf16": us["bf16"],
        **({"scaled_mm": us["scaled_mm"]} if "scaled_mm" in us else {}),
        "layers": {key[1]: time_ for key, time_ in us.items() if key[0] == "layer"},
        "quantise": {
            f"{key[1].backend} {key[1].entering} {key[2]}": time_ for key, time_ in us.items() if key[0] == "quantise"
        },
        "launches": {name: sorted(found, key=lambda each: each[1]) for name, found in launches.items()},
    }


# ---- Report ----


def table(problems: list[dict[str, Any]], gpu: launch_model.Gpu) -> str:
    """Return, for each range of M: how fast the fastest launches are, and how good the launch model is on this GPU."""
    lines = ["bf16 time / best launch with quantiser, geometric means; layers beside them in brackets"]
    names = list(dict.fromkeys(name for p in problems for name in p["with_quantiser"]))
    of = {"nvfp4": "FP4Linear", "row": "FP8Linear/row", "block128": "FP8Linear/block128"}
    for first, last in RANGES:
        some = [p for p in problems if first <= p["m"] <= last]
        if not some:
            continue
        cells = [f"M {first}-{min(last, 8192)} ({len(some)})"]
        for name in names:
            best = geometric_mean(p["bf16"] / p["with_quantiser"][name] for p in some if name in p["with_quantiser"])
            cells.append(f"{name} {best:.2f}")
        cells += [
            f"[{layer} {geometric_mean(p['bf16'] / p['layers'][layer] for p in some):.2f}]" for layer in of.values()
        ]
        lines.append("  ".join(cells))
    lines.append("launch model: time of its shape / best shape of the build; predicted / measured time of its shape")
    for build, pairs in sorted(model_fit(problems, gpu).items()):
        regret, bias = ([pair[i] for pair in pairs] for i in (0, 1))
        lines.append(
            f"{build}: {len(pairs)} problems, regret mean {statistics.fmean(regret):.3f}, worst {max(regret):.3f}; "
            f"predicted/measured median {statistics.median(bias):.2f}, 5 to 95 % {quantile(bias, 0.05):.2f} to "
            f"{quantile(bias, 0.95):.2f}"
        )
    wrong = [
        f"{p['n']}x{p['k']} M={p['m']} {name}: {why}" for p in problems for name, why in p.get("wrong", {}).items()
    ]
    lines += [f"{len(wrong)} launches were wrong or refused", *wrong[:10]]
    return "\n".join(lines)


def model_fit(problems: list[dict[str, Any]], gpu: launch_model.Gpu) -> dict[str, list[tuple[float, float]]]:
    """Return (regret, predicted / measured) of each build that has a launch model, for each problem."""
    found: dict[str, list[tuple[float, float]]] = {}
    for p in problems:
        for name, launches in p["launches"].items():
            tile = speed_of(*name.split()[1].split("/"))
            if tile is None:
                continue
            chosen = launch_model.best(tile, p["m"], p["n"], p["k"], gpu)
            us = next((us for shape, us in launches if tuple(shape) == chosen.shape), None)
            if us is not None:
                pair = us / launches[0][1], chosen.microseconds(gpu) / us
                found.setdefault(name, []).append(pair)
    return found


# ---- Everything ----


def only(drawn: sampling.Sample, wanted: Callable[[sampling.Drawn], bool]) -> sampling.Sample:
    """Return what was drawn of some layers."""
    return replace(drawn, shapes=tuple(each for each in drawn.shapes if wanted(each[0])))


def gpu_facts(card: Card, engine: Engine) -> dict[str, Any]:
    """Return what the model needs to know of this GPU: name, SMs, caches, clocks in MHz, measured limits."""
    peaks = roofline.measure(card, engine)
    clocks: dict[str, Any] = {}
    if card.device.type == "cuda":
        import pynvml

        with contextlib.suppress(pynvml.NVMLError, IndexError):  # clocks are for people; the fit does without them
            pynvml.nvmlInit()
            handle = pynvml.nvmlDeviceGetHandleByUUID(system.current().gpus[card.device.index or 0].uuid)
            clocks = {
                "sm_mhz": pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM),
                "sm_mhz_max": pynvml.nvmlDeviceGetMaxClockInfo(handle, pynvml.NVML_CLOCK_SM),
                "memory_mhz": pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_MEM),
            }
    return {"name": card.name, "sms": card.sms, "l2_bytes": card.cache_bytes, **clocks, **peaks.to_dict()}


def before(path: Path, seed: int, commit: str, device: str, method: str) -> list[dict[str, Any]]:
    """Return the problems that an earlier run of the same seed, commit, device and method has left in a file."""
    if not path.exists():
        return []
    old = json.loads(records.unpacked(path))
    same = (old.get("kind"), old.get("seed"), old["facts"]["commit"], old["facts"]["device"], old.get("method"))
    if same != (KIND, seed, commit, device, method):
        raise SystemExit(f"{path} holds {same}, not what this run would add to: name another --json")
    found: list[dict[str, Any]] = old["problems"]
    return found


def main(words: Sequence[str] | None = None) -> int:
    """Measure what is missing, writing after every shape; print the table. 1 if a launch was wrong."""
    parser = commandline.parser(__doc__)
    commandline.takes_record(parser, needed=True, folder=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--problems", type=int, default=100)
    parser.add_argument("--m", type=int, nargs=2, default=(17, 1024), metavar=("LEAST", "MOST"))
    parser.add_argument("--seconds", type=float, default=280.0)
    parser.add_argument(
        "--families", nargs="*", metavar="NAME", help="of launches; all by default, none after the option: layers alone"
    )
    parser.add_argument(
        "--near", type=int, help=f"of each tile, and {FIRST} times that of each build, time what the models put first"
    )
    parser.add_argument("--whole", action="store_true", help="time FP8 activations with their quantiser")
    parser.add_argument(
        "--small", action="store_true", help=f"of the problems drawn only weights under {sampling.SMALL:,} elements"
    )
    parser.add_argument("--rows", type=int, nargs=2, metavar=("LEAST", "MOST"), help="only weights of so many rows")
    parser.add_argument("--device")
    args = commandline.parse(parser, words)
    if unknown := {*(args.families or ())} - {name_of(f) for f in FAMILIES}:
        parser.error(f"--families {', '.join(sorted(unknown))}: needs some of {', '.join(map(name_of, FAMILIES))}")
    families = [f for f in FAMILIES if args.families is None or name_of(f) in args.families]
    ends = time.monotonic() + args.seconds
    args.json.mkdir(parents=True, exist_ok=True)
    card = machine.card(args.device)
    engine = machine.engine_for(card)
    if card.device.type == "cuda" and card.arch is not None:
        start = time.monotonic()
        jit.build_together(builds(families), card.arch)
        for build in builds(families):
            jit.load(*build, card.arch)
        print(f"{len(builds(families))} builds: {time.monotonic() - start:.1f} s", flush=True)
    facts, gpu = machine.facts(card, args.commit), gpu_facts(card, engine)
    drawn = sampling.sample(args.seed, args.problems, least_m=args.m[0], most_m=args.m[1], each=EACH)
    subject = f"seed {args.seed}"
    if args.small:
        drawn = only(drawn, lambda layer: layer.n * layer.k < sampling.SMALL)
        subject = f"small {subject}"
    if args.rows is not None:
        least, most = args.rows
        drawn = only(drawn, lambda layer: least <= layer.n <= most)
        subject = f"rows {least} to {most} {subject}"
    if not drawn.shapes:
        parser.error(f"none of the {args.problems} problems drawn is left for {subject}: draw more, or ask for others")
    path = args.json / records.name({"kind": KIND, "subject": subject, "facts": facts})
    method = METHOD.format(what=WHAT[args.whole])
    found = before(path, args.seed, args.commit, facts["device"], method)
    done = {(p["n"], p["k"], p["m"]) for p in found}
    sampler = Sampler(card, engine, families, args.near, args.whole)
    for layer, ms in drawn.shapes:
        left = tuple(m for m in ms if (layer.n, layer.k, m) not in done)
        if time.monotonic() > ends:
            break
        if not left:
            continue
        found += sampler.shape(layer, left, lambda: time.monotonic() > ends)
        body = {"seed": args.seed, "method": method, "gpu": gpu, "drawn": drawn.problems, "problems": found}
        records.write(path, KIND, facts, body, subject)
        if card.device.type == "cuda":
            torch.cuda.empty_cache()
        print(f"{len(found)} of {drawn.problems}: {layer.owner} {layer.n}x{layer.k} M={left}", flush=True)
    print(f"{'' if len(found) == drawn.problems else 'PARTIAL: '}{len(found)} of {drawn.problems} problems in {path}")
    print(table(found, constants_of(card)))
    return 1 if any("WRONG" in why for p in found for why in p.get("wrong", {}).values()) else 0


if __name__ == "__main__":
    raise SystemExit(main())
