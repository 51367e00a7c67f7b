# ruff: noqa: E501  (lines of CUDA)
"""Small kernels: good ones, which must be accepted, and mutants with one fault each, which must be refused.

The compiler may move an access below the wait, and then nothing is wrong: ``USE`` and ``DONE`` keep it above. A body is
the code of a kernel of ``P const& p``. The one declaration is that of W4 kernels: bulk copies from the pointer
at byte 0, plus the numbers at bytes 8 to 16; kernels named ``map_*`` declare the tensor map at byte 0 instead.
"""

from __future__ import annotations

PRELUDE = r"""
#include <cstdint>
#include <cuda_runtime.h>
#define WAIT() asm volatile("griddepcontrol.wait;" ::: "memory")
#define TRIGGER() asm volatile("griddepcontrol.launch_dependents;" ::: "memory")
struct P {
  uint8_t const* w;
  int n, k;
  float* x;
  float* out;
  float const* const* table;
  uint32_t* mask;
  cudaTextureObject_t texture;
  cudaSurfaceObject_t surface;
  float (*function)(float const*, int);
};
struct alignas(128) Map { char bytes[128]; };
struct Maps { Map w, x; int n; float* out; Map const* far; };
#define USE(v) shared[threadIdx.x & 63] = char(int(v)); __syncthreads()
#define DONE() __threadfence(); __syncthreads()
__device__ float global_number;
__constant__ float user_constant[64];
__shared__ __align__(128) char shared[4096];
__device__ __forceinline__ uint32_t at() { return uint32_t(__cvta_generic_to_shared(shared)); }
__device__ __forceinline__ float load(float const* from) {
  float v;
  asm volatile("ld.global.f32 %0, [%1];" : "=f"(v) : "l"(from) : "memory");
  return v;
}
__device__ __forceinline__ void bulk(void const* from) {
  asm volatile("cp.async.bulk.SHARED.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(at()),
               "l"(from), "r"(256), "r"(at() + 2048) : "memory");
}
__device__ __forceinline__ void box(void const* map, int y) {
  asm volatile("cp.async.bulk.tensor.2d.SHARED.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(at()),
               "l"(map), "r"(0), "r"(y), "r"(at() + 2048) : "memory");
}
__device__ __noinline__ float helper(float const* from, int i) { return load(from + i) * 2.f; }
__device__ __noinline__ float other(float const* from, int i) { return load(from + i) * 3.f; }
__device__ __noinline__ float deep(float const* from, int i) { return helper(from + i, 2 * i) + 1.f; }
__device__ __noinline__ float recursive(float const* from, int n) {
  return n <= 0 ? 0.f : load(from + n) + recursive(from, n - 1) * 3.f;
}
__device__ __noinline__ void keep(float* to, float v) { asm volatile("st.global.f32 [%0], %1;" ::"l"(to), "f"(v)); }
__device__ __noinline__ void wait_sometimes(int n) { if (n > 3) WAIT(); }
__device__ __noinline__ void wait_in_helper(int n) { shared[n & 63] = 1; WAIT(); }
__device__ __noinline__ float number(int n) { return float(shared[n & 63]) * 0.5f; }
"""

_LATE = "p.out[threadIdx.x] = v + p.x[threadIdx.x];"

