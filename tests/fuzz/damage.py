"""Damage valid checkpoints and load them: only success or CheckpointError may come out, and the model stays whole."""

from __future__ import annotations

import json
import shutil
import struct
import tempfile
from functools import cache
from pathlib import Path

import torch

from fp4dispatch.checkpoints import load_quantized, open_checkpoint
from fp4dispatch.errors import CheckpointError
from tests import scratch
from tests.checkpoint_cases import CONFIGS, ROWS, Net, assert_untouched, state_of, tensors_of, write

VALUES: tuple[object, ...] = (
    None, True, 0, -1, 1, 3, 2**31, 2**48, 2**63, 2**64, 1.5, 1e308, "", "F32", "F8_E4M3", "U8", "/", "*",
    "../x.safetensors", "model-00001-of-00002.safetensors", [], [0], [0, 0], [-1, 4], [2**62, 4], {}, {"a": 1},
    "re:(a+)+", "re:(", "modelopt", "fp8", "compressed-tensors", "NVFP4", "\0", "x" * 5000, "Linear",
)  # fmt: skip


class Source:
    """Deals out numbers from the input; zeros when it is used up."""

    def __init__(self, data: bytes) -> None:
        self.data = data

    def number(self, below: int) -> int:
        taken, self.data = self.data[:4], self.data[4:]
        return int.from_bytes(taken, "little") % below if below else 0

    def rest(self, size: int) -> bytes:
        taken, self.data = self.data[:size], self.data[size:]
        return taken


@cache
def corpus() -> tuple[tuple[str, Path], ...]:
    """Valid checkpoints of every format, in one file and in two."""
    root = scratch.folder("fuzz")
    made = []
    for row in ROWS:
        for shards in (1, 2):
            made.append((row, write(root / f"{row}-{shards}", tensors_of(row), CONFIGS[row], shards)))
    hf_quant = {"quantization": {"quant_algo": "NVFP4", "exclude_modules": ["head*"]}}
    (made[0][1] / "hf_quant_config.json").write_text(json.dumps(hf_quant))
    return tuple(made)


def feed(data: bytes) -> bool:
    """Damage one checkpoint as ``data`` says and load it; True if it was accepted.

    Raises
    ------
    AssertionError
        A failed load changed the model.
    Exception
        Anything but CheckpointError that the loader let through.
    """
    source = Source(data)
    _, original = corpus()[source.number(len(corpus()))]
    with tempfile.TemporaryDirectory(prefix="fp4dispatch-fuzz-") as folder:
        path = Path(folder) / "c"
        shutil.copytree(original, path)
        for _ in range(1 + source.number(3)):
            _damage(source, path)
        try:
            with open_checkpoint(path) as checkpoint:
                for name in checkpoint:
                    info = checkpoint[name]
                    assert info.start + info.nbytes <= info.file.stat().st_size
        except CheckpointError:
            pass
        model = Net()
        before = state_of(model)
        try:
            load_quantized(model, path, strict=bool(source.number(2)))
        except CheckpointError:
            assert_untouched(model, before)
            return False
        for module in (model.up_proj, model.down_proj):
            if type(module) is not torch.nn.Linear:
                module.check()  # what was accepted is in order
        return True


def _damage(source: Source, path: Path) -> None:
    files = sorted(p for p in path.iterdir() if p.is_file())
    if not files:
        return
    file = files[source.number(len(files))]
    how = source.number(6)
    raw = bytearray(file.read_bytes())
    if how == 0 and raw:  # flip bits, mostly near the start, where the header is
        for _ in range(1 + source.number(4)):
            span = len(raw) if source.number(4) == 0 else min(len(raw), 1500)
            raw[source.number(span)] ^= 1 << source.number(8)
        file.write_bytes(raw)
    elif how == 1:
        file.write_bytes(raw[: source.number(len(raw) + 1)])
    elif how == 2:
        at = source.number(len(raw) + 1)
        file.write_bytes(raw[:at] + source.rest(1 + source.number(16)) + raw[at:])
    elif how == 3:
        file.unlink() if source.number(2) else file.rename(path / f"x{source.number(9)}.safetensors")
    elif file.suffix == ".json":
        _edit_json(source, file)
    else:
        _edit_header(source, file, raw)


def _edit_json(source: Source, file: Path) -> None:
    try:
        value = json.loads(file.read_bytes())
    except ValueError:
        return
    _edit(source, value)
    file.write_text(json.dumps(value))


def _edit_header(source: Source, file: Path, raw: bytearray) -> None:
    try:
        (length,) = struct.unpack("<Q", raw[:8])
        header = json.loads(bytes(raw[8 : 8 + length]))
    except (ValueError, struct.error):
        return
    _edit(source, header)
    text = json.dumps(header).encode()
    length = len(text) if source.number(8) else source.number(2**32)
    file.write_bytes(struct.pack("<Q", length) + text + raw[8 + struct.unpack("<Q", raw[:8])[0] :])


def _edit(source: Source, value: object) -> None:
    """Walk down to some place of a JSON value and change, remove, copy or rename what is there."""
    for _ in range(source.number(6)):
        keys = list(value) if isinstance(value, dict) else list(range(len(value))) if isinstance(value, list) else []
        inner = [k for k in keys if isinstance(value[k], (dict, list)) and value[k]]  # type: ignore[index]
        if not inner:
            break
        value = value[inner[source.number(len(inner))]]  # type: ignore[index]
    if isinstance(value, dict) and value:
        keys = list(value)
        key, other = keys[source.number(len(keys))], keys[source.number(len(keys))]
        how = source.number(4)
        if how == 0:
            del value[key]
        elif how == 1:
            value[key] = value[other]
        elif how == 2:
            value[str(VALUES[source.number(len(VALUES))])] = value[key]
        else:
            value[key] = VALUES[source.number(len(VALUES))]
    elif isinstance(value, list):
        value.insert(source.number(len(value) + 1), VALUES[source.number(len(VALUES))])
