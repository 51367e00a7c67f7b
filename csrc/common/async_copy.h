// Barriers in shared memory, copies that report to them, and sums sent across a cluster: thin names for PTX, with
// what sm_80 has in place of bulk copies and clusters. Shared memory is addressed by its 32-bit address.
#pragma once

#include <cstdint>

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
#define FP4D_BULK 1  // bulk copies, clusters and distributed shared memory
#else
#define FP4D_BULK 0
#endif

// Where copies go: this CTA's shared memory, by the only name before PTX 8.6. By that name sm_12x would check at run time
// that it is not another CTA's, and call a function for it, which the proof refuses.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
#define FP4D_SHARED "shared::cta"
#else
#define FP4D_SHARED "shared::cluster"
#endif

namespace fp4d {

__device__ __forceinline__ uint32_t shared_address(void const* p) {
  return uint32_t(__cvta_generic_to_shared(p));
}

// Keeps a value in a register, where the compiler would compute it again in every round.
__device__ __forceinline__ void keep(uint32_t& value) { asm volatile("" : "+r"(value)); }

// One lane of a whole warp, always the same. What such a branch holds runs once, and the compiler knows it: behind `lane ==
// 0` it loops over the lanes that came along, around each instruction with operands of a whole warp.
__device__ __forceinline__ bool elected([[maybe_unused]] int lane) {
#if FP4D_BULK
  uint32_t one;
  asm volatile("{\n.reg .pred p;\nelect.sync _|p, 0xffffffff;\nselp.u32 %0, 1, 0, p;\n}" : "=r"(one));
  return one != 0;
#else
  return lane == 0;
#endif
}

// ---- Barriers: mbarrier ----

__device__ __forceinline__ void barrier_init(uint32_t barrier, uint32_t count) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}

// After barrier_init, by the same thread: before copies, and other CTAs of the cluster, may use the barriers.
__device__ __forceinline__ void barriers_visible() {
#if FP4D_BULK
  asm volatile("fence.mbarrier_init.release.cluster;\nfence.proxy.async.shared::cta;" ::: "memory");
#endif
}

__device__ __forceinline__ void barrier_arrive(uint32_t barrier) {
  asm volatile("{\n.reg .b64 state;\nmbarrier.arrive.shared.b64 state, [%0];\n}" ::"r"(barrier) : "memory");
}

__device__ __forceinline__ bool barrier_done(uint32_t barrier, uint32_t parity) {
  uint32_t done = 1;
#if FP4D_BULK
  asm volatile(
      "{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
      : "=r"(done)
      : "r"(barrier), "r"(parity)
      : "memory");
#elif defined(__CUDA_ARCH__)
  asm volatile("{\n.reg .pred p;\nmbarrier.test_wait.parity.shared.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
               : "=r"(done)
               : "r"(barrier), "r"(parity)
               : "memory");
#endif
  return done != 0;
}

// Until the phase of this parity has ended; a new barrier is in phase 0, so parity 1 has ended.
__device__ __forceinline__ void barrier_wait(uint32_t barrier, uint32_t parity) {
  while (!barrier_done(barrier, parity)) {
  }
}

// The same for a barrier to which other CTAs of the cluster report what they sent.
__device__ __forceinline__ void barrier_wait_cluster(uint32_t barrier, uint32_t parity) {
#if FP4D_BULK
  uint32_t done;
  do {
    asm volatile(
        "{\n.reg .pred p;\nmbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2;\n"
        "selp.u32 %0, 1, 0, p;\n}"
        : "=r"(done)
        : "r"(barrier), "r"(parity)
        : "memory");
  } while (done == 0);
#endif
}

// ---- Copies from global to shared memory ----

// 16 bytes, of which `bytes` (0 or 16) are read and the rest are zero.
__device__ __forceinline__ void copy_16(uint32_t to, void const* from, uint32_t bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}

// An arrival once all copy_16 that this thread has started are done.
__device__ __forceinline__ void barrier_arrive_after_copies(uint32_t barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(barrier) : "memory");
}

