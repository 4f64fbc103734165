// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstring>

#include "backend/cpu/mlp.h"
#include "core/dtype.h"

namespace moec::cpu {
namespace {

struct UpContext {
  const Mlp& mlp;
  const UpStep& step;
};

StepRounding rounding_of(const Mlp& mlp) {
  if (mlp.act_rounding == MOEC_ACT_FP32_ONCE || mlp.dtype == MOEC_F32) return StepRounding::kNone;
  return mlp.dtype == MOEC_BF16 ? StepRounding::kBf16 : StepRounding::kF16;
}

char* element(void* base, moec_dtype dtype, int64_t index) {
  return static_cast<char*>(base) + index * dtype_bytes(dtype);
}

// Up to kColumns pre-activations of one row -> what is kept of them, and the activation.
void finish_up_row(const UpContext& c, int64_t row, int64_t col, float* g, float* u, int64_t n) {
  const Mlp& mlp = c.mlp;
  const UpStep& step = c.step;
  const StepRounding rounding = rounding_of(mlp);
  const int64_t at = row * mlp.inter + col;
  if (rounding != StepRounding::kNone) {
    if (g) round_to(mlp.dtype, g, n);
    round_to(mlp.dtype, u, n);
  }
  const size_t bytes = size_t(n) * sizeof(float);
  if (step.keep.gate) std::memcpy(element(step.keep.gate, MOEC_F32, at), g, bytes);
  if (step.keep.up) std::memcpy(element(step.keep.up, MOEC_F32, at), u, bytes);
  if (!step.act) return;
  activate(mlp.activation, rounding, g, u, u, n);
  if (step.act_weight) scale_or_zero(u, step.act_weight[row], n);
  convert_from_f32(u, mlp.dtype, element(step.act, mlp.dtype, at), n);
}

void add_bias(const Mlp& mlp, Part part, const FinishedTile& tile, int64_t col, float* c,
              int64_t n) {
  if (!has_bias(*mlp.weights, part)) return;
  float bias[kColumns];
  load_bias(*mlp.weights, part, tile.expert, tile.col0 + col, n, bias);
  for (int64_t i = 0; i < tile.rows; ++i) add(c + i * tile.ld, bias, n);
}

void finish_up(void* context, const FinishedTile& tile) {
  const auto& c = *static_cast<const UpContext*>(context);
  float* const gate = c.mlp.gated() ? tile.c0 : nullptr;
  float* const up = c.mlp.gated() ? tile.c1 : tile.c0;
  for (int64_t col = 0; col < tile.cols; col += kColumns) {
    const int64_t n = std::min(kColumns, tile.cols - col);
    if (gate) add_bias(c.mlp, Part::kGate, tile, col, gate + col, n);
    add_bias(c.mlp, Part::kUp, tile, col, up + col, n);
    for (int64_t i = 0; i < tile.rows; ++i)
      finish_up_row(c, tile.row0 + i, tile.col0 + col, gate ? gate + i * tile.ld + col : nullptr,
                    up + i * tile.ld + col, n);
  }
}

}  // namespace

GroupedGemm product_of(const Mlp& mlp) {
  GroupedGemm gemm;
  gemm.num_experts = mlp.num_experts;
  gemm.group_offsets = mlp.group_offsets;
  gemm.counts = mlp.counts;
  return gemm;
}

int64_t Mlp::expert_of(int64_t row) const {
  return std::upper_bound(group_offsets, group_offsets + num_experts + 1, row) - group_offsets - 1;
}

Mlp routed_mlp(const moec_experts_desc& desc, const WeightsView& weights, const PlanView& plan,
               const void* x, const void* scaled_x) {
  Mlp mlp;
  mlp.weights = &weights;
  mlp.activation = desc.activation;
  mlp.act_rounding = desc.act_rounding;
  mlp.dtype = desc.dtype;
  mlp.hidden = desc.hidden;
  mlp.inter = desc.inter;
  mlp.real_rows = plan.totals[0];
  mlp.num_experts = plan.num_local;
  mlp.group_offsets = plan.group_offsets;
  mlp.counts = plan.counts;
  mlp.row_token = plan.row_token;
  mlp.x = {scaled_x ? scaled_x : x, desc.dtype, desc.hidden, scaled_x ? nullptr : plan.row_token};
  return mlp;
}

Mlp shared_mlp(const moec_experts_desc& desc, const WeightsView& weights, const int32_t* group,
               const void* x) {
  Mlp mlp;
  mlp.weights = &weights;
  mlp.activation = desc.shared_activation;
  mlp.act_rounding = desc.act_rounding;
  mlp.dtype = desc.dtype;
  mlp.hidden = desc.hidden;
  mlp.inter = desc.shared_inter;
  mlp.real_rows = group[1];
  mlp.num_experts = 1;
  mlp.group_offsets = group;
  mlp.x = {x, desc.dtype, desc.hidden, nullptr};
  return mlp;
}

void scale_rows(const ThreadPool& pool, const Mlp& mlp, const void* x, const float* weight,
                void* to) {
  for_each_row(pool, mlp, [&](int64_t row) {
    float values[kColumns];
    for (int64_t col = 0; col < mlp.hidden; col += kColumns) {
      const int64_t n = std::min(kColumns, mlp.hidden - col);
      const int64_t from = mlp.token(row) * mlp.hidden + col;
      convert_to_f32(static_cast<const char*>(x) + from * dtype_bytes(mlp.dtype), mlp.dtype, values,
                     n);
      scale_or_zero(values, weight[row], n);
      convert_from_f32(values, mlp.dtype, element(to, mlp.dtype, row * mlp.hidden + col), n);
    }
  });
}

void run_up(const ThreadPool& pool, const Mlp& mlp, const UpStep& step, void* scratch) {
  UpContext context{mlp, step};
  GroupedGemm gemm = product_of(mlp);
  gemm.kind = mlp.gated() ? GemmKind::kPair : GemmKind::kSingle;
  gemm.n = mlp.inter;
  gemm.k = mlp.hidden;
  gemm.a[0] = mlp.x;
  gemm.b[0] = gemm_weight(*mlp.weights, mlp.gated() ? Part::kGate : Part::kUp, false);
  if (mlp.gated()) gemm.b[1] = gemm_weight(*mlp.weights, Part::kUp, false);
  gemm.epilogue = finish_up;
  gemm.context = &context;
  grouped_gemm(pool, gemm, scratch);
}

void run_down(const ThreadPool& pool, const Mlp& mlp, const void* act, GemmEpilogue epilogue,
              void* context, void* scratch) {
  GroupedGemm gemm = product_of(mlp);
  gemm.n = mlp.hidden;
  gemm.k = mlp.inter;
  gemm.a[0] = {act, mlp.dtype, mlp.inter, nullptr};
  gemm.b[0] = gemm_weight(*mlp.weights, Part::kDown, false);
  gemm.epilogue = epilogue;
  gemm.context = context;
  grouped_gemm(pool, gemm, scratch);
}

}  // namespace moec::cpu
