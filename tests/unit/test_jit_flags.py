"""Compile targets and the kernel manifest: what is shipped is sound, and every contradiction is refused."""

from __future__ import annotations

import ast
import re
import shutil
from pathlib import Path

import pytest

from fp4dispatch.errors import FlagsError
from fp4dispatch.jit import kernels
from fp4dispatch.jit.catalog import flags
from fp4dispatch.jit.catalog.manifest import Catalog, installed
from fp4dispatch.problem.arch import KNOWN_ARCHS, SM75, SM120, SM121, Arch
from tests.jit_cases import JIT_FLAGS, MANIFEST, REPOSITORY, tiny_catalog, tiny_sources

GDC_TARGETS = {"90a", "100f", "103a", "110a", "120f", "121a"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(JIT_FLAGS, tmp_path / "jit_flags"))


def load(folder: Path) -> dict[str, flags.FlagRecord]:
    return flags.load_records(folder, flags.load_common(folder))


def edit(folder: Path, target: str, old: str, new: str) -> None:
    path = folder / f"sm{target}.toml"
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def test_shipped_targets() -> None:
    records = load(JIT_FLAGS)
    assert set(records) == GDC_TARGETS | {"80", "89"}
    assert {target for target, record in records.items() if record.gdc} == GDC_TARGETS
    assert records["120f"].archs == (SM120, SM121)


def test_every_known_arch_since_sm80_has_a_target() -> None:
    covered = {arch for record in load(JIT_FLAGS).values() for arch in record.archs}
    assert covered == set(KNOWN_ARCHS) - {SM75}


def test_shipped_manifest_loads_and_its_pdl_gemms_have_barriers_to_prove() -> None:
    catalog = installed()
    gemms = [kernel for kernel in catalog.kernels.values() if kernel.op.endswith("_gemm")]
    assert gemms
    for kernel in gemms:
        assert kernel.pdl
        plain = {target for target in kernel.targets if not catalog.record(target).gdc}
        assert plain <= {"80", "89"}, f"{kernel.name}: griddepcontrol exists from sm_90 on"
        assert plain < set(kernel.targets)


def test_only_the_weight_stream_may_come_before_the_barrier() -> None:
    declared = {kernel.name for kernel in installed().kernels.values() if kernel.before_wait}
    assert declared <= {kernel.name for kernel in installed().kernels.values() if kernel.op in ("w4_gemm", "w8_gemm")}
    assert {"w4a16_small", "w8a16_small"} <= declared


@pytest.mark.parametrize(
    ("target", "old", "new", "message"),
    [
        ("120f", 'note = "', 'speed = 1\nnote = "', "unknown key 'speed'"),
        ("120f", "gdc = true\n", "", "key 'gdc' is missing"),
        ("120f", "gdc = true", 'gdc = "true"', "gdc must be bool, found str"),
        ("120f", "120f", "120", "its name must be sm120.toml|plain target 120"),
        ("120f", "SM100=1", "SM90=1", "wrong family"),
        ("90a", "SM90=1", "SM100=1", "wrong family"),
        ("120f", '"CUTLASS_ENABLE_GDC_FOR_SM100=1"', "", "needs the define CUTLASS_ENABLE_GDC_FOR_SM100=1"),
        ("120f", "SM100=1", "SM100=0", "write the define as CUTLASS_ENABLE_GDC_FOR_SM100=1"),
        ("80", "defines = []", 'defines = ["CUTLASS_ENABLE_GDC_FOR_SM90=1"]', "gdc = false, but"),
        ("120f", '"12.1"', '"10.0"', "runs on no other major capability"),
        ("121a", '"12.1"', '"12.1", "12.0"', "runs on no other arch"),
        ("121a", '"12.1"', '"12.0"', "must list its own arch 12.1"),
        ("120f", "code=sm_120f", "code=sm_100f", "does not generate code for sm_120f"),
        ("120f", "code=sm_120f", "code=sm_120", "does not generate code for sm_120f"),
        ("120f", "code=sm_120f", "code=sm_120f;rm", "characters that a shell reads"),
        ("120f", '"CUTLASS_ENABLE', '"A=$(rm)", "CUTLASS_ENABLE', "is not a definition"),
        ("120f", "'ACQBULK'", "'X*'", "matches the empty text"),
        ("120f", "'ACQBULK'", "'('", "is not a regular expression"),
        ("120f", "wait = 'ACQBULK', ", "", "key 'wait' is missing"),
        ("120f", '"12.9"', '"new"', "is not a version"),
        ("120f", '"12.0"', '"sm120f"', "is not a GPU architecture"),
        ("120f", "gdc = true", "gdc = = true", "is not TOML"),
    ],
)
def test_a_record_that_contradicts_itself_is_refused(
    folder: Path, target: str, old: str, new: str, message: str
) -> None:
    edit(folder, target, old, new)
    with pytest.raises(FlagsError, match=message):
        load(folder)


