"""The order check finds every path on which global memory is touched before the grid barrier."""

from __future__ import annotations

import pytest

from fp4dispatch.jit.barrier_order import unguarded_accesses


def sass(*lines: str, name: str = "kernel") -> str:
    """Lay out instructions and labels as ``nvdisasm -c`` does."""
    text = [f'\t.section\t.text.{name},"ax",@progbits']
    address = 0
    for line in lines:
        if line.endswith(":"):
            text.append(line)
            continue
        text.append(f"        /*{address:04x}*/                   {line} ;")
        address += 16
    return "\n".join(text)


def found(*lines: str, before_wait: tuple[str, ...] = ()) -> list[str]:
    return [access.instruction.split()[0] for access in unguarded_accesses(sass(*lines), before_wait)]


def test_loads_behind_the_barrier_are_accepted() -> None:
    assert (
        found("LDC R1, c[0x0][0x37c]", "ACQBULK", "LDG.E R2, desc[UR4][R2.64]", "STG.E desc[UR4][R2.64], R3", "EXIT")
        == []
    )


def test_a_load_hoisted_above_the_barrier_is_reported() -> None:
    assert found("LDG.E R2, desc[UR4][R2.64]", "ACQBULK", "LDG.E.64 R4, desc[UR4][R2.64]", "EXIT") == ["LDG.E"]


def test_no_barrier_reports_everything() -> None:
    lines = (
        "UTMALDG.3D [UR8], [UR24], desc[UR6]",
        "LDGSTS.E [R2], desc[UR4][R4.64]",
        "UTMASTG.3D [UR8], [UR4]",
        "EXIT",
    )
    assert found(*lines) == ["UTMALDG.3D", "LDGSTS.E", "UTMASTG.3D"]


def test_a_warp_role_that_never_waits_is_reported() -> None:
    """The epilogue of the stock SM100 kernel: the load role waits, the epilogue role does not."""
    assert found(
        "@P0 BRA `(.L_x_1)",
        "ACQBULK",
        "UTMALDG.3D [UR8], [UR24], desc[UR6]",
        "EXIT",
        ".L_x_1:",
        "LDG.E R2, desc[UR4][R2.64]",
        "EXIT",
    ) == ["LDG.E"]


@pytest.mark.parametrize("branch", ["@!P0 BRA `(.L_x_1)", "BRA.U UP0, `(.L_x_1)", "BRA.DIV UR4, `(.L_x_1)"])
def test_both_sides_of_a_conditional_branch_are_followed(branch: str) -> None:
    assert found(branch, "LDG.E R2, desc[UR4][R2.64]", "EXIT", ".L_x_1:", "ACQBULK", "EXIT") == ["LDG.E"]
    assert found(branch, "ACQBULK", "EXIT", ".L_x_1:", "LDG.E R2, desc[UR4][R2.64]", "EXIT") == ["LDG.E"]


def test_an_unconditional_branch_does_not_fall_through() -> None:
    assert found("BRA `(.L_x_1)", "LDG.E R2, desc[UR4][R2.64]", ".L_x_1:", "EXIT") == []


def test_a_loop_behind_the_barrier_is_accepted() -> None:
    assert found("ACQBULK", ".L_x_1:", "LDG.E R2, desc[UR4][R2.64]", "@P0 BRA `(.L_x_1)", "EXIT") == []


def test_a_predicated_barrier_guards_nothing() -> None:
    assert found("@P0 ACQBULK", "LDG.E R2, desc[UR4][R2.64]", "EXIT") == ["LDG.E"]


def test_a_predicated_exit_falls_through() -> None:
    assert found("@P0 EXIT", "LDG.E R2, desc[UR4][R2.64]", "EXIT") == ["LDG.E"]


def test_an_indirect_branch_reaches_every_label() -> None:
    assert found("BRX R2 -0x10", ".L_x_1:", "ACQBULK", "EXIT", ".L_x_2:", "LDG.E R2, desc[UR4][R2.64]", "EXIT") == [
        "LDG.E"
    ]


def test_a_call_is_followed_and_returns() -> None:
    lines = (
        "CALL.REL.NOINC `(.L_x_1)",
        "ACQBULK",
        "EXIT",
        ".L_x_1:",
        "LDG.E R2, desc[UR4][R2.64]",
        "RET.REL.NODEC R2 0x0",
    )
    assert found(*lines) == ["LDG.E"]


