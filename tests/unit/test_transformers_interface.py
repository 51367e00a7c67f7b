"""What the integration uses of Transformers is there, and other versions are refused."""

from __future__ import annotations

import importlib.metadata
import inspect
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import fp4dispatch
from fp4dispatch.errors import IntegrationError, PluginError

transformers = pytest.importorskip("transformers")
tomllib = pytest.importorskip("tomllib")
ROOT = Path(__file__).parents[2]


def python(code):
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_it_is_imported_by_name_only():
    code = "import sys, fp4dispatch, fp4dispatch.models.replace, fp4dispatch.checkpoints\n"
    assert (
        python(code + "print([n for n in sys.modules if n.startswith(('transformers', 'fp4dispatch.integ'))])") == "[]"
    )


@pytest.mark.parametrize(
    "how", ["import fp4dispatch.integrations.transformers", "import fp4dispatch; fp4dispatch.register()"]
)
def test_either_way_registers(how):
    code = f"{how}\nfrom transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING as c\n"
    code += "from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING as q\n"
    code += "print(q['modelopt'].__name__, c['fp4dispatch'].__name__)"
    assert python(code) == "Fp4DispatchHfQuantizer Fp4DispatchConfig"


@pytest.mark.parametrize("found", ["4.57.1", "5.22.9", "5.24.0", "5.24.0.dev0", "6.0"])
def test_other_versions_are_refused_and_nothing_is_registered(monkeypatch, found):
    from transformers.quantizers import auto

    from fp4dispatch.integrations import versions
    from fp4dispatch.integrations.transformers import registry

    for mapping in (auto.AUTO_QUANTIZATION_CONFIG_MAPPING, auto.AUTO_QUANTIZER_MAPPING):
        for name in registry.METHODS:
            monkeypatch.delitem(mapping, name, raising=False)
    monkeypatch.setattr(versions, "version", lambda _: found)
    with pytest.raises(IntegrationError, match=rf"transformers {found} is installed.*tested with.*pip install"):
        fp4dispatch.register()
    assert not set(registry.METHODS) & auto.AUTO_QUANTIZER_MAPPING.keys()
    with pytest.raises(ImportError):
        fp4dispatch.register()


def test_it_says_that_transformers_is_not_installed(monkeypatch):
    from fp4dispatch.integrations import versions

    def missing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(versions, "version", missing)
    with pytest.raises(IntegrationError, match="transformers is not installed; need transformers"):
        fp4dispatch.register()


def test_a_name_that_another_package_took_is_left_to_it(monkeypatch):
    from transformers.quantizers import auto

    fp4dispatch.register()
    monkeypatch.setitem(auto.AUTO_QUANTIZER_MAPPING, "modelopt", object)
    with pytest.raises(PluginError, match="'modelopt' is registered to"):
        fp4dispatch.register()


def test_the_versions_are_the_same_everywhere():
    from fp4dispatch.integrations.transformers import SUPPORTED

    with (ROOT / "pyproject.toml").open("rb") as file:
        extras = tomllib.load(file)["project"]["optional-dependencies"]
    (requirement,) = [Requirement(line) for line in extras["transformers"] if line.startswith("transformers")]
    assert requirement.specifier == SUPPORTED
    pins = (ROOT / "constraints.txt").read_text("utf-8").split()
    (pinned,) = [line.removeprefix("transformers==") for line in pins if line.startswith("transformers==")]
    assert SUPPORTED.contains(pinned)


# The interface. A new version of Transformers that changes it fails here, by name.

HOOKS = {
    "validate_environment": ("self", "args", "kwargs"),
    "update_dtype": ("self", "dtype"),
    "update_parallel_plan": ("self", "model", "plan"),
    "preprocess_model": ("self", "model", "dtype", "kwargs"),
    "postprocess_model": ("self", "model", "kwargs"),
    "_process_model_before_weight_loading": ("self", "model", "kwargs"),
    "_process_model_after_weight_loading": ("self", "model", "kwargs"),
    "param_needs_quantization": ("self", "model", "param_name", "kwargs"),
    "get_quantize_ops": ("self",),
    "get_new_dtype": ("self", "converter", "param", "dtype"),
    "update_weight_conversions": ("self", "weight_conversions", "model"),
    "get_state_dict_and_metadata": ("self", "model"),
    "is_serializable": ("self",),
}


@pytest.mark.parametrize("name", HOOKS)
def test_hooks_of_the_quantizer(name):
    from transformers.quantizers.base import HfQuantizer

    from fp4dispatch.integrations.transformers import Fp4DispatchHfQuantizer

    assert tuple(inspect.signature(getattr(HfQuantizer, name)).parameters) == HOOKS[name]
    assert callable(getattr(Fp4DispatchHfQuantizer, name))


def test_hooks_are_called_where_we_need_them():
    from transformers import core_model_loading, modeling_utils

    load = inspect.getsource(modeling_utils.PreTrainedModel.from_pretrained)
    before = load.index("hf_quantizer.preprocess_model(")
    assert "checkpoint_files=checkpoint_files" in load[before : before + 400]
    assert before < load.index("_load_pretrained_model(") < load.index("hf_quantizer.postprocess_model(")
    save = inspect.getsource(modeling_utils.PreTrainedModel.save_pretrained)
    assert "hf_quantizer.get_state_dict_and_metadata(self)" in save
    fill = inspect.getsource(core_model_loading.convert_and_load_state_dict_in_model)
    for used in (
        "param_needs_quantization(model, renamed_key)",
        "get_quantize_ops()",
        "get_new_dtype(mapping, tensor, _dtype)",
    ):
        assert used in fill, used
    convert = inspect.signature(core_model_loading.ConversionOps.convert).parameters
    assert next(iter(list(convert)[1:])) == "input_dict"


def test_registries_and_attributes():
    from transformers.pytorch_utils import Conv1D
    from transformers.quantizers import auto

    assert {"compressed-tensors", "fp8"} <= auto.AUTO_QUANTIZER_MAPPING.keys()
    assert {"compressed-tensors", "fp8"} <= auto.AUTO_QUANTIZATION_CONFIG_MAPPING.keys()
    assert isinstance(auto.LOADING_ATTRIBUTES_CONFIG_TYPES, tuple)
    assert "AUTO_QUANTIZATION_CONFIG_MAPPING[quant_method]" in inspect.getsource(auto.AutoQuantizationConfig.from_dict)
    assert "AUTO_QUANTIZER_MAPPING[quant_method]" in inspect.getsource(auto.AutoHfQuantizer.from_config)
    assert "get_loading_attributes()" in inspect.getsource(auto.AutoHfQuantizer.merge_quantization_configs)
    from tests.transformers_cases import source

    model = source("Gemma-3 text")
    assert model.all_tied_weights_keys == {"lm_head.weight": "model.embed_tokens.weight"}
    assert isinstance(model._keys_to_ignore_on_load_unexpected, set)
    conv = Conv1D(3, 2)
    assert (conv.nf, conv.nx, tuple(conv.weight.shape)) == (3, 2, (2, 3))
