// SPDX-License-Identifier: Apache-2.0
// Sums over the experts of a token: y in the forward pass, dx in the backward pass.
#pragma once

#include "backend/terms.h"
#include "core/thread_pool.h"

namespace moec::cpu {

// y = residual + c0 output_scale sum + output_bias + c1 shared; mix holds (c0, c1) of each token.
struct OutputSum {
  const moec_experts_desc* desc;
  const PlanView* plan;
  const float* rows;     // [P,H] of each row, before a weight on the output
  const float* mix;      // [T,2], null = 1
  const void* x;         // [T,H]
  Array output_bias;     // [H], optional
  const void* residual;  // [T,H], optional
  void* y;               // [T,H]
  bool skip_absent;      // leave rows of tokens that have no row as they are
};
// Columns [col, col + n) of token t, n <= 1024; shared: those of the shared expert, or null.
void combine_columns(const OutputSum& sum, int64_t t, int64_t col, int64_t n, const float* shared);

// dx (+)= sum over rows (times the weight, when it is on the input) + identity experts
//         + the gate of the shared expert + shared
struct InputGradSum {
  const moec_experts_desc* desc;
  const PlanView* plan;
  const float* rows;      // [P,H]
  const float* mix;       // [T,2], null = 1
  const float* d_logits;  // [T,2] of the shared expert's gate, null = none
  Array shared_gate;      // [1,H] or [2,H]
  const void* d_y;        // [T,H]
  void* d_x;              // [T,H]
  bool accumulate;
};
void combine_columns(const InputGradSum& sum, int64_t t, int64_t col, int64_t n,
                     const float* shared);

// combine_columns for all tokens, without a shared expert.
template <class Sum>
void combine_all(const ThreadPool& pool, const Sum& sum);

}  // namespace moec::cpu
