"""The contract of a backend as a test suite: one case at a time, on any device, for any registered backend.

``check(backend, case, device)`` raises :class:`Violation` at the first thing that breaks the contract. What it holds
the numbers to: in each 128x128 tile of the output, the error against the exact product (float64, of the very operands
that were multiplied) is at most twice the error of the reference backend. A cosine over the whole output is no check:
it accepts dozens of empty tiles.
"""

from __future__ import annotations

import dataclasses
import inspect
import itertools
from dataclasses import dataclass

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fp4dispatch import formats
from fp4dispatch.backends.activations import quantize_activation
from fp4dispatch.backends.base import Backend, LinearWeights, Plan, Prepared, QuantizedActivation
from fp4dispatch.backends.reference import ReferenceBackend
from fp4dispatch.problem import Problem

TILE = 128
TOKENS = (1, 2, 7, 16, 17, 64, 127, 129)
SHAPES = ((128, 128), (200, 144), (72, 272), (384, 96))
"""N x K: full tiles, ragged N with a K tail, N under a tile with a long K tail, three tiles with K under a block."""

F32_NOISE = 2.0**-20
FP8_ACCUMULATOR_NOISE = 2.0**-13
"""Hopper's FP8 tensor cores keep about 14 bits of a running sum (DeepSeek-V3, section 3.3.2, arXiv:2412.19437). This is
for sums that are promoted to f32 every 128 products, as FP8 GEMMs do."""

UNPROMOTED_GROWTH = 0.75
"""w4a8's sums stay in the tensor core over all of K, and the truncations add up: with truncation emulated, 1.0, 4.5, 11
and 25 times the noise at K = 128, 1040, 4096 and 14336, just under ``(K / 128) ** 0.75``. At K = 14336 this is 0.3 % of
a sum, a tenth of what the format itself loses."""


BIAS_AFTER_ROUNDING = "flashinfer_"
"""FlashInfer's functions take no bias: these backends add it to the rounded product and round again, and are held to
the reference that does the same. In a tile of one row a few large columns make up all of the error, and two roundings
can be 2.6 times one: 0.380 and 0.146, computed exactly, in tile (1, 3) of block128, 129x1000x1040 with a bias."""

TOKEN_SCALE_AFTER_ROUNDING = "flashinfer_"
"""``bmm_fp8`` takes one scale: these backends multiply the rounded product by the scales of tokens and round again, and
are held to the reference that does the same. In 3x1024x2048, tile (0, 4), computed exactly: 0.271 rounded once, 0.855
rounded twice; from 64 tokens on all is within what one rounding is allowed. flashinfer_cudnn rounds once if M is 1."""


class Violation(AssertionError):
    """A backend broke its contract."""


@dataclass(frozen=True)
class Case:
    """One problem with seeded operands; ``static``: with an input scale."""

    op: str
    scaling: str
    activation: str
    m: int
    n: int
    k: int
    out_dtype: str
    bias: bool
    shards: int = 1
    static: bool = False
    raw: str = ""

    def __str__(self) -> str:
        extra = [f"{self.shards} shards"] * (self.shards > 1) + ["static"] * self.static + ["bias"] * self.bias
        extra += [f"raw {self.raw}"] * bool(self.raw)
        return "-".join([self.scaling, self.activation, f"{self.m}x{self.n}x{self.k}", self.out_dtype, *extra])

    def problem(self) -> Problem:
        raw = self.raw if self.scaling == "nvfp4" else ""
        return Problem(
            self.op,
            self.m,
            self.n,
            self.k,
            self.activation,
            self.scaling,
            self.out_dtype,
            self.bias,
            sf_layout=raw or None,
            raw=bool(self.raw),
        )


