// SPDX-License-Identifier: Apache-2.0
// A counting sort by expert without atomics on data. Each warp owns a contiguous strip of
// assignments and walks it 32 at a time: lanes with the same expert find each other by match_any,
// their order is the lane order, and one of them advances the warp's own counter of that expert. A
// position is then
//   group offset + counts of earlier CTAs + counts of earlier warps + count before + rank in warp
// and so a function of the input alone.
//
//   T*K <= 8192   one CTA does everything, one launch
//   above         launch 1 counts; in launch 2 each CTA adds up the counts (they are in L2), walks
//   its
//                 strips again and writes. No ticket, so the scratch needs no clearing
#include "backend/cuda/plan.h"

#include <algorithm>

#include "backend/cuda/launch.cuh"
#include "backend/cuda/ptx.cuh"

namespace moec::cuda {
namespace {

constexpr int kSmall = 8192, kSmallThreads = 1024, kBigThreads = 512;
constexpr int kBigWarps = kBigThreads / 32, kSlices = 4;
constexpr int kMaxBlocks = 256;  // CTAs of the big plan
constexpr int kMaxLocal = 1024;  // experts of a plan: one thread each in the scan

struct PlanParams {
  PlanView plan;
  const void* ids;
  const float* weights;
  int64_t assignments;
  int strip;        // assignments of one warp, a multiple of 32
  int32_t* counts;  // [blocks, num_local]
};

template <typename Id>
__device__ int id_of(const PlanParams& p, int64_t i) {
  const int64_t id = static_cast<const Id*>(p.ids)[i];
  return id >= 0 && id < p.plan.num_experts + p.plan.num_zero ? int(id) : -1;
}
__device__ int local_of(const PlanParams& p, int id) {
  const int local = id - p.plan.expert_begin;
  return id >= 0 && id < p.plan.num_experts && local >= 0 && local < p.plan.num_local ? local : -1;
}

// Walk the strip of this warp; visit(i, local, first position of the 32 with this expert, lane
// mask).
template <typename Id, typename Visit>
__device__ void walk_strip(const PlanParams& p, int64_t warp, int32_t* counters, Visit visit) {
  const int lane = threadIdx.x & 31;
  const int64_t begin = warp * p.strip, end = min(begin + p.strip, p.assignments);
  for (int64_t first = begin; first < end; first += 32) {
    const int64_t i = first + lane;
    const int id = i < end ? id_of<Id>(p, i) : -1;
    const int local = local_of(p, id);
    const unsigned same = __match_any_sync(~0u, local);
    const int before = local >= 0 ? counters[local] : 0;
    __syncwarp();
    if (local >= 0 && lane == __ffs(same) - 1) counters[local] = before + __popc(same);
    __syncwarp();
    if (i < end) visit(i, id, local, before + __popc(same & ((1u << lane) - 1)));
  }
}

__device__ void clear(int32_t* values, int count) {
  for (int i = threadIdx.x; i < count; i += blockDim.x) values[i] = 0;
  __syncthreads();
}

// counters [warps][num_local] -> exclusive sums over warps, starting at start[e]; returns totals.
template <typename Start, typename Total>
__device__ void scan_warps(int32_t* counters, int num_local, Start start, Total total) {
  for (int e = threadIdx.x; e < num_local; e += blockDim.x) {
    int sum = start(e);
    for (int w = 0; w < int(blockDim.x / 32); ++w) {
      const int count = counters[w * num_local + e];
      counters[w * num_local + e] = sum;
      sum += count;
    }
    total(e, sum);
  }
  __syncthreads();
}

__device__ int kept_rows(const PlanView& plan, int count) {
  return plan.capacity > 0 ? int(min(int64_t(count), plan.capacity)) : count;
}

// Inclusive sum over the CTA; `sums` is shared memory of 32.
__device__ int block_scan(int value, int32_t* sums) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x / 32;
  for (int step = 1; step < 32; step *= 2) {
    const int other = __shfl_up_sync(~0u, value, step);
    if (lane >= step) value += other;
  }
  if (lane == 31) sums[warp] = value;
  __syncthreads();
  for (int w = 0; w < warp; ++w) value += sums[w];
  __syncthreads();
  return value;
}

// counts[e] (shared memory) become the groups' offsets, kept[e] their rows. Returns where the last
// group ends. One CTA of the grid publishes them.
__device__ int finish_groups(const PlanParams& p, int32_t* counts, int32_t* kept_of, bool publish) {
  const PlanView& plan = p.plan;
  __shared__ int32_t sums[32], totals[4];
  if (threadIdx.x < 4) totals[threadIdx.x] = 0;
  __syncthreads();
  for (int first = 0; first < plan.num_local; first += blockDim.x) {
    const int e = first + threadIdx.x, base = totals[1];
    const int count = e < plan.num_local ? counts[e] : 0, kept = kept_rows(plan, count);
    const int padded = (kept + plan.align - 1) / plan.align * plan.align;
    const int end = base + block_scan(padded, sums);
    if (e < plan.num_local) counts[e] = end - padded;
    if (e < plan.num_local) kept_of[e] = kept;
    if (publish && e < plan.num_local) {
      plan.group_offsets[e] = end - padded;
      plan.counts[e] = kept;
    }
    if (kept > 0) atomicMax(&totals[3], kept);  // integers: the order of the atomics does not show
    if (kept > 0) atomicAdd(&totals[0], kept);
    if (count > kept) atomicAdd(&totals[2], count - kept);
    if (threadIdx.x == blockDim.x - 1) totals[1] = end;
    __syncthreads();
  }
  if (publish && threadIdx.x < 4) plan.totals[threadIdx.x] = totals[threadIdx.x];
  if (publish && threadIdx.x == 0) plan.group_offsets[plan.num_local] = totals[1];
  return totals[1];
}

// Second walk: counters hold the first position of each (warp, expert) within the expert.
template <typename Id>
__device__ void write_rows(const PlanParams& p, int64_t warp, int32_t* counters,
                           const int32_t* offsets) {
  const PlanView& plan = p.plan;
  walk_strip<Id>(p, warp, counters, [&](int64_t i, int id, int local, int position) {
    const float weight = p.weights ? p.weights[i] : 1.0f;
    int row = -1;
    if (local >= 0 && (plan.capacity == 0 || position < plan.capacity)) {
      const int64_t token = i / plan.top_k;
      row = offsets[local] + position;
      plan.row_token[row] = int32_t(token);
      plan.row_slot[row] = int32_t(i - token * plan.top_k);
      plan.row_weight[row] = weight;
    }
    plan.assignment_row[i] = row;
    plan.expert_ids[i] = id;
    plan.weights[i] = weight;
  });
}

__device__ void clear_row(const PlanView& plan, int64_t row) {
  plan.row_token[row] = -1;
  plan.row_slot[row] = -1;
  plan.row_weight[row] = 0;
}
// Rows of no assignment: padding of each group, and everything past the last group.
__device__ void clear_unused(const PlanView& plan, const int32_t* offsets, const int32_t* kept,
                             int end, int64_t thread, int64_t threads) {
  for (int64_t e = thread; plan.align > 1 && e < plan.num_local; e += threads) {
    const int last = e + 1 < plan.num_local ? offsets[e + 1] : end;
    for (int row = offsets[e] + kept[e]; row < last; ++row) clear_row(plan, row);
  }
  for (int64_t row = end + thread; row < plan.max_rows; row += threads) clear_row(plan, row);
}

template <typename Id>
__global__ __launch_bounds__(kSmallThreads) void plan_small_kernel(const PlanParams p) {
  extern __shared__ int32_t counters[];  // [warps][num_local], then offsets and kept [num_local]
  ptx::grid_dependency_wait();
  ptx::grid_dependency_launch();
  const int num_local = p.plan.num_local, warp = threadIdx.x / 32;
  int32_t *const offsets = counters + kSmallThreads / 32 * num_local, *const kept =
                                                                          offsets + num_local;
  clear(counters, kSmallThreads / 32 * num_local);
  int32_t* const mine = counters + warp * num_local;
  walk_strip<Id>(p, warp, mine, [](int64_t, int, int, int) {});
  __syncthreads();
  scan_warps(counters, num_local, [](int) { return 0; }, [&](int e, int sum) { offsets[e] = sum; });
  const int end = finish_groups(p, offsets, kept, true);
  write_rows<Id>(p, warp, mine, offsets);
  clear_unused(p.plan, offsets, kept, end, threadIdx.x, kSmallThreads);
}

// Launch 1 of the big plan.
template <typename Id>
__global__ __launch_bounds__(kBigThreads) void plan_count_kernel(const PlanParams p) {
  extern __shared__ int32_t counters[];  // [warps][num_local]
  const int num_local = p.plan.num_local, warp = threadIdx.x / 32;
  clear(counters, kBigWarps * num_local);
  ptx::grid_dependency_wait();
  ptx::grid_dependency_launch();
  walk_strip<Id>(p, int64_t(blockIdx.x) * kBigWarps + warp, counters + warp * num_local,
                 [](int64_t, int, int, int) {});
  __syncthreads();
  int32_t* const counts = p.counts + int64_t(blockIdx.x) * num_local;
  scan_warps(counters, num_local, [](int) { return 0; }, [&](int e, int sum) { counts[e] = sum; });
}

// before[e] = counts of the CTAs before this one, total[e] = of all.
__device__ void sum_blocks(const PlanParams& p, int blocks, int32_t* before, int32_t* total) {
  const int num_local = p.plan.num_local;
  for (int i = threadIdx.x; i < num_local * kSlices; i += kBigThreads) {
    const int slice = i / num_local, e = i - slice * num_local;
    int sum = 0, earlier = 0;
#pragma unroll 8
    for (int b = slice; b < blocks; b += kSlices) {
      const int count = p.counts[int64_t(b) * num_local + e];
      sum += count;
      earlier += b < int(blockIdx.x) ? count : 0;
    }
    atomicAdd(&before[e], earlier);
    atomicAdd(&total[e], sum);
  }
  __syncthreads();
}

// Launch 2 of the big plan.
template <typename Id>
__global__ __launch_bounds__(kBigThreads) void plan_write_kernel(const PlanParams p) {
  extern __shared__ int32_t counters[];  // [warps][num_local], then two more [num_local]
  const int num_local = p.plan.num_local, warp = threadIdx.x / 32;
  int32_t* const mine = counters + warp * num_local;
  int32_t *const before = counters + kBigWarps * num_local, *const offsets = before + num_local;
  clear(counters, (kBigWarps + 2) * num_local);
  ptx::grid_dependency_wait();
  ptx::grid_dependency_launch();
  walk_strip<Id>(p, int64_t(blockIdx.x) * kBigWarps + warp, mine, [](int64_t, int, int, int) {});
  sum_blocks(p, gridDim.x, before, offsets);
  scan_warps(counters, num_local, [&](int e) { return before[e]; }, [](int, int) {});
  int32_t* const kept = before;  // no longer needed
  const int end = finish_groups(p, offsets, kept, blockIdx.x == 0);
  write_rows<Id>(p, int64_t(blockIdx.x) * kBigWarps + warp, mine, offsets);
  clear_unused(p.plan, offsets, kept, end, int64_t(blockIdx.x) * kBigThreads + threadIdx.x,
               int64_t(gridDim.x) * kBigThreads);
}

int round_up(int64_t value, int to) {
  return int((value + to - 1) / to * to);
}

template <typename Id>
cudaError_t launch_ids(PlanParams& p, cudaStream_t stream) {
  static std::atomic<uint64_t> allowed[3];
  const int num_local = p.plan.num_local;
  if (p.assignments <= kSmall) {
    constexpr int kWarps = kSmallThreads / 32;
    const auto kernel = plan_small_kernel<Id>;
    const int most = (kWarps + 2) * kMaxLocal * 4;
    if (cudaError_t error = allow_shared_memory(kernel, most, allowed[0])) return error;
    p.strip = std::max(32, round_up((p.assignments + kWarps - 1) / kWarps, 32));
    return launch(kernel, dim3(1), kSmallThreads, (kWarps + 2) * num_local * 4, stream, p);
  }
  const int most = (kBigWarps + 2) * kMaxLocal * 4, bytes = (kBigWarps + 2) * num_local * 4;
  if (cudaError_t e = allow_shared_memory(plan_count_kernel<Id>, most, allowed[1])) return e;
  if (cudaError_t e = allow_shared_memory(plan_write_kernel<Id>, most, allowed[2])) return e;
  const int blocks = int(std::min<int64_t>(kMaxBlocks, (p.assignments + 2047) / 2048));
  p.strip = round_up((p.assignments + blocks * kBigWarps - 1) / (blocks * kBigWarps), 32);
  if (cudaError_t e = launch(plan_count_kernel<Id>, dim3(blocks), kBigThreads, bytes, stream, p))
    return e;
  return launch(plan_write_kernel<Id>, dim3(blocks), kBigThreads, bytes, stream, p);
}

}  // namespace

