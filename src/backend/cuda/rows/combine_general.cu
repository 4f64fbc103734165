// SPDX-License-Identifier: Apache-2.0
// Sums over the rows of a token: y forward, dx backward. One thread a few neighbouring columns of
// one token; shares in the order that the description asks for.
#include "backend/cuda/device/op.cuh"
#include "backend/cuda/device/span.cuh"
#include "backend/cuda/rows/combine.h"
#include "backend/cuda/rows/row_ops.h"

namespace moec::cuda {
namespace {

struct Sum {  // what both directions share, by value
  moec_experts_desc desc;
  PlanView plan;
  Array rows, shared;
  const float *mix, *d_logits;
  Array from;  // what identity experts add: x, or d_y
  Array bias, gate, before, to;
  bool skip_absent;  // y: tokens without a row
};

__device__ float routed_factor(const Sum& s, int64_t t) {
  return s.mix ? s.desc.output_scale * s.mix[2 * t] : s.desc.output_scale;
}

// As the per-expert loops of eager frameworks: each output, product and sum is rounded.
template <int V>
__device__ void add_rounded(moec_dtype dtype, Span<V>& sum, float weight, Span<V> part) {
  round_span(dtype, part);
#pragma unroll
  for (int i = 0; i < V; ++i) part[i] *= weight;
  round_span(dtype, part);
#pragma unroll
  for (int i = 0; i < V; ++i) sum[i] += part[i];
  round_span(dtype, sum);
}

template <int V>
__device__ Span<V> sum_outputs(const Sum& s, int64_t t, int64_t col) {
  const bool on_output = s.desc.weight_position == MOEC_WEIGHT_ON_OUTPUT;
  const bool on_input = s.desc.weight_position == MOEC_WEIGHT_ON_INPUT;
  const bool in_data_type = s.desc.combine == MOEC_COMBINE_DATA_EXPERT;
  const ShareOrder order =
      s.desc.combine == MOEC_COMBINE_FP32_SLOT ? ShareOrder::kSlot : ShareOrder::kExpert;
  Span<V> sum = {};
  for_each_share(s.plan, t, order, [&](const Share& share) {
    // A zero weight is no expert, whatever its value; on the input, biases still count.
    if (share.weight == 0.0f && (share.row < 0 || !on_input)) return;
    const float weight = share.row < 0 || on_output ? share.weight : 1.0f;
    const Span<V> part = share.row < 0 ? load_span<V>(s.from, t * s.desc.hidden + col)
                                       : load_span<V>(s.rows, share.row * s.desc.hidden + col);
    if (in_data_type)
      add_rounded(s.desc.dtype, sum, weight, part);
    else
      add_scaled(sum, weight, part);
  });
  return sum;
}

template <int V>
__device__ Span<V> sum_gradients(const Sum& s, int64_t t, int64_t col) {
  const bool on_input = s.desc.weight_position == MOEC_WEIGHT_ON_INPUT;
  Span<V> sum = {};
  for_each_share(s.plan, t, ShareOrder::kSlot, [&](const Share& share) {
    if (share.weight == 0.0f) return;
    if (share.row >= 0)
      add_scaled(sum, on_input ? share.weight : 1.0f,
                 load_span<V>(s.rows, share.row * s.desc.hidden + col));
    else
      add_scaled(sum, share.weight * routed_factor(s, t),
                 load_span<V>(s.from, t * s.desc.hidden + col));
  });
  return sum;
}

// body(token, column) for all columns, V at a time.
template <int V, class Body>
__device__ void for_each_span_of_tokens(const Sum& s, const Body& body) {
  const int64_t spans = s.desc.hidden / V;
  for (int64_t i = global_thread(); i < s.plan.num_tokens * spans; i += global_threads()) {
    const int64_t t = i / spans;
    body(t, (i - t * spans) * V);
  }
}

template <int V>
__global__ __launch_bounds__(kBlockThreads) void combine_output_kernel(const Sum s) {
  begin_kernel();
  for_each_span_of_tokens<V>(s, [&](int64_t t, int64_t col) {
    if (s.skip_absent && !has_row(s.plan, t)) return;
    const int64_t at = t * s.desc.hidden + col;
    Span<V> sum = sum_outputs<V>(s, t, col);
    const float factor = routed_factor(s, t);
#pragma unroll
    for (int i = 0; i < V; ++i) sum[i] *= factor;
    if (s.shared) add_scaled(sum, s.mix ? s.mix[2 * t + 1] : 1.0f, load_span<V>(s.shared, at));
    if (s.bias) add_scaled(sum, 1.0f, load_span<V>(s.bias, col));
    if (s.before) add_scaled(sum, 1.0f, load_span<V>(s.before, at));
    store_span(s.to, at, sum);
  });
}

template <int V>
__global__ __launch_bounds__(kBlockThreads) void combine_input_grad_kernel(const Sum s) {
  begin_kernel();
  const int gates = !s.d_logits ? 0 : s.desc.shared == MOEC_SHARED_SOFTMAX2 ? 2 : 1;
  for_each_span_of_tokens<V>(s, [&](int64_t t, int64_t col) {
    const int64_t at = t * s.desc.hidden + col;
    Span<V> sum = sum_gradients<V>(s, t, col);
    if (s.shared) add_scaled(sum, 1.0f, load_span<V>(s.shared, at));
    for (int i = 0; i < gates; ++i)
      add_scaled(sum, s.d_logits[2 * t + i], load_span<V>(s.gate, i * s.desc.hidden + col));
    if (s.before) add_scaled(sum, 1.0f, load_span<V>(s.before, at));
    store_span(s.to, at, sum);
  });
}

void launch(const Op& op, const char* what, const Sum& s, void (*wide)(const Sum),
            void (*narrow)(const Sum)) {
  const bool fits =
      spans_fit(s.desc.hidden, s.rows, s.shared, s.from, s.bias, s.gate, s.before, s.to);
  const int64_t items = s.plan.num_tokens * (fits ? s.desc.hidden / 4 : s.desc.hidden);
  if (items == 0) return;
  const dim3 grid = grid_for(items, kBlockThreads, int64_t(op.multiprocessors) * 32);
  run(op, what, fits ? wide : narrow, grid, kBlockThreads, 0, s);
}

// The kernel for sums in slot order of 16-bit rows, where that is all there is to do.
bool combine_plain(const Op& op, const Sum& s, bool weighted) {
  const moec_experts_desc& desc = s.desc;
  const bool plain = s.rows.dtype == desc.dtype && desc.combine == MOEC_COMBINE_FP32_SLOT &&
                     desc.weight_position == MOEC_WEIGHT_ON_OUTPUT && !s.shared && !s.mix &&
                     !s.gate && s.plan.kind == MOEC_PLAN_TOPK &&
                     (!s.bias || s.bias.dtype == desc.dtype);
  if (!plain) return false;
  CombineParams p = {};
  p.num_tokens = s.plan.num_tokens;
  p.hidden = desc.hidden;
  p.num_experts = s.plan.num_experts;
  p.num_zero = s.plan.num_zero;
  p.top_k = s.plan.top_k;
  p.rows = s.rows.data;
  p.assignment_row = s.plan.assignment_row;
  p.expert_ids = s.plan.expert_ids;
  p.routing_weights = s.plan.routing_weights;
  p.counts_once = !weighted;
  p.x = s.from.data;
  p.residual = s.before.data;
  p.bias = s.bias.data;
  p.scale = weighted ? desc.output_scale : 1.0f;
  p.y = s.to.data;
  p.skip_absent = s.skip_absent;
  if (combine_refuses(p, desc.dtype)) return false;
  check(launch_combine(p, desc.dtype, op.multiprocessors, op.stream), "combine");
  op.count(1);
  return true;
}

}  // namespace

void combine_output(const Op& op, const OutputSum& sum) {
  Sum s = {};
  s.desc = *sum.desc;
  s.plan = *sum.plan;
  s.rows = sum.rows;
  s.shared = sum.shared;
  s.mix = sum.mix;
  s.from = sum.x;
  s.bias = sum.output_bias;
  s.before = sum.residual;
  s.to = sum.y;
  s.skip_absent = sum.skip_absent;
  if (!combine_plain(op, s, true))
    launch(op, "combine", s, combine_output_kernel<4>, combine_output_kernel<1>);
}

void combine_input_grad(const Op& op, const InputGradSum& sum) {
  Sum s = {};
  s.desc = *sum.desc;
  s.plan = *sum.plan;
  s.rows = sum.rows;
  s.shared = sum.shared;
  s.mix = sum.mix;
  s.d_logits = sum.d_logits;
  s.from = sum.d_y;
  s.gate = sum.shared_gate;
  if (sum.accumulate) s.before = sum.d_x;
  s.to = sum.d_x;
  if (s.plan.num_zero > 0 || !combine_plain(op, s, false))
    launch(op, "gradient of x", s, combine_input_grad_kernel<4>, combine_input_grad_kernel<1>);
}

}  // namespace moec::cuda
