"""bench/ncu.py without a GPU: its command line, what it takes from ncu's table; nothing else passes for a profile."""

from __future__ import annotations

import json
import re
import stat
import subprocess
import sys

import pytest

from bench import ncu
from fp4dispatch.backends import registry
from fp4dispatch.benchmark import machine
from fp4dispatch.benchmark.methods import base as methods
from fp4dispatch.benchmark.methods import ours
from fp4dispatch.benchmark.methods.base import Launch
from tests.bench_cases import HOPPER_ON_PAPER

UNIT = {"us": "ns", "dram_bytes": "byte", "registers": "register/thread", "shared_bytes": "byte/block"}
VALUE = {"us": "66,500", "dram_bytes": "265100000", "ctas": "448", "shared_bytes": "110592", "registers": "72"}
TENSOR = "sm__inst_executed_pipe_tensor_op_gmma.avg.pct_of_peak_sustained_active"
NAME = "void fp4d::few_tokens_kernel<fp4d::Tile<8, 1>, bf16>(fp4d::Params)"


def table(kernels=(NAME,), left_out=(), **more):
    """What ncu prints: a line of its own, names, units, a row a kernel."""
    names = ["ID", "Kernel Name", *ncu.FIELDS.values(), *ncu.LIMITS, TENSOR, "other__pipe_tensor.sum"]
    units = ["", "", *(UNIT.get(ours, "%") for ours in ncu.FIELDS), *("block" for _ in ncu.LIMITS), "%", ""]
    values = [VALUE.get(ours, "41.5") for ours in ncu.FIELDS] + ["32", "3", "2", "5", "0.5", "7"]
    rows = [names, units, *([str(i), name, *values] for i, name in enumerate(kernels))]
    kept = [i for i, name in enumerate(names) if name not in left_out]
    lines = [",".join(f'"{row[i]}"' for i in kept) for row in rows]
    return "compiling something\n==PROF== Connected\n" + "\n".join(lines) + "\n"


def test_values_come_in_microseconds_and_bytes():
    (found,) = ncu.parse(table())
    assert (found["us"], found["dram_bytes"], found["registers"]) == pytest.approx((66.5, 265.1e6, 72))
    assert (found["kernel"], found["ctas_per_sm"], found["tensor_percent"]) == (NAME, 2, 41.5)
    assert found["tensor_metrics"] == {TENSOR: 0.5, ncu.FIELDS["tensor_percent"]: 41.5}
    assert [row["kernel"] for row in ncu.parse(table(("a", "b")))] == ["a", "b"]
    assert ncu.number("1.5", "Kbyte/block") == 1500


def test_no_metric_is_no_value():
    (found,) = ncu.parse(table(left_out=(ncu.FIELDS["tensor_percent"], ncu.LIMITS[1])))
    assert "tensor_percent" not in found
    assert "ctas_per_sm" not in found


@pytest.mark.parametrize("text", ["", "==ERROR== no permission", table(())])
def test_no_profile_is_an_error(text):
    with pytest.raises(ValueError, match="no profile"):
        ncu.parse(text)


def test_no_duration_is_an_error():
    with pytest.raises(ValueError, match="reports no gpu__time_duration"):
        ncu.parse(table(left_out=("gpu__time_duration.sum",)))


def test_what_is_derived():
    row = {"us": 100.0, "dram_bytes": 4e8, "ctas": 448.0, "ctas_per_sm": 2.0, "shared_bytes": 1e5}
    found = ncu.derived(row, 132)
    assert found == pytest.approx({"dram_tb_s": 4.0, "ring_bytes": 264e5, "ring_kb_per_sm": 200.0})
    few = ncu.derived(row | {"ctas": 66.0}, 132)
    assert few["ring_kb_per_sm"] == pytest.approx(50.0)  # half of the SMs have a CTA
    assert ncu.derived({"us": 1.0}, 132) == {}


