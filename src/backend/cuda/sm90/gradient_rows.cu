// SPDX-License-Identifier: Apache-2.0
// What follows the gradient of a coded down projection: rows of `out` hold d_act; see
// epilogue_gradient.cuh for what d_pre and, where it is kept, they hold behind this. It moves 10 or
// 12 bytes an element and does little besides, so a warp has all it reads on its way at once.
#include "backend/cuda/sm90/epilogue_gradient.cuh"
#include "backend/cuda/sm90/row_gemm_launch.cuh"

namespace moec::cuda {
namespace {

constexpr int kGradientThreads = 256;
constexpr int kGradientRows = 2;  // of a warp, of one tile of features: eight features a lane
constexpr int kRowsOfBlock = kGradientRows * kGradientThreads / 32;

// Sums have the order of GradientFinisher: a lane's features, those 128 behind, then eight lanes.
template <typename Element>
__global__ __launch_bounds__(kGradientThreads) void gradient_rows_kernel(
    const __grid_constant__ RowGemmParams p) {
  ptx::grid_dependency_wait();
  ptx::grid_dependency_launch();
  const int lane = int(threadIdx.x) & 31, tile = int(blockIdx.x % unsigned(p.feature_tiles));
  const int first = int(blockIdx.x / unsigned(p.feature_tiles)) * kRowsOfBlock +
                    int(threadIdx.x) / 32 * kGradientRows;
  const int rows = p.group_offsets[p.num_experts];
  if (first >= rows) return;
  const int feature = first_feature(p, tile) + 8 * lane;
  const bool inside = feature < min(p.features, first_feature(p, tile + 1));
  const SigmoidGated activation{p.form};
  const auto load = [](const Element* from) {
    return __ldcs(reinterpret_cast<const uint4*>(from));
  };
  const auto pre_of = [&](int row) { return int64_t(row) * 2 * p.features + feature; };
  Element* const out = static_cast<Element*>(p.out) + feature;
  uint4 d[kGradientRows] = {}, gate[kGradientRows] = {}, up[kGradientRows] = {};
  float weight[kGradientRows] = {};
#pragma unroll
  for (int i = 0; i < kGradientRows; ++i) {
    const int row = first + i;
    if (row >= rows) break;
    weight[i] = __ldg(p.row_weight + row);
    if (!inside) continue;
    const Element* const pre = static_cast<const Element*>(p.pre) + pre_of(row);
    d[i] = load(out + row * p.out_stride);
    gate[i] = load(pre);
    up[i] = load(pre + p.features);
  }
#pragma unroll
  for (int i = 0; i < kGradientRows; ++i) {
    const int row = first + i;
    if (row >= rows) break;
    auto piece = gradient_piece<Element>(activation, weight[i], d[i], gate[i], up[i]);
    if (weight[i] == 0.0f) piece.out = piece.d_gate = piece.d_up = {};
    float sum = inside ? piece.sum : 0.0f;
    if (inside) {
      store_gradients(p, static_cast<Element*>(p.d_pre) + pre_of(row), feature, piece);
      if (p.keeps_act) ptx::global_store(out + row * p.out_stride, piece.out);
    }
    for (const int lanes : {16, 1, 2, 4}) sum += __shfl_xor_sync(~0u, sum, lanes);
    if (lane == 0 || lane == 8) p.d_weight_parts[(2 * tile + lane / 8) * p.max_rows + row] = sum;
  }
}

}  // namespace

cudaError_t launch_gradient_rows(const RowGemmProblem& problem, const RowGemmParams& params,
                                 cudaStream_t stream) {
  const dim3 grid(
      unsigned((params.max_rows + kRowsOfBlock - 1) / kRowsOfBlock * params.feature_tiles));
  return with_element(problem, [&]<class Element>() {
    return launch(gradient_rows_kernel<Element>, grid, kGradientThreads, 0, stream, params);
  });
}

}  // namespace moec::cuda
