// SPDX-License-Identifier: Apache-2.0
// Sums over the experts of a token: y in the forward pass, dx in the backward pass.
#pragma once

#include "backend/args.h"
#include "core/thread_pool.h"

namespace moec::cpu {

// One part of a token's routed sum: the row of an expert, or the token itself (identity expert).
struct Term {
  int64_t row;    // -1: identity
  float weight;   // routing weight
  int64_t entry;  // where d_weights has it: t * K + slot; expert choice: the row
};

enum class TermOrder { kSlot, kExpert };

// body(term) for each part of token t, in slot order or by ascending expert id (then slot).
template <class Body>
void for_each_term(const PlanView& plan, int64_t t, TermOrder order, const Body& body) {
  if (plan.kind == MOEC_PLAN_EXPERT_CHOICE) {  // listed by expert already
    for (int32_t i = plan.token_offsets[t]; i < plan.token_offsets[t + 1]; ++i) {
      const int64_t row = plan.token_rows[i];
      body(Term{row, plan.row_weight[row], row});
    }
    return;
  }
  const int32_t* const ids = plan.expert_ids + t * plan.top_k;
  const auto visit = [&](int64_t slot) {
    const int64_t entry = t * plan.top_k + slot, row = plan.assignment_row[entry];
    const bool identity = ids[slot] >= plan.num_experts;
    if (row >= 0 || identity) body(Term{row, plan.weights[entry], entry});
  };
  if (order == TermOrder::kSlot) {
    for (int64_t slot = 0; slot < plan.top_k; ++slot) visit(slot);
    return;
  }
  for (int64_t done = -1;;) {  // the least (id, slot) above the last one
    int64_t next = INT64_MAX;
    for (int64_t slot = 0; slot < plan.top_k; ++slot) {
      const int64_t key = int64_t(ids[slot]) * plan.top_k + slot;
      if (key > done && key < next) next = key;
    }
    if (next == INT64_MAX) return;
    visit(next % plan.top_k);
    done = next;
  }
}

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
