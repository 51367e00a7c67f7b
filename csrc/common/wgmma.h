// wgmma with operand B in shared memory and operand A in registers, or of e4m3 in shared memory, too: thin names for
// PTX, functions for the operand types and token counts that the kernels of W4 and W8 weights use.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#asynchronous-warpgroup-level-matrix-instructions
#pragma once

#include <cstdint>

namespace fp4d {

enum class Operand { kE4M3, kBF16, kF16 };

// Operand B along K in rows of 128 bytes, in 128-byte-swizzled blocks of 8 rows = 1024 contiguous bytes, each at a
// multiple of 1024. The next 32 bytes along K (one MMA) are 2 further on in the descriptor.
// Bits 0..13 address / 16, 16..29 unused with a swizzle, 32..45 bytes between blocks of 8 rows / 16, 49..51 zero where
// blocks are aligned, 62..63 = 1: 128-byte swizzle.
constexpr uint64_t kOperandB = (uint64_t(1) << 62) | (uint64_t(1024 >> 4) << 32) | (uint64_t(1) << 16);
constexpr int kDescriptorStep = 32 >> 4;

__device__ __forceinline__ uint64_t operand_b(uint32_t address) {
  return kOperandB | ((address & 0x3ffff) >> 4);
}

// Before the first wgmma, and again after registers that a wgmma reads were written.
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int pending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(pending) : "memory");
}

#define FP4D_R4 "%0, %1, %2, %3"
#define FP4D_R8 FP4D_R4 ", %4, %5, %6, %7"
#define FP4D_R16 FP4D_R8 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define FP4D_R12 FP4D_R8 ", %8, %9, %10, %11"
#define FP4D_R24 FP4D_R16 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define FP4D_R32                                                           \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define FP4D_R40 FP4D_R32 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define FP4D_R48 \
  FP4D_R32       \
  ", "           \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define FP4D_R56 FP4D_R48 ", %48, %49, %50, %51, %52, %53, %54, %55"
#define FP4D_R64                                                                     \
  FP4D_R32                                                                           \
  ", "                                                                               \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define FP4D_R72 FP4D_R64 ", %64, %65, %66, %67, %68, %69, %70, %71"
#define FP4D_R80 \
  FP4D_R64       \
  ", "           \
  "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79"
#define FP4D_R88                                                                                         \
  FP4D_R64                                                                                               \
  ", "                                                                                                   \
  "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, %82, %83, " \
  "%84, %85, %86, %87"
#define FP4D_R96                                                                                         \
  FP4D_R64                                                                                               \
  ", "                                                                                                   \
  "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, %82, %83, " \
  "%84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define FP4D_R104 FP4D_R96 ", %96, %97, %98, %99, %100, %101, %102, %103"
#define FP4D_R112 FP4D_R104 ", %104, %105, %106, %107, %108, %109, %110, %111"
#define FP4D_R120 FP4D_R112 ", %112, %113, %114, %115, %116, %117, %118, %119"
#define FP4D_R128                                                                                \
  FP4D_R64                                                                                       \
  ", "                                                                                           \
  "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "             \
  "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, "             \
  "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, " \
  "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
#define FP4D_D4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define FP4D_D16(i) FP4D_D4(i), FP4D_D4(i + 4), FP4D_D4(i + 8), FP4D_D4(i + 12)
#define FP4D_D32(i)                                                                              \
  FP4D_D4(i), FP4D_D4(i + 4), FP4D_D4(i + 8), FP4D_D4(i + 12), FP4D_D4(i + 16), FP4D_D4(i + 20), \
      FP4D_D4(i + 24), FP4D_D4(i + 28)
