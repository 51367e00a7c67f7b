"""The check of a bound layer on real backends: no false alarm, its cost in ms and MB, faults planted on the device."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
import torch

from fp4dispatch.backends import registry
from fp4dispatch.backends.base import Backend
from fp4dispatch.dispatch import choose
from fp4dispatch.errors import SelfCheckFailed
from fp4dispatch.machine import system as _system
from fp4dispatch.models.linear import FP4Linear, FP8Linear
from fp4dispatch.problem import Problem
from fp4dispatch.trust import canary, layercheck, quarantine, selfcheck
from fp4dispatch.tune.tuning import make_weights

pytestmark = pytest.mark.gpu

LIMIT_MS, LIMIT_BYTES = 300, 64 << 20
SHAPES = [(4096, 4096), (28672, 4096), (8192, 28672), (6144, 4096), (4096, 14336), (1000, 528)]
MODEL = [(4096, 4096), (1024, 4096), (6144, 4096), (14336, 4096), (28672, 4096), (4096, 14336), (128256, 4096)]
"""Distinct shapes of an 8B model, with and without fused projections."""
KINDS = [
    (name, *kind)
    for name, backend in registry.backends().items()
    if isinstance(backend, Backend) and name != "reference"
    for kind in canary.kinds(backend.activations)
]
DTYPE = {"bfloat16": torch.bfloat16, "float16": torch.float16}


@pytest.fixture(autouse=True)
def clean(tmp_path, monkeypatch):
    tmp_path.chmod(0o755)
    monkeypatch.setattr(quarantine.store, "folder", lambda: tmp_path / "cache" / "selfcheck")
    for name in ("FP4DISPATCH_SELFCHECK", "FP4DISPATCH_FP8_BACKEND", "FP4DISPATCH_DISABLE", "FP4_GEMM_BACKEND"):
        monkeypatch.delenv(name, raising=False)
    quarantine.reset()
    choose.reset()
    yield
    quarantine.reset()
    choose.reset()


@pytest.fixture(autouse=True, scope="module")
def warm(request):
    """Load what every check of a process uses: torch's own kernels. How long that takes is shown, once."""
    torch.zeros(1, device="cuda")
    torch.cuda.synchronize()
    backend = registry.instance("reference")
    started = time.perf_counter()
    for kind in (("nvfp4_gemm", "nvfp4", "bf16"), ("fp8_gemm", "row", "fp8")):
        layercheck.run(subject(backend, kind, 256, 256, bias=True), facts())
    print(f"\nfirst checks of the process (the reference, 256 x 256): {(time.perf_counter() - started) * 1e3:.0f} ms")


def facts():
    torch.cuda.init()
    return _system.current()


def subject(backend, kind, n, k, *, bias=False, out_dtype="bfloat16", last=1 << 15, static=None):
    op, scaling, activation = kind
    problem = Problem(op, 1, n, k, activation, scaling, out_dtype, bias)
    weights = make_weights(problem, "cuda")
    if static is not None:
        weights = replace(weights, input_scale=torch.tensor(static, device="cuda"))
    return layercheck.Subject(backend, problem, 1, last, weights, backend.prepare(weights), DTYPE[out_dtype])


def supported(name, kind, n, k, **options):
    op, scaling, activation = kind
    problem = Problem(
        op, 1, n, k, activation, scaling, options.get("out_dtype", "bfloat16"), options.get("bias", False)
    )
    reasons = registry.instance(name).supports(problem, facts())
    if reasons:
        pytest.skip("; ".join(map(str, reasons)))


def own_peak(s):
    """Bytes that the backend itself takes for its largest launch, beside operands and output."""
    most = 0
    for m in layercheck.tokens(s, "cuda"):
        problem = replace(s.problem, m=m)
        plan = s.backend.plan(problem, s.prepared)
        x = torch.randn(m, problem.k, device="cuda").to(s.dtype)
        out = torch.empty(m, problem.n, device="cuda", dtype=s.dtype)
        for _ in range(2):  # the first may leave a workspace that torch keeps for each stream
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            s.backend.run(plan, s.prepared, x, out)
            torch.cuda.synchronize()
        most = max(most, torch.cuda.max_memory_allocated() - before)
        s.backend.release(plan)
    return most


