"""``fp4dispatch tune``: time the backends that may run a GEMM on this GPU, and let ``auto`` use the fastest.

Times are stored in the cache folder under the GPU model, the versions and the code. They are invalid after a change of
any of these. A backend replaces the rules' choice only if it is faster by more than the noise, and never if it is
denied, quarantined or uses a coarser activation format. FP4DISPATCH_TUNED=off ignores stored times.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from typing import TYPE_CHECKING, Any

from fp4dispatch.cli import FAILED, HELP, OK
from fp4dispatch.errors import InputError
from fp4dispatch.machine.progress import Progress
from fp4dispatch.problem import ACTIVATIONS, OPS, OUT_DTYPES, SCALINGS, Problem

if TYPE_CHECKING:
    from fp4dispatch.cli import Subparsers
    from fp4dispatch.problem.decision import Decision
    from fp4dispatch.problem.measurement import Measurement

TOKENS = (1, 16, 64, 256, 1024)


def add_parser(subparsers: Subparsers) -> None:
    """Declare the command's arguments."""
    parser = subparsers.add_parser("tune", help=HELP["tune"], description=__doc__)
    parser.add_argument("op", nargs="?", choices=OPS, help="what to tune; not with --list or --clear")
    parser.add_argument(
        "--nk", action="append", type=_sizes, metavar="NxK", help="sizes of a weight, e.g. 4096x14336; may be repeated"
    )
    parser.add_argument(
        "-m", type=_tokens, default=TOKENS, metavar="M,...", help=f"tokens (default: {','.join(map(str, TOKENS))})"
    )
    parser.add_argument("--scaling", choices=SCALINGS)
    parser.add_argument(
        "--activation",
        choices=ACTIVATIONS,
        default="any",
        help="as pinned by the layer's activation=",
    )
    parser.add_argument("--out-dtype", choices=OUT_DTYPES, default="bfloat16")
    parser.add_argument("--bias", action="store_true", help="tune for layers with a bias")
    parser.add_argument("--force", action="store_true", help="measure again, even if times are stored")
    parser.add_argument("--list", action="store_true", help="print the stored times that are valid on this machine")
    parser.add_argument("--clear", action="store_true", help="remove all stored times")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(wrong_usage=parser.error)


def run(args: argparse.Namespace) -> int:
    """Measure and print; 1 if there is no GPU, or a candidate gave wrong results."""
    if sum((args.list, args.clear, args.op is not None)) != 1:
        args.wrong_usage("say one of: an op and --nk, --list, --clear")
    if (args.op is None) != (not args.nk):
        args.wrong_usage("an op and --nk go together, e.g. fp4dispatch tune fp8_gemm --nk 4096x4096")
    if args.clear:
        return _clear(args.json)
    if args.list:
        return _list(args.json)
    return _tune(args)


def _clear(as_json: bool) -> int:
    from fp4dispatch.dispatch import choose, tuned

    count = tuned.clear()
    choose.decide_anew()
    print(
        json.dumps({"removed": count})
        if as_json
        else f"{count} stored measurements removed from {tuned.store.folder()}"
    )
    return OK


def _list(as_json: bool) -> int:
    from fp4dispatch.backends import registry
    from fp4dispatch.dispatch import choose, tuned

    found = sorted(tuned.holding(choose.facts(), registry.backends()), key=lambda m: str(m.problem))
    if as_json:
        print(json.dumps([_plain(m, None) for m in found], indent=2))
    else:
        print("\n".join(m.text() for m in found) or f"nothing in {tuned.store.folder()} holds on this machine")
    return OK


def _tune(args: argparse.Namespace) -> int:
    import torch

    from fp4dispatch.dispatch import choose
    from fp4dispatch.dispatch.whatif import default_scaling
    from fp4dispatch.tune import tuning

    if not torch.cuda.is_available():
        raise InputError("tune measures on a GPU, and torch sees none\n  fix: `fp4dispatch doctor` says why")
    device = torch.device("cuda", torch.cuda.current_device())
    scaling = args.scaling or default_scaling(args.op)
    rows: list[tuple[Measurement, Decision]] = []
    with Progress("tuning", len(args.nk) * len(args.m), unit="shapes", announce=True, quiet=args.json) as progress:
        for n, k in args.nk:
            weights = None
            for m in args.m:
                problem = Problem(args.op, m, n, k, args.activation, scaling, args.out_dtype, args.bias)
                progress.note(f"M={m} N={n} K={k}")
                weights = weights or tuning.make_weights(problem, device)
                found = tuning.tune(problem, weights, gpu=device.index, force=args.force)
                rows.append((found, choose.select(found.problem, backend="auto", gpu=device.index)))
                progress.step()
    wrong = [why for found, _ in rows for _, why in found.left_out if why.startswith("wrong")]
    if args.json:
        print(json.dumps({"ok": not wrong, "shapes": [_plain(*row) for row in rows]}, indent=2))
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
