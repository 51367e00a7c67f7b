"""``fp4dispatch quantize``: write a quantised copy of a model directory, one layer at a time."""

from __future__ import annotations

import argparse
import difflib
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from fp4dispatch.checkpoints import FORMATS, Checkpoint, QuantizeReport, open_checkpoint, quantize_checkpoint, skeleton
from fp4dispatch.checkpoints.config.patterns import matches
from fp4dispatch.checkpoints.survey import Survey, survey
from fp4dispatch.cli import HELP, OK
from fp4dispatch.cli.answers import answer
from fp4dispatch.errors import CheckpointError
from fp4dispatch.formats import CALIBRATIONS
from fp4dispatch.machine import log
from fp4dispatch.machine.progress import Progress
from fp4dispatch.models.choose_layers import EXCLUDE

if TYPE_CHECKING:
    from fp4dispatch.cli import Subparsers


def add_parser(subparsers: Subparsers) -> None:
    """Add the arguments of the command."""
    parser = subparsers.add_parser(
        "quantize",
        help=HELP["quantize"],
        description="Quantise the linear layers of a safetensors model directory. Weights only: activations are scaled "
        "at run time or stay in 16 bits.",
    )
    parser.add_argument("model_dir", type=Path, metavar="MODEL_DIR", help="directory with config.json and safetensors")
    parser.add_argument("out", type=Path, metavar="OUT", help="directory to create")
    parser.add_argument(
        "--format",
        required=True,
        choices=list(FORMATS),
        help="modelopt: NVFP4; compressed-tensors: NVFP4 (nvfp4-pack-quantized); fp8: one scale per tensor, "
        "fp8-channel: one per row (both compressed-tensors); fp8-block: 128x128 (Hugging Face, DeepSeek)",
    )
    parser.add_argument(
        "--calibrate",
        choices=CALIBRATIONS,
        default="max",
        help="NVFP4 block scales: max maps the largest weight of a block to 6; mse searches the scale of least squared "
        "error, which takes longer (default: max)",
    )
    parser.add_argument(
        "--exclude",
        action="append",
        default=[],
        metavar="PATTERN",
        help="layers to leave as they are: a glob, or re:EXPRESSION; repeatable; besides the output head and "
        + " ".join(EXCLUDE),
    )
    parser.add_argument(
        "--include",
        action="append",
        default=[],
        metavar="PATTERN",
        help="names of the linear layers, same patterns; needed only for models that transformers does not "
        "know; their weights must be [N, K], as nn.Linear has them",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace OUT if it is a checkpoint directory")
    parser.add_argument(
        "--max-shard-size", type=_gigabytes, default=5 * 10**9, metavar="GB", help="size of an output file (default 5)"
    )
    parser.add_argument("--json", action="store_true", help="print the report as JSON")


def run(args: argparse.Namespace) -> int:
    """Quantise, and print the report."""
    with open_checkpoint(args.model_dir) as checkpoint:
        known = _survey(checkpoint, args.include)
    linears = known.linears
    patterns = (*EXCLUDE, *args.exclude)
    excluded = {name for name in linears if any(_names(known, pattern, name) for pattern in patterns)}
    everything = [*linears, *known.others]
    unused = [p for p in args.exclude if not any(_names(known, p, name) for name in everything)]
    if unused:
        near = ", ".join(_nearest(unused[0], linears))
        raise CheckpointError(
            f"--exclude {unused[0]} matches none of the {len(linears)} linear layers; nearest: {near}"
        )
    if not args.include:
        excluded |= known.by_default.keys()
    with log.shown(), Progress("quantize", 0, unit="bytes", quiet=args.json) as shown:
        report = quantize_checkpoint(
            args.model_dir,
            args.out,
            args.format,
            linears,
            excluded=excluded,
            survey=known,
            calibrate=args.calibrate,
            overwrite=args.overwrite,
            max_shard_bytes=args.max_shard_size,
            progress=lambda name, done, total: shown.update(done, total, name),
        )
    if args.json:
        answer(json.dumps(_as_json(report), indent=2))
    else:
        _print(report)
    return OK


def _gigabytes(text: str) -> int:
    try:
        size = float(text)
    except ValueError:
        size = 0.0
    if not 0 < size < 1e6:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size in GB, such as 20")
    return max(1, int(size * 1e9))


def _names(known: Survey, pattern: str, name: str) -> bool:
    """Whether a pattern names a module, by its name in the checkpoint or by that in transformers."""
    return any(matches(pattern, each, "") for each in (name, *known.in_memory.get(name, ())))


def _survey(checkpoint: Checkpoint, include: list[str]) -> Survey:
    """Return the survey of the model. With ``--include``, restrict it to those layers; then any model works."""
    if not include:
        known = _survey_by_transformers(checkpoint)
        if not any(f"{name}.weight" in checkpoint for name in known.linears):
            kinds = "; ".join(dict.fromkeys(why for name, why in known.others.items() if name not in known.harmless))
            raise CheckpointError(f"{checkpoint.path}: holds no linear layer that can be quantised; it holds: {kinds}")
        return known
    try:
        known = _survey_by_transformers(checkpoint)
    except CheckpointError:  # unknown to transformers: match the patterns against all 2-D weights
        stored = [name.removesuffix(".weight") for name in checkpoint if name.endswith(".weight")]
        known = Survey(tuple(name for name in stored if len(checkpoint[f"{name}.weight"].shape) == 2))
    for pattern in include:
        if any(_names(known, pattern, name) for name in known.linears):
            continue
        other = next((name for name in known.others if _names(known, pattern, name)), None)
        raise CheckpointError(
            f"--include {pattern} matches no 2-D weight of a linear layer of {checkpoint.path}; "
            + (f"{other} is no linear layer: {known.others[other]}" if other else "")
            + ("" if other else f"nearest: {', '.join(_nearest(pattern, known.linears))}")
        )
    chosen = [name for name in known.linears if any(_names(known, pattern, name) for pattern in include)]
    rest = {name: known.left.get(name, "not included") for name in known.linears if name not in chosen}
    return replace(known, linears=tuple(chosen), others={**known.others, **rest})


def _nearest(pattern: str, names: Sequence[str]) -> list[str]:
    return difflib.get_close_matches(pattern.strip("*."), names, n=3, cutoff=0.5) or list(names[:3])


def _survey_by_transformers(checkpoint: Checkpoint) -> Survey:
    """Return the kinds of the model's modules, by their names in the checkpoint.

    They come from the architecture, not from shapes: embeddings have 2-D weights too, and GPT-2's Conv1D stores its
    weight transposed, so a guess would quantise it along the wrong axis.
    """
    advice = "name the linear layers yourself, e.g. --include '*.q_proj' --include '*.mlp.*'"

    def look(model: nn.Module) -> dict[str, Any]:
        return survey(model, checkpoint).to_dict() | {"class": type(model).__name__}

    found = skeleton.examine(checkpoint, look, advice=advice)
    architecture = found.pop("class")
    known = Survey.from_dict(found)
    if not known.others and not any(f"{name}.weight" in checkpoint for name in known.linears):
        raise CheckpointError(
            f"{checkpoint.path}: none of the {len(known.linears)} linear layers of {architecture} is in it under a "
            f"name that transformers knows (e.g. {list(known.linears[:1])}): {advice}"
        )
    return known


def _as_json(report: QuantizeReport) -> dict[str, Any]:
    return {
        "out": str(report.out),
        "format": report.format,
        "scheme": report.scheme,
        "bytes_before": report.bytes_before,
        "bytes_after": report.bytes_after,
        "files": list(report.files),
        "layers": [vars(layer) for layer in report.layers],
        "skipped": report.skipped,
        "bytes_left": report.bytes_left,
        "warnings": list(report.warnings),
    }


def _print(report: QuantizeReport) -> None:
    before, after = (sum(getattr(layer, key) for layer in report.layers) for key in ("bytes_before", "bytes_after"))
    share = before / report.bytes_before
    print(f"{report.out}: {len(report.layers)} linear layers as {report.scheme}, {', '.join(report.files)}")
    print(f"  these layers   {before / 1e6:10.2f} MB -> {after / 1e6:10.2f} MB   ({share:.1%} of the model before)")
    print(f"  left as it was {report.bytes_left / 1e6:10.2f} MB in {len(report.skipped)} modules, named below")
    whole = report.bytes_after / report.bytes_before
    print(
        f"  whole model    {report.bytes_before / 1e6:10.2f} MB -> {report.bytes_after / 1e6:10.2f} MB   ({whole:.1%})"
    )
    for name, why in report.skipped.items():
        print(f"  not quantised  {name}: {why}")
