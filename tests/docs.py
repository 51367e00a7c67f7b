"""Write the generated parts of README.md and docs/ from the code and from bench/results: ``python -m tests.docs``."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fp4dispatch.benchmark.reports import records

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results"


def fill(text: str, name: str, body: str) -> str:
    """Return a document with one generated block replaced."""
    block = re.compile(rf"(<!-- generated: {name} -->\n).*?(<!-- end -->)", re.DOTALL)
    if not block.search(text):
        raise SystemExit(f"no generated block {name!r}")
    return block.sub(lambda m: f"{m[1]}{body.strip()}\n{m[2]}", text)


def kept(kind: str, subject: str | None = None) -> list[dict]:
    """Return the records of a kind, one for each card (and subject)."""
    return list(records.kept(RESULTS, kind, subject))


def origin(record: dict, *more: str) -> str:
    """Return where a record comes from, as one line."""
    facts = record["facts"]
    known = [f"{name} {facts[name]}" for name in ("driver", "torch", *more) if facts.get(name)]
    return ", ".join([facts["device"], *known, f"commit {facts['commit']}"])


def support() -> str:
    """Return the support matrix: what ran on hardware (from bench/results), what was only compiled."""
    from fp4dispatch.backends import registry
    from fp4dispatch.policy.catalogue import catalogue

    def on(record: dict, row: dict | None = None) -> str:
        return f"ran on {record['facts']['device']} ({(row or {}).get('date', record['facts']['date'])})"

    ran: dict[tuple[str, str, str], str] = {}
    compiled: dict[str, set[str]] = {}
    for result in kept("bench"):  # compares every tile of an output before its time counts
        if result["facts"]["arch"].startswith("sm_"):
            for row in result["measured"]:
                layer, _, scaling = row["method"].partition("/")
                op, scaling = ("nvfp4_gemm", "nvfp4") if layer == "FP4Linear" else ("fp8_gemm", scaling)
                if layer in ("FP4Linear", "FP8Linear", "fp8_gemm") and row["status"] == "ok":
                    ran[row["backend"].partition(" ")[0], op, scaling] = on(result)
    for result in kept("gpu tests"):
        for row in result["ran"]:
            ran[row["backend"], row["op"], row["scaling"]] = on(result, row)
    for result in kept("candidates"):  # a self-check runs the backend and compares every tile
        for row in result["candidates"]:
            if row.get("status") == "passed":
                ran[row["backend"], row["op"], row["scaling"]] = on(result)
    for result in kept("compiled targets"):
        for row in result["rows"]:
            compiled.setdefault(row["kernel"].rsplit("_", 1)[0], set()).add(f"`{row['target']}`")
    lines = ["| backend | op | scaling | GPU archs | activations | state |", "|---|---|---|---|---|---|"]
    available = registry.backends()
    for c in catalogue().capabilities:
        for scaling in c.scalings:
            state = [ran.get((c.backend, c.op, scaling), "not run on hardware")]
            if c.backend == "cutlass" and scaling != "block128" and c.op in compiled:
                state.append(f"compiled and proved, not run: {', '.join(sorted(compiled[c.op]))}")
            if c.backend not in available:
                state = ["not part of this version"]
            archs = ", ".join(c.archs).replace("any", "any, and CPU")
            lines.append(
                f"| {c.backend} | {c.op} | {scaling} | {archs} | {', '.join(c.activations)} | {'; '.join(state)} |"
            )
    return "\n".join(lines)


def gpu_tests() -> str:
    """Return how many tests of each file of tests/gpu passed, and of which commit."""
    parts = []
    for result in kept("gpu tests"):
        lines = ["| file | passed | failed | skipped | commit |", "|---|---:|---:|---:|---|"]
        for file, counts in result["tests"].items():
            numbers = [counts.get(outcome, 0) for outcome in ("passed", "failed", "skipped")]
            cells = [file, *numbers, counts.get("commit", result["facts"]["commit"])]
            lines.append(f"| {' | '.join(map(str, cells))} |")
        parts += [f"{origin(result)}.", "\n".join(lines)]
    return "\n\n".join(parts) or "No run is kept yet."


def race() -> str:
    """Return, for the newest run on each GPU, the counts of the race and the PDL trial of each kernel family."""
    parts = []
    for result in kept("race"):
        trials = {row["build"]: row for row in result["trials"]}
        parts.append(f"{origin(result)}:")
        lines = [
            "| kernel, build, function | wrong launches | without barriers | PDL trial | without barriers |",
            "|---|---|---|---|---|",
        ]
        for ours, control in zip(result["ours"]["cases"], result["control"]["cases"], strict=True):
            row = trials[ours["name"].split()[0]]
            trial = f"{'passed' if row['passed'] else 'FAILED'}, {row['ms']} ms"
            caught = "caught" if row["control_caught"] else "NOT CAUGHT"
            counts = [f"{count['bad_launches']} of {count['launches']}" for count in (ours, control)]
            lines.append(f"| {ours['name']} | {' | '.join(counts)} | {trial} | {caught} |")
        parts.append("\n".join(lines))
    return "\n\n".join(parts) or "No run is kept yet."


def soak() -> str:
    """Return what many launches of layers of random sizes found."""
    lines = ["| GPU | commit | seed | format | layers and inputs | eager | in graphs | other bits | wrong |"]
    lines.append("|---|---|---|---|---|---|---|---|---|")
    for result in kept("soak"):
        for row in result["soak"]:
            cells = [result["facts"]["device"], result["facts"]["commit"], result["seed"], row["format"], row["cases"]]
            cells += [f"{row['eager']:,}", f"{row['graph']:,}", row["wrong"], row["first_wrong"]]
            lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def tensor_parallel() -> str:
    """Return the table of layers cut among GPUs, of every run that is kept."""
    from bench import tensor_parallel as script

    return "\n\n".join(f"{origin(result)}.\n\n{script.table(result)}" for result in kept("tensor parallel"))


def sanitizer() -> str:
    """Return what compute-sanitizer found in the kernel tests."""
    lines = ["| GPU | commit | tool | sees a planted fault | tests run | found |", "|---|---|---|---|---|---|"]
    for result in kept("sanitizer"):
        for row in result["sanitizer"]:
            seen = {True: "yes", False: "NO", None: "not tried"}[result["controls"].get(row["tool"])]
            cells = [result["facts"]["device"], row["commit"], row["tool"], seen, row["passed"], row["found"]]
            lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def cold_jit() -> str:
    """Return the cold build of the first NVFP4 GEMM for sm_120 beside FlashInfer's."""
    lines = [
        "| commit | nvcc | cores | jobs | | wall s | CPU s | of FlashInfer's CPU time |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for result in kept("cold jit"):
        facts, theirs = result["facts"], result["cold_jit"]["flashinfer"]
        for name, r in result["cold_jit"].items():
            label = f"flashinfer {facts['flashinfer']}" if r is theirs else name
            head = [facts["commit"], facts["nvcc"], result["cores"], result["jobs"], label]
            cells = [*head, r["wall_s"], r["cpu_s"], f"{r['cpu_s'] / theirs['cpu_s']:.3f}"]
            lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def cold_model() -> str:
    """Return what a model waits for before it is warmed up, of every run that is kept."""
    from bench import cold_model as script

    parts = []
    for result in kept("cold model"):
        parts += [f"{origin(result, 'nvcc')}, {result['cores']} cores.", script.table(result["cold_model"])]
    return "\n\n".join(parts) or "No run is kept yet."


def w8_small() -> str:
    """Return the times of w8a16's kernel beside what quantises activations, w8a8's among it."""
    result = records.one(RESULTS, "few tokens", "w8a16_small")
    methods = {"bf16": "bf16", "row + quant": "torch row + q", "cutlass + quant": "cutlass + q"}
    methods |= {"w8a8 + quant": "w8a8 + q"} if any("w8a8 + quant" in p["us"] for p in result["problems"]) else {}
    methods |= {"bf16 default pdl": "w8a16, PDL chain"}
    lines = [
        f"{origin(result)}. {result['method']}.",
        "",
        f"| N x K | M | {' | '.join(methods.values())} | bf16 / w8a16 | share of 4.28 TB/s |",
        "|---" * (len(methods) + 4) + "|",
    ]
    for row in result["problems"]:
        us = row["us"]
        ours = us["bf16 default pdl"]
        cells = [f"{row['n']}x{row['k']}", row["m"], *(f"{us[name]:.1f}" if name in us else "" for name in methods)]
        cells += [f"{us['bf16'] / ours:.2f}", f"{100 * row['floor_us'] / ours:.0f} %"]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def w8_many() -> str:
    """Return what w8_gemm_sm90 gains over bf16 and over torch's row-wise GEMM, by the number of tokens."""
    build = "w8_gemm_sm90/bf16_128"
    result = records.one(RESULTS, "sweep", "many tokens a8")
    gains: dict[int, list[tuple[float, float]]] = {}
    for problem in result["problems"]:
        if shapes := problem["builds"].get(build):
            ours, others = min(us for _, us in shapes), problem["others_us"]
            gains.setdefault(problem["m"], []).append((others["bf16"] / ours, others["row"] / ours))
    lines = [
        f"{origin(result)}. {result['method']}; of each problem the fastest launch shape.",
        "",
        "| M | N x K | bf16 / w8a8 | torch row / w8a8 | lowest |",
        "|---|---|---|---|---|",
    ]
    for m, found in sorted(gains.items()):
        bf16, row = zip(*found, strict=True)
        means = f"{statistics.geometric_mean(bf16):.2f} | {statistics.geometric_mean(row):.2f}"
        lines.append(f"| {m} | {len(found)} | {means} | {min(row):.2f} |")
    return "\n".join(lines)


def w4_small() -> str:
    """Return the times of w4a16's kernel for few tokens as plan() launches it."""
    result = records.one(RESULTS, "few tokens", "w4a16_small")
    lines = [
        f"{origin(result)}. {result['method']}.",
        "",
        "| N x K | M | bf16 cuBLAS | w4a16, PDL chain | bf16 / w4a16 | share of 4.28 TB/s |",
        "|---|---|---|---|---|---|",
    ]
    for row in result["problems"]:
        us, mine = row["us"]["bf16"], row["us"]["bf16 default pdl"]
        share = f"{100 * row['floor_us'] / mine:.0f} %"
        lines.append(f"| {row['n']}x{row['k']} | {row['m']} | {us:.1f} | {mine:.1f} | {us / mine:.2f} | {share} |")
    return "\n".join(lines)


def sm90() -> str:
    """Return the times of our SM90 kernels, as the backend would choose them, beside torch's."""
    from fp4dispatch.backends.own.tiling.tiles import tile_for
    from fp4dispatch.problem import Problem
    from fp4dispatch.problem.arch import SM90

    result = records.one(RESULTS, "sm90 kernels")
    lines = [
        f"{origin(result)}. {result['method']}.",
        "",
        "| N x K | M | bf16 | `_scaled_mm` tensor | row | ours, row | ours, row, PDL | ours, block128, PDL |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in result["gemm"]:
        n, k, m, us = row["n"], row["k"], row["m"], row["us"]
        cells = [us["bf16"], us["scaled_mm tensor"], us["scaled_mm row"]]
        for scaling, pdl in (("row", ""), ("row", " pdl"), ("block128", " pdl")):
            tile = tile_for(Problem("fp8_gemm", m, n, k, "fp8", scaling), SM90, 132)
            cells.append(us[tile.builds["bfloat16"] + pdl])
        lines.append(f"| {n}x{k} | {m} | {' | '.join(f'{us:.1f}' for us in cells)} |")
    lines += ["", "| quantiser | " + " | ".join(f"{r['m']}x{r['k']}" for r in result["quantise"]) + " |"]
    lines.append("|---|" + "---|" * len(result["quantise"]))
    for name in result["quantise"][0]["us"]:
        lines.append(f"| {name} | " + " | ".join(f"{r['us'][name]:.1f}" for r in result["quantise"]) + " |")
    return "\n".join(lines)


def accuracy() -> str:
    """Return what each format costs a language model, of every run that is kept."""
    parts = []
    for result in kept("accuracy"):
        versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
        names = list(result["texts"])
        sizes = "; ".join(f"{name}, {result['texts'][name]['tokens']:,} tokens" for name in names)
        heads = [cell for name in names for cell in (f"perplexity: {name}", "KL", "same")]
        lines = [
            f"| by | weights | activations | weight error | {' | '.join(heads)} | ran on |",
            "|---|---|---|---:|" + "---:|" * len(heads) + "---|",
        ]
        for row in result["rows"]:
            error = f"{100 * row['weight_error']:.2f} %" if row["weight_error"] is not None else ""
            cells = [row["by"], row["weights"], row["activations"], error]
            for found in (row["texts"][name] for name in names):
                cells += [f"{found['perplexity']:.2f}", f"{found['kl']:.4f}", f"{100 * found['same_top']:.1f} %"]
            lines.append(f"| {' | '.join([*cells, row['backends']])} |")
        parts += [f"{result['model']} on {origin(result)}; {versions}. Texts: {sizes}.", "\n".join(lines)]
    return "\n\n".join(parts) or "No run is kept yet."


def demo() -> str:
    """Return what the demo found on hardware."""
    lines = [
        "| GPU | commit | weights | backends | bytes | mean cosine | lowest | rank correlation |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for result in kept("demo"):
        device, commit = result["facts"]["device"], result["facts"]["commit"]
        for d in result["demo"]:
            if "error" in d:
                why = d["error"].splitlines()[0]
                lines.append(f"| {device} | {commit} | {d['format']} | {why} | | | | |")
                continue
            size = f"{d['bytes_before'] / 1e6:.1f} -> {d['bytes_after'] / 1e6:.1f} MB"
            numbers = f"{d['cosine']['mean']:.4f} | {d['cosine']['min']:.4f} | {d['spearman']:.4f}"
            cells = [device, commit, d["format"], ", ".join(d["backends"]), size, numbers]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def bench() -> str:
    """Return the summary of every run of the benchmark suite that is kept."""
    from fp4dispatch.benchmark.reports import report

    return "\n\n".join(report.summary(result) for result in kept("bench")) or "No run is kept yet."


def random_suite() -> str:
    """Return the tables of the runs on random problems that are kept, all of a GPU model together."""
    from fp4dispatch.benchmark.reports import random_report, random_runs

    runs = random_runs.by_model(kept("random suite"))
    return "\n\n".join(map(random_report.markdown, runs)) or "No run is kept yet."


def vllm_layers() -> str:
    """Return what a layer called through vLLM's interface takes, beside Humming and bf16 cuBLAS."""
    methods = ("torch/bf16", "humming/nvfp4", "FP4Linear", "vllm/apply")
    parts = []
    for result in kept("bench", "layers of vllm"):
        us = {(row["n"], row["k"], row["m"], row["method"]): row["us"] for row in result["measured"]}
        lines = [
            origin(result),
            "",
            f"| N x K | M | {' | '.join(f'{name}, us' for name in methods)} | Humming / ours |",
        ]
        lines.append("|---|" + "---:|" * (len(methods) + 2))
        for n, k, m in dict.fromkeys(key[:3] for key in us):
            times = [us[n, k, m, name] for name in methods]
            ratio = us[n, k, m, "humming/nvfp4"] / us[n, k, m, "vllm/apply"]
            lines.append(f"| {n} x {k} | {m} | {' | '.join(f'{each:.1f}' for each in times)} | {ratio:.2f} |")
        parts.append("\n".join(lines))
    return "\n\n".join(parts) or "No run is kept yet."


def decoder() -> str:
    """Return the table of every end-to-end run that is kept, with the backends of each format."""
    from bench import decoder as script

    parts = []
    for result in kept("decoder"):
        chosen = [f"{f['format']}: {count} layers {b}" for f in result["formats"] for b, count in f["backends"].items()]
        about = [f"{origin(result)}."]
        if result.get("compiled"):
            steps = [step["compiled"] for f in result["formats"] for step in f["decode"]]
            about.append("Decode steps, those of the first format too, are compiled with `torch.compile`.")
            off, same = max(s["off"] for s in steps), min(s["same_tokens"] for s in steps)
            about.append(
                f"Logits are at most {off:.3f} from eager ones, and at least {same:.0%} of tokens are the same."
            )
        parts += [" ".join(about), script.table(result), "; ".join(chosen)]
    return "\n\n".join(parts) or "No run is kept yet."


def breakable() -> str:
    """Return the tables of breakable graphs: captures, then each batch eagerly and replayed."""
    parts = []
    for result in kept("breakable graphs"):
        lines = [
            "| model, format | capture s | measured s | extra MB | buckets | bridges | replays | rejects | eager |",
            "|---|---:|---:|---:|---:|---:|---:|---:|---:|",
        ]
        for each in result["models"]:
            buckets = sum(bucket["bytes"] for bucket in each["buckets"])
            sizes = [size / 2**20 for size in (each["extra_bytes"], buckets, each["bridge_bytes"])]
            ran = each["segments"]
            rejects = _rejects(each)
            faster = rejects.get("eager-faster", 0)
            numbers = [f"{each['capture_s']:.1f}", f"{each.get('measure_s', 0):.1f}"]
            numbers += [*(f"{size:.0f}" for size in sizes), ran["replays"]]
            numbers += [sum(rejects.values()) - faster, faster]
            lines.append(f"| {each['model']} {each['format']} | {' | '.join(map(str, numbers))} |")
        names = [f"{each['model']} {each['format']}" for each in result["models"]]
        lines += ["", f"| batch | {' | '.join(names)} |", "|---|" + "---:|" * len(names)]
        rows: dict[str, list[str]] = {}
        for each in result["models"]:
            for row in each["prefill"]:
                name = f"prefill, requests {row['requests']}, tokens {row['tokens']}"
                rows.setdefault(name, []).append(_replayed(row))
            for row in each["decode"]:
                rows.setdefault(f"decode, batch {row['batch']}", []).append(_replayed(row))
        lines += [f"| {name} | {' | '.join(cells)} |" for name, cells in rows.items()]
        parts += [f"{origin(result)}.", "\n".join(lines), _buckets(result["models"]), _compiled(result["models"])]
    return "\n\n".join(filter(None, parts)) or "No run is kept yet."


def _buckets(models: list[dict[str, Any]]) -> str:
    """Return what each bucket cost, and from how many tokens on it is used."""
    sizes = [bucket["tokens"] for bucket in models[0]["buckets"]]
    lines = [f"| capture s, MB, used from | {' | '.join(f'{size} tokens' for size in sizes)} |"]
    lines.append("|---|" + "---:|" * len(sizes))
    for each in models:
        cells = [
            f"{bucket['capture_s']:.2f}, {bucket['bytes'] / 2**20:.0f}, {bucket.get('pays_from', '?')}"
            for bucket in each["buckets"]
        ]
        lines.append(f"| {each['model']} {each['format']} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _compiled(models: list[dict[str, Any]]) -> str:
    """Return torch.compile beside the graphs of the same model, for one request of as many tokens."""
    lines = ["| model, format | tokens | eager ms | graphs ms | ready in s | torch.compile, mode | ms | ready in s |"]
    lines.append("|---|---:|---:|---:|---:|---|---:|---:|")
    for each in models:
        for row in each.get("compile", ()):
            (ours,) = (r for r in each["prefill"] if (r["requests"], r["tokens"]) == (1, row["tokens"]))
            ready = each["capture_s"] + each.get("measure_s", 0.0)
            lines.append(
                f"| {each['model']} {each['format']} | {row['tokens']} | {ours['eager_ms']:.2f} "
                f"| {ours['graph_ms']:.2f} | {ready:.1f} | {row['mode']} | {row['ms']:.2f} | {row['compile_s']:.1f} |"
            )
    return "\n".join(lines) if len(lines) > 2 else ""


def generated_text() -> str:
    """Return how many texts are the same with and without graphs."""
    parts = []
    for result in kept("generated text"):
        hows = list(result["formats"][0]["same"])
        lines = [
            f"| format | {' | '.join(hows)} | replays | steps | eager s | graphs s |",
            "|---" * (len(hows) + 5) + "|",
        ]
        for row in result["formats"]:
            same = [f"{same} of {count}" for same, count in row["same"].values()]
            cells = [
                row["format"],
                *same,
                row["replays"],
                row["steps"],
                f"{row['eager_s']:.1f}",
                f"{row['graph_s']:.1f}",
            ]
            lines.append(f"| {' | '.join(map(str, cells))} |")
        parts += [f"{origin(result)}, {result['model']}.", "\n".join(lines)]
    return "\n\n".join(parts) or "No run is kept yet."


def _rejects(result: dict[str, Any]) -> dict[str, int]:
    """Return how many calls ran eagerly that the script wanted in graphs, by reason."""
    ran = result["segments"]
    if "rejects" not in result:
        return {"unknown": ran["rejects"] - ran["reasons"].get("decode-verify", 0)}  # the script's own eager calls
    # Prompts of decode cases, which the script runs eagerly: one of them has more tokens than the largest bucket.
    own = {"decode-verify", "too-many-tokens"} if "decode-verify" in result["rejects"] else set()
    return {reason: count for reason, count in result["rejects"].items() if reason not in own}


def _replayed(row: dict[str, Any]) -> str:
    if "eager-faster" in row.get("runs_eagerly", ()):
        return f"{row['eager_ms']:.1f} ms, eagerly"
    error = f", error {row['error']:.1g}" if row["error"] else ""
    return f"{row['eager_ms']:.1f} -> {row['graph_ms']:.1f} ms ({row['eager_ms'] / row['graph_ms']:.2f}x{error})"


def w4_large() -> str:
    """Return how many times faster than bf16 each format is, by tokens: geometric means over shapes."""

    def best(row: dict, act: str) -> float:
        """The fastest build, packing included."""
        return min(us for name, us in row["us"].items() if re.fullmatch(rf"{act} (\d+(x\d+)?|small)", name))

    parts = []
    for result in kept("many tokens"):
        lines = [
            f"{origin(result)}.",
            "",
            "| tokens | shapes | bf16, us | w4a8 | w4a16 | `_scaled_mm` tensor | `_scaled_mm` row |",
            "|---|---|---|---|---|---|---|",
        ]
        for m in sorted({row["m"] for row in result["problems"]}):
            rows = [row for row in result["problems"] if row["m"] == m]

            def mean(times: Callable[[dict], float], rows: list[dict] = rows) -> str:
                ratios = [row["us"]["bf16"] / times(row) for row in rows]
                return f"{statistics.geometric_mean(ratios):.2f}" if all(r > 0 for r in ratios) else "-"

            bf16 = " to ".join(f"{f(row['us']['bf16'] for row in rows):.0f}" for f in (min, max))
            cells = [
                mean(lambda row: best(row, "a8")),
                mean(lambda row: min(row["us"].get("w4a16", math.inf), best(row, "a16"))),
                mean(lambda row: row["us"].get("fp8 tensor", math.nan)),
                mean(lambda row: row["us"].get("fp8 row", math.nan)),
            ]
            lines.append(f"| {m} | {len(rows)} | {bf16} | {' | '.join(cells)} |")
        parts.append("\n".join(lines))
    return "\n\n".join(parts) or "No run is kept yet."


def profiler() -> str:
    """Return what ncu saw of the final kernels."""
    from bench import ncu

    parts = []
    for result in kept("ncu"):
        parts += [f"{origin(result)}.", ncu.table(result)]
    return "\n\n".join(parts) or "No run is kept yet."


def w4_error() -> str:
    """Return what each activation format loses against the exact product of the same NVFP4 weights."""
    result = records.one(RESULTS, "w4 error")
    names = ("w4a16", "w4a8", "w4a4")
    lines = [
        f"Reference backend, {origin(result)}. Relative error, root mean square "
        "(worst token); bfloat16 activations and outputs.",
        "",
        "| data | M x N x K | w4a16 | w4a8 | w4a4, emulated | w4a4 / w4a8 | quantising the weights |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in result["w4_error"]:
        size = f"{row['m']}x{row['n']}x{row['k']}" if "n" in row else f"{row['layers']} layers"
        cells = [f"{100 * row[x]['rms']:.2f} % ({100 * row[x]['worst token']:.1f} %)" for x in names]
        ratio, weights = row["w4a4"]["rms"] / row["w4a8"]["rms"], f"{100 * row['weights']['rms']:.2f} %"
        lines.append(f"| {row['data']} | {size} | {' | '.join(cells)} | {ratio:.1f} | {weights} |")
    lines += [
        "",
        "| all-MiniLM-L6-v2 against the unquantised model | w4a16 | w4a8 | w4a4, emulated |",
        "|---|---|---|---|",
    ]
    found = result["w4_error"][-1]["embedding"]
    for what in found[names[0]]:
        lines.append(f"| {what} | {' | '.join(f'{found[name][what]:.4f}' for name in names)} |")
    return "\n".join(lines)


def host_cost() -> str:
    """Return what a call costs the host, of every run that is kept."""
    from bench import host_cost as script

    parts = []
    for result in kept("host cost"):
        subject = f" ({result['subject']})" if result.get("subject") else ""
        parts += [f"{origin(result)}{subject}. {result['host_cost']['method']}.", script.table(result)]
    return "\n\n".join(parts) or "No run is kept yet."


def new_tokens() -> str:
    """Return what the first call for a number of tokens costs, of every run that is kept."""
    from bench import new_tokens as script

    parts = []
    for result in kept("new tokens"):
        parts += [f"{origin(result)}. {result['new_tokens']['method']}.", script.table(result)]
    return "\n\n".join(parts) or "No run is kept yet."


def candidates() -> str:
    """Return candidates, self-checks, tuned choices and planted faults of every run that is kept."""
    from bench import candidates as script

    parts = []
    for result in kept("candidates"):
        parts += [f"{origin(result)}. {result.get('note', '')}".strip(), script.candidate_table(result)]
        parts += [script.choice_table(result), script.planted_table(result)]
    return "\n\n".join(parts) or "No run is kept yet."


def proof() -> str:
    """Return docs/proof.md with its tables of mutants and of what the proof costs."""
    from tests.proof import tables

    text = (ROOT / "docs" / "proof.md").read_text()
    made = (
        ("small", "mutants", tables.small_kernels),
        ("machine code", "mutants", tables.machine_code),
        ("sources", "mutants", tables.sources),
        ("cost", "proof cost", tables.cost),
    )
    for name, kind, table in made:
        record = records.one(RESULTS, kind)
        text = fill(text, name, f"{_made_by(record)}\n\n{table(record)}")
    return text


def _made_by(record: dict) -> str:
    facts = record["facts"]
    return f"nvcc {facts['nvcc']}, {facts['date']}, commit {facts['commit']}."


def generate() -> dict[Path, str]:
    """Return each generated document as it should be."""
    from fp4dispatch import settings
    from fp4dispatch.graphs import conditions
    from tests.site import architectures, cli, figures, first, policy, scripts, speed

    graphs = ROOT / "docs" / "graphs.md"
    measured = ROOT / "docs" / "measurements.md"
    numbers = measured.read_text()
    for name, make in (
        ("gpu tests", gpu_tests),
        ("race", race),
        ("soak", soak),
        ("tensor parallel", tensor_parallel),
        ("sanitizer", sanitizer),
        ("cold jit", cold_jit),
        ("cold model", cold_model),
        ("sm90", sm90),
        ("w4 small", w4_small),
        ("w8 small", w8_small),
        ("w8 many", w8_many),
        ("w4 large", w4_large),
        ("ncu", profiler),
        ("bench", bench),
        ("random suite", random_suite),
        ("vllm layers", vllm_layers),
        ("decoder", decoder),
        ("breakable graphs", breakable),
        ("generated text", generated_text),
        ("w4 error", w4_error),
        ("host cost", host_cost),
        ("new tokens", new_tokens),
        ("candidates", candidates),
        ("demo", demo),
    ):
        numbers = fill(numbers, name, make())
    return {
        measured: numbers,
        graphs: fill(graphs.read_text(), "conditions", conditions.markdown_table()),
        ROOT / "docs" / "proof.md": proof(),
        **filled("README.md", **{"first command": first.sentence()}, headline=speed.headline()),
        **filled("bench/README.md", scripts=scripts.table()),
        **filled("docs/accuracy.md", accuracy=accuracy()),
        **filled("docs/demo.md", **{"first command": first.first()}),
        **filled("docs/guide/benchmarks.md", speed=speed.table()),
        **filled("docs/transformers.md", architectures=architectures.drawn()),
        **filled("docs/reference/auto.md", **{"policy order": policy.order(), "policy": policy.policy()}),
        **filled("docs/reference/cli.md", commands=cli.commands()),
        **filled("docs/reference/settings.md", settings=settings.markdown_table()),
        **filled("docs/reference/support.md", support=support()),
        **{ROOT / "docs" / "images" / name: text for name, text in figures.all_figures()},
    }


def filled(path: str, **blocks: str) -> dict[Path, str]:
    """Return a page with its generated blocks replaced."""
    text = (ROOT / path).read_text("utf-8")
    for name, body in blocks.items():
        text = fill(text, name, body)
    return {ROOT / path: text}


if __name__ == "__main__":
    for path, text in generate().items():
        path.write_text(text)
        print(path.relative_to(ROOT))
