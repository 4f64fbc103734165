// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "backend/cuda/device/launch.cuh"
#include "backend/cuda/device/ptx.cuh"
#include "backend/cuda/sm90/ordered_rows.h"

namespace moec::cuda {
namespace {

constexpr int kThreads = 256, kCtas = 8;

__global__ __launch_bounds__(kThreads, kCtas) void ordered_rows_kernel(
    const __grid_constant__ OrderedRows p) {
  ptx::grid_dependency_wait();
  ptx::grid_dependency_launch();
  const int lane = int(threadIdx.x) & 31, runs = int(p.k / 8);
  const int warps = int(gridDim.x) * (kThreads / 32), num_rows = *p.num_rows;
  for (int row = int(blockIdx.x * kThreads + threadIdx.x) / 32; row < num_rows; row += warps) {
    const int token = p.row_token[row];
    const uint4* const from = reinterpret_cast<const uint4*>(static_cast<const char*>(p.x) +
                                                             2 * p.x_stride * max(token, 0));
    uint4* const to = static_cast<uint4*>(p.to) + int64_t(row) * runs;
#pragma unroll 4
    for (int i = lane; i < runs; i += 32) to[i] = token < 0 ? uint4{} : __ldg(from + i);
  }
}

}  // namespace

cudaError_t launch_ordered_rows(const OrderedRows& args, int multiprocessors, cudaStream_t stream) {
  constexpr int64_t kRowsOfCta = kThreads / 32;
  const int64_t ctas = std::min<int64_t>((args.max_rows + kRowsOfCta - 1) / kRowsOfCta,
                                         int64_t(multiprocessors) * kCtas);
  return launch(ordered_rows_kernel, dim3(unsigned(ctas)), kThreads, 0, stream, args);
}

}  // namespace moec::cuda
