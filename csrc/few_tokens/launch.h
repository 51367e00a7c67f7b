// Launching few_tokens/kernel.h: arguments, launch shapes, the grid. A .cu file says with a struct `Small`:
//   Weights     the format of its weights
//   built()     what it builds
//   division(tokens, row_blocks, k, machine)   the one that is fastest, as measured; row_blocks: of 64 rows
//   source_of(w, n, k)     w as the kernel takes it, checked; N is that of the output
//   ready(source, machine) adds what only a launch needs
#pragma once

#include <tvm/ffi/container/array.h>

#include "common/divide_up.h"
#include "few_tokens/kernel.h"
#include "common/gemm_operands.h"
#include "common/launch_attributes.h"
#include "common/per_device.h"
#include "common/tma_rows.h"
#include "quantise/quantize.h"

namespace fp4d {

// tokens, row blocks, groups, units: the Tile; CTAs of a cluster (1 to 8); stages of a ring; and how many
// stages before its end a CTA lets the next grid start (PDL), though not before the previous grid has ended.
struct Plan {
  int64_t tokens, row_blocks, groups, units, cluster, stages, trigger;
};

struct Machine {
  int64_t multiprocessors, shared_sm, shared_block;
  bool clusters;
};

// One row a Tile that is built.
template <class Weights>
struct Instance {
  int64_t tokens, row_blocks, groups, units;
  bool boxes;  // tokens come by TMA
  int threads, resident, fewest_stages, most_stages;
  int (*shared_bytes)(int cluster, int stages);
  int (*slots_log2)(int cluster);
  void (*kernel)(Params<Weights> const);
};

template <class Weights, int T, int RB, int KG, int U>
constexpr Instance<Weights> instance() {
  using Used = Tile<T, RB, KG, U, Weights>;
  return {T,
          RB,
          KG,
          U,
          Used::kBoxes,
          Used::kThreads,
          Used::kResident,
          Used::kFewestStages,
          Used::kMaxSlots / KG,
          Used::shared_bytes,
          Used::slots_log2,
          few_tokens_kernel<Used>};
}

constexpr int64_t kMaxCluster = 8;  // portable
// Of the multiprocessors that must have a CTA, unless filled_for() knows better.
constexpr double kFilled = 0.7;
constexpr int64_t kReserved = 1024;  // bytes of shared memory that a CTA costs beside its own
// Stages of a ring that is planned here. A caller may ask for as few as Tile::kFewestStages.
constexpr int64_t kFewestPlanned = 2;
constexpr int64_t kFewRounds = 4;  // of a ring: no gain from more than the fewest stages

inline bool filled(int64_t ctas, Machine const& on, double share = kFilled) {
  return double(ctas) >= share * double(on.multiprocessors);
}

// More CTAs than two for each multiprocessor.
inline bool many(int64_t ctas, Machine const& on) { return ctas > 2 * on.multiprocessors; }

// Stages that fit `ctas` CTAs on a multiprocessor; no more than are `needed`.
template <class Weights>
int64_t stages_that_fit(Instance<Weights> const& used, Machine const& on, int64_t needed, int64_t cluster,
                        int64_t ctas) {
  int64_t const bytes = std::min(on.shared_block, on.shared_sm / ctas - kReserved);
  int64_t stages = std::min(std::max(needed, kFewestPlanned), int64_t(used.most_stages));
  while (stages > 0 && used.shared_bytes(int(cluster), int(stages)) > bytes) --stages;
  return stages;
}

// How a CTA is divided, and what is made of many or few CTAs. split_rounds: more than two for each multiprocessor share a
// row block in pairs. whole: CTAs that have a multiprocessor each to themselves take all its shared memory. most_stages:
// no more, though they would fit; 0: as many as fit. filled: of the multiprocessors that must have a CTA before K is not
// shared out any further.
struct Division {
  int64_t row_blocks, groups, units;
  bool split_rounds = true, whole = false;
  int64_t most_stages = 0;
  double filled = kFilled;
};

// CTAs of a cluster that share out K, so that `tiles` row blocks fill the GPU.
inline int64_t cluster_of(int64_t tiles, int64_t most, Machine const& on, double share = kFilled) {
  int64_t cluster = 1;
  while (on.clusters && cluster < most && !filled(tiles * cluster, on, share)) cluster *= 2;
  return cluster;
}

// What share of the multiprocessors must have a CTA. Half of them nearly use up the memory's bandwidth. So a short K is
// not split where half of them have a CTA each.
inline double filled_for(int64_t row_blocks, int64_t k, Machine const& on) {
  constexpr double kHalf = 0.45;
  constexpr int64_t kShortK = 8192;
  return k <= kShortK && filled(row_blocks, on, kHalf) ? kHalf : kFilled;
}

// A launch of this tile, with no stages where not even two fit.
template <class Weights>
Plan plan_of(Instance<Weights> const& used, int64_t row_blocks, int64_t chunks, Machine const& on,
             Division const& wanted) {
  int64_t const tiles = divide_up(row_blocks, used.row_blocks);
  // With one CTA a multiprocessor not every cluster of 8 finds its place at once.
  int64_t const most = used.resident == 1 ? kMaxCluster / 2 : kMaxCluster;
  int64_t cluster = cluster_of(tiles, most, on, wanted.filled);
  // The next CTAs start where one has ended, so halves and short rings leave a shorter tail.
  bool const rounds = wanted.split_rounds && on.clusters && many(tiles, on);
  if (rounds) cluster = 2;
  int64_t const needed = divide_up(divide_up(chunks, Weights::kStageChunks), cluster * used.groups);
  int64_t const useful = wanted.most_stages > 0 ? std::min(needed, wanted.most_stages) : needed;
  int64_t const most_stages = rounds || needed <= kFewRounds ? kFewestPlanned : useful;
  int64_t const resident = wanted.whole && tiles * cluster <= on.multiprocessors ? 1 : used.resident;
  int64_t stages = stages_that_fit(used, on, most_stages, cluster, resident);
  if (stages < kFewestPlanned) stages = stages_that_fit(used, on, most_stages, cluster, 1);
  if (stages < kFewestPlanned) return {};
  int64_t const trigger = std::max<int64_t>(stages / Weights::kTriggerPart, 1);
  return {used.tokens, used.row_blocks, used.groups, used.units, cluster, stages, trigger};
}

// What a file builds.
template <class Weights>
struct Built {
  Instance<Weights> const* first;
  Instance<Weights> const* last;
  Instance<Weights> const* begin() const { return first; }
  Instance<Weights> const* end() const { return last; }
};

template <class Small>
struct Launch {
  using Weights = typename Small::Weights;
  using Instance = fp4d::Instance<Weights>;
  using Params = fp4d::Params<Weights>;

