"""Carry the shipped tables over a change of csrc/ or jit_flags/ that leaves machine code of our kernels as it was.

A table holds for the sources that it was measured with. Where a change of them changes no instruction of a build that
was there (comments, names, new builds), its times are still true, and no GPU is needed:

    git worktree add /tmp/old COMMIT                                        # where the tables hold
    fp4dispatch build --arch 9.0 --ops w4_gemm,w8_gemm,w4_activations,w4_weights,fp8_quantize --out /tmp/before  # there
    fp4dispatch build --arch 9.0 --ops w4_gemm,w8_gemm,w4_activations,w4_weights,fp8_quantize --out /tmp/after   # here
    python -m bench.carry_tables /tmp/old /tmp/before /tmp/after

Every build in BEFORE must have the same machine code in AFTER, under whatever symbols, but for those of SwiGLU, which
no timing runs; and BEFORE must have every build that a table names. Else nothing is written: measure again
(``fp4dispatch tune --model-shapes``). A new build is not in the tables: where it may be faster, measure again too.

Where kernels of one format changed, or there are new builds of it, measure its layers alone, and give the folder:

    fp4dispatch tune fp8_gemm --scaling row --model-shapes --out FOLDER --commit HASH   # on each GPU that has a table
    python -m bench.carry_tables /tmp/old /tmp/before /tmp/after --measured FOLDER

Its layers replace those of the same op and scaling. The others are carried over, and only kernels that they do not
name, and that new layers do, may have changed. The table then names both commits. Where no source has changed, OLD is
this checkout, and BEFORE and AFTER are one folder.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from bench.shared import commandline
from fp4dispatch.backends.own import swiglu
from fp4dispatch.cli import tune_tables
from fp4dispatch.dispatch import shipped
from fp4dispatch.errors import Fp4DispatchError
from fp4dispatch.jit.catalog import manifest
from fp4dispatch.jit.store.digests import digest
from fp4dispatch.trust import facts
from tests import machine_code as mc

TARGET = "90a"
"""What the GPUs run that have tables."""


NOT_TIMED = frozenset({swiglu.PACKED, swiglu.ROWS})
"""Layers are timed as they are called, not from ``gate_up``."""


class Refused(Exception):
    """Why the tables cannot be carried over."""


def check_made_from(folder: Path, csrc: Path) -> None:
    """Refuse finished kernels that were made from other sources than these."""
    entries = sorted(folder.rglob("entry.json"))
    if not entries:
        raise Refused(f"{folder} holds no finished kernels: fp4dispatch build --out makes them")
    for entry in entries:
        for root, name, held in json.loads(entry.read_text("utf-8"))["files"]:
            path = csrc / name
            if root == "src" and (not path.is_file() or digest(path) != held):
                raise Refused(f"{entry} was made from another {name} than {path}")


def named(tables: Sequence[shipped.Table]) -> set[str]:
    """Return the builds that tables have times of, as :mod:`tests.machine_code` names them."""
    return {
        f"{each.launch.kernel}/{each.launch.build}-{TARGET}"
        for table in tables
        for by_m in table.layers.values()
        for timings in by_m.values()
        for each in timings
        if each.launch is not None
    }


def check_same_code(before: Path, after: Path, needed: set[str], measured: set[str]) -> int:
    """Return how many kernels have the same machine code on both sides; refuse where one has not.

    ``measured``: builds with new times. Their kernels may differ, unless builds that are ``needed`` are of them.
    """
    rows = [row for row in mc.compare_paths(before, after, renamed=True) if row.verdict != mc.NEW]
    if missing := sorted(needed - {row.build for row in rows}):
        raise Refused(f"{before} lacks {', '.join(missing)}, which the tables name")
    free = NOT_TIMED | {_kernel(build) for build in measured} - {_kernel(build) for build in needed}
    held = [row for row in rows if _kernel(row.build) not in free]
    for row in held:
        if row.verdict != mc.EQUAL:
            raise Refused(f"{row.build}, {row.kernel}: {row.verdict} {row.note[:200]}")
    return len(held)


def _kernel(build: str) -> str:
    return build.partition("/")[0]


def replaced(table: shipped.Table, new: shipped.Table | None) -> tuple[shipped.Table, shipped.Table]:
    """Return a table with the layers of the formats of ``new`` in place of its own, and what it keeps of its own.

    Raises
    ------
    Refused
        If ``new`` lacks a layer, or one of its numbers of tokens, or was measured with another driver or library.
    """
    if new is None:
        return table, table
    for name in sorted({*table.facts, *new.facts} - {"commit"}):
        if table.facts.get(name) != new.facts.get(name):
            raise Refused(
                f"the new table of {new.gpu} has {name} {new.facts.get(name)}, the old {table.facts.get(name)}"
            )
    formats = {key[:2] for key in new.layers}
    own = {key: by_m for key, by_m in table.layers.items() if key[:2] not in formats}
    for key, by_m in table.layers.items():
        if key not in own and (left := sorted(set(by_m) - set(new.layers.get(key, {})))):
            raise Refused(f"the new table of {table.gpu} has no times of {key} at M={', '.join(map(str, left))}")
    commit = commits(table.facts.get("commit", ""), {scaling for _, scaling in formats}, new.facts.get("commit", ""))
    merged = replace(table, date=new.date, facts={**table.facts, "commit": commit}, layers={**own, **new.layers})
    return merged, replace(table, layers=own)


def commits(text: str, scalings: set[str], commit: str) -> str:
    """Return the commits of a table, of which some scalings now have another: ``1234567, row 89abcde``."""
    first, *others = text.split(", ")
    by_scaling = dict(each.rsplit(" ", 1) for each in others) | dict.fromkeys(scalings, commit)
    return ", ".join([first, *(f"{scaling} {of}" for scaling, of in sorted(by_scaling.items()))])


def carry(old: Path, before: Path, after: Path, folder: Path, here: Path, fresh: Path | None = None) -> list[str]:
    """Write the tables with the hash of today's sources; return a line for each.

    Parameters
    ----------
    old, here
        Checkouts: where the tables hold, and of today. Each with csrc/ and jit_flags/.
    before, after
        Finished kernels of both.
    folder
        Of the tables.
    fresh
        Folder of tables that were measured with today's sources, of some formats; None: nothing was measured.
    """
    paths = sorted(folder.glob("*.json"))
    tables = [shipped.load(path) for path in paths]
    if not tables:
        raise Refused(f"{folder} holds no table")
    was, now = (facts.kernel_sources_in(root) for root in (old, here))
    for path, table in zip(paths, tables, strict=True):
        if table.kernels != was:
            raise Refused(f"{path} was measured with sources {table.kernels[:12]}, {old} has {was[:12]}")
    news = [None if fresh is None else shipped.load(fresh / path.name) for path in paths]
    for new in news:
        if new is not None and new.kernels != now:
            raise Refused(
                f"the new table of {new.gpu} was measured with sources {new.kernels[:12]}, here is {now[:12]}"
            )
    check_made_from(before, old / "csrc")
    check_made_from(after, here / "csrc")
    merged = [replaced(table, new) for table, new in zip(tables, news, strict=True)]
    measured = named([new for new in news if new is not None])
    count = check_same_code(before, after, named([own for _, own in merged]), measured)
    for path, (table, _) in zip(paths, merged, strict=True):
        tune_tables.write(path, replace(table, kernels=now), [])
    return [f"{path.name}: {was[:12]} -> {now[:12]}, {count} kernels are the same" for path in paths]


def main(words: Sequence[str] | None = None) -> int:
    """Carry over and print; 1 where that is refused."""
    parser = commandline.parser(__doc__)
    parser.add_argument("old", type=Path, metavar="OLD", help="checkout of a commit where the tables hold")
    parser.add_argument("before", type=Path, metavar="BEFORE", help="finished kernels of that checkout")
    parser.add_argument("after", type=Path, metavar="AFTER", help="finished kernels of this one")
    parser.add_argument(
        "--measured", type=Path, metavar="FOLDER", help="tables of some formats, measured with these sources"
    )
    args = commandline.parse(parser, words)
    here = manifest.installed().csrc.parent
    try:
        print("\n".join(carry(args.old, args.before, args.after, shipped.FOLDER, here, args.measured)))
    except (Refused, mc.Incomparable, Fp4DispatchError, OSError) as error:
        print(f"not carried over: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
