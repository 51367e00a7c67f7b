"""Versions of the libraries that integrations register with: only tested ones are used."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from packaging.specifiers import SpecifierSet


def why_untested(*packages: str, supported: SpecifierSet) -> str:
    """Return why an integration must not use what is installed: an error without its advice; empty if it may.

    Parameters
    ----------
    *packages
        Distributions that hold the library, in the order in which they are looked up. The first one is its name.
    supported
        Versions that were tested.
    """
    name, found = packages[0], _first_of(packages)
    if found is None:
        return f"{name} is not installed; need {name}{supported}"
    if supported.contains(found, prereleases=True):
        return ""
    return (
        f"{name} {found} is installed; this version of fp4dispatch was tested with {supported}, and the interface for "
        "quantisation changes between versions"
    )


def _first_of(packages: tuple[str, ...]) -> str | None:
    """Return the version of the first distribution that is installed."""
    for package in packages:
        try:
            return version(package)
        except PackageNotFoundError:
            continue
    return None
