// PTX for GEMMs of W4 and W8 weights, beside common/async_copy.h. Bulk and TMA copies, clusters, registers per role and
// matrix stores need SM90. Builds for older archs include this file, too, but use only what they have: small loads,
// stores and conversions. Shared memory is addressed by its 32-bit address.
#pragma once

#include <cstdint>

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "common/async_copy.h"

namespace fp4d {

// ---- Copies from global to shared memory: a multiple of 16 bytes, by one thread; they report to a barrier ----

__device__ __forceinline__ void copy_bulk(uint32_t to, uint8_t const* from, uint32_t bytes,
                                          uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
      "l"(from), "r"(bytes), "r"(barrier)
      : "memory");
}

// To the same place in every CTA of the cluster whose bit is set; each copy reports to the barrier of its CTA.
__device__ __forceinline__ void copy_bulk_multicast(uint32_t to, uint8_t const* from, uint32_t bytes,
                                                    uint32_t barrier, uint32_t ctas) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1], %2, "
      "[%3], "
      "%4;" ::"r"(to),
      "l"(from), "r"(bytes), "r"(barrier), "h"(uint16_t(ctas))
      : "memory");
}

// A box of a tensor by TMA (copy_box of common/async_copy.h), to the same place in every CTA of the cluster whose bit
// is set.
__device__ __forceinline__ void copy_box_multicast(uint32_t to, void const* tensor_map, int x, int y,
                                                   uint32_t barrier, uint32_t ctas) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster"
      ".L2::cache_hint [%0], [%1, {%2, %3}], [%4], %5, %6;" ::"r"(to),
      "l"(tensor_map), "r"(x), "r"(y), "r"(barrier), "h"(uint16_t(ctas)), "l"(kEvictFirst)
      : "memory");
}

// The same without a hint to L2: of what others read again.
__device__ __forceinline__ void copy_box_kept(uint32_t to, void const* tensor_map, int x, int y,
                                              uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], "
      "[%4];" ::"r"(to),
      "l"(tensor_map), "r"(x), "r"(y), "r"(barrier)
      : "memory");
}
__device__ __forceinline__ void copy_box_kept_multicast(uint32_t to, void const* tensor_map, int x, int y,
                                                        uint32_t barrier, uint32_t ctas) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], "
      "[%1, {%2, %3}], [%4], %5;" ::"r"(to),
      "l"(tensor_map), "r"(x), "r"(y), "r"(barrier), "h"(uint16_t(ctas))
      : "memory");
}

// ---- Copies of 4 bytes from global to shared memory, of each thread ----

__device__ __forceinline__ void copy_4(uint32_t to, void const* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to), "l"(from) : "memory");
}
// Until all that this thread has started are done; others see them behind a barrier.
__device__ __forceinline__ void copies_wait() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// ---- Copies from shared to global memory by TMA, by one thread ----

// By each thread that has written to shared memory, before the barrier behind which a thread copies from there.
__device__ __forceinline__ void writes_for_copies() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
__device__ __forceinline__ void store_box(void const* tensor_map, int x, int y, uint32_t from) {
  asm volatile(
      "cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%1, %2}], [%3];" ::"l"(tensor_map), "r"(x),
      "r"(y), "r"(from)
      : "memory");
}
__device__ __forceinline__ void stores_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// Fetches what a later copy needs to know.
__device__ __forceinline__ void prefetch_map(void const* tensor_map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(tensor_map) : "memory");
}
// Until all that this thread has committed have been read from shared memory.
__device__ __forceinline__ void stores_have_read() {
  asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}

// ---- Clusters. Unlike those of common/async_copy.h, threads need not come in whole warps. ----

__device__ __forceinline__ void cluster_arrive_relaxed() {  // orders nothing
  asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory");
}
__device__ __forceinline__ void cluster_arrive_release() {
  asm volatile("barrier.cluster.arrive.release;" ::: "memory");
}
__device__ __forceinline__ void cluster_wait_acquire() {
  asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
}

// At a barrier of any CTA of the cluster: an address from address_in(). For reads that are done: it orders no writes
// for other CTAs (with .release.cluster it would cost a fence of the whole GPU).
__device__ __forceinline__ void barrier_arrive_in(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}

__device__ __forceinline__ float4 load_cluster_16(uint32_t address) {
  float4 v;
  asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
               : "r"(address)
               : "memory");
  return v;
}

// ---- Shared memory of this CTA ----

__device__ __forceinline__ uint32_t load_1(uint32_t address) {
  uint32_t v;
  asm volatile("ld.shared.u8 %0, [%1];" : "=r"(v) : "r"(address));
  return v;
}

__device__ __forceinline__ uint32_t load_2(uint32_t address) {
  uint16_t v;
  asm volatile("ld.shared.u16 %0, [%1];" : "=h"(v) : "r"(address));
  return v;
}

__device__ __forceinline__ uint2 load_8(uint32_t address) {
  uint2 v;
  asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(address));
  return v;
}

__device__ __forceinline__ void store_8(uint32_t address, uint32_t a, uint32_t b) {
  asm volatile("st.shared.v2.u32 [%0], {%1, %2};" ::"r"(address), "r"(a), "r"(b) : "memory");
}

__device__ __forceinline__ void store_16(uint32_t address, float a, float b, float c, float d) {
  asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(address), "f"(a), "f"(b), "f"(c), "f"(d)
               : "memory");
}

// Four 8x8 matrices of 16-bit numbers. Lane 4 r + c gives columns 2 c, 2 c + 1 of row r of each; lane 8 i + r gives the
// address of the 16 bytes of row r of matrix i.
__device__ __forceinline__ void store_matrices(uint32_t address, uint32_t const (&pairs)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
               "r"(pairs[0]), "r"(pairs[1]), "r"(pairs[2]), "r"(pairs[3])
               : "memory");
}

// The same, transposed. Lane 4 r + c gives columns 2 c, 2 c + 1 of row r of each; lane
// 8 i + t gives the address of the 16 bytes that column t of matrix i becomes.
__device__ __forceinline__ void store_matrices_transposed(uint32_t address, uint32_t const (&pairs)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
               "r"(pairs[0]), "r"(pairs[1]), "r"(pairs[2]), "r"(pairs[3])
               : "memory");
}

__device__ __forceinline__ uint32_t pack(float low, float high, __nv_bfloat16) {
  __nv_bfloat162 const pair = __floats2bfloat162_rn(low, high);
  return reinterpret_cast<uint32_t const&>(pair);
}
__device__ __forceinline__ uint32_t pack(float low, float high, __half) {
  __half2 const pair = __floats2half2_rn(low, high);
  return reinterpret_cast<uint32_t const&>(pair);
}

// ---- Warps ----

__device__ __forceinline__ void sync_threads(int barrier, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// By all warps of a warpgroup: how many registers a thread has from here on.
template <int registers>
__device__ __forceinline__ void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(registers));
}
template <int registers>
__device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(registers));
}

}  // namespace fp4d
