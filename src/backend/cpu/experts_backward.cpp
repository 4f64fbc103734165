// SPDX-License-Identifier: Apache-2.0
// Backward of the experts. Per row r of token t with routing weight w, and f = d(y) / d(expert
// output):
//   1  q = dY W2^T of the row's token                    unweighted
//   2  d_gate, d_up = f q * slopes of the activation     in the epilogue of 1
//      dw = <q, act> + <dY, b2>                          so that no expert output is kept
//   3  dx of the row = d_gate Wg + d_up Wu, summed over the token's rows in slot order
//   4  dW2 = dY^T (f act), dWg = d_gate^T x, dWu = d_up^T x, biases likewise
// Weight on the output or on the activation: f = w c0 scale. On the input: x is w x, f = c0 scale
// and dw = <dx of the row, x>. What no wanted gradient needs is not computed.
#include <algorithm>
#include <cstring>

#include "backend/cpu/combine.h"
#include "backend/cpu/mlp.h"
#include "backend/cpu/ops.h"
#include "backend/cpu/shared_gate.h"
#include "core/dtype.h"

namespace moec::cpu {
namespace {

constexpr int64_t kTokensPerTask = 16;

template <class Body>
void for_each_token(const ThreadPool& pool, int64_t tokens, const Body& body) {
  pool.parallel_for((tokens + kTokensPerTask - 1) / kTokensPerTask, [&](int32_t, int64_t i) {
    const int64_t end = std::min(tokens, (i + 1) * kTokensPerTask);
    for (int64_t t = i * kTokensPerTask; t < end; ++t) body(t);
  });
}

// Which gradients of one MLP are wanted.
struct MlpWants {
  bool inner = false;  // of gate and up, matrix or bias
  bool down = false;   // of the down matrix
  explicit MlpWants(const WeightsView* d) {
    if (!d) return;
    inner = d->gate.present() || d->gate.has_bias() || d->up.present() || d->up.has_bias();
    down = d->down.present();
  }
};

struct RowGradContext {
  const Mlp& mlp;
  float* d_rows;
  const void* x;  // not null: input_dots are wanted
  float* input_dots;
};

void store_row_grad(void* context, const FinishedTile& tile) {
  const auto& c = *static_cast<const RowGradContext*>(context);
  const int64_t hidden = c.mlp.hidden;
  for (int64_t i = 0; i < tile.rows; ++i) {
    const int64_t row = tile.row0 + i;
    const float* const d = tile.c0 + i * tile.ld;
    std::memcpy(c.d_rows + row * hidden + tile.col0, d, size_t(tile.cols) * sizeof(float));
    if (!c.input_dots) continue;
    float* const dots = c.input_dots + row * dot_columns(hidden) + tile.col0 / kDotColumns;
    for (int64_t col = 0; col < tile.cols; col += kDotColumns) {
      const int64_t n = std::min(kDotColumns, tile.cols - col);
      const int64_t at = c.mlp.token(row) * hidden + tile.col0 + col;
      float x[kDotColumns];
      convert_to_f32(static_cast<const char*>(c.x) + at * dtype_bytes(c.mlp.dtype), c.mlp.dtype, x,
                     n);
      dots[col / kDotColumns] = dot(d + col, x, n);
    }
  }
}

void finish_input_grad(void* context, const FinishedTile& tile) {
  const auto& sum = *static_cast<const InputGradSum*>(context);
  for (int64_t i = 0; i < tile.rows; ++i)
    for (int64_t col = 0; col < tile.cols; col += kColumns)
      combine_columns(sum, tile.row0 + i, tile.col0 + col, std::min(kColumns, tile.cols - col),
                      tile.c0 + i * tile.ld + col);
}

class Backward {
 public:
  Backward(const Device& device, const ExpertsGradArgs& args)
      : pool_(device.pool),
        args_(args),
        desc_(*args.desc),
        group_{0, int32_t(args.num_tokens)},
        want_routed_(args.d_expert_weights),
        want_shared_(args.d_shared_weights),
        on_input_(desc_.weight_position == MOEC_WEIGHT_ON_INPUT) {
    Arena workspace(args.workspace, args.num_tokens);
    Arena saved(const_cast<void*>(args.saved), args.num_tokens);
    memory_ = lay_out_backward(desc_, pool_.size(), workspace);
    saved_ = lay_out_saved(desc_, saved);
    routed_ = routed_mlp(desc_, *args.weights, *args.plan, args.x.data, memory_.scaled_x);
    if (args.shared_weights) shared_ = shared_mlp(desc_, *args.shared_weights, group_, args.x.data);
    want_gate_ = is_mixed(desc_) && (args.d_x || args.d_shared_gate || args.d_shared_gate_bias);
    want_input_ = args.d_x || (on_input_ && args.d_routing_weights);
  }

