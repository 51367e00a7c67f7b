"""Built-ins, plug-ins, broken plug-ins, names and aliases."""

from __future__ import annotations

import sys
from importlib.metadata import EntryPoint
from types import ModuleType
from typing import ClassVar

import pytest

from fp4dispatch.backends import registry
from fp4dispatch.backends.base import Backend
from fp4dispatch.errors import PluginError, UnknownBackendError
from fp4dispatch.machine.system import System
from fp4dispatch.policy.capability import offered
from fp4dispatch.policy.catalogue import catalogue
from fp4dispatch.policy.resolve import resolve
from fp4dispatch.problem import Problem
from fp4dispatch.problem.decision import Reason
from tests.declared import DeclaredBackend


class Toy(Backend):
    name: ClassVar[str] = "toy"
    activations: ClassVar = {"nvfp4_gemm": ("bf16",)}

    def supports(self, problem, system):
        return ()

    def prepare(self, weights):
        raise NotImplementedError

    def plan(self, problem, prepared):
        raise NotImplementedError

    def run(self, plan, prepared, x, out, bias=None):
        raise NotImplementedError


class WrongName(Toy):
    name: ClassVar[str] = "other"


class WrongFormat(Toy):
    activations: ClassVar = {"nvfp4_gemm": ("fp5",)}


class NoFormat(Toy):
    activations: ClassVar = {"nvfp4_gemm": ()}


class NeedsArguments(Toy):
    def __init__(self, handle):
        self.handle = handle


class Unfinished(Backend):
    name: ClassVar[str] = "toy"
    activations: ClassVar = {}


@pytest.fixture(autouse=True)
def module(monkeypatch, tmp_path):
    (tmp_path / "plugin_that_exits.py").write_text("import sys\nsys.exit(2)\n")
    monkeypatch.syspath_prepend(tmp_path)
    module = ModuleType("toy_plugin")
    module.Fine = type("Fine", (Toy,), {"name": "fine"})
    for value in (Toy, WrongName, WrongFormat, NoFormat, NeedsArguments, Unfinished):
        setattr(module, value.__name__, value)
    module.Unhashable = type("Unhashable", (Toy,), {"activations": {"nvfp4_gemm": [["bf16"]]}})
    module.Text = type("Text", (Toy,), {"activations": "bf16"})
    module.NoActivations = type("NoActivations", (Toy,), {"activations": property(lambda self: 1 / 0)})
    module.Maybe = type("Maybe", (Toy,), {"auto": "yes"})
    module.Layout = type("Layout", (Toy,), {"layout": 3})
    module.OurLayout = type("OurLayout", (Toy,), {"layout": "w4p"})
    module.Quits = type("Quits", (Toy,), {"__init__": lambda self: sys.exit(3)})
    module.Loud = type("Loud", (Toy,), {"name": "Loud"})
    module.nothing = object
    monkeypatch.setitem(sys.modules, "toy_plugin", module)


def point(name="toy", value="toy_plugin:Toy"):
    return EntryPoint(name, value, registry.GROUP)


def test_a_plugin_is_loaded_by_its_entry_point():
    found = registry.plugins([point()])
    assert isinstance(found["toy"], Toy)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("toy_plugin_that_is_not_there:Toy", "ModuleNotFoundError"),
        ("toy_plugin:Missing", "AttributeError"),
        ("toy_plugin:nothing", "is not a fp4dispatch.backends.base.Backend"),
        ("toy_plugin:WrongName", "its name is 'other'"),
        ("toy_plugin:WrongFormat", "activations"),
        ("toy_plugin:NoFormat", "activations"),
        ("toy_plugin:NeedsArguments", "handle"),
        ("toy_plugin:Unfinished", "abstract"),
        ("toy_plugin:Unhashable", "activations"),
        ("toy_plugin:Text", "activations is 'bf16'"),
        ("toy_plugin:NoActivations", "ZeroDivisionError"),
        ("toy_plugin:Maybe", "auto is 'yes': need a bool"),
        ("toy_plugin:Layout", "layout is 3: need a str"),
        ("toy_plugin:OurLayout", "layout is 'w4p', which is fp4dispatch's own"),
        ("toy_plugin:Quits", "SystemExit: 3"),
        ("plugin_that_exits:Toy", "SystemExit: 2"),
    ],
)
def test_a_broken_plugin_is_a_rejected_candidate_with_its_exception(value, text):
    found = registry.plugins([point(value=value)])
    decision = resolve(Problem("nvfp4_gemm", 1, 16, 16), System.fake("9.0"), registry.builtins() | found)
    (reason,) = decision.verdict("toy").reasons
    assert reason.code == "UNAVAILABLE"
    assert text in reason.text
    assert value in reason.text
    assert reason.fix
    assert decision.backend != "toy"