GOOD: dict[str, str] = {
    "plain": f"WAIT(); float v = 1.f; {_LATE}",
    "early_weights": f"if (threadIdx.x == 0) bulk(p.w + int64_t(p.n) * p.k * 8); WAIT(); float v = 1.f; {_LATE}",
    "early_weights_in_a_loop": f"for (int i = 0; i < p.n; ++i) if (threadIdx.x == 0) bulk(p.w + i * p.k); WAIT(); "
    f"float v = 1.f; {_LATE}",
    "division": f"int64_t q = int64_t(p.n) * 77777777777 / p.k; if (threadIdx.x == 0) bulk(p.w + q * 16); WAIT(); "
    f"float v = 1.f; {_LATE}",
    "early_trigger": f"TRIGGER(); WAIT(); float v = 1.f; {_LATE}",
    "helper_after": "WAIT(); p.out[threadIdx.x] = helper(p.x, p.n);",
    "helper_of_numbers": f"float v = number(p.n); WAIT(); {_LATE}",
    "helper_that_waits": f"wait_in_helper(p.n); float v = 1.f; {_LATE}",
    "shared_memory": f"shared[threadIdx.x] = p.n; __syncthreads(); float v = shared[p.k & 63]; WAIT(); {_LATE}",
    "exit_after": f"WAIT(); if (threadIdx.x > p.n) return; float v = 1.f; {_LATE}",
    "roles": f"float v = 1.f; if (threadIdx.x < 32) {{ if (threadIdx.x == 0) bulk(p.w); WAIT(); bulk(p.x); }} else "
    f"{{ WAIT(); {_LATE} }}",
    "pick": f"WAIT(); float v = p.n == 1 ? helper(p.x, 1) : other(p.x, 2); {_LATE}",
}

GOOD_MAPS: dict[str, str] = {
    "map_weights": "if (threadIdx.x == 0) box(&p.w, p.n); WAIT(); p.out[threadIdx.x] = 1.f;",
    "map_prefetch": 'asm volatile("prefetch.tensormap [%0];" ::"l"(&p.x) : "memory"); WAIT(); p.out[threadIdx.x] = 1.f;',
}

