"""The W4 kernels in torch, on any device, from the packed bytes: what the backends launch where there is no GPU.

Each entry has the signature of its CUDA namesake and refuses what that refuses. The numbers are made from the packed
weights alone (decoded here from the documented bytes), so packing, padding, alpha, bias and slicing are all under test.
"""

from __future__ import annotations

from types import SimpleNamespace

import torch

from fp4dispatch import formats
from fp4dispatch.backends.base import LinearWeights
from fp4dispatch.backends.own import compiled, launch_choice, scratch, swiglu
from fp4dispatch.backends.own.tiling import launch_model
from fp4dispatch.backends.own.tiling.launch_model import LaunchShape
from fp4dispatch.jit.catalog.manifest import installed
from fp4dispatch.machine import capture
from fp4dispatch.problem.arch import Arch
from tests import many_tokens, pdl_fake


def chunk_index():
    """For each byte of a chunk's codes: row, k of the low magnitude, k of the sign in bit 7; that in bit 3 is 4 on."""
    byte = torch.arange(2048)
    unit, lane, word, place = byte // 512, byte // 16 % 32, byte // 4 % 4, byte % 4
    first = 16 * (lane % 4) + 8 * (word // 2)
    return 16 * unit + lane // 4 + 8 * (word % 2), first + 2 * place, first + place


DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
ROWS, MAGNITUDE_K, SIGN_K = chunk_index()
PLACE = torch.arange(256)  # of a scale: two bytes a unit, eight a lane
SCALE_ROWS, SCALE_BLOCKS = 16 * (PLACE // 2 % 4) + PLACE // 32 + 8 * (PLACE % 2), PLACE // 8 % 4


def decode(packed):
    """Codes [Np, Kp] (0..15) and scales f32 [Np, Kp/16] of W4P."""
    blocks, chunks, _ = packed.shape
    codes = torch.zeros(blocks, chunks, 64, 64, dtype=torch.uint8)
    byte = packed[..., :2048]
    codes[:, :, ROWS, MAGNITUDE_K] = byte & 7
    codes[:, :, ROWS, MAGNITUDE_K + 1] = byte >> 4 & 7
    codes[:, :, ROWS, SIGN_K] |= byte >> 4 & 8
    codes[:, :, ROWS, SIGN_K + 4] |= byte & 8
    scale = torch.zeros(blocks, chunks, 64, 4, dtype=torch.uint8)
    scale[:, :, SCALE_ROWS, SCALE_BLOCKS] = packed[..., 2048:]
    codes = codes.permute(0, 2, 1, 3).reshape(blocks * 64, chunks * 64)
    scale = scale.permute(0, 2, 1, 3).reshape(blocks * 64, chunks * 4)
    return codes, scale.view(torch.float8_e4m3fn).float()


TOKEN = torch.arange(8).view(8, 1)


def activation_index():
    """Which k each of the 128 bytes of each of 8 tokens belongs to: csrc/quantise/pack_e4m3.h."""
    place = torch.arange(128)
    column, byte = (place // 16) ^ TOKEN, place % 16
    return 64 * (column // 4) + 16 * (byte // 4) + 8 * (column // 2 % 2) + 4 * (column % 2) + byte % 4


def pack_activation(q):
    """e4m3 [M, K] -> what the kernels multiply, uint8 [ceil(K/128), ceil(M/8), 1024]."""
    (m, k), columns, blocks = q.shape, -(-q.shape[1] // 128), -(-q.shape[0] // 8)
    padded = torch.zeros(blocks * 8, columns * 128, dtype=torch.uint8, device=q.device)
    padded[:m, :k] = q.view(torch.uint8)
    tiles = padded.view(blocks, 8, columns, 128)
    return tiles[:, TOKEN, :, activation_index()].permute(3, 2, 0, 1).reshape(columns, blocks, 1024)


def unpack_activation(packed, m, k):
    """The inverse, to [m, k]."""
    columns, blocks, _ = packed.shape
    assert (columns, blocks) == (-(-k // 128), -(-m // 8))
    tiles = torch.zeros(columns, blocks, 8, 128, dtype=torch.uint8, device=packed.device)
    tiles[:, :, TOKEN, activation_index()] = packed.view(columns, blocks, 8, 128)
    rows = tiles.permute(1, 2, 0, 3).reshape(blocks * 8, columns * 128)
    return rows.view(torch.float8_e4m3fn)[:m, :k]


def exact_weights(packed):
    codes, scale = decode(packed)
    return formats.decode_e2m1(codes) * scale.repeat_interleave(16, 1)


def folded_weights(packed):
    return (exact_weights(packed) / 8).to(torch.float8_e4m3fn).float()


def check_operands(packed, alpha, bias, out, n, k):
    assert packed.dtype == torch.uint8
    assert tuple(packed.shape) == (-(-n // 64), -(-k // 64), 2304)
    assert packed.is_contiguous()
    assert alpha.dtype == torch.float32
    assert alpha.numel() in (1, n)
    assert alpha.is_contiguous()
    assert n % 8 == 0
    assert out.is_contiguous()
    assert out.data_ptr() % 16 == 0
    assert bias is None or (tuple(bias.shape) == (n,) and bias.dtype == out.dtype and bias.is_contiguous())


def check_rows(x):
    assert x.shape[1] % 16 == 0
    assert x.stride(1) == 1
    assert x.stride(0) % 8 == 0
    assert x.shape[0] < 2 or x.stride(0) >= x.shape[1]
    assert x.data_ptr() % 16 == 0


def finish(sums, alpha, bias, out):
    result = sums * alpha
    out.copy_(result if bias is None else result + bias.float())


class Kernels:
    """The modules that ``jit.load`` would return, and a record of what was loaded and launched.

    ``rows``: where the 16-bit activations were that were multiplied. ``shapes``: launch shapes that were given.
    """

    def __init__(self, pdl_allowed=True):
        self.pdl_allowed = pdl_allowed
        self.loaded, self.launched, self.column_scales, self.rows, self.shapes = [], [], [], [], []

    def load(self, kernel, build, arch):
        self.loaded.append((kernel, build))
        made = {"w4a16_small": self.small, "w4_gemm_sm90": self.large, "w4_activations": self.packer}
        made |= {"w4a8_small": self.small_fp8, "w4_to_e4m3": self.unfolder, "fp8_quantize": self.quantizer}
        module = self.swiglu() if kernel in (swiglu.PACKED, swiglu.ROWS) else made[kernel](build)
        return SimpleNamespace(module=module, pdl_allowed=self.pdl_allowed)

    def swiglu(self):
        from tests import swiglu_fake

        return swiglu_fake.module(self.launched)

    def small(self, build):
        return SimpleNamespace(w4a16_small=self.multiplier_of_rows("w4a16_small", DTYPES[build]))

    def small_fp8(self, build):
        return SimpleNamespace(w4a8_small=self.multiplier(f"w4a8_small {build}", DTYPES[build]))

    def packer(self, build):
        def w4_quantize_row(x, packed, scale, enable_pdl):
            assert x.dtype in (torch.bfloat16, torch.float16)
            check_rows(x)
            assert (scale.dtype, tuple(scale.shape)) == (torch.float32, (x.shape[0],))
            q = formats.fp8_quantize(x, "row")
            scale.copy_(q.scale)
            values = pack_activation(q.data)
            assert (packed.dtype, packed.shape) == (torch.uint8, values.shape)
            assert packed.is_contiguous()
            assert packed.data_ptr() % 16 == 0
            packed.copy_(values)
            self.launched.append(("w4_quantize_row", *x.shape, enable_pdl))

        return SimpleNamespace(w4_quantize_row=w4_quantize_row)

    def unfolder(self, build):
        def w4_to_e4m3(w, out, enable_pdl):
            n, k = out.shape
            assert out.dtype == torch.float8_e4m3fn
            assert out.is_contiguous()
            assert k % 16 == 0
            out.copy_(folded_weights(w)[:n, :k].to(torch.float8_e4m3fn))
            self.launched.append(("w4_to_e4m3", n, k, enable_pdl))

        return SimpleNamespace(w4_to_e4m3=w4_to_e4m3)

    def quantizer(self, build):
        def fp8_quantize_row(x, q, scale, enable_pdl):
            assert tuple(q.shape) == tuple(x.shape)
            found = formats.fp8_quantize(x, "row")
            q.copy_(found.data)
            scale.copy_(found.scale)
            self.launched.append(("fp8_quantize_row", *x.shape, enable_pdl))

        return SimpleNamespace(fp8_quantize_row=fp8_quantize_row)

    def scaled_mm(self, a, b, scale_a, scale_b, bias=None, *, out_dtype, out):
        """Stand in for ``torch._scaled_mm`` with scales per row and column."""
        (m, k), n = a.shape, b.shape[1]
        assert a.dtype == b.dtype == torch.float8_e4m3fn
        assert a.is_contiguous()
        assert b.t().is_contiguous()
        assert (tuple(scale_a.shape), tuple(scale_b.shape)) == ((m, 1), (1, n))
        assert scale_a.is_contiguous()
        assert scale_b.is_contiguous()
        assert n % 16 == k % 16 == 0
        assert out.dtype == out_dtype == torch.bfloat16
        self.launched.append(("scaled_mm", m, n, k))
        self.column_scales.append(scale_b.data_ptr())
        finish(a.float() @ b.float() * scale_a, scale_b.reshape(-1), bias, out)

    def large(self, build):
        defines = dict(d.split("=") for d in installed().kernel("w4_gemm_sm90").variant(build).defines)
        dtype = {"0": torch.bfloat16, "1": torch.float16}[defines["FP4D_OUT"]]
        packed, of_rows = (make(f"w4_gemm {build}", dtype) for make in (self.multiplier, self.multiplier_of_rows))
        tile = many_tokens.tile_of("w4_gemm_sm90", build)

        def w4_gemm(x, x_scale, w, alpha, bias, out, shape, enable_pdl):
            many_tokens.check_covers(tile, shape, *out.shape)
            self.shapes.append(tuple(shape))
            if defines["FP4D_ACT"] == "8":
                packed(x, x_scale, w, alpha, bias, out, enable_pdl)
            else:
                assert x_scale is None
                of_rows(x, w, alpha, bias, out, enable_pdl)

        def w4_gemm_even(x, x_scale, w, alpha, bias, out, shape, room, enable_pdl):
            assert (room.dtype, room.dim()) == (torch.uint8, 1)
            assert len(room) >= launch_model.room_bytes(tile, LaunchShape(*shape)) > 0
            x_before, scale_before = x.clone(), x_scale.clone()
            room.fill_(0xFF)
            assert torch.equal(x, x_before), "room lies apart from the activation"
            assert torch.equal(x_scale, scale_before)
            w4_gemm(x, x_scale, w, alpha, bias, out, shape, enable_pdl)

        return SimpleNamespace(w4_gemm_even=w4_gemm_even) if tile.even else SimpleNamespace(w4_gemm=w4_gemm)

    def multiplier_of_rows(self, name, dtype):
        """What w4a16_small and w4_gemm_sm90 have in common: 16-bit activations as they are by packed weights."""

        def gemm(x, w, alpha, bias, out, enable_pdl):
            (m, k), n = x.shape, out.shape[1]
            assert (x.dtype, out.dtype) == (dtype, dtype)
            assert out.shape[0] == m >= 1
            check_rows(x)
            check_operands(w, alpha, bias, out, n, k)
            self.launched.append((name, m, n, k, enable_pdl))
            self.rows.append(x.data_ptr())
            finish(x.float() @ exact_weights(w)[:n, :k].t(), alpha, bias, out)

        return gemm

    def multiplier(self, name, dtype):
        """What w4_gemm_sm90 and w4a8_small have in common: packed e4m3 activations by packed weights."""

        def gemm(x, x_scale, w, alpha, bias, out, enable_pdl):
            m, n = out.shape
            k = w.shape[1] * 64
            assert m >= 1
            assert out.dtype == dtype
            assert x.is_contiguous()
            assert x.data_ptr() % 16 == 0
            check_operands(w, alpha, bias, out, n, k)
            assert (x_scale.dtype, tuple(x_scale.shape)) == (torch.float32, (m,))
            assert x_scale.is_contiguous()
            sums = unpack_activation(x, m, k).float() @ (folded_weights(w) * 8)[:n].t()
            self.launched.append((name, m, n, k, enable_pdl))
            finish(sums * x_scale.reshape(-1, 1), alpha, bias, out)

        return gemm


def weights(n, k, shards=(), layout="linear", seed=0, static=None):
    """Weights of a layer, with a global scale for each shard."""
    torch.manual_seed(seed)
    q = formats.nvfp4_quantize(torch.randn(n, k), sf_layout=layout)
    scales = torch.rand(max(len(shards), 1)) + 0.5
    return LinearWeights("nvfp4_gemm", "nvfp4", n, k, q.data, q.sf, scales, shards or (n,), static, layout)


def install(monkeypatch, capability="9.0", sms=132, **options):
    """Let both backends plan as on a GPU and launch these; returns the record."""
    kernels = Kernels(**options)
    monkeypatch.setattr(compiled.jit, "load", kernels.load)
    monkeypatch.setattr(torch, "_scaled_mm", kernels.scaled_mm)
    for module in (compiled, launch_choice):
        monkeypatch.setattr(module, "gpu_of", lambda device: (Arch.parse(capability), sms))
    monkeypatch.setattr(swiglu, "_known", {})
    pdl_fake.passes(monkeypatch)
    monkeypatch.setattr(capture, "stream_is_capturing", lambda: False)
    monkeypatch.setattr(scratch, "_stream", lambda index: 7)
    monkeypatch.setattr(scratch, "_arenas", {})
    return kernels
