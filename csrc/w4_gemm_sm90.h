// The kernel of w4_gemm_sm90.cu.
//
// Weights are operand A of wgmma, dequantised into registers; tokens are operand B, as w4_activations.cu packs them.
// A CTA takes 64 rows a consumer warpgroup and T tokens. One thread of each producer warp keeps a ring of stages full:
// of the weights one bulk copy a warpgroup, of the activations one copy, because both are packed in the order of the
// stages. A thread needs some 50 instructions for a copy, each waiting for the one before, so three threads share them.
//
// FP8 wgmma keeps 13 bits of a sum. So every kPromoteStages stages the partial sums, which the first MMA has started
// from zero, are added to f32 ones. A warpgroup that adds has no MMA under way, so the two do it half an interval apart:
// one multiplies while the other adds.
//
// Registers are double-buffered by groups of two MMAs: while group i runs, the words of group i + 1 are dequantised
// into the registers that group i - 1 has finished with. So a warpgroup waits for group i - 1 right after it has
// started group i, never for the newest, and tensor cores have work as long as dequantising a group takes less time
// than multiplying it: that is so from T = 128 on, and at T = 64 the weights come from memory no faster.
//
// A cluster is `multicast` CTAs, which take neighbouring rows and the same tokens and copy a part of the activations
// each to all of them, times `split`, which share out K. Sums of the parts of K meet in shared memory and are added in
// the order of the parts, each CTA doing a range of tokens: the same bits every time, no workspace, no atomics.
// Without a split the grid is persistent, and the ring runs ahead into the next tile during an epilogue.
#pragma once

#include <algorithm>

#include "gdc_guard.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include "async_copy.h"
#include "w4_dequant.h"
#include "w4_sm90.h"
#include "w4_wgmma.h"

namespace fp4d {

#if FP4D_OUT == 0
using Out = __nv_bfloat16;
#else
using Out = __half;
#endif

// What activations are; 16-bit ones have the type of the output.
constexpr bool kFp8 = FP4D_ACT == 8;
constexpr Operand kOperand = kFp8 ? Operand::kE4M3 : FP4D_OUT == 0 ? Operand::kBF16 : Operand::kF16;
// What the dequantised weights must be multiplied by.
constexpr float kWeightFactor = kFp8 ? 8.f : w4::kUnscale;

struct Params {
  uint8_t const *x, *w;
  float const *x_scale, *alpha;
  Out const* bias;
  Out* out;
  int m, n;
  int token_blocks;                // of 8 tokens in x
  int row_blocks, chunks;          // of w
  int stages;                      // along K
  int x_scale_step, alpha_step;    // 0: one for all
  int multicast_log2, split_log2;  // CTAs of a cluster
  int row_tiles, token_tiles;      // clusters that cover N, and M
  int raster;                      // token tiles that are done before the next rows
  int clusters;                    // of the grid
};

template <int T>
struct Tile {
  static constexpr int kTokens = T;
  static constexpr int kConsumers = kFp8 || T == 256 ? 2 : 4;  // warpgroups
  static constexpr int kCtas =
      kFp8 && T == 64 ? 2 : 1;  // of a multiprocessor: one's ends hide under the other
  static constexpr int kThreads = 128 * (1 + kConsumers);
  static constexpr int kRows = 64 * kConsumers;
  // 65536 registers, shared out evenly at the start; the producer gives its up.
  static constexpr int kProducerRegisters = kConsumers == 2 && kCtas == 1 ? 40 : 32;
  static constexpr int kConsumerRegisters = kCtas == 2 ? 104 : kConsumers == 2 ? 232 : 112;
  // 256 k. Sums of one sign end up 0.18 % low, measured on an H200; after 512 k 0.51 %, for 1 % of speed at 192 tokens.
  static constexpr int kPromoteStages = 2;

  static constexpr int kStageChunks = kFp8 ? 2 : 1;  // a stage is 128 bytes of activations along K
  static constexpr int kGroups = 2;                  // of two MMAs in a stage
  static constexpr int kTokenBytes = T * 128;
  static constexpr int kBlockBytes = kStageChunks * w4::kChunkBytes;  // weights of a warpgroup in a stage
  static constexpr int kWeightBytes = kConsumers * kBlockBytes;

