// SPDX-License-Identifier: Apache-2.0
// A CTA for each block of tokens and each rank counts the tokens that visit the rank. Another adds
// what the blocks before its own have, numbers its visits and places them. By weight, one CTA of
// each rank finds between the two which visits are the heaviest, and counts those of each block.
#include <cub/block/block_reduce.cuh>

#include "backend/cuda/device/op.cuh"
#include "backend/cuda/plan/plan_select.cuh"
#include "backend/cuda/ranks/plan_routes.h"
#include "math/router.h"

namespace moec::cuda {
namespace {

static_assert(kPlanThreads == PlanRoutes::kBlock);

constexpr int kHeld = 32;  // keys of a thread that it reads once

// By weight: the cut of a rank, and of each of its blocks the visits above and at its threshold.
struct Heaviest {
  Cut* cuts;              // [N]
  int32_t *above, *ties;  // [N,blocks]

  __host__ __device__ explicit Heaviest(const PlanRoutes& p)
      : cuts(reinterpret_cast<Cut*>(p.counts)),
        above(p.counts + 2 * p.num_ranks),
        ties(above + p.num_ranks * PlanRoutes::blocks(p.num_tokens)) {}
};
static_assert(sizeof(Cut) == 2 * sizeof(int32_t));

__device__ __forceinline__ uint32_t* keys_of(const PlanRoutes& p, int rank) {
  return static_cast<uint32_t*>(p.keys) + rank * p.num_tokens;
}

// By weight, keys are kept: 0 is no visit.
__global__ __launch_bounds__(kPlanThreads) void count_kernel(const PlanRoutes p) {
  begin_kernel();
  const int rank = int(blockIdx.y);
  const int64_t t = global_thread();
  const bool visits = t < p.num_tokens && p.visits(t, rank);
  if (p.by_weight && t < p.num_tokens)
    keys_of(p, rank)[t] = visits ? math::choice_key(p.weight_at(t, rank)) : 0;
  const int count = __syncthreads_count(visits);
  int32_t* const counts = p.by_weight ? Heaviest(p).above : p.counts;
  if (threadIdx.x == 0) counts[rank * int64_t(gridDim.x) + blockIdx.x] = count;
}

// Of counts [begin, end), for all threads.
__device__ int32_t sum_of(const int32_t* counts, int64_t begin, int64_t end) {
  using Reduce = cub::BlockReduce<int32_t, kPlanThreads>;
  __shared__ Reduce::TempStorage storage;
  __shared__ int32_t shared_sum;
  int32_t sum = 0;
  for (int64_t i = begin + threadIdx.x; i < end; i += kPlanThreads) sum += counts[i];
  sum = Reduce(storage).Sum(sum);
  if (threadIdx.x == 0) shared_sum = sum;
  __syncthreads();
  sum = shared_sum;
  __syncthreads();  // the next call writes there
  return sum;
}

// Where all have room nothing is above the cut, 0, but the keys of visits.
__global__ __launch_bounds__(kPlanThreads) void cut_kernel(const PlanRoutes p) {
  begin_kernel();
  const int rank = int(blockIdx.x);
  const int64_t blocks = PlanRoutes::blocks(p.num_tokens), own = rank * blocks;
  const Heaviest heaviest(p);
  const int32_t wanted = sum_of(heaviest.above, own, own + blocks);
  if (threadIdx.x == 0) p.wanted[rank] = wanted;
  const bool drops = wanted > p.most;
  if (!drops) {
    if (threadIdx.x == 0) heaviest.cuts[rank] = {0, 0};
    for (int64_t block = threadIdx.x; block < blocks; block += kPlanThreads)
      heaviest.ties[own + block] = 0;
    return;
  }
  const uint32_t* const keys = keys_of(p, rank);
  uint32_t held[kHeld];
#pragma unroll
  for (int i = 0; i < kHeld; ++i) {
    const int64_t t = threadIdx.x + int64_t(i) * kPlanThreads;
    held[i] = t < p.num_tokens ? keys[t] : 0;
  }
  const Cut cut = find_cut(int32_t(p.most), [&](auto body) {
#pragma unroll
    for (int i = 0; i < kHeld; ++i)
      if (held[i]) body(held[i]);
    for (int64_t t = threadIdx.x + int64_t(kHeld) * kPlanThreads; t < p.num_tokens;
         t += kPlanThreads)
      if (const uint32_t key = keys[t]) body(key);
  });
  if (threadIdx.x == 0) heaviest.cuts[rank] = cut;
  constexpr int kWarp = 32;
  for (int64_t block = threadIdx.x / kWarp; block < blocks; block += kPlanThreads / kWarp) {
    int32_t above = 0, ties = 0;
#pragma unroll
    for (int i = 0; i < kPlanThreads / kWarp; ++i) {
      const int64_t t = block * kPlanThreads + i * kWarp + threadIdx.x % kWarp;
      const uint32_t key = t < p.num_tokens ? keys[t] : 0;
      above += key > cut.threshold;
      ties += key == cut.threshold;
    }
    above = __reduce_add_sync(~0u, above);
    ties = __reduce_add_sync(~0u, ties);
    if (threadIdx.x % kWarp) continue;
    heaviest.above[own + block] = above;
    heaviest.ties[own + block] = ties;
  }
}

// Of the tokens before `before`, where the CTA's own block begins there.
struct Visits {
  int32_t before, all;
};
__device__ Visits number(bool visits, const int32_t* counts, int64_t begin, int64_t end) {
  __shared__ PlanScan<int32_t>::TempStorage scan;
  Visits found;
  PlanScan<int32_t>(scan).ExclusiveSum(int32_t(visits), found.before, found.all);
  const int32_t blocks_before = sum_of(counts, begin, end);
  return {found.before + blocks_before, found.all + blocks_before};
}

__global__ __launch_bounds__(kPlanThreads) void place_kernel(const PlanRoutes p) {
  begin_kernel();
  const int rank = int(blockIdx.y);
  const int64_t t = global_thread(), blocks = gridDim.x, own = rank * blocks;
  const bool exists = t < p.num_tokens, visits = exists && p.visits(t, rank);
  const int64_t end = own + blockIdx.x;
  const int32_t* const counts = p.by_weight ? Heaviest(p).above : p.counts;
  const int64_t first = p.stride ? rank * p.stride : sum_of(counts, 0, own);
  int32_t wanted;
  int64_t place = -1;
  if (p.by_weight) {
    const Heaviest heaviest(p);
    const Cut cut = heaviest.cuts[rank];
    const uint32_t key = visits ? keys_of(p, rank)[t] : 0;
    const bool above = visits && key > cut.threshold, tie = visits && key == cut.threshold;
    const int32_t heavier = number(above, heaviest.above, own, end).before;
    const int32_t equal = number(tie, heaviest.ties, own, end).before;
    if (above || (tie && equal < cut.ties)) place = first + heavier + min(equal, cut.ties);
    wanted = p.wanted[rank];
  } else {
    const Visits found = number(visits, counts, own, end);
    if (visits && found.before < p.most) place = first + found.before;
    wanted = found.all;
  }
  if (visits) p.settle(t, rank, int32_t(place));
  if (exists && rank == 0)
    for (int64_t slot = t * p.top_k; slot < (t + 1) * p.top_k; ++slot)
      if (!p.is_expert(p.id(slot))) p.slot_row[slot] = -1;
  if (blockIdx.x + 1 < blocks) return;
  if (!p.by_weight && threadIdx.x == 0) p.wanted[rank] = wanted;
  for (int64_t i = min(int64_t(wanted), p.most) + threadIdx.x; i < p.stride; i += kPlanThreads)
    p.token[first + i] = -1;
}

__global__ __launch_bounds__(kPlanThreads) void index_kernel(const IndexSums index) {
  begin_kernel();
  const int64_t t = global_thread();
  if (t < index.num_tokens) index(t);
}

}  // namespace

void plan_routes(const Op& op, const PlanRoutes& p) {
  const auto blocks = unsigned(PlanRoutes::blocks(p.num_tokens)), ranks = unsigned(p.num_ranks);
  if (blocks > 1 || !p.stride || p.by_weight)
    run(op, "visits of ranks", count_kernel, dim3(blocks, ranks), kPlanThreads, 0, p);
  if (p.by_weight) run(op, "the heaviest visits", cut_kernel, dim3(ranks), kPlanThreads, 0, p);
  run(op, "places of visits", place_kernel, dim3(blocks, ranks), kPlanThreads, 0, p);
  run(op, "places of tokens", index_kernel, dim3(blocks), kPlanThreads, 0, p.index_sums());
}

}  // namespace moec::cuda
