// SPDX-License-Identifier: Apache-2.0
// Backward of the experts on any GPU. Per row r of token t with routing weight w, and
// f = d(y) / d(expert output):
//   1  q = dY W2^T of the row's token                    unweighted
//   2  d_gate, d_up = f q * slopes of the activation;  dw = <q, act> + <dY, b2>
//   3  dW2 = dY^T (f act), dWg = d_gate^T x, dWu = d_up^T x, biases likewise
//   4  dx of the row = d_gate Wg + d_up Wu, summed over the token's rows in slot order
// Weight on the output or on the activation: f = w c0 scale. On the input: x is w x, f = c0 scale
// and dw = <dx of the row, x>. What no wanted gradient needs is not computed.
#include <algorithm>

#include "backend/cuda/experts/experts_sums.h"
#include "backend/cuda/sm80/experts_portable.h"

namespace moec::cuda {
namespace {

struct MlpMemory {
  void *pre, *d_pre, *weighted;  // [rows, parts, I] twice, [rows, I]
  void* rows;                    // q [rows, I], then [rows, H] gradient at the inputs
  float *factor, *dots;          // [rows]
};
struct Memory {
  void *pointers, *scaled_x = nullptr;
  float* input_dots = nullptr;  // [P], weight on the input
  MlpMemory routed = {}, shared = {};
  float *mix = nullptr, *d_logits = nullptr;  // [T,2]
};

template <class Take>  // take(bytes of a row)
MlpMemory lay_out_mlp(const moec_experts_desc& desc, Intermediates types, int64_t inter, bool gated,
                      const Take& take) {
  const int64_t size = dtype_bytes(desc.dtype), parts = parts_of(gated), f32 = sizeof(float);
  MlpMemory m = {};
  if (desc.save == MOEC_SAVE_INPUT) m.pre = take(parts * inter * dtype_bytes(types.pre));
  m.d_pre = take(parts * inter * size);
  m.weighted = take(inter * size);
  m.rows = take(std::max(inter * dtype_bytes(types.d_act), desc.hidden * dtype_bytes(types.rows)));
  m.factor = static_cast<float*>(take(f32));
  m.dots = static_cast<float*>(take(f32));
  return m;
}

Memory lay_out(const moec_experts_desc& desc, Arena& arena, bool wide) {
  const Intermediates types = intermediates(desc, wide);
  const auto of_rows = [&](int64_t bytes) { return take_rows(arena, desc, bytes); };
  const auto of_tokens = [&](int64_t bytes) { return take_tokens(arena, bytes); };
  Memory m;
  m.pointers = arena.take(PointerTable::bytes(desc.expert_end - desc.expert_begin + 1), 0);
  m.routed = lay_out_mlp(desc, types, desc.inter, is_gated(desc), of_rows);
  if (desc.weight_position == MOEC_WEIGHT_ON_INPUT) {
    m.scaled_x = of_rows(desc.hidden * dtype_bytes(desc.dtype));
    m.input_dots = static_cast<float*>(of_rows(sizeof(float)));
  }
  if (has_shared(desc))
    m.shared = lay_out_mlp(desc, types, desc.shared_inter, is_shared_gated(desc), of_tokens);
  if (is_mixed(desc)) {
    m.mix = static_cast<float*>(of_tokens(2 * sizeof(float)));
    m.d_logits = static_cast<float*>(of_tokens(2 * sizeof(float)));
  }
  return m;
}

// Which gradients of one MLP are wanted, and where they go.
struct MlpGradients {
  DeviceMatrix gate, up, down;

  MlpGradients(const WeightsView* d, PointerTable& table) {
    if (!d) return;
    gate = table.device(d->gate, d->num_experts);
    up = table.device(d->up, d->num_experts);
    down = table.device(d->down, d->num_experts);
  }
  bool inner() const {
    return gate.view.present() || gate.view.has_bias() || up.view.present() || up.view.has_bias();
  }
  int matrices() const { return gate.view.present() + up.view.present() + down.view.present(); }
};

class Backward {
 public:
  Backward(const Op& op, const ExpertsGradArgs& args, PointerTable&& table, const Memory& memory,
           bool wide)
      : op_(op),
        args_(args),
        desc_(*args.desc),
        types_(intermediates(desc_, wide)),
        memory_(memory),
        d_y_{const_cast<void*>(args.d_y), desc_.dtype},
        d_routed_(args.d_expert_weights, table),
        d_shared_(args.d_shared_weights, table),
        on_input_(desc_.weight_position == MOEC_WEIGHT_ON_INPUT) {
    Arena saved(const_cast<void*>(args.saved), args.num_tokens);
    const Saved kept = lay_out_saved(desc_, saved, wide);
    routed_ = routed_mlp(desc_, *args.plan, *args.weights, args.x.data, table);
    if (has_shared())
      shared_ = shared_mlp(desc_, args.num_tokens, *args.shared_weights, args.x.data, table);
    table.flush();
    const bool again = desc_.save == MOEC_SAVE_INPUT;
    routed_.pre.data = {again ? memory.routed.pre : kept.pre, types_.pre};
    shared_.pre.data = {again ? memory.shared.pre : kept.shared_pre, types_.pre};
    want_gate_ = is_mixed(desc_) && (args.d_x || args.d_shared_gate || args.d_shared_gate_bias);
    want_input_ = args.d_x || (on_input_ && args.d_routing_weights);
  }