  // Where a warpgroup turns 32 tokens of its output, twice. 16 bytes more a token keep 8 tokens off each other's banks.
  static constexpr int kPieceTokens = 32, kPitch = 64 * sizeof(Out) + 16, kPieceBytes = kPieceTokens * kPitch;
  static constexpr int kPieces = T / kPieceTokens;
  static constexpr int kOutBytes = kConsumers * 2 * kPieceBytes;

  // FP8: what the 8 magnitudes of e2m1 become under every scale, 16 times, so that no two lanes of half a warp meet in a
  // bank. Looking 8 bytes up costs a sixth of making them.
  static constexpr int kLutCopies = 16, kLutPitch = kLutCopies * 8, kLutBytes = kFp8 ? 128 * kLutPitch : 0;

  static constexpr int kBarrierBytes = 128, kMaxShared = kCtas == 2 ? 115712 : 232448;
  static constexpr int kStages =
      std::min(8, (kMaxShared - kOutBytes - kLutBytes - kBarrierBytes) / (kTokenBytes + kWeightBytes));
  static constexpr int kWeightsAt = kStages * kTokenBytes, kOutAt = kWeightsAt + kStages * kWeightBytes,
                       kLutAt = kOutAt + kOutBytes, kBarriersAt = kLutAt + kLutBytes,
                       kShared = kBarriersAt + kBarrierBytes;
  static_assert(kStages >= 4 && kStages * 16 <= kBarrierBytes);
  static_assert(kRows * T * 4 <= kOutAt, "the sums of a split take the place of the ring");
};

constexpr int kWeightThreads = 2;  // that copy weights

template <class Tile>
struct Ring {
  uint32_t base;  // in shared memory

  __device__ uint32_t tokens(int slot) const { return base + slot * Tile::kTokenBytes; }
  __device__ uint32_t weights(int slot, int warpgroup) const {
    return base + Tile::kWeightsAt + slot * Tile::kWeightBytes + warpgroup * Tile::kBlockBytes;
  }
  __device__ uint32_t full(int slot) const { return base + Tile::kBarriersAt + slot * 16; }
  __device__ uint32_t empty(int slot) const { return full(slot) + 8; }

  // An arrival with its bytes of each copying thread; one of each consumer warp of each CTA with the same activations.
  __device__ void init(int multicast) const {
    for (int slot = 0; slot < Tile::kStages; ++slot) {
      barrier_init(full(slot), 1 + kWeightThreads);
      barrier_init(empty(slot), multicast * Tile::kConsumers * 4);
    }
  }
};

// Place in the ring.
template <class Tile>
struct Position {
  int slot = 0;
  uint32_t parity = 0;

  __device__ void advance() {
    if (++slot == Tile::kStages) slot = 0, parity ^= 1;
  }
};

// This CTA's place in its cluster and its share of K, in stages.
struct Place {
  int cluster, multicast, split;  // number of the cluster; ranks
  int first, count;

  __device__ explicit Place(Params const& p) {
    int const rank = blockIdx.x & ((1 << (p.multicast_log2 + p.split_log2)) - 1);
    cluster = blockIdx.x >> (p.multicast_log2 + p.split_log2);
    multicast = rank & ((1 << p.multicast_log2) - 1);
    split = rank >> p.multicast_log2;
    first = int(int64_t(p.stages) * split >> p.split_log2);
    count = int(int64_t(p.stages) * (split + 1) >> p.split_log2) - first;
  }
  // Rank in the cluster of a CTA with the same tokens, or the same rows.
  __device__ int with_multicast(Params const& p, int rank) const {
    return (split << p.multicast_log2) + rank;
  }
  __device__ int with_split(Params const& p, int rank) const {
    return (rank << p.multicast_log2) + multicast;
  }
};

// Where a tile begins.
struct Corner {
  int row_block, token;
};

// Tiles in the order in which clusters take them: `raster` token tiles side by side for all rows, then the next ones.
template <class Tile>
__device__ __forceinline__ Corner corner_of(Params const& p, Place const& place, int tile) {
  int const band = tile / (p.row_tiles * p.raster), in_band = tile - band * p.row_tiles * p.raster;
  int const width = min(p.raster, p.token_tiles - band * p.raster), row = in_band / width;
  return {((row << p.multicast_log2) + place.multicast) * Tile::kConsumers,
          (band * p.raster + in_band - row * width) * Tile::kTokens};
}

// ---- Producers: one thread for the activations, two for the weights ----

// Weights of a consumer warpgroup, or of two. A warpgroup beyond the last row block takes that one again, and so does
// the second half of a last stage with one chunk: its activations are zero.
template <class Tile>
struct WeightCopies {
  static constexpr int kWarpgroups = Tile::kConsumers / kWeightThreads, kBytes = Tile::kBlockBytes;
  Params const& p;
  Place const& place;
  Ring<Tile> ring;
  int first;  // warpgroup
  uint8_t const* from[kWarpgroups] = {};

