// SPDX-License-Identifier: Apache-2.0
// The experts of a forward pass over few tokens, where the time is that of reading the weights of
// the experts hit, once. Two launches, each of one CTA on every multiprocessor:
//   up    gathered rows of x -> act [P,I]; pre-activations [P,2,I] on request
//   down  act -> rows [P,H] -> y; a CTA owns columns of y, so it adds up the rows of a token itself
#pragma once

#include <cuda_runtime.h>
#include <moec/moec.h>

#include <cstdint>

#include "backend/cuda/rows/combine.h"

namespace moec::cuda {

struct SmallBias {  // element n of expert e at base + e * expert_stride + n * stride; or none
  const void* base;
  int64_t expert_stride, stride;
  bool f32;  // else the type of the weights
};

// Rows r of expert e are [group_offsets[e], group_offsets[e+1]).
struct SmallArgs {
  moec_dtype dtype;                      // MOEC_BF16 or MOEC_F16
  int64_t features, k_size;              // multiples of 8
  const void* weights[2];                // gate and up, or down; k is the contiguous axis
  int64_t weight_stride, expert_stride;  // elements
  SmallBias bias[2];
  const void* operand;       // up: x [T, k_size]; down: act [P, k_size]
  int64_t operand_stride;    // elements
  const int32_t* row_token;  // up: [P], -1 = padding, read as zeros; down: null
  const int32_t* group_offsets;
  int num_experts, expert_begin;  // local experts, and the global id of the first
  void* out;                      // up: act [P, features]; down: rows [P, features]
  void* pre;                      // up: [P, 2, features] or null
  moec_activation activation;     // up
  CombineParams combine;          // down
};

// Why there is no kernel for this, or null.
const char* small_refuses(const SmallArgs& args);
cudaError_t launch_small_up(const SmallArgs& args, int multiprocessors, cudaStream_t stream);
cudaError_t launch_small_down(const SmallArgs& args, int multiprocessors, cudaStream_t stream);

}  // namespace moec::cuda