def test_plain_target_with_gdc_is_refused_also_under_its_own_name(folder: Path) -> None:
    edit(folder, "120f", "120f", "120")
    (folder / "sm120f.toml").rename(folder / "sm120.toml")
    with pytest.raises(FlagsError, match=r"gdc = true on the plain target 120: .* use 120a or 120f"):
        load(folder)


def test_common_flags_are_strict(folder: Path) -> None:
    path = folder / "common.toml"
    text = path.read_text()
    for old, new, message in [
        ("[minimum]", "[minimum]\ngcc = '1'", "unknown key 'gcc'"),
        ('"-O3"', '"-O3 `x`"', "characters that a shell reads"),
        ("plain = 1.5", "plain = true", "plain must be float, found bool"),
    ]:
        path.write_text(text.replace(old, new))
        with pytest.raises(FlagsError, match=message):
            flags.load_common(folder)


def test_a_folder_without_records_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FlagsError, match="holds no compile target"):
        flags.load_records(tmp_path, flags.load_common(JIT_FLAGS))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("pdl = true", "pdl = true\ntiles = 3", "unknown key 'tiles'"),
        ('"nvfp4_quantize"', '"matmul"', "op 'matmul' is not known"),
        ('"nvfp4_quantize"', '"nvfp4_gemm"', "must name the tensor-core instruction"),
        ('"tiny.cu"', '"none.cu"', "is not a file of"),
        ('"tiny.cu"', '"../csrc/tiny.cu"', "is not a file of"),
        ('"tiny.cu"', '"room/../tiny.cu"', "is not a file of"),
        ('"tiny.cu"', '"./tiny.cu"', "is not a file of"),
        ('"tiny.cu"', '"/dev/null"', "is not a file of"),
        ('"tiny.cu"', '""', "is not a file of"),
        ('"120f"', '"120"', "target 120 has no file in jit_flags"),
        ('["90a", "120f", "80"]', "[]", "needs at least one target"),
        ('"two"', '"one"', "variant 'one' stands twice"),
        ('"two"', '"a/b"', "may hold lower-case"),
        ("ADD=2", "ADD=2 -w", "is not a definition"),
        ("pdl = true", "pdl = true\nmma = ''", "matches the empty text"),
        ('id = "two"', 'name = "two"', "unknown key 'name'"),
        ("pdl = true", "pdl = true\nbefore_wait = ['UBLKCP']", "before_wait must be dict, found list"),
        *(
            (row, row.replace("pdl = true", f"pdl = {pdl}\nbefore_wait = {declared}"), message)
            for row, pdl, declared, message in (
                ("pdl = true", "true", "{ access = 'UBLKCP' }", "key 'weights' is missing"),
                ("pdl = true", "true", "{ access = 'LDG', weights = [0, 8] }", "access is 'LDG', needed one of UBLKCP"),
                ("pdl = true", "true", "{ access = 'UBLKCP', weights = [0, 16] }", "16 bytes, UBLKCP needs 8"),
                ("pdl = true", "true", "{ access = 'UTMALDG', weights = [0, 8] }", "8 bytes, UTMALDG needs 128"),
                ("pdl = true", "true", "{ access = 'UBLKCP', weights = [0] }", "need the first byte"),
                ("pdl = true", "true", "{ access = 'UBLKCP', weights = [2, 10] }", "no range of whole 32-bit words"),
                (
                    "pdl = true",
                    "true",
                    "{ access = 'UBLKCP', weights = [0, 8], numbers = [4, 16] }",
                    "beside the weights",
                ),
                ("pdl = true", "false", "{ access = 'UBLKCP', weights = [0, 8] }", "nothing waits"),
            )
        ),
    ],
)
def test_a_broken_manifest_is_refused(tmp_path: Path, old: str, new: str, message: str) -> None:
    assert old in MANIFEST
    with pytest.raises(FlagsError, match=message):
        tiny_catalog(tmp_path / "csrc", manifest=MANIFEST.replace(old, new))