// One arrival; with bulk copies the phase then also waits for these bytes.
__device__ __forceinline__ void barrier_arrive_expect(uint32_t barrier, uint32_t bytes) {
#if FP4D_BULK
  asm volatile(
      "{\n.reg .b64 state;\nmbarrier.arrive.expect_tx.shared::cta.b64 state, [%0], %1;\n}" ::"r"(barrier),
      "r"(bytes)
      : "memory");
#else
  barrier_arrive(barrier);
#endif
}

// L2 forgets first what was loaded with this hint. Encoding: CacheHintSm90 of CUTLASS, copy_sm90_desc.hpp.
constexpr uint64_t kEvictFirst = 0x12F0000000000000;

// By one thread; reports to the barrier. For bytes that are read once, or by CTAs that run at the same time: L2 then
// keeps the activations instead.
__device__ __forceinline__ void copy_bulk_once(uint32_t to, uint8_t const* from, uint32_t bytes,
                                               uint32_t barrier) {
#if FP4D_BULK
  asm volatile("cp.async.bulk." FP4D_SHARED
               ".global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::"r"(to),
               "l"(from), "r"(bytes), "r"(barrier), "l"(kEvictFirst)
               : "memory");
#endif
}

// Contiguous bytes (a multiple of 16) by a warp, read once: by one bulk copy that reports to the barrier, else by
// copy_16 of all lanes, which barrier_arrive_after_copies has to follow.
__device__ __forceinline__ void copy_stream(uint32_t to, uint8_t const* from, uint32_t bytes,
                                            uint32_t barrier, int lane) {
#if FP4D_BULK
  if (elected(lane)) copy_bulk_once(to, from, bytes, barrier);
#else
  for (uint32_t i = lane * 16; i < bytes; i += 32 * 16) copy_16(to + i, from + i, 16);
#endif
}

// A box of a tensor by TMA, by one thread; reports the whole box's bytes to the barrier. What is outside of the tensor
// comes as zero. Coordinates: the fastest dimension first. As copy_stream, read once.
__device__ __forceinline__ void copy_box(uint32_t to, void const* tensor_map, int x, int y,
                                         uint32_t barrier) {
#if FP4D_BULK
  asm volatile(
      "cp.async.bulk.tensor.2d." FP4D_SHARED
      ".global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(to),
      "l"(tensor_map), "r"(x), "r"(y), "r"(barrier), "l"(kEvictFirst)
      : "memory");
#endif
}

// ---- Clusters. All threads of the warp must arrive and wait together. ----

// Says that this CTA runs, and that it has read what it wanted from its shared memory.
__device__ __forceinline__ void cluster_arrive() {
#if FP4D_BULK
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
#endif
}

__device__ __forceinline__ void cluster_wait() {
#if FP4D_BULK
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}

// The same place in the shared memory of CTA `rank` of the cluster.
__device__ __forceinline__ uint32_t address_in(uint32_t address, int rank) {
  uint32_t mapped = address;
#if FP4D_BULK
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(mapped) : "r"(address), "r"(rank));
#endif
  return mapped;
}

// Stores 4 bytes in another CTA and reports them to a barrier there.
__device__ __forceinline__ void send(uint32_t address, float value, uint32_t barrier) {
#if FP4D_BULK
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.f32 [%0], %1, [%2];" ::"r"(address),
               "f"(value), "r"(barrier)
               : "memory");
#endif
}

// The same of 16 bytes.
__device__ __forceinline__ void send_16(uint32_t address, float4 value, uint32_t barrier) {
#if FP4D_BULK
  asm volatile(
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(
          address),
      "f"(value.x), "f"(value.y), "f"(value.z), "f"(value.w), "r"(barrier)
      : "memory");
#endif
}

// ---- Shared memory of this CTA ----

__device__ __forceinline__ uint4 load_16(uint32_t address) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(address));
  return v;
}

__device__ __forceinline__ uint32_t load_4(uint32_t address) {
  uint32_t v;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(address));
  return v;
}

__device__ __forceinline__ void store_4(uint32_t address, float value) {
  asm volatile("st.shared.f32 [%0], %1;" ::"r"(address), "f"(value) : "memory");
}

}  // namespace fp4d