  __device__ void start(Corner corner, int in_tile) {
#pragma unroll
    for (int i = 0; i < kWarpgroups; ++i) {
      int const block = min(corner.row_block + first + i, p.row_blocks - 1);
      int64_t const chunk = int64_t(block) * p.chunks + (place.first + in_tile) * Tile::kStageChunks;
      from[i] = p.w + chunk * w4::kChunkBytes;
    }
  }
  __device__ void copy(int stage, int slot) {
    uint32_t const full = ring.full(slot);
    bool const whole = Tile::kStageChunks == 1 || (stage + 1) * Tile::kStageChunks <= p.chunks;
    barrier_arrive_expect(full, kWarpgroups * kBytes);
#pragma unroll
    for (int i = 0; i < kWarpgroups; ++i) {
      uint32_t const to = ring.weights(slot, first + i);
      copy_bulk(to, from[i], whole ? kBytes : w4::kChunkBytes, full);
      if (!whole) copy_bulk(to + w4::kChunkBytes, from[i], w4::kChunkBytes, full);
      from[i] += kBytes;
    }
  }
};

// This CTA's share of the activations, to all that have the same tokens; each expects all of them.
template <class Tile>
struct TokenCopies {
  Params const& p;
  Place const& place;
  Ring<Tile> ring;
  uint8_t const* from = nullptr;
  uint32_t all = 0, mine = 0, skip = 0;  // bytes

  __device__ void start(Corner corner, int in_tile) {
    int const tokens = min(Tile::kTokens, p.token_blocks * 8 - corner.token);
    int const share = Tile::kTokens >> p.multicast_log2;
    all = tokens * 128, skip = place.multicast * share * 128;
    mine = max(0, min(share, tokens - place.multicast * share)) * 128;
    from = p.x + (int64_t(place.first + in_tile) * p.token_blocks * 8 + corner.token) * 128 + skip;
  }
  __device__ void copy(int, int slot) {
    uint32_t const full = ring.full(slot), to = ring.tokens(slot) + skip;
    barrier_arrive_expect(full, all);
    if (mine > 0) {
      if (p.multicast_log2 == 0) {
        copy_bulk(to, from, mine, full);
      } else {
        uint32_t const ctas = (1 << (1 << p.multicast_log2)) - 1;
        copy_bulk_multicast(to, from, mine, full, ctas << place.with_multicast(p, 0));
      }
    }
    from += int64_t(p.token_blocks) * 1024;
  }
};

// Stages from number `from` to before `to`, counted over all tiles of this CTA.
template <class Tile, class Copies>
__device__ __forceinline__ void copy_stages(Copies& copies, int from, int to) {
  if (from >= to) return;
  Params const& p = copies.p;
  Place const& place = copies.place;
  int in_tile = from % place.count, tile = place.cluster + from / place.count * p.clusters;
  Position<Tile> at{from % Tile::kStages, uint32_t(from / Tile::kStages) & 1};
  copies.start(corner_of<Tile>(p, place, tile), in_tile);
#pragma unroll 1
  for (int i = from; i < to; ++i) {
    if (i >= Tile::kStages) barrier_wait(copies.ring.empty(at.slot), at.parity ^ 1);
    copies.copy(place.first + in_tile, at.slot);
    at.advance();
    if (++in_tile == place.count && i + 1 < to) {
      in_tile = 0;
      tile += p.clusters;
      copies.start(corner_of<Tile>(p, place, tile), 0);
    }
  }
}

// One thread of each producer warp: the first copies activations.
template <class Tile>
__device__ __forceinline__ void produce(Params const& p, Place const& place, Ring<Tile> ring, int warp,
                                        bool clustered) {
  int const tiles = p.row_tiles * p.token_tiles;
  int const mine = place.cluster < tiles ? (tiles - 1 - place.cluster) / p.clusters + 1 : 0;
  int const all = mine * place.count, ahead = min(all, Tile::kStages);
  if (warp == 0) {
    if (clustered) cluster_wait_acquire();
    grid_dependency_wait();
    TokenCopies<Tile> tokens{p, place, ring};
    copy_stages<Tile>(tokens, 0, all);
  } else {
    WeightCopies<Tile> weights{p, place, ring, (warp - 1) * WeightCopies<Tile>::kWarpgroups};
    bool const copies = warp <= kWeightThreads;
    copy_stages<Tile>(weights, 0, copies ? ahead : 0);  // before the previous grid has finished
    if (clustered) cluster_wait_acquire();
    grid_dependency_wait();
    copy_stages<Tile>(weights, ahead, copies ? all : 0);
  }
}

// ---- Weights to registers ----

// A lane's words of a chunk (A, B, C, D) and its two scales; FP8: what they make of magnitudes.
struct Words {
  uint4 codes;
  uint32_t scales;
  w4::Lut luts[2];

