// SPDX-License-Identifier: Apache-2.0
// Column sums over the rows of each group: gradients of biases. A CTA owns 32 columns of a group;
// its sixteen warps take every sixteenth row, and their sums are added up in order.
#include "backend/cuda/op.cuh"
#include "backend/cuda/portable_rows.h"
#include "backend/cuda/span.cuh"

namespace moec::cuda {
namespace {

constexpr int kColumns = 32, kWarps = 16;

__global__ __launch_bounds__(kColumns* kWarps) void column_sums_kernel(const ColumnSums s,
                                                                       const ExpertMatrix out) {
  __shared__ float partial[kWarps][kColumns];
  begin_kernel();
  const int group = int(blockIdx.y), warp = threadIdx.x / 32;
  const RowGroups& groups = s.rows.groups;
  const int64_t begin = groups.offsets ? groups.offsets[group] : 0;
  const int64_t end = begin + (groups.offsets ? groups.counts[group] : groups.max_rows);
  const int64_t column = int64_t(blockIdx.x) * kColumns + lane_id();
  float sum = 0;
  if (column < s.width) {
#pragma unroll 4
    for (int64_t row = begin + warp; row < end; row += kWarps) {
      const float weight = s.weight ? s.weight[row * s.weight_stride] : 1.0f;
      const int64_t source = s.of_tokens && s.rows.row_token ? s.rows.row_token[row] : row;
      const float value = load_span<1>(s.from, source * s.stride + column)[0];
      sum += weight == 0.0f ? 0.0f : weight * value;
    }
  }
  partial[warp][lane_id()] = sum;
  __syncthreads();
  if (warp > 0 || column >= s.width || (s.accumulate && begin == end)) return;
  const MatrixView to = out.bias(group);
  float total = 0;
  for (int w = 0; w < kWarps; ++w) total += partial[w][lane_id()];
  const int64_t at = column * to.row_stride;
  if (s.accumulate) total += load_real(to.data, to.dtype, at);
  store_real(to.data, to.dtype, at, total);
}

}  // namespace

void column_sums(const Op& op, const ColumnSums& sums) {
  const dim3 grid(unsigned((sums.width + kColumns - 1) / kColumns),
                  unsigned(sums.rows.groups.count));
  run(op, "sums of columns", column_sums_kernel, grid, kColumns * kWarps, 0, sums, *sums.out);
}

}  // namespace moec::cuda
