// SPDX-License-Identifier: Apache-2.0
// Forward of the experts on any GPU:
//   1  x of each row times its weight           weight on the input only
//   2  pre = x W^T + bias; act = activation     x gathered while it is read
//   3  rows = act W2^T + bias
//   4  the shared expert: 2 and 3 with all tokens as one group
//   5  y = residual + c0 scale sum(w rows) + output bias + c1 shared
#include "backend/cuda/sm80/experts_portable.h"

#include <algorithm>

namespace moec::cuda {
namespace {

struct Memory {
  void *pointers, *scaled_x = nullptr;
  void *pre, *act;  // [P,parts,I] unless saved, [P,I]
  void* rows;       // [P,H]; in the place of pre where that is not saved
  void *shared_pre = nullptr, *shared_act = nullptr, *shared_rows = nullptr;
  float* mix = nullptr;  // [T,2]
};
Memory lay_out(const moec_experts_desc& desc, Arena& arena, bool wide) {
  const int64_t size = dtype_bytes(desc.dtype);
  const Intermediates types = intermediates(desc, wide);
  const bool saved = desc.save >= MOEC_SAVE_PREACT;
  const int64_t pre = parts_of(is_gated(desc)) * desc.inter * dtype_bytes(types.pre);
  const int64_t rows = desc.hidden * dtype_bytes(types.rows);
  Memory m = {};
  m.pointers = arena.take(PointerTable::bytes(desc.expert_end - desc.expert_begin + 1), 0);
  if (desc.weight_position == MOEC_WEIGHT_ON_INPUT)
    m.scaled_x = take_rows(arena, desc, desc.hidden * size);
  m.act = take_rows(arena, desc, desc.inter * size);
  m.rows = m.pre = take_rows(arena, desc, saved ? rows : std::max(rows, pre));
  if (has_shared(desc)) {
    const int64_t shared_pre =
        parts_of(is_shared_gated(desc)) * desc.shared_inter * dtype_bytes(types.pre);
    m.shared_act = take_tokens(arena, desc.shared_inter * size);
    m.shared_rows = m.shared_pre = take_tokens(arena, saved ? rows : std::max(rows, shared_pre));
  }
  if (is_mixed(desc)) m.mix = static_cast<float*>(take_tokens(arena, 2 * sizeof(float)));
  return m;
}

class Forward {
 public:
  Forward(const Op& op, const ExpertsArgs& args, bool wide)
      : op_(op), args_(args), desc_(*args.desc), types_(intermediates(desc_, wide)) {
    Arena work(args.workspace, args.num_tokens), saved(args.saved, args.num_tokens);
    memory_ = lay_out(desc_, work, wide);
    if (args.saved && desc_.save >= MOEC_SAVE_PREACT) {
      const Saved kept = lay_out_saved(desc_, saved, wide);
      memory_.pre = kept.pre;
      memory_.shared_pre = kept.shared_pre;
    }
    PointerTable table(op, memory_.pointers);
    routed_ = routed_mlp(desc_, *args.plan, *args.weights, args.x.data, table);
    if (args.shared_weights)
      shared_ = shared_mlp(desc_, args.num_tokens, *args.shared_weights, args.x.data, table);
    table.flush();
  }

  void run_routed() {
    const PlanView& plan = *args_.plan;
    if (memory_.scaled_x) {
      scale_rows(op_, routed_.rows, desc_.hidden, args_.x, plan.row_weight, memory_.scaled_x);
      routed_.x = {{memory_.scaled_x, desc_.dtype}, desc_.hidden, nullptr};
    }
    const bool on_activation = desc_.weight_position == MOEC_WEIGHT_ON_ACTIVATION;
    run_mlp(routed_, memory_.pre, memory_.act, on_activation ? plan.row_weight : nullptr,
            memory_.rows);
  }
  void run_shared() {
    if (!args_.shared_weights) return;
    run_mlp(shared_, memory_.shared_pre, memory_.shared_act, nullptr, memory_.shared_rows);
    if (memory_.mix)
      mix_forward(op_,
                  {&desc_, args_.num_tokens, args_.x, args_.shared_gate, args_.shared_gate_bias},
                  memory_.mix);
  }
  void combine() const {
    OutputSum sum = {&desc_,
                     args_.plan,
                     {memory_.rows, types_.rows},
                     {},
                     memory_.mix,
                     args_.x,
                     args_.output_bias,
                     {},
                     {args_.y, desc_.dtype},
                     args_.skip_absent};
    if (args_.shared_weights) sum.shared = {memory_.shared_rows, types_.rows};
    if (args_.residual) sum.residual = {const_cast<void*>(args_.residual), desc_.dtype};
    combine_output(op_, sum);
  }
  uint64_t flops() const {
    const int64_t rows = args_.num_tokens * desc_.top_k + desc_.max_rows_base;
    const uint64_t shared =
        args_.shared_weights ? shared_.flops(shared_.parts() + 1, args_.num_tokens) : 0;
    return routed_.flops(routed_.parts() + 1, rows) + shared;
  }

