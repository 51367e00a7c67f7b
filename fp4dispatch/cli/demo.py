"""``fp4dispatch demo``: quantise a real model, show what that changes, and which backend runs which layers and why."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING

from fp4dispatch.cli import FAILED, HELP, OK
from fp4dispatch.cli.answers import answer
from fp4dispatch.errors import InputError

if TYPE_CHECKING:
    import torch

    from fp4dispatch.cli import Subparsers

FORMATS = ("fp8", "fp8_block", "fp8_row", "nvfp4")


def add_parser(subparsers: Subparsers) -> None:
    """Add the command and its arguments."""
    parser = subparsers.add_parser(
        "demo",
        help=HELP["demo"],
        description="Quantises the linear layers of SmolLM2-135M-Instruct (real weights, offline), and compares an "
        "answer, perplexity, memory and speed with the original. A GPU is not needed. Exits with 1 if the quality is "
        "below the stated bound.",
    )
    parser.add_argument(
        "--model",
        choices=("smollm2", "minilm"),
        default="smollm2",
        help="smollm2: a language model of 135 million weights (default); minilm: the sentence-embedding model "
        "all-MiniLM-L6-v2, with every candidate backend and its reasons",
    )
    parser.add_argument("--format", choices=FORMATS, default="nvfp4", help="weight format (default: nvfp4)")
    parser.add_argument(
        "--calibrate",
        choices=("max", "mse"),
        default="max",
        help="NVFP4 block scales: the largest weight of a block maps to 6 (max, default), or least squared error (mse)",
    )
    parser.add_argument("--question", help="what to ask the language model instead of the built-in question")
    parser.add_argument("--device", help="cuda or cpu; the GPU if torch sees one, by default")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")


def run(args: argparse.Namespace) -> int:
    """Run the demo; 1 if the quality is below the bound."""
    from fp4dispatch.cli.demos import language_model, minilm
    from fp4dispatch.formats import check_calibration

    check_calibration(args.calibrate, nvfp4=args.format == "nvfp4")
    if args.question is not None and args.model == "minilm":
        raise InputError("--question: minilm embeds sentences and answers none; drop one of the two")
    device = device_of(args.device)
    if args.model == "minilm":
        result, text = minilm.run(args.format, args.calibrate, device, args.json)
    else:
        question = language_model.QUESTION if args.question is None else args.question
        result, text = language_model.run(args.format, args.calibrate, question, device, args.json)
    answer(json.dumps(result, indent=2) if args.json else text)
    return OK if result["ok"] else FAILED


def device_of(text: str | None) -> torch.device:
    """Return the device to run on.

    Raises
    ------
    InputError
        If this process has no such device.
    """
    import torch

    if text is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(text)
    except RuntimeError:
        raise InputError(f"--device {text} is no device; use cuda, cuda:1 or cpu") from None
    if device.type not in ("cuda", "cpu"):
        raise InputError(f"--device {text}: layers run on cuda and cpu; use one of them")
    count = torch.cuda.device_count() if device.type == "cuda" and torch.cuda.is_available() else 0
    if device.type == "cuda" and (device.index or 0) >= count:
        found = f"torch sees {count} GPUs" if count else "torch sees no GPU"
        raise InputError(f"--device {text}: {found}\n  fix: --device cpu; `fp4dispatch doctor` says why")
    return device