MUTANTS: dict[str, dict[str, str]] = {
    "moved": {
        "load": "float v = load(p.x + threadIdx.x); WAIT(); p.out[threadIdx.x] = v;",
        "load_of_weights": "float v = load((float const*)p.w); WAIT(); p.out[threadIdx.x] = v;",
        "load_16_bytes": 'uint4 v; asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), '
        '"=r"(v.w) : "l"(p.x)); WAIT(); p.out[0] = v.x + v.y + v.z + v.w;',
        "load_without_coherence": 'float v; asm volatile("ld.global.nc.f32 %0, [%1];" : "=f"(v) : "l"(p.x)); USE(v); '
        "WAIT(); p.out[threadIdx.x] = v;",
        "generic_load": 'float v; asm volatile("ld.f32 %0, [%1];" : "=f"(v) : "l"(p.x)); WAIT(); p.out[0] = v;',
        "copy_to_shared": 'asm volatile("cp.async.ca.shared.global [%0], [%1], 16;" ::"r"(at()), "l"(p.x)); WAIT(); '
        "p.out[0] = 1.f;",
        "global_variable": "float v = *(float volatile*)&global_number; WAIT(); p.out[0] = v;",
        "user_constant": "float v = user_constant[threadIdx.x & 63]; USE(v); WAIT(); p.out[0] = v;",
    },
    "deleted": {
        "wait": f"float v = 1.f; {_LATE}",
        "wait_of_one_role": f"float v = 1.f; if (threadIdx.x < 32) {{ WAIT(); bulk(p.x); }} else {{ {_LATE} }}",
        "wait_of_the_copier": f"float v = 1.f; if (threadIdx.x < 32) bulk(p.x); else {{ WAIT(); {_LATE} }}",
        "trigger_for_wait": f"TRIGGER(); float v = 1.f; {_LATE}",
    },
    "conditional": {
        "wait": f"if (p.n > 3) WAIT(); float v = 1.f; {_LATE}",
        "wait_of_some_threads": f"if (threadIdx.x != 5) WAIT(); float v = 1.f; {_LATE}",
        "wait_after_a_switch": f"switch (p.n) {{ case 1: WAIT(); break; case 2: WAIT(); break; case 3: break; default: "
        f"WAIT(); }} float v = 1.f; {_LATE}",
        "wait_or_load": "float v = 0.f; if (p.n > 3) v = load(p.x); else WAIT(); WAIT(); p.out[0] = v;",
    },
    "helper": {
        "load": "float v = helper(p.x, threadIdx.x); WAIT(); p.out[0] = v;",
        "load_two_deep": "float v = deep(p.x, threadIdx.x); WAIT(); p.out[0] = v;",
        "store": f"keep(p.out, 2.f); WAIT(); float v = 1.f; {_LATE}",
        "recursion": "float v = recursive(p.x, p.n); WAIT(); p.out[0] = v;",
        "wait": f"wait_sometimes(p.n); float v = 1.f; {_LATE}",
        "called_twice": "float v = helper(p.x, 1) + helper(p.x, 2); WAIT(); p.out[0] = v;",
    },
    "pointer": {
        "function": "float v = p.function(p.x, 1); WAIT(); p.out[0] = v;",
        "function_of_two": "auto f = p.n & 1 ? helper : other; float v = f(p.x, 1); WAIT(); p.out[0] = v;",
        "function_of_shared": "auto f = *(float (**)(float const*, int))shared; float v = f(p.x, 1); WAIT(); p.out[0] = v;",
        "other_argument": f"if (threadIdx.x == 0) bulk(p.x + p.n); WAIT(); float v = 1.f; {_LATE}",
        "either": f"if (threadIdx.x == 0) bulk(p.n > 3 ? (void const*)p.w : p.x); WAIT(); float v = 1.f; {_LATE}",
        "difference": f"if (threadIdx.x == 0) bulk(p.w + ((uint8_t const*)p.x - p.w)); WAIT(); float v = 1.f; {_LATE}",
        "in_memory": f"if (threadIdx.x == 0) bulk(p.table[p.n]); WAIT(); float v = 1.f; {_LATE}",
        "through_shared": "*(void const**)shared = p.x; __syncthreads(); if (threadIdx.x == 0) bulk(*(void* "
        f"volatile*)shared); WAIT(); float v = 1.f; {_LATE}",
        "offset_from_memory": f"if (threadIdx.x == 0) bulk(p.w + int(load(p.x))); WAIT(); float v = 1.f; {_LATE}",
        "global_variable": f"if (threadIdx.x == 0) bulk(&global_number); WAIT(); float v = 1.f; {_LATE}",
        "indexed_argument": "void const* const* all = (void const* const*)&p; if (threadIdx.x == 0) bulk(all[p.n & 3]); "
        f"WAIT(); float v = 1.f; {_LATE}",
        "number_beyond_the_declared": f"if (threadIdx.x == 0) bulk(p.w + p.texture); WAIT(); float v = 1.f; {_LATE}",
    },
    "loop": {
        "wait_in_a_loop": f"for (int i = 0; i < p.n; ++i) WAIT(); float v = 1.f; {_LATE}",
        "load_in_a_loop": "float v = 0; for (int i = 0; i < p.n; ++i) v += load(p.x + i); WAIT(); p.out[0] = v;",
        "next_pointer": "void const* from = p.w; for (int i = 0; i < p.n; ++i) { if (threadIdx.x == 0) bulk(from); from = "
        f"p.x; }} WAIT(); float v = 1.f; {_LATE}",
        "wait_before_the_last": f"int i = 0; do {{ if (i == 2) WAIT(); }} while (++i < p.n); float v = 1.f; {_LATE}",
    },
    "prefetch": {
        "l2": f'asm volatile("prefetch.global.L2 [%0];" ::"l"(p.x)); WAIT(); float v = 1.f; {_LATE}',
        "l1": f'asm volatile("prefetch.global.L1 [%0];" ::"l"(p.x)); WAIT(); float v = 1.f; {_LATE}',
        "bulk": f'asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(p.x), "r"(256)); WAIT(); float v = '
        f"1.f; {_LATE}",
        "uniform": f'asm volatile("prefetchu.L1 [%0];" ::"l"(p.x)); WAIT(); float v = 1.f; {_LATE}',
    },
    "texture": {
        "fetch": "float v = tex1Dfetch<float>(p.texture, threadIdx.x); WAIT(); p.out[0] = v;",
        "two_dimensions": "float v = tex2D<float>(p.texture, 0.5f * threadIdx.x, 1.f); WAIT(); p.out[0] = v;",
        "gather": "float4 v = tex2Dgather<float4>(p.texture, 0.5f, 1.f); WAIT(); p.out[0] = v.x;",
        "size": 'uint32_t v; asm volatile("txq.width.b32 %0, [%1];" : "=r"(v) : "l"(p.texture)); WAIT(); p.out[0] = v;',
    },
    "surface": {
        "load": "float v; surf1Dread(&v, p.surface, threadIdx.x * 4); USE(v); WAIT(); p.out[0] = v;",
        "load_two_dimensions": "float v; surf2Dread(&v, p.surface, threadIdx.x * 4, 1); USE(v); WAIT(); p.out[0] = v;",
        "store": f"surf1Dwrite(1.f, p.surface, threadIdx.x * 4); DONE(); WAIT(); float v = 1.f; {_LATE}",
        "reduction": 'asm volatile("sured.b.1d.add.u32.trap [%0, {%1}], %2;" ::"l"(p.surface), "r"(0), "r"(1)); DONE(); WAIT(); '
        f"float v = 1.f; {_LATE}",
    },
    "multimem": {
        "load": 'float v; asm volatile("multimem.ld_reduce.global.add.f32 %0, [%1];" : "=f"(v) : "l"(p.x)); WAIT(); '
        "p.out[0] = v;",
        "store": f'asm volatile("multimem.st.global.f32 [%0], %1;" ::"l"(p.x), "f"(1.f)); WAIT(); float v = 1.f; {_LATE}',
        "reduction": f'asm volatile("multimem.red.global.add.f32 [%0], %1;" ::"l"(p.x), "f"(1.f)); WAIT(); float v = 1.f; '
        f"{_LATE}",
    },
    "bulk": {
        "to_global": 'asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(p.w), "r"(at()), '
        f'"r"(256)); WAIT(); float v = 1.f; {_LATE}',
        "reduction": 'asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.u32 [%0], [%1], %2;" '
        f'::"l"(p.w), "r"(at()), "r"(256)); WAIT(); float v = 1.f; {_LATE}',
        "multicast": 'asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster '
        '[%0], [%1], %2, [%3], %4;" ::"r"(at()), "l"(p.w), "r"(256), "r"(at() + 2048), "h"(uint16_t(3)) : "memory"); '
        f"WAIT(); float v = 1.f; {_LATE}",
        "undeclared_map": 'asm volatile("cp.async.bulk.tensor.2d.SHARED.global.mbarrier::complete_tx::bytes [%0], [%1, '
        '{%2, %3}], [%4];" ::"r"(at()), "l"(&p), "r"(0), "r"(0), "r"(at() + 2048) : "memory"); '
        f"WAIT(); float v = 1.f; {_LATE}",
    },
    "atomic": {
        "reduction": f"atomicAdd(p.x, 1.f); WAIT(); float v = 1.f; {_LATE}",
        "of_which_the_old_is_read": "uint32_t v = atomicOr(p.mask, 1); WAIT(); p.out[0] = v;",
        "exchange": "uint32_t v = atomicCAS(p.mask, 1, 2); WAIT(); p.out[0] = v;",
        "of_two_halves": 'asm volatile("red.global.add.noftz.f16x2 [%0], %1;" ::"l"(p.mask), "r"(1)); WAIT(); float v = '
        f"1.f; {_LATE}",
    },
    "store": {
        "plain": f"*(float volatile*)p.out = 1.f; WAIT(); float v = 1.f; {_LATE}",
        "generic": f'asm volatile("st.f32 [%0], %1;" ::"l"(p.out), "f"(1.f)); WAIT(); float v = 1.f; {_LATE}',
        "release": f'asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(p.mask), "r"(1)); WAIT(); float v = 1.f; '
        f"{_LATE}",
        "global_variable": f"*(float volatile*)&global_number = 1.f; WAIT(); float v = 1.f; {_LATE}",
    },
    "trigger": {
        "before_an_exit": f"TRIGGER(); if (threadIdx.x > p.n) return; WAIT(); float v = 1.f; {_LATE}",
        "before_the_last_write_of_a_grid_that_never_waits": "TRIGGER(); p.out[threadIdx.x] = 1.f;",
        "before_a_wait_of_some": f"TRIGGER(); if (threadIdx.x < 32) WAIT(); float v = 1.f; {_LATE}",
        "and_a_write_before_the_wait": "TRIGGER(); *(float volatile*)p.out = 1.f; WAIT();",
    },
    "exit": {
        "of_some_threads": f"if (threadIdx.x > p.n) return; WAIT(); float v = 1.f; {_LATE}",
        "of_some_blocks": f"if (blockIdx.x > p.n) return; WAIT(); float v = 1.f; {_LATE}",
        "of_all": "if (p.n > 100) shared[threadIdx.x] = 1;",
        "of_a_role": f"float v = 1.f; if (threadIdx.x < 32) {{ bulk(p.w); return; }} WAIT(); {_LATE}",
        "instruction": f'if (p.n == 7) asm volatile("exit;"); WAIT(); float v = 1.f; {_LATE}',
    },
}

