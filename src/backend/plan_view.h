// SPDX-License-Identifier: Apache-2.0
// A plan as backends see it, and the list of its arrays: a plan's memory, its saved form and what
// moec_plan_view shows follow from the list.
//
// T num_tokens, E num_experts, El num_local, K top_k, P max_rows.
#pragma once

#include <moec/moec.h>

#include <cmath>
#include <cstdint>

#include "core/portable.h"

namespace moec {

// Rows kept per expert: ceil(T * K / E * factor).
MOEC_HD int64_t capacity_for(double factor, int64_t tokens, int32_t top_k, double experts) {
  const double rows = double(tokens) * top_k * factor / experts, nearest = nearbyint(rows);
  // A factor such as 1.1 is no fp32 number: what it misses is no further row. 1.25 is one.
  const bool is_exact = factor * 256 == nearbyint(factor * 256);
  const bool is_whole = is_exact ? rows == nearest : fabs(rows - nearest) <= rows * 0x1p-23;
  const double kept = is_whole ? nearest : ceil(rows);
  return int64_t(kept < 0x1p31 ? kept : 0x1p31);
}

struct PlanView {          // arrays as moec_plan_field describes them
  int64_t num_tokens = 0;  // of the batch now in the plan
  int64_t max_rows = 0;    // P: extent of the row arrays for num_tokens
  int64_t capacity = 0;    // 0 = dropless
  // Kernels are chosen as for so many. With an ep it is what all ranks at their bound could send:
  // what arrives differs by scheme, and the bits may not.
  int64_t choice_tokens = 0, choice_rows = 0;
  int32_t num_experts = 0, num_zero = 0, top_k = 0;
  int32_t expert_begin = 0, num_local = 0, align = 1;
  uint32_t drop = 0, kind = 0;
  int32_t* counts = nullptr;          // [El]
  int32_t* group_offsets = nullptr;   // [El+1]
  int32_t* row_token = nullptr;       // [P]
  int32_t* row_slot = nullptr;        // [P]
  float* row_weight = nullptr;        // [P]
  int32_t* assignment_row = nullptr;  // [T,K]
  int32_t* expert_ids = nullptr;      // [T,K]
  float* routing_weights = nullptr;   // [T,K]
  int32_t* totals = nullptr;          // [4]
  int32_t* token_offsets = nullptr;   // [T+1] expert choice
  int32_t* token_rows = nullptr;      // [El*capacity] expert choice
  void* scratch = nullptr;            // Backend::plan_scratch, 64-byte aligned
  // Where the host does not know the capacity, which is at most `capacity`: null = it does.
  const int32_t* capacity_at = nullptr;

  MOEC_HD int64_t kept_rows() const { return capacity_at ? *capacity_at : capacity; }
};
// Backend::plan_scratch is at most this many int32 for each local expert, rounded up to a multiple
// of four, and with DROP_BY_WEIGHT K more for each token: a plan has them in its memory.
constexpr int64_t kPlanCounts = 130;

struct PlanExtent {  // elements: base + T * per_token
  int64_t base, per_token;
  bool is_matrix = false;  // [T, per_token]
};

// Extents of the arrays. `rows` is that of the row arrays: a bound on P, or P itself.
struct PlanExtents {
  using View = const PlanView&;
  static constexpr PlanExtent totals(View, PlanExtent) { return {4, 0}; }
  static constexpr PlanExtent experts(View p, PlanExtent) { return {p.num_local, 0}; }
  static constexpr PlanExtent offsets(View p, PlanExtent) { return {int64_t(p.num_local) + 1, 0}; }
  static constexpr PlanExtent rows(View, PlanExtent rows) { return rows; }
  static constexpr PlanExtent slots(View p, PlanExtent) { return {0, p.top_k, true}; }
  static constexpr PlanExtent tokens(View, PlanExtent) { return {1, 1}; }
  static constexpr PlanExtent chosen(View p, PlanExtent) { return {p.num_local * p.capacity, 0}; }
  static constexpr PlanExtent map(View p, PlanExtent) {
    return {0, 2 * int64_t(p.num_experts) + 1, true};
  }
  static constexpr PlanExtent index(View p, PlanExtent) { return {0, p.top_k}; }
};

struct PlanArray {
  static constexpr int64_t kElementBytes = 4;
  static constexpr uint32_t kAnyKind = ~0u;
  using Extent = PlanExtent(const PlanView& plan, PlanExtent rows);
  using Ints = int32_t* PlanView::*;
  using Floats = float* PlanView::*;

