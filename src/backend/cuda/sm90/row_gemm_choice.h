// SPDX-License-Identifier: Apache-2.0
// How a row GEMM is cut into tiles and dealt to the multiprocessors: a function of the problem and
// of the device alone.
#pragma once

#include "backend/cuda/sm90/row_gemm_problem.h"

namespace moec::cuda {

constexpr int kBlockFeatures = 64;  // features of a block; a tile has up to four blocks

// A part of it is passed to the kernel.
struct RowGemmTiles {
  // Tiles of tile_blocks blocks of 64 features, the first wider_tiles of them of one block more.
  int feature_tiles, tile_blocks, wider_tiles;
  int band_length;  // twos of row tiles that are walked for each feature tile in turn
  int k_blocks, k_blocks_of_part;
  int narrow_from;  // k-blocks from this one on are of narrow rows
  int done_tiles;   // kDown: feature tiles of up, after which an expert's rows are complete
  bool shares;      // CTAs of a pair load weights that both want for each other
};
struct RowGemmChoice {
  RowGemmTiles tiles;
  bool in_pace;   // clusters keep pace (pace.cuh)
  bool few_rows;  // kernels of few rows (row_gemm_few.cuh)
  int ctas;
};
struct RowGemmDevice {
  int multiprocessors;
};
RowGemmChoice choose(const RowGemmProblem& problem, const RowGemmDevice& device);

// Sharing pays for an MLP of so many rows: from about half a millisecond on, power decides how fast
// they go, and a weight that leaves L2 once for two CTAs costs less of it. Below, a stage that
// waits for the slower of two CTAs costs more.
constexpr double kSharedProducts = 4e10;  // rows * hidden * inter
// Clusters keep pace from so long a tile on: with shorter ones they do not drift far enough apart.
constexpr int64_t kLongTile = 5120;  // k of all parts

// Products of codes along k, and of their backwards, have wide tiles (row_gemm_wide.cuh) where
// experts have so many rows on average (bench/results/h200/coded_trials.json, calls 15 to 20).
// With more they are decoded in front of their product (decoded_product.h); small ones and tables
// of values sooner. Gradients of small ones have them from the first number on, but for tables.
constexpr int64_t kWideFrom = 256, kWideFromOfSmall = 384;
constexpr int64_t kWideBelow = 1536, kWideBelowOfSmall = 1024;
bool takes_wide_tiles(const RowGemmProblem& problem, int64_t choice_rows);

// Kernels of few rows have tiles of at most kFewRows rows and kFewRowsCtas CTAs a multiprocessor.
// They are taken where experts have at most kFewOnAverage rows on average: with more, more experts
// have several tiles, and for each of them all codes are decoded anew.
constexpr int kFewRows = 32, kFewRowsCtas = 2;
constexpr int64_t kFewOnAverage = 16;

// Parts of a routing weight's gradient: two of each feature tile of kGradDown.
inline int grad_down_dot_parts(int64_t features) {
  return 2 * int((features + 255) / 256);
}

// What the operations differ in.
struct RowGemmForm {
  bool gathered;   // rows of x by row_token, else rows of their own
  bool gated;      // a tile is half gate, half up features
  bool activated;  // the epilogue has the activation
};
inline constexpr RowGemmForm kRowGemmForms[] = {
    {true, true, true},     // kUp
    {false, false, false},  // kDown
    {false, false, false},  // kGradUp: the same kernel, with k in two parts
    {true, false, true},    // kGradDown
};
inline const RowGemmForm& form_of(RowGemm op) {
  return kRowGemmForms[int(op)];
}

}  // namespace moec::cuda