#define FP4D_A "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b)
// 16-bit operands. `types` is a literal.
#define FP4D_WGMMA_16BIT(types)                                                                            \
  if constexpr (T == 8) {                                                                                  \
    FP4D_WGMMA("m64n8k16", types, FP4D_R4, "{%4, %5, %6, %7}, %8", "1, 1, 0", FP4D_D4(0));                 \
  } else if constexpr (T == 16) {                                                                          \
    FP4D_WGMMA("m64n16k16", types, FP4D_R8, "{%8, %9, %10, %11}, %12", "1, 1, 0", FP4D_D4(0), FP4D_D4(4)); \
  } else if constexpr (T == 32) {                                                                          \
    FP4D_WGMMA("m64n32k16", types, FP4D_R16, "{%16, %17, %18, %19}, %20", "1, 1, 0", FP4D_D16(0));         \
  } else if constexpr (T == 48) {                                                                          \
    FP4D_WGMMA("m64n48k16", types, FP4D_R24, "{%24, %25, %26, %27}, %28", "1, 1, 0", FP4D_D16(0),          \
               FP4D_D4(16), FP4D_D4(20));                                                                  \
  } else if constexpr (T == 64) {                                                                          \
    FP4D_WGMMA("m64n64k16", types, FP4D_R32, "{%32, %33, %34, %35}, %36", "1, 1, 0", FP4D_D32(0));         \
  } else if constexpr (T == 80) {                                                                          \
    FP4D_WGMMA("m64n80k16", types, FP4D_R40, "{%40, %41, %42, %43}, %44", "1, 1, 0", FP4D_D32(0),          \
               FP4D_D4(32), FP4D_D4(36));                                                                  \
  } else if constexpr (T == 96) {                                                                          \
    FP4D_WGMMA("m64n96k16", types, FP4D_R48, "{%48, %49, %50, %51}, %52", "1, 1, 0", FP4D_D32(0),          \
               FP4D_D16(32));                                                                              \
  } else if constexpr (T == 112) {                                                                         \
    FP4D_WGMMA("m64n112k16", types, FP4D_R56, "{%56, %57, %58, %59}, %60", "1, 1, 0", FP4D_D32(0),         \
               FP4D_D16(32), FP4D_D4(48), FP4D_D4(52));                                                    \
  } else if constexpr (T == 128) {                                                                         \
    FP4D_WGMMA("m64n128k16", types, FP4D_R64, "{%64, %65, %66, %67}, %68", "1, 1, 0", FP4D_D32(0),         \
               FP4D_D32(32));                                                                              \
  } else if constexpr (T == 144) {                                                                         \
    FP4D_WGMMA("m64n144k16", types, FP4D_R72, "{%72, %73, %74, %75}, %76", "1, 1, 0", FP4D_D32(0),         \
               FP4D_D32(32), FP4D_D4(64), FP4D_D4(68));                                                    \
  } else if constexpr (T == 160) {                                                                         \
    FP4D_WGMMA("m64n160k16", types, FP4D_R80, "{%80, %81, %82, %83}, %84", "1, 1, 0", FP4D_D32(0),         \
               FP4D_D32(32), FP4D_D16(64));                                                                \
  } else if constexpr (T == 176) {                                                                         \
    FP4D_WGMMA("m64n176k16", types, FP4D_R88, "{%88, %89, %90, %91}, %92", "1, 1, 0", FP4D_D32(0),         \
               FP4D_D32(32), FP4D_D16(64), FP4D_D4(80), FP4D_D4(84));                                      \
  } else if constexpr (T == 192) {                                                                         \
    FP4D_WGMMA("m64n192k16", types, FP4D_R96, "{%96, %97, %98, %99}, %100", "1, 1, 0", FP4D_D32(0),        \
               FP4D_D32(32), FP4D_D32(64));                                                                \
  } else if constexpr (T == 208) {                                                                         \
    FP4D_WGMMA("m64n208k16", types, FP4D_R104, "{%104, %105, %106, %107}, %108", "1, 1, 0", FP4D_D32(0),   \
               FP4D_D32(32), FP4D_D32(64), FP4D_D4(96), FP4D_D4(100));                                     \
  } else if constexpr (T == 224) {                                                                         \
    FP4D_WGMMA("m64n224k16", types, FP4D_R112, "{%112, %113, %114, %115}, %116", "1, 1, 0", FP4D_D32(0),   \
               FP4D_D32(32), FP4D_D32(64), FP4D_D16(96));                                                  \
  } else if constexpr (T == 240) {                                                                         \
    FP4D_WGMMA("m64n240k16", types, FP4D_R120, "{%120, %121, %122, %123}, %124", "1, 1, 0", FP4D_D32(0),   \
               FP4D_D32(32), FP4D_D32(64), FP4D_D16(96), FP4D_D4(112), FP4D_D4(116));                      \
  } else if constexpr (T == 256) {                                                                         \
    FP4D_WGMMA("m64n256k16", types, FP4D_R128, "{%128, %129, %130, %131}, %132", "1, 1, 0", FP4D_D32(0),   \
               FP4D_D32(32), FP4D_D32(64), FP4D_D32(96));                                                  \
  }
