"""docs/incidents.md: every incident has a place, and every place exists."""

from __future__ import annotations

import ast
import re
from dataclasses import fields, replace
from functools import cache
from pathlib import Path

import pytest

from fp4dispatch.jit.catalog.manifest import installed
from fp4dispatch.policy.catalogue import Capability, catalogue
from fp4dispatch.policy.rules import When, in_range, rules
from fp4dispatch.problem import OPS

ROOT = Path(__file__).parents[2]
HANDLED = ("rule", "capability", "test", "no rule")

ROWS = [
    [cell.strip() for cell in line.strip("|").split(" | ")]
    for line in (ROOT / "docs" / "incidents.md").read_text("utf-8").splitlines()
    if re.match(r"\| (KI|E|O)-\d", line)
]
IDS = [row[0].strip("| ") for row in ROWS]


@cache
def functions(path: str) -> frozenset[str]:
    tree = ast.parse((ROOT / path).read_text("utf-8"))
    return frozenset(node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))


def problems(row: list[str]) -> list[str]:
    """What is wrong with one row of the table."""
    if len(row) != 5:
        return [f"{len(row)} cells, need 5"]
    handled, where = row[3], row[4].rstrip(" |")
    named = re.findall(r"`([^`]+)`", where)
    found = []
    ids = {rule.id for rule in rules()}
    for name in named:
        if "::" in name:
            path, function = name.split("::")
            if not (ROOT / path).is_file() or function not in functions(path):
                found.append(f"no test {name}")
        elif re.fullmatch(r"[a-z0-9_]+\.[a-z_]+", name):
            backend, field = name.split(".")
            if backend not in catalogue().backends or field not in {f.name for f in fields(Capability)}:
                found.append(f"no capability {name}")
        elif "-" in name and name not in ids:
            found.append(f"no rule {name}")
    kinds = {
        "rule": lambda n: n in ids,
        "capability": lambda n: "." in n and "::" not in n,
        "test": lambda n: "::" in n,
    }
    if handled not in HANDLED:
        found.append(f"handled is {handled!r}")
    elif handled == "no rule":
        if len(where) < 10:
            found.append("no reason")
    elif not any(kinds[handled](name) for name in named):
        found.append(f"names no {handled}")
    return found


def test_every_incident_has_a_row():
    assert [i for i in IDS if i.startswith("KI")] == [f"KI-{n:02}" for n in range(1, 59)]
    assert [i for i in IDS if i.startswith("E")] == [f"E-{n:02}" for n in range(1, 24)]


@pytest.mark.parametrize("row", ROWS, ids=IDS)
def test_the_row_is_sound(row):
    assert problems(row) == []


def test_every_rule_is_named():
    text = " ".join(row[-1] for row in ROWS)
    assert [rule.id for rule in rules() if f"`{rule.id}`" not in text] == []


def grouped_without_a_rule(ops, some) -> list[str]:
    """Ops that run several GEMMs in one call, and that nothing keeps from cuDNN 9.18 to 9.20 (flashinfer#3792)."""
    return [
        op
        for op in ops
        if re.search("group|moe|expert", op)
        and not any(
            rule.verb == "deny"
            and "cudnn" in rule.backends
            and op in rule.when.ops
            and any(
                what == "cudnn" and all(in_range(v, span) for v in ("9.19", "9.20.0"))
                for what, span in rule.when.versions
            )
            for rule in some
        )
    ]


def test_a_grouped_op_comes_with_its_rule():
    assert grouped_without_a_rule(OPS, rules()) == []
    assert grouped_without_a_rule(("fp8_grouped_gemm",), rules()) == ["fp8_grouped_gemm"]
    held = replace(
        rules()[0], backends=("cudnn",), when=When(ops=("fp8_grouped_gemm",), versions=(("cudnn", "<9.21"),))
    )
    assert grouped_without_a_rule(("fp8_grouped_gemm",), [held]) == []
    late = replace(held, when=When(ops=("fp8_grouped_gemm",), versions=(("cudnn", "<9.20"),)))
    assert grouped_without_a_rule(("fp8_grouped_gemm",), [late]) == ["fp8_grouped_gemm"]


def second_waves(variants) -> list[str]:
    """Builds in which a warpgroup computes more than the 64 rows of one wgmma with block scales."""
    found = []
    for variant in variants:
        held = dict(define.split("=") for define in variant.defines)
        warpgroups = 1 + int(held["FP4D_COOPERATIVE"])
        if held["FP4D_SCALING"] == "1" and int(held["FP4D_TILE_M"]) > 64 * warpgroups:
            found.append(variant.id)
    return found


def test_block_scaled_cutlass_builds_of_sm_90_have_one_wave_of_rows():
    """https://github.com/NVIDIA/cutlass/issues/3596: the next wave would be scaled by the last one's scales too."""
    variants = installed().kernel("fp8_gemm_sm90").variants.values()
    assert any("FP4D_SCALING=1" in variant.defines for variant in variants)
    assert second_waves(variants) == []
    wide = [replace(v, defines=tuple(d.replace("TILE_M=128", "TILE_M=256") for d in v.defines)) for v in variants]
    assert len(second_waves(wide)) == sum("FP4D_SCALING=1" in v.defines for v in variants)


@pytest.mark.parametrize(
    ("row", "text"),
    [
        (["KI-01", "#1", "x", "rule", "`no-such-rule`"], "no rule no-such-rule"),
        (["KI-01", "#1", "x", "rule", "nothing"], "names no rule"),
        (["KI-01", "#1", "x", "test", "`tests/unit/test_policy.py::test_nothing_like_it`"], "no test"),
        (["KI-01", "#1", "x", "test", "`tests/unit/test_not_there.py::test_x`"], "no test"),
        (["KI-01", "#1", "x", "capability", "`cutlass.wisdom`"], "no capability"),
        (["KI-01", "#1", "x", "no rule", ""], "no reason"),
        (["KI-01", "#1", "x", "somehow", "`cutlass.archs`"], "handled is"),
        (["KI-01", "#1"], "cells"),
    ],
)
def test_an_unsound_row_is_noticed(row, text):
    assert any(text in problem for problem in problems(row))
