"""What CUDA graphs capture of a model: by registered class, by argument, or a refusal that says what to pass."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import nn

from fp4dispatch.errors import InnerNotFoundError, InputError
from fp4dispatch.graphs import finder as finders
from fp4dispatch.graphs.finder import Inner, by_attributes, find_inner, register_finder
from tests import tiny_models

transformers = pytest.importorskip("transformers")

DECODERS = ("Llama", "Qwen2", "Qwen3", "Gemma-3 text", "Mistral", "Phi-3", "Qwen3-MoE")


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    monkeypatch.setattr(finders, "_finders", dict(finders._finders))


@pytest.fixture(scope="module")
def models():
    built: dict[str, nn.Module] = {}
    return lambda name: built.setdefault(name, tiny_models.build(name, transformers))


def breaks_of(found: Inner, layer: nn.Module) -> tuple[nn.Module, ...]:
    held = set(layer.modules())
    return tuple(each for each in found.breaks if each in held)


@pytest.mark.parametrize("name", DECODERS)
def test_each_decoder_is_found_whole_and_without_its_head(models, name):
    model = models(name)
    for root, path in ((model, "model"), (model.model, "")):
        found = find_inner(root)
        assert (found.module, found.name) == (model.model, path)
        assert found.layers == tuple(model.model.layers)
        assert len(found.layers) == 2
        assert found.breaks == tuple(layer.self_attn for layer in found.layers)
        assert [breaks_of(found, layer) for layer in found.layers] == [(each,) for each in found.breaks]


@pytest.mark.parametrize("name", DECODERS)
def test_what_is_found_runs_in_its_order_and_holds_all_that_it_should(models, name):
    """The layers run one after the other between embedding and norm; the breaks are all that knows of requests."""
    model, ran = models(name), []
    found = find_inner(model)
    watched = {"embed": found.module.embed_tokens, "norm": found.module.norm}
    watched |= {f"layer{i}": layer for i, layer in enumerate(found.layers)}
    watched |= {f"break{i}": each for i, each in enumerate(found.breaks)}
    hooks = [
        module.register_forward_pre_hook(lambda *_, name=label: ran.append(name)) for label, module in watched.items()
    ]
    try:
        tiny_models.logits(model)
    finally:
        for hook in hooks:
            hook.remove()
    assert ran == ["embed", "layer0", "break0", "layer1", "break1", "norm"]
    kinds = {type(module).__name__ for module in model.modules()}
    attention = {type(module).__name__ for module in found.breaks}
    assert {kind for kind in kinds if kind.endswith("Attention")} == attention


def test_layers_that_do_not_run_are_left_out():
    model = tiny_models.build("Llama", transformers)
    model.config.num_hidden_layers = 1
    assert find_inner(model).layers == (model.model.layers[0],)


@pytest.mark.parametrize(("how", "breaks"), [("eager", 4), ("grouped_mm", 2), ("batched_mm", 2)])
def test_experts_that_wait_for_the_gpu_are_breaks(how, breaks):
    model = tiny_models.build("Qwen3-MoE", transformers)
    model.set_experts_implementation(how)
    found = find_inner(model)
    assert len(found.breaks) == breaks
    for layer in found.layers:
        assert breaks_of(found, layer) == (layer.self_attn, *((layer.mlp.experts,) if breaks == 4 else ()))


@pytest.mark.parametrize("name", ["GPT-2", "Mixtral", "BERT", "Mamba", "T5", "Gemma-3"])
def test_another_model_is_not_guessed(models, name):
    model = models(name)
    with pytest.raises(InnerNotFoundError, match=r"no finder is registered.*\n.*inner='model'.*register_finder") as e:
        find_inner(model)
    assert type(model).__name__ in str(e.value)


def test_wrappers_are_named(models):
    with pytest.raises(InnerNotFoundError, match=r"the module that it wraps \(\._orig_mod\)"):
        find_inner(torch.compile(models("Llama")))
    with pytest.raises(InnerNotFoundError, match=r"wraps \(\.module\)"):
        find_inner(nn.DataParallel(models("Llama")))


def test_subclasses_have_the_finder_unless_they_run_otherwise(models):
    model = models("Llama")
    config = model.config

    class Same(type(model)):
        pass

    class Other(type(model)):
        def forward(self, *args, **kwargs):
            return super().forward(*args, **kwargs)

    assert len(find_inner(Same(config)).breaks) == 2
    with pytest.raises(InnerNotFoundError, match="it defines forward anew"):
        find_inner(Other(config))


class Attention(nn.Module):
    def forward(self, x):
        return x


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.mixer, self.mlp = Attention(), nn.Linear(4, 4)

    def forward(self, x):
        return self.mlp(self.mixer(x))


class Mine(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Linear(4, 4), nn.Linear(4, 4)
        self.stack = nn.Sequential(Block(), Block(), Block())

    def forward(self, x):
        return self.head(self.stack(self.embed(x)))


def test_any_module_by_argument():
    model = Mine()
    mixers = tuple(block.mixer for block in model.stack)
    for inner in ("stack", model.stack):
        for breaks in ([Attention], mixers, ["0.mixer", "1.mixer", "2.mixer"], [mixers[2], Attention]):
            found = find_inner(model, inner=inner, breaks=breaks)
            assert (found.module, found.name, found.layers, found.breaks) == (model.stack, "stack", (), mixers)
    assert find_inner(model, inner="stack", breaks=[]).breaks == ()
    found = find_inner(model, inner=model, layers=["stack.2", model.stack[0]], breaks=["stack.0.mixer"])
    assert (found.name, found.layers, found.breaks) == ("", (model.stack[2], model.stack[0]), (mixers[0],))
    assert [breaks_of(found, layer) for layer in found.layers] == [(), (mixers[0],)]


def test_breaks_of_a_finder_can_be_replaced(models):
    model = models("Qwen3-MoE")
    found = find_inner(model, breaks=[type(model.model.layers[0].mlp), "layers.1.self_attn"])
    assert found.layers == tuple(model.model.layers)
    assert found.breaks == (*(m for layer in found.layers for m in (layer.self_attn, layer.mlp)),)[1:]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"inner": "stack"}, r"without breaks=.*breaks=\[\] for one graph"),
        ({"layers": ["stack.0"]}, "without inner="),
        ({"inner": "stakc", "breaks": []}, "inner: stakc is no module inside Mine"),
        ({"inner": "stack", "breaks": ["3.mixer"]}, "breaks: 3.mixer is no module inside Sequential"),
        ({"inner": "stack", "breaks": "0.mixer"}, "need a list of names"),
        ({"inner": "stack", "breaks": [nn.Conv1d]}, "breaks: Conv1d is no module"),
        ({"inner": "stack", "breaks": [Attention()]}, "breaks: Attention is no module"),
        ({"inner": nn.Linear(2, 2), "breaks": []}, "inner: Linear is no module inside Mine"),
        ({"inner": "stack", "layers": [], "breaks": []}, "captures nothing"),
        ({"inner": "stack", "layers": ["0"], "breaks": ["1.mixer"]}, "no part of what is captured"),
        ({"inner": "stack", "breaks": ["0", "0.mixer"]}, "Attention lies inside the break Block"),
        ({"inner": "stack", "layers": ["0"], "breaks": ["0"]}, "nothing would be captured of it"),
        ({"inner": "stack", "breaks": [""]}, "nothing would be captured of it"),
    ],
)
def test_wrong_arguments_say_what_is_wrong(arguments, says):
    with pytest.raises(InputError, match=says):
        find_inner(Mine(), **arguments)


def test_a_finder_can_be_registered_for_a_class_or_its_name():
    model = Mine()
    with pytest.raises(InnerNotFoundError):
        find_inner(model)
    register_finder(Mine, lambda each: Inner(each.stack, "stack", tuple(each.stack), ()))
    assert find_inner(model).layers == tuple(model.stack)
    register_finder(f"{__name__}.Mine", lambda each: Inner(each.stack, "stack", (each.stack[0],), ()))
    assert find_inner(model).layers == (model.stack[0],)
    assert find_inner(model, breaks=["0.mixer"]).breaks == (model.stack[0].mixer,)
    register_finder(Mine, lambda each: each.stack)
    with pytest.raises(InputError, match=r"finder of .*Mine returned a Sequential; need an Inner"):
        find_inner(model)
    register_finder(Mine, lambda each: Inner(nn.Linear(1, 1), "", (), ()))
    with pytest.raises(InputError, match=r"inner module \(Linear\) is no part of Mine"):
        find_inner(model)


def test_a_model_can_say_it_itself():
    class Own(Mine):
        def __fp4dispatch_inner__(self):
            return Inner(self.stack, "stack", tuple(self.stack), (self.stack[1].mixer,))

    assert find_inner(Own()).breaks[0] is not None
    model = Own()
    assert find_inner(model).breaks == (model.stack[1].mixer,)


def test_a_class_that_changed_is_refused(models):
    model = Mine()
    for arguments, says in (
        (("stack", "layers", "mixer"), "no module 'layers'"),
        (("", "stack", "mixer"), "stack is a Sequential, not a ModuleList"),
        (("model", "layers"), "no module 'model'"),
    ):
        register_finder(Mine, by_attributes(*arguments))
        with pytest.raises(InnerNotFoundError, match=rf"(?s){says}.*register a finder"):
            find_inner(model)
    model.stack = nn.ModuleList(model.stack)
    register_finder(Mine, by_attributes("", "stack", "mixer", count="num_hidden_layers"))
    with pytest.raises(InnerNotFoundError, match="config has no number num_hidden_layers"):
        find_inner(model)
    register_finder(Mine, by_attributes("", "stack", "mixer"))
    assert len(find_inner(model).breaks) == 3


@pytest.mark.parametrize("wrong", [(3, by_attributes("", "x")), ("Mine", by_attributes("", "x")), (int, print)])
def test_wrong_registrations_are_refused(wrong):
    with pytest.raises(InputError, match="cls="):
        register_finder(*wrong)
    with pytest.raises(InputError, match="finder="):
        register_finder(Mine, "model")
    with pytest.raises(InputError, match="model is a str"):
        find_inner("model")


def test_transformers_is_not_imported_for_it():
    code = "import sys, fp4dispatch.graphs.finder; assert 'transformers' not in sys.modules, 'imported'"
    subprocess.run([sys.executable, "-c", code], check=True)
