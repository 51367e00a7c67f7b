"""Wheels of finished kernels."""

from __future__ import annotations

from collections.abc import Iterable

from fp4dispatch.cli.checks.facts import Check, Facts
from fp4dispatch.jit.packages import Report


def check_kernels(facts: Facts) -> Iterable[Check]:
    """Which kernels of installed wheels are used here, and why others are not."""
    if not facts.kernels:
        yield Check("kernels", "skip", "no wheel of finished kernels is installed: they are compiled on first use")
    for report in facts.kernels:
        yield from _check(report)


def _check(report: Report) -> Iterable[Check]:
    name = f"{report.package.name} {report.package.version}"
    fix = f"install the {report.package.name} of this fp4dispatch, or none: kernels are then compiled on first use"
    if report.package.fault:
        yield Check("kernels", "warn", f"{name}: {report.package.fault}", fix)
    if report.usable:
        targets = sorted({kernel.rpartition("-")[2] for kernel in report.usable})
        yield Check("kernels", "ok", f"{name}: {len(report.usable)} kernels for {', '.join(targets)}, verified")
    for reason, count in report.ignored.items():
        yield Check("kernels", "warn", f"{name}: {count} kernels are ignored: {reason}", fix)
