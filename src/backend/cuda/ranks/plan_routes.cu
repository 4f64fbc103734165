// SPDX-License-Identifier: Apache-2.0
// A CTA for each block of tokens and each rank counts the tokens that visit the rank. Another adds
// what the blocks before its own have, numbers its visits and places them. Where the lightest of a
// rank are dropped, one CTA finds and places the heaviest, after the others.
#include <cub/block/block_reduce.cuh>

#include "backend/cuda/device/op.cuh"
#include "backend/cuda/plan/plan_select.cuh"
#include "backend/cuda/ranks/plan_routes.h"
#include "math/router.h"

namespace moec::cuda {
namespace {

constexpr int kThreads = kPlanThreads;
static_assert(kThreads == PlanRoutes::kBlock);

__device__ __forceinline__ uint32_t* keys_of(const PlanRoutes& p, int rank) {
  return static_cast<uint32_t*>(p.keys) + rank * p.num_tokens;
}

// By weight, keys are kept: 0 is no visit.
__global__ __launch_bounds__(kThreads) void count_kernel(const PlanRoutes p) {
  begin_kernel();
  const int rank = int(blockIdx.y);
  const int64_t t = global_thread();
  const bool visits = t < p.num_tokens && p.visits(t, rank);
  if (p.by_weight && t < p.num_tokens)
    keys_of(p, rank)[t] = visits ? math::choice_key(p.weight_at(t, rank)) : 0;
  const int count = __syncthreads_count(visits);
  if (threadIdx.x == 0) p.counts[rank * int64_t(gridDim.x) + blockIdx.x] = count;
}

// Of counts [begin, end), for all threads.
__device__ int32_t sum_of(const int32_t* counts, int64_t begin, int64_t end) {
  using Reduce = cub::BlockReduce<int32_t, kThreads>;
  __shared__ Reduce::TempStorage storage;
  __shared__ int32_t shared_sum;
  int32_t sum = 0;
  for (int64_t i = begin + threadIdx.x; i < end; i += kThreads) sum += counts[i];
  sum = Reduce(storage).Sum(sum);
  if (threadIdx.x == 0) shared_sum = sum;
  __syncthreads();
  sum = shared_sum;
  __syncthreads();  // the next call writes there
  return sum;
}

__global__ __launch_bounds__(kThreads) void place_kernel(const PlanRoutes p) {
  __shared__ PlanScan<int32_t>::TempStorage scan;
  begin_kernel();
  const int rank = int(blockIdx.y);
  const int64_t t = global_thread(), blocks = gridDim.x, own = rank * blocks;
  const bool exists = t < p.num_tokens, visits = exists && p.visits(t, rank);
  int32_t before, all;
  PlanScan<int32_t>(scan).ExclusiveSum(int32_t(visits), before, all);
  const int32_t blocks_before = sum_of(p.counts, own, own + blockIdx.x);
  before += blocks_before;
  int32_t wanted = blocks_before + all;
  if (p.by_weight) wanted += sum_of(p.counts, own + blockIdx.x + 1, own + blocks);
  const int64_t first = p.stride ? rank * p.stride : sum_of(p.counts, 0, own);

  const bool kept = before < p.most && !(p.by_weight && wanted > p.most);
  if (visits) p.settle(t, rank, kept ? int32_t(first + before) : -1);
  if (exists && rank == 0)
    for (int64_t slot = t * p.top_k; slot < (t + 1) * p.top_k; ++slot)
      if (!p.is_expert(p.id(slot))) p.slot_row[slot] = -1;
  if (blockIdx.x + 1 < blocks) return;
  if (threadIdx.x == 0) p.wanted[rank] = wanted;
  for (int64_t i = min(int64_t(wanted), p.most) + threadIdx.x; i < p.stride; i += kThreads)
    p.token[first + i] = -1;
}

__global__ __launch_bounds__(kThreads) void heaviest_kernel(const PlanRoutes p) {
  begin_kernel();
  const int rank = int(blockIdx.x);
  if (!p.drops_lightest(rank)) return;
  const uint32_t* const keys = keys_of(p, rank);
  const auto read = [&](int64_t t, uint32_t* key) {
    *key = keys[t];
    return *key != 0;
  };
  const Cut cut = find_cut(p.num_tokens, int32_t(p.most), read);
  visit_cut(p.num_tokens, cut, read,
            [&](int64_t t, int kept) { p.settle(t, rank, int32_t(rank * p.stride + kept)); });
}

__global__ __launch_bounds__(kThreads) void index_kernel(const IndexSums index) {
  begin_kernel();
  const int64_t t = global_thread();
  if (t < index.num_tokens) index(t);
}

}  // namespace

void plan_routes(const Op& op, const PlanRoutes& p) {
  const auto blocks = unsigned(PlanRoutes::blocks(p.num_tokens)), ranks = unsigned(p.num_ranks);
  if (blocks > 1 || !p.stride || p.by_weight)
    run(op, "visits of ranks", count_kernel, dim3(blocks, ranks), kThreads, 0, p);
  run(op, "places of visits", place_kernel, dim3(blocks, ranks), kThreads, 0, p);
  if (p.by_weight) run(op, "the heaviest visits", heaviest_kernel, dim3(ranks), kThreads, 0, p);
  run(op, "places of tokens", index_kernel, dim3(blocks), kThreads, 0, p.index_sums());
}

}  // namespace moec::cuda
