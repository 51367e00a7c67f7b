"""CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER: our reading against cases and against torch's own."""

from __future__ import annotations

import os
import re
from unittest import mock

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from fp4dispatch.machine.nvml import Board, MigDevice, select
from fp4dispatch.problem.arch import SM90, SM100, SM120

A, B, C, D = (f"GPU-{word}-1111-2222-3333-444444444444" for word in ("aaaa1111", "aaaa2222", "bbbb3333", "cccc4444"))
FOUR = tuple(Board(uuid, "NVIDIA H200", SM90, 141 << 30) for uuid in (A, B, C, D))
MIG = Board(
    "GPU-dddd",
    "NVIDIA H200",
    SM90,
    mig=(MigDevice("MIG-1111", "NVIDIA H200 MIG 1g.18gb", 18 << 30, 7, 0), MigDevice("MIG-2222", "", 36 << 30, 3, 1)),
)


def uuids(visible: str | None, boards: tuple[Board, ...] = FOUR, order: str = "FASTEST_FIRST") -> list[str]:
    gpus, _ = select(boards, visible, order)
    assert [gpu.index for gpu in gpus] == list(range(len(gpus)))
    return [gpu.uuid for gpu in gpus]


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        (None, [A, B, C, D]),
        ("", []),
        ("-1", []),
        (" ", []),
        ("0", [A]),
        ("2,1", [C, B]),
        (" 2 , 1 ", [C, B]),
        ("0,2,-1,1", [A, C]),
        ("0,9,1", [A]),
        ("9", []),
        ("0,,1", [A]),
        ("0,x,1", [A]),
        ("+1", [B]),
        ("1gpu2,2ampere", [B, C]),
        ("0,1,0", []),
        ("0,0", []),
        ("NoDevFiles", []),
        ("0,GPU-bbbb", [A]),
        ("GPU-bbbb", [C]),
        (f"{C},{A}", [C, A]),
        ("GPU-aaaa", []),  # ambiguous
        ("GPU-bbbb,GPU-aaaa,GPU-cccc", [C]),
        ("GPU-bbbb,GPU-zzzz,GPU-cccc", [C]),
        ("GPU-bbbb,0,GPU-cccc", [C]),
        ("GPU-bbbb,GPU-bbbb", []),
        ("GPU-bbbb,GPU-bbbb3333", []),  # two spellings of one GPU
        ("GPU-", []),
        ("gpu-bbbb", []),
        ("GPU-bbbb,MIG-cccc", [C, D]),
        ("MIG-cccc,GPU-bbbb", [D, C]),
        (f"GPU-bbbb,{C.upper()}", []),
        ("MIG-9999", []),
    ],
)
def test_visible_devices(visible: str | None, expected: list[str]) -> None:
    assert uuids(visible) == expected


@pytest.mark.parametrize("visible", ["0,0", "9", "0,9", "0,x", "GPU-aaaa", "GPU-zzzz", "GPU-bbbb,GPU-bbbb", "MIG-9999"])
def test_an_odd_list_is_explained(visible: str) -> None:
    _, notes = select(FOUR, visible, "FASTEST_FIRST")
    assert len(notes) == 1
    assert notes[0].startswith(f"CUDA_VISIBLE_DEVICES={visible!r}: ")


@pytest.mark.parametrize("visible", [None, "", "-1", "0,1", "0,-1", C])
def test_a_plain_list_is_not_remarked_on(visible: str | None) -> None:
    assert select(FOUR, visible, "FASTEST_FIRST")[1] == ()


