"""w8a8_small and its quantisers on SM90: packing bit for bit, every tile against an fp64 product of the e4m3 values."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fp4dispatch import formats
from fp4dispatch.backends.own.tiling.few_tokens import CLUSTERS, KERNELS
from tests import w8_fake
from tests.gpu.few_tokens import NK, WGMMA_M
from tests.gpu.sm90 import OUT_DTYPES, needs_sm90
from tests.gpu.tiles import bits, sees_one_wrong_element
from tests.gpu.w4_packed import (
    MANY_TO_PACK,
    check_a_token_alone_and_with_others,
    check_argument_refused,
    check_no_tokens,
    check_shape_refused,
    check_tokens_stay_alone,
    empty_packed,
    packer,
)
from tests.gpu.w8_packed import (
    WRONG_OPERANDS,
    Problem,
    activations,
    check_capture,
    check_every_finite_code,
    check_nan_among_the_weights,
    check_pdl_chain,
    kernel,
    weight,
)

pytestmark = [pytest.mark.gpu, needs_sm90]

INSTANCES = tuple(KERNELS["w8a8_small"].instances)
SHAPE = [16, 1, 2, 1, 1, 2, 2]


# ------------------------------------------------------------------------------------------------------------- packing


@pytest.mark.parametrize("dtype", OUT_DTYPES.values(), ids=str)
@pytest.mark.parametrize(
    ("m", "k"), [(1, 16), (7, 80), (8, 128), (13, 208), (65, 144), (40, 2064), (3, 40_000), *MANY_TO_PACK]
)
def test_packing_bit_for_bit(dtype: torch.dtype, m: int, k: int) -> None:
    draw = torch.Generator().manual_seed(m + k)
    wide = torch.full((m, k + 24), torch.nan, dtype=dtype)
    x = wide[:, 8 : 8 + k]
    x.copy_(torch.randn(m, k, generator=draw) * 3)
    x[m // 2] = 0
    x[-1, k // 2] = torch.inf
    on_gpu = wide.cuda()[:, 8 : 8 + k]
    packed, scale, _ = activations(on_gpu)
    q = formats.fp8_quantize(x, "row")
    assert torch.equal(packed.cpu(), w8_fake.pack_activation(q.data))
    assert torch.equal(bits(scale.cpu()), bits(q.scale))
    for static in (0.013, 2.0**-30):
        packed, _, _ = activations(on_gpu, static)
        want = formats.fp8_quantize(x, "tensor", torch.tensor(static)).data
        assert torch.equal(packed.cpu(), w8_fake.pack_activation(want))


def test_packing_no_tokens_writes_nothing() -> None:
    x, packed = torch.zeros(0, 64, device="cuda").bfloat16(), torch.zeros(1, 0, 1024, device="cuda", dtype=torch.uint8)
    one = torch.ones(1, device="cuda")
    for pdl in (False, True):
        packer().w8_quantize_row(x, packed, one[:0], pdl)
        packer().w8_quantize_tensor(x, packed, one, pdl)
    torch.cuda.synchronize()
    assert torch.equal(one, torch.ones_like(one))


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("x", lambda t: t.float(), "x: dtype is float32"),
        ("x", lambda t: t[:, :200], "K is 200, needed a multiple of 16|x: size of dimension 1"),
        ("x", lambda t: t.cpu(), "CUDA device|packed: is not on"),
        ("packed", lambda t: t.view(torch.int8), "packed: dtype is int8, needed uint8"),
        ("packed", lambda t: t[:1], r"packed: size of dimension 0 is 1, needed 2 \(ceil\(K/128\)\)"),
        ("packed", lambda t: t[:, :2].contiguous(), r"packed: size of dimension 1 is 2, needed 3 \(ceil\(M/8\)\)"),
        ("packed", lambda t: t.transpose(0, 1).contiguous().transpose(0, 1), "packed: not contiguous"),
        ("scale", lambda t: t[:20], "scale: has 20 elements, needed "),
        ("scale", lambda t: t.half(), "scale: dtype is float16, needed float32"),
    ],
)
def test_wrong_operands_of_the_quantisers_are_refused(name: str, change: Any, message: str) -> None:
    given = {
        "x": torch.randn(21, 208, device="cuda").bfloat16(),
        "packed": empty_packed(21, 208),
        "scale": torch.full((21,), torch.nan, device="cuda"),
    }
    wrong = given | {name: change(given[name])}
    calls = [packer().w8_quantize_row]
    if message != "scale: has 20 elements, needed ":
        calls.append(lambda x, q, s, pdl: packer().w8_quantize_tensor(x, q, s[:1].contiguous(), pdl))
    for call in calls:
        with pytest.raises((ValueError, TypeError), match=message):
            call(*wrong.values(), False)
    torch.cuda.synchronize()
    assert bool((given["packed"] == 0xFF).all())


# ---------------------------------------------------------------------------------------------------------------- GEMM


@pytest.mark.parametrize("nk", NK, ids=str)
@pytest.mark.parametrize("variant", OUT_DTYPES)
def test_every_tile_is_right_for_every_m(variant: str, nk: tuple[int, int]) -> None:
    for m in WGMMA_M:
        problem = Problem(OUT_DTYPES[variant], (m, *nk))
        problem.run(kernel(variant).w8a8_small)
        problem.check(variant)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("vector", [False, True])
def test_every_pair_of_bias_and_scales_of_columns(vector: bool, bias: bool) -> None:
    for m in (1, 17, 64):
        problem = Problem(torch.bfloat16, (m, 72, 80))
        problem.alpha = (torch.rand(72 if vector else 1, device="cuda") + 0.5) * 2.0**-9
        problem.bias = torch.randn(72, device="cuda").bfloat16() if bias else None
        problem.run(kernel().w8a8_small)
        problem.check(f"{vector} {bias}")


@pytest.mark.parametrize("instance", INSTANCES, ids=str)
@pytest.mark.parametrize("variant", OUT_DTYPES)
def test_every_launch_shape_is_right(variant: str, instance: tuple[int, ...]) -> None:
    """Parts of K without a stage too, and several tiles of tokens."""
    for mnk in ((7, 200, 48), (33, 264, 400), (100, 136, 2064)):
        problem = Problem(OUT_DTYPES[variant], mnk)
        for cluster in CLUSTERS:
            for stages in (2, 3, 4):
                for trigger in (stages, 0, 100):
                    problem.run(kernel(variant).w8a8_small_shaped, [*instance, cluster, stages, trigger])
                    problem.check(f"{variant} {instance} {cluster} {stages} {trigger}")


@pytest.mark.parametrize("variant", OUT_DTYPES)
def test_one_static_scale_for_all_tokens(variant: str) -> None:
    for m in (1, 16, 33, 64, 90, 100):
        problem = Problem(OUT_DTYPES[variant], (m, 264, 1040), static=0.013)
        problem.run(kernel(variant).w8a8_small)
        problem.check(variant)


@pytest.mark.parametrize("variant", OUT_DTYPES)
@pytest.mark.parametrize("m", [8, 16, 24, 32, 48, 64, 80, 96, 112, 128])
def test_every_finite_code_is_exact_at_every_k(variant: str, m: int) -> None:
    check_every_finite_code(kernel(variant).w8a8_small, OUT_DTYPES[variant], m)


@pytest.mark.parametrize("missing", [1, 7])
@pytest.mark.parametrize("m", [5, 33, 64, 96, 110])
def test_rows_that_a_weight_lacks_are_zeros(m: int, missing: int) -> None:
    problem = Problem(torch.bfloat16, (m, 136, 208), missing=missing)
    problem.run(kernel().w8a8_small)
    problem.check(f"{missing} missing")


def test_nan_among_the_weights_makes_its_column_nan_and_no_other() -> None:
    check_nan_among_the_weights(kernel().w8a8_small, 33)


def test_repeats_bit_for_bit() -> None:
    for mnk in ((1, 4096, 4096), (16, 1032, 2064), (64, 4096, 1040), (96, 4096, 1040), (128, 1032, 2064)):
        Problem(torch.bfloat16, mnk).run(kernel().w8a8_small, times=20)


def test_a_token_has_the_same_bits_whoever_shares_its_launch() -> None:
    check_a_token_alone_and_with_others(kernel().w8a8_small, weight(1032, 2064), activations)


def test_long_k_and_more_tiles_than_multiprocessors() -> None:
    for mnk in ((64, 256, 28672), (16, 256, 28672), (64, 28672, 512), (300, 5120, 512)):
        problem = Problem(torch.bfloat16, mnk, alpha=2.0**-12)
        problem.run(kernel().w8a8_small)
        problem.check()


def test_tokens_that_are_not_there_and_tokens_that_are_not_finite_stay_alone() -> None:
    check_tokens_stay_alone(kernel().w8a8_small, weight(136, 400), activations)


@pytest.mark.parametrize("static", [None, 0.01])
@pytest.mark.parametrize("m", [1, 16, 24, 32, 48, 64, 80, 96, 112, 128, 700])
def test_a_chain_under_pdl_has_the_bits_of_one_without(m: int, static: float | None) -> None:
    """Each layer reads what the one before wrote, while its weights were already on their way."""
    check_pdl_chain(kernel().w8a8_small, m, static)


def test_a_graph_replays_what_an_eager_call_wrote() -> None:
    check_capture(kernel().w8a8_small, 40)


def test_no_tokens_write_nothing() -> None:
    check_no_tokens(kernel().w8a8_small, w=weight(256, 512))
    check_no_tokens(kernel().w8a8_small_shaped, SHAPE, w=weight(256, 512))


@pytest.mark.parametrize(("name", "change", "message"), WRONG_OPERANDS)
def test_wrong_operands_are_refused_before_a_launch(name: str, change: Any, message: str) -> None:
    problem = Problem(torch.bfloat16, (21, 136, 208))
    check_argument_refused(problem, kernel().w8a8_small, kernel().w8a8_small_shaped, name, change, message)


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ([16, 1, 2, 1, 1, 2], "shape: has 6 numbers, needed 7"),
        ([16, 3, 2, 1, 1, 2, 0], "no kernel for 16 tokens, 3 row blocks, 2 groups and 1 units"),
        ([16, 1, 2, 1, 0, 2, 0], "cluster is 0, needed 1 to 8"),
        ([16, 1, 2, 1, 9, 2, 0], "cluster is 9, needed 1 to 8"),
        ([16, 1, 2, 1, 1, 1, 0], "1 stages, needed 2 to"),
        ([64, 1, 2, 1, 1, 31, 0], "bytes of shared memory, a CTA has 232448"),
        ([16, 1, 2, 1, 1, 2, -1], "trigger is -1, needed at least 0"),
    ],
)
def test_wrong_launch_shapes_are_refused(shape: list[int], message: str) -> None:
    problem = Problem(torch.bfloat16, (21, 136, 208))
    check_shape_refused(problem, kernel().w8a8_small_shaped, shape, message)


def test_the_check_sees_one_wrong_element() -> None:
    problem = Problem(torch.bfloat16, (33, 264, 144))
    problem.run(kernel().w8a8_small)
    sees_one_wrong_element(problem)
