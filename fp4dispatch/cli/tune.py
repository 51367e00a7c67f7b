"""``fp4dispatch tune``: time the backends that may run a GEMM on this GPU, and the launches of our own kernels.

``auto`` then uses the fastest backend, and our kernels their fastest build and launch shape. Times are stored in the
cache folder under the GPU model, the versions and the code. They are invalid after a change of any of these. A backend
replaces the rules' choice only if it is faster by more than the noise, and never if it is denied or quarantined. With a
coarser activation format it must be faster by more than the rule says that the finer one is worth; most rules say that
it is worth any time. FP4DISPATCH_TUNED=off ignores stored times and shipped tables.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fp4dispatch.cli import FAILED, HELP, OK, options
from fp4dispatch.cli.answers import answer
from fp4dispatch.cli.numbers import seconds
from fp4dispatch.dispatch.launches import MOST_TOKENS
from fp4dispatch.machine.progress import Progress
from fp4dispatch.problem import ACTIVATIONS, OPS, OUT_DTYPES, SCALINGS, Problem

if TYPE_CHECKING:
    from fp4dispatch.cli import Subparsers
    from fp4dispatch.problem.decision import Decision
    from fp4dispatch.problem.measurement import Measurement

TOKENS = (1, 16, 64, 256, 1024)
_OF_LAYERS = ("activation", "out_dtype", "bias")


def add_parser(subparsers: Subparsers) -> None:
    """Declare the command's arguments."""
    parser = subparsers.add_parser("tune", help=HELP["tune"], description=__doc__)
    parser.add_argument("op", nargs="?", choices=OPS, help="what to tune; not with --list or --clear")
    parser.add_argument(
        "--nk", action="append", type=_sizes, metavar="NxK", help="sizes of a weight, e.g. 4096x14336; may be repeated"
    )
    parser.add_argument(
        "-m",
        type=_tokens,
        metavar="M,...",
        help=f"tokens (default: {','.join(map(str, TOKENS))}; with --model-shapes 1 to {MOST_TOKENS})",
    )
    parser.add_argument(
        "--scaling", choices=SCALINGS, help="scales of the weights (default: nvfp4 of nvfp4_gemm, tensor of fp8_gemm)"
    )
    parser.add_argument(
        "--activation",
        choices=ACTIVATIONS,
        default="any",
        help="as pinned by the layer's activation=",
    )
    parser.add_argument("--out-dtype", choices=OUT_DTYPES, default="bfloat16", help="of the output (default: bfloat16)")
    parser.add_argument("--bias", action="store_true", help="tune for layers with a bias")
    parser.add_argument(
        "--model-shapes",
        nargs="*",
        metavar="MODEL",
        help="tune the layers of these models of shapes.toml (default: all) and write a table that can ship",
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FOLDER",
        help="of the table; one that is there is continued, by several processes at once if each has a GPU of its own",
    )
    parser.add_argument("--seconds", type=seconds, default=math.inf, help="with --model-shapes: start no layer after")
    parser.add_argument("--commit", default="", help="with --model-shapes: what the table says was measured")
    parser.add_argument("--force", action="store_true", help="measure again, even if times are stored")
    parser.add_argument("--list", action="store_true", help="print the stored times that are valid on this machine")
    parser.add_argument("--clear", action="store_true", help="remove all stored times")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(wrong_usage=parser.error)
    options.know_defaults(parser)


def run(args: argparse.Namespace) -> int:
    """Measure and print; 1 if there is no GPU, or a candidate gave wrong results."""
    if args.model_shapes is not None:
        return _model_shapes(args)
    if args.out is not None or args.commit or args.seconds != math.inf:
        args.wrong_usage("--out, --seconds and --commit go with --model-shapes")
    if sum((args.list, args.clear, args.op is not None)) != 1:
        args.wrong_usage("say one of: an op and --nk, --model-shapes, --list, --clear")
    if (args.op is None) != (not args.nk):
        args.wrong_usage("an op and --nk go together, e.g. fp4dispatch tune fp8_gemm --nk 4096x4096")
    if args.op is None:
        _refuse(args, "--list and --clear are about all stored times", "m", "scaling", *_OF_LAYERS, "force")
        return _clear(args.json) if args.clear else _list(args.json)
    return _tune(args)


def _refuse(args: argparse.Namespace, why: str, *names: str) -> None:
    """Refuse options that have no effect beside what was asked for."""
    if given := options.given(args, names):
        args.wrong_usage(f"{', '.join(given)}: no effect here, as {why}: leave it out")


