// SPDX-License-Identifier: Apache-2.0
// The shared expert's gate and what depends on it: y = c0 routed + c1 shared, with
//   SIGMOID_GATE  c = (1, sigmoid(x . wg))        SOFTMAX2  c = softmax(x Wc^T + bc)
// One warp a token (or a token's slot).
#include "backend/cuda/device/op.cuh"
#include "backend/cuda/device/span.cuh"
#include "backend/cuda/rows/row_ops.h"
#include "math/exp.h"

namespace moec::cuda {
namespace {

constexpr int kWarps = kBlockThreads / 32;

__device__ float load_one(const Array& from, int64_t at) {
  return load_span<1>(from, at)[0];
}
__device__ float dot(const Array& a, int64_t a_at, const Array& b, int64_t b_at, int64_t n) {
  float sum = 0;
  for_columns(int(n), [&](int i) { sum += load_one(a, a_at + i) * load_one(b, b_at + i); });
  return warp_sum(sum);
}

struct MixParams {
  int64_t num_tokens, hidden;
  bool softmax;
  Array x, weight, bias;
  float* mix;
};
__global__ __launch_bounds__(kBlockThreads) void mix_kernel(const MixParams p) {
  begin_kernel();
  for (int64_t t = global_warp(); t < p.num_tokens; t += global_warps()) {
    float z[2] = {0, 0};
    for (int i = 0; i < (p.softmax ? 2 : 1); ++i)
      z[i] = (p.bias ? load_one(p.bias, i) : 0.0f) +
             dot(p.x, t * p.hidden, p.weight, i * p.hidden, p.hidden);
    if (lane_id() > 0) continue;
    p.mix[2 * t] = p.softmax ? math::sigmoid(z[0] - z[1]) : 1.0f;
    p.mix[2 * t + 1] = math::sigmoid(p.softmax ? z[1] - z[0] : z[0]);
  }
}

struct FactorParams {
  Rows rows;
  const float *row_weight, *mix;  // null = 1
  float scale;
  float* factor;
};
__global__ __launch_bounds__(kBlockThreads) void row_factors_kernel(const FactorParams p) {
  begin_kernel();
  for (int64_t row = global_thread(); row < p.rows.groups.max_rows; row += global_threads()) {
    if (group_of(p.rows.groups, row) < 0) {
      p.factor[row] = 0.0f;  // padding, whose results are cleared by its weight
      continue;
    }
    const float routed = p.mix ? p.scale * p.mix[2 * int64_t(p.rows.row_token[row])] : p.scale;
    p.factor[row] = (p.row_weight ? p.row_weight[row] : 1.0f) * routed;
  }
}
__global__ __launch_bounds__(kBlockThreads) void mix_factors_kernel(int64_t num_tokens,
                                                                    const float* mix,
                                                                    float* factor) {
  begin_kernel();
  for (int64_t t = global_thread(); t < num_tokens; t += global_threads())
    factor[t] = mix ? mix[2 * t + 1] : 1.0f;
}

struct GradParams {
  moec_experts_desc desc;
  PlanView plan;
  const float *mix, *dots, *input_dots;
  Array x, d_y;
  int dot_parts;

