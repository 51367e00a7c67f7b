"""How each checkpoint format stores one quantised linear layer: the tensors, and the way to and from LinearWeights.

| scheme | weight is |
|---|---|
| ``modelopt-nvfp4`` | q * weight_scale * weight_scale_2 |
| ``nvfp4-pack-quantized`` (compressed-tensors) | q * weight_scale / weight_global_scale |
| ``fp8-tensor``, ``fp8-channel`` | q * weight_scale, one scale or one per row |
| ``fp8-tensor-inv`` (Hugging Face) | the same, named ``weight_scale_inv`` and ``activation_scale`` |
| ``fp8-block`` (Hugging Face, DeepSeek) | q * weight_scale_inv, which multiplies in spite of its name |
| ``fp8-block-ct`` (compressed-tensors) | q * weight_scale, one per 128x128 |

Sources: ModelOpt 0.47 ``torch/export``, compressed-tensors 0.20 ``compressors``, transformers 5
``integrations/finegrained_fp8``, vLLM ``layers/quantization/{modelopt,fp8}``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from fp4dispatch.backends.base import LinearWeights
from fp4dispatch.errors import CheckpointError
from fp4dispatch.formats import FP8_BLOCK, NVFP4_BLOCK, from_128x4
from fp4dispatch.models.fusing.rows import concatenate
from fp4dispatch.problem import Op, Scaling


@dataclass(frozen=True)
class Scheme:
    """One row of the table above.

    Parameters
    ----------
    name
        Name used in reports and errors.
    op, scaling
        What it becomes in :class:`~fp4dispatch.backends.base.LinearWeights`.
    weight, scale, global_scale, input_scale
        Names of its tensors below the layer's name; None where the format has no such tensor.
    divides
        Whether global and input scale are stored as reciprocals (2688 / amax).
    scalar
        Shape in which a single value is written; both [] and [1] are read.
    """

    name: str
    op: Op
    scaling: Scaling
    weight: str
    scale: str
    global_scale: str | None = None
    input_scale: str | None = None
    divides: bool = False
    scalar: tuple[int, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all its tensors below the layer's name."""
        names = (self.weight, self.scale, self.global_scale, self.input_scale)
        return tuple(name for name in names if name is not None)

    def specs(self, n: int, k: int) -> dict[str, Spec]:
        """Return every tensor that a layer of N x K has in this scheme, by name below the layer's."""
        specs = {
            self.weight: Spec(("U8",), ((n, k // 2),)) if self.op == "nvfp4_gemm" else Spec(("F8_E4M3",), ((n, k),)),
            self.scale: _scale_spec(self.scaling, n, k),
        }
        if self.global_scale:
            specs[self.global_scale] = _SCALAR
        if self.input_scale:
            specs[self.input_scale] = Spec(_SCALAR.dtypes, _SCALAR.shapes, required=False)
        return specs


@dataclass(frozen=True)
class Spec:
    """Stored dtypes (safetensors names) and shapes that a tensor may have; the first of each is what is written."""

    dtypes: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    required: bool = True

    def __str__(self) -> str:
        return f"{' or '.join(self.dtypes)} {' or '.join(str(list(s)) for s in self.shapes)}"


_FLOAT = ("F32", "BF16", "F16")  # scales in a 16-bit type (llm-compressor writes the model's own) widen exactly
_SCALAR = Spec(_FLOAT, ((), (1,)))


def _scale_spec(scaling: Scaling, n: int, k: int) -> Spec:
    if scaling == "nvfp4":
        return Spec(("F8_E4M3",), ((n, k // NVFP4_BLOCK),))
    if scaling == "tensor":
        return Spec(_FLOAT, (*_SCALAR.shapes, (1, 1)))  # transformers quantises per tensor as one block
    if scaling == "row":
        return Spec(_FLOAT, ((n, 1), (n,)))
    grid = -(-n // FP8_BLOCK), -(-k // FP8_BLOCK)
    modelopt = (grid[0], 1, grid[1], 1)  # FP8_PB_WO, which drops the dimensions of a single block
    return Spec((*_FLOAT, "F8_E8M0"), (grid, modelopt, *(((), (1,)) if grid == (1, 1) else ())))


SCHEMES: dict[str, Scheme] = {
    scheme.name: scheme
    for scheme in (
        Scheme("modelopt-nvfp4", "nvfp4_gemm", "nvfp4", "weight", "weight_scale", "weight_scale_2", "input_scale"),
        Scheme(
            "nvfp4-pack-quantized",
            "nvfp4_gemm",
            "nvfp4",
            "weight_packed",
            "weight_scale",
            "weight_global_scale",
            "input_global_scale",
            divides=True,
            scalar=(1,),
        ),
        Scheme("fp8-tensor", "fp8_gemm", "tensor", "weight", "weight_scale", input_scale="input_scale"),
        Scheme("fp8-tensor-inv", "fp8_gemm", "tensor", "weight", "weight_scale_inv", input_scale="activation_scale"),
        Scheme("fp8-channel", "fp8_gemm", "row", "weight", "weight_scale", input_scale="input_scale"),
        Scheme("fp8-block", "fp8_gemm", "block128", "weight", "weight_scale_inv"),
        Scheme("fp8-block-ct", "fp8_gemm", "block128", "weight", "weight_scale"),
    )
}


def detect(tensors: Mapping[str, tuple[str, tuple[int, ...]]]) -> tuple[Scheme, ...]:
    """Return the schemes that fit a layer's tensors, most likely first; empty if it is not quantised.

    Parameters
    ----------
    tensors
        safetensors dtype and shape by name below the layer's. More than one scheme fits only where a scale has a single
        element; the quantisation config decides then.
    """
    if "weight_packed" in tensors:
        return (SCHEMES["nvfp4-pack-quantized"],)
    dtype, weight_shape = tensors.get("weight", ("", ()))
    if dtype == "U8" or "weight_scale_2" in tensors:
        return (SCHEMES["modelopt-nvfp4"],)
    if dtype != "F8_E4M3" and "weight_scale" not in tensors and "weight_scale_inv" not in tensors:
        return ()
    inverse, plain = ("fp8-block", "fp8-tensor-inv"), ("fp8-tensor", "fp8-channel", "fp8-block-ct")
    if "activation_scale" in tensors:
        inverse = ("fp8-tensor-inv", "fp8-block")
    scale = "weight_scale_inv" if "weight_scale_inv" in tensors else "weight_scale"
    if scale not in tensors or len(weight_shape) != 2:
        return tuple(SCHEMES[name] for name in (*plain, *inverse))
    names = inverse if scale == "weight_scale_inv" else plain
    shape, (n, k) = tensors[scale][1], weight_shape
    fitting = [name for name in names if shape in SCHEMES[name].specs(n, k)[scale].shapes]
    return tuple(SCHEMES[name] for name in fitting or names)


def logical_k(scheme: Scheme, weight_shape: tuple[int, ...]) -> int:
    """Return K of a stored weight."""
    return weight_shape[-1] * (2 if scheme.op == "nvfp4_gemm" else 1)


def to_linear(scheme: Scheme, tensors: Mapping[str, torch.Tensor]) -> LinearWeights:
    """Turn a layer's stored tensors (checked against :meth:`Scheme.specs`) into canonical weights; copies no weight."""
    weight, stored = tensors[scheme.weight], tensors[scheme.scale]
    n, k = weight.shape[0], logical_k(scheme, tuple(weight.shape))
    grid = (-(-n // FP8_BLOCK), -(-k // FP8_BLOCK))
    shapes = {"nvfp4": tuple(stored.shape), "tensor": (), "row": (n,), "block128": grid}
    scale = (stored if scheme.op == "nvfp4_gemm" else stored.float()).reshape(shapes[scheme.scaling])
    global_scale = None
    if scheme.global_scale:
        global_scale = _convert_scale(tensors[scheme.global_scale].float().reshape(1), scheme.divides)
    input_scale = None
    if scheme.input_scale and scheme.input_scale in tensors:
        input_scale = _convert_scale(tensors[scheme.input_scale].float().reshape(()), scheme.divides)
    rows = (n,) if scheme.op == "nvfp4_gemm" else ()
    return LinearWeights(scheme.op, scheme.scaling, n, k, weight, scale, global_scale, rows, input_scale)


def from_linear(scheme: Scheme, weights: LinearWeights) -> dict[str, torch.Tensor]:
    """Turn canonical weights of one shard into the tensors that the scheme stores.

    Raises
    ------
    CheckpointError
        The weights are not in the scheme's format, or have several global scales (split them first).
    """
    if (weights.op, weights.scaling) != (scheme.op, scheme.scaling):
        raise CheckpointError(
            f"{scheme.name} stores {scheme.op} with {scheme.scaling!r} scaling; the layer holds {weights.op} with "
            f"{weights.scaling!r}: choose another format"
        )
    if weights.input_scale is not None and scheme.input_scale is None:
        raise CheckpointError(f"{scheme.name} has no place for the layer's static input scale: choose another format")
    scale = weights.scale
    if weights.sf_layout == "128x4":
        scale = from_128x4(scale, weights.n, weights.k // NVFP4_BLOCK)
    tensors = {scheme.weight: weights.weight, scheme.scale: scale}
    if scheme.global_scale:
        if weights.global_scale is None or weights.global_scale.numel() != 1:
            raise CheckpointError(f"{scheme.name} stores one global scale a layer; found {weights.global_scale}")
        tensors[scheme.global_scale] = _convert_scale(weights.global_scale, scheme.divides)
    if scheme.input_scale and weights.input_scale is not None:
        tensors[scheme.input_scale] = _convert_scale(weights.input_scale, scheme.divides)
    return {name: t.reshape(written_shape(scheme, name, weights.n, weights.k)) for name, t in tensors.items()}


def written_shape(scheme: Scheme, name: str, n: int, k: int) -> tuple[int, ...]:
    """Return the shape in which a tensor is written."""
    return scheme.specs(n, k)[name].shapes[0] or scheme.scalar


def fuse_shards(shards: list[LinearWeights]) -> LinearWeights:
    """Concatenate shards along N into one layer, exactly. :func:`fp4dispatch.models.fusing.rows.split` is the inverse.

    NVFP4 keeps one global scale per shard. FP8 shards with different per-tensor scales become one scale per row, with
    dynamic activation scales. Static activation scales of the shards describe the same input. The largest is kept,
    so no more values saturate than before.

    Raises
    ------
    CheckpointError
        Shards of different formats or K, some with and some without a static activation scale, or 128x128 blocks that
        would straddle two shards.
    """
    first = shards[0]
    if len(shards) == 1:
        return first
    kinds = {(s.op, s.scaling, s.k, s.input_scale is None) for s in shards}
    if len(kinds) > 1:
        found = ", ".join(f"{s.op} {s.scaling} K={s.k} static input scale: {s.input_scale is not None}" for s in shards)
        raise CheckpointError(f"shards cannot be fused: expected one format, found {found}: keep the layers apart")
    rows = tuple(s.n for s in shards)
    if first.scaling == "block128" and any(r % FP8_BLOCK for r in rows[:-1]):
        raise CheckpointError(
            f"shards of {list(rows)} rows cannot be fused: 128x128 scale blocks would straddle two of them; expected "
            "multiples of 128: keep the layers apart"
        )
    inputs = [s.input_scale for s in shards if s.input_scale is not None]
    input_scale = torch.stack(inputs).amax() if inputs else None
    scaling, scale = first.scaling, first.scale
    if scaling == "tensor" and any(not torch.equal(s.scale, scale) for s in shards):
        scaling, input_scale = "row", None
        scale = torch.cat([s.scale.expand(s.n) for s in shards])
    elif scaling != "tensor":
        scale = concatenate([s.scale for s in shards])
    globals_ = [s.global_scale for s in shards if s.global_scale is not None]
    return LinearWeights(
        first.op,
        scaling,
        sum(rows),
        first.k,
        concatenate([s.weight for s in shards]),
        scale,
        torch.cat(globals_) if globals_ else None,
        rows if first.op == "nvfp4_gemm" else (),
        input_scale,
    )


def _convert_scale(scale: torch.Tensor, divides: bool) -> torch.Tensor:
    """Convert between a multiplying scale and its stored reciprocal; exact to half an f32 ulp, or for powers of two."""
    return scale.reciprocal() if divides else scale
