"""The files beside the weights: configuration, tokenizer, and the small modules of sentence-transformers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from fp4dispatch.checkpoints.files.paths import CONFIG_FILE, HF_QUANT_FILE, PICKLE_SUFFIXES, checked_file
from fp4dispatch.errors import CheckpointError

WEIGHT_SUFFIXES = (*PICKLE_SUFFIXES, ".safetensors", ".h5", ".msgpack", ".onnx", ".gguf", ".tflite", ".ot")
MODULES_FILE = "modules.json"
TEMPLATES_FOLDER = "additional_chat_templates"
"""Where transformers keeps the chat templates of a tokenizer beside its default, such as the one for tools."""


def copy_companions(source: Path, out: Path) -> list[str]:
    """Copy the files that a checkpoint needs besides its weights; return their names.

    Copied: files of the top directory without weights and configuration (which is rewritten), the folder of chat
    templates, and the folders that ``modules.json`` of sentence-transformers names. Hidden files and other folders are
    not copied. Links that leave the directory are refused.
    """
    copied = []
    for file in sorted(source.iterdir()):
        left = file.name.endswith((*WEIGHT_SUFFIXES, ".index.json")) or file.name in (CONFIG_FILE, HF_QUANT_FILE)
        if file.is_file() and not file.name.startswith(".") and not left:
            shutil.copyfile(checked_file(source, file.name), out / file.name)
            copied.append(file.name)
    for name in _own_folders(source, [TEMPLATES_FOLDER, *_module_folders(source)]):
        (out / name).mkdir()
        for file in sorted((source / name).iterdir()):
            if file.is_file() and not file.name.endswith(PICKLE_SUFFIXES):
                shutil.copyfile(checked_file(source / name, file.name, within=source), out / name / file.name)
                copied.append(f"{name}/{file.name}")
    return copied


def _module_folders(source: Path) -> list[str]:
    try:
        modules = json.loads(checked_file(source, MODULES_FILE).read_text(encoding="utf-8"))
        names = [module["path"] for module in modules]
    except (CheckpointError, OSError, ValueError, KeyError, TypeError, RecursionError):
        return []  # not a sentence-transformers model
    return [n for n in names if isinstance(n, str) and n and Path(n).name == n and n not in (".", "..")]


def _own_folders(source: Path, names: list[str]) -> list[str]:
    found = dict.fromkeys(names)
    return [name for name in found if (source / name).is_dir() and not (source / name).is_symlink()]


def write_configs(out: Path, base: dict[str, Any], configs: dict[str, dict[str, Any]]) -> None:
    """Write config.json (``base`` plus ``quantization_config``) and, for ModelOpt, hf_quant_config.json."""
    config = {**base, "quantization_config": configs[CONFIG_FILE]}
    config.pop("compression_config", None)  # an older name of the same, of compressed-tensors
    (out / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    if HF_QUANT_FILE in configs:
        (out / HF_QUANT_FILE).write_text(json.dumps(configs[HF_QUANT_FILE], indent=2) + "\n", encoding="utf-8")
