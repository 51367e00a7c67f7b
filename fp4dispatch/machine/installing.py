"""Commands that install what is missing, made of this package's own requirements: they work wherever it came from."""

from __future__ import annotations

import functools
import importlib.metadata
import shlex

from packaging.requirements import Requirement

from fp4dispatch.errors import InputError

DISTRIBUTION = "fp4dispatch"
FIRST_NVCC_WHEEL = 13
"""The first CUDA release whose nvcc pip can install; nvidia-cuda-nvcc-cu12 holds ptxas alone."""


@functools.cache
def of_extras(*extras: str) -> str:
    """Return the pip command that installs what some extras of this package name.

    The extras themselves are not named: pip finds ``fp4dispatch[...]`` only where this package is published.

    Raises
    ------
    InputError
        If an extra is none of this package.
    """
    try:
        found = importlib.metadata.metadata(DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:  # a source tree on PYTHONPATH
        return f"pip install -e '.[{','.join(extras)}]' in the source tree of {DISTRIBUTION}"
    if unknown := set(extras) - set(found.get_all("Provides-Extra") or ()):
        raise InputError(f"{', '.join(sorted(unknown))}: no extra of {DISTRIBUTION}")
    names = dict.fromkeys(
        f"{requirement.name}{requirement.specifier}"
        for requirement in map(Requirement, found.get_all("Requires-Dist") or ())
        if requirement.marker is not None
        and any(requirement.marker.evaluate({"extra": extra}) for extra in extras)
        and not requirement.marker.evaluate({"extra": ""})
    )
    return shlex.join(["pip", "install", "-U", *names])


def nvcc(cuda: str) -> str:
    """Return how to get a compiler of a CUDA release, or of a later one.

    Parameters
    ----------
    cuda
        The lowest release that will do, e.g. ``12.9``, or that of the torch that is there, where that is newer.
    """
    toolkit = f"install a CUDA toolkit {cuda} or later and point CUDA_HOME or FP4DISPATCH_NVCC at it"
    if int(cuda.split(".")[0]) < FIRST_NVCC_WHEEL:
        return toolkit
    return f"{of_extras('jit', 'cu13')}, or {toolkit}"
