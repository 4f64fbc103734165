// SPDX-License-Identifier: Apache-2.0
// Counters from which the clusters of a row GEMM take their work, one for each GEMM of a call.
#pragma once

#include <cuda_runtime.h>

namespace moec::cuda {

constexpr int kWorkCounters = 4;
cudaError_t clear_work_counters(unsigned* counters, cudaStream_t stream);

}  // namespace moec::cuda
