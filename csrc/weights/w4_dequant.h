// NVFP4 weights in W4P order (fp4dispatch/backends/own/tensors/w4_layout.py has the bytes) to what tensor cores read.
//
// A chunk is 64 rows by 64 k. Lane l = 4r + c of a warp holds, of each 16-row unit u, four words A, B, C, D:
// rows 16u+r, 16u+r+8, k 16c .. 16c+7 and 16c+8 .. 16c+15. So it holds one whole scale block of each row. A word
// has the magnitudes of its 8 k in bits 4j .. 4j+2, so that each half selects from a table of 8 bytes (PRMT), and the
// signs where such bytes have theirs: of j < 4 in bit 8j+7, of the others in bit 8(j-4)+3, a shift by 4 away.
//
// Products of a 16-bit MMA m16n8k16 (wgmma m64nTk16 per warp), step s = 0..3 of a chunk: slots 2c, 2c+1 are
// k = 16c+4s, +1 and slots 2c+8, 2c+9 are k = 16c+4s+2, +3. So a0 and a2 are pairs 2(s%2), 2(s%2)+1 of A (s < 2)
// or C, a1 and a3 the same of B or D; the other operand reads 4 consecutive k a lane. Where that operand comes by TMA, k
// stay in their own order and lanes read each other's words (weights/w4_columns.h).
// e4m3 wgmma m64nTk32, step s = 0..1: a0 is the first four k of A (s = 0) or C, a2 the others; a1, a3 of B or D.
#pragma once

#include <cstdint>

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include "common/permute.h"

namespace fp4d::w4 {

constexpr int kChunkRows = 64;
constexpr int kChunkK = 64;
constexpr int kUnits = 4;  // of 16 rows
constexpr int kUnitBytes = 512;
constexpr int kScaleOffset = kUnits * kUnitBytes;
constexpr int kChunkBytes = kScaleOffset + kChunkRows * kChunkK / 16;
static_assert(kChunkBytes == 2304);

// One byte of e4m3 to both halves or one to each, at the place where it reads as a number of type T.
// Selectors for __byte_perm(word, 0, .): bytes 0 and 1 to the halves' low bytes, or bytes 2 and 3.
constexpr uint32_t kLowPair = 0x4140, kHighPair = 0x4342;

template <class T>
struct Dequant;

// What products are multiplied by at the end is kUnscale: dequantised weights come out as w / kUnscale, which keeps every
// intermediate exact (bf16 reaches 2^127, fp16 has its subnormals).
//
// bf16. A magnitude q is the number 32 q in the low byte, which reads as q * 2^-128: below 2^-125 bf16 is a fixed-point
// number. An e4m3 byte shifted by 4 reads as s * 2^-120, subnormals included. Multiplication keeps subnormals. The
// product has 6 significant bits: exact.
template <>
struct Dequant<__nv_bfloat16> {
  using Pair = __nv_bfloat162;
  static constexpr float kUnscale = 512.f;
  static constexpr uint32_t kMagnitudes[2] = {0x30201000, 0xc0806040};
  static constexpr int kScaleShift = 4;

  // Four magnitudes and, on top of four bytes, their signs, to two pairs.
  __device__ static void pairs(uint32_t magnitudes, uint32_t signs, uint32_t* out) {
    signs &= 0x80808080;
    out[0] = __byte_perm(magnitudes, signs, 0x5140);
    out[1] = __byte_perm(magnitudes, signs, 0x7362);
  }

  // Two e4m3 numbers, each in the low byte of a half, to s * 2^119.
  __device__ static Pair scales(uint32_t bytes) {
    uint32_t const raw = bytes << kScaleShift;
    Pair const once = __hmul2(reinterpret_cast<Pair const&>(raw), constant(0x7f007f00));  // 2^127
    return __hmul2(once, constant(0x77807780));                                           // 2^112
  }
  __device__ static Pair low(Pair s) { return __low2bfloat162(s); }
  __device__ static Pair high(Pair s) { return __high2bfloat162(s); }

 private:
  __device__ static Pair constant(uint32_t bits) { return reinterpret_cast<Pair const&>(bits); }
};

// fp16. Bits 11..9, in the high byte, read as q * 2^-14, an e4m3 byte shifted by 7 as s * 2^-8.
template <>
struct Dequant<__half> {
  using Pair = __half2;
  static constexpr float kUnscale = 128.f;
  static constexpr uint32_t kMagnitudes[2] = {0x06040200, 0x0e0c0a08};
  static constexpr int kScaleShift = 7;

  __device__ static void pairs(uint32_t magnitudes, uint32_t signs, uint32_t* out) {
    uint32_t const bytes = magnitudes | (signs & 0x80808080);
    out[0] = __byte_perm(bytes, 0, 0x1404);
    out[1] = __byte_perm(bytes, 0, 0x3424);
  }

