// How many_tokens/kernel.h shares a problem out over the multiprocessors: a pure function of sizes, and the model
// behind it.
#pragma once

#include <algorithm>
#include <cstdint>

#include "common/divide_up.h"

namespace fp4d {

// Of a build: its tile, and what a stage along K holds.
struct TileSizes {
  int64_t tokens, rows, stage_k, weight_bytes, ctas, most_split;  // ctas: of a multiprocessor
  // Of a stage as measured: what a CTA takes by itself, whoever else runs; what it takes of a multiprocessor that is
  // full, alone, and where two CTAs of a cluster share activations, or rows (0: they cannot).
  double alone_clocks, stage_clocks, pair_clocks;
  double share_clocks = 0;
  double cluster_clocks = 0;  // before two CTAs that share anything but K have started
};

// CTAs of a cluster that share activations (1, 2, 4), that share weights (1, 2), that share out K (kSplits), and how many
// token tiles are done side by side before the next rows. `clocks`: what the model expects.
struct LaunchPlan {
  int64_t multicast = 1, sharing = 1, split = 1, raster = 1;
  double clocks = 0;
};

// Clocks of a model of an H200 that orders the choices. It is fitted to a sweep of all tiles and launch shapes
// (bench/NOTES.md). fp4dispatch/backends/own/launch_model.py is the same model in Python, to choose between tiles.
constexpr double kMemoryBytes = 2350;  // from memory, a clock
constexpr double kTileClocks =
    7800;  // before the first and after the last stage; again only after a split tile
constexpr double kSplitClocks = 3100;  // barriers of a cluster, twice
constexpr double kSplitBytes = 32;     // of sums from other CTAs, a clock
constexpr int64_t kRaster = 8;
constexpr int64_t kSplits[] = {1, 2, 3, 4, 8};
constexpr int64_t kLargestCluster = 8;  // what every GPU with clusters has
constexpr int64_t kFewestStages = 4;    // a part of K shorter than that is all start and end

// CTAs of clusters of 1 to 8 that run at once on the 132 multiprocessors of an H200, one each
// (cudaOccupancyMaxActiveClusters): groups of 16 or 18 multiprocessors are not filled by every size.
constexpr int64_t kUsable[] = {132, 132, 117, 120, 110, 102, 105, 120}, kUsableOf = 132;

// Clusters that run at once.
inline int64_t slots_of(TileSizes const& tile, LaunchPlan const& plan, int64_t multiprocessors) {
  int64_t const cluster = plan.multicast * plan.sharing * plan.split;
  return std::max<int64_t>(multiprocessors * kUsable[cluster - 1] / kUsableOf * tile.ctas / cluster, 1);
}

// Clusters of the grid, and the whole tiles that their CTAs do before each cluster takes its last one together. `tiles`:
// of CTAs with the same tokens or rows.
struct Rounds {
  int64_t whole, clusters;
};

inline Rounds rounds_of(LaunchPlan const& plan, int64_t tiles, int64_t slots) {
  if (plan.split == 1) return {0, std::min(tiles, slots)};
  int64_t const whole = tiles / (slots * plan.split), left = tiles - whole * slots * plan.split;
  if (whole > 0 && left <= slots) return {whole, slots};
  return {0, tiles};  // the sums of a split take the place of the ring, so that a CTA does one such tile
}

inline int64_t tiles_of(TileSizes const& tile, LaunchPlan const& plan, int64_t m, int64_t n) {
  return divide_up(divide_up(n, tile.rows), plan.multicast) *
         divide_up(divide_up(m, tile.tokens), plan.sharing);
}

inline double clocks_of(TileSizes const& tile, LaunchPlan const& plan, int64_t m, int64_t n, int64_t k,
                        int64_t multiprocessors) {
  int64_t const tiles = tiles_of(tile, plan, m, n), slots = slots_of(tile, plan, multiprocessors);
  Rounds const rounds = rounds_of(plan, tiles, slots);
  double const running = double(std::min(tiles, slots) * plan.multicast * plan.sharing * plan.split);
  // CTAs that share a multiprocessor share all it has.
  double const shared = std::min(std::max(running / double(multiprocessors), 1.), double(tile.ctas));
  double const own = plan.multicast > 1 ? tile.pair_clocks
                     : plan.sharing > 1 ? tile.share_clocks
                                        : tile.stage_clocks;
  double const memory = running * double(tile.weight_bytes) /
                        double(std::min(divide_up(m, tile.tokens), plan.raster)) / kMemoryBytes;
  double const stage = std::max({own * shared, tile.alone_clocks, memory});
  double const end = plan.split == 1 ? 0 : kSplitClocks + double(tile.rows * tile.tokens * 4) / kSplitBytes;
  int64_t const stages = divide_up(k, tile.stage_k), part = divide_up(stages, plan.split);
  double const start = kTileClocks + (plan.multicast * plan.sharing > 1 ? tile.cluster_clocks : 0);
  if (plan.split == 1) return start + double(divide_up(tiles, slots) * stages) * stage;
  return start + double(rounds.whole * stages + part) * stage + end;
}

// The best of those that share activations and weights as given, if any is better than `best`.
inline void plan_splits(TileSizes const& tile, int64_t multicast, int64_t sharing, int64_t m, int64_t n,
                        int64_t k, int64_t multiprocessors, LaunchPlan& best) {
  int64_t const stages = divide_up(k, tile.stage_k);
  for (int64_t const split : kSplits) {
    if (split > tile.most_split || multicast * sharing * split > kLargestCluster) break;
    if (split > 1 && stages < split * kFewestStages) break;
    LaunchPlan plan{multicast, sharing, split, kRaster};
    int64_t const tiles = tiles_of(tile, plan, m, n), slots = slots_of(tile, plan, multiprocessors);
    // Split tiles in one wave, and whole ones before them where nothing is shared: other cases are not measured.
    bool const whole_first = rounds_of(plan, tiles, slots).whole > 0;
    if (split > 1 && (whole_first ? multicast * sharing > 1 : tiles > slots)) continue;
    plan.clocks = clocks_of(tile, plan, m, n, k, multiprocessors);
    if (best.clocks == 0 || plan.clocks < best.clocks) best = plan;
  }
}

// Two CTAs share activations or rows, never both: four of a cluster do not fill the GPU.
inline LaunchPlan plan_launch(TileSizes const& tile, int64_t m, int64_t n, int64_t k,
                              int64_t multiprocessors) {
  LaunchPlan best;
  plan_splits(tile, 1, 1, m, n, k, multiprocessors, best);
  if (n > tile.rows) plan_splits(tile, 2, 1, m, n, k, multiprocessors, best);
  if (m > tile.tokens && tile.share_clocks > 0) plan_splits(tile, 1, 2, m, n, k, multiprocessors, best);
  return best;
}

}  // namespace fp4d
