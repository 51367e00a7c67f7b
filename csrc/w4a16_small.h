// The kernel of w4a16_small.cu.
//
// A CTA takes RB blocks of 64 rows. A producer warp keeps a ring of stages full, each kStageChunks chunks along K
// of every row block and the activations that belong to them; the weights of the first ring are under way before
// the previous grid has finished. Two consumer warps share a row block, 32 rows each: they read words from shared
// memory, dequantise them into fragments of operand A and multiply by the tokens, operand B. Operand B needs no
// shuffle: with W4P's order of k a lane reads 32 consecutive bytes of a token per chunk.
// K is split over KG groups of warps in a CTA (each with its producer and ring) and over the CTAs of a cluster. At
// the end everyone sends its sums to the CTA that owns the rows, through distributed shared memory, and that one
// adds them in a fixed order: no workspace, no atomics, the same bits each time.
#pragma once

#include <algorithm>

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include "async_copy.h"
#include "gdc_guard.h"
#include "w4_dequant.h"
#include "w4_wgmma.h"

// Hopper's wgmma: the build for 90a alone.
#if defined(CUTLASS_ENABLE_GDC_FOR_SM90)
#define FP4D_WGMMA 1
#include "w4_sm90.h"
#else
#define FP4D_WGMMA 0
#endif

