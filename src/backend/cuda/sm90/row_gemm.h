// SPDX-License-Identifier: Apache-2.0
// Grouped GEMMs whose rows vary from expert to expert: up, down, and the two data gradients. All
// four are one kernel; RowGemmArgs says what an operation reads and writes.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>
#include <moec/moec.h>

#include <cstdint>

#include "backend/cuda/sm90/early.h"
#include "backend/cuda/sm90/gate_form.h"
#include "backend/cuda/sm90/work_counters.h"

namespace moec::cuda {

enum class RowGemm {
  kUp,      // out[r,f] = act(x[token(r)] . gate[f], x[token(r)] . up[f]), pre-activations optional
  kDown,    // out[r,f] = rows[r] . weight[f]
  kGradUp,  // out[r,f] = sum over both parts of d_pre[r] . weight: gradient of the gathered row
  kGradDown,  // d_act = d_y[token(r)] . weight[f]; writes d_pre, out = row_weight * act, d_weight
              // parts
};

constexpr int kBlockFeatures = 64;  // features of a block; a tile has up to four blocks

// One tensor seen in boxes of 16, 32, .. 144 rows: whatever a tile needs is one copy.
constexpr int kRowBoxes = 9, kWindowRows = 16 * kRowBoxes;
struct RowMaps {
  CUtensorMap of_units[kRowBoxes];
};

// Element f of expert e at base + e * expert_stride + f * stride; without a base there is none.
struct ExpertBias {
  const void* base;
  int64_t expert_stride, stride;  // elements
  bool f32;                       // else the type of the matrices
};

// Passed to the kernel as it is. Rows r of expert e are [group_offsets[e], group_offsets[e+1]).
struct RowGemmParams {
  CUtensorMap weight_maps[2];  // gate, up (or one part each of k); plain operands use the first
  RowMaps rows;                // {k, part, row} of the row operand, when it is not gathered: in
                               // windows of kWindowRows rows (tensor_map.h)
  RowMaps out_maps, pre_maps;  // {feature, part, row} of out and pre
  const void* x;               // [T, k_size] gathered operand
  const int32_t* row_token;    // [P], -1 = padding, read as zeros
  int64_t x_stride;            // elements
  const int32_t* group_offsets;
  int num_experts, features;
  // Tiles of tile_blocks blocks of 64 features, the first wider_tiles of them of one block more.
  int feature_tiles, tile_blocks, wider_tiles;
  int band_pairs;  // pairs of row tiles that are walked for each feature tile in turn
  int k_size, k_blocks, k_blocks_of_part;
  void* out;  // [P, features]
  int64_t out_stride;
  void* pre;                // kUp: out, or null; kGradDown: in. [P, 2, features]: gate, up
  void* d_pre;              // kGradDown: out, as pre
  const float* row_weight;  // kGradDown: [P]
  float* d_weight_parts;    // kGradDown: out [fast_dot_parts(features), max_rows], for combine
  int64_t max_rows;
  bool pairs;          // kUp: columns of gate and up alternate in the weights; kGradDown: in d_pre
  ExpertBias bias[2];  // kUp: gate, up; kDown: the first
  moec_activation activation;
  GateForm form;           // of the activation
  Early early;             // kWeights: kDown and kGradUp alone
  bool shares;             // CTAs of a pair load weights that both want for each other
  unsigned* work_counter;  // 0 before the kernel, or null: work is dealt in turn
  unsigned* steps;         // 0 before the kernel, or null: clusters do not keep pace (pace.cuh)
  // kUp, kDown: null, or [num_experts], 0 before kUp, which adds its rows for each tile in memory;
  // kDown waits for done_tiles times an expert's rows instead of for the whole predecessor.
  unsigned* done;
  int done_tiles;
};

struct RowGemmArgs {
  RowGemm op;
  moec_dtype dtype;          // MOEC_BF16 or MOEC_F16
  bool weights_mn_major;     // the feature axis of the weights is the contiguous one
  int64_t features, k_size;  // k_size of one part
  int parts;                 // kGradUp: 2 (gate and up follow each other on k), else 1
  const void* rows;          // [P, parts, k_size], when the operand is not gathered
  const void* weights[2];    // first element of gate and up for kUp and kGradUp; else, or where
                             // their columns alternate, one
  int64_t weight_stride;     // elements between neighbours on the axis that is not contiguous
  int64_t expert_stride;     // elements
  RowGemmParams params;      // maps, tiles, k-blocks and form are filled in by the launcher
};

// Whether `shares` pays for an MLP of so many rows: from about half a millisecond on, power
// decides how fast they go, and a weight that leaves L2 once for two CTAs costs less of it. Below,
// a stage that waits for the slower of two CTAs costs more.
constexpr double kSharedProducts = 4e10;  // rows * hidden * inter
inline bool row_gemm_shares(int64_t rows, int64_t hidden, int64_t inter) {
  return double(rows) * double(hidden) * double(inter) >= kSharedProducts;
}
// Whether clusters shall keep pace: with shorter tiles they do not drift far enough apart.
constexpr int64_t kLongTile = 5120;  // k of all parts
inline bool row_gemm_paces(int64_t k) {
  return k >= kLongTile;
}
inline void take_work(RowGemmArgs& args, WorkCounters::Gemm* counters) {
  args.params.work_counter = &counters->work;
  if (row_gemm_paces(args.parts * args.k_size)) args.params.steps = &counters->steps;
}
// Parts of a routing weight's gradient: two of each feature tile of kGradDown.
inline int fast_dot_parts(int64_t features) {
  return 2 * int((features + 255) / 256);
}
// Why the sm_90a kernels cannot take this problem, or null.
const char* row_gemm_refuses(const RowGemmArgs& args);
cudaError_t launch_row_gemm(const RowGemmArgs& args, int multiprocessors, cudaStream_t stream);

}  // namespace moec::cuda
