// SPDX-License-Identifier: Apache-2.0
// Column sums over the rows of each group: gradients of biases. A CTA owns the columns of a warp,
// one or four a lane; its sixteen warps take every sixteenth row, and their sums are added up in
// order.
#include "backend/cuda/device/op.cuh"
#include "backend/cuda/device/span.cuh"
#include "backend/cuda/rows/row_ops.h"

namespace moec::cuda {
namespace {

constexpr int kSumWarps = 16;

template <int V>
__global__ __launch_bounds__(32 * kSumWarps) void column_sums_kernel(const ColumnSums s) {
  __shared__ Span<V> partial[kSumWarps][32];
  begin_kernel();
  const RowGroups& groups = s.rows.groups;
  const int ctas = int(gridDim.x / groups.count);  // of a group
  const int group = int(blockIdx.x) / ctas, warp = threadIdx.x / 32;
  const int64_t begin = groups.offsets ? groups.offsets[group] : 0;
  const int64_t end = begin + (groups.offsets ? groups.counts[group] : groups.max_rows);
  const int64_t column = (int64_t(int(blockIdx.x) - group * ctas) * 32 + lane_id()) * V;
  Span<V> sum = {};
  if (column < s.width) {
#pragma unroll 4
    for (int64_t row = begin + warp; row < end; row += kSumWarps) {
      const float weight = s.weight ? s.weight[row * s.weight_stride] : 1.0f;
      const int64_t source = s.of_tokens && s.rows.row_token ? s.rows.row_token[row] : row;
      const Span<V> value = load_span<V>(s.from, source * s.stride + column);
#pragma unroll
      for (int i = 0; i < V; ++i) sum[i] += weight == 0.0f ? 0.0f : weight * value[i];
    }
  }
  partial[warp][lane_id()] = sum;
  __syncthreads();
  if (warp > 0 || column >= s.width || (s.accumulate && begin == end)) return;
  void* const to = s.out.expert(group);
#pragma unroll
  for (int i = 0; i < V; ++i) {
    float total = 0;
    for (int w = 0; w < kSumWarps; ++w) total += partial[w][lane_id()][i];
    const int64_t at = (column + i) * s.out_stride;
    if (s.accumulate) total += load_real(to, s.out.dtype, at);
    store_real(to, s.out.dtype, at, total);
  }
}

}  // namespace

void column_sums(const Op& op, const ColumnSums& sums) {
  const bool wide = spans_fit(sums.width, sums.from) && sums.stride % 4 == 0;
  const int64_t columns = wide ? 128 : 32;  // of a CTA
  const dim3 grid(unsigned((sums.width + columns - 1) / columns * sums.rows.groups.count));
  run(op, "sums of columns", wide ? column_sums_kernel<4> : column_sums_kernel<1>, grid,
      32 * kSumWarps, 0, sums);
}

void token_sums(const Op& op, int64_t num_tokens, const TokenSums& sums, const Array& out,
                int64_t first, bool accumulate) {
  ExpertArray to;
  to.base = static_cast<char*>(out.data) + first * dtype_bytes(out.dtype);
  to.dtype = out.dtype;
  const Rows tokens = {{1, nullptr, nullptr, num_tokens}, nullptr};
  column_sums(
      op, {tokens, false, sums.from, sums.width, sums.width, sums.weight, 2, to, 1, accumulate});
}

}  // namespace moec::cuda
