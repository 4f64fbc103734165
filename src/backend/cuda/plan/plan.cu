// SPDX-License-Identifier: Apache-2.0
// A plan from ids. Where a row lies is
//   group's first row + assignments of the expert in earlier CTAs + in earlier warps + in this one
// and so a function of the input alone.
//
//   T*K <= 32     one launch of one CTA (plan_few.cu)
//   T*K <= 8192   one launch: a cluster of up to 8 CTAs, which read each other's counts
//   above         launch 1 counts; in launch 2 each CTA adds up the counts (they are in L2) and
//                 writes. What launch 2 knows without the counts overlaps launch 1. No ticket, so
//                 the scratch needs no clearing
#include "backend/cuda/plan/plan.h"

#include <algorithm>
#include <utility>

#include "backend/cuda/device/launch.cuh"
#include "backend/cuda/device/ptx.cuh"
#include "backend/cuda/plan/plan_tile.cuh"

namespace moec::cuda {
namespace {

constexpr int kSmallRounds = 2, kBigRounds = 4;
constexpr int kMaxCluster = 8, kMaxBlocks = 128;
constexpr int kSmallTile = kPlanThreads * kSmallRounds, kBigTile = kPlanThreads * kBigRounds;

// What all CTAs know of the groups once the experts' totals are there.
struct Groups {
  int end, sorted;  // one past the last row; local entries of the tile
};

// totals[e]: assignments in this tile; all[e] (in `start`): of the whole input. Makes start[e] the
// group's first row and local_start[e] its place in the sorted tile. The first CTA publishes the
// groups, the last one the totals, so that neither is much later than the others.
template <class Tile>
__device__ Groups finish_groups(const PlanParams& p, const Tile& tile) {
  const PlanView& plan = p.plan;
  const bool publish = blockIdx.x == 0, publish_totals = blockIdx.x == gridDim.x - 1;
  __shared__ uint64_t sums[kPlanWarps];
  __shared__ int sum_kept, sum_all, largest;
  if (threadIdx.x == 0) sum_kept = sum_all = largest = 0;
  int32_t* const offsets = p.list ? p.list_offsets : plan.group_offsets;
  uint64_t base = p.first_slice() ? 0 : uint64_t(offsets[p.begin]) << 32;
  for (int first = 0; first < p.experts; first += kPlanThreads) {
    const int e = first + threadIdx.x;
    const bool mine = e < p.experts;
    const int all = mine ? tile.start[e] : 0, count = mine ? tile.totals[e] : 0;
    const int kept = p.kept(all), rows = p.list ? all : p.padded(kept);
    const uint64_t value = uint64_t(rows) << 32 | uint64_t(count);
    uint64_t sum;
    const uint64_t end = base + block_scan(value, sums, sum);
    if (mine) {
      tile.start[e] = int((end - value) >> 32);
      tile.local_start[e] = int(uint32_t(end - value));
    }
    if (publish && mine) {
      plan.counts[p.begin + e] = kept;
      offsets[p.begin + e] = int((end - value) >> 32);
      if (e + 1 == p.experts) offsets[p.begin + e + 1] = int(end >> 32);
    }
    // Integers: the order of the atomics does not show. The barrier below is there already; a
    // cub::BlockReduce would bring another.
    if (publish_totals) {
      const int warp_kept = __reduce_add_sync(kAllLanes, kept);
      const int warp_all = __reduce_add_sync(kAllLanes, all);
      const int most = __reduce_max_sync(kAllLanes, kept);
      if (lane_id() == 0 && warp_all > 0) {
        atomicAdd(&sum_kept, warp_kept);
        atomicAdd(&sum_all, warp_all);
        atomicMax(&largest, most);
      }
    }
    base += sum;
    __syncthreads();
  }
  if (publish_totals && threadIdx.x == 0) {
    const bool add = !p.first_slice();
    plan.totals[0] = sum_kept + (add ? plan.totals[0] : 0);
    plan.totals[1] = int(base >> 32);
    plan.totals[2] = sum_all - sum_kept + (add ? plan.totals[2] : 0);
    plan.totals[3] = max(largest, add ? plan.totals[3] : 0);
  }
  return {int(base >> 32), int(uint32_t(base))};
}

__device__ void clear_row(const PlanView& plan, int64_t row) {
  plan.row_token[row] = -1;
  plan.row_slot[row] = -1;
  plan.row_weight[row] = 0;
}
// Rows of no assignment: padding of each group, and everything past the last group.
__device__ void clear_unused(const PlanParams& p, const int32_t* all, const int32_t* start, int end,
                             int64_t thread, int64_t threads) {
  const PlanView& plan = p.plan;
  for (int64_t e = thread; plan.align > 1 && e < p.experts; e += threads) {
    const int kept = p.kept(all[e]);
    for (int row = kept; row < p.padded(kept); ++row) clear_row(plan, start[e] + row);
  }
  if (p.begin + p.experts < plan.num_local) return;
  for (int64_t row = end + thread; row < plan.max_rows; row += threads) clear_row(plan, row);
}

// One cluster, one tile a CTA. Each CTA writes its totals into the shared memory of all; what is
// written counts on the receiver's barrier, so nobody has to wait for its own stores.
__global__ __launch_bounds__(kPlanThreads) void plan_small_kernel(
    const __grid_constant__ PlanParams p) {
#if __CUDA_ARCH__ >= 900
  extern __shared__ __align__(16) char shared[];
  using Tile = PlanTile<kSmallRounds>;
  __shared__ int32_t all[kMaxSlice];
  __shared__ uint64_t received;
  uint16_t* const totals = reinterpret_cast<uint16_t*>(shared);  // [kMaxCluster][stride]
  Tile tile(p, shared + kMaxCluster * p.stride() * 2);
  const int64_t first = int64_t(blockIdx.x) * kSmallTile;
  const int blocks = int(gridDim.x), block = int(blockIdx.x), quads = p.stride() / 4;
  const uint32_t barrier = ptx::shared_address(&received);
  if (blocks > 1) {
    if (threadIdx.x == 0) {
      ptx::barrier_init(barrier, 1);
      ptx::fence_barrier_init();
    }
    ptx::cluster_arrive_relaxed();  // the barrier is there
  }
  tile.clear(p);
  ptx::grid_dependency_wait();
  ptx::grid_dependency_launch();
  tile.load(p, first, true);
  tile.count(p);
  if (blocks > 1) {
    ptx::cluster_wait();
    if (threadIdx.x == 0) ptx::barrier_arrive_expect(barrier, uint32_t(blocks * quads * 8));
    for (int i = threadIdx.x; i < quads * blocks; i += kPlanThreads) {
      const int b = i / quads, quad = i - b * quads;
      const int4 four = reinterpret_cast<const int4*>(tile.totals)[quad];
      ptx::store_remote(ptx::shared_address(totals + block * p.stride() + 4 * quad), b,
                        uint64_t(uint32_t(four.x) | uint32_t(four.y) << 16) |
                            uint64_t(uint32_t(four.z) | uint32_t(four.w) << 16) << 32,
                        barrier);
    }
    ptx::barrier_wait(barrier, 0);
  }
  for (int e = threadIdx.x; e < p.experts; e += kPlanThreads) {
    int sum = blocks > 1 ? 0 : tile.totals[e], earlier = 0;
#pragma unroll
    for (int b = 0; b < kMaxCluster; ++b) {
      const int count = blocks > 1 && b < blocks ? totals[b * p.stride() + e] : 0;
      sum += count;
      earlier += b < block ? count : 0;
    }
    tile.next[e] = earlier;
    tile.start[e] = all[e] = sum;
  }
  const Groups groups = finish_groups(p, tile);
  tile.write(p, first, groups.sorted);
  if (!p.list)
    clear_unused(p, all, tile.start, groups.end, int64_t(block) * kPlanThreads + threadIdx.x,
                 int64_t(blocks) * kPlanThreads);
#endif
}

// Launch 1 of the big plan: assignments of each expert in the tiles of each CTA.
__global__ __launch_bounds__(kPlanThreads) void plan_count_kernel(
    const __grid_constant__ PlanParams p) {
  __shared__ int32_t counts[kMaxSlice];
  for (int e = threadIdx.x; e < p.stride(); e += kPlanThreads) counts[e] = 0;
  ptx::grid_dependency_wait();
  ptx::grid_dependency_launch();
  __syncthreads();
  PlanTile<kBigRounds> tile(p, nullptr);
  for (int i = 0; i < p.tiles; ++i) {
    tile.load(p, (int64_t(blockIdx.x) * p.tiles + i) * kBigTile, false);
#pragma unroll
    for (int r = 0; r < kBigRounds; ++r) {  // those of lane 0's expert at once: it may be all
      const int local = tile.local[r], first = __shfl_sync(kAllLanes, local, 0);
      const unsigned same = __ballot_sync(kAllLanes, local == first);
      if (local < 0) continue;
      if (local != first)
        atomicAdd(&counts[local], 1);
      else if (lane_id() == 0)
        atomicAdd(&counts[local], __popc(same));
    }
  }
  __syncthreads();
  for (int e = threadIdx.x; e < p.stride(); e += kPlanThreads)
    p.block_counts[int64_t(blockIdx.x) * p.stride() + e] = counts[e];
}

// next[e] = assignments in the CTAs before this one, all[e] = in all. Four experts a thread.
__device__ void sum_blocks(const PlanParams& p, int32_t* next, int32_t* all) {
  const int quads = p.stride() / 4, slices = max(1, kPlanThreads / quads);
  for (int i = threadIdx.x; i < quads * slices; i += kPlanThreads) {
    const int slice = i / quads, quad = i - slice * quads;
    int sum[4] = {}, earlier[4] = {};
#pragma unroll 8
    for (int b = slice; b < int(gridDim.x); b += slices) {
      const int4 c = reinterpret_cast<const int4*>(p.block_counts)[int64_t(b) * quads + quad];
      const bool before = b < int(blockIdx.x);
      const int values[4] = {c.x, c.y, c.z, c.w};
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        sum[j] += values[j];
        earlier[j] += before ? values[j] : 0;
      }
    }
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      atomicAdd(&next[4 * quad + j], earlier[j]);
      atomicAdd(&all[4 * quad + j], sum[j]);
    }
  }
  __syncthreads();
}

