// SPDX-License-Identifier: Apache-2.0
// The experts by Hopper's kernels: which run, on which memory.
//   forward    up (gather, activation; pre-activations when saved), down, combine
//   backward   grad down (gather; d_pre, weighted act, parts of the weight gradient), down's weight
//              gradient, grad up, gate and up's weight gradient, combine; gradients of biases
#include <utility>

#include "backend/cuda/experts_memory.h"
#include "backend/cuda/experts_path.h"
#include "backend/cuda/fast_products.h"

namespace moec::cuda {
namespace {

constexpr int kElementBytes = 2;  // bf16 and f16

// The routing weights' gradient: parts of <d_act, act>, and <d_y, bias of down>.
int weight_parts(const moec_experts_desc& desc) {
  return fast_dot_parts(desc.inter) + 1;
}

struct Memory {
  void *pre, *act, *rows;  // [P,2,I], [P,I], [P,H]
  void *d_pre, *weighted;  // [P,2,I], [P,I]
  float* d_weight_parts;   // [weight_parts, P]
  float* factor;           // [P], of routing weights and output_scale
  unsigned* work_counters;
};
void lay_out_forward(const moec_experts_desc& desc, Arena& work, Memory& memory) {
  memory.work_counters = work.take_array<unsigned>(kWorkCounters, 0);
  memory.act = take_rows(work, desc, desc.inter * kElementBytes);
  memory.rows = take_rows(work, desc, desc.hidden * kElementBytes);
}
void lay_out_backward(const moec_experts_desc& desc, Arena& work, Memory& memory) {
  memory.work_counters = work.take_array<unsigned>(kWorkCounters, 0);
  if (desc.save == MOEC_SAVE_INPUT)
    memory.pre = take_rows(work, desc, 2 * desc.inter * kElementBytes);
  memory.d_pre = take_rows(work, desc, 2 * desc.inter * kElementBytes);
  memory.weighted = take_rows(work, desc, desc.inter * kElementBytes);
  memory.act = memory.weighted;  // recomputed, then overwritten
  memory.rows = take_rows(work, desc, desc.hidden * kElementBytes);
  memory.d_weight_parts =
      static_cast<float*>(take_rows(work, desc, weight_parts(desc) * int64_t(sizeof(float))));
  memory.factor = static_cast<float*>(take_rows(work, desc, sizeof(float)));
}

FastMlp mlp_of(const moec_experts_desc& desc, const PlanView& plan, const WeightsView& weights) {
  return {desc.hidden,
          desc.inter,
          desc.dtype,
          desc.activation,
          &weights,
          {{plan.num_local, plan.group_offsets, plan.counts, plan.max_rows}, plan.row_token}};
}

CombineParams combine_params(const moec_experts_desc& desc, const PlanView& plan, const void* rows,
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
  p.residual = residual;
  p.scale = desc.output_scale;
  p.y = to;
  return p;
}

void walk_forward(const ExpertsArgs& args, FastProducts& products) {
  const moec_experts_desc& desc = *args.desc;
  const PlanView& plan = *args.plan;
  if (args.output_bias && args.output_bias.dtype != desc.dtype)
    products.refuse("an output bias of another type than x");
  Memory memory = {};
  Arena work(args.workspace, args.num_tokens), saved(args.saved, args.num_tokens);
  lay_out_forward(desc, work, memory);
  if (args.saved) memory.pre = lay_out_saved(desc, saved).pre;
  CombineParams p = combine_params(desc, plan, memory.rows, args.y, args.residual);
  p.weights = plan.weights;
  p.x = args.x.data;
  p.bias = args.output_bias.data;
  products.use(memory.work_counters);
  products.up(args.x.data, memory.pre, memory.act);
  products.down(memory.act, memory.rows, Early::kWeights);
  products.combine(p);
}

// Gradients of x and of the routing weights where the rows are not all there is to add.
void combine_scaled(const Op& op, const ExpertsGradArgs& args, const Memory& memory, int parts) {
  const moec_experts_desc& desc = *args.desc;
  const Array d_y = {const_cast<void*>(args.d_y), desc.dtype};
  if (args.d_x) {
    InputGradSum sum = {};
    sum.desc = &desc;
    sum.plan = args.plan;
    sum.rows = {memory.rows, desc.dtype};
    sum.d_y = d_y;
    sum.d_x = {args.d_x, desc.dtype};
    sum.accumulate = args.accumulate_x;
    combine_input_grad(op, sum);
  }
  if (!args.d_weights) return;
  WeightGrad grad = {&desc, args.plan, nullptr, memory.d_weight_parts, nullptr, args.x, d_y};
  grad.dot_parts = parts;
  routing_weight_grad(op, grad, args.d_weights);
}

void walk_backward(const Op& op, const ExpertsGradArgs& args, const FastMlp& mlp,
                   FastProducts& products) {
  const moec_experts_desc& desc = *args.desc;
  const PlanView& plan = *args.plan;
  const WeightsView none = {}, &d = args.d_expert_weights ? *args.d_expert_weights : none;
  const bool down = d.down.present(), gate = d.gate.present();
  const bool scaled = desc.output_scale != 1.0f, simple = !scaled && plan.num_zero == 0;
  if (gate != d.up.present()) products.refuse("the gradient of only one of gate and up");
  Memory memory = {};
  Arena work(args.workspace, args.num_tokens);
  Arena saved(const_cast<void*>(args.saved), args.num_tokens);
  memory.pre = lay_out_saved(desc, saved).pre;
  lay_out_backward(desc, work, memory);
  const float* const factor = scaled ? memory.factor : plan.row_weight;
  const bool biased = args.weights->down.has_bias() && args.d_weights;
  const int parts = weight_parts(desc) - (biased ? 0 : 1);
  if (scaled)
    products.queue([&] { row_factors(op, desc, plan, mlp.rows, nullptr, memory.factor); });
  products.use(memory.work_counters);
  if (desc.save == MOEC_SAVE_INPUT) products.up(args.x.data, memory.pre, memory.act);
  products.grad_down(args.d_y,
                     {memory.pre, memory.d_pre, memory.weighted, factor, memory.d_weight_parts});
  // Those that follow read what grad down wrote, and nothing of each other: the first waits for it.
  Early first = Early::kNothing;
  const auto early = [&] { return std::exchange(first, Early::kAll); };
  if (down)
    products.grad_weights(memory.weighted, args.d_y, d.down, nullptr, args.accumulate, early());
  if (args.d_x) products.grad_up(memory.d_pre, memory.rows, early());
  if (gate)
    products.grad_weights(memory.d_pre, args.x.data, d.gate, &d.up, args.accumulate, early());
  products.grad_biases(d, memory.d_pre, args.d_y, factor, args.accumulate);
  if (biased)
    products.queue([&] {
      row_dots(op, mlp.rows, desc.hidden, {}, &args.weights->down,
               {const_cast<void*>(args.d_y), desc.dtype}, false,
               memory.d_weight_parts + (parts - 1) * plan.max_rows);
    });
  if (!simple) {
    products.queue([&] { combine_scaled(op, args, memory, parts); });
    return;
  }
  CombineParams p =
      combine_params(desc, plan, memory.rows, args.d_x, args.accumulate_x ? args.d_x : nullptr);
  p.d_weight_parts = memory.d_weight_parts;
  p.parts = parts;
  p.max_rows = plan.max_rows;
  p.d_weights = args.d_weights;
  if (args.d_x || args.d_weights) products.combine(p);
}

// The output bias gets the sum of d_y.
void sum_tokens(const Op& op, const ExpertsGradArgs& args) {
  const moec_experts_desc& desc = *args.desc;
  ExpertMatrix to;
  to.bias_base = args.d_output_bias.data;
  to.bias_dtype = args.d_output_bias.dtype;
  ColumnSums sums = {};
  sums.rows = {{1, nullptr, nullptr, args.num_tokens}, nullptr};
  sums.from = {const_cast<void*>(args.d_y), desc.dtype};
  sums.stride = sums.width = desc.hidden;
  sums.out = &to;
  sums.accumulate = args.accumulate;
  column_sums(op, sums);
}

const char* forward(const Op& op, const ExpertsArgs& args) {
  const FastMlp mlp = mlp_of(*args.desc, *args.plan, *args.weights);
  for (const bool queues : {false, true}) {
    FastProducts products(op, mlp, queues);
    walk_forward(args, products);
    if (products.refused) return products.refused;
  }
  const moec_experts_desc& desc = *args.desc;
  op.count(0, 3 * product_flops(args.num_tokens * desc.top_k, desc.hidden, desc.inter));
  return nullptr;
}

const char* backward(const Op& op, const ExpertsGradArgs& args) {
  const FastMlp mlp = mlp_of(*args.desc, *args.plan, *args.weights);
  for (const bool queues : {false, true}) {
    FastProducts products(op, mlp, queues);
    walk_backward(op, args, mlp, products);
    if (products.refused) return products.refused;
  }
  const moec_experts_desc& desc = *args.desc;
  if (args.d_residual) {
    const auto bytes = size_t(args.num_tokens * desc.hidden * kElementBytes);
    check(cudaMemcpyAsync(args.d_residual, args.d_y, bytes, cudaMemcpyDeviceToDevice, op.stream),
          "gradient of the residual");
  }
  if (args.d_output_bias) sum_tokens(op, args);
  const WeightsView* const d = args.d_expert_weights;
  const uint64_t again = desc.save == MOEC_SAVE_INPUT ? 2 : 0, inputs = args.d_x ? 2 : 0;
  const uint64_t weights = d ? (d->down.present() ? 1 : 0) + (d->gate.present() ? 2 : 0) : 0;
  op.count(0, (1 + again + inputs + weights) *
                  product_flops(args.num_tokens * desc.top_k, desc.hidden, desc.inter));
  return nullptr;
}

void measure(const moec_experts_desc& desc, moec_size& forward_size, moec_size& backward_size) {
  Arena forward_arena, backward_arena;
  Memory memory = {};
  lay_out_forward(desc, forward_arena, memory);
  lay_out_backward(desc, backward_arena, memory);
  forward_size = forward_arena.size();
  backward_size = backward_arena.size();
}

const char* refuses(const moec_experts_desc& desc) {
  const struct {
    bool lacks;
    const char* what;
  } rules[] = {
      {desc.dtype != MOEC_BF16 && desc.dtype != MOEC_F16, "f32"},
      {desc.hidden % 8 || desc.inter % 8, "a hidden or inter that is not a multiple of 8"},
      {!is_gated(desc), "plain MLPs"},
      {!row_gemm_activates(desc.activation), "an activation that is not g sigmoid(a g) u"},
      {desc.weight_position != MOEC_WEIGHT_ON_OUTPUT, "weights that are not on the output"},
      {desc.combine != MOEC_COMBINE_FP32_SLOT, "combines other than FP32_SLOT"},
      {desc.act_rounding != MOEC_ACT_FP32_ONCE, "act_rounding other than FP32_ONCE"},
      {has_shared(desc), "shared experts"},
      {desc.max_rows_base != 0, "expert choice"},
  };
  for (const auto& rule : rules)
    if (rule.lacks) return rule.what;
  return nullptr;
}

}  // namespace

const ExpertsPath kFastPath = {
    "fast",
    true,
    refuses,
    forward,
    backward,
    measure,
    "\"row_gemm\": {\"features\": 256, \"rows\": \"16..128 by 16\", \"k\": 64, \"cluster\": 2}, "
    "\"weight_grad\": {\"m\": 256, \"n\": 128, \"k\": \"64, tail 16\"}"};

}  // namespace moec::cuda
