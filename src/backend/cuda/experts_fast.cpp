// SPDX-License-Identifier: Apache-2.0
// The experts by Hopper's kernels: which run, on which memory.
//   forward    up (gather, activation; pre-activations when saved), down, combine
//   backward   grad down (gather; d_pre, weighted act, parts of the weight gradient), down's weight
//              gradient, grad up, gate and up's weight gradient, combine
// Each call is walked twice: first to ask every kernel, then to queue them.
#include <algorithm>

#include "backend/cuda/combine.h"
#include "backend/cuda/experts_memory.h"
#include "backend/cuda/experts_path.h"
#include "backend/cuda/row_gemm.h"
#include "backend/cuda/weight_grad.h"

namespace moec::cuda {
namespace {

constexpr int kElementBytes = 2;  // bf16 and f16

int weight_parts(const moec_experts_desc& desc) {
  return 2 * int((desc.inter + 255) / 256);
}

struct Memory {
  void *pre, *act, *rows;  // [P,2,I], [P,I], [P,H]
  void *d_pre, *weighted;  // [P,2,I], [P,I]
  float* d_weight_parts;   // [parts, P]
};
void lay_out_forward(const moec_experts_desc& desc, Arena& work, Memory& memory) {
  memory.act = take_rows(work, desc, desc.inter * kElementBytes);
  memory.rows = take_rows(work, desc, desc.hidden * kElementBytes);
}
void lay_out_backward(const moec_experts_desc& desc, Arena& work, Memory& memory) {
  if (desc.save == MOEC_SAVE_INPUT)
    memory.pre = take_rows(work, desc, 2 * desc.inter * kElementBytes);
  memory.d_pre = take_rows(work, desc, 2 * desc.inter * kElementBytes);
  memory.weighted = take_rows(work, desc, desc.inter * kElementBytes);
  memory.act = memory.weighted;  // recomputed, then overwritten
  memory.rows = take_rows(work, desc, desc.hidden * kElementBytes);
  memory.d_weight_parts =
      static_cast<float*>(take_rows(work, desc, weight_parts(desc) * int64_t(sizeof(float))));
}

// Everything the products of one call share. `refused` is the first reason that a kernel gave.
class Products {
 public:
  Products(const Op& op, const moec_experts_desc& desc, const PlanView& plan,
           const WeightsView& weights, bool queues)
      : op_(op), desc_(desc), plan_(plan), weights_(weights), queues_(queues) {}

  void up(const void* x, void* pre, void* act) {
    RowGemmArgs args = gate_up(RowGemm::kUp, desc_.inter, desc_.hidden, false);
    args.params.x = x;
    args.params.x_stride = desc_.hidden;
    args.params.pre = pre;
    args.params.out = act;
    run(args);
  }
  void down(const void* act, void* rows) {
    RowGemmArgs args = with_down(RowGemm::kDown, desc_.hidden, desc_.inter, true);
    args.rows = act;
    args.params.out = rows;
    run(args);
  }
  void grad_down(const void* d_y, const Memory& memory) {
    RowGemmArgs args = with_down(RowGemm::kGradDown, desc_.inter, desc_.hidden, false);
    args.params.x = d_y;
    args.params.x_stride = desc_.hidden;
    args.params.pre = memory.pre;
    args.params.d_pre = memory.d_pre;
    args.params.out = memory.weighted;
    args.params.row_weight = plan_.row_weight;
    args.params.d_weight_parts = memory.d_weight_parts;
    run(args);
  }
  void grad_up(const void* d_pre, void* rows) {
    RowGemmArgs args = gate_up(RowGemm::kGradUp, desc_.hidden, desc_.inter, true);
    args.parts = 2;
    args.rows = d_pre;
    args.params.out = rows;
    run(args);
  }
  // `first` and, with two parts, `second`: gradients of matrices whose inputs or outputs are
  // `rows`.
  void grad_weights(const void* rows, const void* gathered, const ExpertMatrix& first,
                    const ExpertMatrix* second) {
    WeightGradArgs args = {};
    const Orientation out = orientation(first, second);
    const bool inter_is_k = second == nullptr;  // down: [H,I]
    args.dtype = desc_.dtype;
    for (const ExpertMatrix* matrix : {&first, second})
      if (matrix && matrix->dtype != desc_.dtype)
        refuse("weight gradients of another type than the weights");
    args.out_m_contiguous = out.k_contiguous == inter_is_k;
    args.parts = second ? 2 : 1;
    args.m_size = desc_.inter;
    args.n_size = desc_.hidden;
    args.max_rows = plan_.max_rows;
    args.rows = rows;
    args.out[0] = first.base;
    args.out[1] = second ? second->base : nullptr;
    args.out_stride = out.stride;
    args.out_expert_stride = first.expert_stride;
    args.params.x = gathered;
    args.params.x_stride = desc_.hidden;
    args.params.row_token = plan_.row_token;
    args.params.group_offsets = plan_.group_offsets;
    args.params.num_experts = weights_.num_experts;
    if (!refused) refuse(weight_grad_refuses(args));
    if (!refused && queues_) {
      check(launch_weight_grad(args, op_.multiprocessors, op_.stream), "weight gradient");
      op_.count(1);
    }
  }
  void combine(const CombineParams& params) {
    refuse(combine_refuses(params, desc_.dtype));
    if (!refused && queues_) {
      check(launch_combine(params, desc_.dtype, op_.multiprocessors, op_.stream), "combine");
      op_.count(1);
    }
  }
  void refuse(const char* why) {
    if (!refused) refused = why;
  }