  void prepare() {  // mix, the rows' factors, and x times its weight
    if (memory_.mix)
      mix_forward(op_,
                  {&desc_, args_.num_tokens, args_.x, args_.shared_gate, args_.shared_gate_bias},
                  memory_.mix);
    row_factors(op_, desc_, *args_.plan, routed_.rows, memory_.mix, memory_.routed.factor);
    if (has_shared()) mix_factors(op_, args_.num_tokens, memory_.mix, memory_.shared.factor);
    if (!on_input_) return;
    if (d_routed_.inner() || desc_.save == MOEC_SAVE_INPUT)
      scale_rows(op_, routed_.rows, desc_.hidden, args_.x, args_.plan->row_weight,
                 memory_.scaled_x);
    routed_.x = {{memory_.scaled_x, desc_.dtype}, desc_.hidden, nullptr};
  }

  void act_gradients() {
    const bool dots = (args_.d_routing_weights && !on_input_) ||
                      (want_gate_ && desc_.shared == MOEC_SHARED_SOFTMAX2);
    act_gradients_of(routed_, memory_.routed, d_routed_, want_input_, dots);
    if (has_shared())
      act_gradients_of(shared_, memory_.shared, d_shared_, args_.d_x != nullptr, want_gate_);
  }
  void weight_gradients() {
    weight_gradients_of(routed_, memory_.routed, d_routed_);
    if (has_shared()) weight_gradients_of(shared_, memory_.shared, d_shared_);
  }
  void gate_gradients() const {
    if (!want_gate_) return;
    cuda::gate_gradients(op_, args_, weight_grad(), {memory_.shared.dots}, memory_.d_logits);
  }
  void input_gradients() {
    if (!want_input_) return;
    input_gradients_of(routed_, memory_.routed);
    if (on_input_ && args_.d_routing_weights)
      row_dots(op_, routed_.rows, desc_.hidden, {memory_.routed.rows, types_.rows}, nullptr,
               args_.x, false, memory_.input_dots);
    if (!args_.d_x) return;
    InputGradSum sum = {};
    sum.desc = &desc_;
    sum.plan = args_.plan;
    sum.rows = {memory_.routed.rows, types_.rows};
    sum.mix = memory_.mix;
    sum.d_logits = memory_.d_logits;
    sum.shared_gate = args_.shared_gate;
    sum.d_y = d_y_;
    sum.d_x = {args_.d_x, desc_.dtype};
    sum.accumulate = args_.accumulate_x;
    if (has_shared()) {
      input_gradients_of(shared_, memory_.shared);
      sum.shared = {memory_.shared.rows, types_.rows};
    }
    combine_input_grad(op_, sum);
  }
  void plain_gradients() const {
    if (args_.d_routing_weights) routing_weight_grad(op_, weight_grad(), args_.d_routing_weights);
    direct_gradients(op_, args_);
  }
  uint64_t flops() const { return flops_; }

 private:
  bool has_shared() const { return args_.shared_weights != nullptr; }
  WeightGrad weight_grad() const {
    return {&desc_,  args_.plan, memory_.mix, memory_.routed.dots, memory_.input_dots,
            args_.x, d_y_};
  }
  // As the fast path counts: every assignment a row.
  void count_products(const PortableMlp& mlp, int products) {
    const int64_t rows =
        &mlp == &shared_ ? args_.num_tokens : args_.num_tokens * desc_.top_k + desc_.max_rows_base;
    flops_ += mlp.flops(products, rows);
  }
  RowOperand output_rows(const PortableMlp& mlp) const {
    return {d_y_, desc_.hidden, mlp.rows.row_token};
  }

