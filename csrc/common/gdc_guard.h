// Makes a build whose barriers would silently vanish a compile error. Every kernel that may be launched with
// PDL includes this file first.
//
// CUTLASS turns griddepcontrol.wait and .launch_dependents into nothing unless the define of the right family
// and a target with a feature suffix come together (CUTLASS 4.5,
// include/cutlass/arch/grid_dependency_control.h); a PDL launch of such a binary races with the previous
// kernel (flashinfer#2708). The conditions below are the same, so what passes here has its barriers:
//   sm_90                 CUTLASS_ENABLE_GDC_FOR_SM90  and target 90a
//   sm_100 and later      CUTLASS_ENABLE_GDC_FOR_SM100 and a target with suffix a or f
//   before sm_90          no griddepcontrol exists, nothing to check
//
// FP4D_TEST_ALLOW_NO_GDC switches the check off. It exists for the negative control of the race test alone.
#pragma once

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900

// Feature suffix: __CUDA_ARCH_FEAT_SM*_ALL for a; __CUDA_ARCH_SPECIFIC__ (a) and
// __CUDA_ARCH_FAMILY_SPECIFIC__ (a and f) since CUDA 12.9,
// https://docs.nvidia.com/cuda/cuda-c-programming-guide/#feature-set-compiler-targets
#if defined(__CUDA_ARCH_SPECIFIC__) || defined(__CUDA_ARCH_FAMILY_SPECIFIC__) ||  \
    defined(__CUDA_ARCH_FEAT_SM90_ALL) || defined(__CUDA_ARCH_FEAT_SM100_ALL) ||  \
    defined(__CUDA_ARCH_FEAT_SM103_ALL) || defined(__CUDA_ARCH_FEAT_SM110_ALL) || \
    defined(__CUDA_ARCH_FEAT_SM120_ALL) || defined(__CUDA_ARCH_FEAT_SM121_ALL)
#define FP4D_ARCH_HAS_SUFFIX
#endif

#if __CUDA_ARCH__ == 900
#define FP4D_ARCH_IS_SM90
#elif __CUDA_ARCH__ == 1000 || __CUDA_ARCH__ == 1030 || __CUDA_ARCH__ == 1100 || __CUDA_ARCH__ == 1200 || \
    __CUDA_ARCH__ == 1210
#define FP4D_ARCH_IS_SM100_OR_LATER
#endif

#if defined(FP4D_ARCH_HAS_SUFFIX) &&                                         \
    ((defined(FP4D_ARCH_IS_SM90) && defined(CUTLASS_ENABLE_GDC_FOR_SM90)) || \
     (defined(FP4D_ARCH_IS_SM100_OR_LATER) && defined(CUTLASS_ENABLE_GDC_FOR_SM100)))
#define FP4D_GDC_ENABLED
#endif

#if !defined(FP4D_TEST_ALLOW_NO_GDC)
#if !defined(FP4D_ARCH_IS_SM90) && !defined(FP4D_ARCH_IS_SM100_OR_LATER)
#error "fp4dispatch: gdc_guard.h does not know this architecture; check CUTLASS's GDC conditions and add it"
#elif !defined(FP4D_ARCH_HAS_SUFFIX)
#error "fp4dispatch: plain target: GDC barriers need a suffix (90a, 100f, 103a, 110a, 120f, 121a)"
#elif defined(FP4D_ARCH_IS_SM90) && defined(CUTLASS_ENABLE_GDC_FOR_SM100)
#error \
    "fp4dispatch: wrong family: CUTLASS_ENABLE_GDC_FOR_SM100 does nothing on sm_90; use CUTLASS_ENABLE_GDC_FOR_SM90"
#elif defined(FP4D_ARCH_IS_SM100_OR_LATER) && defined(CUTLASS_ENABLE_GDC_FOR_SM90)
#error "fp4dispatch: wrong family: CUTLASS_ENABLE_GDC_FOR_SM90 is for sm_90; use CUTLASS_ENABLE_GDC_FOR_SM100"
#elif !defined(FP4D_GDC_ENABLED)
#error "fp4dispatch: no GDC define: the barriers would compile to nothing; see jit_flags/"
#endif
#endif

#endif  // __CUDA_ARCH__ >= 900

#if defined(__CUDACC__)
namespace fp4d {

// Waits until the previous grid of the stream has finished and its writes are visible; returns at once where
// the kernel was not launched with PDL. The clobber keeps the compiler from moving memory accesses above it.
__device__ __forceinline__ void grid_dependency_wait() {
#if defined(FP4D_GDC_ENABLED)
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Lets the next grid of the stream start. Gives no visibility of writes: the next grid must wait for those.
__device__ __forceinline__ void grid_dependency_launch_dependents() {
#if defined(FP4D_GDC_ENABLED)
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

}  // namespace fp4d
#endif