def test_what_may_come_before_the_barrier_is_part_of_the_build(tmp_path: Path) -> None:
    plain = tiny_catalog(tmp_path / "plain")
    row = "before_wait = { access = 'UBLKCP', weights = [0, 8], numbers = [8, 16] }"
    manifest = MANIFEST.replace("pdl = true", f"pdl = true\n{row}")
    declared = tiny_catalog(tmp_path / "declared", manifest=manifest)
    requests = [kernels.request(kernels.job(catalog, "tiny", "one", "90a")) for catalog in (plain, declared)]
    declared_row = {"access": "UBLKCP", "weights": [0, 8], "numbers": [8, 16]}
    assert {**requests[1], "recipe": None} == {**requests[0], "recipe": None, "before_wait": declared_row}
    macros = ["-DFP4D_WEIGHTS_FIRST=0", "-DFP4D_WEIGHTS_LAST=8", "-DFP4D_NUMBERS_FIRST=8", "-DFP4D_NUMBERS_LAST=16"]
    assert [word for word in requests[1]["recipe"] if word not in requests[0]["recipe"]] == macros


def test_a_kernel_may_not_stand_twice(tmp_path: Path) -> None:
    with pytest.raises(FlagsError, match="stands twice"):
        tiny_catalog(tmp_path / "csrc", manifest=MANIFEST + MANIFEST)


def test_the_target_for_an_arch(tmp_path: Path) -> None:
    catalog = tiny_catalog(tmp_path / "csrc")
    tiny = catalog.kernel("tiny")
    expected = {"9.0": "90a", "12.0": "120f", "12.1": "120f", "8.6": "80", "10.0": None, "10.3": None}
    assert {text: catalog.target_for(tiny, Arch.parse(text)) for text in expected} == expected
    jobs = list(catalog.jobs((SM120, SM121), ("nvfp4_quantize",)))
    assert [(kernel.name, variant.id, target) for kernel, variant, target in jobs] == [
        ("tiny", "one", "120f"),
        ("tiny", "two", "120f"),
    ]
    with pytest.raises(FlagsError, match="known: tiny"):
        catalog.kernel("huge")
    with pytest.raises(FlagsError, match="known: one, two"):
        tiny.variant("three")


def test_package_data_must_be_there(tmp_path: Path) -> None:
    with pytest.raises(FlagsError, match="cannot be read"):
        Catalog.load(tmp_path, JIT_FLAGS)
    with pytest.raises(FlagsError, match="cannot be read"):
        Catalog.load(tiny_sources(tmp_path / "csrc"), tmp_path)


# A bare -I is Python's own option (isolated mode).
FLAG = re.compile(
    r"-(gencode|O\d|D[A-Z_{]|-expt|std=|Xcompiler|Xptxas|Xlinker|ccbin|shared|cudart|[IL][A-Za-z/.{]|M?MD$|MF|arch=)"
)


def test_no_compiler_flag_in_python_source() -> None:
    """Flags live in jit_flags/; a flag in Python is one that the records do not know of (flashinfer#2913)."""
    found = []
    for path in sorted((REPOSITORY / "fp4dispatch").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and "\n" not in node.value:
                found += [f"{path}:{node.lineno}: {word}" for word in node.value.split() if FLAG.match(word)]
    assert found == []


def test_the_flag_search_finds_flags() -> None:
    text = (JIT_FLAGS / "common.toml").read_text() + (JIT_FLAGS / "sm120f.toml").read_text()
    words = re.findall(r'"(-[^"]+)"', text)
    assert len(words) > 8
    assert [word for word in words if not FLAG.match(word)] == ["-o"]
