// SPDX-License-Identifier: Apache-2.0
// A plan of at most 32 assignments: one warp sorts them, an assignment a lane; then the CTA writes
// what every expert and every unused row has.
#include "backend/cuda/device/launch.cuh"
#include "backend/cuda/device/ptx.cuh"
#include "backend/cuda/plan/plan.h"
#include "backend/cuda/plan/plan_tile.cuh"

namespace moec::cuda {
namespace {

constexpr int kFewThreads = 256;

struct Group {  // an expert with assignments, in the order of their first ones
  int expert, kept, start, rows;
};

__global__ __launch_bounds__(kFewThreads) void plan_few_kernel(
    const __grid_constant__ PlanParams p) {
  __shared__ Group groups[kFewAssignments];
  __shared__ int num_groups, end;
  const PlanView& plan = p.plan;
  ptx::grid_dependency_wait();
  ptx::grid_dependency_launch();
  if (threadIdx.x < 32) {
    const int i = lane_id();
    const bool inside = i < p.assignments;
    const int64_t columns = int64_t(plan.num_experts) + plan.num_zero;
    const int id = inside ? math::valid_id(load_integer(p.ids.data, p.ids.dtype, i), columns) : -1;
    const float weight = inside && p.routing_weights ? p.routing_weights[i] : 1.0f;
    const unsigned at = unsigned(id) - unsigned(plan.expert_begin);
    const int expert = id >= 0 && at < unsigned(p.experts) ? int(at) : -1;
    const unsigned same = __match_any_sync(kAllLanes, expert), before = (1u << i) - 1;
    const int rank = __popc(same & before), count = __popc(same);
    const bool first = expert >= 0 && rank == 0;
    const int kept = p.kept(count), rows = p.padded(kept);
    const unsigned leaders = __ballot_sync(kAllLanes, first);
    int start = 0;
    for (unsigned left = leaders; left; left &= left - 1) {
      const int leader = __ffs(left) - 1, other = __shfl_sync(kAllLanes, expert, leader);
      const int others = __shfl_sync(kAllLanes, rows, leader);
      start += other < expert ? others : 0;
    }
    const int all_kept = warp_sum(first ? kept : 0), all = warp_sum(first ? count : 0);
    const int last = warp_sum(first ? rows : 0);
    const int most = __reduce_max_sync(kAllLanes, first ? kept : 0);
    if (first) groups[__popc(leaders & before)] = {expert, kept, start, rows};
    if (i == 0) {
      num_groups = __popc(leaders);
      end = last;
      plan.totals[0] = all_kept;
      plan.totals[1] = last;
      plan.totals[2] = all - all_kept;
      plan.totals[3] = most;
    }
    if (inside) {
      const int row = expert >= 0 && rank < kept ? start + rank : -1;
      plan.assignment_row[i] = row;
      plan.expert_ids[i] = id;
      plan.routing_weights[i] = weight;
      if (row >= 0) {
        plan.row_token[row] = i / plan.top_k;
        plan.row_slot[row] = i % plan.top_k;
        plan.row_weight[row] = weight;
      }
    }
  }
  __syncthreads();
  for (int e = threadIdx.x; e <= p.experts; e += kFewThreads) {
    int kept = 0, start = 0;
    for (int g = 0; g < num_groups; ++g) {
      kept = groups[g].expert == e ? groups[g].kept : kept;
      start += groups[g].expert < e ? groups[g].rows : 0;
    }
    if (e < p.experts) plan.counts[e] = kept;
    plan.group_offsets[e] = start;
  }
  const auto clear = [&](int64_t row) {
    plan.row_token[row] = -1;
    plan.row_slot[row] = -1;
    plan.row_weight[row] = 0;
  };
  for (int g = threadIdx.x / 32; g < num_groups; g += kFewThreads / 32) {
    for (int row = groups[g].kept + lane_id(); row < groups[g].rows; row += 32) {
      clear(groups[g].start + row);
    }
  }
  for (int64_t row = end + int(threadIdx.x); row < plan.max_rows; row += kFewThreads) clear(row);
}

}  // namespace

cudaError_t launch_plan_few(const PlanParams& p, cudaStream_t stream) {
  return launch(plan_few_kernel, dim3(1), kFewThreads, 0, stream, p);
}

}  // namespace moec::cuda
