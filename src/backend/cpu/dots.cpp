// SPDX-License-Identifier: Apache-2.0
#include "backend/cpu/dots.h"

#include <algorithm>
#include <cstring>

#include "backend/cpu/combine.h"
#include "backend/cpu/mlp.h"
#include "backend/cpu/shared_gate.h"
#include "backend/shares.h"
#include "core/dtype.h"

namespace moec::cpu {
namespace {

constexpr int64_t kTokensPerTask = 16;

template <class Body>
void for_each_token(const ThreadPool& pool, int64_t tokens, const Body& body) {
  pool.parallel_for((tokens + kTokensPerTask - 1) / kTokensPerTask, [&](int32_t, int64_t i) {
    const int64_t end = std::min(tokens, (i + 1) * kTokensPerTask);
    for (int64_t t = i * kTokensPerTask; t < end; ++t) body(t);
  });
}

float sum_of(const float* parts, int64_t row, int64_t count) {
  float sum = 0;
  for (int64_t i = 0; i < count; ++i) sum += parts[row * count + i];
  return sum;
}

void load_token(const Array& from, int64_t hidden, int64_t t, int64_t col, int64_t n, float* to) {
  const int64_t at = t * hidden + col;
  convert_to_f32(static_cast<const char*>(from.data) + at * dtype_bytes(from.dtype), from.dtype, to,
                 n);
}

// <d_y of token t, v>; other(col, n, to) gives columns of v.
template <class Other>
float d_y_dot(const Array& d_y, int64_t hidden, int64_t t, const Other& other) {
  float sum = 0, d[kColumns], v[kColumns];
  for (int64_t col = 0; col < hidden; col += kColumns) {
    const int64_t n = std::min(kColumns, hidden - col);
    load_token(d_y, hidden, t, col, n, d);
    other(col, n, v);
    sum += dot(d, v, n);
  }
  return sum;
}

// <d_y of token t, output of the expert for this row>
float output_dot(const Dots& dots, const Array& d_y, int64_t row, int64_t t) {
  const Mlp& mlp = *dots.mlp;
  const float sum = sum_of(dots.dots, row, dot_columns(mlp.inter));
  if (!dots.biased) return sum;
  const int64_t expert = expert_of(mlp, row);
  return sum + d_y_dot(d_y, mlp.hidden, t, [&](int64_t col, int64_t n, float* to) {
           load_bias(*mlp.weights, Part::kDown, expert, col, n, to);
         });
}
float share_dot(const Dots& dots, const Array& d_y, const Array& x, int64_t t, const Share& share) {
  if (share.row >= 0) return output_dot(dots, d_y, share.row, t);
  const int64_t hidden = dots.mlp->hidden;
  return d_y_dot(d_y, hidden, t,
                 [&](int64_t col, int64_t n, float* to) { load_token(x, hidden, t, col, n, to); });
}

bool is_on_input(const moec_experts_desc& desc) {
  return desc.weight_position == MOEC_WEIGHT_ON_INPUT;
}

// d(loss) / d(c0): <d_y, routed sum>
float d_routed_mix(const GateGrad& step, int64_t t) {
  const moec_experts_desc& desc = *step.gate.desc;
  float sum = 0;
  for_each_share(*step.plan, t, ShareOrder::kSlot, [&](const Share& share) {
    const float weight = is_on_input(desc) && share.row >= 0 ? 1.0f : share.weight;
    if (weight != 0.0f) sum += weight * share_dot(step.routed, step.d_y, step.gate.x, t, share);
  });
  return desc.output_scale * sum;
}

// out[first + n] (+)= sum over tokens of weight * rows[n]; weight: of [T,2], null = 1
void token_sums(const ThreadPool& pool, int64_t num_tokens, const GemmRows& rows,
                const float* weight, int64_t width, const Array& out, int64_t first,
                bool accumulate) {
  const int32_t group[] = {0, int32_t(num_tokens)};
  ExpertMatrix to;
  to.bias.base = static_cast<char*>(out.data) + first * dtype_bytes(out.dtype);
  to.bias.dtype = out.dtype;
  column_sums(pool, {1, group, nullptr, rows, weight, 2, width, &to, accumulate});
}

}  // namespace

void row_factors(const ThreadPool& pool, const RowFactors& step) {
  for_each_row(pool, *step.mlp, [&](int64_t row) {
    const float weight = is_on_input(*step.desc) ? 1.0f : step.plan->row_weight[row];
    step.factor[row] = weight * routed_factor(*step.desc, step.mix, token_of(*step.mlp, row));
  });
}

void mix_factors(const ThreadPool& pool, const MixFactors& step) {
  for_each_token(pool, step.num_tokens,
                 [&](int64_t t) { step.factor[t] = step.mix ? step.mix[2 * t + 1] : 1.0f; });
}

void gate_grad(const ThreadPool& pool, const GateGrad& step) {
  const SharedGate& gate = step.gate;
  const moec_experts_desc& desc = *gate.desc;
  for_each_token(pool, gate.num_tokens, [&](int64_t t) {
    float* const d = step.d_logits;  // first holds the gradient of mix
    d[2 * t] = desc.shared == MOEC_SHARED_SOFTMAX2 ? d_routed_mix(step, t) : 0.0f;
    d[2 * t + 1] = output_dot(step.shared, step.d_y, t, t);
    shared_gate_backward(gate, t, step.mix, d, d);
  });
  const GemmRows x = {gate.x.data, desc.dtype, desc.hidden, nullptr};
  for (int i = 0; i < gate.logits() && step.d_gate; ++i)
    token_sums(pool, gate.num_tokens, x, step.d_logits + i, desc.hidden, step.d_gate,
               i * desc.hidden, step.accumulate);
  if (step.d_bias)
    token_sums(pool, gate.num_tokens, {step.d_logits, MOEC_F32, 2, nullptr}, nullptr, 2,
               step.d_bias, 0, step.accumulate);
}

void routing_weight_grads(const ThreadPool& pool, const CombineGrad& step) {
  const PlanView& plan = *step.plan;
  const moec_experts_desc& desc = *step.desc;
  const bool choice = plan.kind == MOEC_PLAN_EXPERT_CHOICE;
  const int64_t entries = choice ? plan.max_rows : plan.num_tokens * plan.top_k;
  std::fill_n(step.d_routing_weights, entries, 0.0f);
  for_each_token(pool, plan.num_tokens, [&](int64_t t) {
    for_each_share(plan, t, ShareOrder::kSlot, [&](const Share& share) {
      const bool from_input = is_on_input(desc) && share.row >= 0;
      step.d_routing_weights[share.entry] =
          from_input
              ? sum_of(step.dots.input_dots, share.row, dot_columns(desc.hidden))
              : routed_factor(desc, step.mix, t) * share_dot(step.dots, step.d_y, step.x, t, share);
    });
  });
}

void direct_grads(const ThreadPool& pool, const DirectGrads& step) {
  const Array& d_y = step.d_y;
  if (step.d_output_bias)
    token_sums(pool, step.num_tokens, {d_y.data, d_y.dtype, step.hidden, nullptr}, nullptr,
               step.hidden, step.d_output_bias, 0, step.accumulate);
  if (!step.d_residual) return;
  const int64_t bytes = step.hidden * dtype_bytes(d_y.dtype) * kTokensPerTask;
  const int64_t all = step.num_tokens * step.hidden * dtype_bytes(d_y.dtype);
  pool.parallel_for((all + bytes - 1) / bytes, [&](int32_t, int64_t i) {
    std::memcpy(static_cast<char*>(step.d_residual) + i * bytes,
                static_cast<const char*>(d_y.data) + i * bytes,
                size_t(std::min(bytes, all - i * bytes)));
  });
}

}  // namespace moec::cpu