// The second `1` adds to d; a predicate, so it comes from a register.
#define FP4D_WGMMA(shape, types, registers, a_registers, flags, ...)                             \
  asm volatile("{\n.reg .pred add;\nsetp.eq.b32 add, 0, 0;\nwgmma.mma_async.sync.aligned." shape \
               ".f32." types " {" registers "}, " a_registers ", add, " flags ";\n}"             \
               : __VA_ARGS__                                                                     \
               : FP4D_A)

// FP8: adds to d only where `add` is not 0.
#define FP4D_WGMMA_E4M3(shape, registers, a_registers, add_register, ...)                                 \
  asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, " add_register                                       \
               ", 0;\nwgmma.mma_async.sync.aligned." shape ".f32.e4m3.e4m3 {" registers "}, " a_registers \
               ", add, 1, 1;\n}"                                                                          \
               : __VA_ARGS__                                                                              \
               : FP4D_A, "r"(add))

// The same with operand A in shared memory.
#define FP4D_WGMMA_E4M3_SHARED(shape, registers, a, b, add_register, ...)                              \
  asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, " add_register                                    \
               ", 0;\nwgmma.mma_async.sync.aligned." shape ".f32.e4m3.e4m3 {" registers "}, " a ", " b \
               ", add, 1, 1;\n}"                                                                       \
               : __VA_ARGS__                                                                           \
               : "l"(a_at), "l"(b_at), "r"(add))