def test_a_name_must_be_plain():
    found = registry.plugins([point("Loud", "toy_plugin:Loud")])
    assert "lower-case" in found["Loud"].supports(None, None)[0].text
    assert found["Loud"].activation_for(None) is None


@pytest.mark.parametrize("name", ["cublaslt", "reference", "flashinfer_trtllm", "marlin", "auto"])
def test_a_name_of_ours_costs_the_plugin_that_takes_it(name):
    found = registry.plugins([point(name), point()])
    assert list(found) == [f"{name} of toy_plugin:Toy", "toy"]
    assert isinstance(found["toy"], Toy)
    broken = found[f"{name} of toy_plugin:Toy"]
    assert isinstance(broken.error, PluginError)
    assert f"the name '{name}' is fp4dispatch's own" in broken.reason.text
    everything = registry.builtins() | found
    decision = resolve(Problem("nvfp4_gemm", 1, 16, 16), System.fake("9.0"), everything)
    assert decision.verdict(broken.name).reasons == (broken.reason,)
    if name in registry.BUILTINS:
        assert not isinstance(everything[name], registry.BrokenBackend)


def test_two_plugins_of_one_name_are_both_rejected_and_nothing_else():
    found = registry.plugins([point(), point(value="toy_plugin:WrongName"), point("fine", "toy_plugin:Fine")])
    assert isinstance(found["toy"].error, PluginError)
    assert "clashes" in found["toy"].reason.text
    assert "toy_plugin:WrongName" in found["toy"].reason.text
    assert not isinstance(found["fine"], registry.BrokenBackend)


def test_one_plugin_that_is_found_twice_is_one():
    assert isinstance(registry.plugins([point(), point()])["toy"], Toy)


def test_ctrl_c_at_import_is_not_swallowed(monkeypatch):
    def interrupted(name):
        raise KeyboardInterrupt

    monkeypatch.setattr(registry.importlib, "import_module", interrupted)
    with pytest.raises(KeyboardInterrupt):
        registry.plugins([point()])


def test_damaged_metadata_of_a_distribution_cost_nothing():
    class Damaged:
        name, value, group = "toy", "toy_plugin:Toy", registry.GROUP

        @property
        def dist(self):
            raise KeyError("Name")

    assert isinstance(registry.plugins([Damaged()])["toy"], Toy)


def raises(error):
    def supports(problem, system):
        raise error

    return supports


@pytest.mark.parametrize(
    ("supports", "text"),
    [
        (lambda problem, system: None, "supports() returned None; need a tuple of Reason"),
        (lambda problem, system: "no", "supports() returned 'no'"),
        (lambda problem, system: ("ARCH no",), "supports() returned ('ARCH no',)"),
        (lambda problem, system: True, "supports() returned True"),
        (lambda problem, system: [], "supports() returned []"),
        (lambda problem, system: (Reason("NONSENSE", "no"),), "NONSENSE"),
        (lambda problem, system: (Reason("ARCH", None),), "need a tuple of Reason"),
        (lambda problem: (), "TypeError"),
        (raises(RuntimeError("boom")), "RuntimeError: boom"),
        (raises(SystemExit(4)), "SystemExit: 4"),
    ],
)
def test_a_malformed_supports_costs_the_plugin_alone(supports, text):
    toy = Toy()
    toy.supports = supports
    decision = resolve(Problem("nvfp4_gemm", 1, 16, 16), System.fake("9.0"), registry.builtins() | {"toy": toy})
    (reason,) = decision.verdict("toy").reasons
    assert reason.code == "UNAVAILABLE"
    assert text in reason.text
    assert decision.backend == "reference"
    assert decision.text()


