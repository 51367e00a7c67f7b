// What the parts of many_tokens/kernel.h share: its arguments, its tile, the ring of stages, places in a cluster. All are
// templates over `Weights`, the format of the weights (many_tokens/w4/weights.h, many_tokens/w8/weights.h).
#pragma once

#include <algorithm>
#include <type_traits>

#include "common/gdc_guard.h"

#include <cuda.h>
#include <cuda_runtime.h>

#include "common/async_copy.h"
#include "weights/early_loads.h"
#include "many_tokens/output.h"
#include "common/sm90.h"
#include "common/wgmma.h"

namespace fp4d {

#if !defined(FP4D_EVEN)
#define FP4D_EVEN \
  0  // 1: what whole tiles leave is shared out by stages, the same to every cluster (many_tokens/even.h)
#endif
constexpr bool kEvenly = FP4D_EVEN == 1;
constexpr int kNear = 2, kFewestShare = 2 * kNear + 1;  // stages of such a share

constexpr int kBlockRows = 64;  // of weights, which a consumer warpgroup multiplies

// FP8: wgmma's register v is added to sum v ^ kOtherBank. ptxas lines sums up by four, as the registers of a wgmma are,
// so that v and sum v would be in one bank, and an addition would read that bank twice.
constexpr int kOtherBank = kFp8 ? 1 : 0;

template <int N>
__device__ __forceinline__ void add(float const (&partial)[N], float (&sums)[N]) {
#pragma unroll
  for (int v = 0; v < N; ++v) sums[v ^ kOtherBank] += partial[v];
}

// Activations: e4m3 as packed_activations.cu packs them, or 16 bits [M, K] by TMA.
using Tokens = std::conditional_t<kFp8, uint8_t const*, CUtensorMap>;

template <class Weights>
struct Params {
  typename Weights::Source w;
  int m, n;
  int token_blocks;              // packed tokens: of 8 tokens in x
  int row_blocks;                // of w
  int stages;                    // along K
  int x_scale_step, alpha_step;  // 0: one for all
  int multicast_log2, sharing_log2,
      split;                   // CTAs of a cluster with the same tokens, with the same rows; parts of K
  int row_tiles, token_tiles;  // clusters that cover N, and M
  int raster;                  // token tiles that are done before the next rows
  int clusters;                // of the grid
  int rounds;                  // whole tiles of every CTA before it takes part in a split one
  // One a token, and one a column or row of the weight; in blocks [stages, 8 token_blocks] and [row tiles, stages].
  float const *x_scale, *alpha;
  Out const* bias;
  Out* out;
  Tokens x;
  CUtensorMap out_map;  // where weights are operand A: boxes of 64 columns and 8 tokens
};

// What an even launch needs besides. A CTA leaves its sums of a tile that the next one ends, and then its marks: the launch's
// token, which no memory holds by chance. Whoever takes the sums wipes the marks, so a replay of a graph, which has the same
// token, does not meet those of the one before.
struct Room {
  uint64_t* marks;  // of [CTA][warpgroup][warp]
  float* sums;      // of the same, as threads hold them: [8 columns][lane][4]
  uint64_t token;
};

template <class Weights>
struct EvenParams : Params<Weights> {
  Room room;
};

template <class Weights>
using KernelParams = std::conditional_t<kEvenly, EvenParams<Weights>, Params<Weights>>;

// Whether Params lie as kernels.toml declares to the proof.
template <class P>
constexpr bool lies_as_declared() {
#if defined(FP4D_NUMBERS_FIRST)  // from Source::count up to x_scale
  if (offsetof(P, x_scale) != kNumbersEnd) return false;
#endif
  return offsetof(P, w) == kWeightsAt;
}

// Where tokens are operand A, a warp turns a piece of its output at a time. The 16 bytes more keep tokens off each
// other's banks.
constexpr int kPieceTokens = 16, kPieceColumns = 64;
constexpr int kPieceBytes = kPieceTokens * (kPieceColumns * int(sizeof(Out)) + 16);

template <int T, class W>
struct Tile {
  using Weights = W;
  static constexpr int kTokens = T;
  static constexpr int kConsumers = 2;            // warpgroups
  static constexpr int kCtas = Weights::ctas(T);  // of a multiprocessor: one's ends hide under the other
  static constexpr int kThreads = 128 * (1 + kConsumers);
  static constexpr int kRows = kBlockRows * kConsumers;
  static constexpr int kMostSplit = T == 32 ? 4 : 8;  // each part of K adds up 8 tokens at least
  // 65536 registers, shared out evenly at the start; the producer gives its up. Or 49152, as if there were more threads.
  static constexpr bool kLeavesRegisters = Weights::leaves_registers(T);
  static constexpr int kSharingThreads = kLeavesRegisters ? 512 : kThreads;
  static constexpr bool kMostSums = kFp8 && T > 192;  // which leave the producer no more than it needs
  static constexpr int kProducerRegisters = kMostSums ? 24 : kCtas == 1 && !kLeavesRegisters ? 40 : 32;
  static constexpr int kConsumerRegisters = kLeavesRegisters ? 176 : kCtas == 2 ? 104 : kMostSums ? 240 : 232;
  static constexpr int kPromoteStages = Weights::promote_stages(T);

