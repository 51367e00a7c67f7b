"""The check of a bound layer: faults that the small canaries miss, legitimate rounding, limits."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

from fp4dispatch.backends.base import Plan
from fp4dispatch.backends.reference import ReferenceBackend
from fp4dispatch.errors import CaptureError
from fp4dispatch.machine.system import System
from fp4dispatch.models.linear import FP4Linear, FP8Linear
from fp4dispatch.problem import Problem
from fp4dispatch.problem.decision import Reason
from fp4dispatch.trust import canary, layercheck, selfcheck
from fp4dispatch.trust.layer_operands import Operands
from fp4dispatch.trust.verdict import CheckResult
from tests import planted
from tests.planted import FAULTS, HONEST, LAYER_FAULTS, ONLY_WITH, TRUNCATING, Honest, TruncatingDown

CPU = torch.device("cpu")
HERE = System.fake()
KINDS = list(canary.kinds(planted.EVERYTHING))
ROW = ("fp8_gemm", "row", "fp8")
HONEST_COUNT: dict[type, int] = {}
"""Each honest backend takes another third of all kinds, dtypes and scales."""
NAMES = {torch.bfloat16: "bfloat16", torch.float16: "float16", torch.float32: "float32"}


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def clean(tmp_path, monkeypatch):
    tmp_path.chmod(0o755)
    monkeypatch.setenv("FP4DISPATCH_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("FP4DISPATCH_SELFCHECK", raising=False)
    selfcheck.quarantine.reset()
    yield
    selfcheck.quarantine.reset()


@pytest.fixture
def few(monkeypatch):
    """Few repeats, where they are not the subject."""
    monkeypatch.setattr(layercheck, "REPEATS", (2, 1, 1))


def weights(kind, n=256, k=256, static=None, dtype=torch.bfloat16, seed=0):
    op, scaling, _ = kind
    torch.manual_seed(seed)
    linear = torch.nn.Linear(k, n, bias=False).to(dtype)
    layer = FP4Linear.from_linear(linear) if op == "nvfp4_gemm" else FP8Linear.from_linear(linear, scaling=scaling)
    held = layer.weights()
    return held if static is None else replace(held, input_scale=torch.tensor(static))


def subject(backend, kind, n=256, k=256, bias=0, first=1, last=1 << 15, dtype=torch.bfloat16, w=None, **options):
    op, scaling, activation = kind
    w = weights(kind, n, k, dtype=dtype, **options) if w is None else w
    problem = Problem(op, first, n, k, activation, scaling, NAMES[dtype], bool(bias))
    return layercheck.Subject(backend, problem, first, last, w, backend.prepare(w), dtype)


def check(backend, kind, **options):
    return layercheck.run(subject(backend, kind, **options), HERE)


def found(outcome):
    return [str(finding) for finding in outcome.findings]


@pytest.mark.parametrize("kind", KINDS, ids="-".join)
def test_the_callers_autocast_condemns_nobody(kind, few):
    with torch.autocast("cpu", torch.float16):
        outcome = check(Honest(), kind)
    assert outcome.ran
    assert found(outcome) == []


# ------------------------------------------------------------------------------------------------------------- caught


@pytest.mark.parametrize("kind", [ROW, ("nvfp4_gemm", "nvfp4", "nvfp4")], ids="-".join)
@pytest.mark.parametrize("name", LAYER_FAULTS)
def test_what_the_canaries_miss_is_caught_on_the_layer(name, kind, monkeypatch):
    cls, shape = LAYER_FAULTS[name]
    monkeypatch.setitem(layercheck._SECONDS, "cpu", 60.0)  # other processes may take this one's time
    if "Once" not in name:
        monkeypatch.setattr(layercheck, "REPEATS", (2, 1, 1))
    if "Writes8192" not in name:
        assert selfcheck.check(cls(), *kind, HERE, CPU).status == "passed"  # else it is no plant for this check
    assert check(Honest(), kind, **shape).findings == []
    (finding,) = check(cls(), kind, **shape).findings
    kinds = {"Writes8192": "outside", "Once": "not repeatable"}
    assert finding.kind == next((value for key, value in kinds.items() if key in name), "wrong values"), str(finding)


@pytest.mark.parametrize("name", FAULTS)
def test_planted_faults_are_caught_by_the_canaries_or_on_the_layer(name, few):
    """Most are seen on the layer too; the others need what only the canaries have, such as shards."""
    kinds = [kind for kind in KINDS if ONLY_WITH[name](*kind)]
    missed = [kind for kind in kinds if not check(FAULTS[name](), kind, n=264, k=272, bias=1).findings]
    for kind in missed:
        assert selfcheck.check(FAULTS[name](), *kind, HERE, CPU).status == "failed", kind


def calls_of(outcome):
    return int(outcome.ran[0].partition("(")[2].split()[0])


def test_one_in_fifty_is_seen_with_the_stated_probability(monkeypatch):
    """0.98^256 = 0.6 % stays unseen, where calls are cheap; what is dear is called less, and the verdict says so."""
    assert 0.98 ** layercheck.REPEATS[0] < 0.006
    monkeypatch.setitem(layercheck._SECONDS, "cpu", 60.0)
    assert calls_of(check(Honest(), ROW, n=128, k=128, last=1)) == 2 + layercheck.REPEATS[0]
    monkeypatch.setitem(layercheck._SECONDS, "cpu", 0.0)
    assert calls_of(check(Honest(), ROW, n=128, k=128, last=1)) == 2


def test_a_write_between_two_calls_that_only_repeats_see():
    """The fast path of a layer is what repeats; a fault of it alone is a fault."""

    class WrongWhenReady(Honest):
        def ready(self, plan, prepared):
            def launch(x, out, bias):
                self.run(plan, prepared, x, out, bias)
                out[0, 0] += 100

            return launch

    (finding,) = check(WrongWhenReady(), ROW, last=1).findings
    assert finding.kind == "not repeatable"


class Pads(Honest):
    """Asks for rows up to a multiple of 16, and writes all of them: those beyond M differ from call to call."""

    written = 0

    def out_rows(self, plan, m):
        return -(-m // 16) * 16

    def write(self, plan, out, result):
        m = plan.problem.m
        assert out.shape[0] == self.out_rows(plan, m)
        out[:m].copy_(result)
        out[m:] = self.written = self.written + 1


def test_rows_that_a_backend_asks_for_are_there_and_do_not_matter():
    assert check(Pads(), ROW, last=300).findings == []


def test_a_write_beyond_the_rows_that_a_backend_asks_for_is_seen():
    class WritesMore(Pads):
        def write(self, plan, out, result):
            super().write(plan, out, result)
            out.as_strided((1, out.shape[1]), out.stride(), out.storage_offset() + out.numel()).fill_(1)

    (finding,) = check(WritesMore(), ROW, last=300).findings
    assert finding.kind == "outside"


def test_a_fault_in_the_rows_of_m_is_seen_beside_rows_that_do_not_matter():
    class LastRow(Pads):
        def write(self, plan, out, result):
            super().write(plan, out, result)
            out[plan.problem.m - 1] += 100

    assert check(LastRow(), ROW, last=300).findings


def test_evidence_names_the_tile_and_the_element():
    class OneElement(Honest):
        def write(self, plan, out, result):
            if out.shape[0] > 256:
                result[270, 200] += 1e6
            out.copy_(result)

    (finding,) = check(OneElement(), ROW).findings
    assert (finding.tile, finding.element, finding.kind) == ((2, 1), (270, 200), "wrong values")
    assert float(finding.got) > 9e5
    assert "element (270, 200)" in str(finding)


def test_a_lost_tile_anywhere_is_seen_though_tiles_are_sampled():
    class Loses(Honest):
        def write(self, plan, out, result):
            keep = out[:, 1664:1792].clone()
            out.copy_(result)
            out[:, 1664:1792] = keep

    sampled = layercheck._sample(2048, layercheck._COLUMN_TILES, 0) // 128
    assert 13 not in sampled
    (finding,) = check(Loses(), ROW, n=2048, last=1).findings
    assert (finding.kind, finding.tile) == ("never written", (0, 13))


# ------------------------------------------------------------------------------------------------------------- passed


@pytest.mark.parametrize("cls", [*HONEST, ReferenceBackend])
def test_legitimate_rounding_passes(cls, few):
    every = itertools.product(canary.kinds(cls.activations), NAMES, (None, 0.0371))
    for kind, dtype, static in itertools.islice(every, HONEST_COUNT.setdefault(cls, len(HONEST_COUNT)) % 3, None, 3):
        outcome = check(
            cls(), kind, n=144, k=784, bias=1, dtype=dtype, static=None if kind[1] == "block128" else static
        )
        assert (found(outcome), outcome.notes, len(outcome.ran)) == ([], [], 3), (kind, dtype, static)


@pytest.mark.parametrize("cls", TRUNCATING)
def test_fourteen_bit_accumulation_passes(cls, few):
    for kind in canary.kinds(cls.activations):
        k = 512 if cls is TruncatingDown else 2048  # rounding down never cancels; no tensor core is known to do it
        outcome = check(cls(), kind, n=128, k=k, last=24)
        assert found(outcome) == [], kind


def test_weights_of_a_checkpoint_pass(few):
    """Outliers, rows of zeros, shards with scales far apart, 128x4 block scales."""
    kind = ("nvfp4_gemm", "nvfp4", "bf16")
    torch.manual_seed(0)
    linear = torch.nn.Linear(272, 384, bias=False).bfloat16()
    with torch.no_grad():
        linear.weight[7] = 0
        linear.weight[:, 3] *= 200
        linear.weight[100] *= 1e-3
    w = FP4Linear.from_linear(linear).weights()
    from fp4dispatch import formats

    swizzled = replace(w, scale=formats.to_128x4(w.scale), sf_layout="128x4")
    shards = replace(swizzled, global_scale=torch.tensor([1e-4, 30.0]), shard_rows=(100, 284))
    for each in (w, swizzled, shards):
        for activation in ("bf16", "fp8", "nvfp4"):
            outcome = check(ReferenceBackend(), (*kind[:2], activation), n=384, k=272, w=each)
            assert found(outcome) == [], activation


@pytest.mark.parametrize("kind", KINDS, ids="-".join)
def test_answers_are_those_of_the_canaries_arithmetic(kind):
    """Computed apart: dequantised in one piece, multiplied at once."""
    w = weights(kind, 264, 208)
    operands = Operands(w, kind[2], torch.bfloat16)
    x = operands.x(9)
    rows, columns = torch.tensor([0, 3, 8]), torch.tensor([0, 5, 131, 263])
    answer = operands.answer(x, rows, columns)
    honest = Honest()
    problem = Problem(kind[0], 9, 264, 208, kind[2], kind[1])
    a, a_scale = honest.activation(problem, x, w.input_scale)
    b, b_scale = honest.weight(problem, honest.prepare(w))
    assert torch.allclose(a.double() * a_scale.reshape(-1, 1).double(), x.double(), rtol=1e-6)
    want = (x.double() @ (b.double() * b_scale.double().reshape(-1, 1)).t())[rows][:, columns]
    torch.testing.assert_close(answer.product, want, rtol=1e-5, atol=1e-5)
    assert answer.size.min() > 0


# ------------------------------------------------------------------------------------------------------------- limits


@pytest.mark.parametrize(
    ("n", "k"), [(4096, 4096), (28672, 4096), (8192, 28672), (128256, 4096), (64, 64), (6144, 2048)]
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_operands_stay_within_the_memory(n, k, dtype):
    s = layercheck.Subject(Honest(), Problem("nvfp4_gemm", 1, n, k, "bf16"), 1, 1 << 15, None, None, dtype)
    sizes = layercheck.tokens(s, "cuda")
    assert sizes[0] == 1
    assert sizes[-1] * (k + n) * dtype.itemsize + layercheck._ANSWERS < 64 << 20
    if dtype == torch.bfloat16 and n < 1 << 16:
        assert sizes[-1] > 256
        assert any(m % 128 for m in sizes[1:])


def test_only_tokens_that_the_backend_serves():
    s = layercheck.Subject(Honest(), Problem("nvfp4_gemm", 65, 512, 512, "bf16"), 65, 96, None, None, torch.bfloat16)
    assert layercheck.tokens(s, "cuda") == (65, 81, 96)
    assert layercheck.tokens(replace(s, first=1, last=1), "cuda") == (1,)
    assert layercheck.tokens(replace(s, first=3000, last=4096), "cuda") == (2048,)  # as many as are run at all


def test_memory_that_runs_out_makes_it_smaller_and_is_said(few):
    class Large(Honest):
        def run(self, plan, prepared, x, out, bias=None):
            if out.shape[0] > 200:
                raise torch.OutOfMemoryError("CUDA out of memory")
            super().run(plan, prepared, x, out, bias)

    outcome = check(Large(), ROW)
    assert [name.split()[0] for name in outcome.ran] == ["M=1", "M=133"]
    assert (outcome.stopped, outcome.lasting) == (False, False)
    assert outcome.notes == ["M=288 N=256 K=256: memory ran out: CUDA out of memory"]


def test_no_memory_at_all_is_no_verdict(monkeypatch):
    def none(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(Operands, "x", none)
    result = selfcheck.trusted_layer(subject(Honest(), ROW), HERE)
    assert (result.status, result.lasting, result.ran) == ("unchecked", False, ())
    assert "memory ran out" in result.text()
    assert result.vouches_for(plugin=False)
    assert not result.vouches_for(plugin=True)


def test_what_fails_in_the_answers_is_not_the_backends_fault(monkeypatch):
    def fails(*_):
        raise RuntimeError("cuBLAS has no deterministic product")

    monkeypatch.setattr(Operands, "answer", fails)
    result = selfcheck.trusted_layer(subject(Honest(), ROW), HERE)
    assert (result.status, result.findings) == ("unchecked", ())


@pytest.mark.parametrize("step", ["supports", "plan", "run"])
@pytest.mark.parametrize("error", [RuntimeError("no"), SystemExit(3)])
def test_one_that_raises_fails(step, error):
    def raises(*_, **__):
        raise error

    backend = Honest()
    s = subject(backend, ROW)
    setattr(backend, step, raises)
    result = selfcheck.trusted_layer(s, HERE)
    assert (result.status, result.kind, result.lasting) == ("failed", "raised", False)


def test_plans_are_given_back():
    released = []

    class Counts(Honest):
        def release(self, plan):
            released.append(plan)

    check(Counts(), ROW, last=1)
    assert [type(plan) for plan in released] == [Plan]


def test_sizes_that_are_not_supported_are_left_out_and_said(few):
    class Picky(Honest):
        def supports(self, problem, system):
            return (Reason("SHAPE", "M is odd"),) if problem.m % 2 and problem.m > 1 else ()

    outcome = check(Picky(), ROW)
    assert (len(outcome.ran), outcome.notes) == (2, ["M=133 N=256 K=256: SHAPE M is odd"])


# ------------------------------------------------------------------------------------------------------------ verdicts


class Counted(Honest):
    def __init__(self):
        self.plans = 0

    def plan(self, problem, prepared):
        self.plans += 1
        return super().plan(problem, prepared)


def test_once_for_a_shape_then_from_disk(few):
    backend = Counted()
    first = selfcheck.trusted_layer(subject(backend, ROW), HERE)
    assert (first.status, backend.plans) == ("passed", 3)
    assert "layer (N=256 K=256 -> bfloat16, M=1..32768, row, fp8 activations): 3 numbers of tokens passed" in str(first)
    assert selfcheck.trusted_layer(subject(backend, ROW, seed=5), HERE) is first  # other weights of this shape
    selfcheck.quarantine.reset()
    again = selfcheck.trusted_layer(subject(backend, ROW), HERE)
    assert (again.to_dict(), backend.plans) == (first.to_dict(), 3)
    assert CheckResult.from_dict(first.to_dict()) == again
    for other in ({"n": 264}, {"k": 272}, {"bias": 1}, {"last": 64}, {"first": 2}):
        selfcheck.trusted_layer(subject(backend, ROW, **other), HERE)
    assert len(list(selfcheck.quarantine.store.folder().iterdir())) == 6


def test_a_failed_layer_is_in_quarantine_with_its_evidence(few):
    cls, shape = LAYER_FAULTS["WrongAboveK2048"]
    result = selfcheck.trusted_layer(subject(cls(), ROW, **shape), HERE)
    assert (result.status, result.kind) == ("failed", "wrong values")
    assert selfcheck.quarantine.quarantined() == {("planted", "fp8_gemm", "")}
    assert result.evidence[0]["canary"] == "M=1 N=256 K=2304"


def test_off_and_force(few, monkeypatch):
    backend = Counted()
    monkeypatch.setenv("FP4DISPATCH_SELFCHECK", "off")
    assert (selfcheck.trusted_layer(subject(backend, ROW), HERE).status, backend.plans) == ("off", 0)
    monkeypatch.setenv("FP4DISPATCH_SELFCHECK", "auto")
    selfcheck.trusted_layer(subject(backend, ROW), HERE)
    selfcheck.quarantine.reset()
    monkeypatch.setenv("FP4DISPATCH_SELFCHECK", "force")
    selfcheck.trusted_layer(subject(backend, ROW), HERE)
    assert backend.plans == 6


def test_never_inside_a_capture(monkeypatch):
    monkeypatch.setattr(selfcheck.capture, "is_capturing", lambda: True)
    with pytest.raises(CaptureError, match="self-check of planted"):
        selfcheck.trusted_layer(subject(Honest(), ROW), HERE)