# How many devices driver 580.159.04 showed with one H200, by CUDA_VISIBLE_DEVICES (2026-11-21). U: its UUID.
DRIVER_SAYS = {
    1: [
        "0", " 0", "0 ", "00", "+0", "-0", "0,-1", "0,-1,0", "0,99", "0,99,0", "0,x", "0x0", "0gpu", "0,-", "0,,0",
        "0,1", "0,1,0", "0,GPU-", "0;1", "0 1", "\t0", "4294967296", "-4294967296", "18446744069414584320",
        "GPU-U", "GPU-U,0", "GPU-U4", "GPU-U,GPU-zzzz", "GPU-U ", "GPU-U,", "GPU-U, GPU-zz", "GPU-U, GPU-U",
        "GPU-Ux", "GPU-U x", "GPU-U\t", "GPU-UPPER", "GPU-NODASH", "GPU-NODASH0", "GPU-U,GPU-", "GPU-U/0/0",
        "GPU--U", "GPU-U8--", "GPU-U4-", "MIG-U", "MIG-U4", "MIG-U,0", "MIG-U ", "MIG-Ux", "MIG-U/0/0", "0,MIG-U",
    ],
    0: [
        "", " ", "-1", "0,0", "99", "99,0", "x", "x,0", "-", "+", ",0", "NoDevFiles", "1", "1,0", "GPU-",
        "GPU-U,GPU-U", "GPU-U4,GPU-U8", "GPU-zzzz", "GPU-zzzz,GPU-U", "gpu-U", " GPU-U", "GPU-U4 ", "GPU-U8 ,0",
        "GPU-U,GPU-U ", "GPU-U,MIG-U", "GPU-U8,GPU-U8-", "GPU-U31x", "MIG-", "MIG-zzz", "MIG-U,MIG-U", "MIG-U4 ",
        "MIG-GPU-U", "MIG-GPU-U/", "MIG-GPU-U/0/0", "MIG-GPU-U8", "GPU-MIG-U", "0\t,0", "0, 0", "0 1,0", "1e",
        "010", "0,4294967296", "4294967297,0", "-4294967295", "18446744073709551615", "18446744073709551616",
        "99999999999999999999",
    ],
}  # fmt: skip


@pytest.mark.parametrize(("count", "visible"), [(n, text) for n, texts in DRIVER_SAYS.items() for text in texts])
def test_what_the_driver_answered(count: int, visible: str) -> None:
    uuid = "b27d8feb-abf3-934f-233b-1424c73d6d99"
    shorts = {"UPPER": uuid.upper(), "NODASH": uuid.replace("-", ""), "U31": uuid[:35], "U8": uuid[:8], "U4": uuid[:4]}
    for name, text in {**shorts, "GPU": "@", "U": uuid, "@": "GPU"}.items():
        visible = visible.replace(name, text)
    one = Board(f"GPU-{uuid}", "NVIDIA H200", SM90)
    assert len(uuids(visible, (one,))) == count


@pytest.mark.parametrize("order", ["", "pci_bus_id", " PCI_BUS_ID", "PCI_BUS_ID ", "fastest_first", "PCI"])
def test_a_wrong_order_hides_every_gpu(order: str) -> None:
    """Driver 580.159.04: cuInit fails with error 101 for each of these."""
    gpus, notes = select(FOUR, None, order)
    assert gpus == ()
    assert notes == (notes[0],)
    assert notes[0].startswith(f"CUDA_DEVICE_ORDER={order!r}")


def torch_says(visible: str | None) -> list[str]:
    """Ask torch's reimplementation, which its authors test against the driver."""
    known = [board.uuid for board in FOUR]
    environment = {key: value for key, value in os.environ.items() if key != "CUDA_VISIBLE_DEVICES"}
    if visible is not None:
        environment["CUDA_VISIBLE_DEVICES"] = visible
    with (
        mock.patch.dict(os.environ, environment, clear=True),
        mock.patch.object(torch.cuda, "_raw_device_count_nvml", return_value=len(known)),
        mock.patch.object(torch.cuda, "_raw_device_uuid_nvml", return_value=known),
    ):
        count = torch.cuda._device_count_nvml()
        listed = torch.cuda._parse_visible_devices()
    if listed and isinstance(listed[0], str):
        listed = torch.cuda._transform_uuid_to_ordinals(listed, known)
    return [known[i] for i in listed[:count]]


WORDS = st.one_of(
    st.integers(-2, 6).map(str),
    st.sampled_from([A, B, C, D, "GPU-aaaa", "GPU-bbbb", "GPU-", "GPU-zz", "+1", "1x", "", " ", " 2", "x"]),
    st.text("0123456789+- x", max_size=6),
)