def cases(backend: Backend, tokens=TOKENS, shapes=SHAPES) -> list[Case]:
    """Every op, scaling and activation that the class claims, each with every M; the rest rotates through."""
    found = []
    rest = itertools.cycle(itertools.product(shapes, ("bfloat16", "float16"), (False, True), (False, True)))
    for op, activations in backend.activations.items():
        for scaling in ("nvfp4",) if op == "nvfp4_gemm" else ("tensor", "row", "block128"):
            for activation, m in itertools.product(activations, tokens):
                for _ in range(2):
                    (n, k), dtype, bias, other = next(rest)
                    shards = 3 if other and scaling == "nvfp4" else 1
                    static = not bias and activation != "bf16" and scaling in ("nvfp4", "tensor", "row")
                    found.append(Case(op, scaling, activation, m, n, k, dtype, bias, shards, static))
                next(rest)  # 3 and 32 have no common factor: every combination comes up
                if activation == ("nvfp4" if scaling == "nvfp4" else "fp8"):
                    layout = "128x4" if m % 2 else "linear"
                    found.append(Case(op, scaling, activation, m, 128, 128, "bfloat16", False, raw=layout))
    return list(dict.fromkeys(found))


def make_weights(case: Case, device: str, seed: int) -> LinearWeights:
    """Return random weights whose rows differ in size by up to 64, so that a misplaced scale shows."""
    gen = torch.Generator().manual_seed(seed)
    w = torch.randn(case.n, case.k, generator=gen) * 2.0 ** torch.randint(-3, 4, (case.n, 1), generator=gen)
    static = torch.tensor(0.05 if case.scaling != "nvfp4" else 0.004, device=device) if case.static else None
    w = w.to(device)
    if case.scaling != "nvfp4":
        q = formats.fp8_quantize(w, case.scaling)
        return LinearWeights(case.op, case.scaling, case.n, case.k, q.data, q.scale, input_scale=static)
    rows = _shard_rows(case.n, case.shards)
    factors = [4.0**i for i in range(case.shards)]
    parts = [
        formats.nvfp4_quantize(part * factor, sf_layout="linear")
        for part, factor in zip(w.split(rows), factors, strict=True)
    ]
    data, sf = (torch.cat([p[i].view(torch.uint8) for p in parts]) for i in (0, 1))
    layout = case.raw or "linear"
    sf = sf.view(torch.float8_e4m3fn)
    return LinearWeights(
        case.op,
        case.scaling,
        case.n,
        case.k,
        data,
        formats.to_128x4(sf) if layout == "128x4" else sf,
        torch.stack([p.global_scale for p in parts]),
        tuple(rows),
        static,
        layout,
    )


