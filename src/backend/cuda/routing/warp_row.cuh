// SPDX-License-Identifier: Apache-2.0
// What routers ask a warp: sums and maxima of a row, the slots of a token, the best of a row.
#pragma once

#include <cub/warp/warp_reduce.cuh>
#include <cuda/functional>

#include "backend/cuda/device/warp.cuh"
#include "math/router.h"

namespace moec::cuda {

__device__ inline float row_sum(const float* values, int lanes) {
  float partial = 0.0f;
  for_columns(lanes, [&](int i) { partial += values[i]; });
  return warp_sum(partial);
}
__device__ inline float warp_max(float best) {
  using Reduce = cub::WarpReduce<float>;
  Reduce::TempStorage none;  // empty: a whole warp shuffles
  return __shfl_sync(kAllLanes, Reduce(none).Reduce(best, ::cuda::maximum<>()), 0);
}
__device__ inline float row_max(const float* values, int lanes) {  // ignores NaN
  float best = -__builtin_inff();
  for_columns(lanes, [&](int i) { best = values[i] > best ? values[i] : best; });
  return warp_max(best);
}

// The K slots of a token by a warp: lane k mod 32 sees slot k.
struct WarpSlots {
  int32_t count;
  template <class Body>
  __device__ void each(Body body) const {
    for_columns(count, body);
  }
  template <class Value>
  __device__ float sum(Value value) const {
    float total = 0.0f;
    for (int first = 0; first < count; first += 32) {
      const float mine = first + lane_id() < count ? value(first + lane_id()) : 0.0f;
      for (int k = 0; k < min(32, count - first); ++k) total += __shfl_sync(kAllLanes, mine, k);
    }
    return total;
  }
  template <class Value>
  __device__ float largest(Value value) const {
    float best = -__builtin_inff();
    for_columns(count, [&](int k) {
      const float v = value(k);
      best = v > best ? v : best;
    });
    return warp_max(best);
  }
};

// Largest of the lanes' keys (math::rank_key), in every lane. Two instructions; a 64-bit
// cub::WarpReduce takes five rounds of two shuffles.
__device__ inline int64_t warp_max_key(int64_t key) {
  const int high = int(key >> 32), best = __reduce_max_sync(kAllLanes, high);
  const unsigned low = __reduce_max_sync(kAllLanes, high == best ? unsigned(key) : 0u);
  return int64_t(uint64_t(unsigned(best)) << 32 | low);
}
// This lane's largest key below `below` of values [begin, end); kNoKey when there is none.
__device__ inline int64_t lane_next_key(const float* values, int begin, int end, int64_t below) {
  int64_t best = math::kNoKey;
  for (int i = begin + lane_id(); i < end; i += kRowLanes) {
    const int64_t key = math::rank_key(values[i], i);
    best = key < below && key > best ? key : best;
  }
  return best;
}

// The first `count` ids by value; -1 for those that are not selectable. Lane 0 writes them. Count
// and columns are known at run time only, so none of CUB's sorts fits.
__device__ inline void take_best(const float* values, int columns, int count, int32_t* ids) {
  int64_t mine = lane_next_key(values, 0, columns, INT64_MAX);
  for (int k = 0; k < count; ++k) {
    const int64_t key = warp_max_key(mine);
    if (lane_id() == 0) ids[k] = math::is_selectable_key(key) ? math::key_id(key) : -1;
    if (key != math::kNoKey && mine == key) mine = lane_next_key(values, 0, columns, key);
  }
  __syncwarp();
}

}  // namespace moec::cuda
