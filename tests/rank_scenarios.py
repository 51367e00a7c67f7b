"""What two ranks do together, in real processes over gloo: run by tests/unit/test_agreement.py.

One function a scenario. Each returns plain data; what it raises is returned as text. Backends run on the CPU and count
as running on an H200.
"""

from __future__ import annotations

import logging
import sys
from dataclasses import replace
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

from fp4dispatch.backends import registry
from fp4dispatch.backends.reference import ReferenceBackend
from fp4dispatch.dispatch import choose, tuned
from fp4dispatch.machine.system import System
from fp4dispatch.models.linear import FP8Linear
from fp4dispatch.models.replace import warmup
from fp4dispatch.problem.decision import Reason
from fp4dispatch.run import routes
from fp4dispatch.settings import SETTINGS
from fp4dispatch.trust import canary, quarantine, selfcheck
from fp4dispatch.tune import tuning
from tests.unit.test_tuning import Clock, Timed

HERE = System.fake("9.0", cuda="13.0", torch="2.11", driver="580.1")
K, N = 96, 64


class Logged(logging.Handler):
    def __init__(self):
        super().__init__(logging.WARNING)
        self.lines = []

    def emit(self, record):
        self.lines.append(record.getMessage())


class World:
    """One rank's machine in one scenario."""

    def __init__(self, rank: int, folder: Path):
        self.rank = rank
        self.folder = folder
        self.backends = {name: Timed(name, us) for name, us in (("first", 10.0), ("second", 8.0), ("third", 9.0))}
        self.backends["reference"] = ReferenceBackend()
        self.logged = Logged()
        torch.manual_seed(0)
        self.model = nn.Sequential(FP8Linear.from_linear(nn.Linear(K, N).bfloat16(), scaling="row"))
        self.model[0]._forget()

    def outcome(self):
        layer = self.model[0]
        with torch.inference_mode():
            x = torch.ones(16, K, dtype=torch.bfloat16)
            total = float(layer(x).float().sum())
        return {
            "backend": layer.backend_text(),
            "planned": sorted({key[0] for key in routes._plans}),
            "quarantined": sorted(quarantine.quarantined()),
            "verdicts": sorted(r.text() for r in quarantine.known() if r.status == "failed"),
            "total": total,
            "warnings": [line for line in self.logged.lines if "self-check" not in line and "prefer" not in line],
            "reasons": {v.backend: [str(r) for r in v.reasons] for v in layer.decisions()[-1][1].verdicts},
        }


def lacks(world, name):
    world.backends[name].supports = lambda problem, system: (Reason("LIBRARY", f"lib{name} not found", "install it"),)


def zero(plan, out, result):
    out.zero_()


# ----------------------------------------------------------------------------------------------------------- scenarios


def nothing_is_wrong(world):
    warmup(world.model, tokens=[16])
    return world.outcome()


def one_rank_computes_garbage(world):
    if world.rank == 1:
        world.backends["first"].write = zero
    warmup(world.model, tokens=[16])
    return world.outcome()


def one_rank_computes_garbage_and_nobody_asks(world):
    if world.rank == 1:
        world.backends["first"].write = zero
    warmup(world.model, tokens=[16], agree=False)
    return world.outcome()


def one_rank_is_wrong_on_the_layer_alone(world):
    """Its canaries pass: the check of the bound layer finds it."""

    def write(plan, out, result):
        out.copy_(result)
        if out.shape[1] == N:
            out[:, -8:] = 1.0

    if world.rank == 1:
        world.backends["first"].write = write
    warmup(world.model, tokens=[16])
    return world.outcome()


def each_rank_has_its_own_fault(world):
    world.backends["first" if world.rank == 1 else "second"].write = zero
    warmup(world.model, tokens=[16])
    return world.outcome()


def one_rank_lacks_a_library(world):
    if world.rank == 0:
        lacks(world, "first")
    warmup(world.model, tokens=[16])
    return world.outcome()


def a_plugin_is_installed_on_one_rank(world):
    """And nothing is wrong with it; that rank lacks what the other would choose."""
    if world.rank == 1:
        del world.backends["first"]
        world.backends = {"plugin": Timed("plugin", 1.0), **world.backends}
    warmup(world.model, tokens=[16])
    return world.outcome()


def a_faulty_plugin_is_installed_on_one_rank(world):
    if world.rank == 1:
        world.backends = {"plugin": Timed("plugin", 1.0), **world.backends}
        world.backends["plugin"].write = zero
    warmup(world.model, tokens=[16])
    return world.outcome()


def cannot_plan(world, when):
    def raises(problem, prepared):
        if when(problem):
            raise RuntimeError("no kernel image is available")
        return Timed.plan(world.backends["first"], problem, prepared)

    world.backends["first"].plan = raises


def one_rank_cannot_plan(world):
    """For these tokens: those that the check of the bound layer tries are others."""
    if world.rank == 1:
        cannot_plan(world, lambda problem: (problem.m, problem.n) == (16, N))
    warmup(world.model, tokens=[16])
    return world.outcome()


