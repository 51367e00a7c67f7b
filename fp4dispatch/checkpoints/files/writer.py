"""Write sharded safetensors one tensor at a time.

``safetensors.torch.save_file`` needs all tensors of a file in memory. Here the header is written first, from names,
dtypes and shapes. Then each tensor is written to its place. So quantising a model needs memory for one layer only.
"""

from __future__ import annotations

import ctypes
import json
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch

from fp4dispatch.checkpoints.files.paths import INDEX_FILE, SINGLE_FILE
from fp4dispatch.checkpoints.files.reader import DTYPE_BITS, TORCH_DTYPES
from fp4dispatch.errors import CheckpointError

SAFETENSORS_DTYPES: dict[torch.dtype, str] = {dtype: name for name, dtype in TORCH_DTYPES.items()}


@dataclass(frozen=True)
class Entry:
    """A tensor to write: name, safetensors dtype name, shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes that it takes in the file."""
        return prod(self.shape) * DTYPE_BITS[self.dtype] // 8


def write_tensors(
    directory: Path, entries: Sequence[Entry], tensors: Iterable[tuple[str, torch.Tensor]], max_shard_bytes: int
) -> tuple[Path, ...]:
    """Write ``model.safetensors``, or shards of at most ``max_shard_bytes`` of data and their index.

    Parameters
    ----------
    directory
        An existing, empty directory.
    entries
        All tensors, in the order in which they are to fill the shards. A tensor larger than a shard has one to itself.
    tensors
        Their values, by name, in any order; any device. Each is written and dropped before the next is taken.

    Raises
    ------
    CheckpointError
        A tensor that does not match its entry, or an entry without a tensor.
    OSError
        The disk is full, or a limit was reached.
    """
    shards = _shards(entries, max_shard_bytes)
    names = [SINGLE_FILE] if len(shards) == 1 else [
        f"model-{number:05d}-of-{len(shards):05d}.safetensors" for number in range(1, len(shards) + 1)
    ]  # fmt: skip
    places: dict[str, tuple[Path, int, Entry]] = {}
    for name, shard in zip(names, shards, strict=True):
        _lay_out(directory / name, shard, places)
    left = dict(places)
    for name, tensor in tensors:
        if name not in left:
            raise CheckpointError(f"{directory}: tensor {name!r} was not announced, or is written twice")
        _write(*left.pop(name), tensor)
    if left:
        raise CheckpointError(f"{directory}: tensor {next(iter(left))!r} was announced and never written")
    if len(shards) > 1:
        weight_map = {entry.name: file.name for file, _, entry in places.values()}
        index = {"metadata": {"total_size": sum(e.nbytes for e in entries)}, "weight_map": weight_map}
        (directory / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    return tuple(directory / name for name in names)


def _shards(entries: Sequence[Entry], max_shard_bytes: int) -> list[list[Entry]]:
    shards: list[list[Entry]] = [[]]
    size = 0
    for entry in entries:
        if shards[-1] and size + entry.nbytes > max_shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(entry)
        size += entry.nbytes
    return shards


def _lay_out(file: Path, shard: list[Entry], places: dict[str, tuple[Path, int, Entry]]) -> None:
    """Write the header, note each tensor's place, and give the file its size."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    # Widest elements first, as the library does it: every tensor is then aligned to its element size.
    for entry in sorted(shard, key=lambda e: -DTYPE_BITS[e.dtype]):
        if entry.name in header or entry.name in places:
            raise CheckpointError(f"{file}: tensor {entry.name!r} would be written twice")
        header[entry.name] = {
            "dtype": entry.dtype,
            "shape": list(entry.shape),
            "data_offsets": [offset, offset + entry.nbytes],
        }
        places[entry.name] = (file, offset, entry)
        offset += entry.nbytes
    raw = json.dumps(header, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 8)
    with file.open("wb") as handle:
        handle.write(struct.pack("<Q", len(raw)) + raw)
        handle.truncate(8 + len(raw) + offset)
    for entry in shard:
        place = places[entry.name]
        places[entry.name] = (place[0], place[1] + 8 + len(raw), place[2])


def _write(file: Path, position: int, entry: Entry, tensor: torch.Tensor) -> None:
    if SAFETENSORS_DTYPES.get(tensor.dtype) != entry.dtype or tuple(tensor.shape) != entry.shape or tensor.is_meta:
        raise CheckpointError(
            f"{file}: tensor {entry.name!r} is {tensor.dtype} {list(tensor.shape)} on {tensor.device}, expected "
            f"{entry.dtype} {list(entry.shape)} with values"
        )
    data = tensor.detach().cpu().contiguous()
    with file.open("r+b", buffering=0) as handle:
        handle.seek(position)
        if entry.nbytes:
            view = memoryview((ctypes.c_char * entry.nbytes).from_address(data.data_ptr()))
            while view:
                view = view[handle.write(view) :]
