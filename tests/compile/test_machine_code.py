"""The comparer of machine code on kernels from the compiler."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from fp4dispatch.jit.catalog.manifest import installed
from fp4dispatch.jit.compiler.toolchain import locate
from tests import machine_code
from tests.compile.built_kernels import NEEDS_NVCC

pytestmark = NEEDS_NVCC

SOURCE = """
__constant__ float table[4] = {1, 2, 3, TABLE};
template <int N> __global__ void scale(float* p, int n) {
  for (int i = threadIdx.x; i < n; i += 32) p[i] = p[i] * FACTOR + table[i % N] / p[0];
}
template __global__ void scale<2>(float*, int);
template __global__ void scale<4>(float*, int);
"""
NAMES = {"_Z5scaleILi2EEvPfi", "_Z5scaleILi4EEvPfi"}


def build(folder: Path, factor: str = "3.f", table: str = "4", **edits: str) -> Path:
    record = installed().record("90a")
    nvcc = locate(record, installed().common, needs_cutlass=False).nvcc
    folder.mkdir()
    source, cubin = folder / "scale.cu", folder / "scale.cubin"
    text = SOURCE
    for old, new in edits.items():
        text = text.replace(old, new)
    source.write_text(text)
    macros = [f"-DFACTOR={factor}", f"-DTABLE={table}"]
    subprocess.run([nvcc, *record.nvcc, *macros, "-cubin", "-o", cubin, source], check=True)
    return folder


def test_one_kernel_built_twice_is_equal_and_a_changed_constant_is_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = build(tmp_path / "first")
    rows = machine_code.compare_paths(first, build(tmp_path / "again"))
    assert {(row.kernel, row.verdict) for row in rows} == {(name, machine_code.EQUAL) for name in NAMES}

    rows = machine_code.compare_paths(first, build(tmp_path / "factor", factor="5.f"))
    assert [row.verdict for row in rows] == [machine_code.DIFFERENT] * 2
    assert all("FFMA" in row.note or "FMUL" in row.note for row in rows), rows

    rows = machine_code.compare_paths(first, build(tmp_path / "table", table="5"))
    assert [row.verdict for row in rows] == [machine_code.DIFFERENT] * 2
    assert all(row.note.startswith("constants: ") for row in rows), rows

    renamed = build(tmp_path / "renamed", scale="scaled_by")
    assert machine_code.main([str(first), str(renamed)]) == 2  # no kernel of one name
    assert machine_code.main([str(first), str(renamed), "--renamed"]) == 0
    assert "renamed to _Z9scaled_byILi" in capsys.readouterr().out


def listing(number: int, function: str = "rcp") -> str:
    call = f"CALL.REL.NOINC `($__internal_{number}_$__cuda_{function}_slowpath) ;"
    return "\n".join(
        [
            '\t.section\t.text.kernel,"ax",@progbits',
            f"        /*0000*/                   {call}   /* 0x0000000000007944 */",
            "                                                         /* 0x003fde0003c00000 */",
        ]
    )


def test_the_number_of_a_function_that_the_compiler_adds_is_no_difference() -> None:
    one, another, other = (machine_code.parse(text)["kernel"] for text in (listing(5), listing(17), listing(5, "div")))
    assert machine_code.difference(one, another) == ""
    assert "slowpath" in machine_code.difference(one, other)