  // `luts_at`: this lane's copy of the table.
  __device__ void load(uint32_t chunk, uint32_t luts_at, int warp, int lane) {
    uint32_t const scales_at = chunk + w4::kScaleOffset + lane * 8 + warp * 2;
    codes = load_16(chunk + warp * w4::kUnitBytes + lane * 16);
    if constexpr (kFp8) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        uint2 const lut = load_8(luts_at + load_1(scales_at + i) * Tile<FP4D_TOKENS>::kLutPitch);
        luts[i] = {lut.x, lut.y};
      }
    } else {
      scales = load_2(scales_at);
    }
  }
};

// By all consumers, before they load words.
template <class Tile>
__device__ __forceinline__ void make_luts(uint32_t at, int thread) {
  constexpr int kThreads = Tile::kConsumers * 128, kRound = kThreads / Tile::kLutCopies;
  static_assert(128 % kRound == 0);
#pragma unroll
  for (int i = 0; i < 128 / kRound; ++i) {
    uint32_t const scale = thread / Tile::kLutCopies + i * kRound, raw = scale * 0x00800080;
    w4::Lut const lut = w4::e4m3_lut(reinterpret_cast<__half2 const&>(raw));
    store_8(at + (thread + i * kThreads) * 8, lut.low, lut.high);
  }
  sync_threads(1 + Tile::kConsumers, kThreads);
}

// __byte_perm() spends an instruction on clearing bits of the selector that are clear already.
__device__ __forceinline__ uint32_t permute(uint32_t low, uint32_t high, uint32_t selector) {
  uint32_t bytes;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(bytes) : "r"(low), "r"(high), "r"(selector));
  return bytes;
}

// A word to e4m3 of its four even k and its four odd k: magnitudes from the table, signs from a shifted copy of the
// word, whose bytes have them on top. 8 instructions on the half-rate pipe, and a shift that another one can do.
__device__ __forceinline__ void word_to_e4m3(uint32_t word, w4::Lut lut, uint32_t& even, uint32_t& odd) {
  uint32_t const magnitude = word & 0x77777777, shifted = word * 16;
  even = permute(lut.low, lut.high, magnitude) | (permute(word, shifted, 0x1504) & 0x80808080);
  odd = permute(lut.low, lut.high, magnitude >> 16) | (permute(word, shifted, 0x3726) & 0x80808080);
}

// Operand A of the two MMAs of a group. FP8: a chunk. 16 bits: words A and B, or C and D.
template <int group>
__device__ __forceinline__ void dequantize(Words const& words, uint32_t (&a)[2][4]) {
  if constexpr (kFp8) {
    w4::Lut const(&luts)[2] = words.luts;
    word_to_e4m3(words.codes.x, luts[0], a[0][0], a[0][2]);
    word_to_e4m3(words.codes.y, luts[1], a[0][1], a[0][3]);
    word_to_e4m3(words.codes.z, luts[0], a[1][0], a[1][2]);
    word_to_e4m3(words.codes.w, luts[1], a[1][1], a[1][3]);
  } else {
    using D = w4::Dequant<Out>;
    typename D::Pair const scale = w4::unit_scales<Out>(words.scales, 0);
    uint32_t upper[4], lower[4];
    w4::dequantize<Out>(group ? words.codes.z : words.codes.x, D::low(scale), upper);
    w4::dequantize<Out>(group ? words.codes.w : words.codes.y, D::high(scale), lower);
#pragma unroll
    for (int s = 0; s < 2; ++s) {
      a[s][0] = upper[2 * s], a[s][1] = lower[2 * s], a[s][2] = upper[2 * s + 1], a[s][3] = lower[2 * s + 1];
    }
  }
}

