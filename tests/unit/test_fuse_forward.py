"""Which ``forward`` is rewritten for fused layers, and which is left: toy modules, one reason each."""

from __future__ import annotations

import functools
import inspect
import sys
import traceback

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fp4dispatch
from fp4dispatch.models.fusing.parents import FusedProjections

K = 32


class Base(nn.Module):
    def __init__(self):
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = nn.Linear(K, K), nn.Linear(K, 16), nn.Linear(K, 16)


class Plain(Base):
    def forward(self, x):
        q = self.q_proj(x)
        k, v = self.k_proj(x), self.v_proj(x)
        return torch.cat([q, k, v], -1)


class OneLine(Base):
    def forward(self, x: torch.Tensor, scale: float = 2.0) -> torch.Tensor:
        return torch.cat([self.v_proj(x) * scale, F.silu(self.q_proj(x)), self.k_proj(x).exp()], dim=-1)


class Reassigned(Base):
    def forward(self, x):
        x = x + 1
        x = torch.cat([self.q_proj(x), self.k_proj(x), self.v_proj(x)], -1)
        return x + 1


class ShapesBetween(Base):
    def forward(self, x):
        if x.ndim == 2:
            x = x.unsqueeze(0)
        q = self.q_proj(x).view(*x.shape[:-1], -1, 16)
        k = self.k_proj(x)
        if q.shape[0] > 5:
            q = q * 2
        v = self.v_proj(x).to(x.dtype)
        return torch.cat([q.flatten(-2), k, v], -1)


class InALoop(Base):
    def forward(self, x):
        total = 0
        for step in range(3):
            y = x + step
            total = total + torch.cat([self.q_proj(y), self.k_proj(y), self.v_proj(y)], -1)
        return total


def twice(function):
    @functools.wraps(function)
    def wrapper(self, x):
        return 2 * function(self, x)

    return wrapper


class Decorated(Base):
    @twice
    def forward(self, x):
        return torch.cat([self.q_proj(x), self.k_proj(x), self.v_proj(x)], -1)


class Branch(Base):
    def forward(self, x, cross=False):
        q = self.q_proj(x)
        if cross:
            return q
        return torch.cat([q, self.k_proj(x), self.v_proj(x)], -1)


class Inherited(Plain):
    pass


FUSABLE = [Plain, OneLine, Reassigned, ShapesBetween, InALoop, Decorated, Branch, Inherited]


@pytest.mark.parametrize("kind", FUSABLE)
def test_results_are_those_of_separate_layers(kind):
    torch.manual_seed(0)
    apart = nn.Sequential(kind()).eval()
    fp4dispatch.replace_linears(apart, "nvfp4")
    x = torch.randn(2, 3, K)
    wants = [apart(x), apart(x[0])]
    report = fp4dispatch.fuse(apart)
    assert [layer.name for layer in report.fused] == ["0.qkv_proj"]
    assert list(dict(apart[0].named_children())) == ["qkv_proj"]
    for got, want in zip([apart(x), apart(x[0])], wants, strict=True):
        torch.testing.assert_close(got, want)
    assert isinstance(apart[0], kind)
    assert type(apart[0]) is not kind
    assert inspect.signature(apart[0].forward) == inspect.signature(kind().forward)
    assert not isinstance(kind(), FusedProjections)
    calls = []
    apart[0].qkv_proj.register_forward_hook(lambda *_: calls.append(1))
    apart(x)
    assert len(calls) == (3 if kind is InALoop else 1)


def test_an_error_points_to_the_source_of_the_model():
    made = nn.Sequential(Plain())
    fp4dispatch.replace_linears(made, fuse=True)
    try:
        made(torch.ones(2, K + 1))
    except fp4dispatch.InputError:
        frames = traceback.extract_tb(sys.exc_info()[2])
    (frame,) = (frame for frame in frames if frame.filename == __file__ and frame.name == "forward")
    assert frame.line == "q = self.q_proj(x)"


class OtherInput(Base):
    def forward(self, x, y):
        return torch.cat([self.q_proj(x), self.k_proj(y), self.v_proj(y)], -1)


class Rebound(Base):
    def forward(self, x):
        q = self.q_proj(x)
        x = x + 1
        return torch.cat([q, self.k_proj(x), self.v_proj(x)], -1)


