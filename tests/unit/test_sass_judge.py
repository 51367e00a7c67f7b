"""What a thread does before it has waited for the previous grid is found, and refused unless it is known."""

from __future__ import annotations

import pytest

from fp4dispatch.jit.catalog.early_loads import EarlyLoads
from fp4dispatch.jit.sass import listing
from fp4dispatch.jit.sass.judge import Judgement, judge
from fp4dispatch.jit.sass.parameters import Parameters

NAME = "kernel"
# Arguments as of a GEMM for sm_90: weights at byte 0, sizes from 8 to 16, other pointers behind.
ARGUMENTS = Parameters(base=0x210, size=0x170, at={0: (0x70, 0x100)})
POINTER = EarlyLoads("UBLKCP", (0, 8), (8, 16))
MAP = EarlyLoads("UTMALDG", (0, 128))
WEIGHTS, SIZE, OTHER = 0x280, 0x288, 0x290


def sass(*lines: str, name: str = NAME) -> str:
    """Lay out instructions and labels as ``nvdisasm -c`` does."""
    text = [f'\t.section\t.text.{name},"ax",@progbits', f"{name}:"]
    address = 0
    for line in lines:
        if line.endswith(":"):
            text.append(line)
            continue
        text.append(f"        /*{address:04x}*/                   {line} ;")
        address += 16
    return "\n".join(text)


def judged(*lines: str, declared: EarlyLoads | None = None, arguments: Parameters | None = ARGUMENTS) -> Judgement:
    (kernel,) = listing.parse(sass(*lines))
    return judge(kernel, arguments, declared)


def found(*lines: str, declared: EarlyLoads | None = None) -> list[str]:
    """The opcodes that are refused, in order of address."""
    return [row.split()[1].rstrip(":") for row in judged(*lines, declared=declared).refused]


LOAD, STORE = "LDG.E R2, desc[UR4][R2.64]", "STG.E desc[UR4][R2.64], R3"


def test_loads_behind_the_barrier_are_accepted() -> None:
    assert found("LDC R1, c[0x0][0x37c]", "ACQBULK", LOAD, STORE, "EXIT") == []


def test_a_load_hoisted_above_the_barrier_is_refused() -> None:
    assert found(LOAD, "ACQBULK", LOAD, "EXIT") == ["LDG.E"]


def test_no_barrier_refuses_everything() -> None:
    lines = (
        "UTMALDG.3D [UR8], [UR24], desc[UR6]",
        "LDGSTS.E [R2], desc[UR4][R4.64]",
        "UTMASTG.3D [UR8], [UR4]",
        "EXIT",
    )
    assert found(*lines) == ["UTMALDG.3D", "LDGSTS.E", "UTMASTG.3D", "EXIT"]


@pytest.mark.parametrize(
    "opcode",
    [
        *(
            "LD.E",
            "LDG.E.CONSTANT",
            "LDGSTS.E.BYPASS.128",
            "LDGMC.E.ADD",
            "ST.E",
            "STG.E",
            "STAS.X",
            "USTGR.E",
            "ATOM.E",
            "ATOMG.E.ADD",
        ),
        *(
            "RED.E.ADD",
            "REDG.E.ADD",
            "REDAS",
            "TEX.B.LL",
            "TLD.LZ",
            "TLD4.R",
            "TXQ",
            "TMML",
            "SULD.D.BA.1D",
            "SUST.D.BA.1D",
        ),
        *("SURED.D.BA.1D.ADD", "SUATOM", "SUQUERY", "CCTL.E.PF2", "CCTL.IVALL.RML2", "CCTLL", "CCTLT", "UTMALDG.2D"),
        *("UTMASTG.2D", "UTMAREDG.2D.ADD", "UTMAPF.2D", "UTMACCTL.IV", "UBLKCP.S.G", "UBLKCP.G.S", "UBLKRED.G.S.ADD"),
        *(
            "UBLKPF",
            "FENCE.PROXY.TENSORMAP",
            "SYNCS.NEW",
            "LEPC",
            "CALL.ABS.NOINC",
            "JMP",
            "JMX",
            "WARPSYNCALL",
            "XYZZY",
        ),
    ],
)
def test_only_what_is_known_may_come_before_the_barrier(opcode: str) -> None:
    assert found(f"{opcode} R2, [R4], R6", "ACQBULK", "EXIT") == [opcode]


