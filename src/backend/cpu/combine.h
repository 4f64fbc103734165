// SPDX-License-Identifier: Apache-2.0
// Sums over the experts of a token: y in the forward pass, d_x in the backward pass. The last
// product of a shared expert ends in them, so that its output never lies in memory.
#pragma once

#include "backend/program.h"
#include "core/thread_pool.h"

namespace moec::cpu {

// What the routed sum of token t is multiplied with; mix: null, or c0 and c1 of each token.
inline float routed_factor(const moec_experts_desc& desc, const float* mix, int64_t t) {
  return mix ? desc.output_scale * mix[2 * t] : desc.output_scale;
}

// Columns [col, col + n) of token t, n <= 1024; shared: those of the shared expert, or null.
void combine_columns(const Combine& step, int64_t t, int64_t col, int64_t n, const float* shared);
void combine_columns(const CombineGrad& step, int64_t t, int64_t col, int64_t n,
                     const float* shared);

// Rows of a product [P,H] in fp32, with its bias: what the sums read.
void store_rows(const ThreadPool& pool, const Down& step, void* scratch);
void store_rows(const ThreadPool& pool, const InputGrad& step, void* scratch);
void combine(const ThreadPool& pool, const Combine& step, void* scratch);
void combine(const ThreadPool& pool, const CombineGrad& step, void* scratch);

}  // namespace moec::cpu
