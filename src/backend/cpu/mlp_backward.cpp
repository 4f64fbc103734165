// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstring>

#include "backend/cpu/mlp.h"
#include "core/chunks.h"
#include "core/dtype.h"

namespace moec::cpu {
namespace {

struct ActGradContext {
  const Mlp& mlp;
  const ActGradStep& step;
};

void load(const void* from, moec_dtype dtype, int64_t at, float* to, int64_t n) {
  convert_to_f32(static_cast<const char*>(from) + at * dtype_bytes(dtype), dtype, to, n);
}
void store(const float* from, moec_dtype dtype, void* to, int64_t at, int64_t n) {
  convert_from_f32(from, dtype, static_cast<char*>(to) + at * dtype_bytes(dtype), n);
}

// Up to kColumns columns of one row. q: of d_y W2, before the row's factor; null when neither dots
// nor gradients of pre-activations are wanted.
void act_grad_row(const ActGradContext& c, int64_t row, int64_t col, const float* q, int64_t n) {
  const Mlp& mlp = c.mlp;
  const ActGradStep& step = c.step;
  const int64_t at = row * mlp.inter + col;
  float g[kColumns], u[kColumns], h[kColumns];
  const auto read = [&](const void* from, float* to_row) {
    std::memcpy(to_row, static_cast<const char*>(from) + at * int64_t(sizeof(float)),
                size_t(n) * sizeof(float));
  };
  if (mlp.gated()) read(step.from.gate, g);
  read(step.from.up, u);
  activation_slopes(mlp.activation, g, u, h, n);
  if (step.dots) {
    float* const dots = step.dots + row * dot_columns(mlp.inter) + col / kDotColumns;
    for (int64_t i = 0; i < n; i += kDotColumns)
      dots[i / kDotColumns] = dot(q + i, h + i, std::min(kDotColumns, n - i));
  }
  const float factor = step.factor[row];
  const auto finish = [&](float* slopes, void* to) {
    if (!to) return;
    if (factor == 0.0f)
      std::fill_n(slopes, n, 0.0f);
    else
      multiply_scaled(slopes, factor, q, n);
    store(slopes, mlp.dtype, to, at, n);
  };
  if (mlp.gated()) finish(g, step.to.gate);
  finish(u, step.to.up);
  if (!step.to.act) return;
  scale_or_zero(h, factor, n);
  store(h, mlp.dtype, step.to.act, at, n);
}

void finish_act_grad(void* context, const FinishedTile& tile) {
  const auto& c = *static_cast<const ActGradContext*>(context);
  for (int64_t i = 0; i < tile.rows; ++i)
    for (int64_t col = 0; col < tile.cols; col += kColumns)
      act_grad_row(c, tile.row0 + i, tile.col0 + col, tile.c0 + i * tile.ld + col,
                   std::min(kColumns, tile.cols - col));
}

// Rows of d_y, as read by the rows of the experts.
GemmRows output_rows(const Mlp& mlp, const void* d_y) {
  return {d_y, mlp.dtype, mlp.hidden, mlp.row_token};
}

// One group and up to kColumns columns: sums of blocks of rows, then the sum of those.
void sum_columns(const ColumnSums& s, int64_t group, int64_t col, int64_t n) {
  const int64_t begin = s.group_offsets[group];
  const int64_t end = s.counts ? begin + s.counts[group] : s.group_offsets[group + 1];
  float total[kColumns] = {}, values[kColumns];
  for (int64_t first = begin; first < end; first += kSummedTogether) {
    float block[kColumns] = {};
    for (int64_t row = first; row < std::min(end, first + kSummedTogether); ++row) {
      const float weight = s.weight ? s.weight[row * s.weight_stride] : 1.0f;
      if (weight == 0.0f) continue;
      const int64_t source = s.rows.gather ? s.rows.gather[row] : row;
      load(s.rows.data, s.rows.dtype, source * s.rows.stride + col, values, n);
      add_scaled(block, weight, values, n);
    }
    add(total, block, n);
  }
  if (s.accumulate && begin == end) return;
  const MatrixView out = s.out->bias_of(group);
  for (int64_t i = 0; i < n; ++i) {
    const int64_t at = (col + i) * out.row_stride;
    const float old = s.accumulate ? load_real(out.data, out.dtype, at) : 0.0f;
    store_real(out.data, out.dtype, at, old + total[i]);
  }
}

}  // namespace

void run_act_grad(const ThreadPool& pool, const Mlp& mlp, const ActGradStep& step, void* scratch) {
  ActGradContext context{mlp, step};
  if (!step.to.up && !step.dots) {  // only the weighted activations: nothing to multiply
    for_each_row(pool, mlp, [&](int64_t row) {
      for (int64_t col = 0; col < mlp.inter; col += kColumns)
        act_grad_row(context, row, col, nullptr, std::min(kColumns, mlp.inter - col));
    });
    return;
  }
  GroupedGemm gemm = product_of(mlp);
  gemm.n = mlp.inter;
  gemm.k = mlp.hidden;
  gemm.a[0] = output_rows(mlp, step.d_y);
  gemm.b[0] = gemm_weight(*mlp.weights, Part::kDown, true);
  gemm.epilogue = finish_act_grad;
  gemm.context = &context;
  grouped_gemm(pool, gemm, scratch);
}

void run_input_grad(const ThreadPool& pool, const Mlp& mlp, const Hidden& d, GemmEpilogue epilogue,
                    void* context, void* scratch) {
  GroupedGemm gemm = product_of(mlp);
  gemm.kind = mlp.gated() ? GemmKind::kSum : GemmKind::kSingle;
  gemm.n = mlp.hidden;
  gemm.k = mlp.inter;
  int products = 0;
  const auto add_product = [&](const void* rows, Part part) {
    gemm.a[products] = {rows, mlp.dtype, mlp.inter, nullptr};
    gemm.b[products++] = gemm_weight(*mlp.weights, part, true);
  };
  if (mlp.gated()) add_product(d.gate, Part::kGate);
  add_product(d.up, Part::kUp);
  gemm.epilogue = epilogue;
  gemm.context = context;
  grouped_gemm(pool, gemm, scratch);
}

void run_weight_grads(const ThreadPool& pool, const Mlp& mlp, const Hidden& d, const void* d_y,
                      const float* factor, const WeightsView& d_weights, bool accumulate,
                      void* scratch) {
  const GemmRows d_out = output_rows(mlp, d_y), act{d.act, mlp.dtype, mlp.inter, nullptr};
  const GemmRows d_gate{d.gate, mlp.dtype, mlp.inter, nullptr};
  const GemmRows d_up{d.up, mlp.dtype, mlp.inter, nullptr};
  const struct {
    Part part;
    int64_t n, k;
    const GemmRows &g, &x;
    const float* weight;  // of g's rows in the gradient of the bias; x already has it
  } products[] = {{Part::kDown, mlp.hidden, mlp.inter, d_out, act, factor},
                  {Part::kGate, mlp.inter, mlp.hidden, d_gate, mlp.x, nullptr},
                  {Part::kUp, mlp.inter, mlp.hidden, d_up, mlp.x, nullptr}};
  for (const auto& p : products) {
    const ExpertMatrix& out = matrix_of(d_weights, p.part);
    if (out.present()) {
      GroupedWgrad wgrad;
      wgrad.num_experts = mlp.num_experts;
      wgrad.group_offsets = mlp.group_offsets;
      wgrad.counts = mlp.counts;
      wgrad.n = p.n;
      wgrad.k = p.k;
      wgrad.g = p.g;
      wgrad.x = p.x;
      wgrad.d = &out;
      wgrad.accumulate = accumulate;
      grouped_wgrad(pool, wgrad, scratch);
    }
    if (out.has_bias())
      column_sums(pool, {mlp.num_experts, mlp.group_offsets, mlp.counts, p.g, p.weight, 1, p.n,
                         &out, accumulate});
  }
}

void column_sums(const ThreadPool& pool, const ColumnSums& s) {
  const int64_t pieces = (s.width + kColumns - 1) / kColumns;
  pool.parallel_for(s.num_groups * pieces, [&](int32_t, int64_t i) {
    const int64_t col = i % pieces * kColumns;
    sum_columns(s, i / pieces, col, std::min(kColumns, s.width - col));
  });
}

}  // namespace moec::cpu
