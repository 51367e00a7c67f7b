"""What a checkpoint's configuration says about quantisation: read from the files of each tool.

``config.json`` holds ``quantization_config`` (ModelOpt, compressed-tensors, Hugging Face fp8); ModelOpt also writes
``hf_quant_config.json``. Where both are there they must agree.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from fp4dispatch.checkpoints.patterns import any_matches, matches
from fp4dispatch.checkpoints.reader import Checkpoint
from fp4dispatch.errors import CheckpointError

HF_QUANT_FILE = "hf_quant_config.json"
CONFIG_FILE = "config.json"

MODELOPT_ALGOS: dict[str, str] = {
    "NVFP4": "modelopt-nvfp4",
    "W4A16_NVFP4": "modelopt-nvfp4",
    "FP8": "fp8-tensor",
    "FP8_PER_CHANNEL_PER_TOKEN": "fp8-channel",
}
"""ModelOpt's ``quant_algo`` to our scheme (modelopt/torch/export/convert_hf_config.py, 0.47)."""

CT_STRATEGIES: dict[str, str] = {"tensor": "fp8-tensor", "channel": "fp8-channel", "block": "fp8-block-ct"}
"""compressed-tensors' weight strategy of 8-bit floats to our scheme (quantization/quant_scheme.py, 0.20)."""


@dataclass(frozen=True)
class QuantConfig:
    """Which module has which scheme.

    Parameters
    ----------
    source
        File (and key) it was read from, for error texts.
    method
        ``modelopt``, ``compressed-tensors`` or ``fp8``.
    groups
        Pairs of target patterns and the names of the schemes that these modules may have.
    ignore
        Patterns of modules that are not quantised.
    """

    source: str
    method: str
    groups: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...]
    ignore: tuple[str, ...]

    def excludes(self, name: str) -> bool:
        """Whether an ``ignore`` pattern names the module (or, for Hugging Face, a module that contains it)."""
        return self._ignored(name)

    @cached_property
    def _ignored(self) -> Callable[[str], bool]:
        return any_matches(self.ignore, self.method)

    def schemes_for(self, name: str) -> tuple[str, ...]:
        """Return the schemes that the module of this name may have; empty where it is not to be quantised."""
        if self.excludes(name):
            return ()
        for targets, schemes in self.groups:
            if any(target == "Linear" or matches(target, name, self.method) for target in targets):
                return schemes
        return ()


def read_quant_config(checkpoint: Checkpoint) -> QuantConfig | None:
    """Read the quantisation configuration that lies beside the tensors; None where there is none.

    Raises
    ------
    CheckpointError
        Broken JSON, a method or format that is not supported, or two files that disagree.
    """
    found: list[QuantConfig] = []
    hf_quant = checkpoint.config(HF_QUANT_FILE)
    if hf_quant is not None:
        source = str(checkpoint.path / HF_QUANT_FILE)
        found.append(_modelopt(_object(hf_quant, "quantization", source), source, "exclude_modules"))
    config = checkpoint.config(CONFIG_FILE)
    for key in ("quantization_config", "compression_config"):
        if config is not None and config.get(key) is not None:
            source = f"{checkpoint.path / CONFIG_FILE}: {key}"
            found.append(_by_method(_object(config, key, source), source))
    for other in found[1:]:
        if replace(other, source="", method="") != replace(found[0], source="", method=""):
            raise CheckpointError(
                f"{other.source} disagrees with {found[0].source}: {_describe(other)}, expected {_describe(found[0])}: "
                "one of them belongs to another checkpoint"
            )
    return found[-1] if found else None


def _by_method(block: dict[str, Any], source: str) -> QuantConfig:
    method = block.get("quant_method")
    if method in ("modelopt", "modelopt_fp4"):
        return _modelopt(block, source, "ignore")
    if method == "compressed-tensors":
        return _compressed_tensors(block, source)
    if method in ("fp8", "fbgemm_fp8"):
        return _huggingface_fp8(block, source)
    raise CheckpointError(
        f"{source}: quant_method {method!r} is not supported: expected modelopt, compressed-tensors, fp8 or fbgemm_fp8"
    )


