// SPDX-License-Identifier: Apache-2.0
// One warp works on one row of values. Sums are made of 32 partial sums (lane = column mod 32)
// that are then halved: the order of the CPU backend, so that both give the same bits.
// cub::WarpReduce adds neighbours first, so its sums of floats have other bits.
#pragma once

#include <cuda_runtime.h>

namespace moec::cuda {

inline constexpr unsigned kAllLanes = ~0u;
inline constexpr int kRowLanes = 32;

__host__ __device__ inline int padded_columns(int columns) {
  return (columns + kRowLanes - 1) / kRowLanes * kRowLanes;
}
__device__ __forceinline__ int lane_id() {
  return threadIdx.x & 31;
}

// body(i) for the columns of this lane, ascending.
template <class Body>
__device__ __forceinline__ void for_columns(int count, Body body) {
  for (int i = lane_id(); i < count; i += kRowLanes) body(i);
}

__device__ inline float warp_sum(float partial) {
  for (int width = 16; width > 0; width /= 2)
    partial += __shfl_down_sync(kAllLanes, partial, width);
  return __shfl_sync(kAllLanes, partial, 0);
}
__device__ inline int warp_sum(int value) {
  return __reduce_add_sync(kAllLanes, value);
}

}  // namespace moec::cuda
