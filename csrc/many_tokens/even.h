// Sums of tiles that an even build of many_tokens/kernel.h shares out: a CTA leaves what it has of a tile that another one
// ends, and that one adds what the CTAs before it have left, the nearest first: the same bits every time. A warp needs
// nothing but what the same warps of the other CTAs hold. A warp that copies nothing sets the marks: it takes a microsecond
// until stores are seen everywhere, and those who multiply go on meanwhile.
//
// A CTA waits only for CTAs with lower numbers, which start before it, and they leave such sums before they wait themselves.
// So all get done, however few run at once.
#pragma once

#include "many_tokens/tile.h"

namespace fp4d {

__device__ __forceinline__ void arrive_threads(int barrier, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

__device__ __forceinline__ void store_release(uint64_t* to, uint64_t value) {
  asm volatile("st.release.gpu.global.u64 [%0], %1;" ::"l"(to), "l"(value) : "memory");
}

__device__ __forceinline__ uint64_t load_acquire(uint64_t const* from) {
  uint64_t value;
  asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(value) : "l"(from) : "memory");
  return value;
}

// What a warp has left in Room, and its mark.
template <class Tile>
struct Left {
  float4* sums;  // of this lane: one every 32
  uint64_t* mark;

  __device__ Left(Room const& room, int cta, int warpgroup, int warp, int lane) {
    int const of_all = (cta * Tile::kConsumers + warpgroup) * 4 + warp;
    sums = reinterpret_cast<float4*>(room.sums) + int64_t(of_all) * (Tile::kTokens / 8 * 32) + lane;
    mark = room.marks + of_all;
  }
};

constexpr int kLeftBarrier = 4;

template <class Tile>
constexpr int kLeftThreads = 128 * Tile::kConsumers + 32;

template <class Tile>
__device__ __forceinline__ void leave(Room const& room, float const (&sums)[Tile::kTokens / 2], int warpgroup,
                                      int warp, int lane) {
  Left<Tile> const left(room, blockIdx.x, warpgroup, warp, lane);
#pragma unroll
  for (int j = 0; j < Tile::kTokens / 8; ++j) {
    __stcg(left.sums + j * 32, make_float4(sums[4 * j], sums[4 * j + 1], sums[4 * j + 2], sums[4 * j + 3]));
  }
  arrive_threads(kLeftBarrier, kLeftThreads<Tile>);
}

// By the warp that sets the marks: once all sums have been left.
template <class Tile>
__device__ __forceinline__ void mark_left(Room const& room, int lane) {
  constexpr int kMarks = 4 * Tile::kConsumers;
  sync_threads(kLeftBarrier, kLeftThreads<Tile>);
  if (lane < kMarks) store_release(room.marks + blockIdx.x * kMarks + lane, room.token);
}

template <class Tile>
__device__ __forceinline__ void take(KernelParams<typename Tile::Weights> const& p, Place const& place,
                                     float (&sums)[Tile::kTokens / 2], int warpgroup, int warp, int lane) {
  constexpr int kVectors = Tile::kTokens / 8, kBatches = (kVectors + 13) / 14,
                kAtOnce = (kVectors + kBatches - 1) / kBatches;  // loads under way
  int const ctas = gridDim.x / p.clusters, begins = place.own * p.stages;
  int parts = 1;
  while (place.evenly(p, place.group - parts) > begins) ++parts;
  // Marks of all parts at the same time, a lane each.
  for (int i = lane; i < parts; i += 32) {
    Left<Tile> const left(p.room, blockIdx.x - (i + 1) * ctas, warpgroup, warp, 0);
    while (load_acquire(left.mark) != p.room.token) {
    }
    *left.mark = 0;
  }
  __syncwarp();
#pragma unroll 1
  for (int i = 0; i < parts; ++i) {
    Left<Tile> const left(p.room, blockIdx.x - (i + 1) * ctas, warpgroup, warp, lane);
#pragma unroll
    for (int from = 0; from < kVectors; from += kAtOnce) {
      float4 part[kAtOnce];
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j)
        if (from + j < kVectors) part[j] = __ldcg(left.sums + (from + j) * 32);
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        if (from + j >= kVectors) break;
        int const v = 4 * (from + j);
        sums[v] += part[j].x, sums[v + 1] += part[j].y, sums[v + 2] += part[j].z, sums[v + 3] += part[j].w;
      }
    }
  }
}

}  // namespace fp4d
