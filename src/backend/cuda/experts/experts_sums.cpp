// SPDX-License-Identifier: Apache-2.0
#include "backend/cuda/experts/experts_sums.h"

#include "backend/cuda/device/check.h"
#include "core/dtype.h"

namespace moec::cuda {

CombineParams sum_of_rows(const moec_experts_desc& desc, const PlanView& plan, const void* rows,
                          void* to, const void* residual) {
  CombineParams p = {};
  p.num_tokens = plan.num_tokens;
  p.hidden = desc.hidden;
  p.num_experts = plan.num_experts;
  p.num_zero = plan.num_zero;
  p.top_k = plan.top_k;
  p.rows = rows;
  p.assignment_row = plan.assignment_row;
  p.expert_ids = plan.expert_ids;
  p.routing_weights = plan.routing_weights;
  p.counts_once = true;
  p.residual = residual;
  p.scale = desc.output_scale;
  p.y = to;
  return p;
}

CombineParams sum_of_outputs(const ExpertsArgs& args, const void* rows) {
  CombineParams p = sum_of_rows(*args.desc, *args.plan, rows, args.y, args.residual);
  p.counts_once = false;
  p.x = args.x.data;
  p.bias = args.output_bias.data;
  p.skip_absent = args.skip_absent;
  return p;
}

void gate_gradients(const Op& op, const ExpertsGradArgs& args, const WeightGrad& routed,
                    const SharedDots& shared, float* d_logits) {
  const moec_experts_desc& desc = *args.desc;
  mix_backward(op, routed, shared, d_logits);
  const int logits = desc.shared == MOEC_SHARED_SOFTMAX2 ? 2 : 1;
  for (int i = 0; i < logits && args.d_shared_gate; ++i)
    token_sums(op, args.num_tokens, {args.x, desc.hidden, d_logits + i}, args.d_shared_gate,
               i * desc.hidden, args.accumulate);
  if (args.d_shared_gate_bias)
    token_sums(op, args.num_tokens, {{d_logits, MOEC_F32}, 2, nullptr}, args.d_shared_gate_bias, 0,
               args.accumulate);
}

void direct_gradients(const Op& op, const ExpertsGradArgs& args) {
  const moec_experts_desc& desc = *args.desc;
  if (args.d_output_bias)
    token_sums(op, args.num_tokens,
               {{const_cast<void*>(args.d_y), desc.dtype}, desc.hidden, nullptr},
               args.d_output_bias, 0, args.accumulate);
  if (!args.d_residual || args.num_tokens == 0) return;
  const auto bytes = size_t(args.num_tokens * desc.hidden * dtype_bytes(desc.dtype));
  check(cudaMemcpyAsync(args.d_residual, args.d_y, bytes, cudaMemcpyDefault, op.stream),
        "gradient of the residual");
}

}  // namespace moec::cuda