def test_a_warp_role_that_never_waits_is_refused() -> None:
    """The epilogue of the stock SM100 kernel: the load role waits, the epilogue role does not."""
    roles = ("@P0 BRA `(.L_x_1)", "ACQBULK", "UTMALDG.3D [UR8], [UR24], desc[UR6]", "EXIT", ".L_x_1:", LOAD, "EXIT")
    assert found(*roles) == ["LDG.E", "EXIT"]


@pytest.mark.parametrize(
    "branch", ["@!P0 BRA `(.L_x_1)", "BRA.U UP0, `(.L_x_1)", "BRA.DIV UR4, `(.L_x_1)", "@P0 BRA.U.ANY `(.L_x_1)"]
)
def test_both_sides_of_a_conditional_branch_are_followed(branch: str) -> None:
    assert found(branch, LOAD, "ACQBULK", "EXIT", ".L_x_1:", "ACQBULK", "EXIT") == ["LDG.E"]
    assert found(branch, "ACQBULK", "EXIT", ".L_x_1:", LOAD, "ACQBULK", "EXIT") == ["LDG.E"]


def test_an_unconditional_branch_does_not_fall_through() -> None:
    assert found("BRA `(.L_x_1)", LOAD, ".L_x_1:", "ACQBULK", "EXIT") == []


def test_a_loop_behind_the_barrier_is_accepted() -> None:
    assert found("ACQBULK", ".L_x_1:", LOAD, "@P0 BRA `(.L_x_1)", "EXIT") == []


def test_a_predicated_barrier_guards_nothing() -> None:
    assert found("@P0 ACQBULK", LOAD, "EXIT") == ["ACQBULK", "LDG.E", "EXIT"]


def test_no_thread_may_end_before_it_has_waited() -> None:
    assert found("@P0 EXIT", "ACQBULK", LOAD, "EXIT") == ["EXIT"]
    assert found("PREEXIT", "@P0 BRA `(.L_x_1)", "ACQBULK", ".L_x_1:", "EXIT") == ["EXIT"]
    assert found("PREEXIT", "ACQBULK", STORE, "EXIT") == []
    assert found("@P0 BPT.TRAP 0x1", "ACQBULK", "EXIT") == [], "a trap gives the whole grid up"


def test_an_indirect_branch_without_targets_is_refused() -> None:
    lines = ("BRX R2 -0x10", ".L_x_1:", "ACQBULK", "EXIT", ".L_x_2:", LOAD, "EXIT")
    assert found(*lines) == ["BRX"]


def test_named_targets_of_a_jump_table_are_the_only_ones() -> None:
    table = 'BRX R2 -0x10 (*"BRANCH_TARGETS .L_x_1,.L_x_2"*)'
    roles = (".L_x_1:", "ACQBULK", LOAD, "EXIT", ".L_x_2:", "ACQBULK", "EXIT")
    behind = (".L_x_3:", LOAD, "ACQBULK", "EXIT")
    assert found(table, *roles, *behind) == []
    assert found(table.replace(".L_x_2", ".L_x_3"), *roles, *behind) == ["LDG.E"]
    assert found(table.replace(".L_x_2", ".L_x_9"), *roles) == ["BRX"]


# ---- calls ----

CALL, HELPER = "CALL.REL.NOINC `($kernel$helper)", "$kernel$helper:"
RETURN = "RET.REL.NODEC R20 `(kernel)"


def test_a_call_is_followed_and_returns_to_its_caller() -> None:
    before = ("MOV R20, 0x20", CALL)
    assert found(*before, "ACQBULK", "EXIT", HELPER, LOAD, RETURN) == ["LDG.E"]
    assert found(*before, STORE, "ACQBULK", "EXIT", HELPER, RETURN) == ["STG.E"]
    assert found(*before, STORE, "EXIT", HELPER, "ACQBULK", LOAD, RETURN) == [], "the helper waits"


