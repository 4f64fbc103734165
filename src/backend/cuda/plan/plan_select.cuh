// SPDX-License-Identifier: Apache-2.0
// The `keep` best of n keyed items by one CTA: those above a threshold and the first `ties` equal
// to it, in the order of the items. The threshold is found one byte at a time from histograms
// (radix select): no copy, no sorting, exact. CUB selects on a whole device only, not in a CTA.
#pragma once

#include "backend/cuda/plan/plan_scan.cuh"

namespace moec::cuda {

struct Cut {
  uint32_t threshold;
  int32_t ties;
};

// each(body): body(key) for every key of this thread, of which there are the same ones each time.
// keep >= 1 of at least as many.
template <class Each>
__device__ Cut find_cut(int32_t keep, Each each) {
  __shared__ int32_t histogram[256];
  __shared__ PlanScan<int32_t>::TempStorage scan;
  __shared__ Cut cut;
  if (threadIdx.x == 0) cut = {0, keep};
  for (int shift = 24; shift >= 0; shift -= 8) {
    if (threadIdx.x < 256) histogram[threadIdx.x] = 0;
    __syncthreads();
    const uint32_t above = shift < 24 ? cut.threshold >> (shift + 8) : 0;
    each([&](uint32_t key) {
      if (shift >= 24 || key >> (shift + 8) == above) atomicAdd(&histogram[key >> shift & 255], 1);
    });
    __syncthreads();
    const int byte = 255 - int(threadIdx.x), ties = cut.ties;
    const int32_t here = byte >= 0 ? histogram[byte] : 0;
    int32_t start;
    PlanScan<int32_t>(scan).ExclusiveSum(here, start);
    if (byte >= 0 && start < ties && start + here >= ties) {  // one thread
      cut.threshold |= uint32_t(byte) << shift;
      cut.ties = ties - start;
    }
    __syncthreads();
  }
  return cut;
}

// read(i, &key): whether item i may be taken, and its key.
template <class Read>
__device__ Cut find_cut(int64_t n, int32_t keep, Read read) {
  return find_cut(keep, [&](auto body) {
    for (int64_t i = threadIdx.x; i < n; i += kPlanThreads) {
      uint32_t key;
      if (read(i, &key)) body(key);
    }
  });
}

// visit(i, rank) for the items that a cut takes.
template <class Read, class Visit>
__device__ void visit_cut(int64_t n, Cut cut, Read read, Visit visit) {
  __shared__ PlanScan<uint64_t>::TempStorage scan;
  uint64_t base = 0;  // items above the threshold << 32 | items equal to it
  for (int64_t first = 0; first < n; first += kPlanThreads) {
    const int64_t i = first + threadIdx.x;
    uint32_t key = 0;
    const bool reads = i < n && read(i, &key);
    const bool above = reads && key > cut.threshold, equal = reads && key == cut.threshold;
    const uint64_t mine = uint64_t(above) << 32 | uint64_t(equal);
    uint64_t before, all;
    PlanScan<uint64_t>(scan).ExclusiveSum(mine, before, all);
    before += base;
    const int ties = min(int(uint32_t(before)), cut.ties);
    if (above || (equal && int(uint32_t(before)) < cut.ties)) visit(i, int(before >> 32) + ties);
    base += all;
    __syncthreads();
  }
}

__device__ inline void put_row(const PlanView& plan, int64_t row, int32_t token, int32_t slot,
                               float weight) {
  plan.row_token[row] = token;
  plan.row_slot[row] = slot;
  plan.row_weight[row] = weight;
}

}  // namespace moec::cuda
