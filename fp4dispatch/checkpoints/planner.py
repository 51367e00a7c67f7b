"""Decide where every tensor of a checkpoint goes in a model. It reads headers only and changes nothing."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from fp4dispatch.checkpoints.config.foreign import misfit, unsupported_layer, unsupported_slot
from fp4dispatch.checkpoints.config.patterns import shard_names
from fp4dispatch.checkpoints.config.quant_config import LINEAR, QuantConfig
from fp4dispatch.checkpoints.config.readers import Group
from fp4dispatch.checkpoints.files.reader import FLOATS, TORCH_DTYPES, Checkpoint, TensorInfo
from fp4dispatch.checkpoints.hf_names import cannot_convert, names_in, never_stored
from fp4dispatch.checkpoints.kv_cache import KV_CACHE_SUFFIXES
from fp4dispatch.checkpoints.plan import ConversionPlan, LayerPlan, Plan, Shard, SlotPlan, linears, places
from fp4dispatch.checkpoints.schemes import Scheme, detect
from fp4dispatch.errors import CheckpointError
from fp4dispatch.models.quantized_linear import QuantizedLinear
from fp4dispatch.models.replacing.replaceable import sizes, why_left
from fp4dispatch.problem import Activation
from fp4dispatch.problem.measurement import EXACTNESS


def plan_load(model: nn.Module, checkpoint: Checkpoint, config: QuantConfig | None, *, strict: bool) -> Plan:
    """Match a model with a checkpoint.

    Raises
    ------
    CheckpointError
        A tensor that is missing, of another shape or dtype than its place needs, or at odds with the configuration;
        tensors of the checkpoint that have no place (``strict``); nothing quantised at all.
    """
    return _Planner(model, checkpoint, config, strict).plan()


class _Planner:
    def __init__(self, model: nn.Module, checkpoint: Checkpoint, config: QuantConfig | None, strict: bool) -> None:
        self.model = model
        self.checkpoint = checkpoint
        self.config = config
        self.strict = strict
        self.out = Plan()
        self.used: set[str] = set()
        """Used tensors, by their names in the checkpoint. All other names here are names in the model."""
        self.names = names_in(model, checkpoint)
        self.stored = {name: checkpoint[source] for name, source in self.names.stored.items()}
        self.below: dict[str, dict[str, TensorInfo]] = defaultdict(dict)
        for name, info in self.stored.items():
            parent, _, last = name.rpartition(".")
            self.below[parent][last] = info
        self.left = why_left(model)
        self.computed = never_stored(model)
        self.kept: dict[str, str] = {}
        """Name of the layer by the names of its weight."""
        self.converted: dict[str, tuple[ConversionPlan, torch.Tensor]] = {}

    def plan(self) -> Plan:
        replaced: set[int] = set()
        fused: dict[str, tuple[TensorInfo, ...]] = {}
        for names, module in linears(self.model):
            if self._quantised(names, module):
                if id(module) in self.left:
                    self.kept |= {f"{name}.weight": names[0] for name in names}
                else:
                    replaced.add(id(module))
            else:
                self.out.excluded.append(names[0])
                fused |= self._fused_sources(names, module)
        if isinstance(self.model, (nn.Linear, QuantizedLinear)):
            raise CheckpointError(
                f"{self.checkpoint.path}: the model is itself a linear layer and cannot be replaced in place: put it "
                "into a module (torch.nn.ModuleDict) under the name that the checkpoint has, or use load_state_dict"
            )
        if not self.out.layers:
            raise CheckpointError(
                f"{self.checkpoint.path}: no quantised tensors for any of the model's {len(self.out.excluded)} linear "
                "layers: expected a ModelOpt, compressed-tensors or FP8 checkpoint of this model; to quantise a model "
                "that is in memory use fp4dispatch.replace_linears, for a directory `fp4dispatch quantize`"
            )
        self._convert()
        for names, slots, old, persistent in places(self.model, replaced):
            self._slot(names, slots, old, persistent, fused)
        for layer in self.out.layers:
            if layer.keep and layer.names[0] not in self.out.kept:
                raise CheckpointError(
                    f"{self.checkpoint.path}: layer {layer.names[0]!r} is stored quantised, but the model's layer "
                    f"{layer.keep}, and has no parameter called weight to dequantise it into: load into a model with a "
                    "plain nn.Linear there"
                )
        self._leftovers()
        return self.out

    def _quantised(self, names: tuple[str, ...], module: nn.Linear | QuantizedLinear) -> bool:
        """Plan a layer that the checkpoint stores quantised. Return False for other layers."""
        stored = self._stored_names(names)
        for name in stored:
            unsupported = unsupported_layer(name, self._kinds(name), str(self.checkpoint.path))
            if unsupported:
                raise unsupported
        schemes = {name: detect(self._kinds(name)) for name in stored}
        quantised = [name for name in stored if schemes[name]]
        groups = self._groups(names[0], stored, module)
        for name in stored:
            self._agree_on_whether(name, bool(schemes[name]), groups[name])
        if not quantised:
            return False
        if len(quantised) < len(stored):
            raise CheckpointError(
                f"{self.checkpoint.path}: layer {names[0]!r} is fused from {', '.join(stored)}; only "
                f"{', '.join(quantised)} are quantised, expected all or none: keep the layers apart in the model"
            )
        chosen = {self._agree_on_scheme(name, schemes[name], groups[name]) for name in stored}
        if len(chosen) > 1:
            raise CheckpointError(
                f"{self.checkpoint.path}: the shards of layer {names[0]!r} are stored as "
                f"{', '.join(sorted(s.name for s in chosen))}; expected one scheme: keep the layers apart in the model"
            )
        self._plan_layer(names, module, chosen.pop(), stored, groups)
        return True

    def _kinds(self, name: str) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Dtypes and shapes of a stored layer's tensors, by name below the layer's; also of ``weight.absmax`` etc."""
        inner = {f"weight.{key}": info for key, info in self.below.get(f"{name}.weight", {}).items()}
        return {key: (info.dtype, info.shape) for key, info in (self.below[name] | inner).items()}

    def _groups(self, module_name: str, stored: tuple[str, ...], module: nn.Module) -> dict[str, Group | None]:
        """Return the configuration group of each stored layer; None if it is not quantised.

        Tools write the names of the file or the names of the modules in memory. Try both.
        """
        if self.config is None:
            return dict.fromkeys(stored)
        plain = isinstance(module, QuantizedLinear)  # stands where an nn.Linear stood
        classes = LINEAR if plain else tuple(c.__name__ for c in type(module).__mro__ if issubclass(c, nn.Module))
        found: dict[str, Group | None] = {}
        for name in stored:
            known = dict.fromkeys((self.names.module_in_file(name), name))
            excluded = any(self.config.excludes(n, classes) for n in (*known, module_name))
            each = (None if excluded else self.config.group_for(n, classes) for n in known)
            found[name] = next((group for group in each if group is not None), None)
        return found

    def _stored_names(self, names: tuple[str, ...]) -> tuple[str, ...]:
        """Names under which the checkpoint stores a layer: its own, or those of its shards."""
        for name in names:
            if self.below.get(name):
                return (name,)
        for name in names:
            shards = shard_names(name)
            there = [shard for shard in shards if self.below.get(shard)]
            if there and len(there) < len(shards):
                absent = next(s for s in shards if s not in there)
                raise CheckpointError(
                    f"{self.checkpoint.path}: layer {name!r} is fused from {', '.join(shards)}; tensor "
                    f"'{absent}.weight' is missing: expected all of them"
                )
            if there:
                return shards
        return ()

    def _agree_on_whether(self, name: str, quantised: bool, group: Group | None) -> None:
        if self.config is None:
            return
        expected = group is not None
        if quantised == expected or not (quantised or self.config.names_all):
            return
        if not quantised and not self.strict:
            self.out.unquantised.append(name)
            return
        found = ", ".join(f"{k} {i}" for k, i in sorted(self.below[name].items()))
        raise CheckpointError(
            f"{self.config.source}: says that {name!r} is {'' if expected else 'not '}quantised, but "
            f"{self.checkpoint.path} holds {found}: configuration and tensors do not belong together"
        )

    def _agree_on_scheme(self, name: str, candidates: tuple[Scheme, ...], group: Group | None) -> Scheme:
        if self.config is None:
            return candidates[0]
        expected = group.schemes if group else ()
        for scheme in candidates:
            if scheme.name in expected:
                return scheme
        raise CheckpointError(
            f"{self.config.source}: says that {name!r} is stored as {' or '.join(expected)}, but the tensors in "
            f"{self.checkpoint.path} are {' or '.join(s.name for s in candidates)}: they do not belong together"
        )

    def _plan_layer(
        self,
        names: tuple[str, ...],
        module: nn.Linear | QuantizedLinear,
        scheme: Scheme,
        stored: tuple[str, ...],
        groups: dict[str, Group | None],
    ) -> None:
        n, k = sizes(module)
        shards = tuple(self._shard(name, scheme, n if len(stored) == 1 else None, k, groups[name]) for name in stored)
        total = sum(shard.rows for shard in shards)
        if total != n:
            raise CheckpointError(
                f"{self.checkpoint.path}: {', '.join(stored)} have {' + '.join(str(s.rows) for s in shards)} = {total} "
                f"rows, expected the {n} of the model's {names[0]!r}: the checkpoint is of another model"
            )
        keep = self.left.get(id(module), "")
        bias: list[TensorInfo] = []
        if module.bias is not None and not keep:  # a layer that is kept has its bias filled as it is
            for shard in shards:
                info = self._take(f"{shard.name}.bias")
                if info is not None:
                    _expect_like(info, (shard.rows,), torch.float32, "the checkpoint is damaged: the weight fits")
                    bias.append(info)
        if bias and len(bias) < len(shards):
            raise CheckpointError(
                f"{self.checkpoint.path}: only some shards of {names[0]!r} have a bias: "
                f"{', '.join(info.name for info in bias)}; expected all or none: fetch or export the checkpoint again"
            )
        activation = _finest(_activation(scheme, shard, groups[shard.name]) for shard in shards)
        self.out.layers.append(LayerPlan(names, module, scheme, shards, tuple(bias), activation, keep))

    def _shard(self, name: str, scheme: Scheme, n: int | None, k: int, group: Group | None) -> Shard:
        weight = self.below[name].get(scheme.weight)
        if n is None and weight is not None and weight.shape:
            n = weight.shape[0]
        if scheme.op == "nvfp4_gemm" and k % 16:
            raise CheckpointError(
                f"{self.checkpoint.path}: layer {name!r}: the model's K={k} is not a multiple of 16, as NVFP4 needs: "
                "the checkpoint is of another model"
            )
        tensors = {}
        for suffix, spec in scheme.specs(n or 0, k).items():
            full = f"{name}.{suffix}"
            info = self.below[name].get(suffix)
            static = group.static if group and suffix == scheme.input_scale else None
            if info is not None and static is False:  # left from calibration: the configuration decides
                self.used.add(info.name)
                self.out.ignored.append(info.name)
            elif info is not None:
                if info.dtype not in spec.dtypes or info.shape not in spec.shapes:
                    raise misfit(info, spec, scheme, self._kinds(name), (n or 0, k))
                tensors[suffix] = info
                self.used.add(info.name)
            elif spec.required or static:
                raise CheckpointError(
                    f"{self.checkpoint.path}: tensor {full!r} is missing: expected {spec} ({scheme.name}); the "
                    "checkpoint is incomplete: fetch or export it again"
                )
        return Shard(name, tensors, n or 0)

    def _fused_sources(
        self, names: tuple[str, ...], module: nn.Linear | QuantizedLinear
    ) -> dict[str, tuple[TensorInfo, ...]]:
        """Sources of a fused layer that is not quantised: its shards' tensors, by the layer's parameter name."""
        stored = self._stored_names(names)
        if len(stored) < 2:
            return {}
        sources = {}
        for key in ("weight", "bias"):
            infos = [self.below[name][key] for name in stored if key in self.below[name]]
            if len(infos) == len(stored) and getattr(module, key) is not None:
                sources[f"{names[0]}.{key}"] = tuple(infos)
        return sources

    def _take(self, name: str) -> TensorInfo | None:
        info = self.stored.get(name)
        if info is None:
            self.out.missing.append(name)
            return None
        self.used.add(info.name)
        return info

    def _convert(self) -> None:
        """Plan the tensors that transformers converts: find names and shapes of the resulting parameters."""
        for conversion in self.names.conversions:
            infos = [self.checkpoint[name] for name in conversion.sources]
            odd = next((i for i in infos if i.dtype not in FLOATS), None)
            try:
                if odd is not None:
                    raise CheckpointError(
                        f"{odd.file}: tensor {odd.name!r} is {odd}, and the model holds it in {conversion.name!r}: "
                        f"only 16- and 32-bit floats can be put there; {cannot_convert(conversion.name)}"
                    )
                made = conversion.run(lambda name: self.checkpoint[name].on_meta())
            except CheckpointError:
                if self.strict:
                    raise
                continue  # reported: the tensors as unexpected, the parameters as missing
            plan = ConversionPlan(conversion)
            self.converted |= {name: (plan, tensor) for name, tensor in made.items()}
            self.out.conversions.append(plan)

    def _converted_slot(self, name: str, slot: SlotPlan) -> None:
        plan, made = self.converted[name]
        if tuple(made.shape) != tuple(slot.old.shape):
            raise CheckpointError(
                f"{self.checkpoint.path}: {', '.join(plan.conversion.sources[:3])} ... make {list(made.shape)}, "
                f"expected {list(slot.old.shape)} for {name!r}: the checkpoint is of another model"
            )
        self.used.update(plan.conversion.sources)
        plan.targets[name] = slot

    def _slot(
        self,
        names: tuple[str, ...],
        slots: tuple[tuple[dict[str, Any], str], ...],
        old: torch.Tensor,
        persistent: bool,
        fused: dict[str, tuple[TensorInfo, ...]],
    ) -> None:
        kept = next((self.kept[name] for name in names if name in self.kept), "")
        if kept:
            self.out.kept[kept] = SlotPlan(names, slots, old, ())
            return
        converted = next((name for name in names if name in self.converted), "")
        if converted:
            self._converted_slot(converted, SlotPlan(names, slots, old, ()))
            return
        sources = next((fused[name] for name in names if name in fused), ())
        there = [self.stored[name] for name in names if name in self.stored]
        if not sources and there:
            sources = (there[0],)
            self.used.update(info.name for info in there)
        self.used.update(info.name for info in sources)
        if sources:
            rows = sum(info.shape[0] if info.shape else 1 for info in sources)
            for info in sources:
                shape = tuple(old.shape) if len(sources) == 1 else (info.shape[:1] + tuple(old.shape)[1:])
                _expect_like(info, shape, old.dtype)
            if len(sources) > 1 and rows != old.shape[0]:
                raise CheckpointError(
                    f"{self.checkpoint.path}: {', '.join(i.name for i in sources)} have {rows} rows, expected "
                    f"{old.shape[0]} for {names[0]!r}: the checkpoint is of another model"
                )
            self.out.slots.append(SlotPlan(names, slots, old, sources))
        elif persistent:
            # Tables that the model computes, and does not save. A learned parameter must come from somewhere.
            if old.is_meta or old.requires_grad or self.computed.isdisjoint(names):
                self.out.missing.append(names[0])
        elif old.is_meta and self.strict:
            raise CheckpointError(
                f"buffer {names[0]!r} of the model is on the meta device and no checkpoint stores it: build the model "
                "on the CPU, or only its parameters on meta (accelerate.init_empty_weights(include_buffers=False))"
            )

    def _leftovers(self) -> None:
        # Tensors that transformers ignores, e.g. the multi-token prediction layers of DeepSeek-V3.
        known = getattr(self.model, "_keys_to_ignore_on_load_unexpected", None) or ()
        for name in self.checkpoint:
            if name not in self.used:
                kv = name.rpartition(".")[2] in KV_CACHE_SUFFIXES
                left = any(re.search(pattern, name) for pattern in known)
                (self.out.kv_cache if kv else self.out.ignored if left else self.out.unexpected).append(name)
        if not self.strict:
            return
        self.out.refuse_orphans(self.checkpoint, self.names)
        for what, names, why in (
            ("missing", self.out.missing, "the model needs it"),
            ("unexpected", self.out.unexpected, "the model has no place for it"),
        ):
            if names:
                file = self.checkpoint[names[0]].file if what == "unexpected" else self.checkpoint.path
                more = f" (and {len(names) - 1} more: {', '.join(names[1:4])} ...)" if len(names) > 1 else ""
                raise CheckpointError(
                    f"{file}: tensor {names[0]!r}{more} is {what}: {why}; is this a checkpoint of this model? "
                    "strict=False loads what fits and reports the rest"
                )


