"""Shipped kernels with a fault put into a copy of their source. A fault whose place is gone is an error of the test."""

from __future__ import annotations

import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from fp4dispatch.jit.catalog.manifest import installed


@dataclass(frozen=True)
class Family:
    """Kernels that share a barrier.

    ``anchor`` is the text in ``file`` that waits, ``pointer`` and ``number`` expressions of the scope there that no
    declaration covers. ``builds``: (kernel, variant, target) to try.
    """

    file: str
    anchor: str
    pointer: str
    number: str
    builds: tuple[tuple[str, str, str], ...]


FAMILIES = {
    "few_tokens": Family(
        "few_tokens/kernel.h",
        '  asm volatile("bar.sync 1, %0;" ::"n"(Tile::kThreads) : "memory");\n  grid_dependency_wait();\n',
        "p.alpha",
        "p.m",
        (
            ("w4a16_small", "bf16", "90a"),
            ("w4a16_small", "bf16", "120f"),
            ("w8a16_small", "bf16", "90a"),
            ("w8a16_small", "bf16", "120f"),
            ("w4a8_small", "bf16", "90a"),
            ("w8a8_small", "block_bf16", "90a"),
        ),
    ),
    "many_tokens": Family(
        "many_tokens/kernel.h",
        "    grid_dependency_wait();\n    // Not earlier",
        "p.alpha",
        "p.m",
        (
            ("w8_gemm_sm90", "bf16_128", "90a"),
            ("w8_gemm_sm90", "a16_bf16_64", "90a"),
            ("w4_gemm_sm90", "a8_bf16_64", "90a"),
            ("w4_gemm_sm90", "a16_bf16_64x128", "90a"),
        ),
    ),
    "nvfp4_quantize": Family(
        "quantise/nvfp4_quantize.cu",
        "  grid_dependency_wait();\n  int64_t const row",
        "global_scale",
        "k",
        (("nvfp4_quantize", "any", "100f"), ("nvfp4_quantize", "any", "120f"), ("nvfp4_quantize", "any", "90a")),
    ),
    "fp8_quantize": Family(
        "quantise/rows_e4m3.h",
        "  grid_dependency_wait();\n  int64_t const row = blockIdx.x;\n",
        "reinterpret_cast<float const*>(x)",
        "k",
        (
            *(("fp8_quantize", "any", "120f"), ("fp8_quantize", "any", "100f"), ("fp8_quantize", "any", "90a")),
            *(("swiglu_rows", "any", "120f"), ("swiglu_rows", "any", "90a")),
        ),
    ),
    "w4_activations": Family(
        "quantise/pack_e4m3.h",
        "  grid_dependency_wait();\n  int64_t const token = blockIdx.x >> parts_log2;\n",
        "reinterpret_cast<float const*>(x)",
        "k",
        (("w4_activations", "any", "90a"), ("swiglu_activations", "any", "90a")),
    ),
    "w4_to_e4m3": Family(
        "weights/w4_to_e4m3.cu",
        "  grid_dependency_wait();\n",
        "reinterpret_cast<float const*>(w)",
        "k",
        (("w4_to_e4m3", "any", "90a"),),
    ),
    "race_chain": Family(
        "checks/race_chain.cu",
        "  grid_dependency_wait();\n  copy(from, to, vectors);\n",
        "reinterpret_cast<float const*>(from)",
        "int(vectors)",
        (("race_chain", "any", "100f"), ("race_chain", "any", "120f"), ("race_chain", "any", "90a")),
    ),
}

_LOADED = "if ({load} == -7.f) __trap();\n{wait}"
# {wait}: the barrier; {pointer}, {number}: of the family.
FAULTS = {
    "moved": _LOADED.format(load="*(volatile float const*)({pointer} + threadIdx.x)", wait="{wait}"),
    "deleted": "",
    "conditional": "if ({number} > 3) {{ {wait} }}",
    "helper": _LOADED.format(load="fault::helper({pointer})", wait="{wait}"),
    "pointer": _LOADED.format(load="({number} & 1 ? fault::helper : fault::other)({pointer})", wait="{wait}"),
    "loop": "for (int i = 0; i < {number}; ++i) {{ {wait} }}",
    "prefetch": 'asm volatile("prefetch.global.L2 [%0];" ::"l"({pointer}) : "memory");\n{wait}',
    "texture": _LOADED.format(load="tex1Dfetch<float>(cudaTextureObject_t({number}), 3)", wait="{wait}"),
    "surface": "surf1Dwrite(1.f, cudaSurfaceObject_t({number}), 4);\n__threadfence();\n__syncwarp();\n{wait}",
    "multimem": 'asm volatile("multimem.red.global.add.f32 [%0], %1;" ::"l"({pointer}), "f"(1.f) : "memory");\n{wait}',
    "bulk": 'asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"({pointer}), "r"(0), '
    '"r"(16) : "memory");\n{wait}',
    "atomic": "atomicAdd(const_cast<float*>({pointer}), 1.f);\n{wait}",
    "store": "*(volatile float*)({pointer}) = 1.f;\n{wait}",
    "trigger": "fp4d::grid_dependency_launch_dependents();\nif ({number} > 12345) return;\n{wait}",
    "exit": 'if ({number} == 7) asm volatile("exit;");\n{wait}',
}

