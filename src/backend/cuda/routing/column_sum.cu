// SPDX-License-Identifier: Apache-2.0
#include "backend/cuda/routing/column_sum.h"

#include "backend/cuda/device/op.cuh"
#include "core/dtype.h"

namespace moec::cuda {
namespace {

__global__ void store_sum_kernel(const float* partial, int64_t chunks, int64_t width, const Array d,
                                 bool accumulate) {
  begin_kernel();
  for (int64_t i = global_thread(); i < width; i += global_threads()) {
    float sum = accumulate ? load_real(d.data, d.dtype, i) : 0.0f;
    for (int64_t chunk = 0; chunk < chunks; ++chunk) sum += partial[chunk * width + i];
    store_real(d.data, d.dtype, i, sum);
  }
}

}  // namespace

void store_sum(const Op& op, const float* partial, int64_t chunks, int64_t width, const Array& d,
               bool accumulate) {
  constexpr int kThreads = 128;
  run(op, "sum over tokens", store_sum_kernel, grid_for(width, kThreads, 1024), kThreads, 0,
      partial, chunks, width, d, accumulate);
}

}  // namespace moec::cuda