def _activation(scheme: Scheme, shard: Shard, group: Group | None) -> Activation:
    """Return a layer's activation format. Without a configuration, NVFP4 without input scale is weight-only."""
    if group is not None:
        return group.activation
    return "bf16" if scheme.op == "nvfp4_gemm" and scheme.input_scale not in shard.tensors else "any"


def _finest(activations: Iterable[Activation]) -> Activation:
    """Return the finest activation format of the shards; a fused layer has one format."""
    return max(activations, key=lambda activation: EXACTNESS.get(activation, -1))  # "any" comes last


def _expect_like(info: TensorInfo, shape: tuple[int, ...], dtype: torch.dtype, why: str = "") -> None:
    """Require the shape, and the dtype up to the width of a float (F32, BF16, F16 and F64 convert into each other)."""
    fits = info.dtype in FLOATS if dtype.is_floating_point else TORCH_DTYPES.get(info.dtype) == dtype
    if info.shape == shape and (fits or TORCH_DTYPES.get(info.dtype) == dtype):
        return
    unsupported = unsupported_slot(info, dtype)
    if unsupported:
        raise unsupported
    reason = why or ("the checkpoint is of another model" if info.shape != shape else "the checkpoint is damaged")
    raise CheckpointError(
        f"{info.file}: tensor {info.name!r} is {info}, expected {str(dtype).removeprefix('torch.')} {list(shape)}: "
        f"{reason}"
    )
