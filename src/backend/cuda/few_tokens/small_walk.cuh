// SPDX-License-Identifier: Apache-2.0
// Which weights a CTA of the small-token kernels reads. An item is eight features (a block) of one
// expert and the few rows (tokens) that they meet, at most kRows.
//
//   up     eight features of gate and of up. All items lie in one row, cut into equal shares: a CTA
//          reads its share of the bytes, whatever the routing
//   down   eight columns of y. A CTA owns columns and walks all experts with rows
// An item is cut along k into chunks, and the chunks of all items are dealt to the warps in turn.
#pragma once

#include "backend/cuda/device/ptx.cuh"

namespace moec::cuda {

constexpr int kSmallWarps = 8, kSmallThreads = 32 * kSmallWarps;
constexpr int kMaxSmallExperts = 1024;

struct SmallItem {
  int expert, row_begin, rows;  // 1 to kRows rows
  int block;
};

template <int kRows>
__device__ __forceinline__ int row_parts(int rows) {
  return (rows + kRows - 1) / kRows;
}

// An expert with rows.
struct HitExpert {
  int expert, row_begin, rows;
  int first_part;  // parts of kRows rows before it
};

// The experts with rows, in order, and one more entry whose first_part is the sum of all parts.
// Reads offsets in global memory; called by all threads. Returns how many there are.
template <int kRows>
__device__ int find_hits(const int32_t* offsets, int num_experts, HitExpert* hits) {
  __shared__ int2 of_warp[kSmallWarps];
  const int warp = threadIdx.x / 32, lane = threadIdx.x & 31;
  int found = 0, parts = 0;
  for (int first = 0; first < num_experts; first += kSmallThreads) {
    const int e = first + threadIdx.x;
    const int begin = e < num_experts ? __ldcg(offsets + e) : 0;
    const int rows = e < num_experts ? __ldcg(offsets + e + 1) - begin : 0;
    const unsigned with_rows = __ballot_sync(~0u, rows > 0);
    int before = row_parts<kRows>(rows);  // inclusive sum over the warp
    for (int step = 1; step < 32; step *= 2) {
      const int other = __shfl_up_sync(~0u, before, step);
      if (lane >= step) before += other;
    }
    if (lane == 31) of_warp[warp] = {__popc(with_rows), before};
    __syncthreads();
    int place = found + __popc(with_rows & ((1u << lane) - 1));
    before += parts - row_parts<kRows>(rows);
    for (int w = 0; w < kSmallWarps; ++w) {
      const int2 other = of_warp[w];
      if (w < warp) place += other.x, before += other.y;
      found += other.x, parts += other.y;
    }
    if (rows > 0) hits[place] = {e, begin, rows, before};
    __syncthreads();
  }
  if (threadIdx.x == 0) hits[found] = {0, 0, 0, parts};
  __syncthreads();
  return found;
}

template <int kRows>
class ItemWalk {
 public:
  // blocks: of one expert. shared_out: every CTA takes a share; else all of them.
  __device__ ItemWalk(const HitExpert* hits, int num_hits, int blocks, bool shared_out)
      : hit_(hits), blocks_(blocks) {
    const int64_t all = int64_t(hits[num_hits].first_part) * blocks;
    const int begin = shared_out ? int(all * blockIdx.x / gridDim.x) : 0;
    items_ = (shared_out ? int(all * (blockIdx.x + 1) / gridDim.x) : int(all)) - begin;
    if (items_ == 0) return;
    int low = 0, high = num_hits;  // hits[low] begins at or before the first item
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      (hits[middle].first_part * blocks <= begin ? low : high) = middle;
    }
    hit_ += low;
    index_ = begin - hit_->first_part * blocks;
  }

  __device__ int items() const { return items_; }  // from here on
  __device__ bool next(SmallItem& item) {
    if (items_ == 0) return false;
    const HitExpert hit = *hit_;
    const int parts = row_parts<kRows>(hit.rows);
    item.expert = hit.expert;
    item.block = parts == 1 ? index_ : index_ / parts;
    const int first = (index_ - item.block * parts) * kRows;
    item.row_begin = hit.row_begin + first;
    item.rows = min(kRows, hit.rows - first);
    --items_;
    if (++index_ == parts * blocks_) ++hit_, index_ = 0;
    return true;
  }

 private:
  const HitExpert* hit_;
  int blocks_, items_, index_ = 0;  // of the expert
};

}  // namespace moec::cuda