const char* plan_refuses(const PlanSource& source, const PlanView& plan) {
  if (plan.kind != MOEC_PLAN_TOPK) return "expert choice";
  if (source.routing_map || !source.expert_ids) return "a routing map as source";
  if (source.check) return "checking of routing data";
  if (plan.drop == MOEC_DROP_BY_WEIGHT && plan.capacity > 0) return "dropping by weight";
  if (plan.num_local > kMaxLocal) return "more than 1024 local experts";
  return nullptr;
}

uint64_t plan_scratch_bytes(int num_local) {
  return uint64_t(kMaxBlocks) * num_local * 4;
}

int plan_launches(const PlanView& plan) {
  return plan.num_tokens * plan.top_k <= kSmall ? 1 : 2;
}

cudaError_t launch_plan(const PlanSource& source, const PlanView& plan, cudaStream_t stream) {
  PlanParams p = {};
  p.plan = plan;
  p.ids = source.expert_ids.data;
  p.weights = source.weights;
  p.assignments = plan.num_tokens * plan.top_k;
  p.counts = static_cast<int32_t*>(plan.scratch);
  return source.expert_ids.dtype == MOEC_I64 ? launch_ids<int64_t>(p, stream)
                                             : launch_ids<int32_t>(p, stream);
}

}  // namespace moec::cuda