MAP_MUTANTS: dict[str, dict[str, str]] = {
    "pointer": {
        "map_of_another": "if (threadIdx.x == 0) box(&p.x, p.n); WAIT(); p.out[threadIdx.x] = 1.f;",
        "map_of_either": "if (threadIdx.x == 0) box(p.n > 3 ? &p.w : &p.x, p.n); WAIT(); p.out[threadIdx.x] = 1.f;",
        "map_in_memory": "if (threadIdx.x == 0) box(p.far, p.n); WAIT(); p.out[threadIdx.x] = 1.f;",
        "map_indexed": "if (threadIdx.x == 0) box(&p.w + p.n, 0); WAIT(); p.out[threadIdx.x] = 1.f;",
    },
    "prefetch": {
        "map_in_memory": 'asm volatile("prefetch.tensormap [%0];" ::"l"(p.far) : "memory"); WAIT(); p.out[threadIdx.x] = 1.f;',
        "map_tile": 'asm volatile("cp.async.bulk.prefetch.tensor.2d.L2.global [%0, {%1, %2}];" ::"l"(&p.w), "r"(0), "r"(0) '
        ': "memory"); WAIT(); p.out[threadIdx.x] = 1.f;',
    },
    "bulk": {
        "map_store": 'asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%1, %2}], [%3];" ::"l"(&p.w), '
        '"r"(0), "r"(0), "r"(at()) : "memory"); WAIT(); p.out[threadIdx.x] = 1.f;',
        "map_of_three_dimensions": 'asm volatile("cp.async.bulk.tensor.3d.SHARED.global.mbarrier::complete_tx::bytes '
        '[%0], [%1, {%2, %3, %4}], [%5];" ::"r"(at()), "l"(&p.w), "r"(0), "r"(0), "r"(0), "r"(at() + 2048) : "memory"); '
        "WAIT(); p.out[threadIdx.x] = 1.f;",
    },
}


def source(target: str) -> str:
    """Return one file with every kernel: ``good_NAME``, or ``CLASS__NAME`` for a mutant."""
    text = [PRELUDE]
    for group, argument in ((GOOD, "P"), (GOOD_MAPS, "Maps")):
        text += [_kernel(f"good__{name}", body, argument) for name, body in group.items()]
    for classes, argument in ((MUTANTS, "P"), (MAP_MUTANTS, "Maps")):
        for kind, rows in classes.items():
            text += [_kernel(f"{kind}__{name}", body, argument) for name, body in rows.items()]
    # From sm_100 on a copy to this CTA goes by its own name, as in csrc/common/async_copy.h.
    return "\n".join(text).replace("SHARED", "shared::cluster" if target == "90a" else "shared::cta")


def _kernel(name: str, body: str, argument: str) -> str:
    return f'extern "C" __global__ void {name}(__grid_constant__ {argument} const p) {{ {body} }}'