// Launch 2 of the big plan. Reads no counts, and writes nothing, before launch 1 has ended; the ids
// and weights were there before launch 1 began.
__global__ __launch_bounds__(kPlanThreads) void plan_write_kernel(
    const __grid_constant__ PlanParams p) {
  extern __shared__ __align__(16) char shared[];
  __shared__ int32_t all[kMaxSlice];
  __shared__ uint64_t sums[kPlanWarps];
  PlanTile<kBigRounds> tile(p, shared);
  int64_t first = int64_t(blockIdx.x) * p.tiles * kBigTile;
  for (int e = threadIdx.x; e < p.stride(); e += kPlanThreads) tile.next[e] = all[e] = 0;
  tile.clear(p);
  tile.load(p, first, true);
  tile.count(p);
  ptx::grid_dependency_wait();
  ptx::grid_dependency_launch();
  sum_blocks(p, tile.next, all);
  for (int e = threadIdx.x; e < p.experts; e += kPlanThreads) tile.start[e] = all[e];
  const Groups groups = finish_groups(p, tile);
  tile.write(p, first, groups.sorted);
  if (!p.list)
    clear_unused(p, all, tile.start, groups.end, int64_t(blockIdx.x) * kPlanThreads + threadIdx.x,
                 int64_t(gridDim.x) * kPlanThreads);
  for (int i = 1; i < p.tiles; ++i) {
    __syncthreads();
    for (int e = threadIdx.x; e < p.experts; e += kPlanThreads) tile.next[e] += tile.totals[e];
    first += kBigTile;
    tile.clear(p);
    tile.load(p, first, true);
    tile.count(p);
    tile.write(p, first, tile.sort_totals(p, sums));
  }
}