@pytest.mark.parametrize(("n", "k"), SHAPES)
@pytest.mark.parametrize("kind", KINDS, ids="-".join)
def test_real_layers_pass_within_the_limits(kind, n, k, record_property):
    name, kind = kind[0], kind[1:]
    supported(name, kind, n, k)
    s = subject(registry.instance(name), kind, n, k)
    own = own_peak(s)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    verdict = selfcheck.trusted_layer(s, facts())
    peak = torch.cuda.max_memory_allocated() - before
    shown = (
        f"{name} {' '.join(kind)} N={n} K={k}: {verdict.check_ms:.0f} ms checking, {verdict.build_ms:.0f} ms building, "
        f"peak {peak / 2**20:.0f} MB, of which the backend's own {own / 2**20:.0f} MB; {', '.join(verdict.ran)}"
    )
    print(shown)
    record_property("layercheck", shown)
    assert verdict.status == "passed", verdict.text()
    assert len(verdict.ran) == 3, shown
    assert verdict.check_ms < LIMIT_MS, shown
    assert peak - own < LIMIT_BYTES, shown
    for seed in (1, 2):
        outcome = layercheck.run(s, facts(), seed)
        assert [str(finding) for finding in outcome.findings] == [], seed


@pytest.mark.parametrize("out_dtype", DTYPE)
@pytest.mark.parametrize("static", [None, 0.0371])
@pytest.mark.parametrize("kind", KINDS, ids="-".join)
def test_dtypes_bias_and_static_scales_pass(kind, static, out_dtype):
    name, kind = kind[0], kind[1:]
    if static and kind[1] == "block128":
        pytest.skip("block scales are never static")
    supported(name, kind, 1040, 1040, bias=True, out_dtype=out_dtype)
    s = subject(registry.instance(name), kind, 1040, 1040, bias=True, out_dtype=out_dtype, static=static)
    outcome = layercheck.run(s, facts())
    assert [str(finding) for finding in outcome.findings] == []
    assert len(outcome.ran) == 3


# -------------------------------------------------------------------------------------------------------------- plants


class Around(Backend):
    """A real backend with a fault around it."""

    auto = True

    def __init__(self, inner, *, x=None, out=None, bias=None):
        self.name, self.inner, self.calls = "around", inner, 0
        self.spoil_x, self.spoil_out, self.spoil_bias = x, out, bias
        self.activations, self.plans_by_m = inner.activations, inner.plans_by_m

    def supports(self, problem, system):
        return self.inner.supports(problem, system)

    def prepare(self, weights):
        return self.inner.prepare(weights)

    def plan(self, problem, prepared):
        return self.inner.plan(problem, prepared)

    def run(self, plan, prepared, x, out, bias=None):
        self.calls += 1
        if self.spoil_x and isinstance(x, torch.Tensor):
            x = self.spoil_x(x.clone())
        if self.spoil_bias and bias is not None and out.shape[0] == 1:
            bias = torch.zeros_like(bias)  # not None, which a backend that was planned with a bias may refuse
        before = out.clone()
        self.inner.run(plan, prepared, x, out, bias)
        if self.spoil_out:
            self.spoil_out(self, out, before)


def beyond(k):
    def spoil(x):
        x[:, k:] = 0
        return x

    return spoil


def scale(rows, columns, factor):
    def spoil(self, out, before):
        out[rows, columns] *= factor

    return spoil


def write(first, count):
    def spoil(self, out, before):
        start = out.storage_offset() + (out.numel() + first if first >= 0 else first)
        torch.as_strided(out, (count,), (1,), start).fill_(1.0)

    return spoil


def now_and_then(self, out, before):
    if self.calls % 50 == 49:
        out[0, 77] += 1e3


def shifts_many_rows(self, out, before):
    if out.shape[0] > 256:
        out[256:] = out[: out.shape[0] - 256].clone()


def loses_the_last_tile(self, out, before):
    i, j = (out.shape[0] - 1) // 128 * 128, (out.shape[1] - 1) // 128 * 128
    out[i:, j:] = before[i:, j:]


def loses_tiles_at_random(self, out, before):
    if torch.rand(()) < 0.02:
        out[:, 128:256] = before[:, 128:256]


