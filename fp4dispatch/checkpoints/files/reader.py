"""Open a safetensors checkpoint. All headers are checked before any tensor is read. Tensors are mapped lazily.

The format (https://github.com/safetensors/safetensors#format): 8 bytes little-endian header length, a JSON header, then
the data, which the tensors' offsets must cover without holes or overlaps. The safetensors library maps the tensors;
the headers are read here as well, because its errors name neither the file nor the tensor.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from fp4dispatch.checkpoints.files.paths import checked_file, weight_files
from fp4dispatch.checkpoints.files.strict_json import parse_object, read_object
from fp4dispatch.errors import CheckpointError

_DAMAGED = "the file is damaged, fetch or export it again"
MAX_HEADER_BYTES = 100_000_000
"""The limit of the safetensors library itself."""

MAX_CONFIG_BYTES = 16 << 20
MAX_DIMENSIONS = 8
MAX_DIMENSION = 1 << 48

DTYPE_BITS: dict[str, int] = {
    "BOOL": 8, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32, "F32": 32,
    "C64": 64, "F64": 64, "I64": 64, "U64": 64,
}  # fmt: skip

FLOATS = ("F32", "BF16", "F16", "F64")
"""Dtypes that convert into each other."""

TORCH_DTYPES: dict[str, torch.dtype] = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E8M0": torch.float8_e8m0fnu, "I16": torch.int16, "U16": torch.uint16,
    "F16": torch.float16, "BF16": torch.bfloat16, "I32": torch.int32, "U32": torch.uint32, "F32": torch.float32,
    "F64": torch.float64, "I64": torch.int64, "U64": torch.uint64,
}  # fmt: skip


@dataclass(frozen=True)
class TensorInfo:
    """Name, dtype, shape and position of one stored tensor.

    Parameters
    ----------
    name, file
        Full name in the checkpoint, and the file that holds it.
    dtype
        safetensors name, such as ``F8_E4M3`` or ``BF16``.
    shape
        Stored shape.
    start, nbytes
        Offset within the file's data section, and size; in bytes.
    """

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    nbytes: int

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)}"

    def on_meta(self) -> torch.Tensor:
        """Return a tensor of this shape and dtype without data."""
        return torch.empty(self.shape, dtype=TORCH_DTYPES.get(self.dtype, torch.uint8), device="meta")


class Checkpoint:
    """An open checkpoint: a read-only mapping from tensor names to :class:`TensorInfo`, and the tensors on demand.

    ``path`` is the directory (or the single file's directory); ``files`` the safetensors files; ``metadata`` the string
    metadata of the first file. Use as a context manager, or call :meth:`close`.
    """

    def __init__(
        self, path: Path, files: tuple[Path, ...], tensors: dict[str, TensorInfo], metadata: dict[str, str]
    ) -> None:
        self.path = path
        self.files = files
        self.metadata = metadata
        self._tensors = tensors
        self._open: dict[Path, Any] = {}

    def __contains__(self, name: object) -> bool:
        return name in self._tensors

    def __getitem__(self, name: str) -> TensorInfo:
        try:
            return self._tensors[name]
        except KeyError:
            raise CheckpointError(f"{self.path}: tensor {name!r} is not in the checkpoint") from None

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(info.nbytes for info in self._tensors.values())

    def tensor(self, name: str) -> torch.Tensor:
        """Return one tensor on the CPU, mapped from the file: no memory is taken until its elements are read.

        The mapping stays valid while the tensor lives, also after :meth:`close`; clone it before the file may change.

        Raises
        ------
        CheckpointError
            No such tensor, a dtype that torch does not have, or a file that changed after it was opened.
        """
        info = self[name]
        return self._get(info, lambda file: file.get_tensor(name), info.shape)

    def part(self, name: str, dim: int, low: int, high: int) -> torch.Tensor:
        """Return entries ``low`` to ``high`` of one dimension of a tensor, on the CPU, in memory of their own.

        Only these are read from the file.

        Raises
        ------
        CheckpointError
            As :meth:`tensor`.
        """
        info = self[name]
        shape = (*info.shape[:dim], high - low, *info.shape[dim + 1 :])
        if 0 in shape:
            return torch.empty(shape, dtype=TORCH_DTYPES.get(info.dtype, torch.uint8))
        index = (slice(None),) * dim + (slice(low, high),)
        return self._get(info, lambda file: file.get_slice(name)[index if dim else index[0]], shape)

    def _get(self, info: TensorInfo, read: Callable[[Any], torch.Tensor], shape: tuple[int, ...]) -> torch.Tensor:
        if info.dtype not in TORCH_DTYPES:
            raise CheckpointError(
                f"{info.file}: tensor {info.name!r} is {info}; torch has no such dtype: expected a known one"
            )
        try:
            if info.file not in self._open:
                self._open[info.file] = safe_open(info.file, framework="pt", device="cpu")
            tensor = read(self._open[info.file])
        except (SafetensorError, OSError, RuntimeError, ValueError) as error:
            raise CheckpointError(f"{info.file}: tensor {info.name!r} ({info}) cannot be mapped: {error}") from error
        if tuple(tensor.shape) != shape or tensor.dtype != TORCH_DTYPES[info.dtype]:
            raise CheckpointError(
                f"{info.file}: tensor {info.name!r} is {tensor.dtype} {list(tensor.shape)}, expected {info}: the file "
                "changed while it was being read"
            )
        return tensor

    def config(self, filename: str) -> dict[str, Any] | None:
        """Return a JSON file that lies beside the tensors, such as ``config.json``; None where there is none."""
        file = self.path / filename
        if not file.exists() and not file.is_symlink():
            return None
        return read_object(checked_file(self.path, filename), max_bytes=MAX_CONFIG_BYTES)

    def close(self) -> None:
        """Close the files. Tensors that were handed out stay valid."""
        self._open.clear()


def open_checkpoint(path: str | Path) -> Checkpoint:
    """Open a checkpoint directory, or a single ``.safetensors`` file, and check all its headers.

    Reads the headers only: names, dtypes, shapes and offsets are known, and known to be consistent, before one byte of
    a tensor is read or allocated.

    Parameters
    ----------
    path
        Directory with ``model.safetensors`` or ``model.safetensors.index.json`` and its shards (or exactly one other
        ``*.safetensors`` file), or such a file itself.

    Raises
    ------
    CheckpointError
        Nothing to read, pickled weights only (they can run code and are never read), a truncated or hostile header, an
        index that leaves its directory, a tensor that is missing, listed twice or in two files.
    """
    path = Path(path)
    directory, files, weight_map = weight_files(path)
    tensors: dict[str, TensorInfo] = {}
    metadata: dict[str, str] = {}
    for number, file in enumerate(files):
        infos, file_metadata = read_header(file)
        metadata = file_metadata if number == 0 else metadata
        for info in infos:
            _add_tensor(info, tensors, weight_map)
    missing = [name for name in weight_map or () if name not in tensors]
    if weight_map and missing:
        raise CheckpointError(
            f"{directory / weight_map[missing[0]]}: tensor {missing[0]!r} is missing: expected by the index"
            f"{_and_more(missing)}; the shard belongs to another checkpoint or was cut: fetch it again"
        )
    return Checkpoint(directory, files, tensors, metadata)


def read_header(file: Path) -> tuple[list[TensorInfo], dict[str, str]]:
    """Read and check the header of one safetensors file; returns its tensors, ordered by offset, and its metadata."""
    try:
        with file.open("rb") as handle:
            size = handle.seek(0, 2)
            handle.seek(0)
            prefix = handle.read(8)
            if len(prefix) < 8:
                raise CheckpointError(f"{file}: {size} bytes; expected at least 8 of safetensors header: truncated")
            (length,) = struct.unpack("<Q", prefix)
            if length > min(MAX_HEADER_BYTES, size - 8):
                raise CheckpointError(
                    f"{file}: the header claims {length:,} bytes; the file has {size:,} and the limit is "
                    f"{MAX_HEADER_BYTES:,}: truncated, or not a safetensors file"
                )
            raw = handle.read(length)
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be read: {error.strerror or error}") from error
    header = parse_object(raw, f"header of {file}")
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise CheckpointError(f"{file}: __metadata__ of the header is not a map of strings to strings: {_DAMAGED}")
    infos = sorted((_tensor_info(file, name, entry) for name, entry in header.items()), key=_by_offset)
    _check_cover(file, infos, size - 8 - length)
    return infos, metadata


def _by_offset(info: TensorInfo) -> tuple[int, int]:
    return info.start, info.nbytes


def _tensor_info(file: Path, name: str, entry: object) -> TensorInfo:
    where = f"{file}: tensor {name[:200]!r}"
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise CheckpointError(
            f"{where}: header entry {_short(entry)}, expected dtype, shape and data_offsets: {_DAMAGED}"
        )
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        raise CheckpointError(f"{where}: dtype {_short(dtype)} is not one of {', '.join(DTYPE_BITS)}: {_DAMAGED}")
    if not _sizes(shape) or len(shape) > MAX_DIMENSIONS:
        raise CheckpointError(
            f"{where}: shape {_short(shape)}; expected at most {MAX_DIMENSIONS} sizes from 0 to {MAX_DIMENSION:,}: "
            f"{_DAMAGED}"
        )
    if not _sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise CheckpointError(
            f"{where}: data_offsets {_short(offsets)}; expected [begin, end] with begin <= end: {_DAMAGED}"
        )
    begin, end = offsets
    need, rest = divmod(prod(shape) * DTYPE_BITS[dtype], 8)
    if rest or need != end - begin:
        raise CheckpointError(
            f"{where}: {dtype} {_short(shape)} needs {need:,} bytes, expected to match its data_offsets, which span "
            f"{end - begin:,}: {_DAMAGED}"
        )
    return TensorInfo(name, file, dtype, tuple(shape), begin, need)


def _sizes(value: object) -> bool:
    return isinstance(value, list) and all(type(v) is int and 0 <= v <= MAX_DIMENSION for v in value)


def _check_cover(file: Path, infos: list[TensorInfo], data_bytes: int) -> None:
    """Require that the tensors cover the data section exactly: no overlap, no hole, nothing beyond the end."""
    position = 0
    for info in infos:
        if info.start != position:
            kind = "overlaps the tensor before it" if info.start < position else "leaves a hole before it"
            raise CheckpointError(
                f"{file}: tensor {info.name!r} starts at byte {info.start:,}, expected {position:,}: it {kind}"
            )
        position += info.nbytes
        if position > data_bytes:
            raise CheckpointError(
                f"{file}: tensor {info.name!r} ends at byte {position:,} of the data, the file has {data_bytes:,}: "
                "truncated; fetch it again"
            )
    if position != data_bytes:
        raise CheckpointError(
            f"{file}: {data_bytes:,} bytes of data, expected the {position:,} that the header describes: the header "
            "and the data do not belong together"
        )


def _add_tensor(info: TensorInfo, tensors: dict[str, TensorInfo], weight_map: dict[str, str] | None) -> None:
    """Add a tensor. Refuse a name that another file also has: either copy could be the right one."""
    owner = info.file.name if weight_map is None else weight_map.get(info.name)
    if info.name in tensors or (owner is not None and owner != info.file.name):
        other = tensors[info.name].file.name if info.name in tensors else owner
        raise CheckpointError(f"{info.file}: tensor {info.name!r} is a duplicate: expected only in {other}")
    if owner is None:
        raise CheckpointError(
            f"{info.file}: tensor {info.name!r} is not in the index: index and shards do not belong together"
        )
    tensors[info.name] = info


def _and_more(names: list[str]) -> str:
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 120 else text[:117] + "..."
