"""Pickles of layers: those of before load, and those of now name public paths only."""

from __future__ import annotations

import pickle
import pickletools
from pathlib import Path

import pytest
import torch
from torch import nn

from fp4dispatch import FP4Linear, FP8Linear
from fp4dispatch.checkpoints.carried import carried_by

# A ModuleDict of layers made of ``linear()``, pickled (protocol 4) before the modules moved into folders.
OLD = Path(__file__).parent / "pickles" / "layers-0.1.0.pkl"
MAKE = {
    "fp4": lambda: FP4Linear.from_linear(linear(), name="fp4"),
    "fp8": lambda: FP8Linear.from_linear(linear(), scaling="row", name="fp8"),
    "block": lambda: FP8Linear.from_linear(linear(), scaling="block128", activation="bf16"),
}


def linear():
    made = nn.Linear(32, 8)
    made.weight.data = (torch.arange(8 * 32, dtype=torch.float32).remainder(29) - 14).view(8, 32) / 16
    made.bias.data = torch.arange(8.0) / 8
    return made.bfloat16()


def names(data):
    """Every module.name of this package that a pickle refers to."""
    found, strings, memo = set(), [], []
    for op, arg, _ in pickletools.genops(data):
        if op.name == "MEMOIZE":
            memo.append(strings[-1] if strings else "")
        elif op.name in ("BINGET", "LONG_BINGET"):
            strings.append(memo[arg])
        elif isinstance(arg, str):
            strings.append(arg)
        elif op.name == "STACK_GLOBAL":
            found.add(".".join(strings[-2:]))
            strings.append("")
    return {name for name in found if name.startswith("fp4dispatch")}


@pytest.mark.parametrize("kind", MAKE)
def test_a_layer_that_was_pickled_before_the_move_loads_and_computes(kind):
    layer, now = pickle.loads(OLD.read_bytes())[kind], MAKE[kind]()
    x = torch.linspace(-1, 1, 96).view(3, 32).bfloat16()
    assert type(layer) is type(now)
    assert repr(layer) == repr(now)
    assert torch.equal(layer(x), now(x))
    assert torch.equal(layer(x), now(x))  # and on the fast path
    again = pickle.loads(pickle.dumps(layer))
    assert torch.equal(again(x), now(x))


def test_what_a_checkpoint_left_with_a_model_loads_too():
    carried = carried_by(pickle.loads(OLD.read_bytes()))
    assert carried.kv_cache.algo == "FP8"
    assert list(carried.tensors) == ["k_scale"]


def test_the_old_pickle_names_what_it_should():
    assert names(OLD.read_bytes()) == {
        "fp4dispatch.linear.FP4Linear",
        "fp4dispatch.linear.FP8Linear",
        "fp4dispatch.stored_weights.never",
        "fp4dispatch.checkpoints.carried.Carried",
        "fp4dispatch.checkpoints.kv_cache.KvCache",
    }


@pytest.mark.parametrize("kind", MAKE)
def test_a_pickle_of_now_names_the_public_path_alone(kind):
    layer = MAKE[kind]()
    layer(torch.ones(2, 32, dtype=torch.bfloat16))
    assert names(pickle.dumps(layer, protocol=4)) == {f"fp4dispatch.linear.{type(layer).__name__}"}
