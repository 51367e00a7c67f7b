// The attributes of a launch: programmatic dependent launch (PDL), clusters, and the largest shared memory that an SM has.
//
// An SM is divided into shared memory and L1, and keeps its division until no CTA runs on it. A kernel that needs little
// shared memory gets a small part, unless it asks for more. A GEMM that is let in meanwhile (PDL) finds no room on such
// SMs: its CTAs gather on others, or wait. So all kernels ask for the same (bench/notes/few-tokens.md).
#pragma once

#include <cuda_runtime.h>

#include "common/driver_version.h"

namespace fp4d {

// Toolkits have the attribute since 12.5, and some targets are built by older ones, too (jit_flags/). Such a build asks for
// nothing. Drivers know the attribute since CUDA 12.8 at the latest; an older one may refuse the launch.
#if CUDART_VERSION >= 12050
constexpr int kKnowsCarveout = 12080;
#endif

class LaunchAttributes {
 public:
  explicit LaunchAttributes(bool enable_pdl, dim3 cluster = {1, 1, 1}) {
#if CUDART_VERSION >= 12050
    if (driver_version() >= kKnowsCarveout)
      add(cudaLaunchAttributePreferredSharedMemoryCarveout).sharedMemCarveout =
          cudaSharedmemCarveoutMaxShared;
#endif
    if (enable_pdl)
      add(cudaLaunchAttributeProgrammaticStreamSerialization).programmaticStreamSerializationAllowed = 1;
    if (cluster.x * cluster.y * cluster.z > 1)
      add(cudaLaunchAttributeClusterDimension).clusterDim = {cluster.x, cluster.y, cluster.z};
  }

  // `config` refers to this object.
  void give(cudaLaunchConfig_t& config) { config.attrs = attributes_, config.numAttrs = count_; }

 private:
  cudaLaunchAttributeValue& add(cudaLaunchAttributeID id) {
    attributes_[count_].id = id;
    return attributes_[count_++].val;
  }

  cudaLaunchAttribute attributes_[3]{};
  unsigned count_ = 0;
};

}  // namespace fp4d