namespace fp4d {

#if FP4D_OUT == 0
using Element = __nv_bfloat16;
#else
using Element = __half;
#endif

constexpr int kStageChunks = 2;
constexpr int kStageK = kStageChunks * w4::kChunkK;

struct Params {
  uint8_t const* w;
  Element const* x;
  float const* alpha;
  Element const* bias;
  Element* out;
  int64_t x_stride;
  int m, n, k;
  int row_blocks, chunks;  // of w
  int alpha_step;          // 0: one alpha
  int cluster_log2, stages, trigger;
};

// T tokens, RB row blocks, KG groups. U: units of 16 rows of a consumer warp. With 2 or 4 it multiplies by mma.sync,
// with 1 the four warps of a row block multiply together by wgmma.
template <int T, int RB, int KG, int U>
struct Tile {
  static_assert((RB & (RB - 1)) == 0 && (KG & (KG - 1)) == 0 && (U == 1 || U == 2 || U == 4));
  static constexpr int kTokens = T, kRowBlocks = RB, kGroups = KG, kUnits = U;
  static constexpr bool kWgmma = U == 1;
  static constexpr int kRows = RB * w4::kChunkRows;
  static constexpr int kBlockWarps = w4::kUnits / U;   // warps that share a row block
  static constexpr int kConsumers = RB * kBlockWarps;  // warps of a group
  static constexpr int kConsumerThreads = 32 * KG * kConsumers;
  // Of a group, beside the producer: warps that put tokens in wgmma's order.
  static constexpr int kLoaders = !kWgmma ? 0 : KG == 1 && T > 8 ? 2 : 1;
  static constexpr int kThreads = kConsumerThreads + 32 * KG * (1 + kLoaders);
  static constexpr int kWeightBytes = kStageChunks * w4::kChunkBytes;  // of a row block in a stage
  // Pitch of a token in a stage. The 16 bytes more keep 8 lanes that read two tokens off each other's banks.
  static constexpr int kTokenPitch = kStageK * 2 + 16;
  static constexpr int kTokenBytes = T * (kWgmma ? kStageK * 2 : kTokenPitch);
  static constexpr int kStageAlign = kWgmma ? 1024 : 16;
  static constexpr int kStageBytes =
      (RB * kWeightBytes + kTokenBytes + kStageAlign - 1) / kStageAlign * kStageAlign;
  static constexpr int kBarrierBytes = kWgmma ? 1024 : 512;  // of shared memory, before everything else
  static constexpr int kMaxSlots = kBarrierBytes / 16 - 1;   // stages of all rings together
  static constexpr int kFewestStages = kWgmma ? 2 : 1;  // wgmma still reads a stage when the next one begins
  // Sums of the whole cluster's groups for the rows that a CTA owns: [source][token][row], fp32. The 4 floats more
  // keep tokens two apart 8 banks apart. With many tokens they take the place of the ring.
  static constexpr int kPadRows = 4;
  static constexpr bool kReuse = T >= 32;
  static constexpr int source_bytes(int cluster) { return 4 * T * (kRows / cluster + kPadRows); }
  static constexpr int ring_bytes(int stages) { return KG * stages * kStageBytes; }
  static int shared_bytes(int cluster, int stages) {
    int const ring = ring_bytes(stages), sums = KG * cluster * source_bytes(cluster);
    return kBarrierBytes + (kReuse ? std::max(ring, sums) : ring + sums);
  }
  // Two CTAs an SM, so that the next grid's loads start under this one, where the registers allow it.
  static constexpr int kRegisters = kWgmma ? 80 : U == 4 ? 72 + 2 * T : T <= 16 ? 72 : 96;
  static constexpr int kCtas = 65536 / ((kThreads + 127) / 128 * 128 * kRegisters) >= 2 ? 2 : 1;
};

// ---- Consumers ----

// Not volatile: a function of its operands, free to move.
__device__ __forceinline__ void mma(float* d, uint32_t const (&a)[4], uint32_t b0, uint32_t b1) {
#if FP4D_OUT == 0
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
#else
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
#endif
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// [unit][8 tokens][row c0, c1; row + 8: c2, c3]
template <class Tile>
using Sums = float[Tile::kUnits * Tile::kTokens / 2];

// Operand A of two steps from words A and B (half 0) or C and D of a unit.
__device__ __forceinline__ void dequantize_half(uint4 words, int half, w4::Dequant<Element>::Pair scale,
                                                uint32_t (&a)[2][4]) {
  using D = w4::Dequant<Element>;
  uint32_t upper[4], lower[4];
  w4::dequantize<Element>(half ? words.z : words.x, D::low(scale), upper);
  w4::dequantize<Element>(half ? words.w : words.y, D::high(scale), lower);
#pragma unroll
  for (int s = 0; s < 2; ++s) {
    a[s][0] = upper[2 * s], a[s][1] = lower[2 * s], a[s][2] = upper[2 * s + 1], a[s][3] = lower[2 * s + 1];
  }
}

// A warp's units of a chunk times T tokens. `words`: the lane's first word of the warp's first unit. `scales`: the
// lane's bytes of these units. `tokens`: the lane's 32 bytes of token lane/4.
template <class Tile>
__device__ __forceinline__ void multiply_chunk(uint32_t words, uint32_t scales, uint32_t tokens,
                                               Sums<Tile>& sums) {
  constexpr int T = Tile::kTokens, U = Tile::kUnits;
  uint4 packed[U];
  w4::Dequant<Element>::Pair scale[U];
#pragma unroll
  for (int u = 0; u < U; ++u) packed[u] = load_16(words + u * w4::kUnitBytes);
#pragma unroll
  for (int u = 0; u < U; u += 2) {
    uint32_t const bytes = load_4(scales + u * 2);
    scale[u] = w4::unit_scales<Element>(bytes, 0), scale[u + 1] = w4::unit_scales<Element>(bytes, 1);
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {  // words A and B, then C and D
    uint4 b[T / 8];
#pragma unroll
    for (int t = 0; t < T / 8; ++t) b[t] = load_16(tokens + t * 8 * Tile::kTokenPitch + half * 16);
    // Units in pairs, so that two MMAs in a row never add to the same sums.
#pragma unroll
    for (int u = 0; u < U; u += 2) {
      uint32_t a[2][2][4];
      dequantize_half(packed[u], half, scale[u], a[0]);
      dequantize_half(packed[u + 1], half, scale[u + 1], a[1]);
#pragma unroll
      for (int s = 0; s < 2; ++s) {
#pragma unroll
        for (int t = 0; t < T / 8; ++t) {
#pragma unroll
          for (int i = 0; i < 2; ++i)
            mma(sums + 4 * ((u + i) * (T / 8) + t), a[i][s], s ? b[t].z : b[t].x, s ? b[t].w : b[t].y);
        }
      }
    }
  }
}

// ---- Ring ----

// The part of K that one group of warps adds up, in stages.
struct Range {
  int first, count;
};

__device__ __forceinline__ Range range_of(int chunks, int part, int parts_log2) {
  int const stages = (chunks + kStageChunks - 1) / kStageChunks;
  int const first = (stages * part) >> parts_log2, last = (stages * (part + 1)) >> parts_log2;
  return {first, last - first};
}

template <class Tile>
struct Ring {
  uint32_t barriers, stages_at;  // of this group, in shared memory
  int stages;

  __device__ uint32_t full(int slot) const { return barriers + slot * 16; }
  __device__ uint32_t empty(int slot) const { return barriers + slot * 16 + 8; }
  __device__ uint32_t tokens(int slot) const { return stages_at + slot * Tile::kStageBytes; }
  __device__ uint32_t weights(int slot, int row_block) const {
    return tokens(slot) + Tile::kTokenBytes + row_block * Tile::kWeightBytes;
  }

  // One arrival for the weights and one for each lane's tokens or each loader; one of each consumer warp that has rows.
  __device__ void init(int row_blocks) const {
#pragma unroll 1
    for (int slot = 0; slot < stages; ++slot) {
      barrier_init(full(slot), 1 + (Tile::kWgmma ? Tile::kLoaders : 32));
      barrier_init(empty(slot), row_blocks * Tile::kBlockWarps);
    }
  }
};

template <class Tile>
struct Producer {
  Params const& p;
  Ring<Tile> ring;
  Range range;
  int row_block, row_blocks, token, tokens, lane;

  __device__ void load_weights(int i, int slot) const {
    int const chunk = (range.first + i) * kStageChunks;
    uint32_t const bytes = min(kStageChunks, p.chunks - chunk) * w4::kChunkBytes;
    // Wgmma multiplies whole stages; a chunk beyond the last is that one again and meets zeros.
    bool const again = Tile::kWgmma && bytes < Tile::kWeightBytes;
    if (lane == 0) barrier_arrive_expect(ring.full(slot), row_blocks * (again ? 2 * bytes : bytes));
    uint8_t const* from = p.w + (int64_t(row_block) * p.chunks + chunk) * w4::kChunkBytes;
#pragma unroll 1
    for (int block = 0; block < row_blocks; ++block) {
      copy_stream(ring.weights(slot, block), from, bytes, ring.full(slot), lane);
      if (again) copy_stream(ring.weights(slot, block) + bytes, from, bytes, ring.full(slot), lane);
      from += int64_t(p.chunks) * w4::kChunkBytes;
    }
  }

  // k beyond the end comes as zero, so that nothing meets the zero weights there that is not finite. Tokens beyond
  // the last stay what they are: they touch no other token's sums.
  __device__ void load_tokens(int i, int slot) const {
    constexpr int kPieces = kStageK * 2 / 16;  // of 16 bytes
    int const piece = lane % kPieces, k = (range.first + i) * kStageK + piece * 8;
    bool const inside = k < p.k;
#pragma unroll 2
    for (int t = lane / kPieces; t < tokens; t += 32 / kPieces) {
      Element const* const from = p.x + (token + t) * p.x_stride + (inside ? k : 0);
      copy_16(ring.tokens(slot) + t * Tile::kTokenPitch + piece * 16, from, inside ? 16 : 0);
    }
    barrier_arrive_after_copies(ring.full(slot));
  }

  // `triggers`: this warp lets the next grid start, when its last `trigger` stages are next.
  __device__ void run(bool triggers) const {
    int const ahead = min(range.count, ring.stages);
    int const trigger_at = max(range.count - p.trigger, 0);
    if (triggers && trigger_at < ahead) grid_dependency_launch_dependents();
    for (int i = 0; i < ahead; ++i) load_weights(i, i);
    if constexpr (!Tile::kWgmma) {
      grid_dependency_wait();
      for (int i = 0; i < ahead; ++i) load_tokens(i, i);
    }
    int slot = 0;
    uint32_t parity = 0;
    for (int i = ahead; i < range.count; ++i) {
      if (triggers && i == trigger_at) grid_dependency_launch_dependents();
      barrier_wait(ring.empty(slot), parity);
      load_weights(i, slot);
      if constexpr (!Tile::kWgmma) load_tokens(i, slot);
      if (++slot == ring.stages) slot = 0, parity ^= 1;
    }
    __syncwarp();
  }
};

#if FP4D_WGMMA
// Tokens for wgmma. Of a chunk, MMA step s multiplies 32 bytes of a token's row: pair c of the 16 bytes 2s is k = 16c +
// 4s, + 1 and pair c of the next 16 is k = 16c + 4s + 2, + 3. So a lane that loads the same half of the four blocks
// of 16 k has whole 16-byte pieces of the row, once it has transposed 4 by 4 pairs. 128-byte swizzle.
template <class Tile>
struct Loader {
  static constexpr int T = Tile::kTokens;
  static constexpr int kItems = kStageChunks * T * 2 / 32 / Tile::kLoaders;  // of a lane in a stage
  static constexpr int kDepth = 2;                                           // items on their way
  struct Item {
    uint4 v[4];  // of block c
  };
  Params const& p;
  Ring<Tile> ring;
  Range range;
  int token, tokens, index;  // index: of the lane, of all loaders

  __device__ void load(int stage, int item, Item& to) const {
    if (stage >= range.count) return;
    int const at = index + item * 32 * Tile::kLoaders, t = at / 2 % T;
    int const k = (range.first + stage) * kStageK + at / (2 * T) * w4::kChunkK + at % 2 * 8;
    Element const* const from = p.x + (token + t) * p.x_stride + k;
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      to.v[c] = {};
      if (t < tokens && k + 16 * c < p.k) to.v[c] = *reinterpret_cast<uint4 const*>(from + 16 * c);
    }
  }

  __device__ void store(int slot, int item, uint4 const (&v)[4]) const {
    int const at = index + item * 32 * Tile::kLoaders, t = at / 2 % T, swizzle = t % 8 * 16;
    if (t >= tokens) return;
    uint32_t const row = ring.tokens(slot) + at / (2 * T) * (T * 128) + t * 128, column = at % 2 * 64;
    store_16(row + ((column + 0) ^ swizzle), v[0].x, v[1].x, v[2].x, v[3].x);
    store_16(row + ((column + 16) ^ swizzle), v[0].y, v[1].y, v[2].y, v[3].y);
    store_16(row + ((column + 32) ^ swizzle), v[0].z, v[1].z, v[2].z, v[3].z);
    store_16(row + ((column + 48) ^ swizzle), v[0].w, v[1].w, v[2].w, v[3].w);
  }

  __device__ void run(int lane) const {
    static_assert(kDepth % kItems == 0 || kItems % kDepth == 0);
    constexpr int kRound = kDepth > kItems ? kDepth / kItems : 1;  // stages
    Item items[kDepth];
    grid_dependency_wait();
#pragma unroll
    for (int d = 0; d < kDepth; ++d) load(d / kItems, d % kItems, items[d]);
    int slot = 0;
    uint32_t parity = 1;
#pragma unroll 1
    for (int round = 0; round < range.count; round += kRound) {
#pragma unroll
      for (int i = 0; i < kRound * kItems; ++i) {
        int const stage = round + i / kItems, item = i % kItems;
        if (stage >= range.count) break;
        if (item == 0) barrier_wait(ring.empty(slot), parity);
        store(slot, item, items[i % kDepth].v);
        load(round + (i + kDepth) / kItems, (i + kDepth) % kItems, items[i % kDepth]);
        if (item < kItems - 1) continue;
        visible_to_async();
        __syncwarp();
        if (lane == 0) barrier_arrive(ring.full(slot));
        if (++slot == ring.stages) slot = 0, parity ^= 1;
      }
    }
  }
};

// As consume(), with the four warps of a row block. Registers of operand A are double-buffered by groups of two MMAs:
// a group is waited for when the one after it has started.
template <class Tile>
__device__ __forceinline__ void consume_wgmma(Params const& p, Ring<Tile> ring, Range range, int warp,
                                              int lane, Sums<Tile>& sums) {
  constexpr int T = Tile::kTokens;
  constexpr Operand kOperand = FP4D_OUT == 0 ? Operand::kBF16 : Operand::kF16;
  uint32_t const unit = ring.weights(0, warp / Tile::kBlockWarps);
  uint32_t const words = unit + warp % 4 * w4::kUnitBytes + lane * 16;
  uint32_t const scales = unit + w4::kScaleOffset + lane * 8 + warp % 4 * 2;
  uint32_t const last = ring.full(ring.stages);
  uint32_t full = ring.full(0), parity = 0, offset = 0, release = 0;
  uint32_t a[2][2][4] = {};
#pragma unroll 1
  for (int i = 0; i < range.count; ++i) {
    barrier_wait(full, parity);
    uint4 packed[kStageChunks];
    uint32_t bytes[kStageChunks];
#pragma unroll
    for (int chunk = 0; chunk < kStageChunks; ++chunk) {
      packed[chunk] = load_16(words + offset + chunk * w4::kChunkBytes);
      bytes[chunk] = load_2(scales + offset + chunk * w4::kChunkBytes);
    }
    uint64_t const b = operand_b(ring.tokens(0) + offset);
#pragma unroll
    for (int group = 0; group < 2 * kStageChunks; ++group) {
      int const chunk = group / 2, half = group % 2;
      wgmma_wait<1>();
      if (group == 1 && release != 0 && lane == 0) barrier_arrive(release);  // of the stage before
      dequantize_half(packed[chunk], half, w4::unit_scales<Element>(bytes[chunk], 0), a[half]);
      wgmma_fence();
      uint64_t const at = b + (chunk * T * 128 >> 4) + half * 2 * kDescriptorStep;
      wgmma<kOperand, T>(sums, a[half][0], at);
      wgmma<kOperand, T>(sums, a[half][1], at + kDescriptorStep);
      wgmma_commit();
    }
    release = full + 8;
    offset += Tile::kStageBytes, full += 16;
    if (full == last) full = ring.full(0), parity ^= 1, offset = 0;
  }
  wgmma_wait<0>();
}
#endif

// Keeps a value in a register, where the compiler would compute it again in every round.
__device__ __forceinline__ void keep(uint32_t& value) { asm volatile("" : "+r"(value)); }

template <class Tile>
__device__ __forceinline__ void consume(Params const& p, Ring<Tile> ring, Range range, int warp, int lane,
                                        Sums<Tile>& sums) {
  int const block = warp / Tile::kBlockWarps, part = warp % Tile::kBlockWarps;
  uint32_t words = ring.weights(0, block) + part * Tile::kUnits * w4::kUnitBytes + lane * 16;
  uint32_t scales = ring.weights(0, block) + w4::kScaleOffset + lane * 8 + part * Tile::kUnits * 2;
  uint32_t tokens = ring.tokens(0) + lane / 4 * Tile::kTokenPitch + lane % 4 * 32;
  keep(words), keep(scales), keep(tokens);
  // The last stage of K may be short; then it has one chunk.
  static_assert(kStageChunks == 2);
  bool const short_end = (range.first + range.count) * kStageChunks > p.chunks;
  int const whole = range.count - (short_end ? 1 : 0);
  uint32_t const last = ring.full(ring.stages);
  uint32_t full = ring.full(0), parity = 0, offset = 0;
#pragma unroll 1
  for (int i = 0; i < whole; ++i) {
    barrier_wait(full, parity);
#pragma unroll
    for (int chunk = 0; chunk < kStageChunks; ++chunk) {
      uint32_t const at = offset + chunk * w4::kChunkBytes;
      multiply_chunk<Tile>(words + at, scales + at, tokens + offset + chunk * w4::kChunkK * 2, sums);
    }
    __syncwarp();
    if (lane == 0) barrier_arrive(full + 8);
    offset += Tile::kStageBytes, full += 16;
    if (full == last) full = ring.full(0), parity ^= 1, offset = 0;
  }
  if (short_end) {
    barrier_wait(full, parity);
    multiply_chunk<Tile>(words + offset, scales + offset, tokens + offset, sums);
  }
}

// ---- Sums ----

// Of one CTA, which owns rows / cluster of them.
template <class Tile>
struct Reduction {
  static constexpr int kThreads = Tile::kConsumerThreads, kQuads = Tile::kRows / 4;
  uint32_t sums, barrier;  // in shared memory
  int cluster_log2;

  __device__ int owned() const { return Tile::kRows >> cluster_log2; }
  __device__ int pitch() const { return owned() + Tile::kPadRows; }  // of a token, in floats
  __device__ uint32_t source(int i) const { return sums + i * (4 * Tile::kTokens) * pitch(); }
  __device__ int quads() const { return kQuads >> cluster_log2; }
  __device__ int sources() const { return Tile::kGroups << cluster_log2; }
  __device__ uint32_t expected() const { return (4 * Tile::kTokens * Tile::kGroups) * Tile::kRows; }

  __device__ void init() const {
    barrier_init(barrier, 1);
    if (cluster_log2 > 0) barrier_arrive_expect(barrier, expected());
  }

  // Sends a warp's sums to the owners of their rows. `from` counts the groups of all CTAs of the cluster.
  __device__ void put(Sums<Tile> const& values, int from, int warp, int lane) const {
#pragma unroll
    for (int u = 0; u < Tile::kUnits; ++u) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {  // rows 0..7 and 8..15 of the unit
        int const first = (warp * Tile::kUnits + u) * 16 + half * 8, owner = first / owned();
        uint32_t const here = source(from) + 4 * (first % owned() + lane / 4 + lane % 4 * 2 * pitch());
        uint32_t const to = cluster_log2 > 0 ? address_in(here, owner) : here;
        uint32_t const tells = cluster_log2 > 0 ? address_in(barrier, owner) : 0;
#pragma unroll
        for (int t = 0; t < Tile::kTokens; ++t) {
          if (t % 8 > 1) continue;
          float const value = values[4 * (u * (Tile::kTokens / 8) + t / 8) + 2 * half + t % 8];
          if (cluster_log2 > 0) {
            send(to + 4 * t * pitch(), value, tells);
          } else {
            store_4(to + 4 * t * pitch(), value);
          }
        }
      }
    }
  }

  __device__ float4 get(int token, int quad) const {
    float4 sum{};
    for (int i = 0; i < sources(); ++i) {
      uint4 const raw = load_16(source(i) + 4 * (token * pitch() + 4 * quad));
      sum.x += __uint_as_float(raw.x), sum.y += __uint_as_float(raw.y);
      sum.z += __uint_as_float(raw.z), sum.w += __uint_as_float(raw.w);
    }
    return sum;
  }
};

// Four rows that a thread finishes, with their alpha and bias.
struct Quad {
  int row;  // of the output; at least n: nothing to do
  float alpha[4] = {}, bias[4] = {};