def test_every_kernel_of_a_cubin_is_checked() -> None:
    text = sass("ACQBULK", "LDG.E R2, desc[UR4][R2.64]", "EXIT", name="good") + "\n"
    text += sass("LDG.E R2, desc[UR4][R2.64]", "ACQBULK", "EXIT", name="bad")
    assert [(access.kernel, access.address) for access in unguarded_accesses(text)] == [("bad", 0)]


@pytest.mark.parametrize("text", ["", '\t.section\t.text.kernel,"ax",@progbits\n', "no sass at all"])
def test_empty_text_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="no SASS instruction"):
        unguarded_accesses(text)


def test_an_unknown_branch_target_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown branch target"):
        found("BRA `(.L_x_7)", "EXIT")


def test_named_targets_of_a_jump_table_are_the_only_ones() -> None:
    table = 'BRX R2 -0x10 (*"BRANCH_TARGETS .L_x_1,.L_x_2"*)'
    roles = (".L_x_1:", "ACQBULK", "LDG.E R2, desc[UR4][R2.64]", "EXIT", ".L_x_2:", "EXIT")
    behind = (".L_x_3:", "LDG.E R4, desc[UR4][R2.64]", "EXIT")
    assert found(table, *roles, *behind) == []
    assert found(table.replace(".L_x_2", ".L_x_3"), *roles, *behind) == ["LDG.E"]


PREFETCH = "UBLKCP.S.G [UR12], [UR8], UR5, desc[UR6]"


def test_a_declared_bulk_copy_may_come_before_the_barrier() -> None:
    lines = (PREFETCH, f"@!UP0 {PREFETCH}", "ACQBULK", PREFETCH, "STG.E desc[UR4][R2.64], R3", "EXIT")
    assert found(*lines) == ["UBLKCP.S.G", "UBLKCP.S.G"]
    assert found(*lines, before_wait=("UBLKCP",)) == []


@pytest.mark.parametrize(
    "access",
    [
        "UBLKCP.G.S [UR8], [UR12], UR5",
        "UBLKCP [UR12], [UR8], UR5",
        "UBLKCP.S.G.MORE [UR12], [UR8], UR5",
        "UBLKRED.G.S.ADD [UR8], [UR12], UR5",
        "UTMALDG.2D [UR8], [UR24], desc[UR6]",
        "UTMALDG.3D [UR8], [UR24], desc[UR6]",
        "LDGSTS.E.BYPASS.128 [R2], desc[UR4][R4.64]",
        "LDG.E R2, desc[UR4][R2.64]",
        "STG.E desc[UR4][R2.64], R3",
        "ATOMG.E.ADD R2, desc[UR4][R2.64], R3",
    ],
)
def test_nothing_else_is_declared_with_it(access: str) -> None:
    assert found(PREFETCH, access, "ACQBULK", "EXIT", before_wait=("UBLKCP",)) == [access.split()[0]]


def test_the_declaration_needs_no_less_of_a_barrier() -> None:
    lines = ("@P0 BRA `(.L_x_1)", PREFETCH, "ACQBULK", "EXIT", ".L_x_1:", "LDG.E R2, desc[UR4][R2.64]", "EXIT")
    assert found(*lines, before_wait=("UBLKCP",)) == ["LDG.E"]


def test_a_declared_tma_load_of_a_box_may_come_before_the_barrier() -> None:
    load, to_several = "UTMALDG.2D [UR8], [UR6], desc[UR4]", "UTMALDG.2D.MULTICAST [UR8], [UR24], UR5, desc[UR6]"
    lines = (load, f"@UP0 {load}", to_several, "ACQBULK", load, to_several, "EXIT")
    assert found(*lines) == ["UTMALDG.2D", "UTMALDG.2D", "UTMALDG.2D.MULTICAST"]
    assert found(*lines, before_wait=("UTMALDG",)) == []


@pytest.mark.parametrize(
    "access",
    [
        "UTMALDG.3D [UR8], [UR24], desc[UR6]",
        "UTMALDG.2D.IM2COL [UR8], [UR24], desc[UR6]",
        "UTMASTG.2D [UR8], [UR24]",
        "UTMAREDG.2D.ADD [UR8], [UR24]",
        PREFETCH,
    ],
)
def test_nothing_else_is_declared_with_a_tma_load(access: str) -> None:
    assert found(access, "ACQBULK", "EXIT", before_wait=("UTMALDG",)) == [access.split()[0]]


@pytest.mark.parametrize("name", ["LDG", "UTMASTG", "", "ublkcp"])
def test_what_cannot_be_declared_is_an_error(name: str) -> None:
    with pytest.raises(ValueError, match="cannot be declared"):
        found("ACQBULK", "EXIT", before_wait=("UBLKCP", name))