  // Two e4m3 numbers, each in the low byte of a half, to s * 2^7.
  __device__ static Pair scales(uint32_t bytes) {
    uint32_t const raw = bytes << kScaleShift, factor = 0x78007800;  // 2^15
    return __hmul2(reinterpret_cast<Pair const&>(raw), reinterpret_cast<Pair const&>(factor));
  }
  __device__ static Pair low(Pair s) { return __low2half2(s); }
  __device__ static Pair high(Pair s) { return __high2half2(s); }
};

// Scales of rows 16u+r (low half) and 16u+r+8 (high half). `bytes` are the lane's bytes of units 2i and 2i+1, `unit`
// is 0 or 1 of those.
template <class T>
__device__ __forceinline__ typename Dequant<T>::Pair unit_scales(uint32_t bytes, int unit) {
  return Dequant<T>::scales(__byte_perm(bytes, 0, unit ? kHighPair : kLowPair));
}

// Eight bytes, one for each magnitude of e2m1.
struct Lut {
  uint32_t low, high;
};

// By what the upper half of a word comes down: a shift, which the ALU pipe does, or a dot product of its halves with
// (0, 1), which the FMA pipe does. All else of a look-up is for the ALU. Where that is the limit, the dot product is
// faster (bench/notes/few-tokens.md, many-tokens.md).
enum class UpperHalf { kShift, kDotProduct };

template <UpperHalf how>
__device__ __forceinline__ uint32_t upper_half(uint32_t word) {
  if constexpr (how == UpperHalf::kShift) {
    return word >> 16;
  } else {
    return __dp2a_lo(word, 0x0100u, 0u);
  }
}

// What a table makes of a word's first four magnitudes and of the others. Signs of the first four are on top of the
// bytes of `word`, those of the others on top of `word * 16`.
template <UpperHalf how>
__device__ __forceinline__ void look_up(uint32_t word, Lut lut, uint32_t& first, uint32_t& second) {
  uint32_t const magnitudes = word & 0x77777777;
  first = permute(lut.low, lut.high, magnitudes);
  second = permute(lut.low, lut.high, upper_half<how>(magnitudes));
}

// A word to four pairs (k = 2j, 2j+1) times its scale (in both halves): value / kUnscale. 15 instructions: 9 on the ALU
// pipe, and 4 products, a shift to the left and a dot product on the FMA pipe.
template <class T>
__device__ __forceinline__ void dequantize(uint32_t word, typename Dequant<T>::Pair scale,
                                           uint32_t (&out)[4]) {
  using D = Dequant<T>;
  uint32_t first, second;
  look_up<UpperHalf::kDotProduct>(word, {D::kMagnitudes[0], D::kMagnitudes[1]}, first, second);
  D::pairs(first, word, out);
  D::pairs(second, word * 16, out + 2);
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    typename D::Pair const product = __hmul2(reinterpret_cast<typename D::Pair const&>(out[j]), scale);
    out[j] = reinterpret_cast<uint32_t const&>(product);
  }
}

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 890

// The table 0, 0.5, 1, 1.5, 2, 3, 4, 6 times s/8, rounded to e4m3: the weights of the FP8 path are defined as
// e4m3_rn(q * s / 8). At most 336, so nothing saturates.
//
// `s` holds s * 2^-8 in both halves (an e4m3 byte shifted left by 7). The products are exact in fp16.
__device__ __forceinline__ Lut e4m3_lut(__half2 s) {
  uint32_t const factors[4] = {0x4c000000, 0x52005000, 0x56005400, 0x5a005800};  // magnitudes * 2^5
  uint32_t pairs[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    __half2 const value = __hmul2(s, reinterpret_cast<__half2 const&>(factors[i]));
    pairs[i] = __nv_cvt_halfraw2_to_fp8x2(value, __NV_SATFINITE, __NV_E4M3);
  }
  return {pairs[0] | pairs[1] << 16, pairs[2] | pairs[3] << 16};
}

// Tables of rows 16u+r and 16u+r+8 from the two bytes that a half each holds in its low byte.
__device__ __forceinline__ void e4m3_luts(uint32_t bytes, Lut (&luts)[2]) {
  uint32_t const raw = bytes << 7;
  __half2 const s = reinterpret_cast<__half2 const&>(raw);
  luts[0] = e4m3_lut(__low2half2(s));
  luts[1] = e4m3_lut(__high2half2(s));
}

// A word to e4m3 of its first four k and of the others: 7 instructions, of which 6 or 5 are on the ALU pipe.
template <UpperHalf how = UpperHalf::kShift>
__device__ __forceinline__ void to_e4m3(uint32_t word, Lut lut, uint32_t& first, uint32_t& second) {
  look_up<how>(word, lut, first, second);
  first |= word & 0x80808080;
  second |= word * 16 & 0x80808080;
}

#endif

}  // namespace fp4d::w4
