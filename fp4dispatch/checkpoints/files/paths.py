"""Find the files of a checkpoint, and refuse files outside of its directory."""

from __future__ import annotations

import glob
import stat
from pathlib import Path

from fp4dispatch.checkpoints.files.strict_json import read_object
from fp4dispatch.errors import CheckpointError

CONFIG_FILE = "config.json"
HF_QUANT_FILE = "hf_quant_config.json"
INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
MAX_INDEX_BYTES = 64 << 20

_TO_SAFETENSORS = (
    "pickled weights can run code when they are loaded and are never read; get the safetensors version of the model, "
    "or convert it in a sandbox with safetensors.torch.save_model"
)


def weight_files(path: Path) -> tuple[Path, tuple[Path, ...], dict[str, str] | None]:
    """Find the safetensors files of a checkpoint.

    Returns
    -------
    tuple
        The directory, the files, and the index's map from tensor to file name (None without an index).

    Raises
    ------
    CheckpointError
        No or ambiguous weights, pickled weights, a broken index, or a file outside the directory.
    """
    if path.suffix in PICKLE_SUFFIXES:
        raise CheckpointError(f"{path}: expected safetensors: {_TO_SAFETENSORS}")
    if path.name.endswith(".index.json"):
        raise CheckpointError(f"{path}: this is an index; pass the directory that holds it: {path.parent}")
    if path.is_file():
        directory = path.parent.resolve()
        return directory, (checked_file(directory, path.name),), None
    if not path.is_dir():
        left = sorted(path.parent.glob(f"{glob.escape(path.name)}.new-*"))
        left += sorted(path.parent.glob(f"{glob.escape(path.name)}.old-*"))
        aside = f"; {left[0]} is what an interrupted overwrite left whole: rename it" if left else ""
        raise CheckpointError(
            f"{path}: no such directory or .safetensors file{aside}. A model of the Hugging Face hub must be here "
            "first: hf download NAME --local-dir DIR"
        )
    directory = path.resolve()
    has_index, has_single = (_exists(directory / name) for name in (INDEX_FILE, SINGLE_FILE))
    if has_index and has_single:
        raise CheckpointError(
            f"{directory}: found both {SINGLE_FILE} and {INDEX_FILE}, expected one of them: remove the stale one"
        )
    if has_index:
        weight_map = _read_index(directory)
        files = tuple(checked_file(directory, name) for name in sorted(set(weight_map.values())))
        return directory, files, weight_map
    if has_single:
        return directory, (checked_file(directory, SINGLE_FILE),), None
    return directory, (checked_file(directory, _only_safetensors(directory).name),), None


def checked_file(directory: Path, name: str, *, within: Path | None = None) -> Path:
    """Return ``directory / name`` after checking that it is a regular file that lies within the directory.

    A symbolic link may point within the directory, or into the ``blobs`` folder of a Hugging Face cache, whose
    ``snapshots/<revision>`` folders hold nothing but such links. ``within``: the directory of the checkpoint, where
    ``directory`` is a folder in it.

    Raises
    ------
    CheckpointError
        A name that contains a path, a link that leaves the directory, a missing file, or not a regular file.
    """
    file = directory / name
    if name in ("", ".", "..") or "\0" in name or "\\" in name or file.name != name:
        raise CheckpointError(f"{directory}: file name {name[:200]!r} leaves its directory: expected a plain file name")
    try:
        target = file.resolve(strict=True)
        mode = target.stat().st_mode
    except (OSError, ValueError, RuntimeError) as error:  # RuntimeError: a loop of links, before Python 3.13
        raise CheckpointError(f"{file}: missing or unreadable: {getattr(error, 'strerror', None) or error}") from error
    if not any(target.is_relative_to(root) for root in _roots(within or directory)):
        raise CheckpointError(f"{file}: a link to {target}, which is outside its directory: copy the file there")
    if not stat.S_ISREG(mode):
        raise CheckpointError(f"{file}: not a regular file: put the file itself there")
    return file


def _roots(directory: Path) -> list[Path]:
    directory = directory.resolve()
    if directory.parent.name == "snapshots":  # <cache>/models--org--name/snapshots/<revision>
        return [directory, directory.parent.parent / "blobs"]
    return [directory]


def _exists(file: Path) -> bool:
    return file.exists() or file.is_symlink()


def _read_index(directory: Path) -> dict[str, str]:
    index = checked_file(directory, INDEX_FILE)
    weight_map = read_object(index, max_bytes=MAX_INDEX_BYTES).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index}: no weight_map: expected an object that maps tensor names to file names")
    for name, file in weight_map.items():
        if not isinstance(file, str):
            raise CheckpointError(
                f"{index}: tensor {name[:200]!r}: file {str(file)[:80]!r} is not a string: the index is damaged"
            )
        if not file.endswith(".safetensors"):
            raise CheckpointError(
                f"{index}: tensor {name[:200]!r} lies in {file[:200]!r}: expected a .safetensors file"
            )
    return weight_map


def _only_safetensors(directory: Path) -> Path:
    found = sorted(directory.glob("*.safetensors"))
    if len(found) == 1:
        return found[0]
    if found:
        names = ", ".join(f.name for f in found[:4])
        raise CheckpointError(
            f"{directory}: {len(found)} safetensors files ({names} ...) and no {INDEX_FILE}, so some may be missing: "
            "fetch the index too, or pass one file"
        )
    pickled = sorted(f.name for f in directory.iterdir() if f.suffix in PICKLE_SUFFIXES)
    if pickled:
        raise CheckpointError(f"{directory}: only {pickled[0]} is there, expected safetensors: {_TO_SAFETENSORS}")
    raise CheckpointError(f"{directory}: no safetensors file there: expected {SINGLE_FILE} or {INDEX_FILE}")