def test_cases_are_of_backends_and_formats_that_there_are():
    for case in ncu.CASES:
        assert ("nvfp4_gemm" if case.format == "nvfp4" else "fp8_gemm") in registry.instance(case.backend).activations
        method = ours.Layer(case.format, None, case.backend)
        assert method.name.endswith(f"/{case.backend}")
        assert case.k % 16 == 0


# ---------------------------------------------------------------------------------------------------------- the child


def test_a_case_is_checked_before_it_is_profiled(monkeypatch):
    import torch

    did = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda.profiler, "start", lambda: did.append("start"))
    monkeypatch.setattr(torch.cuda.profiler, "stop", lambda: did.append("stop"))
    factor = [1.0]

    class Layer:
        def __init__(self, fmt, pin, backend):
            did.append((fmt, pin, backend))

        def prepare(self, operands, copies, card):
            def at(x):
                def call(i):
                    did.append("call")
                    return (factor[0] * operands.product(x.float(), "row")).bfloat16()

                return Launch(call, "bf16", "w8a16 (bf16)")

            return at

    monkeypatch.setattr(ours, "Layer", Layer)
    case = ncu.Case("w8a16", "row", 3, 256, 128)
    found = ncu.launch(case, HOPPER_ON_PAPER)
    assert did == [("row", None, "w8a16"), "call", "start", "call", "stop"]
    assert (found["ran"], found["sms"]) == ("w8a16 (bf16)", 132)
    assert 0 < found["off"] < methods.ROUNDING
    factor[0], did[:] = 1.02, []
    with pytest.raises(ValueError, match="WRONG: tile"):
        ncu.launch(case, HOPPER_ON_PAPER)
    assert "start" not in did


def test_a_case_that_fails_or_has_no_time_costs_no_other(monkeypatch, tmp_path):
    now = [0.0]

    def launch(case, card):
        now[0] += 30.0
        if case.m == 16:
            raise RuntimeError("no\nkernel")
        return {"ran": case.backend, "off": 0.0, "sms": 132}

    monkeypatch.setattr(ncu, "launch", launch)
    monkeypatch.setattr(machine, "card", lambda device: HOPPER_ON_PAPER)
    monkeypatch.setattr(ncu.time, "monotonic", lambda: now[0])
    ncu.launch_all(range(4), tmp_path / "log", 80.0)
    lines = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    assert [line["case"] for line in lines] == [0, 1, 2, 3]
    assert [line.get("failed") for line in lines] == [None, "RuntimeError: no kernel", None, "no time was left of 80 s"]


# --------------------------------------------------------------------------------------------------------- from outside

DONE = {"ran": "w4a16 (bf16)", "off": 0.001, "sms": 132}


def test_profiles_go_to_the_cases_that_were_launched():
    kernels = ncu.parse(table(("few_tokens_kernel", "many_tokens_kernel")))
    lines = [{"case": 0} | DONE, {"case": 1, "failed": "no"}, {"case": 4} | DONE]
    first, second = ncu.joined(lines, kernels, 3)
    assert (first["m"], first["kernel"]) == (1, "few_tokens_kernel")
    assert (second["m"], second["kernel"], second["ran"]) == (ncu.CASES[4].m, "many_tokens_kernel", "w4a16 (bf16)")
    assert second["ring_kb_per_sm"] == pytest.approx(110.592 * 2)
    assert len(ncu.joined(lines[:1], kernels, 3)) == 1  # the child was ended during the second
    for some, asked in ((lines[:1], 1), ([*lines, {"case": 5} | DONE], 4)):
        with pytest.raises(ValueError, match="but ncu saw 2 kernels"):
            ncu.joined(some, kernels, asked)


FAKE = """#!{python}
import json, sys
words = sys.argv[1:]
asked = words[words.index("--cases") + 1:]
open({seen!r}, "a").write(json.dumps(words) + chr(10))
if "--set" not in words and {refuse}:
    sys.exit("==ERROR== Failed to find metric x")
if {sleep}:
    print("begun", flush=True)
    import time
    time.sleep(60)
with open(words[words.index("--log") + 1], "w") as log:
    for case in asked:
        line = {{"case": int(case)}} | ({{"failed": "no kernel"}} if case in {broken!r} else {done!r})
        log.write(json.dumps(line) + chr(10))
print({text!r})
"""