def _modelopt(block: dict[str, Any], source: str, ignore_key: str) -> QuantConfig:
    ignore = _strings(block, ignore_key, source)
    algo = block.get("quant_algo")
    if algo != "MIXED_PRECISION":
        return QuantConfig(source, "modelopt", ((("Linear",), (_algo(algo, source),)),), ignore)
    layers = _object(block, "quantized_layers", source)
    groups: dict[str, list[str]] = {}
    for name in layers:
        layer = _object(layers, name, source)
        groups.setdefault(_algo(layer.get("quant_algo"), f"{source}: {name}"), []).append(name)
    return QuantConfig(source, "modelopt", tuple((tuple(n), (s,)) for s, n in groups.items()), ignore)


def _algo(algo: object, source: str) -> str:
    if not isinstance(algo, str) or algo not in MODELOPT_ALGOS:
        raise CheckpointError(
            f"{source}: quant_algo {algo!r} is not supported: expected {', '.join(MODELOPT_ALGOS)} or MIXED_PRECISION"
        )
    return MODELOPT_ALGOS[algo]


def _compressed_tensors(block: dict[str, Any], source: str) -> QuantConfig:
    config_groups = _object(block, "config_groups", source)
    groups = []
    for key in config_groups:
        group = _object(config_groups, key, source)
        groups.append((_strings(group, "targets", source), (_ct_scheme(group, f"{source}: {key}"),)))
    return QuantConfig(source, "compressed-tensors", tuple(groups), _strings(block, "ignore", source))


def _ct_scheme(group: dict[str, Any], source: str) -> str:
    weights = _object(group, "weights", source)
    kind = (weights.get("type"), weights.get("num_bits"))
    strategy, group_size = weights.get("strategy"), weights.get("group_size")
    if kind == ("float", 4) and strategy == "tensor_group" and group_size == 16:
        return "nvfp4-pack-quantized"
    if kind == ("float", 8) and isinstance(strategy, str) and strategy in CT_STRATEGIES:
        block = weights.get("block_structure")
        if strategy != "block" or block == [128, 128]:
            return CT_STRATEGIES[strategy]
        raise CheckpointError(f"{source}: block_structure {block!r} is not supported: expected [128, 128]")
    raise CheckpointError(
        f"{source}: weights of type {kind[0]!r}, num_bits {kind[1]!r}, strategy {strategy!r}, group_size "
        f"{group_size!r} are not supported: expected NVFP4 (float, 4, tensor_group, 16) or FP8 (float, 8, tensor, "
        "channel or block)"
    )


def _huggingface_fp8(block: dict[str, Any], source: str) -> QuantConfig:
    """Hugging Face / DeepSeek block FP8; without a block size, vLLM's FP8 with one scale per tensor or per row."""
    size = block.get("weight_block_size")
    if size not in (None, [128, 128]):
        raise CheckpointError(f"{source}: weight_block_size {size!r} is not supported: expected [128, 128] or null")
    schemes: tuple[str, ...] = ("fp8-block",) if size else ("fp8-tensor", "fp8-channel")
    if block.get("quant_method") == "fbgemm_fp8":
        schemes = ("fp8-channel",)
    ignore = *_strings(block, "modules_to_not_convert", source), *_strings(block, "ignored_layers", source)
    return QuantConfig(source, "fp8", ((("Linear",), schemes),), tuple(dict.fromkeys(ignore)))


def _object(parent: dict[str, Any], key: str, source: str) -> dict[str, Any]:
    value = parent.get(key)
    if not isinstance(value, dict):
        raise CheckpointError(f"{source}: {key[:200]!r} is {str(value)[:80]!r}: expected an object")
    return value


def _strings(parent: dict[str, Any], key: str, source: str) -> tuple[str, ...]:
    value = parent.get(key)
    value = [] if value is None else value
    if not isinstance(value, list) or not all(isinstance(v, str) for v in value):
        raise CheckpointError(f"{source}: {key!r} is {str(value)[:80]!r}: expected a list of strings")
    return tuple(dict.fromkeys(value))


def _describe(config: QuantConfig) -> str:
    schemes = sorted({s for _, names in config.groups for s in names})
    return f"{'/'.join(schemes)} without {list(config.ignore[:4])}{' ...' if len(config.ignore) > 4 else ''}"
