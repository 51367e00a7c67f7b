"""Backends whose builds a table of tiles lists: which build serves a problem, and which can run it."""

from __future__ import annotations

from typing import ClassVar

from fp4dispatch.backends.own.compiled import CompiledBackend
from fp4dispatch.backends.own.launch_choice import Build
from fp4dispatch.backends.own.tiling.search import Fastest
from fp4dispatch.backends.own.tiling.speeds import Speeds
from fp4dispatch.backends.own.tiling.tiles import builds_for, fastest_for, tile_for
from fp4dispatch.problem import Problem
from fp4dispatch.problem.arch import Arch


class TableBackend(CompiledBackend):
    """A backend on the rows of ``tiling/<table>_tiles.toml`` for its activations. Plans are by M."""

    table: ClassVar[str]

    def takes(self, problem: Problem, kernel: str) -> bool:
        """Whether a kernel of the table's rows for this problem can run it."""
        return True

    def _kernels(self, problem: Problem, arch: Arch, sms: int, speeds: Speeds | None = None) -> tuple[Build, ...]:
        """Return the builds of the row that serves a problem."""
        tile = tile_for(problem, arch, sms, self.table, lambda tile: self.takes(problem, tile.kernel), speeds)
        return () if tile is None else self.with_quantizer(problem, (tile.kernel, tile.builds[problem.out_dtype]))

    def _fastest(self, problem: Problem, arch: Arch, sms: int, speeds: Speeds) -> tuple[Build, Fastest] | None:
        """Return the build that is predicted to be the fastest, and its launch; for graphs the same."""
        problem = problem.eager()
        found = fastest_for(problem, arch, sms, self.table, lambda tile: self.takes(problem, tile.kernel), speeds)
        return None if found is None else ((found[0].kernel, found[0].builds[problem.out_dtype]), found[1])

    def gemms(self, problem: Problem, arch: Arch | None, sms: int) -> tuple[Build, ...]:
        """Name every build of the table that runs a problem."""
        return tuple(gemm for gemm in builds_for(problem, arch, self.table) if self.takes(problem, gemm[0]))
