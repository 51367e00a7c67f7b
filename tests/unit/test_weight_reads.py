"""Which layers are used otherwise than by a call: small cases of each kind, and real models of transformers."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fp4dispatch.models.replace import replace_linears
from fp4dispatch.models.replacing.replaceable import why_left
from fp4dispatch.models.replacing.weight_reads import weight_reads
from tests.tiny_models import build, dia, logits


def helper(x, layer):
    return nn.functional.linear(x, layer.weight)


def caller(x, layer):
    return layer(x)


class Base(nn.Module):
    def __init__(self, slow=False):
        super().__init__()
        self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 16)
        self.many = nn.ModuleList([nn.Linear(16, 16), nn.Linear(16, 16)])
        self.slow = slow


class Direct(Base):
    def forward(self, x):
        return self.a(x.to(self.a.weight.dtype)) + self.b(x)


class Alias(Base):
    def forward(self, x):
        layer = self.a
        w = layer.weight
        return x @ w.T + self.b(x)


class Loop(Base):
    def forward(self, x):
        for i, layer in enumerate(self.many):
            x = x @ layer.weight.T + i
        return self.a(x)


class Comprehension(Base):
    def forward(self, x):
        return sum(x @ layer.weight.T for layer in self.many[:1])


class Getattr(Base):
    def forward(self, x):
        return x @ getattr(getattr(self, "a"), "weight").T  # noqa: B009


class Helper(Base):
    def forward(self, x):
        return helper(x, layer=self.a) + caller(x, self.b)


class Method(Base):
    def forward(self, x):
        return self.product(x, self.a)

    def product(self, x, layer):
        return x @ layer.weight.T


class Property(Base):
    @property
    def chosen(self):
        return self.a if self.slow else self.b

    def forward(self, x):
        return x @ self.chosen.weight.T


class Handed(Base):
    def forward(self, x):
        return torch.nn.utils.fuse_linear_bn_weights(self.a, None, None, None, 0, None, None) if x is None else x


class Asked(Base):
    def forward(self, x):
        return self.a(x) if isinstance(self.a, nn.Linear) else x


class Parameters(Base):
    def forward(self, x):
        return self.a(x.to(next(self.a.parameters()).dtype))


class Named(Base):
    def forward(self, x):
        for name, p in self.many.named_parameters():
            if name.endswith("weight"):
                x = x @ p.t()
        return self.a(x)


class State(Base):
    def forward(self, x):
        state = {name: tensor.float() for name, tensor in self.state_dict().items()}
        return nn.functional.linear(x, weight=state["a.weight"])


class Scaled(Base):
    def forward(self, x):
        scale = next(iter(self.many[0].parameters())).data
        x *= scale.to(x.dtype)
        return self.b(x)


class AsksOnly(Base):
    def forward(self, x):
        first = next(self.parameters())
        for p in self.parameters():
            p.requires_grad = False
        count = sum(p.numel() * p.element_size() for p in self.parameters())
        x = x.to(first.dtype) * count + torch.zeros(16, device=first.device, dtype=next(self.parameters()).dtype) * 2
        return self.a(x) * len(self.state_dict())


class Inherited(Direct):
    pass


class OneDeeper(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = Base()
        self.inner.forward = None

    def forward(self, x):
        return x @ self.inner.many[1].weight.T


class CalledFromOutside(nn.Module):
    """The reading method is not called by its own class."""

    class Inner(Base):
        def kind(self):
            return self.a.weight.dtype

    def __init__(self):
        super().__init__()
        self.inner = self.Inner()

    def forward(self, x):
        return x.to(self.inner.kind())


class Harmless(Base):
    def forward(self, x):
        assert hasattr(self.a, "weight")
        assert self.a.weight is not None
        assert isinstance(self.a.weight, torch.Tensor)
        x = x.to(self.a.weight.device)
        print(self.a.in_features, self.a.bias)
        return self.a(x)

    def reset_parameters(self):
        nn.init.zeros_(self.b.weight)

    def export(self):
        return self.many[0].weight


class Guarded(Base):
    def forward(self, x):
        if self.slow and x is not None:
            return x @ self.a.weight.T
        return self.a(x)


@pytest.mark.parametrize(
    ("model", "read"),
    [
        (Direct(), {"a"}),
        (Alias(), {"a"}),
        (Loop(), {"many.0", "many.1"}),
        (Comprehension(), {"many.0", "many.1"}),
        (Getattr(), {"a"}),
        (Helper(), {"a"}),
        (Method(), {"a"}),
        (Property(), {"a", "b"}),
        (Handed(), {"a"}),
        (Asked(), {"a"}),
        (Parameters(), {"a"}),
        (Named(), {"many.0", "many.1"}),
        (State(), {"a", "b", "many.0", "many.1"}),
        (Scaled(), {"many.0", "many.1"}),
        (AsksOnly(), set()),
        (Inherited(), {"a"}),
        (OneDeeper(), {"inner.many.0", "inner.many.1"}),
        (CalledFromOutside(), {"inner.a"}),
        (Harmless(), set()),
        (Guarded(slow=True), {"a"}),
        (Guarded(slow=False), set()),
    ],
    ids=lambda value: type(value).__name__,
)
def test_reads_are_found_and_nothing_else(model, read):
    found = weight_reads(model)
    assert {name for name, module in model.named_modules() if id(module) in found} == read


def test_the_reason_names_the_place():
    model = Direct()
    assert weight_reads(model)[id(model.a)] == (
        "Direct.forward reads self.a.weight.dtype, which a quantised layer cannot serve"
    )


def test_without_source_the_names_in_the_code_decide():
    space: dict = {"Base": Base}
    exec(
        "class Blind(Base):\n"
        "    def forward(self, x):\n        return x @ self.a.weight.T + self.many[0](x)\n"
        "class Plain(Base):\n"
        "    def forward(self, x):\n        return self.a(x)\n",
        space,
    )
    blind, plain = space["Blind"](), space["Plain"]()
    assert set(weight_reads(blind)) == {id(blind.a)}
    assert "without source" in weight_reads(blind)[id(blind.a)]
    assert weight_reads(plain) == {}


def test_a_forward_put_on_the_module_is_read_too():
    model = Harmless()
    assert weight_reads(model) == {}

    def forward(self, x):
        return x @ self.a.weight.T

    model.forward = forward.__get__(model)
    assert set(weight_reads(model)) == {id(model.a)}


def test_traced_models_are_read_too():
    class Product(Base):
        def forward(self, x):
            return nn.functional.linear(self.b(self.a(x)), self.a.weight)

    model = torch.fx.symbolic_trace(Product())
    assert set(weight_reads(model)) == {id(model.a)}


READERS = {
    "T5": {"wo"},
    "Mamba": {"x_proj", "dt_proj", "out_proj", "lm_head"},
}
ALL_CALL = ["Llama", "Qwen2", "Qwen3", "Mistral", "Gemma-3 text", "Phi-3", "GPT-2", "OPT", "Falcon", "Bloom", "BERT"]
ALL_CALL += ["Mixtral", "Qwen3-MoE", "DeepSeek-V3", "LLaVA", "Qwen2-VL"]


@pytest.mark.parametrize("name", [*READERS, *ALL_CALL])
def test_models_of_transformers_lose_exactly_the_layers_that_they_read(name):
    transformers = pytest.importorskip("transformers")
    with torch.device("meta"):
        model = build(name, transformers)
    left = why_left(model)
    found = {n.rpartition(".")[2] for n, module in model.named_modules() if id(module) in left}
    assert found == READERS.get(name, set())


def test_generate_of_a_model_that_has_its_own_reads_nothing():
    """Dia's calls methods of Transformers. They hand submodules to accelerate's functions, and read no weight."""
    transformers = pytest.importorskip("transformers")
    with torch.device("meta"):
        assert why_left(dia(transformers)) == {}


def test_a_head_from_a_method_of_transformers_is_followed():
    transformers = pytest.importorskip("transformers")

    class Model(transformers.PreTrainedModel):
        config_class = transformers.LlamaConfig

        def __init__(self, config):
            super().__init__(config)
            self.embed_tokens = nn.Embedding(96, 64)
            self.lm_head = nn.Linear(64, 96, bias=False)

        def forward(self, ids):
            return nn.functional.linear(self.embed_tokens(ids), self.get_output_embeddings().weight)

    made = Model(transformers.LlamaConfig())
    found = why_left(made)
    assert found.keys() == {id(made.lm_head)}
    assert "reads self.get_output_embeddings().weight" in found[id(made.lm_head)]


def test_static_methods_that_get_no_module_read_none():
    """BigBird's ``_create_rand_mask_from_inputs`` slices its first argument, a mask, and hands it to einsum."""
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 96}
    config = transformers.BigBirdConfig(**sizes, attention_type="block_sparse")
    with torch.device("meta"):
        assert why_left(transformers.BigBirdModel(config)) == {}


