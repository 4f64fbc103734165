// SPDX-License-Identifier: Apache-2.0
// Backward of the experts. Wg, Wu and Wd are the matrices of gate, up and down; bd is down's bias.
// Per row r of token t with routing weight w, and f = d(y) / d(expert output):
//   1  q = dY Wd of the row's token                      unweighted
//   2  d_gate, d_up = f q * slopes of the activation;    dw = <q, act> + <dY, bd>, so that no
//                                                        expert output is kept
//   3  dx of the row = d_gate Wg + d_up Wu, summed over the token's rows in slot order
//   4  dWd = dY^T (f act), dWg = d_gate^T x, dWu = d_up^T x, biases likewise
// Adapters add u A to 1 and 3, with u = s (dY B) and s (d_gate Bg + d_up Bu). Then
// dA = u^T (input of A), dB = (gradient at B's output)^T t, where t is computed again.
// Weight on the output or on the activation: f = w c0 scale. On the input: x is w x, f = c0 scale
// and dw = <dx of the row, x>. What no wanted gradient needs is not recorded. The shared expert
// comes first.
#include "core/dtype.h"
#include "experts/adapters.h"
#include "experts/experts.h"
#include "experts/memory.h"

namespace moec::experts {
namespace {

bool wants_inner(const WeightsView* d) {
  return d && (d->gate.present() || d->gate.has_bias() || d->up.present() || d->up.has_bias());
}

// What is wanted of one MLP.
struct Wants {
  bool input, dots;
  WantedFactors gate_up = {}, down = {};
  bool act_grad(const Mlp& mlp) const { return d_pre(mlp) || weighted(mlp) || dots; }
  bool d_pre(const Mlp& mlp) const { return input || wants_inner(mlp.gradients) || gate_up.any(); }
  bool weighted(const Mlp& mlp) const {
    return (mlp.gradients && mlp.gradients->down.present()) || down.any();
  }
};

class Recorder {
 public:
  Recorder(const Between& between, const ExpertsGradArgs& args, Program& program)
      : between_(between),
        args_(args),
        desc_(*args.desc),
        program_(program),
        d_y_{const_cast<void*>(args.d_y), desc_.dtype},
        on_input_(desc_.weight_position == MOEC_WEIGHT_ON_INPUT) {
    Arena work(args.workspace, args.num_tokens);
    Arena kept(const_cast<void*>(args.saved), args.num_tokens);
    memory_ = lay_out_backward(desc_, between, args.adapters, args.weights, work);
    saved_ = lay_out_saved(desc_, between, kept);
    program.desc = &desc_;
    program.plan = args.plan;
    program.num_tokens = args.num_tokens;
    program.scratch = memory_.scratch;
    set_mlps(program, between, *args.weights, args.shared_weights,
             {args.x, memory_.scaled_x, memory_.list, memory_.adapters, args.adapter_ids});
    program.routed.gradients = args.d_expert_weights;
    program.shared.gradients = args.d_shared_weights;
    wants_gate_ = is_mixed(desc_) && (args.d_x || args.d_shared_gate || args.d_shared_gate_bias);
    const bool softmax = desc_.shared == MOEC_SHARED_SOFTMAX2;
    routed_wants_ = {args.d_x || (on_input_ && args.d_routing_weights),
                     (args.d_routing_weights && !on_input_) || (wants_gate_ && softmax)};
    if (args.d_adapters) {
      routed_wants_.gate_up = wanted_of(args.d_adapters->gate_up);
      routed_wants_.down = wanted_of(args.d_adapters->down);
    }
    shared_wants_ = {args.d_x != nullptr, wants_gate_};
  }

  void shared() {
    if (!program_.shared) return;
    if (memory_.list.offsets)
      program_.add(ListTokens{args_.num_tokens, memory_.list.offsets, memory_.list.tokens});
    if (memory_.mix) program_.add(MixForward{gate(), memory_.mix});
    program_.add(MixFactors{args_.num_tokens, memory_.mix, memory_.shared.factor});
    const Mlp& mlp = program_.shared;
    act_grad(mlp, memory_.shared, saved_.shared, shared_wants_, memory_.shared.factor);
    bias_dots(mlp, memory_.shared, shared_wants_);
    weight_grads(mlp, memory_.shared, memory_.shared.factor);
    if (args_.d_x) shared_grad_ = input_grad(mlp, memory_.shared, nullptr);
  }

