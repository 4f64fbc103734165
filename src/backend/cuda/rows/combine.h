// SPDX-License-Identifier: Apache-2.0
// Sum of a token's rows, forward and backward. Bandwidth bound.
#pragma once

#include <cuda_runtime.h>
#include <moec/moec.h>

#include <cstdint>

namespace moec::cuda {

// y[t] = scale * sum_k w[t,k] * (row of (t,k), or x[t] for an identity expert) + residual[t],
// in fp32, slots in order, one rounding. A slot of weight 0 is left out, whatever its row holds.
// d_routing_weights[t,k] = sum of the parts of the row. The plan and the routing weights are read
// before the kernel queued before it is complete (kWeights of early.h).
struct CombineParams {
  int64_t num_tokens, hidden;  // hidden is a multiple of 8
  int num_experts, num_zero, top_k;
  const void* rows;               // [P, hidden]
  const int32_t* assignment_row;  // [T,K], -1 = none
  const int32_t* expert_ids;      // [T,K]; read only with identity experts
  const float* routing_weights;   // [T,K] or null = 1
  bool counts_once;      // rows hold their weights already: a slot counts 1, or 0 if its is 0
  const void* x;         // [T,hidden], identity experts
  const void* residual;  // [T,hidden] or null; may be y
  const void* bias;      // [hidden] or null, added once
  float scale;
  void* y;                      // [T,hidden] or null
  bool skip_absent;             // rows of tokens without a row stay as they are
  const float* d_weight_parts;  // [parts, max_rows] or null
  int parts;
  int64_t max_rows;
  float* d_routing_weights;  // [T,K]; 0 where there is no row
};
// Why there is no kernel for this, or null.
const char* combine_refuses(const CombineParams& params, moec_dtype dtype);
cudaError_t launch_combine(const CombineParams& params, moec_dtype dtype, int multiprocessors,
                           cudaStream_t stream);

}  // namespace moec::cuda
