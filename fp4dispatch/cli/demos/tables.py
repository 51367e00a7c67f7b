"""What the demo of a language model prints: at most 100 columns wide, plain where it is not a terminal."""

from __future__ import annotations

import io
import sys
from typing import TYPE_CHECKING, Any

from fp4dispatch.settings import settings

if TYPE_CHECKING:
    from rich.table import Table

WIDTH = 100


def render(result: dict[str, Any], width: int | None = None) -> str:
    """Return the report, with colours if standard output is a terminal.

    Parameters
    ----------
    result
        What :func:`fp4dispatch.cli.demos.language_model.run` found.
    width
        Columns; None: those of the terminal, 100 at most and without a terminal.
    """
    from rich.console import Console
    from rich.markup import escape

    terminal = bool(sys.stdout and sys.stdout.isatty())
    if width is None:
        width = min(WIDTH, Console().width) if terminal else WIDTH
    colours = terminal and not settings.no_color
    out = io.StringIO()
    console = Console(
        file=out,
        width=width,
        force_terminal=colours,
        color_system="auto" if colours else None,
        highlight=False,
    )
    layers = sum(group["count"] for group in result["report"]["groups"])
    where = "the CPU" if result["device"] == "cpu" else result["device"]
    console.print(f"[bold]{result['model']}[/], {layers} linear layers to {result['format']}, on {where}")
    console.print(escape(result["machine"]), style="dim")
    console.print()
    console.print(_answers(result))
    console.print()
    console.print(_numbers(result))
    console.print()
    console.print(_backends(result))
    console.print()
    for line in _reasons(result):
        console.print(line)
    console.print()
    console.print(_verdict(result))
    if result["device"] == "cpu":
        console.print(
            "The CPU runs the reference backend: it shows the numbers a GPU gives, not the speed. "
            "Each token unpacks all weights."
        )
    example = max(result["report"]["groups"], key=lambda group: group["n"] * group["k"])
    op = "nvfp4_gemm" if result["format"] == "nvfp4" else "fp8_gemm"
    console.print("Next:", style="bold")
    machine = "--gpu 'H100 SXM' --cuda 13.0 --nvcc 13.0"
    console.print(f"  fp4dispatch explain {op} -m 1 -n {example['n']} -k {example['k']} {machine}")
    other = "nvfp4" if result["format"] != "nvfp4" else "fp8_row"
    console.print(f"  fp4dispatch demo --format {other}")
    return "\n".join(line.rstrip() for line in out.getvalue().rstrip().splitlines())


def _table(*heads: tuple[str, str]) -> Table:
    from rich import box
    from rich.table import Table

    made = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1), show_edge=False)
    for head, justify in heads:
        made.add_column(head, justify=justify, overflow="fold")  # type: ignore[arg-type]
    return made


def _answers(result: dict[str, Any]) -> Table:
    from rich.markup import escape
    from rich.table import Table

    made = Table(box=None, show_header=False, pad_edge=False, padding=(0, 1))
    made.add_column(no_wrap=True, style="bold")
    made.add_column(overflow="fold")
    made.add_row("question", escape(result["question"]))
    made.add_row("before", escape(result["before"]["answer"]))
    made.add_row("after", escape(result["after"]["answer"]))
    return made


def _numbers(result: dict[str, Any]) -> Table:
    before, after, size = result["before"], result["after"], result["bytes"]
    quality = before["quality"], after["quality"]
    made = _table(("", "left"), ("16 bits", "right"), (result["format"], "right"), ("", "left"))

    def mb(count: int) -> str:
        return f"{count / 1e6:.1f} MB"

    ratio = size["model before"] / size["model after"]
    made.add_row("memory, whole model", mb(size["model before"]), mb(size["model after"]), f"{ratio:.2f}x less")
    ratio = size["layers before"] / size["layers after"]
    made.add_row("memory, these layers", mb(size["layers before"]), mb(size["layers after"]), f"{ratio:.2f}x less")
    change = f"{100 * (quality[1]['perplexity'] / quality[0]['perplexity'] - 1):+.1f} %, {result['text']}"
    made.add_row("perplexity", *(f"{q['perplexity']:.2f}" for q in quality), change)
    made.add_row("KL divergence", "0", f"{quality[1]['kl']:.4f}", "nats a token, from the original")
    made.add_row("same most likely token", "", f"{100 * quality[1]['same_top']:.1f} %", "of the tokens")
    made.add_row("tokens/s, reading", *(f"{side['read_per_s']:,.0f}" for side in (before, after)), "one request")
    wrote = (f"{side['written_per_s']:,.1f}" for side in (before, after))
    made.add_row("tokens/s, writing", *wrote, "one request, generate() of transformers")
    return made


def _backends(result: dict[str, Any]) -> Table:
    """One row for each size and choice; ``why`` is a number of the list below."""
    made = _table(("layers", "right"), ("", "left"), ("N x K", "left"), ("backend", "left"), ("why", "right"))
    reasons = _numbered(result)
    rows: dict[tuple[str, ...], tuple[int, list[str]]] = {}
    for group in result["report"]["groups"]:
        key = (f"{group['n']} x {group['k']}", group["backend"], str(reasons[_why(group)]))
        count, names = rows.get(key, (0, []))
        rows[key] = (count + group["count"], [*names, group["name"].rpartition(".")[2]])
    for (size, backend, why), (count, names) in rows.items():
        made.add_row(str(count), " ".join(names), size, backend, why)
    return made


def _why(group: dict[str, Any]) -> str:
    """Return the reason of a choice, without the sizes of the layer, so that equal ones are told once."""
    reason = str(group["reason"]).replace(f" N={group['n']} K={group['k']}", "")
    return f"{group['rule']}: {reason}" if group["rule"] else reason


def _numbered(result: dict[str, Any]) -> dict[str, int]:
    found = dict.fromkeys(_why(group) for group in result["report"]["groups"])
    return {why: number for number, why in enumerate(found, 1)}


def _reasons(result: dict[str, Any]) -> list[Any]:
    from rich.padding import Padding
    from rich.text import Text

    lines = [Text(f"{number}  {why}") for why, number in _numbered(result).items()]
    lines += [Text(f"-  {left['name']} stays in 16 bits: {left['reason']}") for left in result["report"]["left"]]
    return [Padding(line, (0, 0, 0, 1)) for line in lines]


def _verdict(result: dict[str, Any]) -> Any:
    from rich.text import Text

    if result["ok"]:
        bound = result["bound"]
        words = f"ok: KL divergence at most {bound['kl']}, perplexity at most {bound['perplexity']}x the original's"
        return Text(words, style="green")
    return Text("FAILED: " + "; ".join(result["misses"]), style="bold red")