class WrittenBetween(Base):
    def forward(self, x):
        y = x
        q = self.q_proj(x)
        y.add_(1)
        return torch.cat([q, self.k_proj(x), self.v_proj(x)], -1)


class AddedBetween(Base):
    def forward(self, x):
        y = x
        q = self.q_proj(x)
        y += 1
        return torch.cat([q, self.k_proj(x), self.v_proj(x)], -1)


class SetBetween(Base):
    def forward(self, x):
        y = x.view(-1)
        q = self.q_proj(x)
        y[0] = 5
        return torch.cat([q, self.k_proj(x), self.v_proj(x)], -1)


class HandedOn(Base):
    def forward(self, x):
        return torch.cat([self.q_proj(x), self.k_proj(x), F.relu(x), self.v_proj(x)], -1)


class InPlaceKeyword(Base):
    def forward(self, x):
        y = x
        return torch.cat([self.q_proj(x), F.relu(y, inplace=True), self.k_proj(x), self.v_proj(x)], -1)


class InPlaceArgument(Base):
    def forward(self, x):
        y = x
        return torch.cat([self.q_proj(x), F.relu(y, True), self.k_proj(x), self.v_proj(x)], -1)


relu_ = F.relu_


class InPlaceFunction(Base):
    def forward(self, x):
        y = x
        return torch.cat([self.q_proj(x), relu_(y), self.k_proj(x), self.v_proj(x)], -1)


class Conditional(Base):
    def forward(self, x, cross=False):
        return torch.cat([self.q_proj(x), self.k_proj(x) if cross else self.v_proj(x)], -1)


class ShortCircuit(Base):
    def forward(self, x, cross=False):
        q, k = self.q_proj(x), cross or self.k_proj(x)
        return torch.cat([q, k, self.v_proj(x)], -1)


class Twice(Base):
    def forward(self, x):
        return torch.cat([self.q_proj(x), self.q_proj(x), self.k_proj(x), self.v_proj(x)], -1)


class Expression(Base):
    def forward(self, x):
        return torch.cat([self.q_proj(x + 1), self.k_proj(x), self.v_proj(x)], -1)


class ReadsIt(Base):
    def forward(self, x):
        layer = self.q_proj
        return torch.cat([self.q_proj(x), self.k_proj(x), self.v_proj(x)], -1) + layer.in_features


class ByName(Base):
    def forward(self, x):
        name = "q_proj"
        return torch.cat([self.q_proj(x), self.k_proj(x), self.v_proj(x), getattr(self, name)(x)], -1)


class Lambda(Base):
    def forward(self, x):
        q = lambda: self.q_proj(x)  # noqa: E731
        return torch.cat([q(), self.k_proj(x), self.v_proj(x)], -1)


class Inner(Base):
    def forward(self, x):
        def q():
            return self.q_proj(x)

        return torch.cat([q(), self.k_proj(x), self.v_proj(x)], -1)


class Helper(Base):
    def forward(self, x):
        return torch.cat([self.q_proj(x), self.k_proj(x), self.v_proj(x)], -1)

    def warm(self, x):
        return self.q_proj(x)


class Super(Plain):
    def forward(self, x):
        return super().forward(x)


exec("class NoSource(Base):\n    def forward(self, x):\n        return self.q_proj(x)")


class Wrapped(Base):
    def forward(self, x):
        return torch.cat([self.q_proj(x), self.k_proj(x), self.v_proj(x)], -1)