// d[64 rows][T tokens] = A[64][32] B[T][32]^T, or += that; places as below.
template <int T>
__device__ __forceinline__ void wgmma_e4m3(float (&d)[T / 2], uint32_t const (&a)[4], uint64_t b, int add) {
  static_assert(T == 16 || T == 24 || T == 32 || T == 48 || T == 64 || T == 80 || T == 96 || T == 112 ||
                T == 128 || T == 144 || T == 160 || T == 176 || T == 192 || T == 208);
  if constexpr (T == 16) {
    FP4D_WGMMA_E4M3("m64n16k32", FP4D_R8, "{%8, %9, %10, %11}, %12", "%13", FP4D_D4(0), FP4D_D4(4));
  } else if constexpr (T == 24) {
    FP4D_WGMMA_E4M3("m64n24k32", FP4D_R12, "{%12, %13, %14, %15}, %16", "%17", FP4D_D4(0), FP4D_D4(4),
                    FP4D_D4(8));
  } else if constexpr (T == 32) {
    FP4D_WGMMA_E4M3("m64n32k32", FP4D_R16, "{%16, %17, %18, %19}, %20", "%21", FP4D_D4(0), FP4D_D4(4),
                    FP4D_D4(8), FP4D_D4(12));
  } else if constexpr (T == 48) {
    FP4D_WGMMA_E4M3("m64n48k32", FP4D_R24, "{%24, %25, %26, %27}, %28", "%29", FP4D_D16(0), FP4D_D4(16),
                    FP4D_D4(20));
  } else if constexpr (T == 64) {
    FP4D_WGMMA_E4M3("m64n64k32", FP4D_R32, "{%32, %33, %34, %35}, %36", "%37", FP4D_D32(0));
  } else if constexpr (T == 80) {
    FP4D_WGMMA_E4M3("m64n80k32", FP4D_R40, "{%40, %41, %42, %43}, %44", "%45", FP4D_D32(0), FP4D_D4(32),
                    FP4D_D4(36));
  } else if constexpr (T == 96) {
    FP4D_WGMMA_E4M3("m64n96k32", FP4D_R48, "{%48, %49, %50, %51}, %52", "%53", FP4D_D32(0), FP4D_D16(32));
  } else if constexpr (T == 112) {
    FP4D_WGMMA_E4M3("m64n112k32", FP4D_R56, "{%56, %57, %58, %59}, %60", "%61", FP4D_D32(0), FP4D_D16(32),
                    FP4D_D4(48), FP4D_D4(52));
  } else if constexpr (T == 128) {
    FP4D_WGMMA_E4M3("m64n128k32", FP4D_R64, "{%64, %65, %66, %67}, %68", "%69", FP4D_D32(0), FP4D_D32(32));
  } else if constexpr (T == 144) {
    FP4D_WGMMA_E4M3("m64n144k32", FP4D_R72, "{%72, %73, %74, %75}, %76", "%77", FP4D_D32(0), FP4D_D32(32),
                    FP4D_D4(64), FP4D_D4(68));
  } else if constexpr (T == 160) {
    FP4D_WGMMA_E4M3("m64n160k32", FP4D_R80, "{%80, %81, %82, %83}, %84", "%85", FP4D_D32(0), FP4D_D32(32),
                    FP4D_D16(64));
  } else if constexpr (T == 176) {
    FP4D_WGMMA_E4M3("m64n176k32", FP4D_R88, "{%88, %89, %90, %91}, %92", "%93", FP4D_D32(0), FP4D_D32(32),
                    FP4D_D16(64), FP4D_D4(80), FP4D_D4(84));
  } else if constexpr (T == 192) {
    FP4D_WGMMA_E4M3("m64n192k32", FP4D_R96, "{%96, %97, %98, %99}, %100", "%101", FP4D_D32(0), FP4D_D32(32),
                    FP4D_D32(64));
  } else if constexpr (T == 208) {
    FP4D_WGMMA_E4M3("m64n208k32", FP4D_R104, "{%104, %105, %106, %107}, %108", "%109", FP4D_D32(0),
                    FP4D_D32(32), FP4D_D32(64), FP4D_D4(96), FP4D_D4(100));
  }
}

