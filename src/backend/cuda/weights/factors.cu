// SPDX-License-Identifier: Apache-2.0
// A thread has an element at a time; neighbours write neighbours.
#include "backend/cuda/weights/factors.h"

#include "backend/cuda/device/op.cuh"
#include "backend/cuda/device/span.cuh"
#include "core/dtype.h"

namespace moec::cuda {
namespace {

dim3 grid_of(const Op& op, int64_t elements) {
  return grid_for(elements, kBlockThreads, 16 * int64_t(op.multiprocessors));
}

// Of every expert a block [n,k] of a copy. No source: zeros.
struct FactorCopy {
  ExpertMatrix from, to;
  int64_t first;  // element of `to`
  uint32_t n, k;
  int32_t experts;
};
// body(element of `from`, of `to`) of the thread's places of a block: the first of V of a line.
template <int V, class Body>
__device__ __forceinline__ void each_place(const FactorCopy& p, const Body& body) {
  const bool along_k = p.to.col_stride == 1;
  const uint32_t width = (along_k ? p.k : p.n) / V, size = width * (along_k ? p.n : p.k);
  for (uint32_t i = uint32_t(global_thread()); i < size; i += uint32_t(global_threads())) {
    const uint32_t line = i / width, place = (i - line * width) * V;
    const int64_t n = along_k ? line : place, k = along_k ? place : line;
    body(n * p.from.row_stride + k * p.from.col_stride,
         p.first + n * p.to.row_stride + k * p.to.col_stride);
  }
}
__global__ __launch_bounds__(kBlockThreads) void copy_factor_kernel(
    const __grid_constant__ FactorCopy p) {
  begin_kernel();
  const int64_t e = blockIdx.y;
  each_place<1>(p, [&](int64_t from, int64_t to) {
    const float value =
        p.from.present() ? load_real(p.from.values.expert(e), p.from.values.dtype, from) : 0.0f;
    store_real(p.to.values.expert(e), p.to.dtype, to, value);
  });
}
// The same where elements of a line are neighbours in both: a thread copies spans.
constexpr int kSpan = 4;
__global__ __launch_bounds__(kBlockThreads) void copy_spans_kernel(
    const __grid_constant__ FactorCopy p) {
  begin_kernel();
  const int64_t e = blockIdx.y;
  each_place<kSpan>(p, [&](int64_t from, int64_t to) {
    store_span(p.to.values.expert(e), p.to.dtype, to,
               load_span<kSpan>(p.from.values.expert(e), p.from.values.dtype, from));
  });
}
bool has_spans(const FactorCopy& p) {
  const bool along_k = p.to.col_stride == 1;
  const auto fits = [&](const ExpertMatrix& m) {
    const int64_t next = along_k ? m.col_stride : m.row_stride;
    const int64_t line = along_k ? m.row_stride : m.col_stride;
    return m.values.base && next == 1 && line % kSpan == 0 && m.values.expert_stride % kSpan == 0 &&
           reinterpret_cast<uintptr_t>(m.values.base) % (kSpan * sizeof(float)) == 0;
  };
  return fits(p.from) && fits(p.to) && (along_k ? p.k : p.n) % kSpan == 0 && p.first % kSpan == 0;
}
// The same where the experts' elements are neighbours, as PEFT stores B: a thread reads those of
// eight experts at once. Elements that have 16 bits are those of the copy.
constexpr int kNeighbours = 8;
template <class From>
__global__ __launch_bounds__(kBlockThreads) void copy_neighbours_kernel(
    const __grid_constant__ FactorCopy p) {
  begin_kernel();
  const int64_t e = int64_t(blockIdx.y) * kNeighbours;
  each_place<1>(p, [&](int64_t from, int64_t to) {
    union {
      uint4 words[sizeof(From) / 2];
      From values[kNeighbours];
    };
    const auto* const first =
        reinterpret_cast<const uint4*>(static_cast<const From*>(p.from.values.base) + from + e);
#pragma unroll
    for (int i = 0; i < int(sizeof(From)) / 2; ++i) words[i] = first[i];
#pragma unroll
    for (int i = 0; i < kNeighbours; ++i) {
      const int64_t place = to + (e + i) * p.to.values.expert_stride;
      if constexpr (sizeof(From) == 2)
        static_cast<From*>(p.to.values.base)[place] = values[i];
      else
        store_real(p.to.values.base, p.to.dtype, place, values[i]);
    }
  });
}
bool has_neighbours(const FactorCopy& p) {
  const ExpertMatrix& from = p.from;
  const moec_dtype dtype = from.values.dtype;
  return from.values.base && from.values.expert_stride == 1 &&
         (dtype == MOEC_F32 || (dtype == p.to.dtype && dtype_bytes(dtype) == 2)) &&
         p.experts % kNeighbours == 0 && from.row_stride % kNeighbours == 0 &&
         from.col_stride % kNeighbours == 0 &&
         reinterpret_cast<uintptr_t>(from.values.base) % 16 == 0;
}
void copy_factor(const Op& op, const FactorCopy& p) {
  const bool neighbours = has_neighbours(p), spans = !neighbours && has_spans(p);
  dim3 grid = grid_of(op, int64_t(p.n) * p.k / (spans ? kSpan : 1));
  grid.y = unsigned(neighbours ? p.experts / kNeighbours : p.experts);
  const auto kernel = spans                             ? copy_spans_kernel
                      : !neighbours                     ? copy_factor_kernel
                      : p.from.values.dtype == MOEC_F32 ? copy_neighbours_kernel<float>
                                                        : copy_neighbours_kernel<uint16_t>;
  run(op, "copy of factors", kernel, grid, kBlockThreads, 0, p);
}

__global__ __launch_bounds__(kBlockThreads) void set_ranks_kernel(float* scale, int32_t* adapter,
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
__global__ __launch_bounds__(kBlockThreads) void add_experts_kernel(const SumParams p) {
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
__global__ __launch_bounds__(kBlockThreads) void merge_kernel(const __grid_constant__ MergeList p) {
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

void pack_factors(const Op& op, const PackFactors& s, bool of_ranks) {
  const LowRank& to = *s.to;
  const auto ranks = [&](int64_t first, int64_t count, float scale, int32_t adapter) {
    if (count && of_ranks)
      run(op, "ranks of adapters", set_ranks_kernel, grid_of(op, count), kBlockThreads, 0,
          const_cast<float*>(to.scale) + first, const_cast<int32_t*>(to.adapter) + first, count,
          scale, adapter);
  };
  // Rows [first, first + n) of a copy of A, or its columns [first, first + k) of a copy of B.
  const auto copy = [&](const ExpertMatrix& from, const ExpertMatrix& copy_of, int64_t first_row,
                        int64_t first_col, int64_t n, int64_t k) {
    if (!n || !k) return;
    const int64_t place = first_row * copy_of.row_stride + first_col * copy_of.col_stride;
    copy_factor(op, {from, copy_of, place, uint32_t(n), uint32_t(k), s.num_experts});
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
  run(op, "sum over experts", add_experts_kernel, grid_of(op, n * k), kBlockThreads, 0,
      SumParams{sums, experts, n, k, out, accumulate});
}

// With more factors than a launch takes, each launch rounds.
void merge_factors(const Op& op, const MergeArgs& args) {
  for (int32_t e = 0; e < args.num_experts; ++e) {
    MergeList p = {};
    const auto flush = [&] {
      if (p.count)
        run(op, "merge of adapters", merge_kernel, grid_of(op, args.n * args.k), kBlockThreads, 0,
            p);
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
