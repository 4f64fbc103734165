// SPDX-License-Identifier: Apache-2.0
#include "backend/cuda/sm90/work_counters.h"

#include "backend/cuda/device/launch.cuh"
#include "backend/cuda/device/ptx.cuh"

namespace moec::cuda {
namespace {

constexpr int kThreads = 256;

// The next kernel may come up at once. It must not be kAll (early.h): it waits for this one.
__global__ void clear_kernel(WorkCounters* counters) {
  ptx::grid_dependency_launch();
  ptx::grid_dependency_wait();
  unsigned* const words = reinterpret_cast<unsigned*>(counters);
  for (int i = threadIdx.x; i < int(sizeof(WorkCounters) / 4); i += kThreads) words[i] = 0;
}

}  // namespace

cudaError_t clear_work_counters(WorkCounters* counters, cudaStream_t stream) {
  return launch(clear_kernel, dim3(1), kThreads, 0, stream, counters);
}

}  // namespace moec::cuda
