// SPDX-License-Identifier: Apache-2.0
// The experts by Hopper's kernels: which run, on which memory.
//   forward    up (gather, activation; pre-activations when saved), down, combine
//   backward   grad down (gather; d_pre, weighted act, parts of the weight gradient), down's weight
//              gradient, grad up, gate and up's weight gradient, combine; gradients of biases
// and the same products again for a shared expert.
#include <optional>
#include <utility>

#include "backend/cuda/experts/experts_path.h"
#include "backend/cuda/experts/experts_sums.h"
#include "backend/cuda/sm90/fast_shared.h"

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
  float* factor;           // [P], of routing weights, output_scale and mix
  WorkCounters* work_counters;
  SharedMemory shared;
};
void lay_out_forward(const moec_experts_desc& desc, Arena& work, Memory& memory) {
  memory.work_counters = work.take_array<WorkCounters>(1, 0);
  memory.act = take_rows(work, desc, desc.inter * kElementBytes);
  memory.rows = take_rows(work, desc, desc.hidden * kElementBytes);
  lay_out_shared(desc, false, work, memory.shared);
}
void lay_out_backward(const moec_experts_desc& desc, Arena& work, Memory& memory) {
  memory.work_counters = work.take_array<WorkCounters>(1, 0);
  if (desc.save == MOEC_SAVE_INPUT)
    memory.pre = take_rows(work, desc, 2 * desc.inter * kElementBytes);
  memory.d_pre = take_rows(work, desc, 2 * desc.inter * kElementBytes);
  memory.weighted = take_rows(work, desc, desc.inter * kElementBytes);
  memory.act = memory.weighted;  // recomputed, then overwritten
  memory.rows = take_rows(work, desc, desc.hidden * kElementBytes);
  memory.d_weight_parts =
      static_cast<float*>(take_rows(work, desc, weight_parts(desc) * int64_t(sizeof(float))));
  memory.factor = static_cast<float*>(take_rows(work, desc, sizeof(float)));
  lay_out_shared(desc, true, work, memory.shared);
}
// What forward has kept, or keeps.
void take_saved(const moec_experts_desc& desc, Arena& saved, Memory& memory) {
  if (desc.save < MOEC_SAVE_PREACT) return;
  const Saved kept = lay_out_saved(desc, saved);
  memory.pre = kept.pre;
  memory.shared.pre = kept.shared_pre;
}

FastMlp mlp_of(const moec_experts_desc& desc, const PlanView& plan, const WeightsView& weights) {
  return {desc.hidden,
          desc.inter,
          desc.dtype,
          desc.activation,
          &weights,
          {{plan.num_local, plan.group_offsets, plan.counts, plan.max_rows}, plan.row_token}};
}

Memory forward_memory(const ExpertsArgs& args) {
  Memory memory = {};
  Arena work(args.workspace, args.num_tokens), saved(args.saved, args.num_tokens);
  lay_out_forward(*args.desc, work, memory);
  if (args.saved) take_saved(*args.desc, saved, memory);
  return memory;
}
Memory backward_memory(const ExpertsGradArgs& args) {
  Memory memory = {};
  Arena work(args.workspace, args.num_tokens);
  Arena saved(const_cast<void*>(args.saved), args.num_tokens);
  lay_out_backward(*args.desc, work, memory);
  take_saved(*args.desc, saved, memory);
  return memory;
}

// y = residual + c0 scale sum(w rows) + output bias + c1 shared
void combine_shared(const Op& op, const ExpertsArgs& args, const Memory& memory) {
  const moec_dtype dtype = args.desc->dtype;
  OutputSum sum = {};
  sum.desc = args.desc;
  sum.plan = args.plan;
  sum.rows = {memory.rows, dtype};
  sum.shared = {memory.shared.rows, dtype};
  sum.mix = memory.shared.mix;
  sum.x = args.x;
  sum.output_bias = args.output_bias;
  if (args.residual) sum.residual = {const_cast<void*>(args.residual), dtype};
  sum.y = {args.y, dtype};
  combine_output(op, sum);
}