 private:
  void run_mlp(PortableMlp& mlp, void* pre, void* act, const float* weight, void* rows) const {
    mlp.pre.data = {pre, types_.pre};
    run_up(op_, mlp, mlp.pre.data);
    activate(op_, mlp.rows, mlp.pre, weight, mlp.elements(act));
    run_down(op_, mlp, act, weight, {rows, types_.rows});
  }

  const Op& op_;
  const ExpertsArgs& args_;
  const moec_experts_desc& desc_;
  const Intermediates types_;
  Memory memory_;
  PortableMlp routed_, shared_;
};

PortableMlp mlp_of(const moec_experts_desc& desc, const WeightsView& weights,
                   const moec_activation& activation, int64_t inter, PointerTable& table) {
  PortableMlp mlp;
  mlp.hidden = desc.hidden;
  mlp.inter = inter;
  mlp.dtype = desc.dtype;
  mlp.gated = weights.gated;
  if (weights.gated) mlp.gate = table.device(weights.gate, weights.num_experts);
  mlp.up = table.device(weights.up, weights.num_experts);
  mlp.down = table.device(weights.down, weights.num_experts);
  mlp.pre.gated = weights.gated;
  mlp.pre.inter = inter;
  mlp.pre.activation = activation;
  if (desc.act_rounding == MOEC_ACT_PER_OP && desc.dtype != MOEC_F32) mlp.pre.rounding = desc.dtype;
  return mlp;
}

template <bool kWide>
const char* forward(const Op& op, const ExpertsArgs& args) {
  Forward call(op, args, kWide);
  call.run_routed();
  call.run_shared();
  call.combine();
  op.count(0, call.flops());
  return nullptr;
}

template <bool kWide>
const char* backward(const Op& op, const ExpertsGradArgs& args) {
  portable_backward(op, args, kWide);
  return nullptr;
}

template <bool kWide>
void measure(const moec_experts_desc& desc, moec_size& forward_size, moec_size& backward_size) {
  Arena arena;
  lay_out(desc, arena, kWide);
  forward_size = arena.size();
  backward_size = portable_backward_size(desc, kWide);
}

const char* refuses(const moec_experts_desc&) {
  return nullptr;
}

constexpr const char* kKernels =
    "\"products\": {\"mma\": \"128x128x32, aligned bf16 and f16\", \"plain\": \"128x128x16, the "
    "rest\"}";

}  // namespace

PortableMlp routed_mlp(const moec_experts_desc& desc, const PlanView& plan,
                       const WeightsView& weights, const void* x, PointerTable& table) {
  PortableMlp mlp = mlp_of(desc, weights, desc.activation, desc.inter, table);
  mlp.rows = {{plan.num_local, plan.group_offsets, plan.counts, plan.max_rows}, plan.row_token};
  mlp.x = {{const_cast<void*>(x), desc.dtype}, desc.hidden, plan.row_token};
  return mlp;
}

PortableMlp shared_mlp(const moec_experts_desc& desc, int64_t num_tokens,
                       const WeightsView& weights, const void* x, PointerTable& table) {
  PortableMlp mlp = mlp_of(desc, weights, desc.shared_activation, desc.shared_inter, table);
  mlp.rows = {{1, nullptr, nullptr, num_tokens}, nullptr};
  mlp.x = {{const_cast<void*>(x), desc.dtype}, desc.hidden, nullptr};
  return mlp;
}

void run_up(const Op& op, const PortableMlp& mlp, const Array& pre) {
  RowProduct p;
  p.groups = mlp.rows.groups;
  p.n = mlp.inter;
  p.k = mlp.hidden;
  p.parts = mlp.parts();
  p.a = mlp.x;
  p.b[0] = mlp.gated ? &mlp.gate : &mlp.up;
  p.b[1] = mlp.gated ? &mlp.up : nullptr;
  p.biased = true;
  p.c = pre;
  p.c_stride = mlp.parts() * mlp.inter;
  row_product(op, p);
}

void run_down(const Op& op, const PortableMlp& mlp, const void* act, const float* bias_weight,
              const Array& out) {
  RowProduct p;
  p.groups = mlp.rows.groups;
  p.n = mlp.hidden;
  p.k = mlp.inter;
  p.a = {mlp.elements(const_cast<void*>(act)), mlp.inter, nullptr};
  p.b[0] = &mlp.down;
  p.biased = true;
  p.bias_weight = bias_weight;
  p.c = out;
  p.c_stride = mlp.hidden;
  row_product(op, p);
}

const ExpertsPath kPortablePath = {"portable",      false,          refuses, forward<false>,
                                   backward<false>, measure<false>, kKernels};
const ExpertsPath kPortableWidePath = {"portable",     false,         refuses, forward<true>,
                                       backward<true>, measure<true>, kKernels};

}  // namespace moec::cuda