  static constexpr int kTokenBytes = T * 128;               // a stage is 128 bytes of activations along K
  static constexpr int kBlockBytes = Weights::kBlockBytes;  // weights of a warpgroup in a stage
  static constexpr int kWeightBytes = kConsumers * kBlockBytes;
  static constexpr int kScaleBytes = Weights::kBlocks ? T * 4 : 0;  // of a stage's tokens

  // Where warpgroups turn their output, and scales of its rows and tokens.
  static constexpr int kOutTokens = Weights::out_tokens(T);
  static constexpr int kOutBytes =
      kConsumers * (Weights::kBlocks ? 4 * kPieceBytes : kOutTokens * kBlockRows * int(sizeof(Out)));
  static constexpr int kOutScaleBytes = Weights::kBlocks ? 0 : (kBlockRows + (kFp8 ? T : 0)) * 4;

  static constexpr int kLutBytes = Weights::kTableBytes;

  static constexpr int kBarrierBytes = 128, kMaxShared = kCtas == 2 ? 115712 : 232448;
  // Tokens, then weights, then scales; the next stage's tokens at a multiple of 1024.
  static constexpr int kStageBytes = (kTokenBytes + kWeightBytes + kScaleBytes + 1023) / 1024 * 1024;
  static constexpr int kStages = std::min(
      8, (kMaxShared - kOutBytes - kConsumers * kOutScaleBytes - kLutBytes - kBarrierBytes) / kStageBytes);
  static constexpr int kOutAt = kStages * kStageBytes, kLutAt = kOutAt + kOutBytes,
                       kOutScalesAt = kLutAt + kLutBytes,
                       kBarriersAt = kOutScalesAt + kConsumers * kOutScaleBytes,
                       kShared = kBarriersAt + kBarrierBytes;
  static_assert(T % 16 == 0 && kStages >= 4 && kStages * 16 <= kBarrierBytes);
  static_assert(kRows * T * 4 <= kOutAt, "the sums of a split take the place of the ring");
};

constexpr int kWeightThreads = 2;  // that copy weights

template <class Tile>
struct Ring {
  uint32_t base;  // in shared memory

  __device__ uint32_t tokens(int slot) const { return base + slot * Tile::kStageBytes; }
  __device__ uint32_t weights(int slot, int warpgroup) const {
    return tokens(slot) + Tile::kTokenBytes + warpgroup * Tile::kBlockBytes;
  }
  __device__ uint32_t scales(int slot) const { return tokens(slot) + Tile::kTokenBytes + Tile::kWeightBytes; }
  __device__ uint32_t full(int slot) const { return base + Tile::kBarriersAt + slot * 16; }
  __device__ uint32_t empty(int slot) const { return full(slot) + 8; }

