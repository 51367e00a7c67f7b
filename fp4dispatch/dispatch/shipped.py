"""Shipped tables of tuned times, one JSON file a GPU model: ``tuned_tables/h200-sxm.json``. No torch.

``fp4dispatch tune --model-shapes --out FOLDER`` makes them. A table holds for its GPU model and for the sources of our
kernels that it was measured with; else it is not used. Its times are of calls without a bias, in bfloat16; they serve
others too. What a table says counts less than what this user has measured, and more than predictions.
"""

from __future__ import annotations

import functools
import json
import re
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fp4dispatch import strict_toml
from fp4dispatch.errors import SettingsError
from fp4dispatch.machine import gpu_models
from fp4dispatch.machine.gpu_models import GpuModel
from fp4dispatch.machine.system import System
from fp4dispatch.problem import OPS, SCALINGS, Op, Problem, Scaling
from fp4dispatch.problem.measurement import Measurement, Timing, checked, fastest_first
from fp4dispatch.trust import facts

FOLDER = Path(__file__).with_name("tuned_tables")
SCHEMA = 1

Layer = tuple[Op, Scaling, int, int]
"""Op, scaling, N, K."""

_HEAD = {"schema": int, "gpu": str, "kernels": str, "date": str, "method": str, "facts": dict, "layers": list}
_ROW = {"op": str, "scaling": str, "n": int, "k": int, "m": dict}


@dataclass(frozen=True)
class Table:
    """A table, checked.

    Parameters
    ----------
    gpu
        The GPU model, as ``gpu_models.toml`` names it.
    kernels
        Hash of the sources of our kernels (:func:`fp4dispatch.trust.facts.kernel_sources`).
    date, method
        Of the measurement.
    facts
        Under which it was measured: driver, libraries, commit.
    layers
        Timings by layer and M, fastest first.
    """

    gpu: str
    kernels: str
    date: str
    method: str
    facts: Mapping[str, str]
    layers: Mapping[Layer, Mapping[int, tuple[Timing, ...]]]

    def __str__(self) -> str:
        return f"shipped table of {self.gpu}"

    def measurement(self, problem: Problem) -> Measurement | None:
        """Return the times of a problem; None where the table has none for its layer and M."""
        timings = self.layers.get((problem.op, problem.scaling, problem.n, problem.k), {}).get(problem.m)
        if not timings:
            return None
        return Measurement(problem, timings, (), self.date, self.method, 1, dict(self.facts), str(self))


def find(problem: Problem, model: GpuModel | None) -> Measurement | None:
    """Return the times of a problem on a GPU model, from its table; None where none ships, or it does not hold."""
    table = None if model is None else _packaged(model.name, FOLDER)
    if table is None or problem.raw or table.kernels != facts.kernel_sources():
        return None
    return table.measurement(problem)


def why_not(system: System) -> str:
    """Return why the table of a GPU model is not used; empty where it is used, or there is none."""
    table = of(system)
    if table is None or table.kernels == facts.kernel_sources():
        return ""
    return (
        f"the {table}, of {table.date}, is not used: it was measured with other sources of our kernels "
        f"({table.kernels[:12]}, here {facts.kernel_sources()[:12]})"
    )


def of(system: System) -> Table | None:
    """Return the table of the first GPU of a machine, whether it holds or not; None where none ships."""
    model = model_of(system)
    return None if model is None else _packaged(model.name, FOLDER)


def model_of(system: System) -> GpuModel | None:
    """Return the model of the first GPU of a machine; None where it is not known, or there is none."""
    return gpu_models.of(system.gpus[0]) if system.gpus else None


@functools.lru_cache(maxsize=16)
def _packaged(gpu: str, folder: Path) -> Table | None:
    path = folder / file_name(gpu)
    if not path.is_file():
        return None
    table = read(path)
    if table.gpu != gpu:
        raise SettingsError(f"{path}: is the table of {table.gpu}, not of {gpu}: reinstall fp4dispatch")
    return table


def file_name(gpu: str) -> str:
    """Return the name of the table's file of a GPU model: ``h200-sxm.json``."""
    return re.sub(r"[^a-z0-9]+", "-", gpu.lower()).strip("-") + ".json"


def load(path: Path) -> Table:
    """Read a table and check all of it.

    Raises
    ------
    SettingsError
        As :func:`read`, and for an unknown activation format, or a time or a launch that is none.
    """
    table = read(path)
    for by_m in table.layers.values():
        deque(by_m.values(), maxlen=0)
    return table