PlanParams params_of(const PlanSource& source, const PlanView& plan) {
  PlanParams p = {};
  p.plan = plan;
  p.ids = source.expert_ids;
  p.routing_weights = source.routing_weights;
  p.set_top_k(plan.top_k);
  p.assignments = plan.num_tokens * plan.top_k;
  p.experts = plan.num_local;
  p.block_counts = static_cast<int32_t*>(plan.scratch);
  if (plan.drop != MOEC_DROP_BY_WEIGHT) return p;
  const PlanLists lists(plan);
  p.list = lists.entries;
  p.list_offsets = lists.offsets;
  return p;
}

cudaError_t launch_small(const PlanParams& p, cudaStream_t stream) {
  static std::atomic<uint64_t> allowed;
  using Tile = PlanTile<kSmallRounds>;
  const auto shared_bytes = [](int experts) {
    return Tile::shared_bytes(experts) + kMaxCluster * ((experts + 3) / 4 * 4) * 2;
  };
  if (cudaError_t error = allow_shared_memory(plan_small_kernel, shared_bytes(kMaxSlice), allowed))
    return error;
  int blocks = 1;
  while (int64_t(blocks) * kSmallTile < p.assignments) blocks *= 2;
  return launch_cluster(plan_small_kernel, dim3(unsigned(blocks)), blocks, kPlanThreads,
                        shared_bytes(p.experts), stream, p);
}

