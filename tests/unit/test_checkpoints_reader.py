"""Headers and indexes: what is refused, before anything is allocated, and that tensors are mapped lazily."""

from __future__ import annotations

import json
import os
import struct
import tracemalloc
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from fp4dispatch.checkpoints import open_checkpoint
from fp4dispatch.errors import CheckpointError
from tests.checkpoint_cases import tensors_of, write


def raw_file(path: Path, header: bytes | dict, data: bytes = b"", length: int | None = None) -> Path:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(raw) if length is None else length) + raw + data)
    return path


def entry(dtype: object = "U8", shape: object = (4,), offsets: object = (0, 4)) -> dict:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def test_reads_names_shapes_dtypes_and_tensors(tmp_path):
    tensors = tensors_of("modelopt-nvfp4")
    for shards in (1, 3):
        with open_checkpoint(write(tmp_path / str(shards), tensors, shards=shards)) as checkpoint:
            assert set(checkpoint) == set(tensors)
            assert len(checkpoint) == len(tensors)
            assert len(checkpoint.files) == shards
            assert checkpoint.nbytes == sum(t.numel() * t.element_size() for t in tensors.values())
            assert checkpoint["up_proj.weight_scale"].dtype == "F8_E4M3"
            for name, tensor in tensors.items():
                assert checkpoint[name].shape == tuple(tensor.shape)
                got = checkpoint.tensor(name)
                assert got.dtype == tensor.dtype
                assert torch.equal(got.float(), tensor.float())


def test_a_single_file_can_be_opened(tmp_path):
    file = tmp_path / "other.safetensors"
    save_file({"a": torch.ones(3)}, file)
    assert list(open_checkpoint(file)) == ["a"]
    assert list(open_checkpoint(tmp_path)) == ["a"]


def test_opening_and_mapping_take_no_memory_for_data(tmp_path):
    save_file({"big": torch.zeros(96 << 20, dtype=torch.uint8)}, tmp_path / "model.safetensors")
    before = _anonymous()
    with open_checkpoint(tmp_path) as checkpoint:
        tensor = checkpoint.tensor("big")
        assert tensor.shape == (96 << 20,)
        assert _anonymous() - before < 32 << 20
        tensor.sum()  # the pages belong to the file and can be dropped at any time
        assert _anonymous() - before < 32 << 20
        copy = tensor.clone()
        assert _anonymous() - before > 80 << 20  # the measurement does see a copy
        del copy


def _anonymous() -> int:
    text = Path("/proc/self/status").read_text()
    return 1024 * int(next(line.split()[1] for line in text.splitlines() if line.startswith("RssAnon")))


HEADERS = {
    "empty file": (b"", None, "at least 8"),
    "header longer than the file": (entry(), 1 << 20, "claims 1,048,576 bytes"),
    "header of 2^63": (entry(), 1 << 63, "claims 9,223,372,036,854,775,808"),
    "not json": (b"{", None, "not valid JSON"),
    "not utf-8": (b'{"\xff": 1}', None, "not valid JSON"),
    "a list": (b"[]", None, "expected an object"),
    "nested too deeply": (b"[" * 200_000, None, "too deeply|not valid JSON"),
    "repeated name": (b'{"a": 1, "b": {"c": 2}, "a": 3}', None, "'a' occurs twice"),
    "NaN": (b'{"a": NaN}', None, "NaN is not JSON"),
    "entry is no object": ({"a": 3}, None, "'a'.*expected dtype, shape and data_offsets"),
    "entry with other keys": ({"a": {**entry(), "x": 1}}, None, "expected dtype, shape and data_offsets"),
    "unknown dtype": ({"a": entry(dtype="F128")}, None, "'a': dtype 'F128'"),
    "dtype is a list": ({"a": entry(dtype=["U8"])}, None, "dtype"),
    "negative size": ({"a": entry(shape=[-4])}, None, "'a': shape"),
    "fractional size": ({"a": entry(shape=[4.0])}, None, "'a': shape"),
    "boolean size": ({"a": entry(shape=[True])}, None, "'a': shape"),
    "size of 2^63": ({"a": entry(shape=[1 << 63, 0], offsets=[0, 0])}, None, "'a': shape"),
    "product over 2^64": ({"a": entry(shape=[1 << 32, 1 << 32, 1 << 32])}, None, "needs 79,228,162,514,264"),
    "overflow to the right size": ({"a": entry(shape=[(1 << 33) + 1, 1 << 31, 4])}, None, "expected to match"),
    "too many dimensions": ({"a": entry(shape=[1] * 9 + [4])}, None, "at most 8 sizes"),
    "shape and offsets disagree": ({"a": entry(shape=[5])}, None, "needs 5 bytes, expected to match"),
    "begin after end": ({"a": entry(offsets=[4, 0])}, None, "begin <= end"),
    "negative offset": ({"a": entry(offsets=[-4, 0])}, None, "data_offsets"),
    "three offsets": ({"a": entry(offsets=[0, 4, 4])}, None, "data_offsets"),
    "end beyond the file": ({"a": entry(shape=[5], offsets=[0, 5])}, None, "ends at byte 5 .*the file has 4"),
    "hole": ({"a": entry(shape=[3], offsets=[1, 4])}, None, "hole"),
    "overlap": ({"a": entry(), "b": entry(shape=[2], offsets=[2, 4])}, None, "overlaps"),
    "data that nothing describes": ({"a": entry(shape=[2], offsets=[0, 2])}, None, "4 bytes of data, expected the 2"),
    "metadata is no map": ({"__metadata__": [1], "a": entry()}, None, "__metadata__"),
    "metadata with a number": ({"__metadata__": {"x": 1}, "a": entry()}, None, "__metadata__"),
    "half a byte": ({"a": entry(dtype="F4", shape=[3], offsets=[0, 1])}, None, "needs 1 bytes|match"),
}  # fmt: skip