  // The smallest tile that holds m tokens, or the largest.
  static int64_t tokens_of(int64_t m) {
    int64_t fits = 0, most = 0;
    for (Instance const& used : Small::built()) {
      if (used.tokens >= m && (fits == 0 || used.tokens < fits)) fits = used.tokens;
      most = std::max(most, used.tokens);
    }
    return fits > 0 ? fits : most;
  }

  // The same for all numbers of tokens of a tile. Where the division wanted is not built or does not fit, the first
  // of the list that does and multiplies by mma.sync. Of tiles by wgmma only the one wanted is taken: the result has no
  // stages where that one does not fit.
  static Plan plan(int64_t m, int64_t n, int64_t k, Machine const& on) {
    int64_t const tokens = tokens_of(m);
    int64_t const row_blocks = divide_up(n, Weights::kRows), chunks = divide_up(k, Weights::kChunkK);
    Division const wanted = Small::division(tokens, row_blocks, k, on);
    Plan best{};
    for (Instance const& used : Small::built()) {
      if (used.tokens != tokens) continue;
      bool const is_wanted =
          used.row_blocks == wanted.row_blocks && used.groups == wanted.groups && used.units == wanted.units;
      if (!is_wanted && (best.stages > 0 || used.units == 1)) continue;
      Plan const found = plan_of(used, row_blocks, chunks, on, wanted);
      if (found.stages > 0) best = found;
    }
    return best;
  }

  static Instance const& instance_of(Plan const& plan) {
    for (Instance const& used : Small::built()) {
      if (used.tokens == plan.tokens && used.row_blocks == plan.row_blocks && used.groups == plan.groups &&
          used.units == plan.units)
        return used;
    }
    TVM_FFI_THROW(ValueError) << "shape: no kernel for " << plan.tokens << " tokens, " << plan.row_blocks
                              << " row blocks, " << plan.groups << " groups and " << plan.units
                              << " units a warp; the kernel's .cu file lists what is built";
    return *Small::built().first;  // not reached
  }