// One pass over the assignments for each slice of the experts.
cudaError_t launch_big(PlanParams p, cudaStream_t stream) {
  static std::atomic<uint64_t> allowed;
  using Tile = PlanTile<kBigRounds>;
  if (cudaError_t error =
          allow_shared_memory(plan_write_kernel, Tile::shared_bytes(kMaxSlice), allowed))
    return error;
  const int64_t tiles = std::max<int64_t>(1, (p.assignments + kBigTile - 1) / kBigTile);
  p.tiles = int((tiles + kMaxBlocks - 1) / kMaxBlocks);
  const dim3 grid(unsigned((tiles + p.tiles - 1) / p.tiles));
  for (p.begin = 0; p.begin < p.plan.num_local; p.begin += kMaxSlice) {
    p.experts = std::min(kMaxSlice, p.plan.num_local - p.begin);
    if (cudaError_t e = launch(plan_count_kernel, grid, kPlanThreads, 0, stream, p)) return e;
    if (cudaError_t e =
            launch(plan_write_kernel, grid, kPlanThreads, Tile::shared_bytes(p.experts), stream, p))
      return e;
  }
  return cudaSuccess;
}

bool is_few(const PlanView& plan) {
  return plan.num_local <= kMaxSlice && plan.drop != MOEC_DROP_BY_WEIGHT &&
         plan.num_tokens * plan.top_k <= kFewAssignments;
}
bool is_small(const PlanView& plan, bool clusters) {
  return clusters && plan.num_local <= kMaxSlice &&
         plan.num_tokens * plan.top_k <= kMaxCluster * kSmallTile;
}

}  // namespace

static_assert(kMaxBlocks + 2 <= kPlanCounts);  // and offsets of lists (plan.h)
uint64_t plan_scratch_bytes(int num_local) {
  return uint64_t(kMaxBlocks) * uint64_t((num_local + 3) / 4 * 4) * sizeof(int32_t);
}

int plan_launches(const PlanView& plan, bool clusters) {
  return is_few(plan) || is_small(plan, clusters)
             ? 1
             : 2 * ((plan.num_local + kMaxSlice - 1) / kMaxSlice);
}

cudaError_t launch_plan(const PlanSource& source, const PlanView& plan, cudaStream_t stream,
                        bool clusters) {
  const PlanParams p = params_of(source, plan);
  if (is_few(plan)) return launch_plan_few(p, stream);
  return is_small(plan, clusters) ? launch_small(p, stream) : launch_big(p, stream);
}

}  // namespace moec::cuda