  const char* refused = nullptr;

 private:
  // One axis of a weight matrix is contiguous: which, and the stride of the other one.
  struct Orientation {
    bool k_contiguous;
    int64_t stride;
  };
  Orientation orientation(const ExpertMatrix& matrix, const ExpertMatrix* other) {
    for (const ExpertMatrix* m : {&matrix, other}) {
      if (m && m->pointers) refuse("experts that are separate tensors");
      if (m && m->has_bias()) refuse("biases of experts");
      if (m && (m->row_stride != matrix.row_stride || m->col_stride != matrix.col_stride ||
                m->expert_stride != matrix.expert_stride))
        refuse("gate and up of different layouts");
    }
    if (matrix.col_stride == 1) return {true, matrix.row_stride};
    if (matrix.row_stride != 1) refuse("interleaved gate and up columns");
    return {false, matrix.col_stride};
  }

  RowGemmArgs base(RowGemm operation, int64_t features, int64_t k_size) const {
    RowGemmArgs args = {};
    args.op = operation;
    args.dtype = desc_.dtype;
    args.features = features;
    args.k_size = k_size;
    args.parts = 1;
    args.params.row_token = plan_.row_token;
    args.params.group_offsets = plan_.group_offsets;
    args.params.num_experts = weights_.num_experts;
    args.params.max_rows = plan_.max_rows;
    args.params.out_stride = features;
    args.params.activation = desc_.activation;
    return args;
  }
  void set_weights(RowGemmArgs& args, const ExpertMatrix& first, const ExpertMatrix* second,
                   bool transposed) {
    const Orientation o = orientation(first, second);
    for (const ExpertMatrix* matrix : {&first, second})
      if (matrix && matrix->dtype != desc_.dtype) refuse("weights of another type than x");
    args.weights[0] = first.base;
    args.weights[1] = second ? second->base : nullptr;
    args.weights_mn_major = o.k_contiguous == transposed;
    args.weight_stride = o.stride;
    args.expert_stride = first.expert_stride;
  }
  RowGemmArgs gate_up(RowGemm operation, int64_t features, int64_t k_size, bool transposed) {
    RowGemmArgs args = base(operation, features, k_size);
    set_weights(args, weights_.gate, &weights_.up, transposed);
    return args;
  }
  RowGemmArgs with_down(RowGemm operation, int64_t features, int64_t k_size, bool forward) {
    RowGemmArgs args = base(operation, features, k_size);
    set_weights(args, weights_.down, nullptr, !forward);
    return args;
  }
  void run(const RowGemmArgs& args) {
    if (!refused) refuse(row_gemm_refuses(args));
    if (refused || !queues_) return;
    check(launch_row_gemm(args, op_.multiprocessors, op_.stream), "row GEMM");
    op_.count(1);
  }

