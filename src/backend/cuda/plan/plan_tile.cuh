// SPDX-License-Identifier: Apache-2.0
// One CTA sorts one tile of assignments by expert, stably and without atomics on data: each warp
// owns a strip of 32 * kRounds; lanes with the same expert find each other by ballots, their order
// is the lane order, and one of them advances the warp's own counter of that expert. The
// sorted tile goes through shared memory, so that rows of an expert are written side by side.
// cub::BlockRadixRankMatch ranks likewise, but fixes the number of bits when it is compiled, and
// its counters with it: 68 KiB for 1024 experts, however few there are.
#pragma once

#include <cuda_runtime.h>

#include "backend/args.h"
#include "backend/cuda/device/warp.cuh"
#include "core/dtype.h"
#include "math/slots.h"

namespace moec::cuda {

inline constexpr int kPlanThreads = 512, kPlanWarps = kPlanThreads / 32;
inline constexpr int kMaxSlice = 1024;  // local experts that one pass sorts

struct PlanParams {
  PlanView plan;
  Array ids;
  const float* routing_weights;  // null = 1
  int64_t assignments;           // T*K
  int tiles;                     // of one CTA
  int begin, experts;            // the slice: local experts [begin, begin + experts)
  int32_t* block_counts;         // [blocks, stride()]
  int32_t* list;          // [T*K] or null: instead of rows, the assignments of each expert ...
  int32_t* list_offsets;  // [num_local + 1] ... and where they start, instead of group_offsets

  uint64_t top_k_inverse;  // ceil(2^top_k_shift / K), below 2^33
  int top_k_shift;         // 31 + ceil(log2 K): exact for what is below 2^31

  void set_top_k(int top_k) {
    top_k_shift = 31;
    while ((int64_t(1) << (top_k_shift - 31)) < top_k) ++top_k_shift;
    top_k_inverse = ((uint64_t(1) << top_k_shift) + uint64_t(top_k) - 1) / uint64_t(top_k);
  }
  __device__ uint32_t token_of(uint32_t assignment) const {
    return uint32_t(assignment * top_k_inverse >> top_k_shift);
  }

  __host__ __device__ int stride() const { return (experts + 3) / 4 * 4; }
  __device__ bool first_slice() const { return begin == 0; }
  __device__ int bits() const { return 32 - __clz(experts - 1); }  // of a local expert
  // Rows of an expert with `count` assignments. Dropping by weight sees all of them first.
  __device__ int kept(int count) const {
    const bool bounded = plan.drop != MOEC_DROP_NONE;
    return bounded ? int(min(int64_t(count), plan.kept_rows())) : count;
  }
  __device__ int padded(int count) const {
    return plan.align == 1 ? count : (count + plan.align - 1) / plan.align * plan.align;
  }
};

inline constexpr int kFewAssignments = 32;
cudaError_t launch_plan_few(const PlanParams& p, cudaStream_t stream);  // plan_few.cu

// same[r]: lanes with the same value[r], which is negative or has `bits` bits. One ballot a bit:
// match_any takes a turn for each different value.
template <int kCount>
__device__ inline void same_lanes(const int (&value)[kCount], int bits, unsigned (&same)[kCount]) {
#pragma unroll
  for (int r = 0; r < kCount; ++r) same[r] = kAllLanes;
#pragma unroll 2
  for (int bit = 0; bit < bits; ++bit) {
#pragma unroll
    for (int r = 0; r < kCount; ++r) {
      const bool set = value[r] >> bit & 1;
      const unsigned lanes = __ballot_sync(kAllLanes, set);
      same[r] &= set ? lanes : ~lanes;
    }
  }
  bool missing = false;
#pragma unroll
  for (int r = 0; r < kCount; ++r) missing |= value[r] < 0;
  if (!__any_sync(kAllLanes, missing)) return;
#pragma unroll
  for (int r = 0; r < kCount; ++r) {
    const unsigned lanes = __ballot_sync(kAllLanes, value[r] < 0);
    same[r] &= value[r] < 0 ? lanes : ~lanes;
  }
}

// Inclusive sum over the CTA, and the sum of all; `sums` is shared memory of kPlanWarps, free again
// after the caller's next barrier.
__device__ inline uint64_t block_scan(uint64_t value, uint64_t* sums, uint64_t& all) {
  for (int step = 1; step < 32; step *= 2) {
    const uint64_t other = __shfl_up_sync(kAllLanes, value, step);
    if (lane_id() >= step) value += other;
  }
  if (lane_id() == 31) sums[threadIdx.x / 32] = value;
  __syncthreads();
  all = 0;
#pragma unroll
  for (int w = 0; w < kPlanWarps; ++w) {
    if (w < int(threadIdx.x / 32)) value += sums[w];
    all += sums[w];
  }
  return value;
}

template <int kRounds>
struct PlanTile {
  static constexpr int kSize = kPlanThreads * kRounds;

