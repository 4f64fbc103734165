// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstring>

#include "backend/cpu/mlp.h"
#include "core/chunks.h"
#include "core/dtype.h"

namespace moec::cpu {
namespace {

void load(const void* from, moec_dtype dtype, int64_t at, float* to, int64_t n) {
  convert_to_f32(static_cast<const char*>(from) + at * dtype_bytes(dtype), dtype, to, n);
}
void store(const float* from, moec_dtype dtype, void* to, int64_t at, int64_t n) {
  convert_from_f32(from, dtype, static_cast<char*>(to) + at * dtype_bytes(dtype), n);
}

// Up to kColumns columns of one row. q: of d_y Wd, before the row's factor; null when neither dots
// nor gradients of pre-activations are wanted.
void act_grad_row(const ActGrad& step, int64_t row, int64_t col, const float* q, int64_t n) {
  const Mlp& mlp = *step.mlp;
  float g[kColumns], u[kColumns], h[kColumns];
  if (mlp.gated()) load(step.pre.gate, MOEC_F32, row * step.pre.stride + col, g, n);
  load(step.pre.up, MOEC_F32, row * step.pre.stride + col, u, n);
  activation_slopes(mlp.activation, g, u, h, n);
  if (step.wants_dots) {
    float* const dots = step.dots + row * dot_columns(mlp.inter) + col / kDotColumns;
    for (int64_t i = 0; i < n; i += kDotColumns)
      dots[i / kDotColumns] = dot(q + i, h + i, std::min(kDotColumns, n - i));
  }
  const float factor = step.factor[row];
  const auto finish = [&](float* slopes, void* to) {
    if (factor == 0.0f)
      std::fill_n(slopes, n, 0.0f);
    else
      multiply_scaled(slopes, factor, q, n);
    store(slopes, mlp.dtype, to, row * step.d_pre.stride + col, n);
  };
  if (step.wants_d_pre && mlp.gated()) finish(g, step.d_pre.gate);
  if (step.wants_d_pre) finish(u, step.d_pre.up);
  if (!step.wants_weighted) return;
  scale_or_zero(h, factor, n);
  store(h, mlp.dtype, step.weighted, row * mlp.inter + col, n);
}

void finish_act_grad(void* context, const FinishedTile& tile) {
  const auto& step = *static_cast<const ActGrad*>(context);
  for (int64_t i = 0; i < tile.rows; ++i)
    for (int64_t col = 0; col < tile.cols; col += kColumns)
      act_grad_row(step, tile.row0 + i, tile.col0 + col, tile.c0 + i * tile.ld + col,
                   std::min(kColumns, tile.cols - col));
}

// Rows of d_y, as read by the rows of the experts.
GemmRows output_rows(const Mlp& mlp, const Array& d_y) {
  return {d_y.data, mlp.dtype, mlp.hidden, mlp.row_token};
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

GroupedGemm act_grad_product(const ActGrad& step) {
  const Mlp& mlp = *step.mlp;
  GroupedGemm gemm = product_of(mlp);
  gemm.n = mlp.inter;
  gemm.add({output_rows(mlp, step.d_y), gemm_weight(*mlp.weights, Part::kDown, true), mlp.hidden});
  add_narrow(mlp, step.narrow, mlp.down_adapters, mlp.down_adapters.a, true, 0, gemm);
  return gemm;
}

void run_act_grad(const ThreadPool& pool, const ActGrad& step, void* scratch) {
  const Mlp& mlp = *step.mlp;
  if (!step.wants_d_pre && !step.wants_dots) {  // only the weighted activations: no product
    for_each_row(pool, mlp, [&](int64_t row) {
      for (int64_t col = 0; col < mlp.inter; col += kColumns)
        act_grad_row(step, row, col, nullptr, std::min(kColumns, mlp.inter - col));
    });
    return;
  }
  GroupedGemm gemm = act_grad_product(step);
  gemm.epilogue = finish_act_grad;
  gemm.context = const_cast<ActGrad*>(&step);
  grouped_gemm(pool, gemm, scratch);
}

GroupedGemm input_grad_product(const InputGrad& step) {
  const Mlp& mlp = *step.mlp;
  GroupedGemm gemm = product_of(mlp);
  gemm.n = mlp.hidden;
  const auto add_product = [&](const void* rows, Part part) {
    gemm.add({{rows, mlp.dtype, step.d_pre.stride, nullptr},
              gemm_weight(*mlp.weights, part, true),
              mlp.inter});
  };
  if (mlp.gated()) add_product(step.d_pre.gate, Part::kGate);
  add_product(step.d_pre.up, Part::kUp);
  add_narrow(mlp, step.narrow, mlp.gate_up_adapters, mlp.gate_up_adapters.a, true, 0, gemm);
  return gemm;
}

void run_input_grad(const ThreadPool& pool, const InputGrad& step, GemmEpilogue epilogue,
                    void* context, void* scratch) {
  GroupedGemm gemm = input_grad_product(step);
  gemm.epilogue = epilogue;
  gemm.context = context;
  grouped_gemm(pool, gemm, scratch);
}

void run_weight_grads(const ThreadPool& pool, const WeightGrads& step, void* scratch) {
  const Mlp& mlp = *step.mlp;
  const GemmRows d_out = output_rows(mlp, step.d_y);
  const GemmRows act{step.weighted, mlp.dtype, mlp.inter, nullptr}, x = gemm_rows(mlp.x);
  const GemmRows d_gate{step.d_pre.gate, mlp.dtype, step.d_pre.stride, nullptr};
  const GemmRows d_up{step.d_pre.up, mlp.dtype, step.d_pre.stride, nullptr};
  const struct {
    Part part;
    int64_t n, k;
    const GemmRows &g, &x;
    const float* weight;  // of g's rows in the gradient of the bias; x already has it
  } products[] = {{Part::kDown, mlp.hidden, mlp.inter, d_out, act, step.factor},
                  {Part::kGate, mlp.inter, mlp.hidden, d_gate, x, nullptr},
                  {Part::kUp, mlp.inter, mlp.hidden, d_up, x, nullptr}};
  const RowGroups& groups = mlp.groups;
  for (const auto& p : products) {
    const ExpertMatrix& out = matrix_of(*mlp.gradients, p.part);
    if (out.present()) {
      GroupedWgrad wgrad;
      wgrad.num_experts = groups.count;
      wgrad.group_offsets = groups.offsets;
      wgrad.counts = groups.counts;
      wgrad.n = p.n;
      wgrad.k = p.k;
      wgrad.g = p.g;
      wgrad.x = p.x;
      wgrad.d = &out;
      wgrad.accumulate = step.accumulate;
      grouped_wgrad(pool, wgrad, scratch);
    }
    if (out.has_bias())
      column_sums(pool, {groups.count, groups.offsets, groups.counts, p.g, p.weight, 1, p.n, &out,
                         step.accumulate});
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
