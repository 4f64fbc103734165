// SPDX-License-Identifier: Apache-2.0
// Tiles of 64 x 64 in registers, 4 x 4 a thread, operands through shared memory as fp32.
#include "backend/cuda/dense.h"

#include <algorithm>

#include "backend/cuda/op.cuh"
#include "core/dtype.h"

namespace moec::cuda {
namespace {

constexpr int kTile = 64, kDepth = 16, kThreads = 256;
constexpr int64_t kLeastPart = 256;  // of k
constexpr int64_t kManyTiles = 256;  // from here on k is not cut
static_assert(kManyTiles * kTile * kTile * sizeof(float) == kDenseBytes);

int64_t tiles(int64_t extent) {
  return (extent + kTile - 1) / kTile;
}
int64_t part_length(const Dense& dense) {
  const int64_t most = std::max<int64_t>(1, kManyTiles / (tiles(dense.m) * tiles(dense.n)));
  const int64_t even = (dense.k + most - 1) / most;
  return std::max(kLeastPart, (even + kDepth - 1) / kDepth * kDepth);
}

// to [kDepth][kTile] = operand(first + i, k0 + j) as fp32, zeros outside. Threads run along the
// axis that is contiguous in memory.
__device__ void load_tile(const Array& operand, int64_t stride, int64_t k_stride, int64_t first,
                          int64_t extent, int64_t k0, int64_t k_end, float (*to)[kTile + 4]) {
  const bool along_k = k_stride == 1;
#pragma unroll
  for (int at = threadIdx.x; at < kTile * kDepth; at += kThreads) {
    const int i = along_k ? at / kDepth : at % kTile, j = along_k ? at % kDepth : at / kTile;
    const bool inside = first + i < extent && k0 + j < k_end;
    to[j][i] =
        inside ? load_real(operand.data, operand.dtype, (first + i) * stride + (k0 + j) * k_stride)
               : 0.0f;
  }
}

__global__ __launch_bounds__(kThreads) void dense_kernel(const Dense g, int64_t length,
                                                         float* parts) {
  __shared__ float a[kDepth][kTile + 4], b[kDepth][kTile + 4];
  begin_kernel();
  const int64_t row0 = int64_t(blockIdx.x) * kTile, col0 = int64_t(blockIdx.y) * kTile;
  const int64_t k_begin = blockIdx.z * length, k_end = min(k_begin + length, g.k);
  const int row = threadIdx.x / 16 * 4, col = threadIdx.x % 16 * 4;
  float sum[4][4] = {};
  for (int64_t k0 = k_begin; k0 < k_end; k0 += kDepth) {
    load_tile(g.a, g.a_row, g.a_col, row0, g.m, k0, k_end, a);
    load_tile(g.b, g.b_col, g.b_row, col0, g.n, k0, k_end, b);
    __syncthreads();
#pragma unroll
    for (int k = 0; k < kDepth; ++k)
#pragma unroll
      for (int i = 0; i < 4; ++i)
#pragma unroll
        for (int j = 0; j < 4; ++j) sum[i][j] = fmaf(a[k][row + i], b[k][col + j], sum[i][j]);
    __syncthreads();
  }
  float* const c = parts + blockIdx.z * g.m * g.n;
  for (int i = 0; i < 4; ++i)
    for (int j = 0; j < 4; ++j)
      if (row0 + row + i < g.m && col0 + col + j < g.n)
        c[(row0 + row + i) * g.n + col0 + col + j] = sum[i][j];
}

}  // namespace

int64_t dense_parts(const Dense& dense) {
  const int64_t length = part_length(dense);
  return (dense.k + length - 1) / length;
}

uint64_t dense_bytes(int64_t m, int64_t n) {
  const int64_t parts = std::max<int64_t>(1, kManyTiles / (tiles(m) * tiles(n)));
  return uint64_t(parts * m * n) * sizeof(float);
}

void dense_product(const Op& op, const Dense& dense, float* parts) {
  const dim3 grid(unsigned(tiles(dense.m)), unsigned(tiles(dense.n)), unsigned(dense_parts(dense)));
  run(op, "dense product", dense_kernel, grid, kThreads, 0, dense, part_length(dense), parts);
}

}  // namespace moec::cuda
