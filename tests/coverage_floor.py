"""The pure core is covered by its unit tests to over 95 %, branches included: ``python -m tests.coverage_floor``."""

from __future__ import annotations

import subprocess
import sys

FLOOR = 95
CORE = (
    "settings",
    *("problem/arch", "problem/problem", "problem/decision"),
    *("policy/resolve", "policy/rules", "policy/capability", "policy/catalogue"),
    *("backends/registry", "backends/own/tiling/tiles", "dispatch/whatif"),
)
TESTS = ("policy", "policy_anchors", "policy_capability", "policy_rules", "policy_values", "registry", "settings")
MORE_TESTS = ("explain", "arch", "dispatch", "backend_cutlass")


def main() -> int:
    """Run the core's tests under coverage; 1 if one fails or the floor is missed."""
    files = [f"fp4dispatch/{name}.py" for name in CORE]
    tests = [f"tests/unit/test_{name}.py" for name in (*TESTS, *MORE_TESTS)]
    coverage = [sys.executable, "-m", "coverage"]
    run = subprocess.run([*coverage, "run", "--branch", "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests])
    report = subprocess.run([*coverage, "report", f"--fail-under={FLOOR}", f"--include={','.join(files)}"])
    return 1 if run.returncode or report.returncode else 0


if __name__ == "__main__":
    raise SystemExit(main())
