// SPDX-License-Identifier: Apache-2.0
#include "backend/cpu/combine.h"

#include <algorithm>
#include <cstring>

#include "backend/cpu/gemm.h"
#include "backend/cpu/mlp.h"
#include "backend/cpu/row_math.h"
#include "backend/shares.h"
#include "core/dtype.h"

namespace moec::cpu {
namespace {

// Long stretches of each row, so that the processor's own prefetching follows them.
constexpr int64_t kStretch = 1024;

// fp32 copy of elements [at, at + n) of an array.
struct Columns {
  float values[kStretch];
  Columns(const void* base, moec_dtype dtype, int64_t at, int64_t n) {
    convert_to_f32(static_cast<const char*>(base) + at * dtype_bytes(dtype), dtype, values, n);
  }
};

const float* row_values(const Array& rows, int64_t at) {
  return static_cast<const float*>(rows.data) + at;
}

// The routed sum, before output_scale, into `sum`.
void sum_terms(const Combine& s, int64_t t, int64_t col, int64_t n, float* sum) {
  const moec_experts_desc& desc = *s.desc;
  const bool weighted = desc.weight_position == MOEC_WEIGHT_ON_OUTPUT;
  const bool on_input = desc.weight_position == MOEC_WEIGHT_ON_INPUT;
  const bool in_data_type = desc.combine == MOEC_COMBINE_DATA_EXPERT;
  const ShareOrder order =
      desc.combine == MOEC_COMBINE_FP32_SLOT ? ShareOrder::kSlot : ShareOrder::kExpert;
  const auto add_part = [&](float weight, const float* part) {
    if (!in_data_type) return add_scaled(sum, weight, part, n);
    // As the per-expert loops of eager frameworks: each output, product and sum is rounded.
    float rounded[kStretch];
    std::copy_n(part, n, rounded);
    round_to(desc.dtype, rounded, n);
    scale(rounded, weight, n);
    round_to(desc.dtype, rounded, n);
    add(sum, rounded, n);
    round_to(desc.dtype, sum, n);
  };
  for_each_share(*s.plan, t, order, [&](const Share& share) {
    // A zero weight is no expert, whatever its value; on the input, biases still count.
    if (share.weight == 0.0f && (share.row < 0 || !on_input)) return;
    if (share.row < 0)
      add_part(share.weight, Columns(s.x.data, desc.dtype, t * desc.hidden + col, n).values);
    else
      add_part(weighted ? share.weight : 1.0f, row_values(s.rows, share.row * desc.hidden + col));
  });
}

void sum_terms(const CombineGrad& s, int64_t t, int64_t col, int64_t n, float* sum) {
  const moec_experts_desc& desc = *s.desc;
  const bool weighted = desc.weight_position == MOEC_WEIGHT_ON_INPUT;
  for_each_share(*s.plan, t, ShareOrder::kSlot, [&](const Share& share) {
    if (share.weight == 0.0f) return;
    if (share.row >= 0) {
      const float* const part = row_values(s.rows, share.row * desc.hidden + col);
      return add_scaled(sum, weighted ? share.weight : 1.0f, part, n);
    }
    const Columns d_y(s.d_y.data, desc.dtype, t * desc.hidden + col, n);
    add_scaled(sum, share.weight * routed_factor(desc, s.mix, t), d_y.values, n);
  });
}

}  // namespace

void combine_columns(const Combine& s, int64_t t, int64_t col, int64_t n, const float* shared) {
  if (s.skip_absent && !has_row(*s.plan, t)) return;
  const moec_experts_desc& desc = *s.desc;
  const int64_t at = t * desc.hidden + col;
  float sum[kStretch];
  std::fill_n(sum, n, 0.0f);
  sum_terms(s, t, col, n, sum);
  const float factor = routed_factor(desc, s.mix, t);
  if (factor != 1.0f) scale(sum, factor, n);
  if (shared) add_scaled(sum, s.mix ? s.mix[2 * t + 1] : 1.0f, shared, n);
  if (s.output_bias) add(sum, Columns(s.output_bias.data, s.output_bias.dtype, col, n).values, n);
  if (s.residual) add(sum, Columns(s.residual.data, desc.dtype, at, n).values, n);
  convert_from_f32(sum, desc.dtype, static_cast<char*>(s.y.data) + at * dtype_bytes(desc.dtype), n);
}

void combine_columns(const CombineGrad& s, int64_t t, int64_t col, int64_t n, const float* shared) {
  const moec_experts_desc& desc = *s.desc;
  const int64_t at = t * desc.hidden + col;
  float sum[kStretch];
  std::fill_n(sum, n, 0.0f);
  sum_terms(s, t, col, n, sum);
  if (shared) add(sum, shared, n);
  const int gates = !s.d_logits ? 0 : desc.shared == MOEC_SHARED_SOFTMAX2 ? 2 : 1;
  for (int i = 0; i < gates; ++i) {
    const Columns gate(s.shared_gate.data, s.shared_gate.dtype, i * desc.hidden + col, n);
    add_scaled(sum, s.d_logits[2 * t + i], gate.values, n);
  }
  if (s.accumulate) add(sum, Columns(s.d_x.data, desc.dtype, at, n).values, n);
  convert_from_f32(sum, desc.dtype, static_cast<char*>(s.d_x.data) + at * dtype_bytes(desc.dtype),
                   n);
}

namespace {

// combine_columns for all tokens, without a shared expert.
template <class Sum>
void combine_all(const ThreadPool& pool, const Sum& sum) {
  const int64_t tokens = sum.plan->num_tokens, hidden = sum.desc->hidden;
  constexpr int64_t kTaskValues = 1 << 15;  // read and added by one task, at least
  const int64_t per_token = hidden * (sum.desc->top_k + 2);
  const int64_t step = std::max<int64_t>(1, kTaskValues / per_token);
  // Few large tokens are cut into columns.
  const bool cut = step == 1 && tokens < int64_t{4} * pool.size();
  const int64_t width = std::min(hidden, cut ? kColumns : kStretch);
  const int64_t pieces = cut ? (hidden + width - 1) / width : 1;
  pool.parallel_for((tokens + step - 1) / step * pieces, [&](int32_t, int64_t i) {
    const int64_t first = i / pieces * step, begin = i % pieces * width;
    const int64_t end = cut ? std::min(hidden, begin + width) : hidden;
    for (int64_t t = first; t < std::min(tokens, first + step); ++t)
      for (int64_t col = begin; col < end; col += width)
        combine_columns(sum, t, col, std::min(width, end - col), nullptr);
  });
}
// The last product of the shared expert, tile by tile, into the sums.
struct FusedCombine {
  const Combine& sum;
  const Mlp& shared;
};
void finish_output(void* context, const FinishedTile& tile) {
  const auto& c = *static_cast<const FusedCombine*>(context);
  const bool biased = has_bias(*c.shared.weights, Part::kDown);
  float bias[kColumns];
  for (int64_t col = 0; col < tile.cols; col += kColumns) {
    const int64_t n = std::min(kColumns, tile.cols - col), at = tile.col0 + col;
    if (biased) load_bias(*c.shared.weights, Part::kDown, 0, at, n, bias);
    for (int64_t i = 0; i < tile.rows; ++i) {
      float* const values = tile.c0 + i * tile.ld + col;
      if (biased) add(values, bias, n);
      combine_columns(c.sum, tile.row0 + i, at, n, values);
    }
  }
}
void finish_input_grad(void* context, const FinishedTile& tile) {
  const auto& sum = *static_cast<const CombineGrad*>(context);
  for (int64_t i = 0; i < tile.rows; ++i)
    for (int64_t col = 0; col < tile.cols; col += kColumns)
      combine_columns(sum, tile.row0 + i, tile.col0 + col, std::min(kColumns, tile.cols - col),
                      tile.c0 + i * tile.ld + col);
}

void store_down(void* context, const FinishedTile& tile) {
  const auto& step = *static_cast<const Down*>(context);
  const Mlp& mlp = *step.mlp;
  const bool biased = has_bias(*mlp.weights, Part::kDown);
  float bias[kColumns];
  for (int64_t col = 0; col < tile.cols; col += kColumns) {
    const int64_t n = std::min(kColumns, tile.cols - col);
    if (biased) load_bias(*mlp.weights, Part::kDown, tile.expert, tile.col0 + col, n, bias);
    for (int64_t i = 0; i < tile.rows; ++i) {
      const int64_t row = tile.row0 + i;
      float* const out = static_cast<float*>(step.rows.data) + row * mlp.hidden + tile.col0 + col;
      std::memcpy(out, tile.c0 + i * tile.ld + col, size_t(n) * sizeof(float));
      if (biased) add_scaled(out, step.bias_weight ? step.bias_weight[row] : 1.0f, bias, n);
    }
  }
}

void store_row_grad(void* context, const FinishedTile& tile) {
  const auto& step = *static_cast<const InputGrad*>(context);
  const Mlp& mlp = *step.mlp;
  const int64_t hidden = mlp.hidden;
  for (int64_t i = 0; i < tile.rows; ++i) {
    const int64_t row = tile.row0 + i;
    const float* const d = tile.c0 + i * tile.ld;
    std::memcpy(static_cast<float*>(step.rows.data) + row * hidden + tile.col0, d,
                size_t(tile.cols) * sizeof(float));
    if (!step.input_dots) continue;
    float* const dots = step.input_dots + row * dot_columns(hidden) + tile.col0 / kDotColumns;
    for (int64_t col = 0; col < tile.cols; col += kDotColumns) {
      const int64_t n = std::min(kDotColumns, tile.cols - col);
      const int64_t at = token_of(mlp, row) * hidden + tile.col0 + col;
      float x[kDotColumns];
      convert_to_f32(static_cast<const char*>(step.x.data) + at * dtype_bytes(mlp.dtype), mlp.dtype,
                     x, n);
      dots[col / kDotColumns] = dot(d + col, x, n);
    }
  }
}

}  // namespace

void store_rows(const ThreadPool& pool, const Down& step, void* scratch) {
  run_down(pool, step, store_down, const_cast<Down*>(&step), scratch);
}
void store_rows(const ThreadPool& pool, const InputGrad& step, void* scratch) {
  run_input_grad(pool, step, store_row_grad, const_cast<InputGrad*>(&step), scratch);
}

void combine(const ThreadPool& pool, const Combine& step, void* scratch) {
  if (!step.shared_down) return combine_all(pool, step);
  FusedCombine fused{step, *step.shared_down->mlp};
  run_down(pool, *step.shared_down, finish_output, &fused, scratch);
}
void combine(const ThreadPool& pool, const CombineGrad& step, void* scratch) {
  if (!step.shared_grad) return combine_all(pool, step);
  run_input_grad(pool, *step.shared_grad, finish_input_grad, const_cast<CombineGrad*>(&step),
                 scratch);
}

}  // namespace moec::cpu
