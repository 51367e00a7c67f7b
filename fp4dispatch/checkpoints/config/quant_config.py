"""The quantisation configuration of a checkpoint, read from the files of each tool.

``config.json`` holds ``quantization_config`` (ModelOpt, compressed-tensors, Hugging Face fp8); ModelOpt also writes
``hf_quant_config.json``. Where both are there they must agree.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from fp4dispatch.checkpoints.config.foreign import unsupported_method
from fp4dispatch.checkpoints.config.patterns import any_matches, matches
from fp4dispatch.checkpoints.config.readers import (
    OWN_METHOD,
    Group,
    expect_object,
    read_compressed_tensors,
    read_huggingface_fp8,
    read_modelopt,
    read_own,
)
from fp4dispatch.checkpoints.files.paths import CONFIG_FILE, HF_QUANT_FILE
from fp4dispatch.checkpoints.files.reader import Checkpoint
from fp4dispatch.checkpoints.kv_cache import KvCache, read_kv_cache
from fp4dispatch.errors import CheckpointError

LINEAR = ("Linear", "Module")
"""Names of ``nn.Linear`` and its bases: what compressed-tensors matches a ``targets`` class name with."""


@dataclass(frozen=True)
class QuantConfig:
    """The scheme and the activation format of each module.

    Parameters
    ----------
    source
        File (and key) it was read from, for error texts.
    method
        ``modelopt``, ``compressed-tensors``, ``fp8`` or ``fp4dispatch``.
    groups
        What is quantised and how.
    ignore
        Patterns of modules that are not quantised.
    kv_cache
        How the KV cache is quantised; None where it is not.
    """

    source: str
    method: str
    groups: tuple[Group, ...]
    ignore: tuple[str, ...]
    kv_cache: KvCache | None = None

    @property
    def names_all(self) -> bool:
        """Whether each layer that is not excluded must be quantised.

        False for Hugging Face fp8: the configuration of DeepSeek-V3 excludes nothing and has a 16-bit ``lm_head``.
        There, and in our own configuration, the tensors of a layer decide.
        """
        return self.method not in ("fp8", OWN_METHOD)

    def excludes(self, name: str, classes: Sequence[str] = LINEAR) -> bool:
        """Whether an ``ignore`` pattern names the module (or, for Hugging Face, a module that contains it)."""
        if self.method == "compressed-tensors" and any(pattern in classes for pattern in self.ignore):
            return True
        return self._ignored(name)

    @cached_property
    def _ignored(self) -> Callable[[str], bool]:
        return any_matches(self.ignore, self.method)

    def group_for(self, name: str, classes: Sequence[str] = LINEAR) -> Group | None:
        """Return the group of the module with this name; None if the configuration does not quantise it.

        Parameters
        ----------
        name
            Name in the checkpoint.
        classes
            Names of the module's class and its bases.
        """
        if self.excludes(name, classes):
            return None
        if self.method == "compressed-tensors":
            return self._by_precedence(name, classes)
        for group in self.groups:
            if any(target in classes or matches(target, name, self.method) for target in group.targets):
                return group
        return None

    def _by_precedence(self, name: str, classes: Sequence[str]) -> Group | None:
        """Match as compressed-tensors does (``match_targets``): exact names first, then ``re:``, then class names.

        Groups are not tried in the order of the file. Of two groups with one target the later counts.
        """
        by_target = {target: group for group in self.groups for target in group.targets}
        ordered = sorted(by_target, key=lambda target: ("re:" in target, target))
        named = next((target for target in ordered if matches(target, name, self.method)), None)
        chosen = named if named is not None else next((target for target in ordered if target in classes), None)
        return None if chosen is None or not by_target[chosen].schemes else by_target[chosen]


def read_quant_config(checkpoint: Checkpoint, block: dict[str, Any] | None = None) -> QuantConfig | None:
    """Read the quantisation configuration from the checkpoint's directory; None if there is none.

    Parameters
    ----------
    checkpoint
        Its directory holds the files.
    block
        ``quantization_config`` as the caller has read it. It takes the place of the one in config.json.

    Raises
    ------
    CheckpointUnsupportedError
        A method or format that is not supported.
    CheckpointError
        Broken JSON, or two files that disagree.
    """
    found: list[QuantConfig] = []
    hf_quant = checkpoint.config(HF_QUANT_FILE)
    if hf_quant is not None:
        source = str(checkpoint.path / HF_QUANT_FILE)
        found.append(_modelopt(expect_object(hf_quant, "quantization", source), source, "exclude_modules"))
    config = checkpoint.config(CONFIG_FILE) if block is None else {"quantization_config": block}
    for key in ("quantization_config", "compression_config"):
        if config is not None and config.get(key) is not None:
            source = f"{checkpoint.path / CONFIG_FILE}: {key}"
            found.append(read_block(expect_object(config, key, source), source))
    for other in found[1:]:
        if replace(other, source="", method="") != replace(found[0], source="", method=""):
            raise CheckpointError(
                f"{other.source} disagrees with {found[0].source}: {_describe(other)}, expected {_describe(found[0])}: "
                "one of them belongs to another checkpoint"
            )
    return found[-1] if found else None


def read_block(block: dict[str, Any], source: str) -> QuantConfig:
    """Read a ``quantization_config``; ``source`` says where it comes from. Raises as :func:`read_quant_config`."""
    method = block.get("quant_method")
    if method in ("modelopt", "modelopt_fp4", "modelopt_mixed"):
        return _modelopt(block, source, "ignore")
    if method is None and isinstance(block.get("quantization"), dict):  # hf_quant_config.json, put into config.json
        return _modelopt(block["quantization"], source, "exclude_modules")
    if method == "compressed-tensors":
        groups, ignore = read_compressed_tensors(block, source)
        return QuantConfig(source, "compressed-tensors", groups, ignore, read_kv_cache(block, source))
    if method in ("fp8", "fbgemm_fp8"):
        return QuantConfig(source, "fp8", *read_huggingface_fp8(block, source))
    if method == OWN_METHOD:
        return QuantConfig(source, OWN_METHOD, *read_own(block, source))
    raise unsupported_method(method, source)


def _modelopt(block: dict[str, Any], source: str, ignore_key: str) -> QuantConfig:
    return QuantConfig(source, "modelopt", *read_modelopt(block, source, ignore_key), read_kv_cache(block, source))


def _describe(config: QuantConfig) -> str:
    schemes = sorted({f"{s} (activations {g.activation})" for g in config.groups for s in g.schemes})
    kv_cache = f", KV cache {config.kv_cache}" if config.kv_cache else ""
    ignore = f"{list(config.ignore[:4])}{' ...' if len(config.ignore) > 4 else ''}"
    return f"{'/'.join(schemes)} without {ignore}{kv_cache}"