def test_each_call_returns_to_its_own_caller() -> None:
    calls = ("MOV R20, 0x20", CALL, "MOV R20, 0x40", CALL, "ACQBULK", "EXIT", HELPER, RETURN)
    assert found(*calls) == []
    assert found(*calls[:4], LOAD, *calls[4:]) == ["LDG.E"]


@pytest.mark.parametrize(
    ("lines", "refused"),
    [
        (("MOV R20, 0x20", "CALL.REL.NOINC R8 `(kernel)"), "CALL.REL.NOINC"),
        (("LDC.64 R14, c[0x4][R14]", "CALL.ABS.NOINC R14"), "CALL.ABS.NOINC"),
        (("CALL.REL.NOINC `($somewhere$else)",), "CALL.REL.NOINC"),
        (("RET.REL.NODEC R20 `(kernel)",), "RET.REL.NODEC"),
        (("BRA R2",), "BRA"),
        (("BRA `(.L_x_7)",), "BRA"),
        (("BSSY B0, `(.L_x_1)", "BSYNC B1", ".L_x_1:"), "BSSY"),
    ],
)
def test_what_cannot_be_followed_is_refused(lines: tuple[str, ...], refused: str) -> None:
    assert found(*lines, "ACQBULK", "EXIT") == [refused]


def test_a_recursion_is_refused() -> None:
    lines = ("MOV R20, 0x20", CALL, "ACQBULK", "EXIT", HELPER, "@P0 CALL.REL.NOINC `($kernel$helper)", RETURN)
    assert "CALL.REL.NOINC" in found(*lines)


@pytest.mark.parametrize("lost", ["MOV R20, 0x40", "LDL R20, [R1]", "@P0 MOV R20, 0x40", "IADD3 R20, R20, R5, RZ"])
def test_a_return_to_an_unknown_place_is_refused(lost: str) -> None:
    lines = ("MOV R20, 0x20", CALL, "ACQBULK", "EXIT", HELPER, lost, RETURN)
    assert found(*lines) == ["RET.REL.NODEC"]


def test_a_return_address_may_be_moved() -> None:
    lines = ("MOV R20, 0x20", CALL, "ACQBULK", "EXIT", HELPER, "IMAD.MOV.U32 R4, RZ, RZ, R20", "MOV R20, RZ")
    assert found(*lines, "RET.REL.NODEC R4 `(kernel)") == []


# ---- declared loads: pointers ----

COPY = "UBLKCP.S.G [UR12], [UR8], UR5, desc[UR6]"


def test_the_declared_pointer_plus_declared_numbers_is_accepted() -> None:
    lines = (
        f"LDC.64 R2, c[0x0][{WEIGHTS:#x}]",
        "S2R R5, SR_CTAID.X",
        f"LDC R6, c[0x0][{SIZE:#x}]",
        "IMAD.WIDE.U32 R4, R5, R6, R2",
        "R2UR UR8, R4",
        "R2UR UR9, R5",
        COPY,
        "ACQBULK",
        "EXIT",
    )
    judgement = judged(*lines, declared=POINTER)
    assert judgement.refused == []
    assert judgement.accepted == [f"0x60 {COPY}: loads weights from bytes 0 to 8 of the arguments"]
    assert found(*lines) == ["UBLKCP.S.G"], "without a declaration"
    assert found(*lines, declared=MAP) == ["UBLKCP.S.G"], "declared for TMA"
    assert judged(*lines, declared=POINTER, arguments=None).refused != [], "where arguments lie is not known"


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(("c[0x0][0x280]", f"c[0x0][{OTHER:#x}]"), id="another pointer"),
        pytest.param(("c[0x0][0x288]", f"c[0x0][{OTHER:#x}]"), id="another pointer is added"),
        pytest.param(("S2R R5, SR_CTAID.X", "LDS R5, [R7]"), id="an offset from shared memory"),
        pytest.param(("S2R R5, SR_CTAID.X", "LDL R5, [R1]"), id="an offset from local memory"),
        pytest.param(("S2R R5, SR_CTAID.X", "LDC R5, c[0x0][R7]"), id="an offset from a chosen argument"),
        pytest.param(("S2R R5, SR_CTAID.X", "LDC R5, c[0x4][0x8]"), id="the address of a variable"),
        pytest.param(("R2UR UR9, R5", "UMOV UR9, 0x7f"), id="half a pointer"),
        pytest.param(("R2UR UR8, R4", "NOP"), id="a register that was never written"),
        pytest.param(("R2UR UR9, R5", f"@P0 LDCU UR9, c[0x0][{OTHER:#x}]"), id="either of two"),
        pytest.param(("[UR8]", "[UR8+0x10]"), id="an address that is not understood"),
    ],
)
def test_anything_else_in_the_address_is_refused(change: tuple[str, str]) -> None:
    lines = (
        f"LDC.64 R2, c[0x0][{WEIGHTS:#x}]",
        "S2R R5, SR_CTAID.X",
        f"LDC R6, c[0x0][{SIZE:#x}]",
        "IMAD.WIDE.U32 R4, R5, R6, R2",
        "R2UR UR8, R4",
        "R2UR UR9, R5",
        COPY,
        "ACQBULK",
        "EXIT",
    )
    assert sum(change[0] in line for line in lines) == 1
    assert found(*(line.replace(*change) for line in lines), declared=POINTER) == ["UBLKCP.S.G"]


