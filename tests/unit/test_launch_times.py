"""Launch configurations as values: which are worth timing, and which timed one serves another M. No torch."""

from __future__ import annotations

from fp4dispatch.backends.own.tiling import few_tokens, launches, speeds
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


def test_a_tile_that_only_fits_the_smaller_m_counts_though_it_was_not_timed():
    """At 256 tokens two tiles of 128; at 160 one of 160, which the models put first there, and nobody has timed."""
    gpu, gemms = H200.many_tokens, (*GEMMS[:1], ("w8_gemm_sm90", "bf16_160"))
    wide, more = row_problem(160, 16384), row_problem(256, 16384)
    at = launches.worth_timing(GEMMS[:1], more, H200)[0]
    us = launches.microseconds(at, more, H200)
    first = launches.worth_timing(gemms, wide, H200)[0]
    assert first.build == "bf16_160"
    gain = launches.microseconds(launches.laid_out(at, wide, gpu), wide, H200) / launches.microseconds(
        first, wide, H200
    )
    assert gain > 1.1
    for factor in (1.0, 2.0):  # the model may be off on this weight by any factor
        timed = Tuned(256, ((at, factor * us),))
        assert launches.fastest(timed, wide, gemms, H200, gpu) == first
        assert launches.fastest(timed, wide, GEMMS[:1], H200, gpu) == launches.laid_out(at, wide, gpu)
        assert launches.fastest(timed, more, gemms, H200, gpu) == at, "at their own M measured times decide"
        assert launches.fastest(timed, wide, gemms, None, gpu) == launches.laid_out(at, wide, gpu)


def test_an_untimed_launch_must_be_predicted_to_be_clearly_faster():
    gpu, gemms, fewer = H200.many_tokens, GEMMS[:1], of(1664)
    first = launches.worth_timing(gemms, fewer, H200)[0]
    near = [
        (launch, launches.microseconds(launches.laid_out(launch, fewer, gpu), fewer, H200))
        for launch in launches.worth_timing(gemms, of(2048), H200)
        if launches.laid_out(launch, fewer, gpu)
    ]
    best = launches.microseconds(first, fewer, H200)
    launch, us = min((each for each in near if each[1] > best), key=lambda each: each[1])
    assert us < best / (1 - launches.UNTIMED), "within what a launch that was not timed must gain"
    timed = Tuned(2048, ((launch, 100.0),))
    assert launches.fastest(timed, fewer, gemms, H200, gpu) == launches.laid_out(launch, fewer, gpu)


def test_a_kernel_that_chooses_its_own_shape_is_not_put_first():
    """Its time is that of the best shape by prediction, which it need not choose."""
    gpu, gemms, asked = H200.many_tokens, GEMMS[1:], row_problem(40)
    shapes = few_tokens.candidates("w8a8_small", 64, 4096, 4096, gpu.sms)
    timed = [LaunchConfig("w8a8_small", "bf16", tuple(shape)) for shape in shapes]
    slow = max(timed, key=lambda launch: launches.microseconds(launch, asked, H200))
    found = launches.fastest(Tuned(64, ((slow, 50.0),)), asked, gemms, H200, gpu)
    assert found.shape is not None
    assert found != slow


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
    assert [launches.laid_out(narrow, row_problem(m), gpu) for m in (256, 257)] == [narrow, None]
    assert [launches.laid_out(wide, row_problem(m), gpu) for m in (2048, 2049)] == [wide, None]
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
