"""``FP4Linear`` and ``FP8Linear``: replacements of ``nn.Linear`` for inference, in NVFP4 and FP8."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from fp4dispatch import formats
from fp4dispatch.backends.base import LinearWeights
from fp4dispatch.errors import InputError
from fp4dispatch.formats.amax import largest
from fp4dispatch.formats.checks import check_tensor
from fp4dispatch.models.quantized_linear import LayerOptions, QuantizedLinear
from fp4dispatch.problem import SF_LAYOUTS, Activation, Op, Scaling
from fp4dispatch.run import routes

_AT_A_TIME = 1 << 23
"""Elements that are quantised at a time."""


class FP4Linear(QuantizedLinear):
    """Linear layer with NVFP4 weights.

    Buffers: ``weight`` uint8 [N, K/2], two e2m1 codes a byte, even element in the low nibble; ``weight_scale``
    float8_e4m3fn [N, K/16]; ``weight_scale_2`` f32 [], or [S] for S fused shards, multiplying (amax / 2688);
    ``input_scale`` f32 [] or None, the activation's global scale (amax / 2688).

    Parameters
    ----------
    in_features
        K, a multiple of 16.
    shard_rows
        Rows of each shard fused into this layer; empty for one.
    out_features, bias, activation, backend, dtype, device, name, keep_stored
        As in :class:`QuantizedLinear`.

    Raises
    ------
    InputError
        If K is not a multiple of 16, or the shards do not add up to N.
    """

    __module__ = "fp4dispatch.linear"  # the public path, which pickles name
    op = "nvfp4_gemm"
    quantized = ("weight", "weight_scale", "weight_scale_2", "input_scale")
    weight_scale_2: Tensor

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        shard_rows: Sequence[int] = (),
        activation: Activation = "any",
        backend: str | None = None,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str | None = None,
        name: str = "",
        keep_stored: bool = False,
    ) -> None:
        options = LayerOptions(activation=activation, backend=backend, dtype=dtype, name=name, keep_stored=keep_stored)
        super().__init__(in_features, out_features, bias, device=device, **options)
        if in_features % formats.NVFP4_BLOCK:
            raise InputError(
                f"{self._label()}: in_features={in_features} is not a multiple of 16, the NVFP4 block: pad the weight "
                "and the input with zeros, or leave this layer unquantised"
            )
        self.shard_rows = _rows(shard_rows)
        if self.shard_rows and (sum(self.shard_rows) != out_features or min(self.shard_rows) < 1):
            raise InputError(
                f"{self._label()}: shard_rows={self.shard_rows} do not add up to out_features={out_features}; need the "
                "rows of each shard, at least 1"
            )
        n, k = out_features, in_features
        shards = (len(self.shard_rows),) if len(self.shard_rows) > 1 else ()
        self.register_buffer("weight", torch.zeros(n, k // 2, dtype=torch.uint8, device=device))
        scale = torch.zeros(n, k // 16, dtype=torch.uint8, device=device).view(torch.float8_e4m3fn)
        self.register_buffer("weight_scale", scale)
        self.register_buffer("weight_scale_2", torch.ones(shards, dtype=torch.float32, device=device))

    @classmethod
    def from_weights(
        cls,
        weights: LinearWeights,
        bias: Tensor | None = None,
        *,
        activation: Activation = "any",
        backend: str | None = None,
        dtype: torch.dtype = torch.bfloat16,
        name: str = "",
        keep_stored: bool = False,
    ) -> FP4Linear:
        """Make a layer from canonical weights. It takes the tensors over, without a copy.

        Other arguments as of the class.

        Raises
        ------
        InputError, FormatError
            If the weights do not fit the format.
        """
        _check_weights(weights)
        if weights.op != "nvfp4_gemm":
            raise InputError(f"FP4Linear takes nvfp4_gemm weights, not {weights.op}: use FP8Linear")
        shards = weights.shard_rows if len(weights.shard_rows) > 1 else ()
        options = LayerOptions(activation=activation, backend=backend, dtype=dtype, name=name, keep_stored=keep_stored)
        layer = cls(weights.k, weights.n, False, shard_rows=shards, device="meta", **options)
        return layer.fill(weights, bias)

    def fill(self, weights: LinearWeights, bias: Tensor | None = None) -> FP4Linear:
        """Give canonical weights to a layer of their sizes and shards. Takes the tensors over and binds.

        Raises
        ------
        InputError, FormatError
            If the weights do not fit the format.
        """
        rows = self.shard_rows if len(self.shard_rows) > 1 else (self.out_features,)
        if (weights.shard_rows or (weights.n,)) != rows:
            raise InputError(
                f"{self._label()}: the weights have shard_rows={weights.shard_rows}, the layer has {rows}; each shard "
                "has a global scale, so the rows must be the same: make the layer with from_weights"
            )
        scale, global_scale = weights.scale, weights.global_scale
        if global_scale is None or global_scale.numel() != len(rows):
            found = "None" if global_scale is None else f"{list(global_scale.shape)}"
            raise InputError(f"{self._label()}: global_scale is {found}; need f32 [{len(rows)}], one for each shard")
        if weights.sf_layout == "128x4":
            scale = formats.from_128x4(scale, weights.n, weights.k // 16)
        shape = -1 if len(self.shard_rows) > 1 else ()
        return self._fill(
            {
                "weight": weights.weight,
                "weight_scale": scale,
                "weight_scale_2": global_scale.reshape(shape),
                "input_scale": weights.input_scale,
            },
            bias,
        )

    @classmethod
    def from_linear(
        cls,
        linear: nn.Linear,
        *,
        global_scale: Tensor | None = None,
        calibrate: formats.Calibration = "max",
        activation: Activation = "any",
        backend: str | None = None,
        dtype: torch.dtype | None = None,
        name: str = "",
        keep_stored: bool = False,
    ) -> FP4Linear:
        """Quantise the weight of an ``nn.Linear``, on its device; its bias is shared.

        Parameters
        ----------
        global_scale
            f32 with one element. Below amax / 2688 the largest weights saturate. For layers that share a scale see
            :func:`fp4dispatch.models.replacing.fusion.shared_scale`. None: computed from this weight.
        calibrate
            ``max``, or ``mse``: search each block scale for the least squared error.
        activation, backend, name, keep_stored
            As of the class.
        dtype
            As of the class. None: that of ``linear``.

        Raises
        ------
        InputError
            If ``linear`` is not an ``nn.Linear`` with a floating-point weight, K is not a multiple of 16, or for an
            unknown calibration.
        FormatError
            If the weight holds NaN or Inf.
        """
        formats.check_calibration(calibrate, nvfp4=True)
        weight = _weight_of(cls, linear)
        n, k = weight.shape
        dtype = _dtype_of(weight) if dtype is None else dtype
        options = LayerOptions(activation=activation, backend=backend, dtype=dtype, name=name, keep_stored=keep_stored)
        if k % formats.NVFP4_BLOCK or weight.is_meta:
            return cls(k, n, linear.bias is not None, device=weight.device, **options)  # raises for this K
        if global_scale is not None:
            check_tensor(f"{cls.__name__}.from_linear: global_scale", global_scale)
            global_scale = global_scale.to(weight.device, copy=True)  # layers may share the value, never the memory
        canonical = _quantised(weight, global_scale, calibrate)
        layer = cls.from_weights(canonical, linear.bias, **options)
        del canonical  # so that no other code holds what the layer can drop
        layer._hold_once()
        return layer

    def weights(self, *, lend: bool = True) -> LinearWeights:
        """Return the canonical tensors as :class:`LinearWeights`. Copies only weights that the layer dropped.

        ``lend=False``: the caller will not write to them. The layer then does not keep such copies.
        """
        n, k = self.out_features, self.in_features
        rows = self.shard_rows if len(self.shard_rows) > 1 else (n,)
        global_scale = self.weight_scale_2.reshape(-1)
        with self._restored(lend=lend):
            return LinearWeights(
                "nvfp4_gemm", "nvfp4", n, k, self.weight, self.weight_scale, global_scale, rows, self.input_scale
            )

    def _kind(self) -> tuple[Op, Scaling]:
        return self.op, "nvfp4"

    def check(self) -> None:
        """Validate the canonical tensors; synchronises."""
        with self._restored():
            self._check()

    def _check(self) -> None:
        if tuple(self.weight.shape) != (self.out_features, self.in_features // 2):
            raise InputError(
                f"{self._label()}: weight is {list(self.weight.shape)}, "
                f"needs [{self.out_features}, {self.in_features // 2}]: make a new layer for another size"
            )
        rows = self.shard_rows if len(self.shard_rows) > 1 else (self.out_features,)
        global_scale = formats.expand_shards(self.weight_scale_2, rows)
        formats.check_nvfp4(self.weight, self.weight_scale, global_scale, name=self._label())
        self._check_input_scale()

    def _format_repr(self) -> Sequence[str]:
        shards = (f"shard_rows={self.shard_rows}",) if len(self.shard_rows) > 1 else ()
        return ("nvfp4", f"activation={self.activation}", *shards)


class FP8Linear(QuantizedLinear):
    """Linear layer with e4m3 weights.

    Buffers: ``weight`` float8_e4m3fn [N, K]; ``weight_scale`` f32, [] (``tensor``) or [N] (``row``), or
    ``weight_scale_inv`` f32 [ceil(N/128), ceil(K/128)] (``block128``), all multiplying; ``input_scale`` f32 [] or
    None. Without it FP8 activations are scaled per token from their own values (``block128``: per 128 elements too).

    Parameters
    ----------
    scaling
        ``tensor``, ``row`` or ``block128``.
    in_features, out_features, bias, activation, backend, dtype, device, name, keep_stored
        As in :class:`QuantizedLinear`; any sizes, padding is the backend's.

    Raises
    ------
    InputError
        For another scaling.
    """

    __module__ = "fp4dispatch.linear"  # the public path, which pickles name
    op = "fp8_gemm"
    quantized = ("weight", "weight_scale", "weight_scale_inv", "input_scale")
    weight_scale_inv: Tensor

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        scaling: Scaling = "tensor",
        activation: Activation = "any",
        backend: str | None = None,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str | None = None,
        name: str = "",
        keep_stored: bool = False,
    ) -> None:
        options = LayerOptions(activation=activation, backend=backend, dtype=dtype, name=name, keep_stored=keep_stored)
        super().__init__(in_features, out_features, bias, device=device, **options)
        if scaling not in ("tensor", "row", "block128"):
            raise InputError(f"scaling={scaling!r} is not known; use 'tensor', 'row' or 'block128'")
        if self.activation == "nvfp4":
            raise InputError("FP8Linear does not take activation='nvfp4': use 'fp8', 'bf16' or 'any'")
        self.scaling: Scaling = scaling
        n, k = out_features, in_features
        shape = {"tensor": (), "row": (n,), "block128": (-(-n // 128), -(-k // 128))}[scaling]
        self.register_buffer("weight", torch.zeros(n, k, dtype=torch.uint8, device=device).view(torch.float8_e4m3fn))
        self.register_buffer(self._scale_name, torch.ones(shape, dtype=torch.float32, device=device))

    @property
    def _scale_name(self) -> str:
        return "weight_scale_inv" if self.scaling == "block128" else "weight_scale"

    @classmethod
    def from_weights(
        cls,
        weights: LinearWeights,
        bias: Tensor | None = None,
        *,
        activation: Activation = "any",
        backend: str | None = None,
        dtype: torch.dtype = torch.bfloat16,
        name: str = "",
        keep_stored: bool = False,
    ) -> FP8Linear:
        """Make a layer from canonical weights. It takes the tensors over, without a copy.

        Other arguments as of the class.

        Raises
        ------
        InputError, FormatError
            If the weights do not fit the format.
        """
        _check_weights(weights)
        if weights.op != "fp8_gemm":
            raise InputError(f"FP8Linear takes fp8_gemm weights, not {weights.op}: use FP4Linear")
        options = LayerOptions(activation=activation, backend=backend, dtype=dtype, name=name, keep_stored=keep_stored)
        layer = cls(weights.k, weights.n, False, scaling=weights.scaling, device="meta", **options)
        return layer.fill(weights, bias)

    def fill(self, weights: LinearWeights, bias: Tensor | None = None) -> FP8Linear:
        """Give canonical weights to a layer of their sizes and scaling. Takes the tensors over and binds.

        Raises
        ------
        InputError, FormatError
            If the weights do not fit the format.
        """
        scale = weights.scale
        if self.scaling != "block128":
            if scale.numel() != (1 if self.scaling == "tensor" else self.out_features):
                need = "one element" if self.scaling == "tensor" else f"{self.out_features}, one for each row"
                raise InputError(f"{self._label()}: scale is {list(scale.shape)}; need {need}")
            scale = scale.reshape(() if self.scaling == "tensor" else -1)
        return self._fill({"weight": weights.weight, self._scale_name: scale, "input_scale": weights.input_scale}, bias)

    @classmethod
    def from_linear(
        cls,
        linear: nn.Linear,
        *,
        scaling: Scaling = "tensor",
        scale: Tensor | None = None,
        activation: Activation = "any",
        backend: str | None = None,
        dtype: torch.dtype | None = None,
        name: str = "",
        keep_stored: bool = False,
    ) -> FP8Linear:
        """Quantise the weight of an ``nn.Linear``, on its device; its bias is shared.

        Parameters
        ----------
        scale
            f32 in the shape that ``scaling`` needs. Below amax / 448 the largest weights saturate. None: computed from
            this weight.
        activation, backend, name, keep_stored
            As of the class.
        dtype
            As of the class. None: that of ``linear``.

        Raises
        ------
        InputError
            If ``linear`` is not an ``nn.Linear`` with a floating-point weight, or for another scaling.
        FormatError
            If the weight holds NaN or Inf.
        """
        weight = _weight_of(cls, linear)
        n, k = weight.shape
        dtype = _dtype_of(weight) if dtype is None else dtype
        options = LayerOptions(activation=activation, backend=backend, dtype=dtype, name=name, keep_stored=keep_stored)
        if scaling not in ("tensor", "row", "block128") or weight.is_meta:
            return cls(k, n, linear.bias is not None, scaling=scaling, device=weight.device, **options)
        if scale is not None:
            check_tensor(f"{cls.__name__}.from_linear: scale", scale)
            scale = scale.to(weight.device, copy=True)  # layers may share the value, never the memory
        q = formats.fp8_quantize(weight, scaling, scale)
        canonical = LinearWeights("fp8_gemm", scaling, n, k, q.data, q.scale)
        return cls.from_weights(canonical, linear.bias, **options)

    def weights(self, *, lend: bool = True) -> LinearWeights:
        """Return the canonical tensors as :class:`LinearWeights`, without copies; ``lend`` changes nothing."""
        return LinearWeights(
            "fp8_gemm",
            self.scaling,
            self.out_features,
            self.in_features,
            self.weight,
            getattr(self, self._scale_name),
            input_scale=self.input_scale,
        )

    def _kind(self) -> tuple[Op, Scaling]:
        return self.op, self.scaling

    def check(self) -> None:
        """Validate the canonical tensors; synchronises."""
        if tuple(self.weight.shape) != (self.out_features, self.in_features):
            raise InputError(
                f"{self._label()}: weight is {list(self.weight.shape)}, "
                f"needs [{self.out_features}, {self.in_features}]: make a new layer for another size"
            )
        weights = self.weights()
        formats.check_fp8(weights.weight, weights.scale, self.scaling, name=self._label())  # type: ignore[arg-type]
        if self.scaling == "block128" and self.input_scale is not None:
            raise InputError(
                f"{self._label()}: block128 activations are scaled from their own values; drop input_scale"
            )
        self._check_input_scale()

    def _format_repr(self) -> Sequence[str]:
        static = ("static input scale",) if self.input_scale is not None else ()
        return (f"fp8 {self.scaling}", f"activation={self.activation}", *static)


def layer_of(
    weights: LinearWeights,
    bias: Tensor | None = None,
    *,
    activation: Activation = "any",
    backend: str | None = None,
    dtype: torch.dtype = torch.bfloat16,
    name: str = "",
    keep_stored: bool = False,
) -> QuantizedLinear:
    """Make the layer for canonical weights of any format; arguments and errors as those of ``from_weights``."""
    kind: type[FP4Linear] | type[FP8Linear] = FP4Linear if weights.op == "nvfp4_gemm" else FP8Linear
    options = LayerOptions(activation=activation, backend=backend, dtype=dtype, name=name, keep_stored=keep_stored)
    return kind.from_weights(weights, bias, **options)


def _quantised(weight: Tensor, global_scale: Tensor | None, calibrate: formats.Calibration) -> LinearWeights:
    """Quantise to NVFP4, some rows at a time: the float32 intermediates are several times as large as the weight."""
    n, k = weight.shape
    scale = formats.nvfp4_global_scale(largest(weight)) if global_scale is None else global_scale
    some_rows = torch.split(weight, max(1, _AT_A_TIME // k))
    parts = [formats.nvfp4_quantize_calibrated(rows, scale, calibrate) for rows in some_rows]
    codes, sf = torch.cat([part.data for part in parts]), torch.cat([part.sf.view(torch.uint8) for part in parts])
    return LinearWeights("nvfp4_gemm", "nvfp4", n, k, codes, sf.view(torch.float8_e4m3fn), scale.reshape(1), (n,))


def _dtype_of(weight: Tensor) -> torch.dtype:
    return weight.dtype if weight.dtype in routes.OUT_DTYPE else torch.bfloat16


def _weight_of(cls: type[QuantizedLinear], linear: nn.Module) -> Tensor:
    """Return the weight to quantise. Raise InputError if ``linear`` is not an ``nn.Linear``."""
    what = f"{cls.__name__}.from_linear"
    if isinstance(linear, QuantizedLinear):
        raise InputError(
            f"{what}: got {linear._label()}, which is quantised already: quantise the layer it was made of"
        )
    if not isinstance(linear, nn.Linear):
        raise InputError(
            f"{what}: got {'None' if linear is None else f'a {type(linear).__name__}'}; need an nn.Linear (of another "
            "module with weight [N, K] make one, or quantise the weight and call from_weights)"
        )
    if nn.parameter.is_lazy(linear.weight):
        raise InputError(f"{what}: the weight has no shape yet (a lazy module): call it once first")
    weight = linear.weight.detach()
    check_tensor(f"{what}: weight", weight)
    if weight.ndim != 2 or 0 in weight.shape:
        raise InputError(f"{what}: weight has shape {list(weight.shape)}; need [N, K], both at least 1")
    if weight.dtype not in routes.OUT_DTYPE:
        raise InputError(f"{what}: weight is {weight.dtype}; need torch.float32, torch.bfloat16 or torch.float16")
    return weight


def _check_weights(weights: LinearWeights) -> None:
    if not isinstance(weights, LinearWeights):
        raise InputError(
            f"from_weights: got a {type(weights).__name__}; need a fp4dispatch.backends.base.LinearWeights"
        )
    if weights.sf_layout not in SF_LAYOUTS:
        raise InputError(f"from_weights: sf_layout={weights.sf_layout!r}; use {' or '.join(map(repr, SF_LAYOUTS))}")
    for name in ("weight", "scale", "global_scale", "input_scale"):
        tensor = getattr(weights, name)
        if tensor is not None or name in ("weight", "scale"):
            check_tensor(f"from_weights: {name}", tensor)


def _rows(shard_rows: Sequence[int]) -> tuple[int, ...]:
    if isinstance(shard_rows, Sequence) and all(isinstance(rows, int) for rows in shard_rows):
        return tuple(shard_rows)
    raise InputError(f"shard_rows={shard_rows!r}; need a sequence of int, the rows of each shard")