  __device__ Quad(Params const& p, int first) : row(first) {
    if (row >= p.n) return;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      alpha[i] = p.alpha[int64_t(row + i) * p.alpha_step] * w4::kUnscale;
      if (p.bias != nullptr) bias[i] = float(p.bias[row + i]);
    }
  }

  __device__ void store(Params const& p, int token, float4 sum) const {
    float const sums[4] = {sum.x, sum.y, sum.z, sum.w};
    uint16_t bits[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      Element const value(fmaf(sums[i], alpha[i], bias[i]));
      bits[i] = reinterpret_cast<uint16_t const&>(value);
    }
    *reinterpret_cast<uint2*>(p.out + int64_t(token) * p.n + row) =
        make_uint2(bits[0] | bits[1] << 16, bits[2] | bits[3] << 16);
  }
};

// ---- The kernel ----

template <int threads>
__device__ __forceinline__ void sync_consumers() {
  asm volatile("bar.sync 2, %0;" ::"n"(threads) : "memory");
}

constexpr int log2_of(int value) { return value <= 1 ? 0 : 1 + log2_of(value / 2); }

template <class Tile>
__global__ void __launch_bounds__(Tile::kThreads, Tile::kCtas)
    w4a16_small_kernel(__grid_constant__ Params const p) {
  extern __shared__ __align__(1024) uint8_t shared[];
  constexpr int T = Tile::kTokens;
  int const warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  int const cluster_rank = blockIdx.x & ((1 << p.cluster_log2) - 1);
  int const row_block = (blockIdx.x >> p.cluster_log2) * Tile::kRowBlocks;
  int const row_blocks = min(Tile::kRowBlocks, p.row_blocks - row_block);
  int const token = blockIdx.y * T, tokens = min(T, p.m - token);
  bool const produces = warp >= Tile::kGroups * Tile::kConsumers, clustered = p.cluster_log2 > 0;
  int const helper = warp - Tile::kGroups * Tile::kConsumers;  // producers, then loaders
  int const group = produces ? helper % Tile::kGroups : warp / Tile::kConsumers;
  int const source = cluster_rank * Tile::kGroups + group;
  Range const range = range_of(p.chunks, source, p.cluster_log2 + log2_of(Tile::kGroups));
  uint32_t const base = shared_address(shared), rings = base + Tile::kBarrierBytes;
  Ring<Tile> const ring{base + group * p.stages * 16, rings + group * p.stages * Tile::kStageBytes, p.stages};
  Reduction<Tile> const reduction{rings + (Tile::kReuse ? 0 : Tile::kGroups * p.stages * Tile::kStageBytes),
                                  rings - 16, p.cluster_log2};

#if FP4D_WGMMA
  if constexpr (Tile::kWgmma) {
    if (helper >= Tile::kGroups) {
      if (clustered && !Tile::kReuse) cluster_arrive();
      asm volatile("bar.sync 1, %0;" ::"n"(Tile::kThreads) : "memory");
      Loader<Tile>{p, ring, range, token, tokens, helper / Tile::kGroups * 32 - 32 + lane}.run(lane);
      __syncwarp();
      if (clustered && Tile::kReuse) cluster_arrive();
      if (clustered) cluster_wait();
      return;
    }
  }
#endif
  if (produces) {
    if (lane == 0) {
      ring.init(row_blocks);
      if (group == 0) reduction.init();
      barriers_visible();
    }
    __syncwarp();
    if (clustered && !Tile::kReuse) cluster_arrive();
    asm volatile("bar.arrive 1, %0;" ::"n"(Tile::kThreads) : "memory");
    Producer<Tile>{p, ring, range, row_block, row_blocks, token, tokens, lane}.run(group == 0);
    if (clustered && Tile::kReuse) cluster_arrive();
    if (clustered) cluster_wait();
    return;
  }

  if (clustered && !Tile::kReuse) cluster_arrive();
  asm volatile("bar.sync 1, %0;" ::"n"(Tile::kThreads) : "memory");
  grid_dependency_wait();
  Sums<Tile> sums = {};
  int const group_warp = warp % Tile::kConsumers;
  if (group_warp < row_blocks * Tile::kBlockWarps) {
#if FP4D_WGMMA
    if constexpr (Tile::kWgmma) consume_wgmma<Tile>(p, ring, range, group_warp, lane, sums);
#endif
    if constexpr (!Tile::kWgmma) consume<Tile>(p, ring, range, group_warp, lane, sums);
  }
  __syncwarp();

  int const quad = threadIdx.x & (reduction.quads() - 1);
  Quad const rows(p, row_block * w4::kChunkRows + cluster_rank * reduction.owned() + quad * 4);
  __syncwarp();
  if (clustered) {
    if (Tile::kReuse) cluster_arrive();
    cluster_wait();
    reduction.put(sums, source, group_warp, lane);
    barrier_wait_cluster(reduction.barrier, 0);
  } else {
    if (Tile::kReuse) sync_consumers<Tile::kConsumerThreads>();
    reduction.put(sums, source, group_warp, lane);
    sync_consumers<Tile::kConsumerThreads>();
  }
  if (rows.row >= p.n) return;
  int const each = Reduction<Tile>::kThreads / Reduction<Tile>::kQuads << p.cluster_log2;
  for (int t = threadIdx.x >> (log2_of(Reduction<Tile>::kQuads) - p.cluster_log2); t < tokens; t += each)
    rows.store(p, token + t, reduction.get(t, quad));
}

}  // namespace fp4d
