// SPDX-License-Identifier: Apache-2.0
#include "layer/plan_layout.h"

#include <algorithm>

#include "layer/check.h"

namespace moec {
namespace {

int64_t num_local(const moec_plan_desc& desc) {
  return desc.expert_end - desc.expert_begin;
}

void check_capacity(const moec_plan_desc& desc) {
  check_enum("desc.drop", desc.drop, MOEC_DROP_BY_WEIGHT);
  check_at_least("desc.capacity", desc.capacity, 0);
  checked_rows("desc.capacity", desc.capacity);
  check_not_negative("desc.capacity_factor", desc.capacity_factor);
  MOEC_REQUIRE(!desc.capacity || desc.capacity_factor == 0, MOEC_E_INVALID_ARG,
               "desc.capacity is %lld and desc.capacity_factor is %g; give one of them",
               static_cast<long long>(desc.capacity), double(desc.capacity_factor));
  if (desc.kind == MOEC_PLAN_EXPERT_CHOICE) {
    MOEC_REQUIRE(desc.capacity > 0 && desc.drop == MOEC_DROP_NONE, MOEC_E_INVALID_ARG,
                 "desc.capacity is %lld and desc.drop is %u; EXPERT_CHOICE needs a capacity and "
                 "drops nothing",
                 static_cast<long long>(desc.capacity), desc.drop);
    return;
  }
  const bool bounded = desc.capacity > 0 || desc.capacity_factor > 0;
  MOEC_REQUIRE(bounded == (desc.drop != MOEC_DROP_NONE), MOEC_E_INVALID_ARG,
               "desc.drop is %u %s a capacity; give both or neither", desc.drop,
               bounded ? "with" : "without");
}

void check_experts(const moec_plan_desc& desc) {
  const int64_t num_ids = checked_num_ids(desc.num_experts, desc.num_zero_experts);
  if (desc.kind == MOEC_PLAN_EXPERT_CHOICE) {
    check_range("desc.top_k", desc.top_k, 0, 0);
    check_range("desc.num_zero_experts", desc.num_zero_experts, 0, 0);
  } else {
    check_range("desc.top_k", desc.top_k, 1, num_ids);
  }
  check_local_experts(desc.expert_begin, desc.expert_end, desc.num_experts);
}

int64_t padded(const moec_plan_desc& desc, int64_t rows) {
  return int64_t(round_up(uint64_t(rows), uint64_t(desc.align)));
}

// Rows that padding to `align` may add, whatever the routing.
int64_t padding_bound(const moec_plan_desc& desc) {
  return num_local(desc) * (desc.align - 1);
}

// Rows of a plan whose local experts are all full.
int64_t full_rows(const moec_plan_desc& desc, int64_t capacity) {
  return checked_product("experts * capacity", num_local(desc), padded(desc, capacity));
}

}  // namespace

moec_plan_desc checked_plan_desc(const moec_plan_desc& given) {
  moec_plan_desc desc = given;
  desc.struct_size = sizeof desc;
  check_flags("desc.flags", desc.flags, 0);
  check_flags("desc.reserved0", desc.reserved0, 0);
  check_enum("desc.kind", desc.kind, MOEC_PLAN_EXPERT_CHOICE);
  check_at_least("desc.max_tokens", desc.max_tokens, 0);
  checked_rows("desc.max_tokens", desc.max_tokens);
  check_experts(desc);
  MOEC_REQUIRE(desc.align >= 0 && (desc.align & (desc.align - 1)) == 0, MOEC_E_INVALID_ARG,
               "desc.align is %d; expected 0 or a power of two", desc.align);
  check_capacity(desc);
  if (desc.expert_end == 0) desc.expert_end = desc.num_experts;
  desc.align = std::max(desc.align, 1);
  checked_rows("desc.max_tokens * desc.top_k", desc.max_tokens * std::max(desc.top_k, 1));
  plan_max_rows(desc, desc.max_tokens);
  return desc;
}

int64_t plan_capacity(const moec_plan_desc& desc, int64_t num_tokens) {
  if (desc.capacity_factor == 0) return desc.capacity;
  return capacity_for(desc.capacity_factor, num_tokens, desc.top_k, desc.num_experts);
}

int64_t plan_max_rows(const moec_plan_desc& desc, int64_t num_tokens) {
  const int64_t capacity = plan_capacity(desc, num_tokens);
  const int64_t full = desc.capacity || desc.capacity_factor > 0 ? full_rows(desc, capacity) : -1;
  if (desc.kind == MOEC_PLAN_EXPERT_CHOICE) return checked_rows("rows of the plan", full);
  const int64_t bound = checked_product("T * K", num_tokens, desc.top_k) + padding_bound(desc);
  const int64_t dropless = bound / desc.align * desc.align;  // every group is a multiple of it
  return checked_rows("rows of the plan", full < 0 ? dropless : std::min(dropless, full));
}

PlanView lay_out_plan(const moec_plan_desc& desc, bool affine, Arena& arena) {
  PlanView plan;
  plan.num_experts = desc.num_experts;
  plan.num_zero = desc.num_zero_experts;
  plan.top_k = desc.top_k;
  plan.expert_begin = desc.expert_begin;
  plan.num_local = int32_t(num_local(desc));
  plan.align = desc.align;
  plan.drop = desc.drop;
  plan.kind = desc.kind;
  plan.capacity = desc.capacity;
  const PlanExtent rows = affine ? PlanExtent{padding_bound(desc), desc.top_k}
                                 : PlanExtent{plan_max_rows(desc, desc.max_tokens), 0};
  for (const PlanArray& array : kPlanArrays) {
    if (!array.is_stored() || !array.is_of(plan.kind)) continue;
    const PlanExtent extent = array.extent(plan, rows);
    array.set(plan, arena.take(uint64_t(extent.base * PlanArray::kElementBytes),
                               uint64_t(extent.per_token * PlanArray::kElementBytes)));
  }
  return plan;
}

void* take_plan_scratch(const moec_plan_desc& desc, Arena& arena) {
  const int64_t counts = kPlanCounts * round_up(uint64_t(num_local(desc)), 4);
  const bool lists = desc.drop == MOEC_DROP_BY_WEIGHT;
  void* const memory = arena.take(kCacheLine + uint64_t(counts) * sizeof(int32_t),
                                  lists ? uint64_t(desc.top_k) * sizeof(int32_t) : 0);
  return reinterpret_cast<void*>(round_up(reinterpret_cast<uintptr_t>(memory), kCacheLine));
}

void set_plan_tokens(const moec_plan_desc& desc, int64_t num_tokens, PlanView& plan) {
  plan.num_tokens = num_tokens;
  plan.max_rows = plan_max_rows(desc, num_tokens);
  plan.capacity = plan_capacity(desc, num_tokens);
  plan.choice_tokens = num_tokens;
  plan.choice_rows = plan.max_rows;
}

}  // namespace moec