// ---- Consumers ----

template <class Tile>
struct Consumer {
  static constexpr int T = Tile::kTokens, kPromoted = kFp8 ? T / 2 : 1;
  static constexpr bool kLate = T == 192;  // words wait until a group has given its registers back
  Params const& p;
  Place const& place;
  Ring<Tile> ring;
  int warpgroup, warp, lane;  // warp of the warpgroup
  uint32_t luts_at;

  // This warp is done with a slot.
  __device__ void release(int slot) const {
    if (p.multicast_log2 == 0) {
      if (lane == 0) barrier_arrive(ring.empty(slot));
    } else if (lane < 1 << p.multicast_log2) {
      barrier_arrive_in(address_in(ring.empty(slot), place.with_multicast(p, lane)));
    }
  }

  // `add` == 0: sums start from zero (FP8 alone).
  __device__ static void multiply(float (&sums)[T / 2], uint32_t const (&a)[2][4], uint64_t b, int add) {
    wgmma_fence();
    if constexpr (kFp8) {
      wgmma_e4m3<T>(sums, a[0], b, add);
      wgmma_e4m3<T>(sums, a[1], b + kDescriptorStep, 1);
    } else {
      wgmma<kOperand, T>(sums, a[0], b);
      wgmma<kOperand, T>(sums, a[1], b + kDescriptorStep);
    }
    wgmma_commit();
  }

  // One tile: sums of its stages; the newest group may still run. FP8: `sums` are of the last stages that have not been
  // added to `promoted`.
  __device__ void multiply_stages(Position<Tile>& at, float (&sums)[T / 2],
                                  float (&promoted)[kPromoted]) const {
    uint32_t even[2][4], odd[2][4];  // groups 0 and 1 of a stage
    int const shift = warpgroup * (Tile::kPromoteStages / 2);
    Words words;
    barrier_wait(ring.full(at.slot), at.parity);
    words.load(ring.weights(at.slot, warpgroup), luts_at, warp, lane);
    dequantize<0>(words, even);
    Position<Tile> previous = at;
#pragma unroll 1
    for (int i = 0; i < place.count; ++i) {
      uint64_t const b = operand_b(ring.tokens(at.slot));
      multiply(sums, even, b, (i + shift) % Tile::kPromoteStages);  // the tile's first sums are zero anyway
      if (kLate) wgmma_wait<1>();
      if (kFp8) words.load(ring.weights(at.slot, warpgroup) + w4::kChunkBytes, luts_at, warp, lane);
      if (!kLate) wgmma_wait<1>();
      if (i > 0) release(previous.slot);
      dequantize<1>(words, odd);
      multiply(sums, odd, b + 2 * kDescriptorStep, 1);
      // After the last stage the same one again, for nothing: no branch around registers that a wgmma reads.
      Position<Tile> next = at;
      next.advance();
      bool const last = i + 1 == place.count;
      int const slot = last ? at.slot : next.slot;
      barrier_wait(ring.full(slot), last ? at.parity : next.parity);
      if (kLate) wgmma_wait<1>();
      words.load(ring.weights(slot, warpgroup), luts_at, warp, lane);
      if (!kLate) wgmma_wait<1>();
      dequantize<0>(words, even);
      previous = at;
      at = next;
      if (kFp8 && ((i + shift) % Tile::kPromoteStages == Tile::kPromoteStages - 1 || last)) {
        wgmma_wait<0>();
#pragma unroll
        for (int v = 0; v < kPromoted; ++v) promoted[v] += sums[v];
      }
    }
  }

  __device__ static float (&final_sums(float (&partial)[T / 2], float (&promoted)[kPromoted])) [T / 2] {
    if constexpr (kFp8) {
      return promoted;
    } else {
      return partial;
    }
  }

  __device__ void run();
  __device__ void add_parts(float const (&sums)[T / 2], Corner corner);
};

// ---- Epilogue ----

// What a warpgroup writes: 64 rows of the weight, which are columns of the output.
template <class Tile>
struct Output {
  Params const& p;
  int warpgroup, warp, lane;
  uint32_t staging;  // in shared memory
  int row = 0;       // first of the warpgroup
  float alpha[2] = {}, bias[2] = {};
  int buffer = 0;

