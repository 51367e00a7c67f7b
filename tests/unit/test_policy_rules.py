"""The rules file is read strictly, and version ranges mean what they say."""

from __future__ import annotations

import copy
import itertools
from datetime import date

import pytest
from packaging.version import Version

from fp4dispatch.errors import SettingsError
from fp4dispatch.machine.system import System
from fp4dispatch.policy.catalogue import MEASURED
from fp4dispatch.policy.rules import bounds, in_range, load, m_bucket, rules
from fp4dispatch.problem import OPS, Problem
from fp4dispatch.problem.arch import KNOWN_ARCHS, SM90, SM120

RULE = {
    "id": "a-rule",
    "verb": "deny",
    "backends": ["cudnn"],
    "because": "it is unsafe",
    "source": "https://example.org/1",
    "checked": date(2026, 11, 20),
    "when": {"archs": ["sm_120"]},
}


def changed(**changes):
    row = copy.deepcopy(RULE)
    for key, value in changes.items():
        if value is None:
            del row[key]
        else:
            row[key] = value
    return {"rule": [row]}


def test_a_good_rule_loads():
    (rule,) = load({"rule": [RULE]})
    assert (rule.id, rule.verb, rule.code, rule.when.archs) == ("a-rule", "deny", "DENIED", ("sm_120",))


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"surprise": 1}, "unknown key 'surprise'"),
        ({"because": None}, "'because' is missing"),
        ({"because": " "}, "because is empty"),
        ({"source": "http://example.org"}, "https"),
        ({"checked": "yesterday"}, "checked must be date, found str 'yesterday'"),
        ({"verb": "allow"}, "neither deny nor prefer"),
        ({"verb": "prefer", "code": "CAPTURE"}, "belongs to deny"),
        ({"code": "ARCH"}, "must be a list of DENIED"),
        ({"id": "Not An Id"}, "lower-case"),
        ({"backends": ["nonsense"]}, "must be a list of"),
        ({"backends": []}, "must be a list of"),
        ({"backends": None}, "either backends or having"),
        ({"having": "tma_from_live_m"}, "either backends or having"),
        ({"backends": None, "having": "wisdom"}, "must be a list of tma_from_live_m"),
        ({"backends": None, "having": "tma_from_live_m", "verb": "prefer"}, "having belongs to deny rules"),
        ({"verb": "prefer", "backends": ["cudnn", "cutlass"]}, "others needs a reason for each of cutlass, has"),
        ({"verb": "prefer", "backends": ["cudnn", "cutlass"], "others": {"cutlass": " "}}, "others needs a reason"),
        ({"verb": "prefer", "others": {"cutlass": "x"}}, "others needs a reason for each of nothing, has cutlass"),
        ({"others": {"cudnn": "x"}}, "others needs a reason for each of nothing, has cudnn"),
        ({"worth": 0.05}, "worth 0.05: it is a share between 0 and 1, of a prefer rule"),
        ({"verb": "prefer", "worth": 5.0}, "worth 5.0: it is a share"),
        ({"verb": "prefer", "worth": 0.0}, "worth 0.0: it is a share"),
        ({"verb": "prefer", "worth": "5 %"}, "worth must be float, found str '5 %'"),
        ({"when": {}}, "when is empty"),
        ({"when": {"archs": ["sm_121a"]}}, "must be a list of"),
        ({"when": {"arch": ["sm_120"]}}, "unknown key 'arch'"),
        ({"when": {"ops": ["gemm"]}}, "must be a list of"),
        ({"when": {"captures": ["some"]}}, "must be a list of"),
        ({"when": {"scalings": "row"}}, "scalings must be list, found str 'row'"),
        ({"when": {"m_max": 0}}, "not a positive integer"),
        ({"when": {"m_max": True}}, "m_max must be int, found bool True"),
        ({"when": {"m_max": 48.0}}, "m_max must be int, found float 48.0"),
        ({"when": {"m_min_max": -1}}, "m_min_max -1 is not a size"),
        ({"when": {"work_max": 0}}, "unknown key 'work_max'"),
        ({"when": {"proven": "no"}}, "proven must be bool, found str 'no'"),
        ({"when": {"fp8_copy": 1}}, "fp8_copy must be bool, found int 1"),
        ({"when": {"flashinfer": "0.6"}}, "not a version range"),
        ({"when": {"flashinfer": ">=0.6,<oops"}}, "not a version range"),
        ({"when": {"flashinfer": ">=0.6,,<0.7"}}, "not a version range"),
    ],
)
def test_a_bad_rule_is_refused_and_named(changes, text):
    with pytest.raises(SettingsError, match=text):
        load(changed(**changes))


def test_m_is_decided_in_ranges_and_up_to_where_rules_end(monkeypatch):
    monkeypatch.setattr("fp4dispatch.policy.rules.bounds", lambda op, arch: (40, 64))
    found = [m_bucket(m, "nvfp4_gemm", SM90) for m in (0, 1, 3, 32, 33, 40, 41, 49, 64, 65, 128)]
    assert found == [1, 1, 4, 32, 40, 40, 48, 64, 64, 96, 128]


