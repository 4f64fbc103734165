// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstring>

#include "backend/cpu/mlp.h"
#include "core/dtype.h"

namespace moec::cpu {
namespace {

StepRounding rounding_of(const Mlp& mlp) {
  if (mlp.act_rounding == MOEC_ACT_FP32_ONCE || mlp.dtype == MOEC_F32) return StepRounding::kNone;
  return mlp.dtype == MOEC_BF16 ? StepRounding::kBf16 : StepRounding::kF16;
}

char* element(void* base, moec_dtype dtype, int64_t index) {
  return static_cast<char*>(base) + index * dtype_bytes(dtype);
}

void keep(const PartRows& to, void* part, int64_t row, int64_t col, const float* from, int64_t n) {
  if (part)
    std::memcpy(element(part, MOEC_F32, row * to.stride + col), from, size_t(n) * sizeof(float));
}

// Up to kColumns pre-activations of one row -> what is kept of them, and the activation.
void finish_up_row(const Up& step, int64_t row, int64_t col, float* g, float* u, int64_t n) {
  const Mlp& mlp = *step.mlp;
  const StepRounding rounding = rounding_of(mlp);
  if (rounding != StepRounding::kNone) {
    if (g) round_to(mlp.dtype, g, n);
    round_to(mlp.dtype, u, n);
  }
  keep(step.pre, step.pre.gate, row, col, g, n);
  keep(step.pre, step.pre.up, row, col, u, n);
  if (!step.act) return;
  activate(mlp.activation, rounding, g, u, u, n);
  if (step.act_weight) scale_or_zero(u, step.act_weight[row], n);
  convert_from_f32(u, mlp.dtype, element(step.act, mlp.dtype, row * mlp.inter + col), n);
}

void add_bias(const Mlp& mlp, Part part, const FinishedTile& tile, int64_t col, float* c,
              int64_t n) {
  if (!has_bias(*mlp.weights, part)) return;
  float bias[kColumns];
  load_bias(*mlp.weights, part, tile.expert, tile.col0 + col, n, bias);
  for (int64_t i = 0; i < tile.rows; ++i) add(c + i * tile.ld, bias, n);
}

void finish_up(void* context, const FinishedTile& tile) {
  const auto& step = *static_cast<const Up*>(context);
  const Mlp& mlp = *step.mlp;
  float* const gate = mlp.gated() ? tile.c0 : nullptr;
  float* const up = mlp.gated() ? tile.c1 : tile.c0;
  for (int64_t col = 0; col < tile.cols; col += kColumns) {
    const int64_t n = std::min(kColumns, tile.cols - col);
    if (gate) add_bias(mlp, Part::kGate, tile, col, gate + col, n);
    add_bias(mlp, Part::kUp, tile, col, up + col, n);
    for (int64_t i = 0; i < tile.rows; ++i)
      finish_up_row(step, tile.row0 + i, tile.col0 + col, gate ? gate + i * tile.ld + col : nullptr,
                    up + i * tile.ld + col, n);
  }
}

}  // namespace

GroupedGemm product_of(const Mlp& mlp) {
  GroupedGemm gemm;
  gemm.num_experts = mlp.groups.count;
  gemm.group_offsets = mlp.groups.offsets;
  gemm.counts = mlp.groups.counts;
  return gemm;
}

void add_narrow(const Mlp& mlp, const void* narrow, const LowRank& factors,
                const ExpertMatrix& factor, bool transposed, int output, GroupedGemm& gemm) {
  if (narrow && factor.present())
    gemm.add({{narrow, mlp.dtype, factors.rank, nullptr},
              {&factor, nullptr, 0, transposed},
              factors.rank,
              output});
}

int64_t expert_of(const Mlp& mlp, int64_t row) {
  const RowGroups& g = mlp.groups;
  return std::upper_bound(g.offsets, g.offsets + g.count + 1, row) - g.offsets - 1;
}

void scale_rows(const ThreadPool& pool, const ScaleRows& step) {
  const Mlp& mlp = *step.mlp;
  for_each_row(pool, mlp, [&](int64_t row) {
    float values[kColumns];
    for (int64_t col = 0; col < mlp.hidden; col += kColumns) {
      const int64_t n = std::min(kColumns, mlp.hidden - col);
      const int64_t from = token_of(mlp, row) * mlp.hidden + col;
      convert_to_f32(element(step.x.data, mlp.dtype, from), mlp.dtype, values, n);
      scale_or_zero(values, step.weight[row], n);
      convert_from_f32(values, mlp.dtype, element(step.to, mlp.dtype, row * mlp.hidden + col), n);
    }
  });
}

void clear_padding(const ClearPadding& step) {
  char* const begin = static_cast<char*>(step.begin);
  const auto clear = [&](int64_t row, int64_t last) {
    if (last > row)
      std::memset(begin + row * step.bytes_of_row, 0, size_t((last - row) * step.bytes_of_row));
  };
  const RowGroups& g = step.mlp->groups;
  for (int64_t e = 0; e < g.count; ++e)
    clear(g.offsets[e] + count_of(*step.mlp, e), g.offsets[e + 1]);
  char* const rest = begin + rows_of(*step.mlp) * step.bytes_of_row;
  std::memset(rest, 0, size_t(static_cast<char*>(step.end) - rest));
}

GroupedGemm up_product(const Up& step) {
  const Mlp& mlp = *step.mlp;
  GroupedGemm gemm = product_of(mlp);
  gemm.n = mlp.inter;
  gemm.outputs = mlp.parts();
  const auto add_product = [&](Part part, int output) {
    gemm.add({gemm_rows(mlp.x), gemm_weight(*mlp.weights, part, false), mlp.hidden, output});
  };
  if (mlp.gated()) add_product(Part::kGate, 0);
  add_product(Part::kUp, gemm.outputs - 1);
  const LowRank& factors = mlp.gate_up_adapters;
  add_narrow(mlp, step.narrow, factors, factors.b[0], false, 0, gemm);
  add_narrow(mlp, step.narrow, factors, factors.b[1], false, gemm.outputs - 1, gemm);
  return gemm;
}

void run_up(const ThreadPool& pool, const Up& step, void* scratch) {
  GroupedGemm gemm = up_product(step);
  gemm.epilogue = finish_up;
  gemm.context = const_cast<Up*>(&step);
  grouped_gemm(pool, gemm, scratch);
}

GroupedGemm down_product(const Down& step) {
  const Mlp& mlp = *step.mlp;
  GroupedGemm gemm = product_of(mlp);
  gemm.n = mlp.hidden;
  gemm.add({{step.act, mlp.dtype, mlp.inter, nullptr},
            gemm_weight(*mlp.weights, Part::kDown, false),
            mlp.inter});
  const LowRank& factors = mlp.down_adapters;
  add_narrow(mlp, step.narrow, factors, factors.b[0], false, 0, gemm);
  return gemm;
}

void run_down(const ThreadPool& pool, const Down& step, GemmEpilogue epilogue, void* context,
              void* scratch) {
  GroupedGemm gemm = down_product(step);
  gemm.epilogue = epilogue;
  gemm.context = context;
  grouped_gemm(pool, gemm, scratch);
}

}  // namespace moec::cpu
