// SPDX-License-Identifier: Apache-2.0
// Plans of every kind from every source, and the maps that are made of a plan.
#include "backend/cuda/device/op.cuh"
#include "backend/cuda/plan/plan.h"
#include "backend/cuda/plan/plan_tile.cuh"
#include "core/workspace.h"

namespace moec::cuda {
namespace {

constexpr int kThreads = 256;

__device__ void report(WrongData* to, Wrong what, int64_t token, int64_t slot, int64_t id,
                       int64_t bound) {
  to->token = token;
  to->slot = slot;
  to->id = id;
  to->bound = bound;
  __threadfence_system();
  to->what = static_cast<long long>(what);
}

// The first id that is neither -1 nor in [0, columns) is reported; one CTA.
__global__ __launch_bounds__(kPlanThreads) void check_ids_kernel(const Array ids, int64_t count,
                                                                 int top_k, int64_t columns,
                                                                 WrongData* wrong) {
  __shared__ unsigned long long first;
  begin_kernel();
  if (threadIdx.x == 0) first = ~0ull;
  __syncthreads();
  for (int64_t a = threadIdx.x; a < count; a += kPlanThreads) {
    const int64_t id = load_integer(ids.data, ids.dtype, a);
    if (id >= -1 && id < columns) continue;
    atomicMin(&first, static_cast<unsigned long long>(a));
    break;
  }
  __syncthreads();
  if (threadIdx.x != 0 || first == ~0ull || wrong->what) return;
  const int64_t a = int64_t(first);
  report(wrong, Wrong::kId, a / top_k, a % top_k, load_integer(ids.data, ids.dtype, a), columns);
}

__device__ bool is_routed(const Array& map, int64_t index) {
  return map.dtype == MOEC_I32 ? static_cast<const int32_t*>(map.data)[index] != 0
                               : static_cast<const uint8_t*>(map.data)[index] != 0;
}

// Slots of one token by ascending id; a warp a token. Of too many experts the first K are taken.
__global__ __launch_bounds__(kThreads) void take_map_kernel(const PlanView plan, const Array map,
                                                            const float* probs, WrongData* wrong) {
  begin_kernel();
  for (int64_t t = global_thread() / 32; t < plan.num_tokens; t += global_threads() / 32) {
    int32_t* const ids = plan.expert_ids + t * plan.top_k;
    float* const weights = plan.routing_weights + t * plan.top_k;
    int used = 0;
    for (int first = 0; first < plan.num_experts; first += 32) {
      const int e = first + lane_id();
      const int64_t index = t * plan.num_experts + e;
      const bool routed = e < plan.num_experts && is_routed(map, index);
      const unsigned found = __ballot_sync(kAllLanes, routed);
      const int slot = used + __popc(found & ((1u << lane_id()) - 1));
      if (routed && slot < plan.top_k) {
        ids[slot] = e;
        weights[slot] = probs ? probs[index] : 1.0f;
      }
      used += __popc(found);
    }
    for (int k = used + lane_id(); k < plan.top_k; k += 32) {
      ids[k] = -1;
      weights[k] = 0.0f;
    }
    if (used > plan.top_k && lane_id() == 0 && !wrong->what)
      report(wrong, Wrong::kMap, t, 0, 0, plan.top_k);
  }
}

__global__ __launch_bounds__(kThreads) void rule_ids_kernel(const PlanView plan,
                                                            const IdRule rule) {
  begin_kernel();
  const int64_t count = plan.num_tokens * plan.top_k;
  for (int64_t i = global_thread(); i < count; i += global_threads())
    plan.expert_ids[i] = rule.id(i);
}

// Slot-major.
__global__ __launch_bounds__(kThreads) void index_map_kernel(const PlanView plan, int32_t* to) {
  begin_kernel();
  const int64_t count = plan.num_tokens * plan.top_k;
  for (int64_t i = global_thread(); i < count; i += global_threads()) {
    const int64_t k = i / plan.num_tokens, t = i - k * plan.num_tokens;
    to[i] = plan.assignment_row[t * plan.top_k + k];
  }
}

// Rows of one token in descending order, the experts they belong to, and their number: a thread a
// token, after the fill with -1.
__global__ __launch_bounds__(kThreads) void row_id_map_kernel(const PlanView plan, int32_t* to,
                                                              WrongData* wrong) {
  begin_kernel();
  const int experts = plan.num_experts;
  for (int64_t t = global_thread(); t < plan.num_tokens; t += global_threads()) {
    int32_t* const out = to + t * (2 * int64_t(experts) + 1);
    int used = 0;
    for (int k = 0; k < plan.top_k; ++k) {
      const int row = plan.assignment_row[t * plan.top_k + k];
      if (row < 0) continue;
      if (used == experts) {
        if (!wrong->what) report(wrong, Wrong::kRowIdMap, t, 0, 0, experts);
        break;
      }
      int at = used++;
      for (; at > 0 && out[at - 1] < row; --at) out[at] = out[at - 1];
      out[at] = row;
    }
    for (int i = 0; i < used; ++i) {
      int low = 0, high = plan.num_local;  // the last group that starts at or before the row
      while (low + 1 < high) {
        const int middle = (low + high) / 2;
        (plan.group_offsets[middle] <= out[i] ? low : high) = middle;
      }
      out[experts + i] = plan.expert_begin + low;
    }
    out[2 * experts] = used;
  }
}

dim3 token_grid(const Op& op, int64_t items) {
  return grid_for(items, kThreads, int64_t(op.multiprocessors) * 8);
}

}  // namespace

moec_size plan_scratch(const moec_plan_desc& desc) {
  const int32_t num_local =
      desc.expert_end > desc.expert_begin ? desc.expert_end - desc.expert_begin : desc.num_experts;
  if (desc.kind == MOEC_PLAN_EXPERT_CHOICE) return choice_scratch(num_local);
  const uint64_t sort = plan_scratch_bytes(num_local);
  if (desc.drop != MOEC_DROP_BY_WEIGHT) return {sort, 0};
  return {sort + uint64_t(num_local + 1) * sizeof(int32_t), uint64_t(desc.top_k) * sizeof(int32_t)};
}

void build_plan(const Op& op, const PlanSource& source, const PlanView& plan) {
  if (plan.kind == MOEC_PLAN_EXPERT_CHOICE) return build_choice_plan(op, source, plan);
  PlanSource from = source;
  if (source.routing_map) {
    run(op, "routing map", take_map_kernel, token_grid(op, plan.num_tokens * 32), kThreads, 0, plan,
        source.routing_map, source.probs, op.wrong);
    from.expert_ids = {plan.expert_ids, MOEC_I32};
    from.routing_weights = plan.routing_weights;
  } else if (source.rule.run) {
    if (plan.num_tokens)
      run(op, "ids of a rule", rule_ids_kernel, token_grid(op, plan.num_tokens * plan.top_k),
          kThreads, 0, plan, source.rule);
    from.expert_ids = {plan.expert_ids, MOEC_I32};
  } else if (source.check) {
    run(op, "check of ids", check_ids_kernel, dim3(1), kPlanThreads, 0, source.expert_ids,
        plan.num_tokens * plan.top_k, plan.top_k, int64_t(plan.num_experts) + plan.num_zero,
        op.wrong);
  }
  check(launch_plan(from, plan, op.stream, op.clusters), "plan");
  op.count(uint64_t(plan_launches(plan, op.clusters)));
  if (plan.drop != MOEC_DROP_BY_WEIGHT) return;
  set_groups(op, plan, false);
  keep_heaviest(op, plan);
  fill_padding(op, plan);
}

void export_map(const Op& op, const PlanView& plan, int32_t field, int32_t* to) {
  if (plan.num_tokens == 0) return;
  if (field == MOEC_PLAN_INDEX_MAP) {
    run(op, "index map", index_map_kernel, token_grid(op, plan.num_tokens * plan.top_k), kThreads,
        0, plan, to);
    return;
  }
  const int64_t bytes = plan.num_tokens * (2 * int64_t(plan.num_experts) + 1) * 4;
  check(cudaMemsetAsync(to, 0xff, size_t(bytes), op.stream), "row id map");
  run(op, "row id map", row_id_map_kernel, token_grid(op, plan.num_tokens), kThreads, 0, plan, to,
      op.wrong);
}

}  // namespace moec::cuda