@pytest.mark.parametrize("op", OPS)
def test_no_rule_ends_inside_a_range_of_m(op):
    bounded = [rule.when for rule in rules() if rule.when.m_max]
    assert bounded
    for arch in KNOWN_ARCHS:
        system = System.fake(arch.capability, flashinfer="0.7.2", cudnn="9.19")
        tokens = {300, 600, *(when.m_max + step for when in bounded if when.m_max for step in (-1, 0, 1))}
        for m, n, k in itertools.product(tokens, (64, 4096, 8192, 20480), (64, 10240)):
            for scaling in ("nvfp4",) if op == "nvfp4_gemm" else ("tensor", "row", "block128"):
                mine = Problem(op, m, n, k, scaling=scaling)
                theirs = Problem(op, m_bucket(m, op, arch), n, k, scaling=scaling)
                assert [w.holds(mine, system) for w in bounded] == [w.holds(theirs, system) for w in bounded]


def test_rules_of_other_archs_do_not_cut_ranges():
    assert {8, 128} <= set(bounds("nvfp4_gemm", SM90))
    assert 191 not in bounds("nvfp4_gemm", SM90)  # sm_89's
    assert bounds("nvfp4_gemm", SM120) == bounds("nvfp4_gemm", None) == ()
    assert m_bucket(129, "nvfp4_gemm", SM120) == 192


def test_ids_are_unique():
    with pytest.raises(SettingsError, match="twice"):
        load({"rule": [RULE, RULE]})
    with pytest.raises(SettingsError, match="unknown key 'rules'"):
        load({"rule": [], "rules": []})


@pytest.mark.parametrize(
    ("version", "bounds", "inside"),
    [
        (None, ">=0", False),
        ("0.5.2", ">=0.5.3,<0.6.7", False),
        ("0.5.3", ">=0.5.3,<0.6.7", True),
        ("0.6.6.post1", ">=0.5.3,<0.6.7", True),
        ("0.6.7rc1", ">=0.5.3,<0.6.7", True),
        ("0.6.7", ">=0.5.3,<0.6.7", False),
        ("0.6.10.post1", "<0.6.11", True),
        ("0.6.18.post1", ">=0.6.13,<0.7", True),
        ("0.7.2.post1", "<0.7", False),
        ("9.23.1", "<9.23.1", False),
        ("9.23.1.3", "<9.23.1", False),
        ("9.9.0", "<9.23.1", True),
        ("0.6.3", "==0.6.3", True),
        ("0.6.3", ">0.6.3", False),
        ("0.6.3", "<= 0.6.3", True),
        ("built-by-hand", "<0.6.7", True),
    ],
)
def test_ranges(version, bounds, inside):
    assert in_range(version, bounds) is inside


def test_every_packaged_rule_can_hold_and_can_fail():
    """No rule is dead, and none holds for an ordinary problem on a machine without a GPU."""
    plain = Problem("fp8_gemm", 16, 64, 64, scaling="tensor")
    for rule in rules():
        if rule.when.archs:
            assert not rule.when.holds(plain, System.fake())


def test_packaged_rules_are_in_good_order():
    for rule in rules():
        assert rule.source.startswith("https://github.com/") or rule.source == MEASURED
        assert rule.verb == "prefer" or rule.fix, f"{rule.id}: a deny rule tells the user what to do"
        for arch in rule.when.archs:
            assert arch in {a.sm for a in KNOWN_ARCHS}
        for _, span in rule.when.versions:
            for bound in span.split(","):
                Version(bound.strip("<>=! "))
    assert len(rules()) >= 24


def test_a_property_names_its_backends_on_the_archs_where_they_have_it():
    (rule,) = [rule for rule in rules() if rule.having]
    assert rule.id == "piecewise-live-m"

    def named(arch, op="nvfp4_gemm", scaling="nvfp4"):
        problem = Problem(op, 1, 64, 64, scaling=scaling)
        return {name for name in rule.backends if rule.names(name, problem, System.fake(arch))}

    assert named("10.0") == {"cutlass", "flashinfer_cutlass", "flashinfer_trtllm", "flashinfer_cutedsl"}
    assert named("12.0") == {"cutlass", "flashinfer_cutlass", "flashinfer_cutedsl", "flashinfer_b12x"}
    assert named("9.0") == named(None) == set()
    assert named("9.0", "fp8_gemm", "row") == {"cutlass"}
    assert named("9.0", "fp8_gemm", "block128") == {"cutlass", "flashinfer_deepgemm"}
    # our own kernels return for M == 0 before they encode a descriptor
    from pathlib import Path

    launch = (Path(__file__).parents[2] / "csrc" / "many_tokens" / "launch.h").read_text()
    body = launch[launch.index("void run_in(") :].partition("\n  }\n")[0]
    assert body.index("if (p.m == 0) return;") < min(body.index("set_tokens("), body.index("map_of_rows("))
    assert launch.count("map_of_rows(") == body.count("map_of_rows(") + 1  # in set_tokens()
