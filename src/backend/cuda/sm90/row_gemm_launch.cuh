// SPDX-License-Identifier: Apache-2.0
// Choose among the instances of one row GEMM: element type and orientation of the weights.
#pragma once

#include "backend/cuda/device/launch.cuh"
#include "backend/cuda/sm90/row_gemm.cuh"
#include "backend/cuda/sm90/row_gemm_kernels.h"

namespace moec::cuda {

template <typename Config>
cudaError_t launch_config(const RowGemmParams& params, int grid, cudaStream_t stream) {
  static std::atomic<uint64_t> allowed;
  const auto kernel = row_gemm_kernel<Config>;
  if (cudaError_t error = allow_shared_memory(kernel, Config::kSharedBytes, allowed)) return error;
  return launch(kernel, dim3(grid), Config::kAllThreads, Config::kSharedBytes, stream, params);
}

template <typename Element, bool kGather, typename Epilogue>
cudaError_t launch_major(const RowGemmParams& params, bool mn_major, int grid,
                         cudaStream_t stream) {
  return mn_major ? launch_config<RowGemmConfig<Element, Major::kMN, kGather, Epilogue>>(
                        params, grid, stream)
                  : launch_config<RowGemmConfig<Element, Major::kK, kGather, Epilogue>>(
                        params, grid, stream);
}

}  // namespace moec::cuda