  __device__ void start(int row_block) {
    row = (row_block + warpgroup) * w4::kChunkRows;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      int const mine = row + warp * 16 + half * 8 + lane / 4;
      alpha[half] = mine < p.n ? p.alpha[int64_t(mine) * p.alpha_step] * kWeightFactor : 0.f;
      bias[half] = p.bias != nullptr && mine < p.n ? float(p.bias[mine]) : 0.f;
    }
  }

  // Of token `token` + lane.
  __device__ float token_scale(int token) const {
    if (!kFp8 || token + lane >= p.m) return 0.f;
    return p.x_scale[int64_t(token + lane) * p.x_scale_step];
  }

  // 32 tokens from `token` on: sums as wgmma leaves them, `count` of them wanted.
  __device__ void piece(float const (&sums)[16], float scale, int token, int count) {
    uint32_t const to = staging + buffer * Tile::kPieceBytes;
    uint32_t const mine =
        to + (lane / 16 * 8 + lane % 8) * Tile::kPitch + (warp * 16 + lane / 8 % 2 * 8) * int(sizeof(Out));
#pragma unroll
    for (int j = 0; j < 4; j += 2) {
      uint32_t pairs[4];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float scales[2] = {1.f, 1.f};
#pragma unroll
        for (int t = 0; t < 2 && kFp8; ++t)
          scales[t] = __shfl_sync(~0u, scale, (j + i) * 8 + lane % 4 * 2 + t);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          float values[2];
#pragma unroll
          for (int t = 0; t < 2; ++t)
            values[t] = fmaf(sums[4 * (j + i) + 2 * half + t] * alpha[half], scales[t], bias[half]);
          pairs[2 * i + half] = pack(values[0], values[1], Out{});
        }
      }
      store_matrices_transposed(mine + j * 8 * Tile::kPitch, pairs);
    }
    sync_threads(1 + warpgroup, 128);
#pragma unroll
    for (int i = 0; i < Tile::kPieceTokens * 8 / 128; ++i) {
      int const unit = i * 128 + warp * 32 + lane, t = unit / 8, column = row + unit % 8 * 8;
      if (t < count && token + t < p.m && column < p.n) {
        *reinterpret_cast<uint4*>(p.out + int64_t(token + t) * p.n + column) =
            load_16(to + t * Tile::kPitch + unit % 8 * 16);
      }
    }
    buffer ^= 1;
  }
};

// Adds the parts of K in their order; this CTA does T / split of the tokens. Sums lie in shared memory as threads hold
// them: [warpgroup][8 tokens][thread][4].
template <class Tile, int split>
__device__ __forceinline__ void add_and_store(Params const& p, Place const& place, uint32_t sums_at,
                                              Output<Tile>& output, int token) {
  constexpr int kMine = Tile::kTokens / 8 / split, kBatch = 8 / split;  // of 8 tokens; loads under way: 8
  constexpr int kAtOnce = kMine < 4 ? kMine : kMine % 4 == 0 ? 4 : 2;
  static_assert(kMine % kAtOnce == 0 && kAtOnce % std::min(kBatch, kAtOnce) == 0);
  uint32_t const own = sums_at + (output.warp * 32 + output.lane) * 16;
  uint32_t parts[split];
#pragma unroll
  for (int i = 0; i < split; ++i) parts[i] = address_in(own, place.with_split(p, i));
#pragma unroll 1
  for (int j = place.split * kMine; j < (place.split + 1) * kMine; j += kAtOnce) {
    if (token + j * 8 >= p.m) break;
    float total[16] = {};
#pragma unroll
    for (int batch = 0; batch < kAtOnce; batch += kBatch) {
      float4 part[kBatch][split];
#pragma unroll
      for (int i = 0; i < kBatch && batch + i < kAtOnce; ++i) {
#pragma unroll
        for (int s = 0; s < split; ++s)
          part[i][s] =
              load_cluster_16(parts[s] + (output.warpgroup * (Tile::kTokens / 8) + j + batch + i) * 128 * 16);
      }
#pragma unroll
      for (int i = 0; i < kBatch && batch + i < kAtOnce; ++i) {
#pragma unroll
        for (int s = 0; s < split; ++s) {
          float const values[4] = {part[i][s].x, part[i][s].y, part[i][s].z, part[i][s].w};
#pragma unroll
          for (int v = 0; v < 4; ++v) total[4 * (batch + i) + v] += values[v];
        }
      }
    }
    output.piece(total, output.token_scale(token + j * 8), token + j * 8, kAtOnce * 8);
  }
}