def one_rank_cannot_plan_the_layer(world):
    if world.rank == 1:
        cannot_plan(world, lambda problem: problem.n == N)
    warmup(world.model, tokens=[16])
    return world.outcome()


def one_rank_has_no_layers(world):
    warmup(world.model if world.rank == 0 else nn.Sequential(nn.ReLU()), tokens=[16])


def ranks_have_other_layers(world):
    """Pipeline stages: nothing in common, nothing to agree on but the verdicts."""
    if world.rank == 1:
        world.model = nn.Sequential(FP8Linear.from_linear(nn.Linear(K, 2 * N).bfloat16(), scaling="row"))
        world.model[0]._forget()
        world.backends["first"].write = zero
    warmup(world.model, tokens=[16])
    return world.outcome()


def tuned_times_differ(world):
    world.backends["second"].us = 2.0 if world.rank == 0 else 9.9  # median 5.95
    world.backends["third"].us = 4.0 if world.rank == 0 else 5.0  # median 4.5
    warmup(world.model, tokens=[16], tune=True)
    stored = sorted(path.read_text() for path in tuned.store.folder().glob("*.json"))
    return world.outcome() | {"stored": stored}


def a_candidate_is_missing_on_one_rank_when_tuning(world):
    world.backends["second"].us = 1.0
    if world.rank == 1:
        lacks(world, "second")
    warmup(world.model, tokens=[16], tune=True)
    return world.outcome()


def a_candidate_is_wrong_on_one_rank_when_tuning(world):
    world.backends["second"].us = 1.0
    if world.rank == 1:
        world.backends["second"].write = zero
    warmup(world.model, tokens=[16], tune=True)
    return world.outcome()


def only_one_rank_has_tuned_times(world):
    if world.rank == 0:
        layer = world.model[0]
        tuning.tune(layer.problem(16), layer.weights(), gpu=0)
        assert choose.select(layer.problem(16)).backend == "second"
    warmup(world.model, tokens=[16])
    return world.outcome()


def ranks_have_different_tuned_times(world):
    layer = world.model[0]
    world.backends["second"].us = 1.0 if world.rank == 0 else 30.0
    tuning.tune(layer.problem(16), layer.weights(), gpu=0)
    assert choose.select(layer.problem(16)).backend == ("second" if world.rank == 0 else "third")
    world.backends["second"].us = 1.0
    warmup(world.model, tokens=[16], tune=True)
    return world.outcome()


def ranks_tune_different_tokens(world):
    warmup(world.model, tokens=[16 + 100 * world.rank], tune=True)


SCENARIOS = [
    value
    for value in list(globals().values())
    if callable(value) and getattr(value, "__module__", "") == __name__ and not isinstance(value, type)
    and value.__name__ not in ("lacks", "zero", "cannot_plan")
]  # fmt: skip


# ----------------------------------------------------------------------------------------------------------------- run


def run(rank, world):
    """Run one scenario with this process's machine replaced."""
    systems = {}

    def current():
        shut = quarantine.quarantined()
        return systems.setdefault(shut, replace(HERE, quarantined=shut))

    real = selfcheck.trusted
    patches = [
        mock.patch.object(registry, "backends", side_effect=lambda: world.backends),
        mock.patch.object(torch.cuda, "is_initialized", return_value=True),
        mock.patch("fp4dispatch.machine.capture.is_capturing", return_value=False),
        mock.patch("fp4dispatch.machine.system.current", current),
        mock.patch.object(selfcheck, "trusted", lambda name, p, system, device: real(name, p, system, "cpu")),
        mock.patch.object(routes, "gpu_of", return_value=0),
        mock.patch.object(routes, "_plans", {}),
        mock.patch.object(canary, "SHAPES", canary.SHAPES[:1]),
        mock.patch.object(tuning, "engine_of", side_effect=lambda device: Clock()),
        mock.patch.dict("os.environ", {SETTINGS["cache_dir"].name: str(world.folder)}),
    ]
    forget = (canary.canaries.cache_clear, quarantine.reset, choose.reset, tuned.reset)
    for each in (*forget, routes.LayerSpec.parse.cache_clear):
        each()
    log = logging.getLogger("fp4dispatch")
    log.addHandler(world.logged)
    try:
        for patch in patches:
            patch.start()
        return world.scenario(world)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        log.removeHandler(world.logged)
        for patch in reversed(patches):
            patch.stop()


def main(rank, size, folder, answers):
    torch.set_num_threads(1)
    folder = Path(folder)
    dist.init_process_group("gloo", init_method=f"file://{folder / 'store'}", rank=rank, world_size=size)
    found = {}
    for scenario in SCENARIOS:
        own = folder / f"{scenario.__name__}-{rank}"
        own.mkdir(mode=0o755)
        world = World(rank, own / "cache")
        world.scenario = scenario
        found[scenario.__name__] = run(rank, world)
        dist.barrier()
        sys.stdout.flush()
    answers.put((rank, found))
    dist.destroy_process_group()
