"""``fp4dispatch quantize``: turn a model directory into a quantised one, a layer at a time."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fp4dispatch.checkpoints import FORMATS, Checkpoint, QuantizeReport, open_checkpoint, quantize_checkpoint
from fp4dispatch.checkpoints.patterns import matches
from fp4dispatch.cli import HELP, OK
from fp4dispatch.errors import CheckpointError
from fp4dispatch.progress import Progress

if TYPE_CHECKING:
    from fp4dispatch.cli import Subparsers

DEFAULT_EXCLUDE = ("lm_head", "*.lm_head", "*router*", "*.gate")
"""Left alone by default, as ModelOpt does: the output head, and the routers of mixtures of experts."""


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
        "--exclude",
        action="append",
        default=[],
        metavar="PATTERN",
        help=f"layers to leave as they are: a glob, or re:EXPRESSION; repeatable; besides {' '.join(DEFAULT_EXCLUDE)}",
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
    """Quantise, and print what it did."""
    with open_checkpoint(args.model_dir) as checkpoint:
        linears = _included(checkpoint, args.include) if args.include else _linears_by_transformers(checkpoint)
    patterns = (*DEFAULT_EXCLUDE, *args.exclude)
    excluded = {name for name in linears if any(matches(pattern, name, "") for pattern in patterns)}
    unused = [p for p in args.exclude if not any(matches(p, name, "") for name in linears)]
    if unused:
        raise CheckpointError(
            f"--exclude {unused[0]} matches none of the {len(linears)} linear layers: {linears[:3]} ..."
        )
    with Progress("quantize", 0, unit="bytes", quiet=args.json) as shown:
        report = quantize_checkpoint(
            args.model_dir,
            args.out,
            args.format,
            linears,
            excluded=excluded,
            overwrite=args.overwrite,
            max_shard_bytes=args.max_shard_size,
            progress=lambda name, done, total: shown.update(done, total, name),
        )
    if args.json:
        print(json.dumps(_as_json(report), indent=2))
    else:
        _print(report)
    return OK


def _gigabytes(text: str) -> int:
    size = float(text)
    if not 0 < size < 1e6:
        raise argparse.ArgumentTypeError(f"{text} is not a size in GB")
    return max(1, int(size * 1e9))


def _included(checkpoint: Checkpoint, patterns: list[str]) -> list[str]:
    """Layers with a 2-D weight whose name matches."""
    names = [name.removesuffix(".weight") for name in checkpoint if name.endswith(".weight")]
    chosen = [
        n for n in names if any(matches(p, n, "") for p in patterns) and len(checkpoint[f"{n}.weight"].shape) == 2
    ]
    if not chosen:
        raise CheckpointError(f"--include {' '.join(patterns)} matches no 2-D weight of {checkpoint.path}")
    return chosen


def _linears_by_transformers(checkpoint: Checkpoint) -> list[str]:
    """Names of the model's ``nn.Linear`` modules, as the checkpoint spells them.

    From the architecture and not from shapes: embeddings have 2-D weights too, and GPT-2's Conv1D stores its
    transposed, so that a guess would quantise them along the wrong axis.
    """
    advice = "name the linear layers yourself, e.g. --include '*.q_proj' --include '*.mlp.*'"
    architectures = (checkpoint.config("config.json") or {}).get("architectures")
    if not isinstance(architectures, list) or len(architectures) != 1 or not isinstance(architectures[0], str):
        raise CheckpointError(f"{checkpoint.path}/config.json: no architecture named in it: {advice}")
    try:
        import torch
        import transformers
    except ImportError as error:
        raise CheckpointError(
            f"the model's layers are found with transformers, which is missing ({error}): {advice}"
        ) from None
    architecture = getattr(transformers, architectures[0], None)
    if architecture is None:
        raise CheckpointError(f"transformers {transformers.__version__} does not know {architectures[0]}: {advice}")
    config = transformers.AutoConfig.from_pretrained(checkpoint.path, local_files_only=True, trust_remote_code=False)
    with torch.device("meta"):
        model: Any = architecture(config)
    prefix = f"{model.base_model_prefix}."
    names = [name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)]
    stored = [
        next((n for n in (name, name.removeprefix(prefix), prefix + name) if f"{n}.weight" in checkpoint), name)
        for name in names
    ]
    if not any(f"{name}.weight" in checkpoint for name in stored):
        raise CheckpointError(
            f"{checkpoint.path}: none of the {len(names)} linear layers of {architectures[0]} is in it under the name "
            f"that transformers {transformers.__version__} uses (e.g. {names[:1]}): {advice}"
        )
    return stored


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
    }


def _print(report: QuantizeReport) -> None:
    before, after = (sum(getattr(layer, key) for layer in report.layers) for key in ("bytes_before", "bytes_after"))
    print(f"{report.out}: {len(report.layers)} linear layers as {report.scheme}, {', '.join(report.files)}")
    print(f"  these layers   {before / 1e6:10.2f} MB -> {after / 1e6:10.2f} MB   ({after / before:.1%})")
    whole = report.bytes_after / report.bytes_before
    print(
        f"  whole model    {report.bytes_before / 1e6:10.2f} MB -> {report.bytes_after / 1e6:10.2f} MB   ({whole:.1%})"
    )
    for name, why in report.skipped.items():
        print(f"  not quantised  {name}: {why}")
