"""The comparer of machine code sees every difference that counts, none that does not, and never passes on nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests import machine_code as mc

BITS = "0x000fe20000000800"


def listing(*lines: str, name: str = "kernel", bits: str = BITS, first_label: int = 0, constants: str = "") -> str:
    """Lay out instructions and labels as ``nvdisasm -hex`` does. ``{0}`` stands for the first label, and so on."""
    labels = [f".L_x_{first_label + i}" for i in range(4)]
    rows = [f'\t.section\t.text.{name},"ax",@progbits', "\t.align\t128", f"{name}:", f".text.{name}:"]
    address = 0
    for line in lines:
        text = line.format(*labels)
        if text.endswith(":"):
            rows.append(text)
            continue
        rows.append(f"        /*{address:04x}*/                   {text} ;      /* 0x00000a00ff017b82 */")
        rows.append(f"                                                     /* {bits} */")
        address += 16
    if constants:
        rows += [f'\t.section\t.nv.constant2.{name},"a",@progbits', "\t.align\t4", constants]
    return "\n".join(rows)


def code(*lines: str, name: str = "kernel", **options: object) -> dict[str, mc.Code]:
    return mc.parse(listing(*lines, name=name, **options))  # type: ignore[arg-type]


BODY = ("LDC R1, c[0x0][0x28]", "{0}:", "IADD3 R1, R1, -0x8, RZ", "@P0 BRA `({0})", "EXIT")


def verdicts(rows: list[mc.Row]) -> list[str]:
    return [row.verdict for row in rows]


def test_the_same_code_is_equal_whatever_its_labels_are_called() -> None:
    rows = mc.compare("b", code(*BODY), code(*BODY, first_label=40))
    assert verdicts(rows) == [mc.EQUAL]
    assert mc.exit_code(rows) == 0
    assert len(code(*BODY)["kernel"].instructions) == 4


@pytest.mark.parametrize(
    ("after", "note"),
    [
        (code(*BODY[:2], "IADD3 R1, R1, -0x10, RZ", *BODY[3:]), "instruction 1: IADD3 R1, R1, -0x8, RZ"),
        (code(*BODY[:3], "@P1 BRA `({0})", "EXIT"), "instruction 2: @P0 BRA"),
        (code(*BODY, bits="0x000fe40000000800"), "instruction 0, bits of LDC"),
        (code(*BODY, "NOP"), "4 -> 5 instructions"),
        (code(*BODY, constants="        /*0000*/ \t.byte\t0x01, 0x00"), "constants: 0 -> 2 rows"),
        (mc.parse(listing(*BODY), {"kernel": "REG:40 STACK:0"}), "resources:  -> REG:40 STACK:0"),
    ],
)
def test_what_differs_is_found_and_named(after: dict[str, mc.Code], note: str) -> None:
    rows = mc.compare("b", code(*BODY), after)
    assert verdicts(rows) == [mc.DIFFERENT]
    assert note in rows[0].note
    assert mc.exit_code(rows) == 1


def test_a_branch_to_another_place_differs() -> None:
    before = code("{0}:", "NOP", "{1}:", "NOP", "BRA `({0})")
    after = code("{0}:", "NOP", "{1}:", "NOP", "BRA `({1})")
    assert verdicts(mc.compare("b", before, after)) == [mc.DIFFERENT]


def test_constants_differ_by_their_bytes() -> None:
    before, after = (code(*BODY, constants=f"        /*0000*/ \t.byte\t{byte}") for byte in ("0x01", "0x02"))
    (row,) = mc.compare("b", before, after)
    assert row.note == "constants: .byte\t0x01 -> .byte\t0x02"


def test_hashes_of_a_build_in_internal_names_are_no_difference() -> None:
    name = "\t.dword\t_ZN47_INTERNAL_{}_16_fp8_gemm_sm90_cu_{}4cuda3std5begin{}"
    one, other, begins = (
        code(*BODY, constants=name.format(*words))
        for words in (("e81ea842", "813b143f", "E"), ("b35f0c34", "9fbcb143", "E"), ("e81ea842", "813b143f", "_E"))
    )
    assert verdicts(mc.compare("b", one, other)) == [mc.EQUAL]
    assert verdicts(mc.compare("b", one, begins)) == [mc.DIFFERENT]


def test_a_renamed_kernel_is_missing_unless_asked_for() -> None:
    before, after = code(*BODY, name="old"), code(*BODY, name="new")
    rows = mc.compare("b", before, after)
    assert {row.kernel: row.verdict for row in rows} == {"old": mc.MISSING, "new": mc.NEW}
    assert mc.exit_code([*rows, mc.Row("b", "other", mc.EQUAL)]) == 1
    rows = mc.compare("b", before, after, renamed=True)
    assert [(row.kernel, row.verdict, row.note) for row in rows] == [("old", mc.EQUAL, "renamed to new")]


def test_a_renamed_kernel_with_other_code_differs() -> None:
    rows = mc.compare("b", code(*BODY, name="old"), code("EXIT", name="new"), renamed=True)
    assert verdicts(rows) == [mc.DIFFERENT]
    assert rows[0].note.startswith("renamed to new; instruction 0: LDC")


def test_a_kernel_that_names_itself_is_equal_under_another_name() -> None:
    before, after = (code(f"UMOV UR4, 32@lo({name})", "EXIT", name=name) for name in ("old", "new"))
    assert verdicts(mc.compare("b", before, after, renamed=True)) == [mc.EQUAL]


@pytest.mark.parametrize(
    "damaged",
    [
        listing(*BODY) + "\n        /*0040*/                   EXIT ;      /* 0x00000a00ff017b82 */",
        listing(*BODY) + f"\n          /* {BITS} */",
        listing(*BODY) + "\n        /*0040*/                   EXIT ;",
    ],
)
def test_a_line_that_cannot_be_read_is_an_error(damaged: str) -> None:
    with pytest.raises(mc.Incomparable):
        mc.parse(damaged)


@pytest.mark.parametrize("rows", [[], [mc.Row("b", "(all)", mc.MISSING)], [mc.Row("b", "k", mc.NEW)]])
def test_nothing_compared_is_no_success(rows: list[mc.Row]) -> None:
    assert mc.exit_code(rows) == 2


def entry(folder: Path, variant: str = "bf16") -> Path:
    folder.mkdir(parents=True)
    (folder / "entry.json").write_text(
        json.dumps({"request": {"kernel": "w4a16_small", "variant": variant, "target": "90a"}})
    )
    (folder / "kernel.so").write_bytes(b"")
    return folder / "kernel.so"


def test_builds_of_a_cache_are_named_by_their_request(tmp_path: Path) -> None:
    library = entry(tmp_path / "kernels" / "x" / "y" / "z")
    (tmp_path / "plain.cubin").write_bytes(b"")
    assert mc.builds(tmp_path) == {"w4a16_small/bf16-90a": library, "plain": tmp_path / "plain.cubin"}


def test_two_entries_of_one_build_are_refused(tmp_path: Path) -> None:
    for key in "ab":
        entry(tmp_path / key)
    with pytest.raises(mc.Incomparable, match="are both w4a16_small/bf16-90a"):
        mc.builds(tmp_path)


def test_an_empty_folder_is_exit_code_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert mc.main([str(tmp_path), str(tmp_path)]) == 2
    assert "holds no .so and no .cubin file" in capsys.readouterr().err


def test_no_build_in_common_is_exit_code_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mc, "disassembler", lambda minimum: None)  # nothing is disassembled here
    entry(tmp_path / "before" / "k")
    entry(tmp_path / "after" / "k", "fp16")
    assert mc.main([str(tmp_path / "before"), str(tmp_path / "after")]) == 2
    assert "no kernel is on both sides" in capsys.readouterr().err
    assert mc.main([str(tmp_path / "before"), str(tmp_path / "before"), "--only", "none*"]) == 2
