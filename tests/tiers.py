"""Which tests the README's command leaves to ``-m thorough``: the longest, by a measured run. ``tests/thorough.txt``.

A file of compile tests is listed whole: the first of its tests pays for kernels that the others share. Make the list
anew from a run of everything but the slow tests:

    python -m pytest -m "thorough or not thorough" --junitxml=times.xml
    python -m tests.tiers times.xml --seconds 240
"""

from __future__ import annotations

import argparse
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[1]
LIST = ROOT / "tests" / "thorough.txt"


def thorough() -> frozenset[str]:
    """Return the functions, as node ids without parameters."""
    return frozenset(LIST.read_text("utf-8").split())


def times(report: Path) -> Counter[str]:
    """Return the seconds of each test function of a JUnit report, as pytest writes it."""
    found: Counter[str] = Counter()
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        parts = case.get("classname", "").split(".")
        modules = [part for part in parts if not part.startswith("Test")]
        function = case.get("name", "").partition("[")[0]
        node = "::".join(["/".join(modules) + ".py", *parts[len(modules) :], function])
        found[node] += float(case.get("time", 0))
    return found


def longest(found: Counter[str], seconds: float) -> list[str]:
    """Return the functions of the longest units, without which the others take at most ``seconds``."""
    units: Counter[str] = Counter()
    for node, taken in found.items():
        units[unit(node)] += taken
    rest, chosen = sum(units.values()), set()
    for name, taken in units.most_common():
        if rest <= seconds:
            break
        rest -= taken
        chosen.add(name)
    return sorted(node for node in found if unit(node) in chosen)


def unit(node: str) -> str:
    """Return what is listed as one: a function, or a file of tests that share compiled kernels."""
    return node.partition("::")[0] if node.startswith("tests/compile/") else node


def main() -> None:
    """Write the list."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("reports", type=Path, nargs="+", help="JUnit reports of one run")
    parser.add_argument("--seconds", type=float, required=True, help="what the other tests may take, in all")
    arguments = parser.parse_args()
    found: Counter[str] = Counter()
    for report in arguments.reports:
        found.update(times(report))
    LIST.write_text("\n".join(longest(found, arguments.seconds)) + "\n", "utf-8")


if __name__ == "__main__":
    main()
