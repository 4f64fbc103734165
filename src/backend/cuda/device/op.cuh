// SPDX-License-Identifier: Apache-2.0
// Launches of one call: checked and counted.
#pragma once

#include "backend/cuda/device/launch.cuh"
#include "backend/cuda/device/op.h"
#include "backend/cuda/device/ptx.cuh"

namespace moec::cuda {

constexpr int kBlockThreads = 256;  // of a kernel that has no reason for another number

// Kernels started so must call begin_kernel() before they touch memory that others write.
template <typename... Params, typename... Args>
void run(const Op& op, const char* what, void (*kernel)(Params...), dim3 grid, int threads,
         int64_t shared_bytes, Args&&... args) {
  check(launch(kernel, grid, threads, int(shared_bytes), op.stream, static_cast<Args&&>(args)...),
        what);
  op.count(1);
}

__device__ __forceinline__ void begin_kernel() {
  ptx::grid_dependency_wait();
  ptx::grid_dependency_launch();
}

// CTAs for `items` pieces of work of which one CTA does `each`; a loop takes what is left.
inline dim3 grid_for(int64_t items, int64_t each, int64_t most) {
  const int64_t blocks = (items + each - 1) / each;
  return dim3(unsigned(blocks < 1 ? 1 : blocks < most ? blocks : most));
}

__device__ __forceinline__ int64_t global_thread() {
  return int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
}
__device__ __forceinline__ int64_t global_threads() {
  return int64_t(gridDim.x) * blockDim.x;
}

}  // namespace moec::cuda
