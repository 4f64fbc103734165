// SPDX-License-Identifier: Apache-2.0
// What follows the gradient of a coded down projection: rows of `out` hold d_act; see
// epilogue_gradient.cuh for what they and d_pre hold behind this.
#pragma once

#include "backend/cuda/device/launch.cuh"
#include "backend/cuda/sm90/epilogue_gradient.cuh"

namespace moec::cuda {

// A block takes 16 rows of one tile of features at a time.
template <typename Element, typename Activation>
__global__ __launch_bounds__(kGroupThreads) void gradient_rows_kernel(
    const __grid_constant__ RowGemmParams p) {
  ptx::grid_dependency_wait();
  ptx::grid_dependency_launch();
  const int rows = p.group_offsets[p.num_experts];
  for (int row = int(blockIdx.x) * kRowUnit; row < rows; row += int(gridDim.x) * kRowUnit) {
    const RowTile tile = {0, row, min(kRowUnit, rows - row), int(blockIdx.y), false};
    GradientFinisher<Element, Activation, false>::run_slot(p, tile, int(threadIdx.x));
  }
}

template <typename Element, typename Activation>
cudaError_t launch_gradient_rows(const RowGemmParams& params, int multiprocessors,
                                 cudaStream_t stream) {
  constexpr int kBlocksOfEach = 4;  // multiprocessor, and tile of features
  const int64_t slots = (params.max_rows + kRowUnit - 1) / kRowUnit;
  const dim3 grid(unsigned(std::min<int64_t>(slots, kBlocksOfEach * multiprocessors)),
                  unsigned(params.feature_tiles));
  return launch(gradient_rows_kernel<Element, Activation>, grid, kGroupThreads, 0, stream, params);
}

}  // namespace moec::cuda