def test_a_pointer_that_changes_in_a_loop_is_seen_in_the_second_round() -> None:
    loop = (
        f"LDCU.64 UR8, c[0x0][{WEIGHTS:#x}]",
        ".L_x_1:",
        COPY,
        f"LDCU.64 UR8, c[0x0][{OTHER:#x}]",
        "@P0 BRA `(.L_x_1)",
        "ACQBULK",
        "EXIT",
    )
    assert found(*loop, declared=POINTER) == ["UBLKCP.S.G"]
    assert found(*(line.replace(hex(OTHER), hex(WEIGHTS)) for line in loop), declared=POINTER) == []


def test_an_elected_lane_always_writes_what_it_broadcasts() -> None:
    loop = (
        f"LDCU.64 UR8, c[0x0][{OTHER:#x}]",
        f"LDC.64 R2, c[0x0][{WEIGHTS:#x}]",
        ".L_x_1:",
        "@P0 ELECT P1, URZ, PT",
        "@P1 R2UR.BROADCAST UR8, R2",
        "@P1 R2UR.BROADCAST UR9, R3",
        COPY,
        "@P0 BRA.U.ANY `(.L_x_1)",
        "ACQBULK",
        "EXIT",
    )
    assert found(*loop, declared=POINTER) == []
    assert found(*(line.replace(".BROADCAST", "") for line in loop), declared=POINTER) == ["UBLKCP.S.G"]


def test_a_value_of_another_path_is_not_lost() -> None:
    lines = (
        f"LDCU.64 UR8, c[0x0][{WEIGHTS:#x}]",
        "@P0 BRA `(.L_x_1)",
        f"LDCU.64 UR8, c[0x0][{OTHER:#x}]",
        ".L_x_1:",
        COPY,
        "ACQBULK",
        "EXIT",
    )
    assert found(*lines, declared=POINTER) == ["UBLKCP.S.G"]


# ---- declared loads: tensor maps ----

BOX = "UTMALDG.2D [UR12], [UR22], desc[UR32]"


def map_at(offset: int, load: str = BOX) -> tuple[str, ...]:
    return (
        "ULDC.64 UR22, c[0x0][0x198]",
        f"UIADD3 UR22, UP1, UR22, {offset:#x}, URZ",
        "UIADD3.X UR23, URZ, UR23, URZ, UP1, !UPT",
        load,
        "ACQBULK",
        "EXIT",
    )