  // ---- shared memory
  uint16_t* counters;    // [warps][stride]
  int32_t* next;         // [experts] position of the expert's next assignment, over all tiles
  int32_t* start;        // [experts] first row (or list entry) of the expert
  int32_t* local_start;  // [experts] of the sorted tile
  int32_t* totals;       // [stride] assignments of the tile
  uint32_t* entries;     // [kSize] sorted: expert << 16 | index in the tile
  float* entry_weights;  // [kSize]
  // ---- this thread's assignments
  int id[kRounds], local[kRounds], rank[kRounds];
  float weight[kRounds];

  __host__ __device__ static int shared_bytes(int experts) {
    const int stride = (experts + 3) / 4 * 4;
    return kPlanWarps * stride * 2 + stride * 4 * 4 + kSize * 8;
  }
  __device__ PlanTile(const PlanParams& p, void* shared) {
    next = static_cast<int32_t*>(shared);
    start = next + p.stride();
    local_start = start + p.stride();
    totals = local_start + p.stride();
    entries = reinterpret_cast<uint32_t*>(totals + p.stride());
    entry_weights = reinterpret_cast<float*>(entries + kSize);
    counters = reinterpret_cast<uint16_t*>(entry_weights + kSize);
  }

  __device__ static int warp() { return threadIdx.x / 32; }
  __device__ int64_t index(int64_t first, int round) const {
    return first + (warp() * kRounds + round) * 32 + lane_id();
  }

  // Assignments [first, first + kSize) into registers. All loads are under way before the first is
  // looked at.
  __device__ void load(const PlanParams& p, int64_t first, bool with_weights) {
    const int64_t columns = int64_t(p.plan.num_experts) + p.plan.num_zero;
    int64_t raw[kRounds];
    const auto load_all = [&](const auto* ids) {
#pragma unroll
      for (int r = 0; r < kRounds; ++r) {
        raw[r] = index(first, r) < p.assignments ? int64_t(ids[index(first, r)]) : -1;
      }
    };
    if (p.ids.dtype == MOEC_I64) {
      load_all(static_cast<const int64_t*>(p.ids.data));
    } else {
      load_all(static_cast<const int32_t*>(p.ids.data));
    }
#pragma unroll
    for (int r = 0; r < kRounds; ++r) {
      const int64_t i = index(first, r);
      weight[r] =
          i < p.assignments && with_weights && p.routing_weights ? p.routing_weights[i] : 1.0f;
    }
#pragma unroll
    for (int r = 0; r < kRounds; ++r) {
      id[r] = math::valid_id(raw[r], columns);
      const unsigned at = unsigned(id[r]) - unsigned(p.plan.expert_begin + p.begin);
      local[r] = id[r] >= 0 && at < unsigned(p.experts) ? int(at) : -1;
    }
  }

  // Before count(); this warp's counters only.
  __device__ void clear(const PlanParams& p) {
    uint32_t* const mine = reinterpret_cast<uint32_t*>(counters) + warp() * (p.stride() / 2);
    for_columns(p.stride() / 2, [&](int i) { mine[i] = 0; });
    __syncwarp();
  }

