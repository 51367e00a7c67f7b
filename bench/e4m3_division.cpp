// Exhaustive: for every 24-bit significand of a scale and every 11-bit significand of an element (fp16; those of bf16
// are among them), the quotient fma(x, hi, x * lo) of csrc/quantise/quantize.h lies on the same side of every number of 5
// significant bits as the IEEE quotient, or is that number as well. Code boundaries of e4m3 have at most 5 bits, so the
// codes are equal. Powers of two only move exponents (the header bounds them).
//
//   g++ -O3 -march=native -ffp-contract=off bench/e4m3_division.cpp && ./a.out
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>

static inline uint32_t bits(float value) {
  uint32_t word;
  std::memcpy(&word, &value, 4);
  return word;
}

// Twice the number of 5-bit numbers below, plus whether it is between two.
static inline uint32_t side(float value) {
  uint32_t const word = bits(value);
  return (word >> 19) * 2 + ((word & 0x7ffffu) != 0);
}

static inline float reciprocal_rz(float b) {
  float r = 1.f / b;
  if (std::fma(double(r), double(b), -1.0) > 0) r = std::nextafterf(r, 0.f);  // the product is exact in fp64
  return r;
}

int main() {
  uint64_t wrong = 0, other = 0;
  for (int s = 0; s < 1 << 23; ++s) {
    float const b = 1.f + float(s) * 0x1p-23f;
    float const hi = reciprocal_rz(b);
    float const lo = std::fmaf(-hi, b, 1.f) * std::nextafterf(hi, 2.f);  // hi + ulp
    uint32_t bad = 0, differ = 0;
    for (int i = 0; i < 1024; ++i) {
      float const x = 1.f + float(i) * 0x1p-10f;
      float const q = std::fmaf(x, hi, x * lo), exact = x / b;
      bad += side(q) != side(exact);
      differ += bits(q) != bits(exact);
    }
    wrong += bad;
    other += differ;
  }
  // Scales: amax / 448 for every bf16 and fp16 number, as fma(amax, hi, amax * lo).
  float const hi = reciprocal_rz(448.f), lo = std::fmaf(-hi, 448.f, 1.f) * hi;
  uint64_t scales = 0;
  for (uint32_t i = 1; i < 0x7f80; ++i) {
    uint32_t const word = i << 16;
    float amax;
    std::memcpy(&amax, &word, 4);
    scales += std::fmax(amax / 448.f, 0x1p-116f) != std::fmax(std::fmaf(amax, hi, amax * lo), 0x1p-116f);
  }
  for (int e = -24; e <= 16; ++e)
    for (int i = 0; i < 1024; ++i) {
      float const amax = std::ldexp(1.f + float(i) * 0x1p-10f, e);
      scales += amax / 448.f != std::fmaf(amax, hi, amax * lo);
    }
  std::printf(
      "codes that differ: %llu; quotients that differ: %llu of %llu; scales that differ: %llu (hi %a, lo "
      "%a)\n",
      (unsigned long long)wrong, (unsigned long long)other, 1ull << 33, (unsigned long long)scales,
      double(hi), double(lo));
  return wrong != 0 || scales != 0;
}