@pytest.mark.parametrize("name", ["T5", "Mamba", "Falcon"])
def test_what_is_replaced_runs_and_means_the_same(name):
    transformers = pytest.importorskip("transformers")
    model = build(name, transformers, torch.bfloat16)
    before = logits(model)
    report = replace_linears(model, "fp8_row")
    assert report.layers
    assert torch.nn.functional.cosine_similarity(logits(model), before, dim=-1).min() > 0.99


def test_a_model_that_multiplies_all_its_parameters_keeps_them():
    transformers = pytest.importorskip("transformers")

    class Decayed(transformers.LlamaForCausalLM):
        def forward(self, *args, **kwargs):
            out = super().forward(*args, **kwargs)
            for name, weight in self.model.layers[0].mlp.named_parameters():  # to the scan: of any layer
                if name == "up_proj.weight":
                    out.logits = out.logits * (weight * weight).sum()
            return out

    model = Decayed(build("Llama", transformers).config).eval()
    before = logits(model)
    skipped = dict(replace_linears(model, "fp8_row").skipped)
    mlp = [f"model.layers.{i}.mlp.{name}_proj" for i in (0, 1) for name in ("gate", "up", "down")]
    assert [name for name in skipped if name != "lm_head"] == mlp
    assert "forward computes weight * weight" in skipped[mlp[0]]
    assert torch.nn.functional.cosine_similarity(logits(model), before, dim=-1).min() > 0.99
    assert 0.9 < float(logits(model).norm() / before.norm()) < 1.1
