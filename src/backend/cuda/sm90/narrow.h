// SPDX-License-Identifier: Apache-2.0
// Products of the rows of experts with factors of adapters (backend/adapters.h), one of whose
// extents is a rank. There are few products for each byte that they read, so bytes decide.
//
//   narrow rows      to[r][j] = scale * sum over terms and k of rows[r][k] factor_e(j, k)
//   factor gradient  out_e(i, j) (+)= sum over the rows r of e of wide[r][i] narrow[r][j]
//
// Sums are in fp32, in an order that depends on the shape alone.
#pragma once

#include <cuda_runtime.h>

#include "backend/cuda/sm90/early.h"
#include "backend/weights.h"

namespace moec::cuda {

struct NarrowGroups {
  const int32_t* offsets;  // rows of expert e are [offsets[e], offsets[e+1])
  int num_experts;
  int64_t max_rows;
};

// What narrow rows read of one operand. Factor element (j, k) of expert e is at factor + e *
// factor_expert_stride, and j * factor_stride + k or k * factor_stride + j behind it.
struct NarrowTerm {
  const void *rows, *factor;
};
struct NarrowRowsArgs {
  moec_dtype dtype;  // MOEC_BF16 or MOEC_F16
  NarrowGroups groups;
  const int32_t* row_token;  // row of an operand, -1: zeros; null: the row itself
  int64_t row_stride;        // elements
  int64_t k;                 // of each term
  int num_terms;
  NarrowTerm terms[2];
  bool along_k;  // k is the factors' contiguous axis
  int64_t factor_stride, factor_expert_stride;
  int64_t rank;
  float scale;
  void* to;     // [P, rank]
  Early early;  // kWeights: plan and factors are older than the predecessor
};

// Element (i, j) of expert e at base + e * expert_stride + i * i_stride + j * j_stride.
struct FactorOut {
  void* base;
  int64_t expert_stride, i_stride, j_stride;
};
struct FactorGradArgs {
  moec_dtype dtype;
  NarrowGroups groups;
  const void* wide;
  int64_t wide_stride, width;
  const int32_t* wide_token;  // as row_token
  const void* narrow;         // [P, narrow_stride]
  int64_t narrow_stride, rank;
  moec_dtype out_dtype;
  FactorOut out[2];  // the second of odd i where they alternate, of which each has half of `width`
  bool alternating, accumulate;
  Early early;  // kNothing or kAll
};

constexpr int64_t kMostNarrow = 128;  // ranks that these kernels are made for

// Why the kernels cannot take it, or null.
const char* narrow_refuses(const NarrowRowsArgs& args);
const char* narrow_refuses(const FactorGradArgs& args);
cudaError_t launch_narrow_rows(const NarrowRowsArgs& args, cudaStream_t stream);
cudaError_t launch_factor_grad(const FactorGradArgs& args, cudaStream_t stream);

// Ranks of a tile: the least of 16, 32, 64 that holds them all, or 64.
constexpr int narrow_tile(int64_t rank) {
  return rank <= 16 ? 16 : rank <= 32 ? 32 : 64;
}

}  // namespace moec::cuda