  __device__ bool on_input() const { return desc.weight_position == MOEC_WEIGHT_ON_INPUT; }
  // <d_y of token t, what the share adds>, of the whole warp
  __device__ float share_dot(int64_t t, const Share& share) const {
    if (share.row >= 0) {
      float sum = 0;
      for (int part = 0; part < dot_parts; ++part) sum += dots[part * plan.max_rows + share.row];
      return sum;
    }
    return dot(d_y, t * desc.hidden, x, t * desc.hidden, desc.hidden);
  }
};

__global__ __launch_bounds__(kBlockThreads) void mix_backward_kernel(const GradParams p,
                                                                     const SharedDots shared,
                                                                     float* d_logits) {
  begin_kernel();
  const bool softmax = p.desc.shared == MOEC_SHARED_SOFTMAX2;
  for (int64_t t = global_warp(); t < p.plan.num_tokens; t += global_warps()) {
    float d0 = 0;  // gradient of c0: <d_y, routed sum>
    if (softmax) {
      for_each_share(p.plan, t, ShareOrder::kSlot, [&](const Share& share) {
        const float weight = p.on_input() && share.row >= 0 ? 1.0f : share.weight;
        if (weight != 0.0f) d0 += weight * p.share_dot(t, share);
      });
      d0 *= p.desc.output_scale;
    }
    if (lane_id() > 0) continue;
    const float c0 = p.mix[2 * t], c1 = p.mix[2 * t + 1];
    float d1 = 0;  // of c1: <d_y, shared>
    for (int part = 0; part < shared.parts; ++part) d1 += shared.dots[part * p.plan.num_tokens + t];
    const float d = softmax ? c0 * c1 * (d0 - d1) : c1 * (1.0f - c1) * d1;
    d_logits[2 * t] = d;
    d_logits[2 * t + 1] = softmax ? -d : 0.0f;
  }
}

__global__ __launch_bounds__(kBlockThreads) void routing_weight_grad_kernel(
    const GradParams p, float* d_routing_weights) {
  begin_kernel();
  for (int64_t t = global_warp(); t < p.plan.num_tokens; t += global_warps()) {
    const float factor = p.mix ? p.desc.output_scale * p.mix[2 * t] : p.desc.output_scale;
    for_each_share(p.plan, t, ShareOrder::kSlot, [&](const Share& share) {
      const bool from_input = p.on_input() && share.row >= 0;
      const float d = from_input ? p.input_dots[share.row] : factor * p.share_dot(t, share);
      if (lane_id() == 0) d_routing_weights[share.entry] = d;
    });
  }
}

GradParams grad_params(const RoutingGrad& grad) {
  return {*grad.desc,      *grad.plan, grad.mix, grad.dots,
          grad.input_dots, grad.x,     grad.d_y, grad.dot_parts};
}
dim3 mix_grid(const Op& op, int64_t items) {
  return grid_for(items, kWarps, int64_t(op.multiprocessors) * 64);
}
dim3 thread_grid(const Op& op, int64_t items) {
  return grid_for(items, kBlockThreads, int64_t(op.multiprocessors) * 16);
}

}  // namespace

void mix_forward(const Op& op, const SharedGate& gate, float* mix) {
  if (gate.num_tokens == 0) return;
  const MixParams p = {
      gate.num_tokens, gate.desc->hidden, gate.logits() == 2, gate.x, gate.weight, gate.bias, mix};
  run(op, "gate of the shared expert", mix_kernel, mix_grid(op, gate.num_tokens), kBlockThreads, 0,
      p);
}

void row_factors(const Op& op, const moec_experts_desc& desc, const PlanView& plan,
                 const Rows& rows, const float* mix, float* factor) {
  if (rows.groups.max_rows == 0) return;
  const bool on_input = desc.weight_position == MOEC_WEIGHT_ON_INPUT;
  const FactorParams p = {rows, on_input ? nullptr : plan.row_weight, mix, desc.output_scale,
                          factor};
  run(op, "factors of rows", row_factors_kernel, thread_grid(op, rows.groups.max_rows),
      kBlockThreads, 0, p);
}

void mix_factors(const Op& op, int64_t num_tokens, const float* mix, float* factor) {
  if (num_tokens == 0) return;
  run(op, "factors of tokens", mix_factors_kernel, thread_grid(op, num_tokens), kBlockThreads, 0,
      num_tokens, mix, factor);
}

void mix_backward(const Op& op, const RoutingGrad& grad, const SharedDots& shared,
                  float* d_logits) {
  if (grad.plan->num_tokens == 0) return;
  run(op, "gradient of the shared expert's gate", mix_backward_kernel,
      mix_grid(op, grad.plan->num_tokens), kBlockThreads, 0, grad_params(grad), shared, d_logits);
}

void routing_weight_grad(const Op& op, const RoutingGrad& grad, float* d_routing_weights) {
  const PlanView& plan = *grad.plan;
  const bool choice = plan.kind == MOEC_PLAN_EXPERT_CHOICE;
  const int64_t entries = choice ? plan.max_rows : plan.num_tokens * plan.top_k;
  if (entries == 0) return;
  check(cudaMemsetAsync(d_routing_weights, 0, uint64_t(entries) * sizeof(float), op.stream),
        "gradient of routing weights");
  if (plan.num_tokens == 0) return;
  run(op, "gradient of routing weights", routing_weight_grad_kernel, mix_grid(op, plan.num_tokens),
      kBlockThreads, 0, grad_params(grad), d_routing_weights);
}

}  // namespace moec::cuda