  // Counters, ranks within the strip, and totals of the tile.
  __device__ void count(const PlanParams& p) {
    uint32_t* const words = reinterpret_cast<uint32_t*>(counters);
    const int pairs = p.stride() / 2;
    uint16_t* const mine = counters + warp() * p.stride();
    unsigned lanes[kRounds];
    same_lanes(local, p.bits(), lanes);
#pragma unroll
    for (int r = 0; r < kRounds; ++r) {
      const unsigned same = lanes[r];
      const int before = local[r] >= 0 ? mine[local[r]] : 0;
      rank[r] = before + __popc(same & ((1u << lane_id()) - 1));
      __syncwarp();
      if (local[r] >= 0 && lane_id() == __ffs(same) - 1)
        mine[local[r]] = uint16_t(before + __popc(same));
      __syncwarp();
    }
    __syncthreads();
    for (int pair = threadIdx.x; pair < pairs; pair += kPlanThreads) {  // two experts at a time
      uint32_t counts[kPlanWarps], sum = 0;
#pragma unroll
      for (int w = 0; w < kPlanWarps; ++w) counts[w] = words[w * pairs + pair];
#pragma unroll
      for (int w = 0; w < kPlanWarps; ++w) {
        words[w * pairs + pair] = sum;
        sum += counts[w];
      }
      totals[2 * pair] = int(sum & 0xffffu);
      totals[2 * pair + 1] = int(sum >> 16);
    }
    __syncthreads();
  }

  // local_start[e] and the number of local entries, for a tile whose `next` is known.
  __device__ int sort_totals(const PlanParams& p, uint64_t* sums);

  // Writes the tile once `next`, `start` and `local_start` are known; `sorted` entries are local.
  __device__ void write(const PlanParams& p, int64_t first, int sorted) {
    const PlanView& plan = p.plan;
#pragma unroll
    for (int r = 0; r < kRounds; ++r) {
      const int64_t i = index(first, r);
      int row = -1;
      if (local[r] >= 0) {
        const int in_tile = counters[warp() * p.stride() + local[r]] + rank[r];
        const int position = next[local[r]] + in_tile, at = local_start[local[r]] + in_tile;
        entries[at] = uint32_t(local[r]) << 16 | uint32_t(i - first);
        entry_weights[at] = weight[r];
        if (!p.list && (plan.drop == MOEC_DROP_NONE || position < plan.kept_rows()))
          row = start[local[r]] + position;
      }
      if (i >= p.assignments) continue;
      if (local[r] >= 0 || p.first_slice()) plan.assignment_row[i] = row;
      if (!p.first_slice()) continue;
      plan.expert_ids[i] = id[r];
      plan.routing_weights[i] = weight[r];
    }
    __syncthreads();
    for (int j = threadIdx.x; j < sorted; j += kPlanThreads) {
      const int e = int(entries[j] >> 16), position = next[e] + j - local_start[e];
      const uint32_t i = uint32_t(first) + (entries[j] & 0xffffu);  // T*K < 2^31
      const int row = start[e] + position;
      if (p.list) {
        p.list[row] = int32_t(i);
      } else if (plan.drop == MOEC_DROP_NONE || position < plan.kept_rows()) {
        const uint32_t token = p.token_of(i);
        plan.row_token[row] = int32_t(token);
        plan.row_slot[row] = int32_t(i - token * uint32_t(plan.top_k));
        plan.row_weight[row] = entry_weights[j];
      }
    }
  }
};

template <int kRounds>
__device__ int PlanTile<kRounds>::sort_totals(const PlanParams& p, uint64_t* sums) {
  uint64_t base = 0;
  for (int first = 0; first < p.experts; first += kPlanThreads) {
    const int e = first + threadIdx.x, count = e < p.experts ? totals[e] : 0;
    uint64_t all;
    const uint64_t end = base + block_scan(uint64_t(count), sums, all);
    if (e < p.experts) local_start[e] = int(end) - count;
    base += all;
    __syncthreads();
  }
  return int(base);
}

}  // namespace moec::cuda
