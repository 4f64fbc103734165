// SPDX-License-Identifier: Apache-2.0
// What the CTAs of the GEMMs of a call count together, in device memory.
#pragma once

#include <cuda_runtime.h>

#include "backend/cuda/weights/decode_experts.h"

namespace moec::cuda {

struct WorkCounters {
  using Gemm = ProductCounters;
  static constexpr int kGemms = 6, kExperts = 512;
  Gemm gemms[kGemms];
  Gemm decoded;             // of the products of decoded experts, cleared before each
  unsigned done[kExperts];  // rows of finished tiles, by expert (row_gemm.h)
};
cudaError_t clear_work_counters(WorkCounters* counters, cudaStream_t stream);

}  // namespace moec::cuda