@settings(max_examples=2000, deadline=None)
@given(st.one_of(st.none(), st.lists(WORDS, max_size=5).map(",".join)))
def test_agrees_with_torch(visible: str | None) -> None:
    """2000 inputs: torch and we see the same GPUs in the same order."""
    words = [word.strip() for word in (visible or "").split(",")]
    assume(not any(re.match(r"[+-](?![0-9])", word) for word in words))  # torch fails where strtoul converts nothing
    assume("GPU-" not in words)  # torch takes it for a prefix of everything, the driver for nothing
    ordinals = [int(match[0]) for match in (re.match(r"[+-]?\d+", word) for word in words) if match]
    twins = len(set(words)) < len(words) or len(set(ordinals)) < len(ordinals)
    assume(not twins)  # torch looks for twins in the whole list, the driver up to the first invalid entry
    assert uuids(visible) == torch_says(visible)


def test_mixed_gpus_are_ordered_by_speed_unless_told_otherwise() -> None:
    slow = Board("GPU-slow", "NVIDIA T400", SM120, speed=384 * 1425)
    fast = Board("GPU-fast", "NVIDIA B200", SM100, speed=18944 * 1965)
    assert uuids(None, (slow, fast)) == ["GPU-fast", "GPU-slow"]
    assert uuids("1", (slow, fast)) == ["GPU-slow"]
    assert uuids(None, (slow, fast), "PCI_BUS_ID") == ["GPU-slow", "GPU-fast"]
    assert uuids("0", (slow, fast), "PCI_BUS_ID") == ["GPU-slow"]
    notes = select((slow, fast), None, "FASTEST_FIRST")[1]
    assert len(notes) == 1
    assert "CUDA_DEVICE_ORDER=PCI_BUS_ID" in notes[0]
    assert select((slow, fast), None, "PCI_BUS_ID")[1] == ()


def test_equal_gpus_keep_the_bus_order() -> None:
    boards = tuple(Board(f"GPU-{i}", "NVIDIA H200", SM90, speed=1000 + i) for i in range(3))
    assert uuids(None, boards) == ["GPU-0", "GPU-1", "GPU-2"]


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        ("MIG-2222", "MIG-2222"),
        ("MIG-GPU-dddd/3/1", "MIG-2222"),
        ("MIG-GPU-dddd/7/0,MIG-2222", "MIG-1111"),
        (None, "MIG-1111"),
        ("0", "MIG-1111"),
        ("GPU-dddd", "MIG-1111"),
    ],
)
def test_mig(visible: str | None, expected: str) -> None:
    gpus, _ = select((MIG, FOUR[0]), visible, "PCI_BUS_ID")
    assert [gpu.uuid for gpu in gpus] == [expected]
    assert gpus[0].arch == SM90


def test_a_mig_device_keeps_its_own_memory_and_has_a_name() -> None:
    (one,), (two,) = (select((MIG,), name, "PCI_BUS_ID")[0] for name in ("MIG-1111", "MIG-2222"))
    assert (one.name, one.memory) == ("NVIDIA H200 MIG 1g.18gb", 18 << 30)
    assert (two.name, two.memory) == ("NVIDIA H200", 36 << 30)


@pytest.mark.parametrize("visible", ["MIG-3333", "MIG-1112", "MIG-GPU-dddd/7/1", "MIG-GPU-eeee/7/0"])
def test_an_unknown_mig_device_hides_everything(visible: str) -> None:
    assert uuids(visible, (MIG, FOUR[0])) == []


def test_a_board_in_mig_mode_without_an_instance_is_not_a_device() -> None:
    empty = Board("GPU-empty", "NVIDIA H200", SM90, mig=())
    gpus, notes = select((empty, FOUR[0]), None, "PCI_BUS_ID")
    assert [gpu.uuid for gpu in gpus] == [A]
    assert "without an instance" in notes[0]


def test_boards_without_mig_stay_when_they_are_the_ones_listed() -> None:
    assert uuids("1", (MIG, FOUR[0]), "PCI_BUS_ID") == [A]