  // mix, the rows' factors, and x times its weight.
  void prepare() const {
    if (memory_.mix) shared_gate_forward(pool_, gate(), memory_.mix);
    for_each_row(pool_, routed_, [&](int64_t row) {
      const float weight = on_input_ ? 1.0f : args_.plan->row_weight[row];
      memory_.factor[row] = weight * routed_factor(routed_.token(row));
    });
    if (has_shared())
      for_each_token(pool_, args_.num_tokens, [&](int64_t t) {
        memory_.shared_factor[t] = memory_.mix ? memory_.mix[2 * t + 1] : 1.0f;
      });
    if (on_input_ && (want_routed_.inner || desc_.save == MOEC_SAVE_INPUT))
      scale_rows(pool_, routed_, args_.x.data, args_.plan->row_weight, memory_.scaled_x);
  }

  void act_grads() {
    const bool routed_dots = (args_.d_routing_weights && !on_input_) ||
                             (want_gate_ && desc_.shared == MOEC_SHARED_SOFTMAX2);
    act_grad(routed_, saved_.routed, memory_.preact, memory_.routed, want_routed_, want_input_,
             routed_dots ? memory_.dots : nullptr, memory_.factor);
    if (has_shared())
      act_grad(shared_, saved_.shared, memory_.shared_preact, memory_.shared, want_shared_,
               args_.d_x, want_gate_ ? memory_.shared_dots : nullptr, memory_.shared_factor);
  }

  void weight_grads() {
    weight_grad(routed_, memory_.routed, memory_.factor, args_.d_expert_weights);
    weight_grad(shared_, memory_.shared, memory_.shared_factor, args_.d_shared_weights);
  }

  void shared_gate_grads() const {
    if (!want_gate_) return;
    for_each_token(pool_, args_.num_tokens, [&](int64_t t) {
      float* const d = memory_.d_logits;  // first holds the gradient of mix
      d[2 * t] = desc_.shared == MOEC_SHARED_SOFTMAX2 ? d_routed_mix(t) : 0.0f;
      d[2 * t + 1] = output_dot(shared_, memory_.shared_dots, t, t);
      shared_gate_backward(gate(), t, memory_.mix, d, d);
    });
    for (int i = 0; i < gate().logits(); ++i) {
      if (args_.d_shared_gate)
        token_sums({args_.x.data, desc_.dtype, desc_.hidden, nullptr}, memory_.d_logits + i,
                   desc_.hidden, args_.d_shared_gate, i * desc_.hidden);
    }
    if (args_.d_shared_gate_bias)
      token_sums({memory_.d_logits, MOEC_F32, 2, nullptr}, nullptr, 2, args_.d_shared_gate_bias, 0);
  }

  void input_grads() {
    if (!want_input_) return;
    flops_ += routed_.flops(routed_.inner_products());
    RowGradContext rows{routed_, memory_.d_rows, args_.x.data,
                        on_input_ && args_.d_routing_weights ? memory_.input_dots : nullptr};
    run_input_grad(pool_, routed_, memory_.routed, store_row_grad, &rows, memory_.products);
    if (!args_.d_x) return;
    if (has_shared()) flops_ += shared_.flops(shared_.inner_products());
    InputGradSum sum{&desc_,      args_.plan,       memory_.d_rows,
                     memory_.mix, memory_.d_logits, args_.shared_gate,
                     args_.d_y,   args_.d_x,        args_.accumulate_x};
    if (has_shared())
      run_input_grad(pool_, shared_, memory_.shared, finish_input_grad, &sum, memory_.products);
    else
      combine_all(pool_, sum);
  }

  void routing_weight_grads() const {
    if (!args_.d_routing_weights) return;
    const PlanView& plan = *args_.plan;
    const bool choice = plan.kind == MOEC_PLAN_EXPERT_CHOICE;
    const int64_t entries = choice ? plan.max_rows : args_.num_tokens * plan.top_k;
    std::fill_n(args_.d_routing_weights, entries, 0.0f);
    for_each_token(pool_, args_.num_tokens, [&](int64_t t) {
      for_each_term(plan, t, TermOrder::kSlot, [&](const Term& term) {
        const bool from_input = on_input_ && term.row >= 0;
        args_.d_routing_weights[term.entry] =
            from_input ? sum_of(memory_.input_dots, term.row, dot_columns(desc_.hidden))
                       : routed_factor(t) * term_dot(t, term);
      });
    });
  }

  void plain_grads() const {
    if (args_.d_output_bias)
      token_sums({args_.d_y, desc_.dtype, desc_.hidden, nullptr}, nullptr, desc_.hidden,
                 args_.d_output_bias, 0);
    if (!args_.d_residual) return;
    const int64_t bytes = desc_.hidden * dtype_bytes(desc_.dtype) * kTokensPerTask;
    const int64_t all = args_.num_tokens * desc_.hidden * dtype_bytes(desc_.dtype);
    pool_.parallel_for((all + bytes - 1) / bytes, [&](int32_t, int64_t i) {
      std::memcpy(static_cast<char*>(args_.d_residual) + i * bytes,
                  static_cast<const char*>(args_.d_y) + i * bytes,
                  size_t(std::min(bytes, all - i * bytes)));
    });
  }

  uint64_t flops() const { return flops_; }

