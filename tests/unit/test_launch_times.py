"""Launch configurations as values: which are worth timing, and which timed one serves another M. No torch."""

from __future__ import annotations

from fp4dispatch.backends.own.tiling import launches, speeds
from fp4dispatch.backends.own.tiling.launches import Tuned
from fp4dispatch.machine import gpu_models
from fp4dispatch.problem import Problem
from fp4dispatch.problem.measurement import LaunchConfig

H200 = speeds.of(gpu_models.named("H200 SXM"))
GEMMS = (("w8_gemm_sm90", "bf16_128"), ("w8a8_small", "bf16"))


def row_problem(m, n=4096, k=4096):
    return Problem("fp8_gemm", m, n, k, "fp8", "row")


def test_times_of_another_m_are_scaled_by_the_model():
    """What is faster at 2048 tokens is slower where the model says that another launch has gained more by then."""
    gpu, fewer, (first, second) = H200.many_tokens, of(1664), by_gain()
    timed = Tuned(2048, ((first, 100.0), (second, 101.0)))
    assert launches.fastest(timed, of(2048), GEMMS, H200, gpu) == first
    assert launches.fastest(timed, fewer, GEMMS, H200, gpu) == launches.laid_out(second, fewer, gpu)
    assert launches.fastest(timed, fewer, GEMMS, None, gpu) == launches.laid_out(first, fewer, gpu)


def of(m):
    return row_problem(m, 5120, 5120)


def by_gain():
    """Of the launches for 2048 tokens, that whose predicted time shrinks least until 1664, and that which does most."""

    def gain(launch):
        there = launches.laid_out(launch, of(1664), H200.many_tokens)
        return launches.microseconds(there, of(1664), H200) / launches.microseconds(launch, of(2048), H200)

    timed = launches.worth_timing(GEMMS[:1], of(2048), H200)
    found = sorted((each for each in timed if launches.laid_out(each, of(1664), H200.many_tokens)), key=gain)
    assert gain(found[0]) < 0.95 * gain(found[-1])
    return found[-1], found[0]


def test_a_launch_is_laid_out_for_fewer_tokens_or_not_at_all():
    shared = LaunchConfig("w8_gemm_sm90", "bf16_128", (1, 1, 8, 2, 0, 66))
    gpu = H200.many_tokens
    assert launches.laid_out(shared, row_problem(200, 1024), gpu).shape == (1, 1, 8, 2, 0, 8)
    assert launches.laid_out(shared, row_problem(100, 1024), gpu) is None  # one tile of tokens: nothing to share
    few = LaunchConfig("w8a8_small", "bf16", (64, 1, 2, 1, 1, 3, 3))
    assert launches.laid_out(few, row_problem(60), gpu) == few
    narrow, wide = (few._replace(shape=(tokens, 1, 2, 1, 1, 3, 3)) for tokens in (16, 128))
    assert [launches.laid_out(narrow, row_problem(m), gpu) for m in (128, 129)] == [narrow, None]
    assert [launches.laid_out(wide, row_problem(m), gpu) for m in (512, 513)] == [wide, None]
    assert launches.laid_out(few._replace(shape=(40, 1, 2, 1, 1, 3, 3)), row_problem(40), gpu) is None
    assert launches.laid_out(LaunchConfig("w8_gemm_sm90", "bf16_128", (1, 2)), row_problem(200), gpu) is None


def test_times_of_bfloat16_serve_float16():
    timed = Tuned(64, ((LaunchConfig("w8a8_small", "bf16", (64, 1, 2, 1, 1, 3, 3)), 5.0),))
    half = (("w8a8_small", "fp16"),)
    found = launches.fastest(timed, row_problem(64), half, H200, H200.many_tokens)
    assert found == LaunchConfig("w8a8_small", "fp16", (64, 1, 2, 1, 1, 3, 3))
    assert launches.fastest(timed, row_problem(64), (("w8a16_small", "fp16"),), H200, H200.many_tokens) is None


def test_what_is_worth_timing_is_what_the_models_put_first():
    for m in (1, 48, 300, 4096):
        problem = row_problem(m)
        found = launches.worth_timing(GEMMS, problem, H200)
        times = [launches.microseconds(each, problem, H200) for each in found]
        assert 2 <= len(found) <= launches.MOST
        assert times == sorted(times)
        assert len(set(found)) == len(found)
    assert launches.worth_timing(GEMMS, row_problem(48), H200)[0].kernel == "w8a8_small"
    assert {each.kernel for each in launches.worth_timing(GEMMS, row_problem(4096), H200)} == {"w8_gemm_sm90"}
