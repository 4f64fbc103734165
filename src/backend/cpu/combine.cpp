// SPDX-License-Identifier: Apache-2.0
#include "backend/cpu/combine.h"

#include <algorithm>

#include "backend/cpu/gemm.h"
#include "backend/cpu/mlp.h"
#include "backend/cpu/row_math.h"
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

float routed_factor(const moec_experts_desc& desc, const float* mix, int64_t t) {
  return mix ? desc.output_scale * mix[2 * t] : desc.output_scale;
}

// The routed sum, before output_scale, into `sum`.
void sum_terms(const OutputSum& s, int64_t t, int64_t col, int64_t n, float* sum) {
  const moec_experts_desc& desc = *s.desc;
  const bool weighted = desc.weight_position == MOEC_WEIGHT_ON_OUTPUT;
  const bool on_input = desc.weight_position == MOEC_WEIGHT_ON_INPUT;
  const bool in_data_type = desc.combine == MOEC_COMBINE_DATA_EXPERT;
  const TermOrder order =
      desc.combine == MOEC_COMBINE_FP32_SLOT ? TermOrder::kSlot : TermOrder::kExpert;
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
  for_each_term(*s.plan, t, order, [&](const Term& term) {
    // A zero weight is no expert, whatever its value; on the input, biases still count.
    if (term.weight == 0.0f && (term.row < 0 || !on_input)) return;
    if (term.row < 0)
      add_part(term.weight, Columns(s.x, desc.dtype, t * desc.hidden + col, n).values);
    else
      add_part(weighted ? term.weight : 1.0f, s.rows + term.row * desc.hidden + col);
  });
}

void sum_terms(const InputGradSum& s, int64_t t, int64_t col, int64_t n, float* sum) {
  const moec_experts_desc& desc = *s.desc;
  const bool weighted = desc.weight_position == MOEC_WEIGHT_ON_INPUT;
  for_each_term(*s.plan, t, TermOrder::kSlot, [&](const Term& term) {
    if (term.weight == 0.0f) return;
    if (term.row >= 0) {
      const float* const part = s.rows + term.row * desc.hidden + col;
      return add_scaled(sum, weighted ? term.weight : 1.0f, part, n);
    }
    const Columns d_y(s.d_y, desc.dtype, t * desc.hidden + col, n);
    add_scaled(sum, term.weight * routed_factor(desc, s.mix, t), d_y.values, n);
  });
}

}  // namespace

void combine_columns(const OutputSum& s, int64_t t, int64_t col, int64_t n, const float* shared) {
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
  if (s.residual) add(sum, Columns(s.residual, desc.dtype, at, n).values, n);
  convert_from_f32(sum, desc.dtype, static_cast<char*>(s.y) + at * dtype_bytes(desc.dtype), n);
}

void combine_columns(const InputGradSum& s, int64_t t, int64_t col, int64_t n,
                     const float* shared) {
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
  if (s.accumulate) add(sum, Columns(s.d_x, desc.dtype, at, n).values, n);
  convert_from_f32(sum, desc.dtype, static_cast<char*>(s.d_x) + at * dtype_bytes(desc.dtype), n);
}

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
template void combine_all(const ThreadPool&, const OutputSum&);
template void combine_all(const ThreadPool&, const InputGradSum&);

}  // namespace moec::cpu
