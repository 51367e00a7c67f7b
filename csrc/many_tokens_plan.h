// How many_tokens.h shares a problem out over the multiprocessors: a pure function of sizes, and the model behind it.
#pragma once

#include <algorithm>
#include <cstdint>

namespace fp4d {

inline int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Of a build: its tile, and what a stage along K holds.
struct TileSizes {
  int64_t tokens, rows, stage_k, weight_bytes, token_bytes, ctas, most_split;  // ctas: of a multiprocessor
  double dequantize_clocks;  // of a stage, where nothing else is in the way
  // Of a stage as measured: a CTA by itself on its multiprocessor, and what it takes of a multiprocessor that is full,
  // without and with multicast. 0: not measured, the model's.
  double alone_clocks, stage_clocks, pair_clocks;
  double share_clocks = 0;    // the same where two CTAs share rows; 0: they cannot
  double cluster_clocks = 0;  // before two CTAs that share anything but K have started
};

// CTAs of a cluster that share activations (1, 2, 4), that share weights (1, 2), that share out K (kSplits), and how many
// token tiles are done side by side before the next rows. `clocks`: what the model expects.
struct LaunchPlan {
  int64_t multicast = 1, sharing = 1, split = 1, raster = 1;
  double clocks = 0;
};

// Clocks are a model's of an H200, to order the choices by; bench/NOTES.md has what was measured.
constexpr double kCacheBytes = 28;     // from the L2 cache, a clock and multiprocessor
constexpr double kMemoryBytes = 2350;  // from memory, a clock
constexpr double kTileClocks = 3000;   // before the first and after the last stage
constexpr double kSplitClocks = 5000;  // barriers of a cluster, twice, and a start that nothing hides
constexpr double kSplitBytes = 40;     // of sums from other CTAs, a clock
constexpr int64_t kRaster = 8;
constexpr int64_t kSplits[] = {1, 2, 3, 4, 8};
constexpr int64_t kLargestCluster = 8;  // what every GPU with clusters has
constexpr int64_t kFewestStages = 4;    // a part of K shorter than that is all start and end
constexpr int64_t kSplitWaves = 2;      // with a split, more have not been measured

// Clusters that run at once.
inline int64_t slots_of(TileSizes const& tile, LaunchPlan const& plan, int64_t multiprocessors) {
  int64_t const cluster = plan.multicast * plan.sharing * plan.split;
  // Larger clusters than pairs do not fill groups of multiprocessors (14, 16 or 18 of them) that are no multiple of them.
  int64_t const usable = (cluster > 2 ? multiprocessors * 15 / 16 : multiprocessors) * tile.ctas;
  return std::max<int64_t>(usable / cluster, 1);
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

inline double stage_clocks_of(TileSizes const& tile, LaunchPlan const& plan) {
  if (tile.stage_clocks > 0)
    return plan.sharing > 1 ? tile.share_clocks : plan.multicast > 1 ? tile.pair_clocks : tile.stage_clocks;
  double const tensor = double(tile.rows / 64 * 4 * tile.tokens / 2);
  double const bytes =
      double(tile.weight_bytes) / double(plan.sharing) + double(tile.token_bytes) / double(plan.multicast);
  return std::max({tensor, tile.dequantize_clocks, bytes / kCacheBytes});
}

inline double clocks_of(TileSizes const& tile, LaunchPlan const& plan, int64_t m, int64_t n, int64_t k,
                        int64_t multiprocessors) {
  int64_t const token_tiles = divide_up(m, tile.tokens);
  int64_t const tiles = tiles_of(tile, plan, m, n), slots = slots_of(tile, plan, multiprocessors);
  Rounds const rounds = rounds_of(plan, tiles, slots);
  double const running = double(std::min(tiles, slots) * plan.multicast * plan.sharing * plan.split);
  // CTAs that share a multiprocessor share all it has.
  double const shared = std::min(std::max(running / double(multiprocessors), 1.), double(tile.ctas));
  double const own = stage_clocks_of(tile, plan);
  double memory =
      running * double(tile.weight_bytes) / double(std::min(token_tiles, plan.raster)) / kMemoryBytes;
  if (own < tile.stage_clocks)
    memory *= own / tile.stage_clocks;  // what others copy leaves more of the cache
  double const stage = std::max({own * shared, tile.alone_clocks, memory});
  double const end = plan.split == 1 ? 0 : kSplitClocks + double(tile.rows * tile.tokens * 4) / kSplitBytes;
  double const stages = double(divide_up(k, tile.stage_k));
  double const part = double(divide_up(int64_t(stages), plan.split));
  double const start = plan.multicast * plan.sharing > 1 ? tile.cluster_clocks : 0;
  // A tile's start and end hide behind others' only in part, and with a split not at all.
  if (rounds.whole > 0)
    return start + double(rounds.whole) * (stages * stage + 0.5 * kTileClocks) + part * stage + end +
           kTileClocks;
  double const waves = double(divide_up(tiles, slots)), again = plan.split == 1 ? 0.5 : 1;
  return start + waves * (part * stage + end) + kTileClocks * (1 + again * (waves - 1));
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
    if (split > 1 && rounds_of(plan, tiles, slots).whole == 0 && divide_up(tiles, slots) > kSplitWaves)
      continue;
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