_HELPERS = """
namespace fault {
__device__ __noinline__ float helper(float const* from) { return *(volatile float const*)(from + threadIdx.x); }
__device__ __noinline__ float other(float const* from) { return *(volatile float const*)(from + 2 * threadIdx.x); }
}  // namespace fault
"""

_TOKENS = "    for (int i = 0; i < ahead; ++i) load_tokens(i, i);\n"
# Faults of the load of weights and activations themselves: family -> name -> (file, old, new).
OWN_FAULTS = {
    "few_tokens": {
        "moved_activations": (
            "few_tokens/loads.h",
            f"    grid_dependency_wait();\n{_TOKENS}",
            f"{_TOKENS}    grid_dependency_wait();\n",
        ),
        "deleted_producers_wait": (
            "few_tokens/loads.h",
            f"    grid_dependency_wait();\n{_TOKENS}",
            _TOKENS,
        ),
        "pointer_of_activations": (
            "few_tokens/loads.h",
            "Weights::template load<Tile>(p.w,",
            "Weights::template load<Tile>(fault::moved(p.w),",
        ),
    },
    "many_tokens": {
        "moved_activations": (
            "many_tokens/producer.h",
            "    grid_dependency_wait();\n    TokenCopies<Tile> tokens{p, place, ring};\n"
            "    copy_stages<Tile>(tokens, cursor, all);\n",
            "    TokenCopies<Tile> tokens{p, place, ring};\n"
            "    copy_stages<Tile>(tokens, cursor, all);\n    grid_dependency_wait();\n",
        ),
        "deleted_producers_wait": (
            "many_tokens/producer.h",
            "    grid_dependency_wait();\n    TokenCopies<Tile> tokens{p, place, ring};\n",
            "    TokenCopies<Tile> tokens{p, place, ring};\n",
        ),
        "exit_of_idle_lanes": (
            "many_tokens/kernel.h",
            "    grid_dependency_wait();  // no thread ends before it has waited (docs/proof.md); those that copy have"
            "\n",
            "",
        ),
    },
}
_MOVED = """
namespace fault {
// The weights' place, moved by 64 bytes of the arguments: another pointer, or the middle of a tensor map.
template <class Source>
__device__ Source const& moved(Source const& w) {
  return *reinterpret_cast<Source const*>(reinterpret_cast<char const*>(&w) + 8);
}
}  // namespace fault
"""


def copy_of_sources(folder: Path) -> Path:
    """Copy csrc, with one launch shape of each kernel for few tokens: a fault shows in one as well as in twelve.

    Of w4a16_small on sm_90 it is two: tokens come by cp.async, and with wgmma by TMA.
    """
    csrc = folder / "csrc"
    shutil.copytree(installed().csrc, csrc)
    small = sorted(csrc.rglob("*_small.cu"))
    assert len(small) == 4, small
    for path in small:
        text = path.read_text()
        shapes = re.search(r"kInstances\[\] = \{(.*?)\};", text, re.DOTALL)
        assert shapes is not None, path
        first = re.search(r"instance<[^>]*>\(\)", shapes[1])
        assert first is not None, path
        hopper = re.search(r"(#if [^\n]*\n)\s*(instance<[^>]*>\(\))", shapes[1])
        more = f",\n{hopper[1]}{hopper[2]}\n#endif\n" if hopper else ""
        assert bool(more) == (path.stem == "w4a16_small"), path
        path.write_text(text.replace(shapes[1], first[0] + more))
    return csrc


def plant(csrc: Path, family: str, kind: str) -> None:
    """Put a fault of a kind before the barrier of a family."""
    of = FAMILIES[family]
    path = csrc / of.file
    text = path.read_text()
    assert text.count(of.anchor) == 1, f"{of.file} no longer has one {of.anchor!r}"
    fault = FAULTS[kind].format(wait="fp4d::grid_dependency_wait();", pointer=of.pointer, number=of.number)
    changed = text.replace(of.anchor, of.anchor.replace("grid_dependency_wait();", fault))
    first = "#pragma once\n" if path.suffix == ".h" else '#include "'
    assert first in changed
    head, rest = changed.split(first, 1)
    path.write_text(f"{head}{first}{_HELPERS}{rest}" if path.suffix == ".h" else f"{head}{_HELPERS}{first}{rest}")


def plant_own(csrc: Path, family: str, name: str) -> None:
    """Put a fault into the loads of a family."""
    file, old, new = OWN_FAULTS[family][name]
    path = csrc / file
    text = path.read_text()
    assert text.count(old) == 1, f"{file} no longer has one {old!r}"
    path.write_text(text.replace(old, new).replace("#pragma once\n", f"#pragma once\n{_MOVED}", 1))
