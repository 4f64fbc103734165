// SPDX-License-Identifier: Apache-2.0
// A thread has an element at a time; neighbours write neighbours.
#include "backend/cuda/weights/factors.h"

#include "backend/cuda/device/op.cuh"
#include "core/dtype.h"

namespace moec::cuda {
namespace {

constexpr int kThreads = 256;

dim3 grid_of(const Op& op, int64_t elements) {
  return grid_for(elements, kThreads, 16 * int64_t(op.multiprocessors));
}

// Of every expert a block [n,k] of a copy whose rows are `ld` long. No source: zeros.
struct CopyParams {
  ExpertArray from;
  int64_t row_stride, col_stride;
  char* to;
  int64_t expert_stride, ld, n, k, experts;
  moec_dtype dtype;
};
__global__ __launch_bounds__(kThreads) void copy_factor_kernel(const CopyParams p) {
  begin_kernel();
  for (int64_t i = global_thread(); i < p.experts * p.n * p.k; i += global_threads()) {
    const int64_t k = i % p.k, n = i / p.k % p.n, e = i / p.k / p.n;
    const float value = p.from.present() ? load_real(p.from.expert(e), p.from.dtype,
                                                     n * p.row_stride + k * p.col_stride)
                                         : 0.0f;
    store_real(p.to, p.dtype, e * p.expert_stride + n * p.ld + k, value);
  }
}

__global__ __launch_bounds__(kThreads) void set_ranks_kernel(float* scale, int32_t* adapter,
                                                             int64_t count, float of_all,
                                                             int32_t index) {
  begin_kernel();
  for (int64_t i = global_thread(); i < count; i += global_threads()) {
    scale[i] = of_all;
    adapter[i] = index;
  }
}

struct SumParams {
  const float* sums;
  int32_t experts;
  int64_t n, k;
  MatrixView out;
  bool accumulate;
};
__global__ __launch_bounds__(kThreads) void add_experts_kernel(const SumParams p) {
  begin_kernel();
  for (int64_t i = global_thread(); i < p.n * p.k; i += global_threads()) {
    float sum = 0;
    for (int32_t e = 0; e < p.experts; ++e) sum += p.sums[e * p.n * p.k + i];
    const int64_t at = i / p.k * p.out.row_stride + i % p.k * p.out.col_stride;
    if (p.accumulate) sum += load_real(p.out.data, p.out.dtype, at);
    store_real(p.out.data, p.out.dtype, at, sum);
  }
}

// w(n, k) += sum of scale b(n, j) a(j, k) of some factors of one expert.
constexpr int kFactorsAtOnce = 16;
struct MergeList {
  MatrixView w;
  int64_t n, k;
  int count;
  MatrixView a[kFactorsAtOnce], b[kFactorsAtOnce];
  int32_t rank[kFactorsAtOnce];
  float scale[kFactorsAtOnce];
};
__global__ __launch_bounds__(kThreads) void merge_kernel(const __grid_constant__ MergeList p) {
  begin_kernel();
  const bool along_k = p.w.col_stride == 1;
  const int64_t width = along_k ? p.k : p.n;
  for (int64_t i = global_thread(); i < p.n * p.k; i += global_threads()) {
    const int64_t line = i / width, place = i - line * width;
    const int64_t n = along_k ? line : place, k = along_k ? place : line;
    const int64_t at = n * p.w.row_stride + k * p.w.col_stride;
    float sum = load_real(p.w.data, p.w.dtype, at);
    for (int f = 0; f < p.count; ++f)
      for (int32_t j = 0; j < p.rank[f]; ++j) {
        const MatrixView &a = p.a[f], &b = p.b[f];
        const float of_n = load_real(b.data, b.dtype, n * b.row_stride + j * b.col_stride);
        const float of_k = load_real(a.data, a.dtype, j * a.row_stride + k * a.col_stride);
        sum = fmaf(p.scale[f] * of_n, of_k, sum);
      }
    store_real(p.w.data, p.w.dtype, at, sum);
  }
}

}  // namespace

void pack_factors(const Op& op, const PackFactors& s) {
  const LowRank& to = *s.to;
  const auto ranks = [&](int64_t first, int64_t count, float scale, int32_t adapter) {
    if (count)
      run(op, "ranks of adapters", set_ranks_kernel, grid_of(op, count), kThreads, 0,
          const_cast<float*>(to.scale) + first, const_cast<int32_t*>(to.adapter) + first, count,
          scale, adapter);
  };
  // Rows [first, first + n) of a copy of A, or its columns [first, first + k) of a copy of B.
  const auto copy = [&](const ExpertMatrix& from, const ExpertMatrix& copy_of, int64_t first_row,
                        int64_t first_col, int64_t n, int64_t k) {
    if (!n || !k) return;
    CopyParams p = {};
    p.from = from.values;
    p.row_stride = from.row_stride;
    p.col_stride = from.col_stride;
    p.to = static_cast<char*>(copy_of.values.base) +
           (first_row * copy_of.row_stride + first_col) * dtype_bytes(copy_of.dtype);
    p.expert_stride = copy_of.values.expert_stride;
    p.ld = copy_of.row_stride;
    p.n = n;
    p.k = k;
    p.experts = s.num_experts;
    p.dtype = copy_of.dtype;
    run(op, "copy of factors", copy_factor_kernel, grid_of(op, p.experts * n * k), kThreads, 0, p);
  };
  int64_t first = 0;
  const auto all = [&](const Factors& f) {
    if (s.copies_a) copy(f.a, to.a, first, 0, f.rank, s.in);
    for (int i = 0; i < 2; ++i)
      if (s.copies_b && to.b[i].present()) copy(f.b[i], to.b[i], 0, first, s.out, f.rank);
    ranks(first, f.rank, f.scale, f.adapter);
    first += f.rank;
  };
  for (const Factors& f : *s.from) all(f);
  Factors none;
  none.adapter = -1;
  none.rank = to.rank - first;
  all(none);
}

void add_experts(const Op& op, const float* sums, int32_t experts, int64_t n, int64_t k,
                 const MatrixView& out, bool accumulate) {
  run(op, "sum over experts", add_experts_kernel, grid_of(op, n * k), kThreads, 0,
      SumParams{sums, experts, n, k, out, accumulate});
}

// With more factors than a launch takes, each launch rounds.
void merge_factors(const Op& op, const MergeArgs& args) {
  for (int32_t e = 0; e < args.num_experts; ++e) {
    MergeList p = {};
    const auto flush = [&] {
      if (p.count)
        run(op, "merge of adapters", merge_kernel, grid_of(op, args.n * args.k), kThreads, 0, p);
      p.count = 0;
    };
    p.w = args.matrix->expert(e);
    p.n = args.n;
    p.k = args.k;
    for (const Factors& f : *args.factors) {
      if (!f.b[args.part].present()) continue;
      if (p.count == kFactorsAtOnce) flush();
      p.a[p.count] = f.a.expert(e);
      p.b[p.count] = f.b[args.part].expert(e);
      p.rank[p.count] = int32_t(f.rank);
      p.scale[p.count++] = args.sign * f.scale;
    }
    flush();
  }
}

}  // namespace moec::cuda
