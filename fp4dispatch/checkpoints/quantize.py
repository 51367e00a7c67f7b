"""Quantise a checkpoint directory into another one, one layer at a time, without building the model."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

import torch

from fp4dispatch.backends.base import LinearWeights
from fp4dispatch.checkpoints.config.patterns import matches
from fp4dispatch.checkpoints.config.quant_config import read_quant_config
from fp4dispatch.checkpoints.config.write_config import Stated, write_quant_config
from fp4dispatch.checkpoints.files.companions import copy_companions, write_configs
from fp4dispatch.checkpoints.files.finite import check_finite
from fp4dispatch.checkpoints.files.paths import CONFIG_FILE
from fp4dispatch.checkpoints.files.publish import atomic_directory
from fp4dispatch.checkpoints.files.reader import Checkpoint, TensorInfo, open_checkpoint
from fp4dispatch.checkpoints.files.writer import Entry, write_tensors
from fp4dispatch.checkpoints.other_readers import misread_by_transformers
from fp4dispatch.checkpoints.save import DEFAULT_SHARD_BYTES, layer_entries, producer_version, scheme_for
from fp4dispatch.checkpoints.schemes import Scheme, from_linear
from fp4dispatch.checkpoints.survey import Survey, module_of
from fp4dispatch.errors import CheckpointError
from fp4dispatch.formats import (
    NVFP4_BLOCK,
    Calibration,
    check_calibration,
    fp8_quantize,
    nvfp4_quantize_calibrated,
)
from fp4dispatch.machine import log as _log
from fp4dispatch.models.replacing.fusion import SharedScales
from fp4dispatch.problem import Scaling

QuantizeFormat = Literal["modelopt", "compressed-tensors", "fp8", "fp8-channel", "fp8-block"]
FORMATS: dict[QuantizeFormat, tuple[str, Scaling]] = {
    "modelopt": ("modelopt", "nvfp4"),
    "compressed-tensors": ("compressed-tensors", "nvfp4"),
    "fp8": ("compressed-tensors", "tensor"),  # "fp8" has two dialects here: vLLM reads one, transformers the other
    "fp8-channel": ("compressed-tensors", "row"),
    "fp8-block": ("fp8", "block128"),
}
"""Format -> the tool whose configuration is written, and the scaling."""

assert tuple(FORMATS) == get_args(QuantizeFormat)

Progress = Callable[[str, int, int], None]
"""Called after each tensor with its name, bytes read so far and bytes in all."""


@dataclass(frozen=True)
class QuantizedLayer:
    """A layer that was quantised: name, logical shape [N, K], bytes of its weight before and after (with scales)."""

    name: str
    n: int
    k: int
    bytes_before: int
    bytes_after: int


@dataclass(frozen=True)
class QuantizeReport:
    """What :func:`quantize_checkpoint` did.

    ``skipped`` has the reason for each weight with two or more dimensions that was not quantised, by the module's name
    in the checkpoint: linear layers, experts (all of a block under one name), embeddings, convolutions.
    ``bytes_before`` and ``bytes_after`` are those of the whole checkpoint, ``bytes_left`` those of what is in
    ``skipped``. ``warnings`` tells what other readers do wrong with the files; each is logged as a WARNING too.
    """

    out: Path
    format: QuantizeFormat
    scheme: str
    layers: tuple[QuantizedLayer, ...]
    skipped: dict[str, str]
    bytes_before: int
    bytes_after: int
    files: tuple[str, ...]
    bytes_left: int = 0
    warnings: tuple[str, ...] = ()


def quantize_checkpoint(
    source: str | Path,
    out: str | Path,
    format: QuantizeFormat,
    linears: Collection[str],
    *,
    excluded: Collection[str] = (),
    survey: Survey | None = None,
    calibrate: Calibration = "max",
    overwrite: bool = False,
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
    progress: Progress | None = None,
) -> QuantizeReport:
    """Quantise the weights of named linear layers. Copy all other tensors unchanged.

    The report lists what is not quantised. The configuration excludes it, under the names that readers look for. Only
    weights are quantised: without calibration data there are no static activation scales. So the configuration states
    that activations are scaled at run time (FP8) or not quantised (``W4A16_NVFP4``, ``NVFP4A16``).

    Parameters
    ----------
    source
        Directory of an unquantised safetensors checkpoint.
    out
        Directory to create. It appears when all files are written.
    format
        See ``FORMATS``.
    linears
        Names of all ``nn.Linear`` modules, as in the checkpoint (``<name>.weight`` [N, K] in a 16- or 32-bit float).
    excluded
        Names in ``linears`` that are not quantised.
    survey
        What is known of the model (:func:`fp4dispatch.checkpoints.survey.survey`): which layers must stay and why, and
        what the modules are called in memory. Without it every other weight is excluded by its name in the checkpoint.
    calibrate
        How NVFP4 block scales are chosen: ``max``, or ``mse``, a search for the least squared error
        (:func:`fp4dispatch.formats.nvfp4_quantize_mse`). Readers see no difference.
    overwrite
        Whether an existing checkpoint directory may be replaced.
    max_shard_bytes
        Data bytes a file at most.
    progress
        Called after each tensor.

    Raises
    ------
    CheckpointError
        A source that is broken, already quantised, or holds NaN or Inf; nothing to quantise; an output
        that exists or cannot be written.
    InputError
        For an unknown calibration, or one that the format cannot use.
    """
    source, out = Path(source), Path(out)
    method, scaling = FORMATS[format]
    check_calibration(calibrate, nvfp4=scaling == "nvfp4")
    scheme = scheme_for(method, scaling)
    with open_checkpoint(source) as checkpoint:
        _check_source(checkpoint, out)
        known = survey or Survey(tuple(linears))
        layers, skipped = _choose(checkpoint, scheme, linears, excluded, known)
        rest = _others(checkpoint, layers, skipped, known)
        ignore = _ignore(method, layers, [*skipped, *(name for name in rest if name not in known.harmless)], known)
        entries: list[Entry] = []
        for name in checkpoint:
            info = checkpoint[name]
            parent = name.removesuffix(".weight")
            if name.endswith(".weight") and parent in layers:
                entries += layer_entries(scheme, parent, *info.shape, static=False)
            else:
                entries.append(Entry(name, info.dtype, info.shape))
        stated: Stated = "weight-only" if scaling == "nvfp4" else "dynamic"
        configs = write_quant_config(method, dict.fromkeys(layers, (scheme.name, stated)), ignore, producer_version())
        with atomic_directory(out, overwrite=overwrite) as directory:
            copy_companions(checkpoint.path, directory)
            write_configs(directory, checkpoint.config(CONFIG_FILE) or {}, configs)
            stream = _stream(checkpoint, scheme, layers, calibrate, progress)
            files = write_tensors(directory, entries, stream, max_shard_bytes)
        written = [(name, scheme, info.shape[0], info.shape[1]) for name, info in layers.items()]
        misread = misread_by_transformers(
            written, "leave these layers as they are (--exclude PATTERN, exclude=), or use fp8-channel"
        )
        if misread:
            _log.warning("%s", misread)
        return QuantizeReport(
            out,
            format,
            scheme.name,
            tuple(_layer_report(scheme, name, info) for name, info in layers.items()),
            skipped | rest,
            checkpoint.nbytes,
            sum(entry.nbytes for entry in entries),
            tuple(file.name for file in files),
            sum(checkpoint[name].nbytes for name in checkpoint if _is_weight(checkpoint[name], layers)),
            (misread,) if misread else (),
        )


def _check_source(checkpoint: Checkpoint, out: Path) -> None:
    config = read_quant_config(checkpoint)
    if config is not None:
        raise CheckpointError(
            f"{config.source}: the checkpoint is already quantised ({config.method}), expected an unquantised one: "
            "quantise the original, since quantising twice loses more"
        )
    if checkpoint.path.is_relative_to(out.resolve()):
        raise CheckpointError(f"{out}: would overwrite the source {checkpoint.path}: choose another directory")


def _choose(
    checkpoint: Checkpoint, scheme: Scheme, linears: Collection[str], excluded: Collection[str], known: Survey
) -> tuple[dict[str, TensorInfo], dict[str, str]]:
    layers: dict[str, TensorInfo] = {}
    skipped: dict[str, str] = {}
    for name in linears:
        if f"{name}.weight" not in checkpoint:
            skipped[name] = known.left.get(name) or "not in the checkpoint (tied to another weight, or unused)"
            continue
        info = checkpoint[f"{name}.weight"]
        if name in excluded:
            skipped[name] = known.by_default.get(name, "excluded")
        elif name in known.left:
            skipped[name] = known.left[name]
        elif info.dtype not in ("F32", "BF16", "F16") or len(info.shape) != 2 or 0 in info.shape:
            skipped[name] = f"its weight is {info}, expected F32, BF16 or F16 [N, K]"
        elif scheme.op == "nvfp4_gemm" and info.shape[1] % NVFP4_BLOCK:
            skipped[name] = f"K={info.shape[1]} is not a multiple of {NVFP4_BLOCK}, which the format needs"
        else:
            layers[name] = info
    if not layers:
        reasons = "; ".join(f"{n}: {why}" for n, why in list(skipped.items())[:3])
        raise CheckpointError(
            f"{checkpoint.path}: no linear layer to quantise ({reasons or 'none was named'}): "
            "name others with include and exclude"
        )
    return layers, skipped


def _is_weight(info: TensorInfo, layers: Collection[str]) -> bool:
    """Whether a tensor is a floating-point weight that was not quantised."""
    floating = info.dtype in ("F32", "BF16", "F16")
    return floating and len(info.shape) >= 2 and 0 not in info.shape and info.name.removesuffix(".weight") not in layers


def _others(checkpoint: Checkpoint, layers: Collection[str], skipped: Collection[str], known: Survey) -> dict[str, str]:
    """Return why weights outside linear layers are not quantised. All experts of a block have one entry."""
    sizes: dict[str, list[int]] = {}
    for name in checkpoint:
        if _is_weight(checkpoint[name], layers) and name.removesuffix(".weight") not in skipped:
            module = next((m for m in (name.removesuffix(".weight"), module_of(name)) if m in known.others), "")
            sizes.setdefault(module or module_of(name), []).append(checkpoint[name].nbytes)
    return {
        module: f"{known.others.get(module, 'not known as a linear layer')} "
        f"({len(nbytes)} tensor{'s' if len(nbytes) > 1 else ''}, {sum(nbytes) / 1e6:.2f} MB)"
        for module, nbytes in sizes.items()
        if module not in layers
    }


def _ignore(method: str, layers: Collection[str], left: Collection[str], known: Survey) -> list[str]:
    """Return the exclude patterns of the configuration.

    ModelOpt and Hugging Face fp8 are looked up by the names of the checkpoint (transformers renames them);
    compressed-tensors by those of the modules in memory, in vLLM by its own, which it derives from either. Blocks of
    experts are one module in readers; compressed-tensors asks for each expert, so that it gets an expression.
    """
    patterns: list[str] = []
    for name in left:
        patterns.append(name)
        if method == "compressed-tensors":
            patterns += known.in_memory.get(name, ())
            if name.endswith(".experts"):
                tail = re.sub(r".*\.\d+\.", "", name)
                patterns.append(f"re:.*{re.escape(tail)}\\..*" if tail == name else f"re:.*\\.{re.escape(tail)}\\..*")
        elif method == "modelopt" and name.endswith(".experts"):
            patterns.append(f"{name}*")
    # Some readers match a name with all modules below it, or with all names that end with it. Drop names that would
    # exclude a quantised layer.
    quantised = [*layers, *(module for layer in layers for module in known.in_memory.get(layer, ()))]
    return [p for p in sorted(set(patterns)) if not any(_would_exclude(p, layer, method) for layer in quantised)]


def _would_exclude(pattern: str, layer: str, method: str) -> bool:
    if matches(pattern, layer, method) or layer.startswith(f"{pattern}."):
        return True
    return method == "fp8" and layer.endswith(pattern)


def _stream(
    checkpoint: Checkpoint,
    scheme: Scheme,
    layers: dict[str, TensorInfo],
    calibrate: Calibration,
    progress: Progress | None,
) -> Iterator[tuple[str, torch.Tensor]]:
    done = 0
    kinds = {name: (scheme.scaling, info.shape[1]) for name, info in layers.items()}
    scales = SharedScales(kinds, {name: info.name for name, info in layers.items()}, checkpoint.tensor)
    for name in checkpoint:
        info = checkpoint[name]
        parent = name.removesuffix(".weight")
        if name.endswith(".weight") and parent in layers:
            weights = _quantize(checkpoint.tensor(name), scheme.scaling, info, scales.of(parent), calibrate)
            for suffix, part in from_linear(scheme, weights).items():
                yield f"{parent}.{suffix}", part
        else:
            tensor = checkpoint.tensor(name)
            check_finite(str(info.file), name, tensor)
            yield name, tensor
        done += info.nbytes
        if progress is not None:
            progress(name, done, checkpoint.nbytes)


def _quantize(
    weight: torch.Tensor, scaling: Scaling, info: TensorInfo, scale: torch.Tensor | None, calibrate: Calibration
) -> LinearWeights:
    n, k = weight.shape
    if not bool(torch.isfinite(weight).all()):
        raise CheckpointError(
            f"{info.file}: tensor {info.name!r} holds NaN or Inf, expected finite weights: the checkpoint is damaged, "
            "or the training that wrote it diverged"
        )
    if scaling == "nvfp4":
        packed = nvfp4_quantize_calibrated(weight, scale, calibrate)
        global_scale = packed.global_scale.reshape(1)
        return LinearWeights("nvfp4_gemm", "nvfp4", n, k, packed.data, packed.sf, global_scale, (n,))
    fp8 = fp8_quantize(weight, scaling, scale)
    return LinearWeights("fp8_gemm", scaling, n, k, fp8.data, fp8.scale)


def _layer_report(scheme: Scheme, name: str, info: TensorInfo) -> QuantizedLayer:
    n, k = info.shape
    after = sum(entry.nbytes for entry in layer_entries(scheme, name, n, k, static=False))
    return QuantizedLayer(name, n, k, info.nbytes, after)
