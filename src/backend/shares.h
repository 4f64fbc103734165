// SPDX-License-Identifier: Apache-2.0
// The shares of the experts in a token's routed sum, host and device.
#pragma once

#include "backend/args.h"
#include "core/portable.h"

namespace moec {

// One share: the row of an expert, or the token itself (identity expert).
struct Share {
  int64_t row;    // -1: identity
  float weight;   // routing weight
  int64_t entry;  // where d_routing_weights has it: t * K + slot; expert choice: the row
};

// Whether any row of the plan is of token t.
MOEC_HD bool has_row(const PlanView& plan, int64_t t) {
  if (plan.kind == MOEC_PLAN_EXPERT_CHOICE)
    return plan.token_offsets[t] < plan.token_offsets[t + 1];
  const int32_t* const rows = plan.assignment_row + t * plan.top_k;
  for (int32_t k = 0; k < plan.top_k; ++k)
    if (rows[k] >= 0) return true;
  return false;
}

enum class ShareOrder { kSlot, kExpert };

// body(share) for each share of token t, in slot order or by ascending expert id (then slot).
#if defined(__CUDACC__)
#pragma nv_exec_check_disable
#endif
template <class Body>
MOEC_HD void for_each_share(const PlanView& plan, int64_t t, ShareOrder order, const Body& body) {
  if (plan.kind == MOEC_PLAN_EXPERT_CHOICE) {  // listed by expert already
    for (int32_t i = plan.token_offsets[t]; i < plan.token_offsets[t + 1]; ++i) {
      const int64_t row = plan.token_rows[i];
      body(Share{row, plan.row_weight[row], row});
    }
    return;
  }
  const int32_t* const ids = plan.expert_ids + t * plan.top_k;
  const auto visit = [&](int64_t slot) {
    const int64_t entry = t * plan.top_k + slot, row = plan.assignment_row[entry];
    const bool identity = ids[slot] >= plan.num_experts;
    if (row >= 0 || identity) body(Share{row, plan.routing_weights[entry], entry});
  };
  if (order == ShareOrder::kSlot) {
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

}  // namespace moec
