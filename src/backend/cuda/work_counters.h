// SPDX-License-Identifier: Apache-2.0
// Counters from which the CTAs of a GEMM take their work, one for each GEMM of a call, behind them
// those of the steps that they have made (pace.cuh), and of the finished tiles of each expert
// (row_gemm.h, `done`).
#pragma once

#include <cuda_runtime.h>

namespace moec::cuda {

constexpr int kGemmCounters = 6, kDoneCounters = 512;
constexpr int kWorkCounters = 2 * kGemmCounters + kDoneCounters;
inline unsigned* steps_of(unsigned* work_counter) {
  return work_counter + kGemmCounters;
}
inline unsigned* done_of(unsigned* counters) {
  return counters + 2 * kGemmCounters;
}
cudaError_t clear_work_counters(unsigned* counters, cudaStream_t stream);

}  // namespace moec::cuda
