// SPDX-License-Identifier: Apache-2.0
// Weight gradients: for each expert one product over its rows. Experts without rows get zeros.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>
#include <moec/moec.h>

#include <cstdint>

#include "backend/cuda/sm90/early.h"

namespace moec::cuda {

// out[e][part][m][n] = sum over rows r of e: rows[r][part][m] * x[token(r)][n]
struct WeightGradParams {
  CUtensorMap row_map;       // of the row operand: {m, row, block of 64 m} or {m, part, row}, its
                             // rows in windows of a k-block (tensor_map.h)
  CUtensorMap out_maps[2];   // each part of the gradient: {m, n, expert} or {n, m, expert}, or
                             // {64, 8, m / 64, n / 8, expert} or {64, 8, n / 64, m / 8, expert}
  const void* x;             // [T, n_size] gathered operand
  const int32_t* row_token;  // [P], -1 = padding, read as zeros
  int64_t x_stride;          // elements
  const int32_t* group_offsets;
  int num_experts, m_size, n_size;
  bool whole_blocks;               // m_size is a multiple of 64: the map's first form
  bool whole_lines;                // the second form of out_maps
  int m_blocks, m_blocks_of_part;  // of 64 m; none has m of two parts
  int m_tiles, n_tiles;
  int run_experts;         // whose tiles are taken in runs, those of later ones one by one
  bool accumulate;         // out += instead of out =
  unsigned* work_counter;  // 0 before the kernel, or null: work is dealt in turn
  Early early;             // kNothing or kAll
};

// A pair of CTAs takes so many m tiles of one n tile in turn: more where an expert has few rows, of
// which it then gathers most but once. At the end, for some six tiles of each multiprocessor of an
// H200, one by one, so that all pairs end together; a number of its own, so that bits do not depend
// on how many multiprocessors there are.
constexpr int kLongRun = 4, kShortRun = 2, kLongRunRows = 512, kSingleTiles = 800;

struct WeightGradArgs {
  moec_dtype dtype;       // MOEC_BF16 or MOEC_F16, of the operands
  bool out_f32;           // the gradient is f32, else of the same type
  bool out_m_contiguous;  // out[m][n] at m + n * out_stride, else at m * out_stride + n
  int parts;              // 2: gate and up
  int64_t m_size, n_size;
  int64_t max_rows;
  int single_tiles = kSingleTiles;
  const void* rows;                       // [P, parts, m_size]
  void* out[2];                           // gradient of each part, expert 0
  int64_t out_expert_stride, out_stride;  // elements
  WeightGradParams params;                // the maps and the tiles are filled in by the launcher
};

// Why the sm_90a kernel cannot take this problem, or null.
const char* weight_grad_refuses(const WeightGradArgs& args);
cudaError_t launch_weight_grad(const WeightGradArgs& args, int multiprocessors,
                               cudaStream_t stream);

}  // namespace moec::cuda