template <class Tile>
__device__ __forceinline__ void Consumer<Tile>::run() {
  Output<Tile> output{p, warpgroup, warp, lane, ring.base + Tile::kOutAt + warpgroup * 2 * Tile::kPieceBytes};
  Position<Tile> at;
  int const tiles = p.row_tiles * p.token_tiles;
#pragma unroll 1
  for (int tile = place.cluster; tile < tiles; tile += p.clusters) {
    Corner const corner = corner_of<Tile>(p, place, tile);
    float partial[T / 2], promoted[kPromoted];
#pragma unroll
    for (float& sum : partial) sum = 0.f;
#pragma unroll
    for (float& sum : promoted) sum = 0.f;
    multiply_stages(at, partial, promoted);
    float (&sums)[T / 2] = final_sums(partial, promoted);
    output.start(corner.row_block);
    if (p.split_log2 == 0) {
      float scales[Tile::kPieces];
#pragma unroll
      for (int i = 0; i < Tile::kPieces; ++i)
        scales[i] = output.token_scale(corner.token + i * Tile::kPieceTokens);
      wgmma_wait<0>();
      release(at.slot == 0 ? Tile::kStages - 1 : at.slot - 1);
#pragma unroll
      for (int i = 0; i < Tile::kPieces; ++i) {
        if (corner.token + i * Tile::kPieceTokens < p.m) {
          float piece[16];
#pragma unroll
          for (int v = 0; v < 16; ++v) piece[v] = sums[i * 16 + v];
          output.piece(piece, scales[i], corner.token + i * Tile::kPieceTokens, Tile::kPieceTokens);
        }
      }
    } else {  // one tile a cluster: nothing is loaded into the ring any more
      wgmma_wait<0>();
      sync_threads(1 + Tile::kConsumers, 128 * Tile::kConsumers);
#pragma unroll
      for (int j = 0; j < T / 8; ++j) {
        store_16(ring.base + ((warpgroup * (T / 8) + j) * 128 + warp * 32 + lane) * 16, sums[4 * j],
                 sums[4 * j + 1], sums[4 * j + 2], sums[4 * j + 3]);
      }
      cluster_arrive_release();
      cluster_wait_acquire();
      if (p.split_log2 == 1) add_and_store<Tile, 2>(p, place, ring.base, output, corner.token);
      if (p.split_log2 == 2) add_and_store<Tile, 4>(p, place, ring.base, output, corner.token);
      if (p.split_log2 == 3) add_and_store<Tile, 8>(p, place, ring.base, output, corner.token);
    }
  }
}

// ---- The kernel ----

template <class Tile>
__global__ void __launch_bounds__(Tile::kThreads, Tile::kCtas)
    w4_gemm_kernel(__grid_constant__ Params const p) {
  extern __shared__ __align__(1024) uint8_t shared[];
  Ring<Tile> const ring{shared_address(shared)};
  bool const clustered = p.multicast_log2 + p.split_log2 > 0;
  int const warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
  grid_dependency_launch_dependents();
  if (threadIdx.x == 0) {
    ring.init(1 << p.multicast_log2);
    barriers_visible();
  }
  __syncthreads();
  if (clustered) cluster_arrive_relaxed();

  if (warp < 4) {
    give_registers<Tile::kProducerRegisters>();
    if (threadIdx.x % 32 == 0) {
      Place const place(p);
      produce(p, place, ring, warp, clustered);
    } else if (clustered) {
      cluster_wait_acquire();
    }
    __syncwarp();
    if (p.split_log2 > 0) {  // the consumers' sums
      cluster_arrive_release();
      cluster_wait_acquire();
    }
    if (clustered) {
      cluster_arrive_relaxed();
      cluster_wait_acquire();
    }
  } else {
    take_registers<Tile::kConsumerRegisters>();
    uint32_t const luts = ring.base + Tile::kLutAt;
    if constexpr (kFp8) make_luts<Tile>(luts, threadIdx.x - 128);
    if (clustered) cluster_wait_acquire();
    grid_dependency_wait();
    int const lane = threadIdx.x % 32;
    Place const place(p);
    Consumer<Tile>{p, place, ring, warp / 4 - 1, warp % 4, lane, luts + lane % Tile::kLutCopies * 8}.run();
    // Nobody leaves while others of the cluster may still write to its shared memory, or read it.
    if (clustered) {
      cluster_arrive_relaxed();
      cluster_wait_acquire();
    }
  }
}

}  // namespace fp4d
