"""The kernels of w8a16 and w8a8 in torch, on any device: what the backends launch where there is no GPU.

Each has the signature of its CUDA namesake and refuses what that refuses. ``w8a16_small`` and ``w8_gemm`` by 16-bit
activations read NaN among the weights as a number; ``w8a8_small`` and ``w8_gemm`` by e4m3 ones make their numbers from
the packed bytes alone, so packing, padding, scales, bias and slicing are all under test. Below them is what the tests
of both backends check.
"""

from __future__ import annotations

import functools
from types import SimpleNamespace

import pytest
import torch

from fp4dispatch import formats
from fp4dispatch.backends.base import LinearWeights, QuantizedActivation
from fp4dispatch.backends.own import compiled, launch_choice, scratch, swiglu
from fp4dispatch.errors import InputError
from fp4dispatch.jit.catalog.manifest import installed
from fp4dispatch.machine import capture
from fp4dispatch.problem import Problem
from fp4dispatch.problem.arch import KNOWN_ARCHS, Arch
from tests import many_tokens, pdl_fake

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
E4M3 = torch.float8_e4m3fn
TOKEN, COLUMN = torch.arange(8).view(8, 1), torch.arange(8).view(1, 8)


def pack_activation(q):
    """e4m3 [M, K] -> what w8a8 multiplies, uint8 [ceil(K/128), ceil(M/8), 1024]: pack_e4m3.h."""
    (m, k), (columns, blocks) = q.shape, (-(-q.shape[1] // 128), -(-q.shape[0] // 8))
    padded = torch.zeros(blocks * 8, columns * 128, dtype=torch.uint8, device=q.device)
    padded[:m, :k] = q.view(torch.uint8)
    tiles = padded.view(blocks, 8, columns, 8, 16).permute(2, 0, 1, 3, 4)
    return tiles[:, :, TOKEN, COLUMN ^ TOKEN].reshape(columns, blocks, 1024)


def unpack_activation(packed, m, k):
    """The inverse, to e4m3 [m, k]."""
    columns, blocks, _ = packed.shape
    assert (columns, blocks) == (-(-k // 128), -(-m // 8))
    tiles = packed.view(columns, blocks, 8, 8, 16)[:, :, TOKEN, COLUMN ^ TOKEN]
    return tiles.permute(1, 2, 0, 3, 4).reshape(blocks * 8, columns * 128)[:m, :k].contiguous().view(E4M3)


def check_rows(x):
    """What every kernel asks of a 16-bit activation."""
    assert x.dtype in DTYPES.values()
    assert x.shape[0] >= 1
    assert x.shape[1] % 16 == 0
    assert x.stride(1) == 1
    assert x.stride(0) % 8 == 0
    assert x.data_ptr() % 16 == 0


def check_weight(w, alpha, bias, out, k, block=False):
    """What all GEMMs ask of the rest; ``block``: of builds for block scales."""
    n = out.shape[1]
    assert k % 16 == n % 8 == 0
    assert w.dtype == E4M3
    assert w.shape[1] == k
    assert n - 8 < w.shape[0] <= n
    assert alpha.dtype == torch.float32
    if block:
        assert tuple(alpha.shape) == (-(-n // 128), -(-k // 128))
    else:
        assert alpha.numel() in (1, n)
    assert bias is None or (tuple(bias.shape) == (n,) and bias.dtype == out.dtype)
    for operand in (w, alpha, out, *([] if bias is None else [bias])):
        assert operand.is_contiguous()
    for operand in (w, out):
        assert operand.data_ptr() % 16 == 0


def finish(x, weight, alpha, bias, out):
    """Rows that the weight lacks are zeros."""
    sums = x.new_zeros(out.shape, dtype=torch.float32)
    sums[:, : weight.shape[0]] = x @ weight.t()
    result = sums * alpha
    out.copy_(result if bias is None else result + bias.float())


class Kernels:
    """The modules that ``jit.load`` would return, and a record of what was loaded and launched.

    ``beside``: other backends' kernels on the same machine; it is asked for what is not here, and packs for them.
    ``shapes``: launch shapes that were given.
    """

    def __init__(self, pdl_allowed=True, beside=None):
        self.pdl_allowed, self.beside = pdl_allowed, beside
        self.loaded, self.launched, self.shapes = [], [], []

    def load(self, kernel, build, arch):
        if self.beside is not None and not kernel.startswith("w8"):
            found = self.beside.load(kernel, build, arch)
            if kernel == "w4_activations":
                found.module = SimpleNamespace(**vars(found.module), **vars(self.quantizers(build)))
            return found
        catalog = installed()
        assert catalog.target_for(catalog.kernel(kernel), arch) is not None
        self.loaded.append((kernel, build))
        made = {
            "w8a16_small": functools.partial(self.unquantised, "w8a16_small"),
            "w8a8_small": functools.partial(self.quantised, "w8a8_small"),
            "w8_gemm_sm90": self.shaped,
            "w4_activations": self.quantizers,
            swiglu.PACKED: self.swiglu,
            swiglu.ROWS: self.swiglu,
        }
        return SimpleNamespace(module=made[kernel](build), pdl_allowed=self.pdl_allowed)

    def swiglu(self, build):
        from tests import swiglu_fake

        return swiglu_fake.module(self.launched)

    def unquantised(self, name, build):
        dtype = DTYPES[build.removeprefix("a16_").partition("_")[0]]

        def multiply(x, w, alpha, bias, out, enable_pdl):
            m, k = x.shape
            assert x.dtype == out.dtype == dtype
            assert m == out.shape[0]
            check_rows(x)
            check_weight(w, alpha, bias, out, k)
            weight = w.float()
            weight[w.view(torch.uint8) & 0x7F == 0x7F] = 480.0
            finish(x.float(), weight, alpha, bias, out)
            self.launched.append((name, m, out.shape[1], k, enable_pdl))

        return SimpleNamespace(**{name: multiply})

    def quantised(self, name, build):
        block, dtype = build.startswith("block_"), DTYPES[build.removeprefix("block_").partition("_")[0]]

        def multiply(x_packed, x_scale, w, alpha, bias, out, enable_pdl):
            (m, n), k = out.shape, w.shape[1]
            assert m >= 1
            assert out.dtype == dtype
            assert x_packed.dtype == torch.uint8
            assert x_packed.shape[2] == 1024
            assert x_scale.dtype == torch.float32
            if block:
                assert tuple(x_scale.shape) == (-(-k // 128), -(-m // 8) * 8)
                assert x_scale.data_ptr() % 16 == 0
            else:
                assert x_scale.numel() in (1, m)
            for operand in (x_packed, x_scale):
                assert operand.is_contiguous()
            assert x_packed.data_ptr() % 16 == 0
            check_weight(w, alpha, bias, out, k, block)
            x = unpack_activation(x_packed, m, k).float()
            if block:
                rows = alpha.repeat_interleave(128, 0)[: w.shape[0]].repeat_interleave(128, 1)[:, :k]
                finish(x * x_scale.t()[:m].repeat_interleave(128, 1)[:, :k], w.float() * rows, 1, bias, out)
            else:
                finish(x * x_scale.reshape(-1, 1), w.float(), alpha, bias, out)
            self.launched.append((name, m, n, k, enable_pdl))

        return SimpleNamespace(**{name: multiply})

    def shaped(self, build):
        tile, as_it_is = many_tokens.tile_of("w8_gemm_sm90", build), build.startswith("a16_")
        multiply = (self.unquantised if as_it_is else self.quantised)("w8_gemm", build).w8_gemm

        def w8_gemm(x, x_scale, w, alpha, bias, out, shape, enable_pdl):
            many_tokens.check_covers(tile, shape, *out.shape)
            self.shapes.append(tuple(shape))
            assert (x_scale is None) is as_it_is
            multiply(x, *([] if as_it_is else [x_scale]), w, alpha, bias, out, enable_pdl)

        return SimpleNamespace(w8_gemm=w8_gemm)

    def quantizers(self, build):
        assert build == "any"

        def fill(name, x, packed, q, enable_pdl):
            values = pack_activation(q)
            assert (packed.dtype, packed.shape) == (torch.uint8, values.shape)
            assert packed.is_contiguous()
            assert packed.data_ptr() % 16 == 0
            packed.copy_(values)
            self.launched.append((name, *x.shape, enable_pdl))

        def w8_quantize_row(x, packed, scale, enable_pdl):
            check_rows(x)
            assert (scale.dtype, tuple(scale.shape), scale.is_contiguous()) == (torch.float32, (x.shape[0],), True)
            q = formats.fp8_quantize(x, "row")
            scale.copy_(q.scale)
            fill("w8_quantize_row", x, packed, q.data, enable_pdl)

        def w8_quantize_tensor(x, packed, scale, enable_pdl):
            check_rows(x)
            assert (scale.dtype, scale.numel()) == (torch.float32, 1)
            fill("w8_quantize_tensor", x, packed, formats.fp8_quantize(x, "tensor", scale[0]).data, enable_pdl)

        def w8_quantize_block(x, packed, scale, enable_pdl):
            check_rows(x)
            m, k = x.shape
            shape = (-(-k // 128), -(-m // 8) * 8)
            assert (scale.dtype, tuple(scale.shape), scale.is_contiguous()) == (torch.float32, shape, True)
            q = formats.fp8_quantize(x, "1x128")
            scale.fill_(1).t()[:m].copy_(q.scale)
            fill("w8_quantize_block", x, packed, q.data, enable_pdl)

        made = (w8_quantize_row, w8_quantize_tensor, w8_quantize_block)
        return SimpleNamespace(**{quantizer.__name__: quantizer for quantizer in made})


def install(monkeypatch, capability="9.0", **options):
    """Let both backends plan as on a GPU and launch these; returns the record."""
    kernels = Kernels(**options)
    monkeypatch.setattr(compiled.jit, "load", kernels.load)
    for module in (compiled, launch_choice):
        monkeypatch.setattr(module, "gpu_of", lambda device: (Arch.parse(capability), 132))
    monkeypatch.setattr(swiglu, "_known", {})
    pdl_fake.passes(monkeypatch)
    monkeypatch.setattr(capture, "stream_is_capturing", lambda: False)
    monkeypatch.setattr(scratch, "_stream", lambda index: 7)
    monkeypatch.setattr(scratch, "_arenas", {})
    return kernels


# What the tests of both backends check; ``activation`` is that of the backend's problems.

wrong_weights = pytest.mark.parametrize(
    "spoil",
    [
        lambda w: w.view(torch.uint8).roll(1, 0).view(E4M3),
        lambda w: w.view(torch.uint8).roll(16, 1).view(E4M3),
        lambda w: torch.cat([w.view(torch.uint8)[:, :-16], w.view(torch.uint8)[:, -16:] * 0], 1).view(E4M3),
    ],
    ids=["rows", "columns", "tail"],
)


def spoil_weights(monkeypatch, module, spoil):
    """Let ``module`` prepare weights that ``spoil`` went over."""
    monkeypatch.setattr(module, "stored_rows", lambda weight, n, kp: spoil(weight).contiguous())


def error(y, want):
    return float((y.double() - want).norm() / want.norm())


def plan_of(backend, activation, w, prepared, m, out_dtype="bfloat16"):
    return backend.plan(Problem("fp8_gemm", m, w.n, w.k, activation, w.scaling, out_dtype=out_dtype), prepared)


def run(backend, activation, w, x, bias=None, prepared=None):
    prepared = prepared or backend.prepare(w)
    plan = plan_of(backend, activation, w, prepared, x.shape[0], str(x.dtype).removeprefix("torch."))
    out = torch.full((x.shape[0], w.n), torch.nan, dtype=x.dtype)
    backend.run(plan, prepared, x, out, bias)
    return out


def check_built_as_claimed(kernel, record, *tables, archs=None, variants=lambda build: True):
    """Every output type and arch of its capabilities has a build of a kernel in each table; there are no others.

    ``archs``, ``variants``: what the backend has of the kernel, if not all.
    """
    catalog = installed()
    kernel = catalog.kernel(kernel)
    assert all(set(builds) == set(record.out_dtypes) for builds in tables)
    named = sorted(build for builds in tables for build in builds.values())
    assert named == sorted(filter(variants, kernel.variants))
    assert record.kernel_op == kernel.op
    targets = {arch.sm for arch in KNOWN_ARCHS if catalog.target_for(kernel, arch) is not None}
    assert targets == set(archs or record.archs) <= set(record.archs)


def check_other_rows_are_copied(backend, w):
    """A weight [40, 100], and one with rows of 112 bytes that begins 8 bytes past a multiple of 16."""
    weight, _ = backend.prepare(w).tensors
    assert (weight.shape, weight.data_ptr() % 16) == ((40, 112), 0)
    assert torch.equal(weight[:, :100].view(torch.uint8), w.weight.view(torch.uint8))
    assert not weight[:, 100:].view(torch.uint8).any()
    flat = torch.zeros(40 * 112 + 8, dtype=torch.uint8)
    start = 8 - flat.data_ptr() % 16
    moved = flat[start : start + 40 * 112].view(40, 112)
    moved.copy_(weight.view(torch.uint8))
    copied, _ = backend.prepare(LinearWeights("fp8_gemm", "row", 40, 112, moved.view(E4M3), w.scale)).tensors
    assert copied.data_ptr() % 16 == 0
    assert torch.equal(copied.view(torch.uint8), moved)


def check_any_strides(backend, activation, w, bias, exact):
    """Of x, the bias and the output. ``exact(x)``: what w, x and the bias make in float64."""
    wide = torch.randn(40, w.k + 9).bfloat16()
    for x in (
        torch.randn(40, w.k).bfloat16(),
        wide[:, : w.k],
        wide[:, 3 : 3 + w.k],
        wide[::2, : w.k],
        wide[:, : w.k].t().clone().t(),
    ):
        for b in (bias, torch.stack((bias, bias), 1)[:, 0], bias.float()):
            assert error(run(backend, activation, w, x, b), exact(x)) < 3e-3
    out = torch.full((40, 2 * w.n), torch.nan, dtype=torch.bfloat16)
    prepared = backend.prepare(w)
    backend.run(plan_of(backend, activation, w, prepared, 40), prepared, x, out[:, : w.n], bias)
    assert torch.equal(out[:, : w.n], run(backend, activation, w, x, bias))
    assert out[:, w.n :].isnan().all()


def check_refused_before_a_launch(backend, activation, w, kernels, wide, quantised):
    """float32 outputs, and operands that are quantised already; the messages."""
    prepared = backend.prepare(w)
    with pytest.raises(InputError, match=wide):
        plan_of(backend, activation, w, prepared, 1, "float32")
    plan = plan_of(backend, activation, w, prepared, 1)
    raw = QuantizedActivation(torch.zeros(1, w.k).to(E4M3), torch.ones(1))
    with pytest.raises(InputError, match=quantised):
        backend.run(plan, prepared, raw, torch.empty(1, w.n, dtype=torch.bfloat16))
    assert kernels.launched == []