def dequantised(w: LinearWeights, activation: str = "bf16") -> torch.Tensor:
    """Return W [N, K] in float64 as it is multiplied: exactly, but NVFP4 weights under FP8 activations are folded."""
    if w.scaling != "nvfp4":
        bn, bk = (1, w.k) if w.scaling in ("tensor", "row") else (128, 128)
        scale = w.scale.double().expand(w.n) if w.scaling == "tensor" else w.scale.double()
        grid = scale.reshape(-1, 1) if bn == 1 else scale
        grid = grid.repeat_interleave(bn, 0)[: w.n].repeat_interleave(bk, 1)[:, : w.k]
        return w.weight.double() * grid
    sf = formats.from_128x4(w.scale, w.n, w.k // 16) if w.sf_layout == "128x4" else w.scale
    codes = formats.decode_e2m1(formats.unpack_e2m1(w.weight)).double()
    values = codes * sf.double().repeat_interleave(16, 1)
    if activation == "fp8":
        values = (values.float() / 8).to(torch.float8_e4m3fn).double() * 8
    return values * formats.expand_shards(w.global_scale, w.shard_rows).double()[:, None]


def make_activation(case: Case, w: LinearWeights, device: str, seed: int):
    """Return what goes into ``run``, and A [M, K] in float64 as it is multiplied."""
    gen = torch.Generator().manual_seed(seed)
    x = torch.randn(case.m, case.k, generator=gen) * 2.0 ** torch.randint(-2, 3, (case.m, 1), generator=gen)
    x = x.to(device, getattr(torch, case.out_dtype))
    if case.activation == "bf16":
        return x, x.double()
    layout = case.raw or "linear"
    if case.raw and case.scaling == "tensor":
        q = QuantizedActivation(*formats.fp8_quantize(x, "tensor"))
    else:
        q = quantize_activation(x, case.activation, case.scaling, w.input_scale, layout)
    exact = (
        dequantised(
            LinearWeights(
                "nvfp4_gemm", "nvfp4", case.m, case.k, q.data, q.scale, q.global_scale.reshape(1), (case.m,),
                sf_layout=layout,
            )
        )
        if case.activation == "nvfp4"
        else _fp8_activation(q, case)
    )  # fmt: skip
    return (q if case.raw else x), exact


def _fp8_activation(q: QuantizedActivation, case: Case) -> torch.Tensor:
    scale = q.scale.double()
    if case.scaling == "block128":
        return q.data.double() * scale.repeat_interleave(128, 1)[:, : case.k]
    return q.data.double() * scale.reshape(-1, 1)


def check(backend: Backend, case: Case, device: str = "cpu") -> None:
    """Hold one backend to the contract in one case.

    Raises
    ------
    Violation
        Naming the case, the tile and the numbers.
    """
    first, second = make_weights(case, device, 1), make_weights(case, device, 2)
    prepared_first, prepared = backend.prepare(first), backend.prepare(second)
    _check_prepared(backend, case, prepared_first, prepared, second)
    problem = case.problem()
    plan = backend.plan(problem, prepared_first)  # and run with the other layer's weights: a plan is for a shape
    _check_plan(case, plan, prepared_first)
    x, a = make_activation(case, second, device, 3)
    dtype = getattr(torch, case.out_dtype)
    bias = torch.randn(case.n, generator=torch.Generator().manual_seed(4)).to(device, dtype) if case.bias else None
    out = _run(backend, case, plan, prepared, x, bias, device, dtype)
    as_a_layer = isinstance(x, torch.Tensor) and x.dtype == dtype
    again = (_ready if as_a_layer else _run)(backend, case, plan, prepared, x, bias, device, dtype)
    w = dequantised(second, case.activation)
    exact = a @ w.t() + (0 if bias is None else bias.double())
    oracle = ReferenceBackend()
    ours = oracle.prepare(second)
    late = bias is not None and backend.name.startswith(BIAS_AFTER_ROUNDING)
    token_scale = None
    if _scales_tokens_late(backend, case):
        q = quantize_activation(x, "fp8", case.scaling)
        x, token_scale = QuantizedActivation(q.data, torch.ones_like(q.scale)), q.scale.reshape(-1, 1)
    reference = _run(oracle, case, oracle.plan(problem, ours), ours, x, None if late else bias, device, dtype)
    if token_scale is not None:
        reference = (reference.float() * token_scale).to(dtype)
    if late:
        reference = reference + bias
    noise = _accumulator_noise(case) if device != "cpu" and case.activation == "fp8" else F32_NOISE
    floor = noise * ((a * a) @ (w * w).t()).sqrt()
    _check_tiles(case, out, exact, reference, floor)
    if not torch.equal(out, again):
        how = ", the second as a layer that is warm," if as_a_layer else ""
        raise Violation(f"{case}: two runs{how} differ in {int((out != again).sum())} elements")


def _scales_tokens_late(backend: Backend, case: Case) -> bool:
    """Tell whether a backend multiplies its rounded product by the scales of tokens (never a caller's: that is one)."""
    dynamic = (case.scaling, case.activation, case.static, case.raw) == ("tensor", "fp8", False, "")
    one = case.m == 1 and backend.name == "flashinfer_cudnn"
    return dynamic and backend.name.startswith(TOKEN_SCALE_AFTER_ROUNDING) and not one


def _accumulator_noise(case: Case) -> float:
    unpromoted = case.k if case.scaling == "nvfp4" else 128
    return FP8_ACCUMULATOR_NOISE * max(unpromoted / 128, 1.0) ** UNPROMOTED_GROWTH


def _check_prepared(backend: Backend, case: Case, a: Prepared, b: Prepared, weights: LinearWeights) -> None:
    if a.backend != backend.name:
        raise Violation(f"{case}: prepared.backend is {a.backend!r}")
    hash(a.layout)
    if a.layout != b.layout:
        raise Violation(f"{case}: layouts of two layers of one shape differ: {a.layout} and {b.layout}")
    if [(t.shape, t.dtype, t.stride()) for t in a.tensors] != [(t.shape, t.dtype, t.stride()) for t in b.tensors]:
        raise Violation(f"{case}: prepared tensors of two layers of one shape differ in shape or dtype")
    for t in b.tensors:
        if t.device != weights.weight.device:
            raise Violation(f"{case}: a prepared tensor is on {t.device}")


def _check_plan(case: Case, plan: Plan, prepared: Prepared) -> None:
    weights = {t.untyped_storage().data_ptr() for t in prepared.tensors}
    held = [t for t in _tensors(plan.state) if t.untyped_storage().data_ptr() in weights]
    if held:
        raise Violation(f"{case}: the plan holds {len(held)} of the layer's tensors")


def _tensors(value, depth=0):
    if isinstance(value, torch.Tensor):
        yield value
    elif depth < 6:
        inner = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple | set) else ()
        if dataclasses.is_dataclass(value):  # it may have slots, and no __dict__
            inner = [getattr(value, member.name) for member in dataclasses.fields(value)]
        elif inspect.isfunction(value):
            inner = [*(value.__defaults__ or ()), *(cell.cell_contents for cell in value.__closure__ or ())]
        for item in [*inner, *getattr(value, "__dict__", {}).values()]:
            yield from _tensors(item, depth + 1)