@pytest.mark.parametrize("answer", ["fp5", 3, ["bf16"]])
def test_a_malformed_activation_costs_the_plugin_alone(answer):
    toy = Toy()
    toy.activation_for = lambda problem: answer
    decision = resolve(Problem("nvfp4_gemm", 1, 16, 16), System.fake("9.0"), registry.builtins() | {"toy": toy})
    assert "activation_for() returned" in decision.verdict("toy").reasons[0].text


def test_auto_offers_builtins_but_the_reference_and_plugins_that_say_so():
    chosen = {record.backend for record in catalogue().capabilities if record.auto}
    assert "cublaslt" in chosen
    assert "reference" not in chosen
    for name in registry.BUILTINS:
        assert offered(name, registry.builtins()[name]) == offered(name, DeclaredBackend(name)) == (name in chosen)
    assert not offered("toy", Toy())
    assert offered("toy", type("Yes", (Toy,), {"auto": True})())
    assert not offered("toy", type("Truthy", (Toy,), {"auto": 1})())


def test_order_is_builtins_then_plugins_by_name(monkeypatch):
    monkeypatch.setattr(registry, "entry_points", lambda group: [point()] if group == registry.GROUP else [])
    registry.backends.cache_clear()
    try:
        assert list(registry.backends()) == [*registry.BUILTINS, "toy"]
        assert registry.instance("toy") is registry.instance("toy")
        assert registry.canonical("toy") == ("toy", None)
        assert "toy" in registry.known()
    finally:
        registry.backends.cache_clear()


def test_a_broken_builtin_does_not_stop_the_others(monkeypatch):
    monkeypatch.setitem(registry.BUILTINS, "cublaslt", "fp4dispatch.backends.not_there:Nothing")
    found = registry.builtins()
    assert isinstance(found["cublaslt"], registry.BrokenBackend)
    assert list(found) == list(registry.BUILTINS)


def test_builtins_load_and_are_declared():
    for name, backend in registry.builtins().items():
        assert not isinstance(backend, registry.BrokenBackend), backend.reason.text
        for record in catalogue().capabilities:
            if record.backend == name:
                assert backend.activations[record.op] == record.activations
        assert {c.op for c in catalogue().capabilities if c.backend == name} == set(backend.activations)


@pytest.mark.parametrize(
    ("word", "backend"),
    [
        ("auto", "auto"),
        ("cudnn", "cudnn"),
        (" CUTLASS ", "cutlass"),
        ("flashinfer_cudnn", "flashinfer_cudnn"),
        ("flashinfer-cutlass", "flashinfer_cutlass"),
        ("flashinfer_trtllm", "flashinfer_trtllm"),
        ("flashinfer_cutedsl", "flashinfer_cutedsl"),
        ("marlin", "w4a16"),
        ("cute-dsl", "flashinfer_cutedsl"),
        ("trtllm", "flashinfer_trtllm"),
        ("emulation", "reference"),
    ],
)
def test_names_that_users_know(word, backend):
    assert registry.canonical(word)[0] == backend


def test_an_alias_carries_a_note():
    name, alias = registry.canonical("marlin")
    assert name == "w4a16"
    assert "marlin" in alias.note
    assert registry.canonical("w4a16")[1] is None


@pytest.mark.parametrize("word", ["cudn", "", "flashinfer", "cutlas", "w4a17"])
def test_unknown_names(word):
    with pytest.raises(UnknownBackendError, match="Known: auto, ") as raised:
        registry.canonical(word)
    for name in ("cutlass", "cudnn", "w4a16", "marlin"):
        assert name in str(raised.value)


def test_the_nearest_name_is_offered():
    with pytest.raises(UnknownBackendError, match="Did you mean cudnn\\?"):
        registry.canonical("cudn")


def test_instance_of_what_is_not_there():
    with pytest.raises(UnknownBackendError, match="not part of this fp4dispatch"):
        registry.instance("not_there")


def test_every_declared_backend_is_part_of_this_package():
    assert set(catalogue().backends) == set(registry.BUILTINS)


def test_instance_of_what_is_broken(monkeypatch):
    broken = registry.plugins([point(value="toy_plugin:Missing")])
    monkeypatch.setattr(registry, "backends", lambda: broken)
    with pytest.raises(UnknownBackendError, match="cannot be loaded") as raised:
        registry.instance("toy")
    assert isinstance(raised.value.__cause__, AttributeError)
