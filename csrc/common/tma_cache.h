// TMA descriptors that were made before are not made again: weights keep theirs while a model runs.
// tests/compile/test_host_calls.py counts what a launch calls.
#pragma once

#include <array>
#include <cstring>
#include <memory>
#include <type_traits>

#include <cuda.h>

#include "common/ffi_checks.h"
#include "common/tma_driver.h"

namespace fp4d {

// All that goes into a descriptor, so that equal keys have equal descriptors, whatever the memory holds or belongs to
// by then: a descriptor knows an address, not an allocation, and no device.
struct MapKey {
  static constexpr int kRank = 5;
  uint64_t address = 0, sizes[kRank]{}, strides[kRank - 1]{};
  uint32_t box[kRank]{}, box_strides[kRank]{};
  int32_t type = 0, rank = 0, interleave = 0, swizzle = 0, promotion = 0, fill = 0;

  bool operator==(MapKey const& other) const { return std::memcmp(this, &other, sizeof *this) == 0; }

  size_t slot(size_t slots) const {
    uint64_t mixed = address;
    for (int i = 0; i < 2; ++i) {
      mixed = (mixed ^ sizes[i]) * 0x9e3779b97f4a7c15u;
      mixed ^= mixed >> 32;
    }
    return mixed % slots;
  }
};
static_assert(std::has_unique_object_representations_v<MapKey>, "compared by its bytes");

// The descriptors of a thread and a kernel library. One slot for each key, the last one has it: weights keep theirs
// while a model runs, and outputs and scratch memory come back to the same addresses. 320 KB, taken when first used.
class MapCache {
 public:
  static MapCache& of_thread() {
    thread_local std::unique_ptr<MapCache> const made(new MapCache);
    return *made;
  }

  template <class Encode>
  CUresult find(MapKey const& key, CUtensorMap* map, Encode&& encode) {
    Slot& slot = slots_[key.slot(slots_.size())];
    if (!(slot.key == key)) {
      slot.key.rank = 0;  // none has it: nothing is found here should the driver refuse
      if (CUresult const error = encode(&slot.map); error != CUDA_SUCCESS) return error;
      slot.key = key;
    }
    *map = slot.map;
    return CUDA_SUCCESS;
  }

 private:
  struct Slot {
    CUtensorMap map;
    MapKey key;
  };
  std::array<Slot, 1024> slots_;
};

// As cuTensorMapEncodeTiled, out of the thread's cache where it is there; an error is thrown.
inline void encode_cached(CUtensorMap* map, CUtensorMapDataType type, int rank, void* address,
                          uint64_t const* sizes, uint64_t const* strides, uint32_t const* box,
                          uint32_t const* box_strides, CUtensorMapInterleave interleave,
                          CUtensorMapSwizzle swizzle, CUtensorMapL2promotion promotion,
                          CUtensorMapFloatOOBfill fill) {
  static_assert(sizeof(uint64_t) == sizeof(cuuint64_t) && sizeof(uint32_t) == sizeof(cuuint32_t));
  if (rank < 1 || rank > MapKey::kRank)
    TVM_FFI_THROW(ValueError) << "a tensor of rank " << rank << ", needed 1 to " << MapKey::kRank;
  MapKey key;
  key.address = reinterpret_cast<uint64_t>(address);
  std::memcpy(key.sizes, sizes, rank * sizeof *sizes);
  std::memcpy(key.strides, strides, (rank - 1) * sizeof *strides);
  std::memcpy(key.box, box, rank * sizeof *box);
  std::memcpy(key.box_strides, box_strides, rank * sizeof *box_strides);
  key.type = type, key.rank = rank, key.interleave = interleave, key.swizzle = swizzle;
  key.promotion = promotion, key.fill = fill;
  CUresult const error = MapCache::of_thread().find(key, map, [&](CUtensorMap* made) {
    return encode_tiled()(
        made, type, static_cast<cuuint32_t>(rank), address, reinterpret_cast<cuuint64_t const*>(sizes),
        reinterpret_cast<cuuint64_t const*>(strides), reinterpret_cast<cuuint32_t const*>(box),
        reinterpret_cast<cuuint32_t const*>(box_strides), interleave, swizzle, promotion, fill);
  });
  if (error != CUDA_SUCCESS)
    TVM_FFI_THROW(RuntimeError) << "cuTensorMapEncodeTiled failed with CUDA driver error " << int(error)
                                << " for a tensor of rank " << rank << " at " << address
                                << ": sizes and strides must be what TMA takes";
}

}  // namespace fp4d