  static Machine ask_machine(int device) {
    auto const attribute = [&](cudaDeviceAttr which) {
      int value = 0;
      TVM_FFI_CHECK_CUDA_ERROR(cudaDeviceGetAttribute(&value, which, device));
      return int64_t(value);
    };
    cudaFuncAttributes code{};
    TVM_FFI_CHECK_CUDA_ERROR(cudaFuncGetAttributes(&code, Small::built().first->kernel));
    int64_t const shared_block = attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin);
    for (Instance const& used : Small::built()) {
      TVM_FFI_CHECK_CUDA_ERROR(
          cudaFuncSetAttribute(used.kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, int(shared_block)));
    }
    return {attribute(cudaDevAttrMultiProcessorCount), attribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor),
            shared_block, code.ptxVersion >= 90};  // what the code was built for
  }

  // The current device. Its kernels are made ready for large shared memory on the way.
  static Machine const& machine(int device) {
    static PerDevice<Machine> machines;
    return machines.of(device, [&] { return ask_machine(device); });
  }

  static void check_plan(Plan const& plan, Instance const& used, Machine const& on) {
    if (plan.cluster < 1 || plan.cluster > kMaxCluster)
      TVM_FFI_THROW(ValueError) << "shape: cluster is " << plan.cluster << ", needed 1 to " << kMaxCluster;
    if (plan.cluster > 1 && !on.clusters)
      TVM_FFI_THROW(ValueError) << "shape: cluster is " << plan.cluster
                                << ", but this build has no clusters (needs sm_90)";
    if (plan.stages < used.fewest_stages || plan.stages > used.most_stages)
      TVM_FFI_THROW(ValueError) << "shape: " << plan.stages << " stages, needed " << used.fewest_stages
                                << " to " << used.most_stages;
    int64_t const bytes = used.shared_bytes(int(plan.cluster), int(plan.stages));
    if (bytes > on.shared_block)
      TVM_FFI_THROW(ValueError) << "shape: needs " << bytes << " bytes of shared memory, a CTA has "
                                << on.shared_block;
    if (plan.trigger < 0)
      TVM_FFI_THROW(ValueError) << "shape: trigger is " << plan.trigger << ", needed at least 0";
  }

  static void launch_kernel(Instance const& used, Plan const& plan, Params params, Machine const& on,
                            int device, bool enable_pdl) {
    Small::ready(params.w, on);
    if constexpr (!Weights::kPacked) {
      if (used.boxes) params.x_map = map_of_rows(params.x, params.m, params.k, params.x_stride, used.tokens);
    }
    params.cluster = int(plan.cluster), params.slots_log2 = used.slots_log2(int(plan.cluster)),
    params.inverse = 65536 / int(plan.cluster) + 1;
    params.stages = int(plan.stages), params.trigger = int(plan.trigger);
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(unsigned(plan.cluster), unsigned(divide_up(params.m, plan.tokens)),
                          unsigned(divide_up(params.row_blocks, plan.row_blocks)));
    config.blockDim = dim3(unsigned(used.threads));
    config.dynamicSmemBytes = size_t(used.shared_bytes(int(plan.cluster), params.stages));
    config.stream = static_cast<cudaStream_t>(TVMFFIEnvGetStream(kDLCUDA, device));
    LaunchAttributes attributes(enable_pdl, dim3(unsigned(plan.cluster)));
    attributes.give(config);
    TVM_FFI_CHECK_CUDA_ERROR(cudaLaunchKernelEx(&config, used.kernel, params));
  }

  static constexpr int64_t kMaxTokens = 65535 * 8, kMaxColumns = 65535 * Weights::kRows;  // tiles of a grid

  // Everything but the activations; M and N are those of the output.
  static Params check_all_but_x(TensorView w, TensorView alpha, Optional<TensorView> bias, TensorView out,
                                int64_t k) {
    check_out(out, {kMaxTokens, "the grid; use a kernel for many tokens"}, {kMaxColumns, "the grid"});
    int64_t const m = out.size(0), n = out.size(1);
    typename Weights::Source const source = Small::source_of(w, n, k);
    check_alpha(alpha, n, divide_up(k, kScaleBlock), Weights::kBlocks);
    if (bias.has_value()) check_bias({"bias", *bias}, kOutType, n);
    Params p{};
    p.w = source, p.alpha = data_of<float>(alpha);
    p.bias = bias.has_value() ? data_of<Element>(*bias) : nullptr;
    p.out = data_of<Element>(out);
    p.m = int(m), p.n = int(n), p.k = int(k);
    p.row_blocks = int(divide_up(n, Weights::kRows)), p.chunks = int(divide_up(k, Weights::kChunkK));
    p.alpha_step = alpha.numel() == 1 ? 0 : 1;
    return p;
  }

  static void launch_planned(Params const& params, int device, bool enable_pdl) {
    if (params.m == 0) return;
    tvm::ffi::CUDADeviceGuard guard(device);
    Machine const& on = machine(device);
    Plan const chosen = plan(params.m, params.n, params.k, on);
    if (chosen.stages == 0)
      TVM_FFI_THROW(ValueError) << "this GPU has too little shared memory for two stages of any launch shape";
    launch_kernel(instance_of(chosen), chosen, params, on, device, enable_pdl);
  }

  // A launch shape from a caller, of what is built.
  static Plan shape_of(tvm::ffi::Array<int64_t> const& shape) {
    if (shape.size() != 7) TVM_FFI_THROW(ValueError) << "shape: has " << shape.size() << " numbers, needed 7";
    Plan const chosen{shape[0], shape[1], shape[2], shape[3], shape[4], shape[5], shape[6]};
    instance_of(chosen);
    return chosen;
  }

  static void launch_shaped(Params const& params, Plan const& chosen, int device, bool enable_pdl) {
    Instance const& used = instance_of(chosen);
    if (params.m == 0) return;
    tvm::ffi::CUDADeviceGuard guard(device);
    Machine const& on = machine(device);
    check_plan(chosen, used, on);
    launch_kernel(used, chosen, params, on, device, enable_pdl);
  }

  static tvm::ffi::Array<int64_t> plan_numbers(int64_t m, int64_t n, int64_t k, int64_t multiprocessors,
                                               int64_t shared_sm, int64_t shared_block, bool clusters) {
    Plan const p = plan(m, n, k, {multiprocessors, shared_sm, shared_block, clusters});
    return {p.tokens, p.row_blocks, p.groups, p.units, p.cluster, p.stages, p.trigger};
  }
};

}  // namespace fp4d
