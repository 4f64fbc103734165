// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "layer/plan_layout.h"

namespace moec {
namespace {

bool groups_hold(const PlanView& plan) {
  if (plan.group_offsets[0] != 0) return false;
  int64_t routed = 0, largest = 0;
  for (int32_t e = 0; e < plan.num_local; ++e) {
    const int64_t count = plan.counts[e], begin = plan.group_offsets[e];
    const bool fits = count >= 0 && (plan.capacity == 0 || count <= plan.capacity);
    if (!fits || begin + int64_t(round_up(uint64_t(count), uint64_t(plan.align))) !=
                     plan.group_offsets[e + 1])
      return false;
    if (plan.group_offsets[e + 1] > plan.max_rows) return false;
    routed += count;
    largest = std::max(largest, count);
  }
  return plan.totals[0] == routed && plan.totals[1] == plan.group_offsets[plan.num_local] &&
         plan.totals[2] >= 0 && plan.totals[3] == largest;
}

// A row of the real part of a group: in token order, and found again from its token.
bool row_holds(const PlanView& plan, int32_t e, int64_t row, int64_t first) {
  const int32_t token = plan.row_token[row], slot = plan.row_slot[row];
  if (token < 0 || token >= plan.num_tokens) return false;
  if (row > first && plan.row_token[row - 1] > token) return false;
  if (plan.kind == MOEC_PLAN_EXPERT_CHOICE) return true;  // token_rows_hold() looks back
  if (slot < 0 || slot >= plan.top_k) return false;
  const int64_t assignment = int64_t(token) * plan.top_k + slot;
  return plan.assignment_row[assignment] == row &&
         plan.expert_ids[assignment] == plan.expert_begin + e;
}

bool rows_hold(const PlanView& plan) {
  const auto nobodys = [&](int64_t row, int64_t end) {
    for (; row < end; ++row)
      if (plan.row_token[row] != -1 || plan.row_slot[row] != -1 || plan.row_weight[row] != 0)
        return false;
    return true;
  };
  for (int32_t e = 0; e < plan.num_local; ++e) {
    const int64_t first = plan.group_offsets[e], last = first + plan.counts[e];
    for (int64_t row = first; row < last; ++row)
      if (!row_holds(plan, e, row, first)) return false;
    if (!nobodys(last, plan.group_offsets[e + 1])) return false;
  }
  return nobodys(plan.group_offsets[plan.num_local], plan.max_rows);
}

bool assignments_hold(const PlanView& plan) {
  int64_t routed = 0;
  for (int64_t a = 0; a < plan.num_tokens * plan.top_k; ++a) {
    const int32_t row = plan.assignment_row[a], id = plan.expert_ids[a];
    if (id < -1 || id >= plan.num_experts + plan.num_zero || row < -1) return false;
    if (row < 0) continue;
    ++routed;  // rows_hold() has checked that every real row is named once; so no row is named
               // twice
    const int32_t local = id - plan.expert_begin;
    if (local < 0 || local >= plan.num_local || row < plan.group_offsets[local] ||
        row >= plan.group_offsets[local] + plan.counts[local])
      return false;
  }
  return routed == plan.totals[0];
}

bool token_rows_hold(const PlanView& plan) {
  if (plan.token_offsets[0] != 0 || plan.token_offsets[plan.num_tokens] != plan.totals[0])
    return false;
  for (int64_t t = 0; t < plan.num_tokens; ++t) {
    const int32_t begin = plan.token_offsets[t], end = plan.token_offsets[t + 1];
    if (begin > end || end > plan.totals[0]) return false;
    for (int32_t i = begin; i < end; ++i) {
      const int32_t row = plan.token_rows[i];
      if (row < 0 || row >= plan.totals[1] || plan.row_token[row] != t) return false;
      if (i > begin && plan.token_rows[i - 1] >= row) return false;
    }
  }
  return true;
}

}  // namespace

bool plan_holds(const PlanView& plan) {
  if (!groups_hold(plan) || !rows_hold(plan)) return false;
  return plan.kind == MOEC_PLAN_EXPERT_CHOICE ? token_rows_hold(plan) : assignments_hold(plan);
}

}  // namespace moec