  void act_gradients_of(const PortableMlp& mlp, const MlpMemory& memory, const MlpGradients& d,
                        bool want_input, bool dots) {
    const bool want_hidden = want_input || d.inner(), want_down = d.down.view.present();
    if (!want_hidden && !want_down && !dots) return;
    if (desc_.save == MOEC_SAVE_INPUT) {
      run_up(op_, mlp, mlp.pre.data);
      count_products(mlp, mlp.parts());
    }
    ActGradient step;
    if (want_hidden || dots) {
      step.q = {memory.rows, types_.d_act};
      RowProduct p;
      p.groups = mlp.rows.groups;
      p.n = mlp.inter;
      p.k = mlp.hidden;
      p.a = output_rows(mlp);
      p.b[0] = &mlp.down;
      p.transposed = true;
      p.c = step.q;
      p.c_stride = mlp.inter;
      row_product(op_, p);
      count_products(mlp, 1);
    }
    step.factor = memory.factor;
    if (want_hidden) step.d_pre = mlp.elements(memory.d_pre);
    if (want_down) step.weighted = mlp.elements(memory.weighted);
    if (dots) step.dots = memory.dots;
    act_gradient(op_, mlp.rows, mlp.pre, step);
    if (dots && mlp.down.view.has_bias())
      row_dots(op_, mlp.rows, mlp.hidden, {}, &mlp.down.view, d_y_, true, memory.dots);
  }

  void weight_gradients_of(const PortableMlp& mlp, const MlpMemory& memory, const MlpGradients& d) {
    const int64_t width = mlp.parts() * mlp.inter, up = (mlp.parts() - 1) * mlp.inter;
    char* const d_up = static_cast<char*>(memory.d_pre) + up * dtype_bytes(mlp.dtype);
    const RowOperand gate_rows = {mlp.elements(memory.d_pre), width, nullptr};
    const RowOperand up_rows = {mlp.elements(d_up), width, nullptr};
    const RowOperand act = {mlp.elements(memory.weighted), mlp.inter, nullptr};
    const struct {
      const DeviceMatrix& d;
      int64_t n, k;
      RowOperand g, x;
      const float* weight;  // of g's rows in the gradient of the bias; x already has it
    } products[] = {{d.down, mlp.hidden, mlp.inter, output_rows(mlp), act, memory.factor},
                    {d.gate, mlp.inter, mlp.hidden, gate_rows, mlp.x, nullptr},
                    {d.up, mlp.inter, mlp.hidden, up_rows, mlp.x, nullptr}};
    for (const auto& p : products) {
      if (p.d.view.present())
        weight_product(op_, {mlp.rows.groups, p.n, p.k, p.g, p.x, &p.d, args_.accumulate});
      if (p.d.view.has_bias())
        column_sums(op_, {mlp.rows, p.g.gather != nullptr, p.g.data, p.g.stride, p.n, p.weight, 1,
                          &p.d.view, args_.accumulate});
    }
    count_products(mlp, d.matrices());
  }

  void input_gradients_of(const PortableMlp& mlp, const MlpMemory& memory) {
    RowProduct p;
    p.groups = mlp.rows.groups;
    p.n = mlp.hidden;
    p.k = mlp.inter;
    p.parts = mlp.parts();
    p.sum = true;
    p.a = {mlp.elements(memory.d_pre), mlp.parts() * mlp.inter, nullptr};
    p.b[0] = mlp.gated ? &mlp.gate : &mlp.up;
    p.b[1] = mlp.gated ? &mlp.up : nullptr;
    p.transposed = true;
    p.c = {memory.rows, types_.rows};
    p.c_stride = mlp.hidden;
    row_product(op_, p);
    count_products(mlp, mlp.parts());
  }

  const Op& op_;
  const ExpertsGradArgs& args_;
  const moec_experts_desc& desc_;
  const Intermediates types_;
  const Memory memory_;
  const Array d_y_;
  const MlpGradients d_routed_, d_shared_;
  const bool on_input_;
  bool want_gate_, want_input_;
  PortableMlp routed_, shared_;
  uint64_t flops_ = 0;
};

}  // namespace

moec_size portable_backward_size(const moec_experts_desc& desc, bool wide) {
  Arena arena;
  lay_out(desc, arena, wide);
  return arena.size();
}

void portable_backward(const Op& op, const ExpertsGradArgs& args, bool wide) {
  Arena work(args.workspace, args.num_tokens);
  const Memory memory = lay_out(*args.desc, work, wide);
  Backward call(op, args, PointerTable(op, memory.pointers), memory, wide);
  call.prepare();
  call.act_gradients();
  call.weight_gradients();
  call.gate_gradients();
  call.input_gradients();
  call.plain_gradients();
  op.count(0, call.flops());
}

}  // namespace moec::cuda
