"""How many compilers may run in parallel: bounded by ``MAX_JOBS``, cores and free memory.

nvcc needs about 6 GB for a CUTLASS file, so one job per core could exhaust the memory.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from fp4dispatch.settings import settings


@dataclass(frozen=True)
class Limits:
    """Cores and memory (GB) that this process may use."""

    cores: int
    memory_gb: float

    def jobs(self, gigabytes: float, count: int) -> int:
        """Return how many of ``count`` jobs of this size may run at once; at least one."""
        by_memory = int(self.memory_gb // gigabytes) if gigabytes > 0 else count
        bounds = [self.cores, by_memory, count]
        if settings.max_jobs is not None:
            bounds.append(settings.max_jobs)
        return max(1, min(bounds))


def limits() -> Limits:
    """Read affinity, free memory and the memory limit of the control group (containers)."""
    free = _kilobytes("MemAvailable") / 1e6
    cgroup = [_number(Path("/sys/fs/cgroup") / name) for name in ("memory.max", "memory.current")]
    if cgroup[0] is not None:
        free = min(free, (cgroup[0] - (cgroup[1] or 0)) / 1e9)
    return Limits(len(os.sched_getaffinity(0)), max(free, 0.0))


def _kilobytes(field: str) -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1])
    return 0


def _number(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None