  // An arrival with its bytes of each copying thread; one of each consumer warp of each of the CTAs to which this one
  // copies, itself among them.
  __device__ void init(int ctas) const {
    for (int slot = 0; slot < Tile::kStages; ++slot) {
      barrier_init(full(slot), 1 + kWeightThreads);
      barrier_init(empty(slot), ctas * Tile::kConsumers * 4);
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

// The same in bytes, from the first slot and from its barriers: fewer instructions for loops that dequantise.
template <class Tile>
struct Offsets {
  uint32_t slot = 0, barrier = 0, parity = 0;

  __device__ __forceinline__ void advance(bool stay = false) {
    slot += stay ? 0 : Tile::kStageBytes;
    barrier += stay ? 0 : 16;
    bool const wraps = barrier == Tile::kStages * 16;
    slot = wraps ? 0 : slot;
    barrier = wraps ? 0 : barrier;
    parity ^= wraps ? 1 : 0;
  }
};

// This CTA's place in its cluster, and what it does: `whole` tiles together with those that share tokens or rows with it,
// its group, and then, if `parts`, its share of K, in stages, of one that the cluster does together.
struct Place {
  int cluster, multicast, sharing, split;  // number of the cluster; ranks
  int group, groups, whole, parts;
  int first, count;
  // Evenly: the first tile that it has a part of, which are the stages above; stages of the tile after it; whether another
  // CTA ends one of the two. That one comes first of all, so that nobody need wait for it.
  int own = 0, head = 0;
  bool leaves = false;

  template <class Weights>
  __device__ explicit Place(Params<Weights> const& p) {
    int const together = p.multicast_log2 + p.sharing_log2, ctas = p.split << together,
              rank = blockIdx.x % ctas;
    cluster = blockIdx.x / ctas;
    multicast = rank & ((1 << p.multicast_log2) - 1);
    sharing = (rank >> p.multicast_log2) & ((1 << p.sharing_log2) - 1);
    split = rank >> together;
    if constexpr (kEvenly) {
      group = cluster, groups = p.clusters, whole = p.rounds, parts = 0;
      int const from = evenly(p, group), to = evenly(p, group + 1);
      own = from / p.stages, first = from - own * p.stages;
      count = min(to - from, p.stages - first), head = to - from - count;
      leaves = (head > 0 && head < p.stages) || first + count < p.stages;
      return;
    }
    first = int(int64_t(p.stages) * split / p.split);
    count = int(int64_t(p.stages) * (split + 1) / p.split) - first;
    int const tiles = p.row_tiles * p.token_tiles;
    group = cluster * p.split + split, groups = p.clusters * p.split;
    whole = p.split > 1 ? p.rounds : group < tiles ? (tiles - 1 - group) / groups + 1 : 0;
    parts = p.split > 1 && whole * groups + cluster < tiles;
  }
  // The first stage of a group, of all stages that whole tiles leave. Where that is near the start or end of a tile, it is
  // the start of one: to leave sums takes longer than kNear stages. So no last item has one stage, either, where loops would
  // ask for the stage behind it.
  template <class Weights>
  __device__ int evenly(Params<Weights> const& p, int group) const {
    int const left = p.row_tiles * p.token_tiles - whole * groups;
    int const at = left * p.stages * group / groups;  // fits an int: many_tokens/launch.h
    int const in_tile = at % p.stages, to_next = p.stages - in_tile;
    return in_tile <= kNear ? at - in_tile : to_next <= kNear ? at + to_next : at;
  }
  __device__ int items() const {
    if constexpr (kEvenly) return (head > 0) + whole + 1;
    return whole + parts;
  }
  // Stages of all of it.
  template <class Weights>
  __device__ int stages(Params<Weights> const& p) const {
    if constexpr (kEvenly) return head + whole * p.stages + count;
    return whole * p.stages + parts * count;
  }
  // Rank in the cluster of a CTA with the same tokens, with the same rows, or with both.
  template <class Weights>
  __device__ int with_multicast(Params<Weights> const& p, int rank) const {
    return (((split << p.sharing_log2) + sharing) << p.multicast_log2) + rank;
  }
  // A bit for each CTA with the same tokens.
  template <class Weights>
  __device__ uint32_t all_with_multicast(Params<Weights> const& p) const {
    return ((1u << (1 << p.multicast_log2)) - 1) << with_multicast(p, 0);
  }
  template <class Weights>
  __device__ int with_sharing(Params<Weights> const& p, int rank) const {
    return (((split << p.sharing_log2) + rank) << p.multicast_log2) + multicast;
  }
  template <class Weights>
  __device__ int with_split(Params<Weights> const& p, int rank) const {
    return (((rank << p.sharing_log2) + sharing) << p.multicast_log2) + multicast;
  }
  // The ones that copy to this CTA, itself among them: how many, and the rank of one.
  template <class Weights>
  __device__ static int sources(Params<Weights> const& p) {
    return (1 << p.multicast_log2) + (1 << p.sharing_log2) - 1;
  }
  template <class Weights>
  __device__ int source(Params<Weights> const& p, int i) const {
    int const beyond = i - (1 << p.multicast_log2);
    return beyond < 0 ? with_multicast(p, i) : with_sharing(p, beyond + (beyond >= sharing));
  }
};

// A consumer warp's arrivals at the barriers of a slot in all CTAs that copy to this one, a lane each.
struct Releases {
  uint32_t empty_at = 0, mine = 0;  // of slot 0; whether this lane has a CTA

  template <class Tile>
  __device__ void start(Params<typename Tile::Weights> const& p, Place const& place, Ring<Tile> ring,
                        int lane) {
    mine = lane < Place::sources(p);
    empty_at = address_in(ring.empty(0), place.source(p, mine != 0 ? lane : 0));
  }
  __device__ uint32_t of(int slot) const { return empty_at + slot * 16; }
};

// Where a tile begins.
struct Corner {
  int row_block, token;
};

// Tiles in the order in which clusters take them: `raster` token tiles side by side for all rows, then the next ones.
template <class Tile>
__device__ __forceinline__ Corner corner_of(Params<typename Tile::Weights> const& p, Place const& place,
                                            int tile) {
  int const band = tile / (p.row_tiles * p.raster), in_band = tile - band * p.row_tiles * p.raster;
  int const width = min(p.raster, p.token_tiles - band * p.raster), row = in_band / width;
  return {((row << p.multicast_log2) + place.multicast) * Tile::kConsumers,
          (((band * p.raster + in_band - row * width) << p.sharing_log2) + place.sharing) * Tile::kTokens};
}

// A tile, or the part of it that this CTA does: where it begins, and which stages along K.
struct Item {
  Corner corner;
  int first, count;
};

template <class Tile>
__device__ __forceinline__ Item item_of(Params<typename Tile::Weights> const& p, Place const& place, int i) {
  if constexpr (kEvenly) {
    int const at = i - (place.head > 0 || place.leaves), own = place.whole * place.groups + place.own;
    if (at < 0 && place.head > 0) return {corner_of<Tile>(p, place, own + 1), 0, place.head};
    if (at < 0 || at >= place.whole) return {corner_of<Tile>(p, place, own), place.first, place.count};
    return {corner_of<Tile>(p, place, place.group + at * place.groups), 0, p.stages};
  }
  if (i < place.whole) return {corner_of<Tile>(p, place, place.group + i * place.groups), 0, p.stages};
  return {corner_of<Tile>(p, place, place.whole * place.groups + place.cluster), place.first, place.count};
}

}  // namespace fp4d
