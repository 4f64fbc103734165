// SPDX-License-Identifier: Apache-2.0
// Expert choice: every local expert takes its `capacity` best tokens, ties to the lowest token; a
// CTA an expert. Then each token finds its rows: tokens ascend inside an expert, so by bisection.
// Scratch: a Cut per expert.
#include <cub/block/block_reduce.cuh>

#include "backend/cuda/device/op.cuh"
#include "backend/cuda/plan/plan.h"
#include "backend/cuda/plan/plan_select.cuh"
#include "core/workspace.h"

namespace moec::cuda {
namespace {

constexpr int kTokenThreads = 256;

struct ChoiceParams {
  PlanView plan;
  const float* scores;        // [T,E]
  const uint8_t* token_mask;  // [T] or null
  Cut* cuts;                  // [num_local]

  // The reader of one expert's column, for find_cut.
  __device__ auto column(int e) const {
    return [this, e](int64_t t, uint32_t* key) {
      if (token_mask && !token_mask[t]) return false;
      const float score = scores[t * plan.num_experts + plan.expert_begin + e];
      *key = math::choice_key(score);
      return math::is_selectable(score);
    };
  }
};

__global__ __launch_bounds__(kPlanThreads) void cut_kernel(const __grid_constant__ ChoiceParams p) {
  using Reduce = cub::BlockReduce<int, kPlanThreads>;
  __shared__ Reduce::TempStorage reduce;
  __shared__ int taken;
  begin_kernel();
  const auto read = p.column(blockIdx.x);
  int eligible = 0;
  for (int64_t t = threadIdx.x; t < p.plan.num_tokens; t += kPlanThreads) {
    uint32_t key;
    eligible += read(t, &key);
  }
  eligible = Reduce(reduce).Sum(eligible);
  if (threadIdx.x == 0) taken = int(min(p.plan.capacity, int64_t(eligible)));
  __syncthreads();
  const Cut cut = taken > 0 ? find_cut(p.plan.num_tokens, taken, read) : Cut{~0u, 0};
  if (threadIdx.x != 0) return;
  p.plan.counts[blockIdx.x] = taken;
  p.cuts[blockIdx.x] = cut;
}

__global__ __launch_bounds__(kPlanThreads) void choose_kernel(
    const __grid_constant__ ChoiceParams p) {
  begin_kernel();
  const int e = blockIdx.x;
  const PlanView& plan = p.plan;
  visit_cut(plan.num_tokens, p.cuts[e], p.column(e), [&](int64_t t, int rank) {
    const float score = p.scores[t * plan.num_experts + plan.expert_begin + e];
    put_row(plan, plan.group_offsets[e] + rank, int32_t(t), -1, score);  // list_kernel: the slot
  });
}

// Row of token t at expert e, or -1.
__device__ int row_of(const PlanView& plan, int e, int32_t t) {
  int first = plan.group_offsets[e];
  const int end = first + plan.counts[e];
  for (int last = end; first < last;) {
    const int middle = first + (last - first) / 2;
    if (plan.row_token[middle] < t)
      first = middle + 1;
    else
      last = middle;
  }
  return first < end && plan.row_token[first] == t ? first : -1;
}

// visit(row, index among the token's rows) by ascending expert, by a warp; returns their number.
template <class Visit>
__device__ int for_token_rows(const PlanView& plan, int32_t t, Visit visit) {
  int used = 0;
  for (int first = 0; first < plan.num_local; first += 32) {
    const int e = first + lane_id(), row = e < plan.num_local ? row_of(plan, e, t) : -1;
    const unsigned found = __ballot_sync(kAllLanes, row >= 0);
    if (row >= 0) visit(row, used + __popc(found & ((1u << lane_id()) - 1)));
    used += __popc(found);
  }
  return used;
}

__global__ __launch_bounds__(kTokenThreads) void count_rows_kernel(const PlanView plan) {
  begin_kernel();
  for (int64_t t = global_thread() / 32; t < plan.num_tokens; t += global_threads() / 32) {
    const int count = for_token_rows(plan, int32_t(t), [](int, int) {});
    if (lane_id() == 0) plan.token_offsets[t] = count;
  }
}

// Counts -> first entries, in place; one CTA.
__global__ __launch_bounds__(kPlanThreads) void scan_tokens_kernel(const PlanView plan) {
  constexpr int kEach = 8;
  using Scan = PlanScan<int>;
  __shared__ Scan::TempStorage scan;
  begin_kernel();
  int base = 0;
  for (int64_t first = 0; first < plan.num_tokens; first += kPlanThreads * kEach) {
    const int64_t begin = first + int64_t(threadIdx.x) * kEach;
    int entries[kEach], all;  // counts, then the entries before
    for (int i = 0; i < kEach; ++i)
      entries[i] = begin + i < plan.num_tokens ? plan.token_offsets[begin + i] : 0;
    Scan(scan).ExclusiveSum(entries, entries, all);
    for (int i = 0; i < kEach && begin + i < plan.num_tokens; ++i)
      plan.token_offsets[begin + i] = base + entries[i];
    base += all;
    __syncthreads();
  }
  if (threadIdx.x == 0) plan.token_offsets[plan.num_tokens] = base;
}

__global__ __launch_bounds__(kTokenThreads) void list_kernel(const PlanView plan) {
  begin_kernel();
  for (int64_t t = global_thread() / 32; t < plan.num_tokens; t += global_threads() / 32) {
    const int start = plan.token_offsets[t];
    for_token_rows(plan, int32_t(t), [&](int row, int index) {
      plan.token_rows[start + index] = row;
      plan.row_slot[row] = index;
    });
  }
  const int64_t used = plan.token_offsets[plan.num_tokens];
  for (int64_t i = used + global_thread(); i < plan.num_local * plan.capacity;
       i += global_threads())
    plan.token_rows[i] = -1;
}

}  // namespace

moec_size choice_scratch(int32_t num_local) {
  return {round_up(uint64_t(num_local) * sizeof(Cut), kCacheLine), 0};
}

void build_choice_plan(const Op& op, const PlanSource& source, const PlanView& plan) {
  const ChoiceParams p = {plan, source.scores, source.token_mask, static_cast<Cut*>(plan.scratch)};
  const dim3 experts(unsigned(plan.num_local));
  const dim3 tokens =
      grid_for(plan.num_tokens, kTokenThreads / 32, int64_t(op.multiprocessors) * 8);
  run(op, "expert choice", cut_kernel, experts, kPlanThreads, 0, p);
  set_groups(op, plan, true);
  run(op, "expert choice", choose_kernel, experts, kPlanThreads, 0, p);
  fill_padding(op, plan);
  run(op, "rows of tokens", count_rows_kernel, tokens, kTokenThreads, 0, plan);
  run(op, "rows of tokens", scan_tokens_kernel, dim3(1), kPlanThreads, 0, plan);
  run(op, "rows of tokens", list_kernel, tokens, kTokenThreads, 0, plan);
}

}  // namespace moec::cuda
