// SPDX-License-Identifier: Apache-2.0
// The steps of an expert MLP over all rows of a set of experts, forward and backward. The routed
// experts with their plan and the shared expert, a single group of all tokens, are the same thing
// here.
#pragma once

#include "backend/cpu/expert_weights.h"
#include "backend/cpu/experts_memory.h"
#include "backend/cpu/row_math.h"

namespace moec::cpu {

inline constexpr int64_t kColumns = 256;  // columns that epilogues handle at a time, on the stack

struct Mlp {
  const WeightsView* weights = nullptr;
  moec_activation activation = {};
  uint32_t act_rounding = 0;  // moec_act_rounding
  moec_dtype dtype = 0;       // of x, activations and their gradients
  int64_t hidden = 0, inter = 0;
  int64_t real_rows = 0;  // without padding
  int32_t num_experts = 0;
  const int32_t* group_offsets = nullptr;  // [num_experts + 1]
  const int32_t* counts = nullptr;         // [num_experts]; null: groups have no padding
  const int32_t* row_token = nullptr;      // token of a row; null: the row itself
  GemmRows x;                              // its input: gathered tokens, or rows of their own

  bool gated() const { return weights->gated; }
  int64_t rows() const { return group_offsets[num_experts]; }  // with padding
  int64_t count(int64_t e) const {
    return counts ? counts[e] : group_offsets[e + 1] - group_offsets[e];
  }
  int64_t expert_of(int64_t row) const;
  bool is_padding(int64_t row) const {
    const int64_t e = expert_of(row);
    return row >= group_offsets[e] + count(e);
  }
  // Of so many products with a matrix each.
  uint64_t flops(int products) const {
    return 2 * uint64_t(products) * uint64_t(real_rows * hidden * inter);
  }
  int inner_products() const { return gated() ? 2 : 1; }  // gate and up
  int64_t token(int64_t row) const { return row_token ? row_token[row] : row; }
};

// The routed experts of a call, and its shared expert; `group` holds {0, T} as long as the result.
Mlp routed_mlp(const moec_experts_desc& desc, const WeightsView& weights, const PlanView& plan,
               const void* x, const void* scaled_x);
Mlp shared_mlp(const moec_experts_desc& desc, const WeightsView& weights, const int32_t* group,
               const void* x);

// A grouped product over the rows, its matrices still to be set.
GroupedGemm product_of(const Mlp& mlp);

// body(row) for each row that is not padding, some rows per task.
template <class Body>
void for_each_row(const ThreadPool& pool, const Mlp& mlp, const Body& body) {
  constexpr int64_t kRows = 16;
  pool.parallel_for((mlp.rows() + kRows - 1) / kRows, [&](int32_t, int64_t i) {
    for (int64_t row = i * kRows; row < std::min(mlp.rows(), (i + 1) * kRows); ++row)
      if (!mlp.is_padding(row)) body(row);
  });
}

// to[row] = x[token of row] * weight[row], rounded.
void scale_rows(const ThreadPool& pool, const Mlp& mlp, const void* x, const float* weight,
                void* to);

// ---- forward
struct UpStep {
  Preact keep;          // out, each optional
  void* act = nullptr;  // out: activation times act_weight; null: pre-activations only
  const float* act_weight = nullptr;  // [rows], null = 1
};
void run_up(const ThreadPool& pool, const Mlp& mlp, const UpStep& step, void* scratch);
// epilogue: of act W2^T, before the bias.
void run_down(const ThreadPool& pool, const Mlp& mlp, const void* act, GemmEpilogue epilogue,
              void* context, void* scratch);

// ---- backward
struct ActGradStep {
  const void* d_y = nullptr;  // [T,H]
  Preact from;
  Hidden to;                      // out, each optional; act: activation times factor
  const float* factor = nullptr;  // [rows] d(y) / d(expert output)
  float* dots = nullptr;          // out [rows, I/32], optional: parts of <d_y W2, act>
};
void run_act_grad(const ThreadPool& pool, const Mlp& mlp, const ActGradStep& step, void* scratch);
// epilogue: of d_gate W_gate + d_up W_up, the gradient at the rows' inputs.
void run_input_grad(const ThreadPool& pool, const Mlp& mlp, const Hidden& d, GemmEpilogue epilogue,
                    void* context, void* scratch);
// Every gradient that is present in d_weights. d.act: factor * activation.
void run_weight_grads(const ThreadPool& pool, const Mlp& mlp, const Hidden& d, const void* d_y,
                      const float* factor, const WeightsView& d_weights, bool accumulate,
                      void* scratch);

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
