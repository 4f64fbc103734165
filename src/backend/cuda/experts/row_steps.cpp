// SPDX-License-Identifier: Apache-2.0
#include "backend/cuda/experts/row_steps.h"

#include "backend/cuda/device/check.h"
#include "core/dtype.h"

namespace moec::cuda {
namespace {

CombineParams sum_of_rows(const moec_experts_desc& desc, const PlanView& plan, const Array& rows) {
  CombineParams p = {};
  p.num_tokens = plan.num_tokens;
  p.hidden = desc.hidden;
  p.num_experts = plan.num_experts;
  p.num_zero = plan.num_zero;
  p.top_k = plan.top_k;
  p.rows = rows.data;
  p.assignment_row = plan.assignment_row;
  p.expert_ids = plan.expert_ids;
  p.routing_weights = plan.routing_weights;
  p.scale = desc.output_scale;
  return p;
}

}  // namespace

CombineParams combine_params(const Combine& s) {
  CombineParams p = sum_of_rows(*s.desc, *s.plan, s.rows);
  p.x = s.x.data;
  p.bias = s.output_bias.data;
  p.residual = s.residual.data;
  p.y = s.y.data;
  p.skip_absent = s.skip_absent;
  return p;
}

CombineParams combine_params(const CombineGrad& s, int dot_parts) {
  CombineParams p = sum_of_rows(*s.desc, *s.plan, s.rows);
  p.counts_once = true;
  p.residual = s.accumulate ? s.d_x.data : nullptr;
  p.y = s.d_x.data;
  p.d_weight_parts = s.dots.dots;
  p.parts = dot_parts;
  p.max_rows = s.plan->max_rows;
  p.d_routing_weights = s.d_routing_weights;
  return p;
}

int RowSteps::parts_of(const Dots& dots) const {
  if (!dot_parts_ || !*dots.mlp) return 1;
  return dot_parts_(dots.mlp->inter) + (dots.biased ? 1 : 0);
}

void RowSteps::operator()(const ListTokens& s) const {
  list_tokens(op_, s.num_tokens, s.offsets, s.tokens);
}
void RowSteps::operator()(const ScaleRows& s) const {
  scale_rows(op_, rows_of(*s.mlp), s.mlp->hidden, s.x, s.weight, s.to);
}
void RowSteps::operator()(const MixForward& s) const {
  mix_forward(op_, s.gate, s.mix);
}
void RowSteps::operator()(const Combine& s) const {
  combine_output(op_, {s.desc, s.plan, s.rows, s.shared, s.mix, s.x, s.output_bias, s.residual, s.y,
                       s.skip_absent});
}
void RowSteps::operator()(const ClearPadding& s) const {
  const auto bytes = uint64_t(static_cast<char*>(s.end) - static_cast<char*>(s.begin));
  clear_padding(op_, s.mlp->groups, s.bytes_of_row, bytes, s.begin);
}
void RowSteps::operator()(const RowFactors& s) const {
  row_factors(op_, *s.desc, *s.plan, rows_of(*s.mlp), s.mix, s.factor);
}
void RowSteps::operator()(const MixFactors& s) const {
  mix_factors(op_, s.num_tokens, s.mix, s.factor);
}

void RowSteps::operator()(const BiasDots& s) const {
  const Mlp& mlp = *s.mlp;
  float* const to = dot_parts_ ? s.dots + dot_parts_(mlp.inter) * mlp.groups.max_rows : s.dots;
  row_dots(op_, rows_of(mlp), mlp.hidden, {}, &mlp.weights->down, s.d_y, !dot_parts_, to);
}

void RowSteps::operator()(const GateGrad& s) const {
  const SharedGate& gate = s.gate;
  const moec_experts_desc& desc = *gate.desc;
  const RoutingGrad routed = {
      &desc, s.plan, s.mix, s.routed.dots, s.routed.input_dots, gate.x, s.d_y, parts_of(s.routed)};
  mix_backward(op_, routed, {s.shared.dots, parts_of(s.shared)}, s.d_logits);
  for (int i = 0; i < gate.logits() && s.d_gate; ++i)
    token_sums(op_, gate.num_tokens, {gate.x, desc.hidden, s.d_logits + i}, s.d_gate,
               i * desc.hidden, s.accumulate);
  if (s.d_bias)
    token_sums(op_, gate.num_tokens, {{s.d_logits, MOEC_F32}, 2, nullptr}, s.d_bias, 0,
               s.accumulate);
}

void RowSteps::operator()(const CombineGrad& s) const {
  if (s.d_routing_weights)
    routing_weight_grad(
        op_, {s.desc, s.plan, s.mix, s.dots.dots, s.dots.input_dots, s.x, s.d_y, parts_of(s.dots)},
        s.d_routing_weights);
  if (!s.d_x) return;
  const Array shared = s.shared_grad ? s.shared : Array{};
  combine_input_grad(op_, {s.desc, s.plan, s.rows, shared, s.mix, s.d_logits, s.shared_gate, s.d_y,
                           s.d_x, s.accumulate});
}

void RowSteps::operator()(const DirectGrads& s) const {
  if (s.d_output_bias)
    token_sums(op_, s.num_tokens, {s.d_y, s.hidden, nullptr}, s.d_output_bias, 0, s.accumulate);
  if (!s.d_residual || s.num_tokens == 0) return;
  const auto bytes = size_t(s.num_tokens * s.hidden * dtype_bytes(s.d_y.dtype));
  check(cudaMemcpyAsync(s.d_residual, s.d_y.data, bytes, cudaMemcpyDefault, op_.stream),
        "gradient of the residual");
}

}  // namespace moec::cuda