@pytest.mark.parametrize("case", HEADERS)
def test_a_hostile_header_is_refused_by_name(tmp_path, case):
    header, length, expected = HEADERS[case]
    file = tmp_path / "model.safetensors"
    if header == b"":
        file.write_bytes(b"\x01")
    else:
        raw_file(
            file, header if isinstance(header, bytes) or "dtype" not in header else {"a": header}, b"\0" * 4, length
        )
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError, match=expected) as error:
            open_checkpoint(tmp_path)
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()
    assert "model.safetensors" in str(error.value)


def test_the_base_of_the_header_cases_is_valid(tmp_path):
    raw_file(tmp_path / "model.safetensors", {"a": entry()}, b"\0" * 4)
    assert open_checkpoint(tmp_path)["a"].nbytes == 4


@pytest.mark.parametrize("cut", [1, 7, 8, 100, -1])
def test_a_truncated_file_is_refused(tmp_path, cut):
    file = write(tmp_path, tensors_of("fp8-channel")) / "model.safetensors"
    size = file.stat().st_size
    os.truncate(file, cut if cut > 0 else size + cut)
    with pytest.raises(CheckpointError, match=r"model\.safetensors.*(truncated|claims)"):
        open_checkpoint(tmp_path)


def edit_index(path: Path, change) -> Path:
    file = path / "model.safetensors.index.json"
    index = json.loads(file.read_text())
    change(index)
    file.write_text(json.dumps(index))
    return path


@pytest.fixture
def sharded(tmp_path):
    return write(tmp_path / "ckpt", tensors_of("modelopt-nvfp4"), shards=2)


@pytest.mark.parametrize(
    "name", ["../x.safetensors", "/etc/x.safetensors", "a/b.safetensors", "..\\x.safetensors", "x\0.safetensors"]
)
def test_an_index_that_leaves_its_directory_is_refused(sharded, name):
    save_file({"steps": torch.tensor(1)}, sharded.parent / "x.safetensors")
    edit_index(sharded, lambda i: i["weight_map"].update(steps=name))
    with pytest.raises(CheckpointError, match="leaves its directory"):
        open_checkpoint(sharded)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda i: i.pop("weight_map"), "no weight_map"),
        (lambda i: i.update(weight_map={}), "no weight_map"),
        (lambda i: i.update(weight_map=[1]), "no weight_map"),
        (lambda i: i["weight_map"].update(steps=3), "'steps': file '3' is not a string"),
        (lambda i: i["weight_map"].update(steps="pytorch_model.bin"), "expected a .safetensors file"),
        (lambda i: i["weight_map"].update(steps="gone.safetensors"), "gone.safetensors: missing"),
        (lambda i: i["weight_map"].update(ghost="model-00001-of-00002.safetensors"), "'ghost' is missing"),
        (lambda i: i["weight_map"].pop("steps"), "'steps' is not in the index"),
        (
            lambda i: i["weight_map"].update(steps=_other(i["weight_map"]["steps"])),
            "'steps' is a duplicate|'steps' is missing",
        ),
    ],
)
def test_a_broken_index_is_refused(sharded, change, expected):
    with pytest.raises(CheckpointError, match=expected):
        open_checkpoint(edit_index(sharded, change))