  void routed() {
    const Mlp& mlp = program_.routed;
    const float* const weight = args_.plan->row_weight;
    const bool scaled = desc_.output_scale != 1.0f || memory_.mix || on_input_;
    const float* const factor = scaled ? memory_.routed.factor : weight;
    if (scaled)
      program_.add(RowFactors{&mlp, &desc_, args_.plan, memory_.mix, memory_.routed.factor});
    if (args_.adapters) record_copies(*args_.adapters, memory_.adapters, program_);
    if (on_input_ && (wants_inner(mlp.gradients) || routed_wants_.gate_up.any() ||
                      desc_.save == MOEC_SAVE_INPUT))
      program_.add(ScaleRows{&mlp, args_.x, weight, memory_.scaled_x});
    act_grad(mlp, memory_.routed, saved_.routed, routed_wants_, factor);
    if (routed_wants_.input || routed_wants_.gate_up.a)
      record_narrow_d_pre(mlp, memory_.routed.d_pre, routed_wants_.input, memory_.routed.d_narrow_x,
                          program_);
    if (routed_wants_.input)
      input_grad(mlp, memory_.routed,
                 on_input_ && args_.d_routing_weights ? memory_.input_dots : nullptr);
    weight_grads(mlp, memory_.routed, factor);
    factor_grads(mlp, memory_.routed);
    bias_dots(mlp, memory_.routed, routed_wants_);
  }

  void sums() {
    const Dots routed = dots_of(program_.routed, memory_.routed, memory_.input_dots);
    if (wants_gate_)
      program_.add(GateGrad{gate(), args_.plan, routed,
                            dots_of(program_.shared, memory_.shared, nullptr), memory_.mix, d_y_,
                            memory_.d_logits, args_.d_shared_gate, args_.d_shared_gate_bias,
                            args_.accumulate});
    if (args_.d_x || args_.d_routing_weights)
      program_.add(CombineGrad{&desc_,
                               args_.plan,
                               routed,
                               {memory_.routed.rows, between_.rows},
                               {memory_.shared.rows, between_.rows},
                               shared_grad_,
                               memory_.mix,
                               memory_.d_logits,
                               args_.shared_gate,
                               args_.x,
                               d_y_,
                               {args_.d_x, desc_.dtype},
                               args_.d_routing_weights,
                               args_.accumulate_x});
    if (args_.d_output_bias || args_.d_residual)
      program_.add(DirectGrads{args_.num_tokens, desc_.hidden, d_y_, args_.d_output_bias,
                               args_.d_residual, args_.accumulate});
  }

 private:
  SharedGate gate() const {
    return {&desc_, args_.num_tokens, args_.x, args_.shared_gate, args_.shared_gate_bias};
  }
  static Dots dots_of(const Mlp& mlp, const MlpBackward& memory, const float* input_dots) {
    return {&mlp, memory.dots, input_dots, mlp && mlp.weights->down.has_bias()};
  }

