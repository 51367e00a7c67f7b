"""``--fp4-gemm-backend fp4dispatch``: SGLang reads and shards NVFP4 checkpoints, this package multiplies.

SGLang's own linear methods of ModelOpt and compressed-tensors NVFP4 stay. Where the backend is ours, their loaded
tensors become a layer of this package before they take the largest of the shards' global scales.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from types import FunctionType
from typing import Any

from sglang.srt.layers.quantization import fp4_utils, modelopt_quant
from sglang.srt.plugins.hook_registry import HookRegistry, HookType
from torch import Tensor

from fp4dispatch.checkpoints.config.readers import OWN_METHOD
from fp4dispatch.checkpoints.schemes import SCHEMES, Scheme
from fp4dispatch.errors import CheckpointUnsupportedError, IntegrationError
from fp4dispatch.integrations.engines.parameters import loaded
from fp4dispatch.integrations.engines.shards import weights_of_shards
from fp4dispatch.integrations.sglang import layers

_ENUM = f"{fp4_utils.__name__}.Fp4GemmRunnerBackend"
_SCHEMES = f"{modelopt_quant.__name__.rpartition('.')[0]}.compressed_tensors.schemes"
_W4A4, _W4A16 = "compressed_tensors_w4a4_nvfp4", "compressed_tensors_w4a16_nvfp4"
_METHODS = (
    (f"{modelopt_quant.__name__}.ModelOptFp4LinearMethod", "apply", "modelopt-nvfp4"),
    (f"{modelopt_quant.__name__}.ModelOptNvFp4A16LinearMethod", "apply", "modelopt-nvfp4"),
    (f"{_SCHEMES}.{_W4A4}.CompressedTensorsW4A4Fp4", "apply_weights", "nvfp4-pack-quantized"),
    (f"{_SCHEMES}.{_W4A16}.CompressedTensorsW4A16Fp4", "apply_weights", "nvfp4-pack-quantized"),
)
"""SGLang's classes of NVFP4 linear layers, the method that multiplies, and our name of the format."""

_WEIGHT_ONLY = ("ModelOptNvFp4A16LinearMethod", "CompressedTensorsW4A16Fp4")


class _Methods:
    """What our member of the enumeration answers; for the others, what SGLang's answers."""

    value: str

    def is_fp4dispatch(self) -> bool:
        """Whether this is our backend."""
        return self.value == OWN_METHOD

    def supports_swiglu_fusion(self) -> bool:
        """Return False for ours: our layers take activations that are not quantised."""
        return not self.is_fp4dispatch() and bool(self.theirs("supports_swiglu_fusion"))

    def get_flashinfer_backend(self) -> str:
        """Refuse: ours is no backend of FlashInfer."""
        if self.is_fp4dispatch():
            raise IntegrationError(
                "--fp4-gemm-backend fp4dispatch: a layer called FlashInfer's GEMM; only linear layers of ModelOpt and "
                "compressed-tensors NVFP4 checkpoints run on fp4dispatch: take another --fp4-gemm-backend"
            )
        return str(self.theirs("get_flashinfer_backend"))

    def theirs(self, name: str) -> Any:
        """Call the method of SGLang's class."""
        raise NotImplementedError


def extended(old: type[Enum]) -> type[Enum]:
    """Return SGLang's enumeration of backends with ours added. Python does not allow to derive one that has members."""
    functions = {name: f for name, f in vars(old).items() if isinstance(f, FunctionType) and not name.startswith("_")}

    def theirs(self: Any, name: str) -> Any:
        return functions[name](self)

    own = {name: f for name, f in vars(_Methods).items() if isinstance(f, FunctionType)}
    mixin = type("Fp4GemmRunnerBackendMethods", (), {**functions, **own, "theirs": theirs})
    members = {member.name: member.value for member in old} | {OWN_METHOD.upper(): OWN_METHOD}
    new: Any = Enum
    made: type[Enum] = new(old.__name__, members, module=old.__module__, qualname=old.__qualname__, type=mixin)
    return made


def register() -> None:
    """Register the hooks, which SGLang applies after all plug-ins. A second call is harmless."""
    if _ENUM in HookRegistry._hooks:
        return
    HookRegistry.register(_ENUM, extended(fp4_utils.Fp4GemmRunnerBackend), HookType.REPLACE)
    for target, multiply, scheme in _METHODS:
        make = _taking(SCHEMES[scheme], target.rpartition(".")[2] in _WEIGHT_ONLY)
        HookRegistry.register(f"{target}.process_weights_after_loading", make, HookType.AROUND)
        HookRegistry.register(f"{target}.{multiply}", _multiply, HookType.AROUND)


def chosen() -> bool:
    """Whether the server runs with ``--fp4-gemm-backend fp4dispatch``."""
    return bool(fp4_utils.get_fp4_gemm_runner_backend().value == OWN_METHOD)


def _taking(scheme: Scheme, weight_only: bool) -> Callable[..., None]:
    """Return a hook around ``process_weights_after_loading``."""

    def take(original: Callable[..., None], method: Any, layer: Any) -> None:
        if not chosen():
            original(method, layer)
            return
        if getattr(layer, "fp4dispatch", None) is not None:
            return
        label = f"{type(layer).__name__} of {layer.output_size_per_partition} x {layer.input_size_per_partition}"
        if hasattr(layer, "pre_quant_scale"):
            raise CheckpointUnsupportedError(
                f"{label}: NVFP4_AWQ scales its inputs, which is not supported: take another --fp4-gemm-backend"
            )
        tensors = loaded(layer, scheme)
        # On older GPUs SGLang serves W4A4 checkpoints of compressed-tensors weight-only: those have an input scale.
        static = not weight_only or getattr(method, "has_input_global_scale", False)
        weights = weights_of_shards(scheme, tensors, layer.logical_widths, static=static, layer=label)
        layers.put(layer, tuple(tensors), weights, "any" if static else "bf16", label)

    return take


def _multiply(original: Callable[..., Tensor], method: Any, layer: Any, x: Any, bias: Tensor | None = None) -> Tensor:
    if getattr(layer, "fp4dispatch", None) is None:
        return original(method, layer, x, bias)
    return layers.run(layer, x, bias)