Wrapped.forward = twice(Wrapped.forward)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (OtherInput, "does not call q_proj, k_proj, v_proj on one input, in one block of statements"),
        (Rebound, "uses x in another way between its calls"),
        (WrittenBetween, "calls add_, which writes in place between its calls"),
        (AddedBetween, "has `y += 1` between its calls"),
        (SetBetween, "writes to y[0] between its calls"),
        (HandedOn, "uses x in another way between its calls"),
        (InPlaceKeyword, "calls relu, which may write in place, between its calls"),
        (InPlaceArgument, "calls relu, which may write in place, between its calls"),
        (InPlaceFunction, "calls relu_, which writes in place between its calls"),
        (Conditional, "calls k_proj under a condition"),
        (ShortCircuit, "calls k_proj under a condition"),
        (Twice, "calls q_proj more than once"),
        (Expression, "does not call q_proj with one input"),
        (ReadsIt, "in other ways than one call of each"),
        (ByName, "in other ways than one call of each"),
        (Lambda, "calls q_proj under a condition"),
        (Inner, "does not call q_proj with one input"),
        (Helper, "Helper.warm uses q_proj too"),
        (Super, "uses names of an enclosing function, or super()"),
        (globals()["NoSource"], "the source of NoSource.forward is not known"),
        (Wrapped, "Wrapped.forward was wrapped by other code"),
    ],
)
def test_what_may_change_the_result_is_left_with_the_reason(kind, reason):
    made = nn.Sequential(kind()).eval()
    fp4dispatch.replace_linears(made, "nvfp4")
    report = fp4dispatch.fuse(made)
    ((name, why),) = report.left
    assert name == "0.(q_proj, k_proj, v_proj)"
    assert reason in why
    assert type(made[0]) is kind


class Registered(Plain):
    def __init_subclass__(cls, *, key):
        super().__init_subclass__()


class Interrupted(Plain):
    def __setattr__(self, name, value):
        if name == "__class__" and value is not Interrupted:
            raise KeyboardInterrupt
        super().__setattr__(name, value)


def test_a_class_that_cannot_change_leaves_the_module_whole():
    made = nn.Sequential(Registered())
    report = fp4dispatch.replace_linears(made, fuse=True)
    assert "Registered cannot have a subclass: " in str(report)
    made = nn.Sequential(Interrupted())
    fp4dispatch.replace_linears(made)
    want = made(torch.ones(1, K))
    with pytest.raises(KeyboardInterrupt):
        fp4dispatch.fuse(made)
    assert list(dict(made[0].named_children())) == ["q_proj", "k_proj", "v_proj"]
    assert torch.equal(made(torch.ones(1, K)), want)


class Reaches(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention, self.mlp = Plain(), OneLine()

    def forward(self, x):
        attention = self.attention
        return attention(x) + self.mlp(x) + attention.q_proj(x).sum()


def test_layers_that_other_modules_reach_for_stay():
    made = Reaches()
    fp4dispatch.replace_linears(made)
    report = fp4dispatch.fuse(made)
    assert {why for _, why in report.left} == {"Reaches.forward uses q_proj of another module"}


def test_a_forward_that_is_patched_later_is_rewritten_as_it_is_then(monkeypatch):
    first = nn.Sequential(OneLine())
    fp4dispatch.replace_linears(first, fuse=True)

    def forward(self, x):
        return torch.cat([self.q_proj(x), self.k_proj(x), self.v_proj(x)], -1) * 7

    monkeypatch.setattr(OneLine, "forward", forward)
    second = nn.Sequential(OneLine())
    fp4dispatch.replace_linears(second)
    x = torch.ones(1, K)
    want = second(x)
    assert fp4dispatch.fuse(second).fused
    torch.testing.assert_close(second(x), want)


class Both(Base):
    """Attention and MLP in one module, beside each other and one after the other."""

    def __init__(self):
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(K, 48), nn.Linear(K, 48)

    def forward(self, x):
        attention = torch.cat([self.q_proj(x), self.k_proj(x), self.v_proj(x)], -1)
        return torch.cat([attention, F.silu(self.gate_proj(x)) * self.up_proj(x)], -1)


@pytest.mark.parametrize("steps", [1, 2])
def test_one_module_may_hold_several(steps):
    made = nn.Sequential(Both()).eval()
    if steps == 2:
        fp4dispatch.replace_linears(made, include="*.?_proj", fuse=True)
    else:
        fp4dispatch.replace_linears(made)
    x = torch.randn(3, K)
    if steps == 2:
        fp4dispatch.replace_linears(made)
    want, state = made(x), {name: tensor.clone() for name, tensor in made.state_dict().items()}
    report = fp4dispatch.fuse(made)
    assert len(report.fused) == (1 if steps == 2 else 2)
    assert list(dict(made[0].named_children())) == ["qkv_proj", "gate_up_proj"]
    torch.testing.assert_close(made(x), want)
    assert made.state_dict().keys() == state.keys()