 private:
  bool has_shared() const { return shared_.weights != nullptr; }
  SharedGate gate() const {
    return {&desc_, args_.num_tokens, args_.x.data, args_.shared_gate, args_.shared_gate_bias};
  }
  float routed_factor(int64_t t) const {  // of the routed sum in y
    return memory_.mix ? desc_.output_scale * memory_.mix[2 * t] : desc_.output_scale;
  }

  void act_grad(const Mlp& mlp, const Preact& saved, const Preact& again, const Hidden& to,
                const MlpWants& wants, bool want_input, float* dots, const float* factor) {
    const bool want_hidden = want_input || wants.inner;
    if (!want_hidden && !wants.down && !dots) return;
    ActGradStep step;
    step.d_y = args_.d_y;
    step.from = desc_.save == MOEC_SAVE_INPUT ? again : saved;
    if (desc_.save == MOEC_SAVE_INPUT) {
      flops_ += mlp.flops(mlp.inner_products());
      run_up(pool_, mlp, {again, nullptr, nullptr}, memory_.products);
    }
    if (want_hidden || dots) flops_ += mlp.flops(1);
    if (want_hidden) step.to = {to.gate, to.up, nullptr};
    step.to.act = wants.down ? to.act : nullptr;
    step.factor = factor;
    step.dots = dots;
    run_act_grad(pool_, mlp, step, memory_.products);
  }

  void weight_grad(const Mlp& mlp, const Hidden& d, const float* factor, const WeightsView* out) {
    if (!out) return;
    run_weight_grads(pool_, mlp, d, args_.d_y, factor, *out, args_.accumulate, memory_.products);
    flops_ += mlp.flops(out->gate.present() + out->up.present() + out->down.present());
  }

  static float sum_of(const float* parts, int64_t row, int64_t count) {
    float sum = 0;
    for (int64_t i = 0; i < count; ++i) sum += parts[row * count + i];
    return sum;
  }

  // <dY of token t, output of the expert for this row>
  float output_dot(const Mlp& mlp, const float* dots, int64_t row, int64_t t) const {
    float sum = sum_of(dots, row, dot_columns(mlp.inter));
    if (!has_bias(*mlp.weights, Part::kDown)) return sum;
    const int64_t expert = mlp.expert_of(row);
    return sum + d_y_dot(t, [&](int64_t col, int64_t n, float* to) {
             load_bias(*mlp.weights, Part::kDown, expert, col, n, to);
           });
  }
  float term_dot(int64_t t, const Term& term) const {
    if (term.row >= 0) return output_dot(routed_, memory_.dots, term.row, t);
    return d_y_dot(
        t, [&](int64_t col, int64_t n, float* to) { load_token(args_.x.data, t, col, n, to); });
  }
  // <dY of token t, v>; other(col, n, to) gives columns of v.
  template <class Other>
  float d_y_dot(int64_t t, const Other& other) const {
    float sum = 0, d_y[kColumns], v[kColumns];
    for (int64_t col = 0; col < desc_.hidden; col += kColumns) {
      const int64_t n = std::min(kColumns, desc_.hidden - col);
      load_token(args_.d_y, t, col, n, d_y);
      other(col, n, v);
      sum += dot(d_y, v, n);
    }
    return sum;
  }
  void load_token(const void* from, int64_t t, int64_t col, int64_t n, float* to) const {
    const int64_t at = t * desc_.hidden + col;
    convert_to_f32(static_cast<const char*>(from) + at * dtype_bytes(desc_.dtype), desc_.dtype, to,
                   n);
  }

  // d(loss) / d(c0): <dY, routed sum>
  float d_routed_mix(int64_t t) const {
    float sum = 0;
    for_each_term(*args_.plan, t, TermOrder::kSlot, [&](const Term& term) {
      const float weight = on_input_ && term.row >= 0 ? 1.0f : term.weight;
      if (weight != 0.0f) sum += weight * term_dot(t, term);
    });
    return desc_.output_scale * sum;
  }

  // out[first + n] (+)= sum over tokens of weight * rows[n]; weight: of [T,2], null = 1
  void token_sums(const GemmRows& rows, const float* weight, int64_t width, const Array& out,
                  int64_t first) const {
    ExpertMatrix to;
    to.bias_base = static_cast<char*>(out.data) + first * dtype_bytes(out.dtype);
    to.bias_dtype = out.dtype;
    column_sums(pool_, {1, group_, nullptr, rows, weight, 2, width, &to, args_.accumulate});
  }

  const ThreadPool& pool_;
  const ExpertsGradArgs& args_;
  const moec_experts_desc& desc_;
  const int32_t group_[2];
  const MlpWants want_routed_, want_shared_;
  const bool on_input_;
  bool want_gate_, want_input_;
  BackwardMemory memory_;
  SavedMemory saved_;
  Mlp routed_, shared_;
  uint64_t flops_ = 0;
};

}  // namespace

void experts_backward(const Device& device, const ExpertsGradArgs& args) {
  Backward backward(device, args);
  backward.prepare();
  backward.act_grads();
  backward.weight_grads();
  backward.shared_gate_grads();
  backward.input_grads();
  backward.routing_weight_grads();
  backward.plain_grads();
  if (device.host) device.host->count_launch(device.host->self, 1, backward.flops());
}

}  // namespace moec::cpu