  int32_t field;  // moec_plan_field
  Ints ints;      // one of both says where a view has the array; neither: it is made for an export
  Floats floats;
  Extent* extent;
  uint32_t only;  // moec_plan_kind of the plans that have it

  constexpr PlanArray(int32_t id, Ints at, Extent* size, uint32_t kind = kAnyKind)
      : field(id), ints(at), floats(nullptr), extent(size), only(kind) {}
  constexpr PlanArray(int32_t id, Floats at, Extent* size, uint32_t kind = kAnyKind)
      : field(id), ints(nullptr), floats(at), extent(size), only(kind) {}
  constexpr PlanArray(int32_t id, Extent* size, uint32_t kind)
      : field(id), ints(nullptr), floats(nullptr), extent(size), only(kind) {}

  constexpr bool is_of(uint32_t kind) const { return only == kAnyKind || only == kind; }
  constexpr bool is_stored() const { return ints || floats; }
  constexpr moec_dtype dtype() const { return floats ? MOEC_F32 : MOEC_I32; }
  void* data(const PlanView& plan) const {
    return ints ? static_cast<void*>(plan.*ints) : floats ? plan.*floats : nullptr;
  }
  void set(PlanView& plan, void* to) const {
    if (ints) plan.*ints = static_cast<int32_t*>(to);
    if (floats) plan.*floats = static_cast<float*>(to);
  }
  int64_t elements(const PlanView& plan) const {
    const PlanExtent e = extent(plan, {plan.max_rows, 0});
    return e.base + plan.num_tokens * e.per_token;
  }
};

// The stored arrays come first, in the order that they have in memory and in a saved plan.
inline constexpr PlanArray kPlanArrays[] = {
    {MOEC_PLAN_TOTALS, &PlanView::totals, PlanExtents::totals},
    {MOEC_PLAN_COUNTS, &PlanView::counts, PlanExtents::experts},
    {MOEC_PLAN_GROUP_OFFSETS, &PlanView::group_offsets, PlanExtents::offsets},
    {MOEC_PLAN_ROW_TOKEN, &PlanView::row_token, PlanExtents::rows},
    {MOEC_PLAN_ROW_SLOT, &PlanView::row_slot, PlanExtents::rows},
    {MOEC_PLAN_ROW_WEIGHT, &PlanView::row_weight, PlanExtents::rows},
    {MOEC_PLAN_ASSIGNMENT_ROW, &PlanView::assignment_row, PlanExtents::slots},
    {MOEC_PLAN_EXPERT_IDS, &PlanView::expert_ids, PlanExtents::slots},
    {MOEC_PLAN_ROUTING_WEIGHTS, &PlanView::routing_weights, PlanExtents::slots},
    {MOEC_PLAN_TOKEN_OFFSETS, &PlanView::token_offsets, PlanExtents::tokens,
     MOEC_PLAN_EXPERT_CHOICE},
    {MOEC_PLAN_TOKEN_ROWS, &PlanView::token_rows, PlanExtents::chosen, MOEC_PLAN_EXPERT_CHOICE},
    {MOEC_PLAN_ROW_ID_MAP, PlanExtents::map, MOEC_PLAN_TOPK},
    {MOEC_PLAN_INDEX_MAP, PlanExtents::index, MOEC_PLAN_TOPK},
};
inline constexpr int32_t kPlanFields = MOEC_PLAN_INDEX_MAP + 1;
static_assert(sizeof kPlanArrays / sizeof *kPlanArrays == kPlanFields);

inline constexpr const PlanArray& plan_array(int32_t field) {
  int i = 0;
  while (kPlanArrays[i].field != field) ++i;
  return kPlanArrays[i];
}
static_assert([] {  // every field has its row; past the last one, this is no constant
  for (int32_t field = 0; field < kPlanFields; ++field) plan_array(field);
  return true;
}());

// body(array, bytes) for each array that the plan stores.
template <class Body>
void for_each_array(const PlanView& plan, Body body) {
  for (const PlanArray& array : kPlanArrays)
    if (array.is_stored() && array.is_of(plan.kind))
      body(array, uint64_t(array.elements(plan) * PlanArray::kElementBytes));
}

}  // namespace moec
