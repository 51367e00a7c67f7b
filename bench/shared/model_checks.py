"""What must hold for a model of any architecture: right results, no layer lost, the same after saving."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import fp4dispatch
from bench.shared.tiny_inputs import Inputs, difference, inputs_of, output
from bench.shared.tiny_models import NotBuiltError, tiny_models
from fp4dispatch import formats
from fp4dispatch.errors import Fp4DispatchError
from fp4dispatch.integrations.transformers import Fp4DispatchConfig, adopt
from fp4dispatch.models.quantized_linear import QuantizedLinear

FORMATS = {"nvfp4": 0.15, "fp8_row": 0.05}
"""Format -> relative error that rounding may cost the weights of a layer; normal ones lose 0.10 and 0.03."""
BOUND = 2e-2
"""Relative error against the same model with dequantised weights: one wrong scale or row is far beyond it."""
FUSED_BOUND = 5e-3
"""Of fused layers against separate ones: they differ in the order of sums."""
GENERATES = ("input_ids", "input_features", "input_values", "pixel_values", "attention_mask")
OUTCOMES = ("ok", "no forward", "refused", "not built", "stopped", "wrong")


class WrongError(Exception):
    """A check found something wrong; the text says what."""


@dataclass
class Outcome:
    """What came of one class. ``checks`` has what each check said; ``errors`` the relative error by format."""

    type: str
    cls: str
    outcome: str = "ok"
    why: str = ""
    linears: int = 0
    layers: int = 0
    errors: dict[str, float] = field(default_factory=dict)
    checks: dict[str, str] = field(default_factory=dict)

    def note(self, outcome: str, why: str) -> None:
        """Keep the worst outcome and the first reason of it."""
        if OUTCOMES.index(outcome) > OUTCOMES.index(self.outcome):
            self.outcome, self.why = outcome, why

    def row(self) -> dict[str, Any]:
        """Return plain data."""
        return asdict(self)


Replace = Callable[..., Any]


@dataclass
class Case:
    """A tiny model, its inputs (None: no forward), and what quantises a copy of it."""

    model: nn.Module
    inputs: Inputs | None
    replace: Replace
    done: Outcome

    def quantised(self, fmt: str, **options: Any) -> tuple[nn.Module, Any]:
        """Return a quantised copy and the report."""
        made = copy.deepcopy(self.model)
        return made, self.replace(made, fmt, **options)

    def same(self, got: nn.Module, want: nn.Module) -> None:
        """Raise where two models do not give the same bits; without a forward their tensors are compared."""
        if self.inputs is None:
            _same_tensors(got.state_dict(), want.state_dict())
            return
        a, b = output(got, self.inputs), output(want, self.inputs)
        if not torch.equal(torch.nan_to_num(a), torch.nan_to_num(b)):
            raise WrongError(f"outputs differ by {difference(a, b):.1e}")


def check(model_type: str, name: str, replace: Replace = fp4dispatch.replace_linears) -> Outcome:
    """Build a class tiny and check it; ``replace`` is what quantises."""
    done = Outcome(model_type, name)
    try:
        model, inputs = _runs(model_type, name)
    except NotBuiltError as error:
        done.note("not built", str(error))
        return done
    if inputs is None:
        done.note("no forward", "no inputs by the rules")
    done.linears = sum(isinstance(module, nn.Linear) for module in model.modules())
    case = Case(model, inputs, replace, done)
    for fmt in FORMATS:
        _step(done, fmt, lambda fmt=fmt: computes(case, fmt))
    if done.layers:
        _step(done, "fuse", lambda: fuses(case))
        _step(done, "state_dict", lambda: loads_its_state(case))
        _step(done, "generate", lambda: generates(case))
        with tempfile.TemporaryDirectory() as folder:
            saved(case, Path(folder))
    elif done.outcome == "ok":
        done.why = "no layer that can be replaced"
    return done


def _runs(model_type: str, name: str) -> tuple[nn.Module, Inputs | None]:
    """Return the first tiny model with a forward, else the first one."""
    first: nn.Module | None = None
    for model in tiny_models(model_type, name):
        if (inputs := inputs_of(model)) is not None:
            return model, inputs
        first = model if first is None else first
    assert first is not None, "tiny_models raises where there is none"
    return first, None


def _step(done: Outcome, name: str, does: Callable[[], str]) -> bool:
    """Run one check; return whether it went through."""
    try:
        done.checks[name] = does()
        return True
    except Fp4DispatchError as error:
        done.checks[name] = f"refused: {_first_line(error)}"
        done.note("refused", f"{name}: {_first_line(error)}")
    except WrongError as error:
        done.checks[name] = f"wrong: {error}"
        done.note("wrong", f"{name}: {error}")
    except Exception as error:  # of any kind: what is not one of our errors is wrong
        done.checks[name] = f"not an error of ours: {_first_line(error)}"
        done.note("wrong", f"{name}: not an error of ours: {_first_line(error)}")
    return False


def _first_line(error: BaseException) -> str:
    lines = str(error).splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"[:300]


def computes(case: Case, fmt: str) -> str:
    """Check that every linear layer is replaced or named, and that the model computes with the stored weights."""
    model, report = case.quantised(fmt, activation="bf16")
    case.done.layers = max(case.done.layers, len(report.layers))
    replaced = dict(_quantised_layers(model))
    named = {layer.name for layer in report.layers} | {name for name, _ in report.skipped}
    linears = [name for name, module in case.model.named_modules() if isinstance(module, nn.Linear)]
    if lost := [name for name in linears if name not in named and name not in replaced]:
        raise WrongError(f"neither replaced nor named in the report: {', '.join(lost[:3])}")
    if case.inputs is None or not report.layers:
        return f"{len(report.layers)} layers, no forward"
    error = difference(output(model, case.inputs), output(dequantised(case.model, model, FORMATS[fmt]), case.inputs))
    case.done.errors[fmt] = error
    if not error <= BOUND:
        raise WrongError(f"relative error {error:.1e} against dequantised weights, bound {BOUND}")
    return "ok"


def _quantised_layers(model: nn.Module) -> Iterator[tuple[str, QuantizedLinear]]:
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, QuantizedLinear):
            yield name, module


@torch.no_grad()
def dequantised(original: nn.Module, quantised: nn.Module, bound: float) -> nn.Module:
    """Return a copy of the original with the stored weights, which are those of the original within ``bound``."""
    made = copy.deepcopy(original)
    done: set[int] = set()
    for name, layer in _quantised_layers(quantised):
        linear: Any = made.get_submodule(name)
        if id(linear) not in done:
            done.add(id(linear))
            weight = stored(layer).to(linear.weight.dtype)
            error = difference(weight.flatten(), linear.weight.flatten())
            if not error <= bound:
                raise WrongError(f"{name}: relative error of the stored weights is {error:.2f}, bound {bound}")
            linear.weight = nn.Parameter(weight, requires_grad=False)
    return made


def stored(layer: Any) -> Tensor:
    """Return what the stored tensors of a layer mean, float32 [N, K]."""
    weights = layer.weights(lend=False)
    if weights.op == "fp8_gemm":
        return formats.fp8_dequantize(weights.weight, weights.scale, weights.scaling)
    scale = torch.repeat_interleave(weights.global_scale, torch.tensor(weights.shard_rows))
    return formats.nvfp4_dequantize(weights.weight, weights.scale, scale)


def fuses(case: Case) -> str:
    """Check that fused projections give what separate ones give, under the same names."""
    fused, report = case.quantised("nvfp4", activation="bf16", fuse=True)
    count = len(report.fusing.fused)
    separate, _ = case.quantised("nvfp4", activation="bf16")
    if set(fused.state_dict()) != set(separate.state_dict()):
        raise WrongError("state_dict has other names")
    if case.inputs is not None and count:
        error = difference(output(fused, case.inputs), output(separate, case.inputs))
        if not error <= FUSED_BOUND:
            raise WrongError(f"differs from separate layers by {error:.1e}, bound {FUSED_BOUND}")
    return f"{count} fused"


@torch.no_grad()
def loads_its_state(case: Case) -> str:
    """Check that a model with other weights becomes the same by ``load_state_dict``."""
    first, _ = case.quantised("nvfp4")
    other = copy.deepcopy(case.model)
    for parameter in other.parameters():
        if parameter.is_floating_point():
            parameter.add_(torch.randn_like(parameter) * 0.01)
    case.replace(other, "nvfp4")
    other.load_state_dict(copy.deepcopy(first.state_dict()))
    case.same(other, first)
    return "ok"


def generates(case: Case) -> str:
    """Check that a model which generates still does."""
    can = getattr(case.model, "can_generate", bool)
    given = {key: value for key, value in (case.inputs or {}).items() if key in GENERATES}
    if not can() or not given:
        return "does not generate"
    try:
        _generated(case.model, given)
    except Exception as error:  # of any kind: the model as it was
        return f"Transformers itself: {_first_line(error)}"
    _generated(case.quantised("nvfp4")[0], given)
    return "ok"


@torch.no_grad()
def _generated(model: Any, given: Inputs) -> None:
    torch.manual_seed(0)
    model.generate(**copy.deepcopy(given), max_new_tokens=4, do_sample=False)


def saved(case: Case, folder: Path) -> None:
    """Check saving and loading by Transformers, and quantising while loading, if the model itself survives both."""
    model: Any = case.model
    try:
        model.save_pretrained(folder / "plain")
        again, info = _from_pretrained(case, folder / "plain", output_loading_info=True)
        if info.get("missing_keys"):
            raise WrongError(f"missing: {sorted(info['missing_keys'])[:3]}")
        case.same(again.eval(), model)
    except Exception as error:  # of any kind: the model as it was
        case.done.checks["saved"] = f"Transformers itself: {_first_line(error)}"
        return
    _step(case.done, "saved", lambda: _saves(case, folder))
    _step(case.done, "on the fly", lambda: _on_the_fly(case, folder))


def _from_pretrained(case: Case, folder: Path, **options: Any) -> Any:
    cls: Any = type(case.model)
    return cls.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32, **options)


def _saves(case: Case, folder: Path) -> str:
    quantised: Any = case.quantised("nvfp4")[0]
    adopt(quantised)
    quantised.save_pretrained(folder / "adopted")
    case.same(_from_pretrained(case, folder / "adopted").eval(), quantised)
    return "ok"


def _on_the_fly(case: Case, folder: Path) -> str:
    loaded = _from_pretrained(case, folder / "plain", quantization_config=Fp4DispatchConfig("nvfp4")).eval()
    case.same(loaded, case.quantised("nvfp4")[0])
    return "ok"


def _same_tensors(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    if got.keys() != want.keys():
        raise WrongError(f"state_dict has other names: {sorted(got.keys() ^ want.keys())[:3]}")
    for name, tensor in want.items():
        if got[name].shape != tensor.shape or _bits(got[name]) != _bits(tensor):
            raise WrongError(f"{name} has other values")


def _bits(tensor: Tensor) -> bytes:
    flat = tensor.detach().contiguous().reshape(-1)
    return bytes(flat.view(torch.uint8).numpy()) if flat.numel() else b""