class _NoSync(TorchDispatchMode):
    """Refuse what reads a value on the host; on CUDA, torch's own debug mode says so too."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket in (torch.ops.aten._local_scalar_dense, torch.ops.aten.nonzero, torch.ops.aten.equal):
            raise Violation(f"run reads a value on the host ({func})")
        return func(*args, **(kwargs or {}))


def _run(backend, case, plan, prepared, x, bias, device, dtype) -> torch.Tensor:
    """Run into a NaN-poisoned output with a poisoned row before and after it."""
    around = torch.full((case.m + 2, case.n), float("nan"), dtype=dtype, device=device)
    out = around[1:-1]
    if device != "cpu":
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
    try:
        with _NoSync():
            backend.run(plan, prepared, x, out, bias)
    except Violation as error:
        raise Violation(f"{case}: {error}") from None
    finally:
        if device != "cpu":
            torch.cuda.set_sync_debug_mode("default")
    if not around[[0, -1]].isnan().all():
        raise Violation(f"{case}: run wrote outside its output")
    return out


def _ready(backend, case, plan, prepared, x, bias, device, dtype) -> torch.Tensor:
    """Run as a layer does that has run before."""
    out = torch.full((case.m, case.n), float("nan"), dtype=dtype, device=device)
    with _NoSync():
        backend.ready(plan, prepared)(x, out, bias)
    return out


def _check_tiles(case, out, exact, reference, floor) -> None:
    for i, j in itertools.product(range(0, case.m, TILE), range(0, case.n, TILE)):
        tile = (slice(i, i + TILE), slice(j, j + TILE))
        where = f"{case}: tile ({i // TILE}, {j // TILE})"
        poison = int(out[tile].isnan().sum())
        if poison:
            raise Violation(f"{where}: {poison} of {out[tile].numel()} elements were never written, or are NaN")
        mine, theirs = (_rms(y[tile].double() - exact[tile]) for y in (out, reference))
        allowed = 2 * theirs + _rms(floor[tile])
        if mine > allowed:
            raise Violation(f"{where}: error {mine:.3g}, allowed {allowed:.3g} (the reference's own is {theirs:.3g})")


def _rms(x: torch.Tensor) -> float:
    return float(x.square().mean().sqrt())


def _shard_rows(n: int, shards: int) -> list[int]:
    rows = [n // 2, n // 4]
    return [n] if shards == 1 else [*rows, n - sum(rows)]


def unsupported(backend: Backend, case: Case, system) -> str:
    """Return why this machine cannot run a case, as text; empty if it can."""
    return "; ".join(f"{r.code} {r.text}" for r in backend.supports(case.problem(), system))