// Both operands in shared memory, rows of 128 bytes as operand_b() describes them.
template <int T>
__device__ __forceinline__ void wgmma_e4m3(float (&d)[T / 2], uint64_t a_at, uint64_t b_at, int add) {
  static_assert(T == 16 || T == 24 || T == 32 || T == 48 || T == 64 || T == 80 || T == 96 || T == 112 ||
                T == 128 || T == 144 || T == 160 || T == 176 || T == 192 || T == 208 || T == 224);
  if constexpr (T == 16) {
    FP4D_WGMMA_E4M3_SHARED("m64n16k32", FP4D_R8, "%8", "%9", "%10", FP4D_D4(0), FP4D_D4(4));
  } else if constexpr (T == 24) {
    FP4D_WGMMA_E4M3_SHARED("m64n24k32", FP4D_R12, "%12", "%13", "%14", FP4D_D4(0), FP4D_D4(4), FP4D_D4(8));
  } else if constexpr (T == 32) {
    FP4D_WGMMA_E4M3_SHARED("m64n32k32", FP4D_R16, "%16", "%17", "%18", FP4D_D4(0), FP4D_D4(4), FP4D_D4(8),
                           FP4D_D4(12));
  } else if constexpr (T == 48) {
    FP4D_WGMMA_E4M3_SHARED("m64n48k32", FP4D_R24, "%24", "%25", "%26", FP4D_D16(0), FP4D_D4(16), FP4D_D4(20));
  } else if constexpr (T == 64) {
    FP4D_WGMMA_E4M3_SHARED("m64n64k32", FP4D_R32, "%32", "%33", "%34", FP4D_D32(0));
  } else if constexpr (T == 80) {
    FP4D_WGMMA_E4M3_SHARED("m64n80k32", FP4D_R40, "%40", "%41", "%42", FP4D_D32(0), FP4D_D4(32), FP4D_D4(36));
  } else if constexpr (T == 96) {
    FP4D_WGMMA_E4M3_SHARED("m64n96k32", FP4D_R48, "%48", "%49", "%50", FP4D_D32(0), FP4D_D16(32));
  } else if constexpr (T == 112) {
    FP4D_WGMMA_E4M3_SHARED("m64n112k32", FP4D_R56, "%56", "%57", "%58", FP4D_D32(0), FP4D_D16(32),
                           FP4D_D4(48), FP4D_D4(52));
  } else if constexpr (T == 128) {
    FP4D_WGMMA_E4M3_SHARED("m64n128k32", FP4D_R64, "%64", "%65", "%66", FP4D_D32(0), FP4D_D32(32));
  } else if constexpr (T == 144) {
    FP4D_WGMMA_E4M3_SHARED("m64n144k32", FP4D_R72, "%72", "%73", "%74", FP4D_D32(0), FP4D_D32(32),
                           FP4D_D4(64), FP4D_D4(68));
  } else if constexpr (T == 160) {
    FP4D_WGMMA_E4M3_SHARED("m64n160k32", FP4D_R80, "%80", "%81", "%82", FP4D_D32(0), FP4D_D32(32),
                           FP4D_D16(64));
  } else if constexpr (T == 176) {
    FP4D_WGMMA_E4M3_SHARED("m64n176k32", FP4D_R88, "%88", "%89", "%90", FP4D_D32(0), FP4D_D32(32),
                           FP4D_D16(64), FP4D_D4(80), FP4D_D4(84));
  } else if constexpr (T == 192) {
    FP4D_WGMMA_E4M3_SHARED("m64n192k32", FP4D_R96, "%96", "%97", "%98", FP4D_D32(0), FP4D_D32(32),
                           FP4D_D32(64));
  } else if constexpr (T == 208) {
    FP4D_WGMMA_E4M3_SHARED("m64n208k32", FP4D_R104, "%104", "%105", "%106", FP4D_D32(0), FP4D_D32(32),
                           FP4D_D32(64), FP4D_D4(96), FP4D_D4(100));
  } else if constexpr (T == 224) {
    FP4D_WGMMA_E4M3_SHARED("m64n224k32", FP4D_R112, "%112", "%113", "%114", FP4D_D32(0), FP4D_D32(32),
                           FP4D_D32(64), FP4D_D16(96));
  }
}

// d[64 rows][T tokens] += A[64][32 bytes] B[T][32 bytes]^T. d[4 j ..]: rows r, r, r + 8, r + 8 of the warp's 16 and
// tokens 8 j + 2 c, + 1, with r = lane / 4 and c = lane % 4.
template <Operand type, int T>
__device__ __forceinline__ void wgmma(float (&d)[T / 2], uint32_t const (&a)[4], uint64_t b) {
  static_assert(type != Operand::kE4M3 && (T == 8 || T % 16 == 0) && T <= 256);
  if constexpr (type == Operand::kBF16) {
    FP4D_WGMMA_16BIT("bf16.bf16");
  } else if constexpr (type == Operand::kF16) {
    FP4D_WGMMA_16BIT("f16.f16");
  }
}

#undef FP4D_WGMMA_16BIT
#undef FP4D_WGMMA
#undef FP4D_WGMMA_E4M3
#undef FP4D_WGMMA_E4M3_SHARED
#undef FP4D_A
#undef FP4D_D32
#undef FP4D_D16
#undef FP4D_D4
#undef FP4D_R128
#undef FP4D_R120
#undef FP4D_R112
#undef FP4D_R104
#undef FP4D_R96
#undef FP4D_R88
#undef FP4D_R80
#undef FP4D_R72
#undef FP4D_R64
#undef FP4D_R56
#undef FP4D_R48
#undef FP4D_R40
#undef FP4D_R32
#undef FP4D_R24
#undef FP4D_R16
#undef FP4D_R12
#undef FP4D_R8
#undef FP4D_R4

}  // namespace fp4d
