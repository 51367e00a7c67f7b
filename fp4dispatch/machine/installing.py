"""Pip commands for missing packages, made from this package's own requirements."""

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
    """Return the pip command that installs the requirements of some extras.

    The command lists the requirements, not ``fp4dispatch[...]``, which pip finds only if this package is published.

    Raises
    ------
    InputError
        If this package has no such extra.
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
    """Return how to install nvcc of a CUDA release or a later one.

    Parameters
    ----------
    cuda
        The lowest release that works, e.g. ``12.9``, or the installed torch's, if that is newer.
    """
    toolkit = f"install a CUDA toolkit {cuda} or later and point CUDA_HOME or FP4DISPATCH_NVCC at it"
    if int(cuda.split(".")[0]) < FIRST_NVCC_WHEEL:
        return toolkit
    return f"{of_extras('jit', 'cu13')}, or {toolkit}"
