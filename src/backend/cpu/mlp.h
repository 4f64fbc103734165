// SPDX-License-Identifier: Apache-2.0
// The steps of an expert MLP over all rows of a set of experts, forward and backward. The routed
// experts with their plan and the shared expert, a single group of all tokens, are the same thing
// here.
#pragma once

#include <algorithm>

#include "backend/cpu/expert_weights.h"
#include "backend/cpu/row_math.h"
#include "backend/program.h"

namespace moec::cpu {

inline constexpr int64_t kColumns = 256;  // columns that epilogues handle at a time, on the stack

// ---- rows of an MLP, whose groups have offsets here
inline int64_t rows_of(const Mlp& mlp) {  // with padding
  return mlp.groups.offsets[mlp.groups.count];
}
inline int64_t count_of(const Mlp& mlp, int64_t e) {
  const RowGroups& g = mlp.groups;
  return g.counts ? g.counts[e] : g.offsets[e + 1] - g.offsets[e];
}
int64_t expert_of(const Mlp& mlp, int64_t row);
inline bool is_padding(const Mlp& mlp, int64_t row) {
  const int64_t e = expert_of(mlp, row);
  return row >= mlp.groups.offsets[e] + count_of(mlp, e);
}
inline int64_t token_of(const Mlp& mlp, int64_t row) {
  return mlp.row_token ? mlp.row_token[row] : row;
}

inline GemmRows gemm_rows(const RowOperand& rows) {
  return {rows.data.data, rows.data.dtype, rows.stride, rows.gather};
}
// A grouped product over the rows, its matrices still to be set.
GroupedGemm product_of(const Mlp& mlp);
// A term of adapters: narrow rows times a factor; no rows or no such factor: none.
void add_narrow(const Mlp& mlp, const void* narrow, const LowRank& factors,
                const ExpertMatrix& factor, bool transposed, int output, GroupedGemm& gemm);

// body(row) for each row that is not padding, some rows per task.
template <class Body>
void for_each_row(const ThreadPool& pool, const Mlp& mlp, const Body& body) {
  constexpr int64_t kRows = 16;
  const int64_t rows = rows_of(mlp);
  pool.parallel_for((rows + kRows - 1) / kRows, [&](int32_t, int64_t i) {
    for (int64_t row = i * kRows; row < std::min(rows, (i + 1) * kRows); ++row)
      if (!is_padding(mlp, row)) body(row);
  });
}

void scale_rows(const ThreadPool& pool, const ScaleRows& step);
void clear_padding(const ClearPadding& step);

// ---- the steps of backend/program.h that multiply
// Their products, without an epilogue.
GroupedGemm up_product(const Up& step);
GroupedGemm down_product(const Down& step);
GroupedGemm act_grad_product(const ActGrad& step);
GroupedGemm input_grad_product(const InputGrad& step);
void run_up(const ThreadPool& pool, const Up& step, void* scratch);
// epilogue: of act Wd^T, before the bias.
void run_down(const ThreadPool& pool, const Down& step, GemmEpilogue epilogue, void* context,
              void* scratch);
void run_act_grad(const ThreadPool& pool, const ActGrad& step, void* scratch);
// epilogue: of d_gate Wg + d_up Wu, the gradient at the rows' inputs.
void run_input_grad(const ThreadPool& pool, const InputGrad& step, GemmEpilogue epilogue,
                    void* context, void* scratch);
void run_weight_grads(const ThreadPool& pool, const WeightGrads& step, void* scratch);

// Parts of a dot product with `width` columns: one for so many.
inline constexpr int64_t kDotColumns = 32;
inline int64_t dot_columns(int64_t width) {
  return (width + kDotColumns - 1) / kDotColumns;
}

// ---- sums over rows: out[n] (+)= sum over the rows of a group of weight[row] * rows[row][n]
struct ColumnSums {
  int32_t num_groups = 1;
  const int32_t *group_offsets = nullptr, *counts = nullptr;
  GemmRows rows;
  const float* weight = nullptr;  // [rows], null = 1
  int64_t weight_stride = 1;
  int64_t width = 0;
  const ExpertMatrix* out = nullptr;  // its bias
  bool accumulate = false;
};
void column_sums(const ThreadPool& pool, const ColumnSums& sums);

}  // namespace moec::cpu