class _ByM(Mapping[int, tuple[Timing, ...]]):
    """Timings of a layer by M. Each is checked when it is first read: a process needs few of some thousands."""

    def __init__(self, where: str, rows: Mapping[str, Any]) -> None:
        self._where = where
        self._rows = {_size(where, m): timings for m, timings in rows.items()}
        self._checked: dict[int, tuple[Timing, ...]] = {}

    def __getitem__(self, m: int) -> tuple[Timing, ...]:
        if m not in self._checked:
            self._checked[m] = _timings(f"{self._where}, M={m}", self._rows[m])
        return self._checked[m]

    def __iter__(self) -> Iterator[int]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)


def read(path: Path) -> Table:
    """Read a table. Its timings are checked when they are first looked up, with the errors of :func:`load`.

    Raises
    ------
    SettingsError
        If it cannot be read, is of another schema, or has a key that is missing, unknown or of the wrong type, a size
        that is none, an unknown op or scaling, or a layer twice.
    """
    try:
        data = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise SettingsError(f"{path}: cannot be read as JSON ({error}): reinstall fp4dispatch") from error
    strict_toml.check(str(path), data, _HEAD, error=SettingsError)
    if data["schema"] != SCHEMA:
        raise SettingsError(f"{path}: is of schema {data['schema']}, this fp4dispatch reads {SCHEMA}")
    strict_toml.check(f"{path}: facts", data["facts"], dict.fromkeys(data["facts"], str), error=SettingsError)
    layers: dict[Layer, Mapping[int, tuple[Timing, ...]]] = {}
    for i, row in enumerate(data["layers"]):
        where = f"{path}: layer {i}"
        key = _layer(where, row)
        if key in layers:
            raise SettingsError(f"{where}: {key} is there twice")
        layers[key] = _ByM(where, row["m"])
    return Table(data["gpu"], data["kernels"], data["date"], data["method"], data["facts"], layers)


def _layer(where: str, row: Any) -> Layer:
    strict_toml.check(where, row, _ROW, error=SettingsError)
    strict_toml.names(f"{where}: op", [row["op"]], OPS, error=SettingsError)
    strict_toml.names(f"{where}: scaling", [row["scaling"]], SCALINGS, error=SettingsError)
    if min(row["n"], row["k"]) < 1:
        raise SettingsError(f"{where}: N={row['n']} K={row['k']} are no sizes")
    return row["op"], row["scaling"], row["n"], row["k"]


def _size(where: str, m: str) -> int:
    if not re.fullmatch(r"[1-9][0-9]{0,6}", m):
        raise SettingsError(f"{where}: M={m!r} is no number of tokens")
    return int(m)


def _timings(where: str, rows: Any) -> tuple[Timing, ...]:
    try:
        return fastest_first(checked(*row) for row in rows)
    except (TypeError, ValueError) as error:
        raise SettingsError(f"{where}: {error}") from error


def to_json(table: Table) -> str:
    """Return a table as the text of its file: one line for each layer and M, so that differences are readable."""
    head = {
        "schema": SCHEMA,
        "gpu": table.gpu,
        "kernels": table.kernels,
        "date": table.date,
        "method": table.method,
        "facts": dict(table.facts),
    }
    layers = ",\n".join(_layer_json(key, table.layers[key]) for key in sorted(table.layers))
    return json.dumps(head, indent=1)[:-2] + ',\n "layers": [\n' + layers + "\n ]\n}\n"


def _layer_json(key: Layer, by_m: Mapping[int, Iterable[Timing]]) -> str:
    op, scaling, n, k = key
    rows = ",\n".join(f'   "{m}": {json.dumps([_plain(t) for t in by_m[m]])}' for m in sorted(by_m))
    head = json.dumps({"op": op, "scaling": scaling, "n": n, "k": k})
    return f'  {head[:-1]}, "m": {{\n{rows}\n  }}}}'


def _plain(t: Timing) -> list[Any]:
    launch = None if t.launch is None else [t.launch.kernel, t.launch.build, t.launch.shape and list(t.launch.shape)]
    return [t.backend, t.activation, round(t.us, 3), round(t.noise_us, 3), t.repeats, launch]


def with_layer(table: Table, key: Layer, measured: Iterable[Measurement]) -> Table:
    """Return a table with these measurements of a layer, of the M of each."""
    return replace(table, layers={**table.layers, key: {each.problem.m: each.timings for each in measured}})
