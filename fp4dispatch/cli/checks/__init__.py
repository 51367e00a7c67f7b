"""The checks of ``fp4dispatch doctor``. A check is a function from :class:`Facts` to results. Tests make the facts."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from fp4dispatch.cli.checks import gpus, kernels, libraries, state
from fp4dispatch.cli.checks.facts import Check, Child, Facts, Kept

__all__ = ["CHECKS", "Check", "Child", "Facts", "Kept"]

CHECKS: tuple[Callable[[Facts], Iterable[Check]], ...] = (
    gpus.check_python,
    gpus.check_torch,
    gpus.check_driver,
    gpus.check_gpu,
    gpus.check_visible_devices,
    gpus.check_nvml_package,
    libraries.check_cudnn,
    libraries.check_flashinfer,
    libraries.check_nvcc,
    libraries.check_jit_extra,
    libraries.check_cutlass,
    kernels.check_kernels,
    state.check_cache,
    state.check_settings,
    state.check_plugins,
    state.check_selfcheck,
)
