"""Backends for testing the self-check: an honest emulation of a GEMM, honest variants, and one fault each.

The emulation is written apart from the package's reference backend: it multiplies codes, applies scales as kernels do,
and has a hook where each fault is planted. Plain numbers on the CPU.
"""

from __future__ import annotations

import itertools

import torch

from fp4dispatch import formats
from fp4dispatch.backends.activations import quantize_activation
from fp4dispatch.backends.base import Backend, Plan, Prepared, QuantizedActivation

EVERYTHING = {"nvfp4_gemm": ("nvfp4", "fp8", "bf16"), "fp8_gemm": ("fp8", "bf16")}
QUANTISED = {"nvfp4_gemm": ("nvfp4", "fp8"), "fp8_gemm": ("fp8",)}
WEIGHT_ONLY = {"nvfp4_gemm": ("bf16",), "fp8_gemm": ("bf16",)}
TILE = 128


class Honest(Backend):
    """Quantise, multiply the codes in f32, scale the sums, add the bias, round once."""

    name = "planted"
    activations = EVERYTHING
    auto = True

    def supports(self, problem, system):
        return ()

    def prepare(self, w):
        scale = w.scale
        if w.sf_layout == "128x4":
            scale = formats.from_128x4(scale, w.n, w.k // 16)
        alpha = torch.ones(w.n)
        if w.global_scale is not None:
            alpha = self.shard_alpha(w.global_scale, w.shard_rows)
        tensors = (w.weight, self.weight_scale(scale, w), alpha, w.input_scale)
        return Prepared(self.name, tensors, (w.op, w.scaling, w.n, w.k))

    def plan(self, problem, prepared):
        return Plan(self.name, problem, {})

    def run(self, plan, prepared, x, out, bias=None):
        p = plan.problem
        a, a_scale = self.activation(p, x, prepared.tensors[3])
        b, b_scale = self.weight(p, prepared)
        sums = self.multiply(p, a, b)
        self.write(plan, out, self.epilogue(p, sums, a_scale, b_scale, bias))

    # ---- hooks

    def shard_alpha(self, global_scale, shard_rows):
        return formats.expand_shards(global_scale, shard_rows)

    def weight_scale(self, scale, w):
        return scale

    def activation_scale(self, scale, p):
        return scale

    def quantize(self, p, x, input_scale):
        return quantize_activation(x, p.activation, p.scaling, input_scale)

    def activation(self, p, x, input_scale):
        """Return A as it enters the multiplication and what its sums are to be multiplied by."""
        layout = p.sf_layout if isinstance(x, QuantizedActivation) else "linear"
        if isinstance(x, torch.Tensor):
            if p.activation == "bf16":
                return x.float(), torch.ones(p.m)
            x = self.quantize(p, x, input_scale)
        scale = x.scale
        if p.activation == "nvfp4":
            if layout == "128x4":
                scale = formats.from_128x4(scale, p.m, p.k // 16)
            scale = self.activation_scale(scale, p)
            one = torch.ones(())
            alpha = one if x.global_scale is None else x.global_scale
            return formats.nvfp4_dequantize(x.data, scale, one), alpha.expand(p.m)
        scale = self.activation_scale(scale, p)
        if p.scaling == "block128":
            return formats.fp8_dequantize(x.data, scale, "1x128"), torch.ones(p.m)
        return x.data.float(), scale.expand(p.m)

    def weight(self, p, prepared):
        data, scale, alpha, _ = prepared.tensors
        if p.scaling == "nvfp4" and p.activation == "fp8":
            return self.fold(data, scale), alpha * 8
        if p.scaling == "nvfp4":
            return formats.nvfp4_dequantize(data, scale, torch.ones(())), alpha
        if p.scaling == "block128":
            return formats.fp8_dequantize(data, scale, "block128"), alpha
        return data.float(), scale.expand(p.n)

    def fold(self, data, scale):
        """w4a8 as kernels do it: a table of eight e4m3 magnitudes a block, looked up by code."""
        eighths = torch.tensor(formats.E2M1_VALUES, dtype=torch.float16) / 8
        table = (scale.half().unsqueeze(-1) * eighths).to(torch.float8_e4m3fn).float()
        codes = formats.unpack_e2m1(data).view(*scale.shape, 16).long()
        return (table.gather(-1, codes & 7) * torch.where(codes > 7, -1.0, 1.0)).flatten(1)

    def multiply(self, p, a, b):
        return a @ b.t()

    def epilogue(self, p, sums, a_scale, b_scale, bias):
        result = sums * a_scale.reshape(-1, 1) * b_scale.reshape(1, -1)
        return result if bias is None else result + bias.float()

    def write(self, plan, out, result):
        out.copy_(result)


# ------------------------------------------------------------------------------------------------------ honest variants


class ReversedOrder(Honest):
    def multiply(self, p, a, b):
        return a.flip(1) @ b.flip(1).t()


class SplitK(Honest):
    def multiply(self, p, a, b):
        parts = [x @ y.t() for x, y in zip(a.split(96, 1), b.split(96, 1), strict=True)]
        return torch.stack(parts[::-1]).sum(0)


class RoundsTwice(Honest):
    """Rounds the product to the output's dtype and adds the bias after, as an unfused epilogue does."""

    def epilogue(self, p, sums, a_scale, b_scale, bias):
        result = super().epilogue(p, sums, a_scale, b_scale, None).to(getattr(torch, p.out_dtype))
        return result if bias is None else result + bias


class ScalesFirst(Honest):
    def epilogue(self, p, sums, a_scale, b_scale, bias):
        result = sums * (a_scale.reshape(-1, 1) * b_scale.reshape(1, -1))
        return result if bias is None else result + bias.float()


class Rounded16BitWeights(Honest):
    """Dequantises weights to bfloat16 with all scales in: what weight-only kernels multiply."""

    activations = WEIGHT_ONLY

    def multiply(self, p, a, b):
        return a @ b.t()

    def weight(self, p, prepared):
        b, scale = super().weight(p, prepared)
        return (b * scale.reshape(-1, 1)).bfloat16().float(), torch.ones(p.n)


class RoundedScalesToo(Rounded16BitWeights):
    """Rounds twice: block scale x global scale to bfloat16, then the product with the code."""

    def weight(self, p, prepared):
        data, scale, alpha, _ = prepared.tensors
        if p.scaling != "nvfp4":
            return super().weight(p, prepared)
        both = (scale.float() * alpha.reshape(-1, 1)).bfloat16().float()
        codes = formats.decode_e2m1(formats.unpack_e2m1(data))
        return (codes * both.repeat_interleave(16, 1)).bfloat16().float(), torch.ones(p.n)


class ReciprocalQuantizer(Honest):
    """Multiplies by 1 / scale and by 1 / 6, in f32, where the package divides."""

    activations = QUANTISED

    def quantize(self, p, x, input_scale):
        x = x.float()
        if p.activation == "nvfp4":
            scale = x.abs().max() * (1 / 2688) if input_scale is None else input_scale
            blocks = x.unflatten(1, (-1, 16))
            sf = (blocks.abs().amax(-1) * (1 / 6) * (1 / scale)).to(torch.float8_e4m3fn)
            codes = formats.encode_e2m1(blocks * (1 / (sf.float() * scale)).unsqueeze(-1)).flatten(1)
            return QuantizedActivation(formats.pack_e2m1(codes), sf, scale)
        if p.scaling == "block128":
            padded = formats.zero_pad(x, p.m, formats.round_up(p.k, 128)).unflatten(1, (-1, 128))
            scale = padded.abs().amax(-1) * (1 / 448)
            q = (padded * (1 / scale).unsqueeze(-1)).clamp(-448, 448).flatten(1)[:, : p.k]
            return QuantizedActivation(q.to(torch.float8_e4m3fn), scale)
        static = input_scale is not None and p.scaling != "nvfp4"
        scale = input_scale if static else x.abs().amax(1) * (1 / 448)
        q = (x * (1 / scale).reshape(-1, 1)).clamp(-448, 448).to(torch.float8_e4m3fn)
        return QuantizedActivation(q, scale)


class Truncating(Honest):
    """Adds as Hopper's FP8 tensor cores do: 32 products and the running sum, aligned to the largest, 13 bits kept."""

    activations = QUANTISED
    step, toward = 32, staticmethod(torch.trunc)

    def multiply(self, p, a, b):
        m, n = a.shape[0], b.shape[0]
        total = torch.zeros(m, n)
        for x, y in zip(a.split(self.step, 1), b.split(self.step, 1), strict=True):
            addends = torch.cat([x.unsqueeze(1) * y.unsqueeze(0), total.unsqueeze(-1)], -1)
            exponent = torch.frexp(addends.abs().amax(-1, keepdim=True))[1] - 1
            unit = torch.exp2((exponent - 13).float())
            total = (self.toward(addends / unit) * unit).sum(-1)
        return total


class TruncatingDown(Truncating):
    """The same in two's complement: always down, so errors do not cancel."""

    toward = staticmethod(torch.floor)


class TruncatingLong(Truncating):
    step = 64


HONEST = (
    Honest,
    ReversedOrder,
    SplitK,
    RoundsTwice,
    ScalesFirst,
    Rounded16BitWeights,
    RoundedScalesToo,
    ReciprocalQuantizer,
)
TRUNCATING = (Truncating, TruncatingDown, TruncatingLong)

# --------------------------------------------------------------------------------------------------------------- faults

FAULTS: dict[str, type[Honest]] = {}
ONLY_WITH: dict[str, object] = {}


def fault(only=lambda op, scaling, activation: True):
    """Register a fault, and for which kinds of problem it is one."""

    def register(cls):
        FAULTS[cls.__name__] = cls
        ONLY_WITH[cls.__name__] = only
        return cls

    return register


def tiles_of(out):
    starts = itertools.product(range(0, out.shape[0], TILE), range(0, out.shape[1], TILE))
    return [(slice(i, i + TILE), slice(j, j + TILE)) for i, j in starts]


def one_tile(which, value):
    """A backend that never writes one tile (value None), or writes a constant there."""

    class OneTile(Honest):
        def write(self, plan, out, result):
            keep = out.clone()
            out.copy_(result)
            tiles = tiles_of(out)
            tile = tiles[which(len(tiles))]
            out[tile] = keep[tile] if value is None else value

    return OneTile


for label, which in {"first": lambda n: 0, "middle": lambda n: n // 2, "last": lambda n: n - 1}.items():
    for verb, value in {"NeverWrites": None, "WritesZeros": 0.0}.items():
        FAULTS[f"{verb}_{label}"] = one_tile(which, value)
        ONLY_WITH[f"{verb}_{label}"] = lambda *kind: True


@fault()
class NeverWritesAnything(Honest):
    def write(self, plan, out, result):
        pass


@fault()
class WritesOnlyZeros(Honest):
    def write(self, plan, out, result):
        out.zero_()


@fault()
class NeverWritesTheLastTileOfManyRows(Honest):
    """A persistent kernel that loses its last tile, only where there is more than one."""

    def write(self, plan, out, result):
        tiles = tiles_of(out)
        for tile in tiles[: max(len(tiles) - 1, 1)]:
            out[tile] = result[tile].to(out.dtype)


def swapped(scale, i, j):
    order = torch.arange(scale.shape[0])
    order[[i, j]] = order[[j, i]]
    return scale[order]


def weight_swap(i, j):
    class SwapsWeightScales(Honest):
        def weight_scale(self, scale, w):
            return swapped(scale, i, j) if scale.ndim and max(i, j) < scale.shape[0] else scale

    return SwapsWeightScales


def activation_swap(i, j):
    class SwapsActivationScales(Honest):
        def activation_scale(self, scale, p):
            return swapped(scale, i, j) if scale.ndim and max(i, j) < scale.shape[0] else scale

    return SwapsActivationScales


SWAPS = ((0, 1), (3, 4), (7, 15), (10, 42), (60, 124), (126, 127), (5, 133), (127, 128), (130, 131), (0, 135))
for i, j in SWAPS:
    FAULTS[f"SwapsWeightScales_{i}_{j}"] = weight_swap(i, j)
    ONLY_WITH[f"SwapsWeightScales_{i}_{j}"] = lambda op, scaling, act: scaling in ("row", "nvfp4")
    FAULTS[f"SwapsActivationScales_{i}_{j}"] = activation_swap(i, j)
    ONLY_WITH[f"SwapsActivationScales_{i}_{j}"] = lambda op, scaling, act: act in ("fp8", "nvfp4")


@fault(lambda op, scaling, act: scaling == "block128")
class SwapsBlockScales(Honest):
    def weight_scale(self, scale, w):
        return scale.flip(0) if scale.shape[0] > 1 else scale


@fault(lambda op, scaling, act: act == "nvfp4")
class SwapsScalesAlongK(Honest):
    def activation_scale(self, scale, p):
        order = torch.arange(scale.shape[1])
        order[:2] = order[:2].flip(0)
        return scale[:, order]


@fault(lambda op, scaling, act: act == "nvfp4")
class ReadsThePaddingRow(Honest):
    """Takes the scales of the last row from the row after it: padding, zero, where M is ragged."""

    def activation_scale(self, scale, p):
        padded = formats.zero_pad(scale, formats.round_up(p.m, 128), scale.shape[1])
        index = torch.arange(p.m)
        index[-1] = min(p.m, padded.shape[0] - 1)
        return padded[index]


@fault(lambda op, scaling, act: act == "nvfp4")
class ReadsUninitialisedPaddingAlongK(Honest):
    """K/16 padded to 4 with what memory held: zero data times a NaN scale."""

    def multiply(self, p, a, b):
        pad = -(p.k // 16) % 4
        return super().multiply(p, a, b) + (torch.nan if pad else 0.0)


@fault(lambda op, scaling, act: scaling == "nvfp4")
class ReadsGarbagePaddingOfWeights(Honest):
    """Weights padded to 128 rows, the last real row scaled by a padding scale that is not zero."""

    def weight_scale(self, scale, w):
        if w.n % 128 == 0:
            return scale
        garbage = torch.full_like(scale[:1].float(), 448.0).to(scale.dtype)
        return torch.cat([scale[:-1], garbage])


@fault(lambda op, scaling, act: scaling == "nvfp4")
class SwizzledReadAsLinear(Honest):
    def weight_scale(self, scale, w):
        return formats.to_128x4(scale).reshape(-1)[: scale.numel()].view(scale.shape)


@fault(lambda op, scaling, act: scaling == "nvfp4")
class SwapsNibbles(Honest):
    def prepare(self, w):
        made = super().prepare(w)
        data = made.tensors[0]
        return Prepared(self.name, ((data >> 4) | (data << 4), *made.tensors[1:]), made.layout)


def wrong_alpha(factor):
    class WrongAlpha(Honest):
        def epilogue(self, p, sums, a_scale, b_scale, bias):
            return super().epilogue(p, sums * factor, a_scale, b_scale, bias)

    return WrongAlpha


for factor in (2.0, 0.5, 1.25, 0.9, -1.0, 1.06):
    FAULTS[f"WrongAlpha_{factor}"] = wrong_alpha(factor)
    ONLY_WITH[f"WrongAlpha_{factor}"] = lambda *kind: True


def scaled_line(dim, factor):
    class ScalesOneLine(Honest):
        """One row or column is off by little: nearly the scale of another, which no single element gives away."""

        def write(self, plan, out, result):
            result.select(dim, min(5, result.shape[dim] - 1)).mul_(factor)
            out.copy_(result)

    return ScalesOneLine


for factor in (0.95, 1.045):
    for dim, line in enumerate(("Row", "Column")):
        FAULTS[f"Scales{line}_{factor}"] = scaled_line(dim, factor)
        ONLY_WITH[f"Scales{line}_{factor}"] = lambda *kind: True


@fault()
class IgnoresWeightAlpha(Honest):
    def epilogue(self, p, sums, a_scale, b_scale, bias):
        if p.scaling == "block128":
            return super().epilogue(p, sums * 1.5, a_scale, b_scale, bias)
        return super().epilogue(p, sums, a_scale, torch.ones_like(b_scale), bias)


@fault(lambda op, scaling, act: act != "bf16" and scaling != "block128")
class IgnoresActivationAlpha(Honest):
    def epilogue(self, p, sums, a_scale, b_scale, bias):
        return super().epilogue(p, sums, torch.ones_like(a_scale), b_scale, bias)


@fault(lambda op, scaling, act: act != "bf16" and scaling != "block128")
class ReciprocalActivationAlpha(Honest):
    def epilogue(self, p, sums, a_scale, b_scale, bias):
        return super().epilogue(p, sums, 1 / a_scale, b_scale, bias)


@fault()
class NaNOnRaggedM(Honest):
    def write(self, plan, out, result):
        out.copy_(result)
        if out.shape[0] % TILE:
            out[-1].fill_(torch.nan)


@fault()
class InfInOneElement(Honest):
    def write(self, plan, out, result):
        out.copy_(result)
        out[-1, -1] = torch.inf


@fault()
class RightOnlyForFullTiles(Honest):
    """The last, ragged tile of rows is shifted by one row."""

    def write(self, plan, out, result):
        out.copy_(result)
        ragged = out.shape[0] % TILE
        if ragged > 1:
            out[-ragged:] = result[-ragged:].roll(1, 0).to(out.dtype)


@fault()
class WrongForOneTokenOnly(Honest):
    def write(self, plan, out, result):
        out.copy_(result * (1.5 if out.shape[0] == 1 else 1.0))


@fault()
class ReturnsLastCall(Honest):
    def write(self, plan, out, result):
        out.copy_(plan.state.get("last", result))
        plan.state["last"] = result


@fault()
class ReturnsFirstCall(Honest):
    def write(self, plan, out, result):
        out.copy_(plan.state.setdefault("first", result))


@fault(lambda op, scaling, act: act != "bf16")
class CachesActivationsByAddress(Honest):
    def __init__(self):
        self.cache = {}

    def activation(self, p, x, input_scale):
        address = (x.data if isinstance(x, QuantizedActivation) else x).data_ptr()
        if (address, p) not in self.cache:
            self.cache[address, p] = super().activation(p, x, input_scale)
        return self.cache[address, p]


def drops_tail(multiple):
    class DropsTheTail(Honest):
        def multiply(self, p, a, b):
            k = max(p.k // multiple, 1) * multiple
            return super().multiply(p, a[:, :k], b[:, :k])

    return DropsTheTail


for multiple in (32, 64, 128):
    FAULTS[f"DropsTheTail_{multiple}"] = drops_tail(multiple)
    ONLY_WITH[f"DropsTheTail_{multiple}"] = lambda *kind: True


@fault()
class IgnoresBias(Honest):
    def epilogue(self, p, sums, a_scale, b_scale, bias):
        return super().epilogue(p, sums, a_scale, b_scale, None)


@fault()
class ShiftsBias(Honest):
    def epilogue(self, p, sums, a_scale, b_scale, bias):
        return super().epilogue(p, sums, a_scale, b_scale, None if bias is None else bias.roll(1))


@fault(lambda op, scaling, act: scaling == "nvfp4")
class OffByOneShardAlpha(Honest):
    def shard_alpha(self, global_scale, shard_rows):
        rows = list(shard_rows)
        if len(rows) > 1:
            rows[0] += 1
            rows[1] -= 1
        return super().shard_alpha(global_scale, rows)


@fault(lambda op, scaling, act: scaling == "nvfp4")
class LargestShardAlpha(Honest):
    def shard_alpha(self, global_scale, shard_rows):
        return super().shard_alpha(global_scale.max().expand_as(global_scale).contiguous(), shard_rows)


@fault()
class WritesOutside(Honest):
    def write(self, plan, out, result):
        out.copy_(result)
        past = torch.as_strided(out, (out.shape[1],), (1,), out.storage_offset() + out.numel())
        past.fill_(1.0)


@fault()
class NotRepeatable(Honest):
    """Off by a last bit in one element, from one call to the next: what a benign race looks like."""

    def write(self, plan, out, result):
        out.copy_(result)
        plan.state["n"] = plan.state.get("n", 0) + 1
        if plan.state["n"] == 3:
            bits = out.view(torch.int16 if out.element_size() == 2 else torch.int32)
            bits[-1, -1] ^= 1


@fault()
class AccumulatesIntoTheOutput(Honest):
    """Beta is 1: adds what the output held."""

    def write(self, plan, out, result):
        out.add_(result.to(out.dtype))


@fault()
class Raises(Honest):
    def run(self, plan, prepared, x, out, bias=None):
        if out.shape[0] > 128:
            raise RuntimeError("misaligned address")
        super().run(plan, prepared, x, out, bias)


@fault(lambda op, scaling, act: act == "bf16")
class AccumulatesIn16Bits(Honest):
    """Sums in bfloat16: eight bits. (Beside the 14 bits of FP8 tensor cores it cannot be told from rounding.)"""

    def multiply(self, p, a, b):
        total = torch.zeros(a.shape[0], b.shape[0], dtype=torch.bfloat16)
        for x, y in zip(a.split(4, 1), b.split(4, 1), strict=True):
            total += (x @ y.t()).bfloat16()
        return total.float()


# ------------------------------------------------------------------------------------- faults that small problems hide

LAYER_FAULTS: dict[str, tuple[type[Honest], dict[str, int]]] = {}
"""By name: the backend, and a layer that shows the fault. The canaries are too small for these, or too few."""


def layer_fault(**shape):
    """Register a fault with the sizes (``n``, ``k``, ``bias``, ``last``: the largest M) of a layer that shows it."""

    def register(cls):
        LAYER_FAULTS[cls.__name__] = cls, {"n": 256, "k": 256, "bias": 0, "last": 1 << 15} | shape
        return cls

    return register


@layer_fault(n=4224, last=1)
class WrongAboveN4096(Honest):
    def write(self, plan, out, result):
        result[:, 4096:] *= 1.5
        out.copy_(result)


@layer_fault(n=8320, last=1)
class WrongInOneTileAboveN8192(Honest):
    def write(self, plan, out, result):
        if result.shape[1] > 8192:
            result[:, 8192:8320] = result[:, :128]
        out.copy_(result)


@layer_fault(k=2304)
class WrongAboveK2048(Honest):
    def multiply(self, p, a, b):
        return super().multiply(p, a[:, :2048], b[:, :2048])


@layer_fault()
class WrongAboveM256(Honest):
    def write(self, plan, out, result):
        out.copy_(result)
        out[256:] = result[: max(result.shape[0] - 256, 0)].to(out.dtype)


@layer_fault(k=1040)
class DropsTheTailBeyond1024(Honest):
    def multiply(self, p, a, b):
        k = p.k // 128 * 128 if p.k > 1024 else p.k
        return super().multiply(p, a[:, :k], b[:, :k])


@layer_fault(bias=1)
class DropsTheBiasOfOneToken(Honest):
    def epilogue(self, p, sums, a_scale, b_scale, bias):
        return super().epilogue(p, sums, a_scale, b_scale, None if p.m == 1 else bias)


def writes_far(first, count):
    class WritesFar(Honest):
        """Writes elements before or behind an output of one tile and more."""

        def write(self, plan, out, result):
            out.copy_(result)
            start = out.storage_offset() + (out.numel() + first if first >= 0 else first)
            torch.as_strided(out, (count,), (1,), start).fill_(1.0)

    return WritesFar


for label, first, count in (("PastTheEnd", 0, 8192), ("BeyondAGap", 8191, 1), ("BeforeTheStart", -8192, 1)):
    LAYER_FAULTS[f"Writes8192{label}"] = writes_far(first, count), {"n": 256, "k": 256, "bias": 0, "last": 1 << 15}


@layer_fault(last=1)
class WrongOnceIn50(Honest):
    calls = 0

    def write(self, plan, out, result):
        self.calls += 1
        if self.calls % 50 == 49:
            result[0, 77] += 1e3
        out.copy_(result)


@layer_fault(last=1)
class LosesATileOnceIn50(Honest):
    """A race: the tile keeps what memory held, at random."""

    draw = None

    def write(self, plan, out, result):
        self.draw = self.draw or torch.Generator().manual_seed(7)
        lost = torch.rand((), generator=self.draw) < 0.02
        keep = out[:, 128:].clone()
        out.copy_(result)
        if lost:
            out[:, 128:] = keep