def test_only_the_declared_tensor_map_is_accepted() -> None:
    assert found(*map_at(0x70), declared=MAP) == []
    assert found(*map_at(0x70, BOX.replace(".2D", ".2D.MULTICAST")), declared=MAP) == []
    assert found(*map_at(0xF0), declared=MAP) == ["UTMALDG.2D"]
    assert found(*map_at(0x71), declared=MAP) == ["UTMALDG.2D"]
    assert found(*map_at(0x2070), declared=MAP) == ["UTMALDG.2D"]
    assert found(*map_at(0x70, BOX.replace(".2D", ".3D")), declared=MAP) == ["UTMALDG.3D"]
    assert found(*(line.replace("0x198", "0x280") for line in map_at(0x70)), declared=MAP) == ["UTMALDG.2D"]
    unknown = ("S2R R3, SR_TID.X", "R2UR UR22, R3", *map_at(0x70)[1:])
    assert found(*unknown, declared=MAP) == ["UTMALDG.2D"]


def test_a_map_may_be_fetched_early_where_it_is_an_argument() -> None:
    fetch = "UTMACCTL.PF [UR22]"
    assert found(*map_at(0xF0, fetch)) == []
    assert found(*map_at(0x170, fetch)) == ["UTMACCTL.PF"], "beyond the arguments"
    assert found(*(line.replace("0x198", "0x280") for line in map_at(0xF0, fetch))) == ["UTMACCTL.PF"]


def under(guard: str, *between: str) -> tuple[str, ...]:
    return (
        f"{guard} LDCU.64 UR22, c[0x0][0x198]",
        f"{guard} UIADD3.64 UR22, UR22, 0x70, URZ",
        *between,
        f"{guard} {BOX}",
        "ACQBULK",
        "EXIT",
    )


def test_what_is_written_and_read_under_one_guard_is_exact() -> None:
    assert found(*under("@!UP0"), declared=MAP) == []
    assert found(*under("@!UP0", "UISETP.NE.AND UP0, UPT, UR4, URZ, UPT"), declared=MAP) == ["UTMALDG.2D"]
    assert found(*under("@P0", "R2P PR, R4"), declared=MAP) == ["UTMALDG.2D"]
    assert found(*under("@P0", "@P1 UMOV UR22, 0x0"), declared=MAP) == ["UTMALDG.2D"]
    assert found(*under("@P0", ".L_x_1:", "@P1 BRA `(.L_x_1)"), declared=MAP) == ["UTMALDG.2D"]
    other = [line.replace("@!UP0 UTMALDG", "UTMALDG") for line in under("@!UP0")]
    assert found(*other, declared=MAP) == ["UTMALDG.2D"]


# ---- constant memory ----


def test_constants_that_a_grid_can_write_are_refused() -> None:
    assert found("LDC R2, c[0x3][0x10]", "ACQBULK", "EXIT") == ["LDC"]
    assert found("IADD3 R2, R2, c[0x3][0x10], RZ", "ACQBULK", "EXIT") == ["IADD3"]
    assert found("LDC R2, cx[UR4][0x10]", "ACQBULK", "EXIT") == ["LDC"]
    assert found("LDC R2, c[0x2][R4]", "ACQBULK", "EXIT") == []


# ---- the listing ----


def test_every_kernel_of_a_cubin_is_listed() -> None:
    text = sass("ACQBULK", "EXIT", name="good") + "\n" + sass(LOAD, "ACQBULK", "EXIT", name="bad")
    assert [(kernel.name, len(kernel.instructions)) for kernel in listing.parse(text)] == [("good", 2), ("bad", 3)]


@pytest.mark.parametrize("text", ["", '\t.section\t.text.kernel,"ax",@progbits\n', "no sass at all"])
def test_a_text_without_code_has_no_kernels(text: str) -> None:
    assert listing.parse(text) == []


def test_a_line_that_cannot_be_read_is_an_error() -> None:
    with pytest.raises(ValueError, match="cannot be read"):
        listing.parse(sass("ACQBULK", "EXIT").replace("EXIT ;", "{ exit }"))


def test_a_gap_in_the_code_is_an_error() -> None:
    lines = sass("ACQBULK", LOAD, "EXIT").splitlines()
    with pytest.raises(ValueError, match="is missing"):
        listing.parse("\n".join([*lines[:3], lines[4]]))


def test_what_cannot_be_declared_is_an_error() -> None:
    with pytest.raises(ValueError, match="cannot be declared"):
        judged("ACQBULK", "EXIT", declared=EarlyLoads("LDG", (0, 8)))