PLANTS = {
    "wrong above N=4096": ((4224, 512), {"out": scale(slice(None), slice(4096, None), 1.5)}, "wrong values"),
    "wrong above K=2048": ((512, 4096), {"x": beyond(2048)}, "wrong values"),
    "wrong above M=256": ((512, 512), {"out": shifts_many_rows}, "wrong values"),
    "K tail beyond 1024": ((512, 1040), {"x": beyond(1024)}, "wrong values"),
    "K tail of a long K": ((512, 28688), {"x": beyond(28672)}, "wrong values"),
    "bias dropped at M=1": ((512, 512), {"bias": True}, "wrong values"),
    "writes 8192 past the end": ((512, 512), {"out": write(0, 8192)}, "outside"),
    "writes behind a gap of 8191": ((512, 512), {"out": write(8191, 1)}, "outside"),
    "writes 8192 before the start": ((512, 512), {"out": write(-8192, 1)}, "outside"),
    "wrong once in 50": ((512, 512), {"out": now_and_then}, "not repeatable"),
    "loses tiles once in 50": ((512, 512), {"out": loses_tiles_at_random}, "not repeatable"),
    "loses the last tile": ((28672, 512), {"out": loses_the_last_tile}, "never written"),
    "zero tile": ((512, 512), {"out": scale(slice(None), slice(0, 128), 0.0)}, "zero"),
    "one row scaled": ((512, 512), {"out": scale(slice(0, 1), slice(None), 1.3)}, "wrong values"),
}


@pytest.mark.parametrize("plant", PLANTS)
@pytest.mark.parametrize("kind", [kind for kind in KINDS if not kind[0].startswith("flashinfer")], ids="-".join)
def test_faults_around_a_real_backend_are_caught(kind, plant):
    torch.manual_seed(0)
    name, kind = kind[0], kind[1:]
    (n, k), spoil, want = PLANTS[plant]
    supported(name, kind, n, k, bias="bias" in plant)
    s = subject(Around(registry.instance(name), **spoil), kind, n, k, bias="bias" in plant)
    found = layercheck.run(s, facts()).findings
    assert [finding.kind for finding in found] == [want], list(map(str, found))
    honest = replace(s, backend=Around(registry.instance(name)))
    assert layercheck.run(honest, facts()).findings == []


@pytest.mark.parametrize("make", ["nvfp4", "fp8"])
def test_binding_passes_over_a_wrong_backend(make, monkeypatch):
    """With real CUDA state: auto takes the next one, a named one is refused, and a new process knows."""
    linear = torch.nn.Linear(4096, 512, bias=True).bfloat16().cuda()

    def layer(**options):
        cls = FP4Linear if make == "nvfp4" else FP8Linear
        made = (
            cls.from_linear(linear, **options) if make == "nvfp4" else cls.from_linear(linear, scaling="row", **options)
        )
        made._forget()
        return made

    real = layer().bind().decisions[0][1].backend
    assert real != "reference", "this machine has no other backend"
    wrong = Around(registry.instance(real), x=beyond(2048))
    backends = {"around": wrong, real: registry.instance(real), "reference": registry.instance("reference")}
    monkeypatch.setattr(registry, "backends", lambda: backends)
    quarantine.reset()
    choose.reset()
    with pytest.raises(SelfCheckFailed, match=r"around .* layer M=1 N=512 K=4096"):
        layer(backend="around").bind()
    quarantine.reset()
    choose.reset()
    made = layer()
    made.bind()
    assert "around" not in made.backend_text()
    x = torch.randn(3, 4096, device="cuda", dtype=torch.bfloat16)
    want = linear(x).float()
    assert (made(x).float() - want).norm() < 0.2 * want.norm()


def test_what_a_model_of_8b_pays_once():
    """The sum over all shapes and backends of auto; then nothing, from the records."""
    total = {}
    for make in ("nvfp4", "fp8"):
        for n, k in MODEL:
            linear = torch.nn.Linear(k, n, bias=False, device="cuda", dtype=torch.bfloat16)
            made = FP4Linear.from_linear(linear) if make == "nvfp4" else FP8Linear.from_linear(linear, scaling="row")
            made.bind()
            del linear, made
            torch.cuda.empty_cache()
        ran = [v for v in quarantine.known() if v.layer and v.op.startswith(make)]
        total[make] = sum(v.check_ms for v in ran), len(ran)
        print(f"{make}: {total[make][0]:.0f} ms for {len(ran)} (shape, backend) of {len(MODEL)} shapes")
        for v in ran:
            print(f"  {v.text()}")
        assert all(v.status == "passed" for v in ran)
        assert max(v.check_ms for v in ran) < LIMIT_MS
    quarantine.reset()
    choose.reset()
    linear = torch.nn.Linear(4096, 4096, bias=False, device="cuda", dtype=torch.bfloat16)
    started = time.perf_counter()
    FP4Linear.from_linear(linear).bind()
    print(f"from the records, a layer of 4096 x 4096 is bound in {(time.perf_counter() - started) * 1e3:.0f} ms")