def _other(file: str) -> str:
    return file.replace("00001-of", "0000X-of").replace("00002-of", "00001-of").replace("0000X-of", "00002-of")


def test_a_tensor_in_two_shards_is_refused(sharded):
    tensors = tensors_of("modelopt-nvfp4")
    index = json.loads((sharded / "model.safetensors.index.json").read_text())["weight_map"]
    other = _other(index["steps"])
    part = {name: tensors[name] for name, file in index.items() if file == other}
    save_file({**part, "steps": tensors["steps"]}, sharded / other)
    with pytest.raises(CheckpointError, match="'steps' is a duplicate"):
        open_checkpoint(sharded)


def test_links_stay_inside_or_in_a_hugging_face_cache(tmp_path):
    write(tmp_path / "outside", tensors_of("fp8-tensor"))
    inside = tmp_path / "inside"
    inside.mkdir()
    (inside / "model.safetensors").symlink_to(tmp_path / "outside" / "model.safetensors")
    with pytest.raises(CheckpointError, match="outside its directory"):
        open_checkpoint(inside)

    cache = tmp_path / "models--a--b"
    (cache / "blobs").mkdir(parents=True)
    (tmp_path / "outside" / "model.safetensors").rename(cache / "blobs" / "abc")
    snapshot = cache / "snapshots" / "rev"
    snapshot.mkdir(parents=True)
    (snapshot / "model.safetensors").symlink_to("../../blobs/abc")
    with open_checkpoint(snapshot) as checkpoint:
        assert checkpoint.tensor("steps").item() == 7
    (cache / "secret").write_bytes((cache / "blobs" / "abc").read_bytes())
    (snapshot / "model.safetensors").unlink()
    (snapshot / "model.safetensors").symlink_to("../../secret")
    with pytest.raises(CheckpointError, match="outside its directory"):
        open_checkpoint(snapshot)


def test_what_is_not_a_regular_file_is_refused(tmp_path):
    (tmp_path / "a").mkdir()
    os.mkfifo(tmp_path / "a" / "model.safetensors")  # opening it would wait for ever
    with pytest.raises(CheckpointError, match="not a regular file"):
        open_checkpoint(tmp_path / "a")
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "model.safetensors").symlink_to("model.safetensors")
    with pytest.raises(CheckpointError, match="missing or unreadable"):
        open_checkpoint(tmp_path / "b")


def test_pickles_are_never_read(tmp_path):
    pickle = tmp_path / "pytorch_model.bin"
    torch.save({"a": torch.ones(1)}, pickle)
    for path in (tmp_path, pickle, tmp_path / "model.pt"):
        with pytest.raises(CheckpointError, match=r"(?s)safetensors.*convert it"):
            open_checkpoint(path)


def test_what_to_read_must_be_clear(tmp_path):
    with pytest.raises(CheckpointError, match="no such directory"):
        open_checkpoint(tmp_path / "nothing")
    with pytest.raises(CheckpointError, match="no safetensors file"):
        open_checkpoint(tmp_path)
    write(tmp_path, tensors_of("fp8-tensor"), shards=2)
    (tmp_path / "model.safetensors.index.json").rename(tmp_path / "index")
    with pytest.raises(CheckpointError, match=r"2 safetensors files.*index"):
        open_checkpoint(tmp_path)
    (tmp_path / "index").rename(tmp_path / "model.safetensors.index.json")
    save_file({"a": torch.ones(1)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="found both"):
        open_checkpoint(tmp_path)


def test_a_file_that_changes_after_it_was_opened_is_noticed(tmp_path):
    write(tmp_path, {"a": torch.ones(4), "b": torch.ones(2)})
    with open_checkpoint(tmp_path) as checkpoint:
        (tmp_path / "model.safetensors").unlink()
        write(tmp_path, {"a": torch.ones(5), "b": torch.ones(2)})
        with pytest.raises(CheckpointError, match="changed while it was being read"):
            checkpoint.tensor("a")
        with pytest.raises(CheckpointError, match="'c' is not in the checkpoint"):
            checkpoint.tensor("c")
