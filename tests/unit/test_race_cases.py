"""The race runs every function of ours that is launched with PDL on sm_90."""

from __future__ import annotations

from fp4dispatch.backends.own.pdl_trial import launch_operands
from fp4dispatch.jit.catalog.manifest import installed
from fp4dispatch.problem.arch import SM90
from fp4dispatch.trust.race import CASES


def test_every_function_has_a_case():
    """Builds of one kernel may have functions of their own, as even ones do."""
    catalog = installed()
    needed = {
        (kernel.name, entry.function)
        for kernel in catalog.kernels.values()
        if kernel.pdl and any(SM90 in catalog.record(target).archs for target in kernel.targets)
        for variant in kernel.variants.values()
        for entry in launch_operands.entries(kernel, variant)
    }
    assert ("w4_gemm_sm90", "w4_gemm_even") in needed
    assert needed == {(case.kernel, case.function) for case in CASES}


def test_every_case_is_a_build_with_that_function():
    for case in CASES:
        kernel = installed().kernel(case.kernel)
        found = launch_operands.entries(kernel, kernel.variant(case.variant))
        assert case.function in {entry.function for entry in found}, case.name