@pytest.fixture
def fake(tmp_path, monkeypatch):
    """An ncu that notes its arguments and prints what it is told."""

    def install(text, refuse=False, sleep=False, broken=()):
        seen = tmp_path / "seen"
        program = tmp_path / "ncu"
        values = {"seen": str(seen), "refuse": refuse, "sleep": sleep, "broken": list(broken)}
        program.write_text(FAKE.format(python=sys.executable, done=DONE, text=text, **values))
        program.chmod(program.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
        return lambda: [json.loads(line) for line in seen.read_text().splitlines()]

    return install


def test_the_command_and_the_record(fake, tmp_path, monkeypatch, capsys):
    seen = fake(table((NAME, NAME)), broken=["1"])
    out = tmp_path / "out.json"
    monkeypatch.setattr(sys, "argv", ["ncu.py", "--commit", "abc", "--json", str(out), "--cases", "0", "1", "2"])
    assert ncu.main() == 1
    (words,) = seen()
    text = " ".join(words)
    assert "--profile-from-start off --clock-control none --cache-control all" in text
    assert f"--kernel-name regex:{ncu.KERNELS} --page raw --csv --print-units base --section SpeedOfLight" in text
    assert ncu.FIELDS["tensor_percent"] in words[words.index("--metrics") + 1].split(",")
    after = words.index(sys.executable) + 1
    assert words[after : after + 2] == ["-m", "bench.ncu"]
    record = json.loads(out.read_text())
    assert [row["m"] for row in record["profiles"]] == [1, 32]
    assert record["failed"] == [f"{ncu.CASES[1]}: no kernel"]
    said = capsys.readouterr()
    assert "no kernel" in said.err
    assert "| w4a16 (bf16) | few_tokens_kernel | 1x57344x8192 | 66.5 | 3.99 | 42 | 42 | 42 | 42 | 42 | 72 |" in said.out
    lines = [line for line in said.out.splitlines() if line.startswith("|")]
    assert len({line.count("|") for line in lines}) == 1


def test_a_name_that_ncu_does_not_know_costs_no_profile(fake):
    seen = fake(table((NAME,)), refuse=True)
    rows, failed = ncu.run([0], 5.0)
    assert (len(rows), failed) == (1, [])
    assert ["--set" in words for words in seen()] == [False, True]


def test_what_ncu_says_is_kept_where_there_is_no_profile(fake):
    fake("==ERROR== ERR_NVGPUCTRPERM")
    rows, failed = ncu.run([0], 5.0)
    assert rows == []
    assert "ERR_NVGPUCTRPERM" in failed[-1]
    seen = fake("==WARNING== No kernels were profiled.", broken=["0"])
    assert ncu.run([0], 5.0)[1][0].endswith("no kernel")
    assert len(seen()) == 3  # two before, and one now: more metrics would not help


def test_a_run_that_hangs_is_ended(fake, monkeypatch):
    fake("", sleep=True)
    monkeypatch.setattr(ncu, "_output", lambda words, limit, real=ncu._output: real(words, 1.5))
    rows, failed = ncu.run([0], 5.0)
    assert rows == []
    assert failed[0] == f"{ncu.CASES[0]}: never begun"
    assert "begun\n\nended after 2 s" in failed[-1]


def test_it_says_what_it_needs():
    command = [sys.executable, "-m", "bench.ncu"]
    done = subprocess.run(command, cwd=ncu.ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "--json is needed" in done.stderr


def test_the_kernels_that_ncu_looks_for_are_there():
    sources = "".join(path.read_text() for path in (ncu.ROOT / "csrc").rglob("*") if path.suffix in (".h", ".cu"))
    cutlass = "device_kernel"  # cutlass/device_kernel.h
    for name in set(ncu.KERNELS.split("|")) - {cutlass}:
        assert re.search(rf"__global__ void[^;{{]*\b{name}\(", sources), name