void walk_forward(const Op& op, const ExpertsArgs& args, const Memory& memory,
                  FastProducts& products, FastProducts* shared) {
  const moec_experts_desc& desc = *args.desc;
  products.use(memory.work_counters);
  products.up(args.x.data, memory.pre, memory.act);
  products.down(memory.act, memory.rows, Early::kWeights);
  if (shared) {
    shared_forward(op, args, memory.shared, *shared);
    shared->queue([&] { combine_shared(op, args, memory); });
    return products.refuse(shared->refused);
  }
  if (args.output_bias && args.output_bias.dtype != desc.dtype)
    products.refuse("an output bias of another type than x");
  products.combine(sum_of_outputs(args, memory.rows));
}

// Gradients of x and of the routing weights where the rows are not all there is to add.
void combine_gradients(const Op& op, const ExpertsGradArgs& args, const Memory& memory, int parts,
                       const SharedBackward* shared) {
  const moec_experts_desc& desc = *args.desc;
  const float* const mix = memory.shared.mix;
  const Array d_y = {const_cast<void*>(args.d_y), desc.dtype};
  const WeightGrad grad = {&desc,   args.plan, mix, memory.d_weight_parts,
                           nullptr, args.x,    d_y, parts};
  if (shared) shared->gate_gradients(grad);
  if (args.d_routing_weights) routing_weight_grad(op, grad, args.d_routing_weights);
  if (!args.d_x) return;
  InputGradSum sum = {};
  sum.desc = &desc;
  sum.plan = args.plan;
  sum.rows = {memory.rows, desc.dtype};
  if (shared) sum.shared = {memory.shared.rows, desc.dtype};
  sum.mix = mix;
  sum.d_logits = memory.shared.d_logits;
  sum.shared_gate = args.shared_gate;
  sum.d_y = d_y;
  sum.d_x = {args.d_x, desc.dtype};
  sum.accumulate = args.accumulate_x;
  combine_input_grad(op, sum);
}

void walk_backward(const Op& op, const ExpertsGradArgs& args, const Memory& memory,
                   FastProducts& products, FastProducts* shared) {
  const moec_experts_desc& desc = *args.desc;
  const PlanView& plan = *args.plan;
  const WeightsView none = {}, &d = args.d_expert_weights ? *args.d_expert_weights : none;
  const bool down = d.down.present(), gate = d.gate.present(), mixed = memory.shared.mix;
  const bool scaled = desc.output_scale != 1.0f || mixed;
  if (gate != d.up.present()) products.refuse("the gradient of only one of gate and up");
  const float* const factor = scaled ? memory.factor : plan.row_weight;
  const bool biased = args.weights->down.has_bias() && (args.d_routing_weights || mixed);
  const int parts = weight_parts(desc) - (biased ? 0 : 1);
  std::optional<SharedBackward> of_shared;
  if (shared) {
    of_shared.emplace(op, args, memory.shared, *shared).run();
    products.refuse(shared->refused);
  }
  if (scaled)
    products.queue([&] {
      row_factors(op, desc, plan, products.mlp().rows, memory.shared.mix, memory.factor);
    });
  products.use(memory.work_counters);
  if (desc.save == MOEC_SAVE_INPUT) products.up(args.x.data, memory.pre, memory.act);
  products.grad_down(args.d_y,
                     {memory.pre, memory.d_pre, memory.weighted, factor, memory.d_weight_parts});
  // Those that follow read what grad down wrote, and nothing of each other: the first waits for it.
  // All take their tiles from counters; those of weight gradients, the smaller ones, fill what grad
  // up leaves. Without rows no product of rows is launched, and each waits for those before.
  Early first = Early::kNothing;
  const auto early = [&] {
    return plan.max_rows == 0 ? Early::kNothing : std::exchange(first, Early::kAll);
  };
  if (args.d_x) products.grad_up(memory.d_pre, memory.rows, early());
  if (down)
    products.grad_weights(memory.weighted, args.d_y, d.down, nullptr, args.accumulate, early());
  if (gate)
    products.grad_weights(memory.d_pre, args.x.data, d.gate, &d.up, args.accumulate, early());
  products.grad_biases(d, memory.d_pre, args.d_y, factor, args.accumulate);
  if (biased)
    products.queue([&] {
      row_dots(op, products.mlp().rows, desc.hidden, {}, &args.weights->down,
               {const_cast<void*>(args.d_y), desc.dtype}, false,
               memory.d_weight_parts + (parts - 1) * plan.max_rows);
    });
  if (scaled || shared || plan.num_zero > 0)
    return products.queue(
        [&] { combine_gradients(op, args, memory, parts, shared ? &*of_shared : nullptr); });
  CombineParams p =
      sum_of_rows(desc, plan, memory.rows, args.d_x, args.accumulate_x ? args.d_x : nullptr);
  p.d_weight_parts = memory.d_weight_parts;
  p.parts = parts;
  p.max_rows = plan.max_rows;
  p.d_routing_weights = args.d_routing_weights;
  if (args.d_x || args.d_routing_weights) products.combine(p);
}