  const Op& op_;
  const moec_experts_desc& desc_;
  const PlanView& plan_;
  const WeightsView& weights_;
  const bool queues_;
};

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

void walk_forward(const ExpertsArgs& args, Products& products) {
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
  products.up(args.x.data, memory.pre, memory.act);
  products.down(memory.act, memory.rows);
  products.combine(p);
}

void walk_backward(const ExpertsGradArgs& args, Products& products) {
  const moec_experts_desc& desc = *args.desc;
  const PlanView& plan = *args.plan;
  const WeightsView none = {}, &d = args.d_expert_weights ? *args.d_expert_weights : none;
  const bool down = d.down.present(), gate = d.gate.present();
  const bool biases = d.down.has_bias() || d.gate.has_bias() || d.up.has_bias();
  if (args.accumulate && (down || gate)) products.refuse("accumulating weight gradients");
  if (gate != d.up.present()) products.refuse("the gradient of only one of gate and up");
  if (args.d_output_bias || biases) products.refuse("gradients of biases");
  Memory memory = {};
  Arena work(args.workspace, args.num_tokens);
  Arena saved(const_cast<void*>(args.saved), args.num_tokens);
  memory.pre = lay_out_saved(desc, saved).pre;
  lay_out_backward(desc, work, memory);
  CombineParams p =
      combine_params(desc, plan, memory.rows, args.d_x, args.accumulate_x ? args.d_x : nullptr);
  p.d_weight_parts = memory.d_weight_parts;
  p.parts = weight_parts(desc);
  p.max_rows = plan.max_rows;
  p.d_weights = args.d_weights;
  if (desc.save == MOEC_SAVE_INPUT) products.up(args.x.data, memory.pre, memory.act);
  products.grad_down(args.d_y, memory);
  if (down) products.grad_weights(memory.weighted, args.d_y, d.down, nullptr);
  if (args.d_x) products.grad_up(memory.d_pre, memory.rows);
  if (gate) products.grad_weights(memory.d_pre, args.x.data, d.gate, &d.up);
  if (args.d_x || args.d_weights) products.combine(p);
}

const char* forward(const Op& op, const ExpertsArgs& args) {
  for (const bool queues : {false, true}) {
    Products products(op, *args.desc, *args.plan, *args.weights, queues);
    walk_forward(args, products);
    if (products.refused) return products.refused;
  }
  const moec_experts_desc& desc = *args.desc;
  op.count(0, 3 * product_flops(args.num_tokens * desc.top_k, desc.hidden, desc.inter));
  return nullptr;
}

const char* backward(const Op& op, const ExpertsGradArgs& args) {
  for (const bool queues : {false, true}) {
    Products products(op, *args.desc, *args.plan, *args.weights, queues);
    walk_backward(args, products);
    if (products.refused) return products.refused;
  }
  const moec_experts_desc& desc = *args.desc;
  if (args.d_residual) {
    const auto bytes = size_t(args.num_tokens * desc.hidden * kElementBytes);
    check(cudaMemcpyAsync(args.d_residual, args.d_y, bytes, cudaMemcpyDeviceToDevice, op.stream),
          "gradient of the residual");
  }
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
  const bool saves = desc.save != MOEC_SAVE_NONE;
  const struct {
    bool lacks;
    const char* what;
  } rules[] = {
      {desc.dtype != MOEC_BF16 && desc.dtype != MOEC_F16, "f32"},
      {desc.hidden % 8 || desc.inter % 8, "a hidden or inter that is not a multiple of 8"},
      {!is_gated(desc), "plain MLPs"},
      {desc.activation.kind != MOEC_ACT_SWIGLU, "activations other than swiglu"},
      {desc.weight_position != MOEC_WEIGHT_ON_OUTPUT, "weights that are not on the output"},
      {desc.combine != MOEC_COMBINE_FP32_SLOT, "combines other than FP32_SLOT"},
      {desc.act_rounding != MOEC_ACT_FP32_ONCE, "act_rounding other than FP32_ONCE"},
      {has_shared(desc), "shared experts"},
      {desc.max_rows_base != 0, "expert choice"},
      {desc.num_zero_experts > 0 && saves, "gradients of identity experts"},
      {desc.output_scale != 1.0f && saves, "gradients with output_scale"},
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
