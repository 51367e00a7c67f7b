// NVFP4 weights in W4P order (fp4dispatch/backends/w4_layout.py has the bytes) to what tensor cores read.
//
// A chunk is 64 rows by 64 k. Lane l = 4r + c of a warp holds, of each 16-row unit u, four words A, B, C, D:
// rows 16u+r, 16u+r+8, k 16c .. 16c+7 and 16c+8 .. 16c+15. So it holds one whole scale block of each row. A word
// has the codes of the even k in bits 4j of its low half and those of the odd k in its high half, j = 0..3: pair j
// is k = 2j, 2j+1.
//
// Products of a 16-bit MMA m16n8k16 (wgmma m64nTk16 per warp), step s = 0..3 of a chunk: slots 2c, 2c+1 are
// k = 16c+4s, +1 and slots 2c+8, 2c+9 are k = 16c+4s+2, +3. So a0 and a2 are pairs 2(s%2), 2(s%2)+1 of A (s < 2)
// or C, a1 and a3 the same of B or D; the other operand reads 4 consecutive k a lane.
// e4m3 wgmma m64nTk32, step s = 0..1: a0 is the even k of A (s = 0) or C, a2 the odd k; a1, a3 of B or D.
#pragma once

#include <cstdint>

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

namespace fp4d::w4 {

constexpr int kChunkRows = 64;
constexpr int kChunkK = 64;
constexpr int kUnits = 4;  // of 16 rows
constexpr int kUnitBytes = 512;
constexpr int kScaleOffset = kUnits * kUnitBytes;
constexpr int kChunkBytes = kScaleOffset + kChunkRows * kChunkK / 16;
static_assert(kChunkBytes == 2304);

// What products of the 16-bit paths are multiplied by at the end: dequantised weights come out as w * 2^-7, which
// keeps every intermediate exact (bf16 reaches 2^127, fp16 has its subnormals).
constexpr float kUnscale = 128.f;

// One byte of e4m3 to both halves or one to each, at the place where it reads as a number of type T.
// Selectors for __byte_perm(word, 0, .): bytes 0 and 1 to the halves' low bytes, or bytes 2 and 3.
constexpr uint32_t kLowPair = 0x4140, kHighPair = 0x4342;

template <class T>
struct Dequant;

// bf16. A code's bits e e m at bits 8..6 read as q * 2^-126, zero and 0.5 (a subnormal) included; an e4m3 byte
// shifted by 4 reads as s * 2^-120, subnormals included. Multiplication keeps subnormals. The product has 6
// significant bits: exact.
template <>
struct Dequant<__nv_bfloat16> {
  using Pair = __nv_bfloat162;
  // Nibble n = s e e m times this: s to bit 15, e e m to bits 8..6, and copies that the mask removes. No carry.
  static constexpr uint32_t kSpread = (1 << 12) | (1 << 6), kBias = 0, kMask = 0x81c081c0;
  static constexpr int kScaleShift = 4;

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

// fp16. Bits 11..9 read as q * 2^-14, an e4m3 byte shifted by 7 as s * 2^-8.
template <>
struct Dequant<__half> {
  using Pair = __half2;
  // 9n * 2^9: bits 11..9 are e e m. Of 9n - 8 = 64s + 9 eem + 8(s - 1), bit 6 is s, but for n = 0, which comes out
  // as -0. That borrows from the high half, so its bits below 9, which the mask removes, start with something.
  static constexpr uint32_t kSpread = 9 << 9, kBias = 0x01000000u - 0x10001000u, kMask = 0x8e008e00;
  static constexpr int kScaleShift = 7;

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

// A word to four pairs (k = 2j, 2j+1) times its scale (in both halves): value * 2^-7. 17 instructions: a mask, a
// multiplication that moves sign and magnitude at once, a mask and the product each, and one shift.
template <class T>
__device__ __forceinline__ void dequantize(uint32_t word, typename Dequant<T>::Pair scale,
                                           uint32_t (&out)[4]) {
  using D = Dequant<T>;
  uint32_t const upper = word >> 8;
  uint32_t const bits[4] = {
      (word & 0x000f000f) * D::kSpread + D::kBias,
      (word & 0x00f000f0) * (D::kSpread >> 4) + D::kBias,
      (upper & 0x000f000f) * D::kSpread + D::kBias,
      (upper & 0x00f000f0) * (D::kSpread >> 4) + D::kBias,
  };
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    uint32_t const masked = bits[j] & D::kMask;
    typename D::Pair const product = __hmul2(reinterpret_cast<typename D::Pair const&>(masked), scale);
    out[j] = reinterpret_cast<uint32_t const&>(product);
  }
}

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 890

// The eight magnitudes 0, 0.5, 1, 1.5, 2, 3, 4, 6 times s/8, rounded to e4m3: the weights of the FP8 path are
// defined as e4m3_rn(q * s / 8). At most 336, so nothing saturates.
struct Lut {
  uint32_t low, high;
};

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

// A word to e4m3 of its four even k and its four odd k.
__device__ __forceinline__ void to_e4m3(uint32_t word, Lut lut, uint32_t& even, uint32_t& odd) {
  uint32_t const magnitude = word & 0x77777777;
  uint32_t const sign = (word >> 1) & 0x44444444;  // selects byte 0 (0x00) or byte 4 (0x80)
  even = __byte_perm(lut.low, lut.high, magnitude) | __byte_perm(0, 0x80808080, sign);
  odd = __byte_perm(lut.low, lut.high, magnitude >> 16) | __byte_perm(0, 0x80808080, sign >> 16);
}

#endif

}  // namespace fp4d::w4