// First every kernel is asked, then all are queued.
template <class Args, class Walk>
const char* walk_twice(const Op& op, const Args& args, const Memory& memory, const Walk& walk) {
  const moec_experts_desc& desc = *args.desc;
  const FastMlp mlp = mlp_of(desc, *args.plan, *args.weights);
  FastMlp shared_mlp = {};
  if (has_shared(desc))
    shared_mlp = fast_shared_mlp(desc, args.num_tokens, *args.shared_weights, memory.shared);
  for (const bool queues : {false, true}) {
    FastProducts products(op, mlp, queues);
    std::optional<FastProducts> shared;
    if (has_shared(desc)) shared.emplace(op, shared_mlp, queues);
    walk(op, args, memory, products, shared ? &*shared : nullptr);
    if (products.refused) return products.refused;
  }
  return nullptr;
}

uint64_t flops_of(const moec_experts_desc& desc, int64_t tokens, uint64_t routed, uint64_t shared) {
  const uint64_t of_shared =
      has_shared(desc) ? shared * product_flops(tokens, desc.hidden, desc.shared_inter) : 0;
  return routed * product_flops(tokens * desc.top_k, desc.hidden, desc.inter) + of_shared;
}

const char* forward(const Op& op, const ExpertsArgs& args) {
  if (const char* why = walk_twice(op, args, forward_memory(args), walk_forward)) return why;
  op.count(0, flops_of(*args.desc, args.num_tokens, 3, 3));
  return nullptr;
}

const char* backward(const Op& op, const ExpertsGradArgs& args) {
  if (const char* why = walk_twice(op, args, backward_memory(args), walk_backward)) return why;
  const moec_experts_desc& desc = *args.desc;
  direct_gradients(op, args);
  const auto products = [&](const WeightsView* d) {
    const uint64_t again = desc.save == MOEC_SAVE_INPUT ? 2 : 0, inputs = args.d_x ? 2 : 0;
    return 1 + again + inputs + (d ? d->down.present() + 2 * d->gate.present() : 0);
  };
  op.count(0, flops_of(desc, args.num_tokens, products(args.d_expert_weights),
                       products(args.d_shared_weights)));
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
      {!row_gemm_activates(desc.activation),
       "an activation that is not g sigmoid(p(g)) u with a rising p"},
      {desc.weight_position != MOEC_WEIGHT_ON_OUTPUT, "weights that are not on the output"},
      {desc.combine != MOEC_COMBINE_FP32_SLOT, "combines other than FP32_SLOT"},
      {desc.act_rounding != MOEC_ACT_FP32_ONCE, "act_rounding other than FP32_ONCE"},
      {has_shared(desc) && (desc.shared_inter % 8 || !row_gemm_activates(desc.shared_activation)),
       "this shared expert"},
      {desc.max_rows_base != 0, "expert choice"},
  };
  for (const auto& rule : rules)
    if (rule.lacks) return rule.what;
  return nullptr;
}

}  // namespace

static_assert(kSharedProducts == 4e10 && kLongTile == 5120 && kSingleTiles == 800 &&
                  kLongRun == 4 && kShortRun == 2 && kLongRunRows == 512,
              "what describe says");
const ExpertsPath kFastPath = {
    "fast",
    true,
    refuses,
    forward,
    backward,
    measure,
    "\"row_gemm\": {\"features\": \"64..256 by 64\", "
    "\"rows\": \"8..144 by 8, to 128 where pre-activations are kept or read or gate and up "
    "alternate\", \"k\": 64, \"cluster\": 2, "
    "\"weights_by_multicast\": \"rows * hidden * inter >= 4e10\", \"in_pace\": \"k >= 5120\"}, "
    "\"weight_grad\": {\"m\": 256, \"n\": 128, \"k\": \"64, tail 16\", \"cluster\": 2, "
    "\"m_tiles_in_turn\": \"4 up to 512 rows of an expert, else 2; the last 800 tiles 1\"}"};

}  // namespace moec::cuda
