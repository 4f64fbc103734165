// SPDX-License-Identifier: Apache-2.0
#include "backend/cpu/adapters.h"

#include <algorithm>
#include <cstring>

#include "backend/cpu/mlp.h"
#include "backend/factor_grads.h"
#include "core/dtype.h"
#include "core/workspace.h"

namespace moec::cpu {
namespace {

// `count` values at a distance of `stride` elements, in fp32.
void load_line(const void* from, moec_dtype dtype, int64_t at, int64_t stride, int64_t count,
               float* to) {
  if (stride == 1) {
    convert_to_f32(static_cast<const char*>(from) + at * dtype_bytes(dtype), dtype, to, count);
    return;
  }
  with_real(dtype, [&]<class T>() {
    const T* const values = static_cast<const T*>(from) + at;
    for (int64_t i = 0; i < count; ++i) to[i] = to_float(values[i * stride]);
  });
}

// A block of [n, k] values of one expert from a factor to its place in a copy of rows of `ld`.
struct BlockCopy {
  MatrixView from;
  moec_dtype dtype;
  char* to;
  int64_t ld;

  void run(int64_t n0, int64_t n, int64_t k) const {
    float values[kColumns];
    for (int64_t i = n0; i < n0 + n; ++i)
      for (int64_t col = 0; col < k; col += kColumns) {
        const int64_t count = std::min(kColumns, k - col);
        if (from.data)
          load_line(from.data, from.dtype, i * from.row_stride + col * from.col_stride,
                    from.col_stride, count, values);
        else
          std::fill_n(values, count, 0.0f);
        convert_from_f32(values, dtype, to + (i * ld + col) * dtype_bytes(dtype), count);
      }
  }
};

MatrixView view_of(const ExpertMatrix& m, int64_t e) {
  return m.present() ? m.expert(e) : MatrixView{};
}

void pack_a(const PackFactors& s, int64_t e) {
  int64_t first = 0;
  char* const to = static_cast<char*>(s.to->a.values.expert(e));
  const int64_t row_bytes = s.in * dtype_bytes(s.to->a.dtype);
  for (const Factors& f : *s.from) {
    BlockCopy{f.a.expert(e), s.to->a.dtype, to + first * row_bytes, s.in}.run(0, f.rank, s.in);
    first += f.rank;
  }
  std::memset(to + first * row_bytes, 0, size_t((s.to->rank - first) * row_bytes));
}

// Rows [n0, n0 + n) of every expert: those of storage in which experts are neighbours share lines.
void pack_b(const PackFactors& s, int part, int64_t n0, int64_t n) {
  const ExpertMatrix& b = s.to->b[part];
  for (int64_t e = 0; e < s.num_experts; ++e) {
    int64_t first = 0;
    char* const to = static_cast<char*>(b.values.expert(e));
    const auto place = [&] { return to + first * dtype_bytes(b.dtype); };
    for (const Factors& f : *s.from) {
      BlockCopy{view_of(f.b[part], e), b.dtype, place(), s.to->rank}.run(n0, n, f.rank);
      first += f.rank;
    }
    BlockCopy{{}, b.dtype, place(), s.to->rank}.run(n0, n, s.to->rank - first);
  }
}

// Up to kColumns ranks of a row: scaled, and rounded to the type of the rows.
void finish_narrow(void* context, const FinishedTile& tile) {
  const auto& step = *static_cast<const NarrowRows*>(context);
  const Mlp& mlp = *step.mlp;
  const LowRank& factors = *step.adapters;
  for (int64_t i = 0; i < tile.rows; ++i) {
    const int64_t row = tile.row0 + i, at = row * factors.rank + tile.col0;
    float* const values = tile.c0 + i * tile.ld;
    const float* const scale = factors.scale + tile.col0;
    for (int64_t j = 0; j < tile.cols; ++j) values[j] *= scale[j];
    if (factors.ids) {
      const int32_t id = factors.ids[token_of(mlp, row)];
      const int32_t* const adapter = factors.adapter + tile.col0;
      for (int64_t j = 0; j < tile.cols; ++j) values[j] = adapter[j] == id ? values[j] : 0.0f;
    }
    convert_from_f32(values, mlp.dtype, static_cast<char*>(step.to) + at * dtype_bytes(mlp.dtype),
                     tile.cols);
  }
}

// out(n, k) (+)= sum over experts, in their order, of sums[e][n][k]
void add_experts(const ThreadPool& pool, const float* sums, int32_t experts, int64_t n, int64_t k,
                 const MatrixView& out, bool accumulate) {
  pool.parallel_for(n, [&](int32_t, int64_t row) {
    for (int64_t col = 0; col < k; col += kColumns) {
      const int64_t count = std::min(kColumns, k - col);
      float total[kColumns] = {};
      for (int64_t e = 0; e < experts; ++e) add(total, sums + (e * n + row) * k + col, count);
      for (int64_t j = 0; j < count; ++j) {
        const int64_t at = row * out.row_stride + (col + j) * out.col_stride;
        const float old = accumulate ? load_real(out.data, out.dtype, at) : 0.0f;
        store_real(out.data, out.dtype, at, old + total[j]);
      }
    }
  });
}

// One row of one expert's matrix.
void merge_row(const MergeArgs& args, int64_t e, int64_t n) {
  const MatrixView w = args.matrix->expert(e);
  for (int64_t col = 0; col < args.k; col += kColumns) {
    const int64_t count = std::min(kColumns, args.k - col);
    const int64_t at = n * w.row_stride + col * w.col_stride;
    float values[kColumns], line[kColumns];
    load_line(w.data, w.dtype, at, w.col_stride, count, values);
    for (const Factors& f : *args.factors) {
      if (!f.b[args.part].present()) continue;
      const MatrixView a = f.a.expert(e), b = f.b[args.part].expert(e);
      for (int64_t j = 0; j < f.rank; ++j) {
        load_line(a.data, a.dtype, j * a.row_stride + col * a.col_stride, a.col_stride, count,
                  line);
        const float of_n = load_real(b.data, b.dtype, n * b.row_stride + j * b.col_stride);
        add_scaled(values, args.sign * f.scale * of_n, line, count);
      }
    }
    for (int64_t i = 0; i < count; ++i)
      store_real(w.data, w.dtype, at + i * w.col_stride, values[i]);
  }
}

}  // namespace

void pack_factors(const ThreadPool& pool, const PackFactors& s) {
  int64_t first = 0;
  auto* const scale = const_cast<float*>(s.to->scale);
  auto* const adapter = const_cast<int32_t*>(s.to->adapter);
  std::fill_n(scale, s.to->rank, 0.0f);
  std::fill_n(adapter, s.to->rank, -1);
  for (const Factors& f : *s.from) {
    std::fill_n(scale + first, f.rank, f.scale);
    std::fill_n(adapter + first, f.rank, f.adapter);
    first += f.rank;
  }
  if (s.copies_a) pool.parallel_for(s.num_experts, [&](int32_t, int64_t e) { pack_a(s, e); });
  constexpr int64_t kRows = 16;
  for (int part = 0; part < 2; ++part)
    if (s.copies_b && s.to->b[part].present())
      pool.parallel_for(div_up(s.out, kRows), [&](int32_t, int64_t i) {
        pack_b(s, part, i * kRows, std::min(kRows, s.out - i * kRows));
      });
}

void run_narrow_rows(const ThreadPool& pool, const NarrowRows& step, void* scratch) {
  GroupedGemm gemm = product_of(*step.mlp);
  gemm.n = step.product.n;
  for (int i = 0; i < step.product.num_terms; ++i) {
    const ProductTerm& term = step.product.terms[i];
    gemm.add({gemm_rows(term.a), {term.b, nullptr, 0, term.transposed}, term.k, term.output});
  }
  gemm.epilogue = finish_narrow;
  gemm.context = const_cast<NarrowRows*>(&step);
  grouped_gemm(pool, gemm, scratch);
}

void run_factor_grads(const ThreadPool& pool, const FactorGrads& s, void* scratch) {
  const RowGroups& groups = s.mlp->groups;
  for_each_factor_grad(
      s,
      [&](const RowOperand& g, int64_t n, const RowOperand& x, int64_t k, const ExpertMatrix& d,
          bool accumulate) {
        GroupedWgrad wgrad;
        wgrad.num_experts = groups.count;
        wgrad.group_offsets = groups.offsets;
        wgrad.counts = groups.counts;
        wgrad.n = n;
        wgrad.k = k;
        wgrad.g = gemm_rows(g);
        wgrad.x = gemm_rows(x);
        wgrad.d = &d;
        wgrad.accumulate = accumulate;
        grouped_wgrad(pool, wgrad, scratch);
      },
      [&](int64_t n, const MatrixView& out) {
        add_experts(pool, s.sums, groups.count, n, s.in, out, s.accumulate);
      });
}

void merge_factors(const ThreadPool& pool, const MergeArgs& args) {
  constexpr int64_t kRows = 8;
  const int64_t across = div_up(args.n, kRows);
  pool.parallel_for(args.num_experts * across, [&](int32_t, int64_t i) {
    const int64_t n0 = i % across * kRows;
    for (int64_t n = n0; n < std::min(args.n, n0 + kRows); ++n) merge_row(args, i / across, n);
  });
}

}  // namespace moec::cpu
