// SPDX-License-Identifier: Apache-2.0
// Groups and padding of plans that are made in several steps, and dropping by weight.
#include <cub/block/block_reduce.cuh>
#include <cuda/functional>

#include "backend/cuda/device/op.cuh"
#include "backend/cuda/plan/plan.h"
#include "backend/cuda/plan/plan_select.cuh"

namespace moec::cuda {
namespace {

__global__ __launch_bounds__(kPlanThreads) void groups_kernel(const PlanView plan,
                                                              bool clear_dropped) {
  using Scan = PlanScan<uint64_t>;
  using Reduce = cub::BlockReduce<int, kPlanThreads>;
  __shared__ Scan::TempStorage scan;
  __shared__ Reduce::TempStorage reduce;
  begin_kernel();
  uint64_t base = 0;  // rows << 32 | assignments
  int largest = 0;
  for (int first = 0; first < plan.num_local; first += kPlanThreads) {
    const int e = first + threadIdx.x, count = e < plan.num_local ? plan.counts[e] : 0;
    const int rows = (count + plan.align - 1) / plan.align * plan.align;
    uint64_t before, all;
    Scan(scan).ExclusiveSum(uint64_t(rows) << 32 | uint64_t(count), before, all);
    if (e < plan.num_local) plan.group_offsets[e] = int((base + before) >> 32);
    base += all;
    if (e + 1 == plan.num_local) plan.group_offsets[e + 1] = int(base >> 32);
    largest = max(largest, count);
    __syncthreads();
  }
  largest = Reduce(reduce).Reduce(largest, ::cuda::maximum<>());
  if (threadIdx.x != 0) return;
  plan.totals[0] = int(uint32_t(base));
  plan.totals[1] = int(base >> 32);
  if (clear_dropped) plan.totals[2] = 0;
  plan.totals[3] = largest;
}

__global__ __launch_bounds__(kPlanThreads) void padding_kernel(const PlanView plan) {
  begin_kernel();
  for (int64_t e = global_thread(); e < plan.num_local; e += global_threads())
    for (int row = plan.group_offsets[e] + plan.counts[e]; row < plan.group_offsets[e + 1]; ++row)
      put_row(plan, row, -1, -1, 0.0f);
  const int64_t end = plan.group_offsets[plan.num_local];
  for (int64_t row = end + global_thread(); row < plan.max_rows; row += global_threads())
    put_row(plan, row, -1, -1, 0.0f);
}

// A CTA an expert. Equal weights: the first in token order.
__global__ __launch_bounds__(kPlanThreads) void heaviest_kernel(const PlanView plan,
                                                                const PlanLists lists) {
  begin_kernel();
  const int e = blockIdx.x, begin = lists.offsets[e], n = lists.offsets[e + 1] - begin;
  const int keep = plan.counts[e];
  const int32_t* const list = lists.entries + begin;
  if (keep == 0) return;
  const auto read = [&](int64_t i, uint32_t* key) {
    *key = math::choice_key(plan.routing_weights[list[i]]);
    return true;
  };
  const Cut cut = keep < n ? find_cut(n, keep, read) : Cut{0, n};  // every key is >= 0
  visit_cut(n, cut, read, [&](int64_t i, int rank) {
    const int a = list[i], row = plan.group_offsets[e] + rank;
    plan.assignment_row[a] = row;
    put_row(plan, row, a / plan.top_k, a % plan.top_k, plan.routing_weights[a]);
  });
}

}  // namespace

void set_groups(const Op& op, const PlanView& plan, bool clear_dropped) {
  run(op, "groups of a plan", groups_kernel, dim3(1), kPlanThreads, 0, plan, clear_dropped);
}

void fill_padding(const Op& op, const PlanView& plan) {
  const int64_t rows = std::max<int64_t>(plan.max_rows, plan.num_local);
  run(op, "padding of a plan", padding_kernel, grid_for(rows, kPlanThreads, op.multiprocessors * 2),
      kPlanThreads, 0, plan);
}

void keep_heaviest(const Op& op, const PlanView& plan) {
  run(op, "dropping by weight", heaviest_kernel, dim3(unsigned(plan.num_local)), kPlanThreads, 0,
      plan, PlanLists(plan));
}

}  // namespace moec::cuda
