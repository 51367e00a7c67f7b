"""A consumer gives a stage of its ring, or the ring to sums of its cluster, back only when its loads from it are done.

The next copy into the stage comes from TMA. Where a load is still under way as its warp arrives at the stage's barrier,
the copy may overtake it, if launches on another stream keep the multiprocessor's load units busy (docs/incidents.md,
O-15, O-16). Not held to it: w4_gemm_sm90 and w8_gemm_sm90 for 16-bit activations, and w4_gemm_sm90 with tiles of over
128 tokens, which have loads of the next stage under way then.
"""

from __future__ import annotations

import pytest

from fp4dispatch import jit
from fp4dispatch.jit.catalog.manifest import installed
from fp4dispatch.jit.compiler.toolchain import disassembler
from tests.compile import built_kernels, scoreboards

pytestmark = built_kernels.NEEDS_NVCC


STAGE = "SYNCS.ARRIVE.TRANS64.RED.A1T0"
UNDER_WAY = {
    ("w8_gemm_sm90", "bf16_128"): {("UCGABAR_ARV", "LDS")},
    ("w8_gemm_sm90", "bf16_192"): {("UCGABAR_ARV", "LDS")},
    ("w4_gemm_sm90", "a8_bf16_128"): {(STAGE, "LDS.U8"), (STAGE, "LDS.64"), ("UCGABAR_ARV", "LDS.64")},
}
"""Loads that may be under way. w8_gemm_sm90: scales of the output, as the cluster ends; no thread loads 4 bytes from
these rings. w4_gemm_sm90: from tables, which lie beside the ring, and scales of the next stage as the one before is
given back; words, LDS.128, never."""


FEW_16_BIT = "w4a16_small", "w8a16_small"
"""Kernels that are built for other architectures too."""


@pytest.mark.parametrize(
    ("kernel", "variant", "target"),
    [
        ("w8a8_small", "block_bf16", "90a"),
        pytest.param("w8a8_small", "block_fp16", "90a", marks=pytest.mark.slow),
        ("w8a8_small", "bf16", "90a"),
        ("w4a8_small", "bf16", "90a"),
        ("w4a16_small", "bf16", "90a"),
        pytest.param("w4a16_small", "fp16", "90a", marks=pytest.mark.slow),
        ("w8a16_small", "bf16", "90a"),
        pytest.param("w8a16_small", "fp16", "90a", marks=pytest.mark.slow),
        *(
            pytest.param(kernel, "bf16", target, marks=pytest.mark.slow)
            for kernel in FEW_16_BIT
            for target in installed().kernel(kernel).targets
            if target != "90a"
        ),
        ("w8_gemm_sm90", "bf16_128", "90a"),
        pytest.param("w8_gemm_sm90", "bf16_192", "90a", marks=pytest.mark.slow),
        pytest.param("w4_gemm_sm90", "a8_bf16_128", "90a", marks=pytest.mark.slow),
        pytest.param("w8_gemm_sm90", "block_bf16_128", "90a", marks=pytest.mark.slow),
    ],
)
def test_no_stage_is_given_back_while_it_is_read(kernel: str, variant: str, target: str) -> None:
    library = jit.build(kernel, variant, target).entry.library
    read = dict(scoreboards.functions(disassembler(installed().common.minimum["disassembler"]).cuobjdump, library))
    assert read
    for name, code in read.items():
        assert any(instruction.name.startswith(scoreboards.ARRIVALS[:2]) for instruction in code), name
        assert any(instruction.name.startswith("LDS") for instruction in code), name
        names = {instruction.address: instruction.name for instruction in code}
        found = {(names[at], names[load]) for at, loads in scoreboards.loads_under_way(code).items() for load in loads}
        assert found <= UNDER_WAY.get((kernel, variant), set()), name


LOOP = [
    scoreboards.Instruction(0x00, "LDS.64 R16, [R12]", 1, 0),
    scoreboards.Instruction(0x10, "FMUL R16, R16, R21", 7, 0b10),
    scoreboards.Instruction(0x20, "@!P0 SYNCS.ARRIVE.TRANS64.A1T0 RZ, [UR11+0x8], RZ", 7, 0),
    scoreboards.Instruction(0x30, "@P1 BRA 0x0", 7, 0),
    scoreboards.Instruction(0x40, "EXIT", 7, 0),
]


def test_a_load_that_nothing_waits_for_is_found() -> None:
    assert scoreboards.loads_under_way(LOOP) == {}
    late = [LOOP[0], LOOP[2], LOOP[1], *LOOP[3:]]
    assert scoreboards.loads_under_way(late) == {0x20: [0x00]}
    other = [LOOP[0], LOOP[1]._replace(waits=0b100), *LOOP[2:]]
    assert scoreboards.loads_under_way(other) == {0x20: [0x00]}


def test_an_arrival_at_a_cluster_s_barrier_counts() -> None:
    arrival = LOOP[2]._replace(text="UCGABAR_ARV")
    assert scoreboards.loads_under_way([LOOP[0], arrival, *LOOP[3:]]) == {0x20: [0x00]}
    assert scoreboards.loads_under_way([*LOOP[:2], arrival, *LOOP[3:]]) == {}


def test_a_load_of_the_round_before_is_found() -> None:
    turned = [LOOP[2]._replace(address=0x00), LOOP[0]._replace(address=0x10), *LOOP[3:]]
    assert scoreboards.loads_under_way(turned) == {0x00: [0x10]}


def test_control_bits_are_read() -> None:
    listing = (
        "        /*0930*/                   LDS.64 R16, [R12] ;              /* 0x000000000c107984 */\n"
        "                                                                    /* 0x000e680000000a00 */\n"
        "        /*0980*/                   FMUL R16, R16, R21.reuse ;       /* 0x0000001510107220 */\n"
        "                                                                    /* 0x082fe20000400000 */\n"
    )
    load, product = scoreboards.read(listing)
    assert (load.address, load.name, load.writes, load.waits) == (0x930, "LDS.64", 1, 0)
    assert (product.name, product.writes, product.waits) == ("FMUL", 7, 0b000010)