def _model_shapes(args: argparse.Namespace) -> int:
    from fp4dispatch.cli import tune_tables

    if args.out is None or args.nk or args.list or args.clear:
        args.wrong_usage(
            "--model-shapes needs --out FOLDER, and takes only an op, --scaling, -m, --force, --seconds and --commit"
        )
    _refuse(args, "a table holds times of plain layers, with --activation any and bfloat16 outputs", *_OF_LAYERS)
    return tune_tables.run(args)


def _clear(as_json: bool) -> int:
    from fp4dispatch.dispatch import choose, tuned

    count = tuned.clear()
    choose.decide_anew()
    answer(
        json.dumps({"removed": count})
        if as_json
        else f"{count} stored measurements removed from {tuned.store.folder()}"
    )
    return OK


def _list(as_json: bool) -> int:
    from fp4dispatch.backends import registry
    from fp4dispatch.dispatch import choose, shipped, tuned

    system = choose.facts()
    found = sorted(tuned.holding(system, registry.backends()), key=lambda m: str(m.problem))
    if as_json:
        answer(json.dumps([_plain(m, None) for m in found], indent=2))
    else:
        print(
            "\n".join(m.text() for m in found)
            or f"no tuned times in {tuned.store.folder()} are valid on this machine; fp4dispatch tune makes them"
        )
        if (table := shipped.of(system)) is not None:
            print(shipped.why_not(system) or f"{table}, of {table.date}: {len(table.layers)} layers")
    return OK


def _tune(args: argparse.Namespace) -> int:
    from fp4dispatch.dispatch import choose
    from fp4dispatch.dispatch.whatif import default_scaling
    from fp4dispatch.tune import tuning
    from fp4dispatch.tune.agreement import Ranks
    from fp4dispatch.tune.copies import Copies
    from fp4dispatch.tune.session import WRONG
    from fp4dispatch.tune.timing import gpu

    device = gpu()
    scaling = args.scaling or default_scaling(args.op)
    rows: list[tuple[Measurement, Decision]] = []
    asked = [
        Problem(args.op, m, n, k, args.activation, scaling, args.out_dtype, args.bias)
        for n, k in args.nk
        for m in args.m or TOKENS
    ]
    problems = dict.fromkeys(replace(each, m=choose.bucket(each.m, each.op, device.index)) for each in asked)
    with Progress("tuning", len(problems), unit="shapes", announce=True, quiet=args.json) as progress:
        copies: Copies | None = None
        for problem in problems:
            progress.note(f"M={problem.m} N={problem.n} K={problem.k}")
            if copies is None or (copies.weights.n, copies.weights.k) != (problem.n, problem.k):
                copies = None  # frees those of the shape before
                copies = Copies(tuning.make_weights(problem, device), tuning.engine_of(device))
            ranks = Ranks(alone=True)
            found = tuning.tune_at(problem, copies, gpu=device.index, ranks=ranks, force=args.force)
            rows.append((found, choose.select(found.problem, backend="auto", gpu=device.index)))
            progress.step()
    wrong = [why for found, _ in rows for _, why in found.left_out if why.startswith(WRONG)]
    if args.json:
        answer(json.dumps({"ok": not wrong, "shapes": [_plain(*row) for row in rows]}, indent=2))
    else:
        for found, decision in rows:
            print(f"{found.text()}\n  -> {_choice(decision)}")
    for why in wrong:
        print(f"WRONG {why}", file=sys.stderr)
    return FAILED if wrong else OK


def _choice(decision: Decision) -> str:
    rule = f" [{decision.rule.id}]" if decision.rule else ""
    return f"auto runs {decision.backend} ({decision.activation}){rule}"


def _plain(found: Measurement, decision: Decision | None) -> dict[str, Any]:
    data = found.to_dict()
    if decision is not None:
        rule = decision.rule.id if decision.rule else None
        data["auto"] = {"backend": decision.backend, "activation": decision.activation, "rule": rule}
    return data


def _sizes(text: str) -> tuple[int, int]:
    found = re.fullmatch(r"([1-9][0-9]{0,6})x([1-9][0-9]{0,6})", text)
    if not found:
        raise argparse.ArgumentTypeError(f"{text!r} is not NxK, such as 4096x14336")
    return int(found[1]), int(found[2])


def _tokens(text: str) -> tuple[int, ...]:
    words = text.split(",")
    if not all(re.fullmatch(r"[1-9][0-9]{0,6}", word) for word in words):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of numbers of tokens, such as 1,16,64")
    return tuple(dict.fromkeys(map(int, words)))