  void act_grad(const Mlp& mlp, const MlpBackward& memory, const PartRows& saved,
                const Wants& wants, const float* factor) {
    if (!wants.act_grad(mlp)) return;
    const bool again = desc_.save == MOEC_SAVE_INPUT;
    if (again) {
      const void* const narrow = record_narrow_x(mlp, true, memory.narrow_x, program_);
      program_.add(Up{&mlp, memory.pre, between_.recomputes_act ? memory.weighted : nullptr,
                      nullptr, narrow});
      program_.flops += mlp.flops(mlp.parts());
    }
    const bool multiplies = wants.d_pre(mlp) || wants.dots;
    program_.flops += multiplies ? mlp.flops(1) : 0;
    const void* narrow = nullptr;
    if (multiplies || wants.down.a)
      narrow = record_narrow_d_y(mlp, d_y_, multiplies, memory.d_narrow_act, program_);
    program_.add(ActGrad{&mlp,
                         d_y_,
                         again ? memory.pre : saved,
                         {between_.keeps_d_act ? memory.rows : nullptr, between_.d_act},
                         memory.d_pre,
                         memory.weighted,
                         factor,
                         memory.dots,
                         wants.d_pre(mlp),
                         wants.weighted(mlp),
                         wants.dots,
                         multiplies ? narrow : nullptr});
  }
  void bias_dots(const Mlp& mlp, const MlpBackward& memory, const Wants& wants) {
    if (between_.adds_bias_dots && wants.dots && mlp.weights->down.has_bias())
      program_.add(BiasDots{&mlp, d_y_, memory.dots});
  }
  const InputGrad* input_grad(const Mlp& mlp, const MlpBackward& memory, float* input_dots) {
    program_.flops += mlp.flops(mlp.parts());
    return program_.add(InputGrad{&mlp,
                                  memory.d_pre,
                                  {memory.rows, between_.rows},
                                  args_.x,
                                  input_dots,
                                  mlp.gate_up_adapters ? memory.d_narrow_x : nullptr});
  }
  void weight_grads(const Mlp& mlp, const MlpBackward& memory, const float* factor) {
    if (!mlp.gradients) return;
    const WeightsView& d = *mlp.gradients;
    program_.flops += mlp.flops(d.gate.present() + d.up.present() + d.down.present());
    program_.add(WeightGrads{&mlp, d_y_, memory.d_pre, memory.weighted, factor, args_.accumulate});
  }

  // Of the routed experts, after d_pre, the weighted activations and the narrow rows of gradients.
  void factor_grads(const Mlp& mlp, const MlpBackward& memory) {
    const auto add = [&](FactorGrads grads, const FactorList& to, const LowRank& factors) {
      grads.mlp = &mlp;
      grads.to = &to;
      grads.rank = factors.rank;
      grads.sums = memory_.adapters.sums;
      grads.accumulate = args_.accumulate;
      program_.add(grads);
      program_.flops += narrow_flops(mlp, factors, grads.in, grads.out);
    };
    const WantedFactors &gate_up = routed_wants_.gate_up, &down = routed_wants_.down;
    if (gate_up.b && desc_.save != MOEC_SAVE_INPUT)
      record_narrow_x(mlp, false, memory.narrow_x, program_);
    if (down.b) record_narrow_act(mlp, memory.weighted, false, memory.narrow_act, program_);
    if (gate_up.any()) {
      FactorGrads grads = {};
      grads.x = mlp.x;
      grads.d_out[0] = part_rows(mlp, memory.d_pre.gate, memory.d_pre.stride);
      grads.d_out[1] = part_rows(mlp, memory.d_pre.up, memory.d_pre.stride);
      grads.in = mlp.hidden;
      grads.out = mlp.inter;
      grads.narrow = memory.narrow_x;
      grads.d_narrow = memory.d_narrow_x;
      add(grads, args_.d_adapters->gate_up, mlp.gate_up_adapters);
    }
    if (down.any()) {
      FactorGrads grads = {};
      grads.x = part_rows(mlp, memory.weighted, mlp.inter);
      grads.d_out[0] = {d_y_, mlp.hidden, mlp.row_token};
      grads.in = mlp.inter;
      grads.out = mlp.hidden;
      grads.narrow = memory.narrow_act;
      grads.d_narrow = memory.d_narrow_act;
      add(grads, args_.d_adapters->down, mlp.down_adapters);
    }
  }

  const Between& between_;
  const ExpertsGradArgs& args_;
  const moec_experts_desc& desc_;
  Program& program_;
  const Array d_y_;
  const bool on_input_;
  bool wants_gate_;
  Wants routed_wants_, shared_wants_;
  BackwardMemory memory_;
  Saved saved_;
  const InputGrad* shared_grad_ = nullptr;
};

}  // namespace

void record_backward(const Between& between, const ExpertsGradArgs& args, Program& program) {
  Recorder recorder(between, args, program);
  recorder.shared();
  recorder.routed();
  recorder.sums();
}

}  // namespace moec::experts
