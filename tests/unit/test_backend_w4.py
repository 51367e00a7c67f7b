"""w4a16 and w4a8 without a GPU: the contract on emulated kernels, which build serves what, one copy of the weights."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

from fp4dispatch import formats
from fp4dispatch.backends.base import QuantizedActivation
from fp4dispatch.backends.own import from_table, scratch, w4
from fp4dispatch.backends.own.tensors.w4_layout import unpack_w4p
from fp4dispatch.backends.own.tiling import launch_model, tiles
from fp4dispatch.errors import FormatError, InputError
from fp4dispatch.jit.catalog.manifest import installed
from fp4dispatch.models.linear import FP4Linear
from fp4dispatch.policy.catalogue import catalogue
from fp4dispatch.problem import Problem
from fp4dispatch.problem.arch import KNOWN_ARCHS
from fp4dispatch.trust import selfcheck
from tests import contract, hopper, many_tokens, w4_fake
from tests.hopper import HOPPER
from tests.w4_fake import weights

BACKENDS = {"w4a16": w4.W4A16Backend(), "w4a8": w4.W4A8Backend()}
ARCH = {arch.sm: arch for arch in KNOWN_ARCHS}
CLAIMS = [
    (c.backend, arch, dtype)
    for c in catalogue().capabilities
    if c.backend in BACKENDS
    for arch, dtype in itertools.product(c.archs, c.out_dtypes)
]
TOKENS = (1, 8, 16, 31, 32, 33, 48, 64, 65, 128, 129, 4096, 100_000)


def problem(name, m, n=4096, k=4096, out="bfloat16"):
    return Problem("nvfp4_gemm", m, n, k, BACKENDS[name].activation_for(Problem("nvfp4_gemm", m, n, k)), out_dtype=out)


# ------------------------------------------------------------------------------------------------------- the emulation


def test_emulated_activations_are_packed_as_the_kernel_documents():
    """csrc/quantise/pack_e4m3.h, one element at a time."""
    m, k = 13, 336
    q = torch.randn(m, k).to(torch.float8_e4m3fn)
    packed, bits = w4_fake.pack_activation(q), q.view(torch.uint8)
    assert packed.shape == (3, 2, 1024)
    seen = torch.zeros_like(packed)
    for row, column in itertools.product(range(16), range(3 * 128)):
        c, r = column % 64 // 16, column % 16
        j, byte = 4 * (column // 64 % 2) + r // 4, 4 * c + r % 4
        at = (column // 128, row // 8, 128 * (row % 8) + 16 * (j ^ (row % 8)) + byte)
        assert packed[at] == (bits[row, column] if row < m and column < k else 0)
        seen[at] += 1
    assert bool((seen == 1).all())
    assert torch.equal(w4_fake.unpack_activation(packed, m, k).view(torch.uint8), bits)


@pytest.mark.parametrize("build", ["bf16", "fp16"])
def test_the_emulated_kernel_of_few_tokens_is_the_one_of_many_in_its_tokens(build):
    """w4a8_small computes what w4_gemm_sm90 does, which is checked against the definition below."""
    m, n, k, dtype = 21, 72, 208, w4_fake.DTYPES[build]
    kernels, w = w4_fake.Kernels(), BACKENDS["w4a8"].prepare(weights(n, k)).tensors[0]
    q = formats.fp8_quantize(torch.randn(m, k), "row")
    bias, out = torch.randn(n).to(dtype), torch.full((2, m, n), torch.nan, dtype=dtype)
    operands = (w4_fake.pack_activation(q.data).contiguous(), q.scale, w, torch.rand(n), bias)
    few, many = (
        kernels.load("w4a8_small", build, None).module,
        kernels.load("w4_gemm_sm90", f"a8_{build}_64", None).module,
    )
    few.w4a8_small(*operands, out[0], True)
    many.w4_gemm(*operands, out[1], many_tokens.ONE_CLUSTER, False)
    assert torch.equal(out[0], out[1])
    assert kernels.launched == [(f"w4a8_small {build}", m, n, 256, True), (f"w4_gemm a8_{build}_64", m, n, 256, False)]
    for wrong in (out[0].float(), out[0, :, :64], out[0, :0]):  # dtype, stride, no tokens
        with pytest.raises(AssertionError):
            few.w4a8_small(*operands, wrong, True)


@pytest.mark.parametrize("build", ["bf16", "fp16"])
def test_emulated_kernels_of_16_bits_take_rows_as_they_are(build):
    m, n, k, dtype = 21, 72, 208, w4_fake.DTYPES[build]
    kernels, w = w4_fake.Kernels(), BACKENDS["w4a16"].prepare(weights(n, k)).tensors[0]
    x, others = torch.randn(m, k).to(dtype), (w, torch.rand(n), torch.randn(n).to(dtype))
    out = torch.full((2, m, n), torch.nan, dtype=dtype)
    few = kernels.load("w4a16_small", build, None).module.w4a16_small
    many = kernels.load("w4_gemm_sm90", f"a16_{build}_64x128", None).module.w4_gemm
    wide = torch.full((m, k + 24), torch.nan, dtype=dtype)
    wide[:, 8 : 8 + k] = x
    few(x, *others, out[0], True)
    many(wide[:, 8 : 8 + k], None, *others, out[1], many_tokens.ONE_CLUSTER, False)
    assert torch.equal(out[0], out[1])
    assert kernels.launched == [("w4a16_small", m, n, k, True), (f"w4_gemm a16_{build}_64x128", m, n, k, False)]
    assert kernels.rows == [x.data_ptr(), wide.data_ptr() + 16]
    packed = w4_fake.pack_activation(x.to(torch.float8_e4m3fn))
    apart = torch.zeros(m, k + 3, dtype=dtype)[:, :k]
    for wrong in (packed, x.float(), x[:20], x[:, :192], x[:, :200], x.t().contiguous().t(), apart, wide[:, 1 : 1 + k]):
        with pytest.raises((AssertionError, ValueError)):
            many(wrong, None, *others, out[1], many_tokens.ONE_CLUSTER, False)
    with pytest.raises(AssertionError):
        many(x, torch.ones(m), *others, out[1], many_tokens.ONE_CLUSTER, False)
    assert len(kernels.launched) == 2


@pytest.mark.parametrize(("name", "m"), [("w4a8", 129), ("w4a8", 300), ("w4a16", 70), ("w4a16", 500)])
def test_a_plan_gives_the_kernel_the_launch_shape_that_the_model_chooses(monkeypatch, name, m):
    """That of the padded problem."""
    kernels, backend, w = w4_fake.install(monkeypatch), BACKENDS[name], weights(1001, 4096)
    plan, prepared = backend.plan(problem(name, m, 1001, 4096, out="float16"), backend.prepare(w)), backend.prepare(w)
    out = torch.empty(m, 1001, dtype=torch.float16)
    backend.run(plan, prepared, torch.randn(m, 4096).half(), out)
    (kernel, build), *_ = kernels.loaded
    tile = many_tokens.tile_of(kernel, build)
    assert kernels.shapes == [launch_model.best(tile, m, 1008, 4096, launch_model.H200).shape]


@pytest.mark.parametrize(("m", "clusters"), [(100, 40), (100, 132), (400, 132)])
def test_a_plan_of_an_even_build_has_room_apart_from_its_activation(monkeypatch, m, clusters):
    """Small enough for the arena of scratch memory, or not."""
    n, k = 4104, 4096
    kernels, backend = w4_fake.install(monkeypatch), BACKENDS["w4a8"]
    prepared, build = backend.prepare(weights(n, k)), ("w4_gemm_sm90", "even_a8_bf16_96")
    tiles = -(-m // 96) * -(-n // 128)
    shape = (1, 1, 8, 1, tiles // clusters, clusters)
    plan = backend.plan_with(problem("w4a8", m, n, k), prepared, build, shape)
    x, out = torch.randn(m, k).bfloat16(), torch.empty(2, m, n, dtype=torch.bfloat16)
    backend.run(plan, prepared, x, out[0])
    other = backend.plan_with(problem("w4a8", m, n, k), prepared, ("w4_gemm_sm90", "a8_bf16_96"))
    backend.run(other, prepared, x, out[1])
    assert kernels.shapes[0] == shape
    assert torch.equal(out[0], out[1])
    assert kernels.loaded[0] == build


# ------------------------------------------------------------------------------------------------------------ contract


def cases():
    """Everything on sm_90; on the other archs, which have one kernel for every M, some."""
    for name, arch in [(c[0], c[1]) for c in CLAIMS if c[2] == "bfloat16"]:
        for case in contract.cases(BACKENDS[name])[:: 1 if arch == "sm_90" else 5]:
            yield pytest.param(name, arch, case, id=f"{name}-{arch}-{case}")


@pytest.mark.parametrize(("name", "arch", "case"), list(cases()))
def test_contract_on_emulated_kernels(monkeypatch, name, arch, case):
    kernels = w4_fake.install(monkeypatch, ARCH[arch].capability)
    contract.check(BACKENDS[name], case)
    assert kernels.launched


# --------------------------------------------------------------------------------------------------------------- tiles


@pytest.mark.parametrize(("name", "sm", "dtype"), CLAIMS)
def test_everything_that_the_capabilities_claim_has_a_build(name, sm, dtype):
    for m in TOKENS:
        assert tiles.tile_for(problem(name, m, out=dtype), ARCH[sm], 132, "w4"), (m, sm)


def test_nothing_has_a_build_that_is_not_claimed():
    claimed = {(name, sm) for name, sm, _ in CLAIMS}
    for name, (sm, arch) in itertools.product(BACKENDS, ARCH.items()):
        found = tiles.tile_for(problem(name, 1), arch, 132, "w4")
        assert (found is not None) == ((name, sm) in claimed), (name, sm)


def test_every_build_is_used_or_the_manifest_is_too_large():
    used = {(tile.kernel, build) for tile in tiles.tiles("w4") for build in tile.builds.values()}
    kernels = [kernel for kernel in installed().kernels.values() if kernel.op in ("w4_gemm", "w4_weights")]
    assert used == {(kernel.name, variant) for kernel in kernels for variant in kernel.variants}


def test_only_what_an_m_needs_is_loaded(monkeypatch):
    for name, m, wanted in (
        ("w4a16", 1, [("w4a16_small", "bf16")]),
        ("w4a16", 32, [("w4a16_small", "bf16")]),
        ("w4a16", 33, [("w4_gemm_sm90", "a16_bf16_64x128")]),
        ("w4a8", 1, [("w4a8_small", "bf16"), ("w4_activations", "any")]),
        ("w4a8", 64, [("w4a8_small", "bf16"), ("w4_activations", "any")]),
        ("w4a8", 65, [("w4_gemm_sm90", "a8_bf16_96"), ("w4_activations", "any")]),
        ("w4a8", 500, [("w4_gemm_sm90", "a8_bf16_96"), ("w4_activations", "any")]),
        ("w4a8", 8192, [("w4_to_e4m3", "any"), ("fp8_quantize", "any")]),
    ):
        kernels = w4_fake.install(monkeypatch)
        BACKENDS[name].plan(problem(name, m, 64, 64), BACKENDS[name].prepare(weights(64, 64)))
        assert kernels.loaded == wanted
    kernels = w4_fake.install(monkeypatch, "8.9")
    BACKENDS["w4a16"].plan(problem("w4a16", 8192, 64, 64), BACKENDS["w4a16"].prepare(weights(64, 64)))
    assert kernels.loaded == [("w4a16_small", "bf16")]


@pytest.mark.parametrize(
    ("name", "n", "m", "tokens"),
    [
        ("w4a8", 4096, 1, None),
        ("w4a8", 14336, 32, None),
        ("w4a8", 28672, 16, 32),  # rows are many
        ("w4a8", 28672, 32, 32),
        ("w4a8", 28672, 33, 64),
        ("w4a8", 8192, 64, None),
        ("w4a8", 14336, 64, 64),
        ("w4a8", 8192, 65, 96),
        ("w4a8", 28672, 64, 64),
        ("w4a8", 28672, 65, 96),
        ("w4a8", 28672, 96, 96),
        ("w4a8", 28672, 97, 112),
        ("w4a8", 28672, 113, 128),
        ("w4a8", 14336, 137, 144),
        ("w4a8", 14336, 145, 160),
        ("w4a8", 16384, 320, 160),
        ("w4a8", 57344, 512, 176),
        ("w4a8", 8192, 384, 192),
        ("w4a8", 28672, 2048, 208),
        ("w4a8", 4096, 1024, 128),
        ("w4a16", 8192, 64, "64x128"),
        ("w4a16", 28672, 64, "64x128"),
        ("w4a16", 28672, 192, 192),
        ("w4a16", 4096, 128, "128x128"),
        ("w4a16", 4096, 256, "128x128"),
        ("w4a16", 28672, 128, "128x128"),
        ("w4a16", 28672, 256, 256),
        ("w4a16", 57344, 2048, 256),
    ],
)
def test_tiles_are_the_fastest_ones_that_were_measured(name, n, m, tokens):
    # Above 128 tokens, test_many_tokens.py asks for every problem that was.
    wanted = problem(name, m, n, 4096, out="float16")  # bfloat16 has cuBLASLt for many tokens
    tile = tiles.tile_for(wanted, ARCH["sm_90"], 132, "w4")
    assert tile.kernel == ("w4_gemm_sm90" if tokens else "w4a8_small")
    assert tile.builds["float16"] == (f"{name[2:]}_fp16_{tokens}" if tokens else "fp16")
    assert tile.builds["bfloat16"] == tile.builds["float16"].replace("fp16", "bf16")


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shards", [(), (32, 48)])
def test_many_tokens_multiply_weights_that_are_written_out_for_one_launch(monkeypatch, shards, bias):
    n, k, m = 80, 112, 2049
    w, kernels = weights(n, k, shards), w4_fake.install(monkeypatch)
    backend = BACKENDS["w4a8"]
    prepared = backend.prepare(w)
    x = torch.randn(m, k, dtype=torch.bfloat16)
    b = torch.randn(n, dtype=torch.bfloat16) if bias else None
    got, want = torch.full((m, n), torch.nan, dtype=torch.bfloat16), torch.empty(m, n, dtype=torch.bfloat16)
    backend.run(backend.plan(problem("w4a8", m, n, k), prepared), prepared, x, got, b)
    assert [name for name, *_ in kernels.launched] == ["w4_to_e4m3", "fp8_quantize_row", "scaled_mm"]
    assert kernels.column_scales == [prepared.tensors[2].data_ptr()]  # nothing is made of them at a launch
    tile = next(t for t in tiles.tiles("w4") if t.builds["bfloat16"] == "a8_bf16_128")
    monkeypatch.setattr(from_table, "tile_for", lambda *_: tile)
    backend.run(backend.plan(problem("w4a8", m, n, k), prepared), prepared, x, want, b)
    torch.testing.assert_close(got, want, rtol=2**-7, atol=1e-3)


@pytest.mark.parametrize(
    ("m", "n", "written"),
    [
        (2048, 7936, True),  # 16 x 62 tiles: 7.5 for each of 132 multiprocessors
        (2048, 7808, False),
        (1536, 16384, False),
        (1537, 9856, True),
        (2049, 16, True),
        (1024, 42128, True),  # 330 x 8 tiles: 20 for each of 132 multiprocessors
        (1024, 42112, False),
        (1023, 57344, False),
        (1536, 28672, True),
        (1408, 28672, False),
    ],
)
def test_weights_are_written_out_for_many_tokens_or_many_tiles(m, n, written):
    for out in ("bfloat16", "float16"):  # cuBLASLt's row-wise FP8 GEMM has no float16
        tile = tiles.tile_for(problem("w4a8", m, n, 4096, out=out), ARCH["sm_90"], 132, "w4")
        assert (tile.kernel == "w4_to_e4m3") == (written and out == "bfloat16")


def test_written_out_weights_are_for_what_cublaslt_takes(monkeypatch):
    for n, out in ((72, "bfloat16"), (80, "float16")):
        kernels = w4_fake.install(monkeypatch)
        BACKENDS["w4a8"].plan(problem("w4a8", 8192, n, 64, out=out), BACKENDS["w4a8"].prepare(weights(n, 64)))
        assert kernels.loaded[0][0] == "w4_gemm_sm90", (n, out)


# ------------------------------------------------------------------------------------------------------------- weights


@pytest.mark.parametrize("layout", ["linear", "128x4"])
@pytest.mark.parametrize(
    ("n", "k", "shards"), [(64, 64, ()), (100, 48, (60, 40)), (80, 48, (60, 20)), (1, 16, ()), (200, 1040, ())]
)
def test_prepared_weights_hold_every_value_and_one_alpha_a_column(n, k, shards, layout):
    w = weights(n, k, shards, layout)
    packed, alpha, *columns = BACKENDS["w4a16"].prepare(w).tensors
    data, sf = unpack_w4p(packed, n, k)
    assert torch.equal(data, w.weight)
    linear = formats.from_128x4(w.scale, n, k // 16) if layout == "128x4" else w.scale
    assert torch.equal(sf.view(torch.uint8), linear.view(torch.uint8))
    if shards:
        assert alpha.shape == (formats.round_up(n, 8),)
        assert torch.equal(alpha[:n], formats.expand_shards(w.global_scale, shards))
        assert not alpha[n:].any()
    else:
        assert torch.equal(alpha, w.global_scale)
    assert [tuple(t.shape) for t in columns] == ([(1, n)] if n % 16 == 0 else [])
    if columns:
        assert torch.equal(columns[0][0], 8 * formats.expand_shards(w.global_scale, w.shard_rows))
        assert columns[0].is_contiguous()


def test_both_backends_prepare_the_same_and_say_so():
    w = weights(100, 48, (60, 40))
    one, other = (backend.prepare(w) for backend in BACKENDS.values())
    assert BACKENDS["w4a16"].layout_name == BACKENDS["w4a8"].layout_name == "w4p"
    assert one.layout == other.layout
    for a, b in zip(one.tensors, other.tensors, strict=True):
        assert torch.equal(a, b)


def test_broken_scales_are_refused_at_preparation():
    w = weights(64, 64)
    w.scale.view(torch.uint8)[3, 2] = 0xFF
    with pytest.raises(FormatError, match="1 NaN"):
        BACKENDS["w4a8"].prepare(w)


# ------------------------------------------------------------------------------------------------------------ supports


def test_raw_operators_are_refused_with_a_reason():
    for backend in BACKENDS.values():
        assert backend.supports(Problem("nvfp4_gemm", 16, 128, 128), HOPPER) == ()
        raw = Problem("nvfp4_gemm", 16, 128, 128, "nvfp4", sf_layout="128x4")
        reasons = backend.supports(raw, HOPPER)
        assert [r.code for r in reasons] == ["DTYPE", "LAYOUT"]
        assert "operands are quantised already (raw operator, b_sf 128x4)" in reasons[1].text
        assert "FP4Linear" in reasons[1].fix


def test_quantised_activations_are_refused_before_any_launch(monkeypatch):
    kernels = w4_fake.install(monkeypatch)
    backend = BACKENDS["w4a16"]
    prepared = backend.prepare(weights(64, 64))
    plan = backend.plan(problem("w4a16", 2, 64, 64), prepared)
    x = QuantizedActivation(torch.zeros(2, 32, dtype=torch.uint8), torch.zeros(2, 4).to(torch.float8_e4m3fn))
    with pytest.raises(InputError, match="w4a16 takes 16-bit activations"):
        backend.run(plan, prepared, x, torch.empty(2, 64, dtype=torch.bfloat16))
    assert kernels.launched == []


# ---------------------------------------------------------------------------------------------------------------- plan


@pytest.mark.parametrize("arch", ["10.0", "7.5"])
def test_no_build_is_an_error_that_says_where_to_look(monkeypatch, arch):
    w4_fake.install(monkeypatch, arch)
    backend = BACKENDS["w4a16"]
    with pytest.raises(InputError, match=r"w4a16 has no kernel for .* on sm_.*fp4dispatch explain"):
        backend.plan(problem("w4a16", 2, 64, 64), backend.prepare(weights(64, 64)))


@pytest.mark.parametrize(
    ("setting", "allowed", "used"), [("auto", True, True), ("off", True, False), ("auto", False, False)]
)
def test_pdl_only_where_the_proof_and_the_setting_allow_it(monkeypatch, setting, allowed, used):
    monkeypatch.setenv("FP4DISPATCH_PDL", setting)
    kernels = w4_fake.install(monkeypatch, pdl_allowed=allowed)
    for name, m in (("w4a16", 1), ("w4a16", 200), ("w4a8", 200)):
        backend = BACKENDS[name]
        prepared = backend.prepare(weights(64, 64))
        out = torch.empty(m, 64, dtype=torch.bfloat16)
        backend.run(backend.plan(problem(name, m, 64, 64), prepared), prepared, torch.zeros(m, 64).bfloat16(), out)
    assert {launch[-1] for launch in kernels.launched} == {used}


# ----------------------------------------------------------------------------------------------------------------- run


def test_an_output_that_the_kernel_cannot_write_gets_a_copy(monkeypatch):
    w4_fake.install(monkeypatch)
    backend, w = BACKENDS["w4a16"], weights(96, 64)
    prepared = backend.prepare(w)
    plan = backend.plan(problem("w4a16", 3, 96, 64), prepared)
    x = torch.randn(3, 64).bfloat16()
    want = torch.empty(3, 96, dtype=torch.bfloat16)
    backend.run(plan, prepared, x, want)
    wide = torch.full((3, 200), float("nan"), dtype=torch.bfloat16)
    backend.run(plan, prepared, x, wide[:, 8:104])  # rows apart
    assert torch.equal(wide[:, 8:104], want)
    odd = torch.full((3 * 96 + 1,), float("nan"), dtype=torch.bfloat16)
    backend.run(plan, prepared, x, odd[1:].view(3, 96))  # not on 16 bytes
    assert torch.equal(odd[1:].view(3, 96), want)
    assert wide[:, :8].isnan().all()
    assert wide[:, 104:].isnan().all()
    assert odd[:1].isnan().all()


@pytest.mark.parametrize(("m", "kernel"), [(5, "w4a16_small"), (70, "w4_gemm a16_bf16_64x128")])
def test_an_activation_that_the_kernel_cannot_read_gets_a_copy(monkeypatch, m, kernel):
    kernels = w4_fake.install(monkeypatch)
    backend = BACKENDS["w4a16"]
    prepared = backend.prepare(weights(64, 80))
    plan = backend.plan(problem("w4a16", m, 64, 80), prepared)
    x = torch.randn(m, 80).bfloat16()
    outs = []
    shifted = torch.zeros(m * 80 + 1, dtype=torch.bfloat16)
    shifted[1:] = x.flatten()
    apart = x.repeat_interleave(2, 1)[:, ::2]
    transposed, wider = x.t().contiguous().t(), torch.cat([x, x[:, :3]], 1)[:, :80]
    for each in (x, shifted[1:].view(m, 80), apart, transposed, wider):
        outs.append(torch.empty(m, 64, dtype=torch.bfloat16))
        backend.run(plan, prepared, each, outs[-1])
        assert (kernels.rows[-1] == each.data_ptr()) == (each is x)
    assert all(torch.equal(out, outs[0]) for out in outs)
    for shared in (x[:1].expand(m, 80), x.flatten().as_strided((m, 80), (8, 1))):
        outs = [torch.empty(m, 64, dtype=torch.bfloat16) for _ in range(2)]
        backend.run(plan, prepared, shared, outs[0])
        assert kernels.rows[-1] != shared.data_ptr()
        backend.run(plan, prepared, shared.contiguous(), outs[1])
        assert torch.equal(*outs)
    assert kernels.launched == [(kernel, m, 64, 80, True)] * 9


@pytest.mark.parametrize("m", [5, 70])
def test_16_bit_activations_are_multiplied_where_they_lie(monkeypatch, m):
    """Columns of a wider tensor, of which nothing else enters: no copy, no scratch memory, no other launch."""
    kernels = w4_fake.install(monkeypatch)
    backend = BACKENDS["w4a16"]
    prepared = backend.prepare(weights(64, 80))
    plan = backend.plan(problem("w4a16", m, 64, 80), prepared)
    wide = torch.full((m + 3, 120), torch.nan).bfloat16()
    x = wide[:m, 8:88].copy_(torch.randn(m, 80))
    got, want = (torch.full((m, 64), torch.nan, dtype=torch.bfloat16) for _ in range(2))
    backend.run(plan, prepared, x, got)
    assert len(kernels.launched) == 1
    assert kernels.rows == [x.data_ptr()]
    assert scratch._arenas == {}
    assert plan.state.scratch() == ()
    backend.run(plan, prepared, x.clone(), want)
    assert bool(want.isfinite().all())
    assert torch.equal(got, want)


@pytest.mark.parametrize(("name", "m"), [("w4a16", 3), ("w4a16", 70), ("w4a8", 70)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_ragged_n_with_shards_and_a_bias_of_any_dtype(monkeypatch, name, m, dtype):
    w4_fake.install(monkeypatch)
    backend, w = BACKENDS[name], weights(101, 48, (61, 40))
    prepared = backend.prepare(w)
    x = torch.randn(m, 48).bfloat16()
    bias = (torch.randn(101) * contract.dequantised(w).norm(dim=1)).bfloat16().to(dtype)  # as large as the products
    out = torch.full((m, 101), float("nan"), dtype=torch.bfloat16)
    plan = backend.plan(problem(name, m, 101, 48), prepared)
    backend.run(plan, prepared, x, out, bias)
    if dtype == out.dtype:
        as_a_layer = torch.full_like(out, float("nan"))
        backend.ready(plan, prepared)(x, as_a_layer, bias)
        assert torch.equal(as_a_layer, out)
    a = x.double()
    if name == "w4a8":
        a = formats.fp8_dequantize(*formats.fp8_quantize(x, "row"), "row").double()
    want = a @ contract.dequantised(w, "fp8" if name == "w4a8" else "bf16").t() + bias.double()
    assert float((out.double() - want).abs().max() / want.abs().max()) < 2**-8


def test_a_plan_is_for_one_m(monkeypatch):
    kernels = w4_fake.install(monkeypatch)
    backend = BACKENDS["w4a8"]
    prepared = backend.prepare(weights(64, 64))
    plan = backend.plan(problem("w4a8", 70, 64, 64), prepared)
    with pytest.raises(InputError, match="w4a8: out has 72 rows, the plan is for M=70"):
        backend.run(plan, prepared, torch.zeros(72, 64).bfloat16(), torch.empty(72, 64, dtype=torch.bfloat16))
    assert kernels.launched == []


# ---------------------------------------------------------------------------------------------------------- self-check


def checked(name):
    backend = BACKENDS[name]
    return selfcheck.check(backend, "nvfp4_gemm", "nvfp4", backend.activations["nvfp4_gemm"][0], HOPPER, "cpu")


@pytest.mark.parametrize("name", BACKENDS)
def test_the_self_check_passes_emulated_kernels(monkeypatch, name):
    kernels = w4_fake.install(monkeypatch)
    result = checked(name)
    assert (result.status, result.findings) == ("passed", ())
    assert len(result.ran) == 4  # of five; the one in float32 is not theirs
    assert "output is float32" in result.notes[0]
    entries = {launch[0].split()[0] for launch in kernels.launched}
    others = {"w4a16": {"w4a16_small"}, "w4a8": {"w4a8_small", "w4_quantize_row"}}
    assert entries == {"w4_gemm", *others[name]}


def swap_units(w):
    return torch.cat([w[..., 512:1024], w[..., :512], w[..., 1024:]], -1)


def swap_scale_rows(w):
    return torch.cat([w[..., :2048], w[..., 2048:].unflatten(-1, (-1, 2)).flip(-1).flatten(-2)], -1)


def drop_last_chunk(w):
    return torch.cat([w[:, :-1], torch.zeros_like(w[:, -1:])], 1)


@pytest.mark.parametrize("spoil", [swap_units, swap_scale_rows, drop_last_chunk])
@pytest.mark.parametrize("name", BACKENDS)
def test_the_self_check_sees_wrong_weights(monkeypatch, name, spoil):
    w4_fake.install(monkeypatch)
    real = w4.pack_w4p
    monkeypatch.setattr(w4, "pack_w4p", lambda codes, scale: spoil(real(codes, scale)).contiguous())
    assert checked(name).status == "failed"


def test_gdc_is_told_of_the_kernels_that_run():
    proven = replace(HOPPER, proven=frozenset({("w4_gemm", "sm_90")}))
    other = replace(HOPPER, proven=frozenset({("nvfp4_gemm", "sm_90")}))
    for system, gdc in ((proven, "yes"), (other, "no"), (HOPPER, "no")):
        assert selfcheck._blank(BACKENDS["w4a8"], "nvfp4_gemm", "nvfp4", "fp8", system).gdc == gdc


# --------------------------------------------------------------------------------------------------------------- layers


@pytest.mark.parametrize("shards", [(), (40, 24, 8)])
def test_a_layer_on_hopper_changes_with_m_and_holds_its_packed_weights_once(monkeypatch, shards):
    """The whole way of a layer, but for the GPU: policy, packing, plans, launches."""
    kernels = w4_fake.install(monkeypatch)
    w = weights(72, 208, shards)
    with hopper.seems_to_be_here(monkeypatch):
        layer = FP4Linear.from_weights(w, torch.randn(72).bfloat16())
        bound = layer.bind()
        few, many = bound.spec.routes
        assert [(r.backend, r.activation) for r in (few, many)] == [("w4a16", "bf16"), ("w4a8", "fp8")]
        assert (few.m_max, (few.start, few.stop)) == (8, (many.start, many.stop))
        packed = [t for name, t in layer.named_buffers() if name.startswith("layout") and t.dtype == torch.uint8]
        assert [tuple(t.shape) for t in packed] == [(2, 4, 2304)]
        scale = formats.expand_shards(w.global_scale, w.shard_rows)
        dense = formats.nvfp4_dequantize(w.weight, w.scale, scale).double()
        for m, bound_of_error in ((1, 0.003), (few.m_max, 0.003), (few.m_max + 1, 0.05), (300, 0.05)):
            x = torch.randn(m, 208).bfloat16()
            want = x.double() @ dense.t() + layer.bias.double()
            assert float((layer(x).double() - want).norm() / want.norm()) < bound_of_error
        assert {launch[0].split()[0] for launch in kernels.launched} >= {"w4a16_small", "w4_gemm"}
