// SPDX-License-Identifier: Apache-2.0
// Experts, shared expert and combine of the oracle, forward and backward.
//   y = residual + output_bias + c0 * output_scale * routed + c1 * shared
// with c0 = 1; c1 = 1 (add), sigmoid(x.wg) (sigmoid gate) or (c0, c1) = softmax(x Wc^T + bc).
#include <cmath>
#include <cstddef>

#include "moe_oracle.h"

namespace moec::oracle {
namespace {

// Four partial sums: the only concession to speed.
double dot(const double* a, const double* b, size_t n) {
  double s[4] = {0, 0, 0, 0};
  size_t i = 0;
  for (; i + 4 <= n; i += 4)
    for (size_t j = 0; j < 4; ++j) s[j] += a[i + j] * b[i + j];
  for (; i < n; ++i) s[0] += a[i] * b[i];
  return (s[0] + s[1]) + (s[2] + s[3]);
}
void add_scaled(double* y, double a, const double* x, size_t n) {
  for (size_t i = 0; i < n; ++i) y[i] += a * x[i];
}
const double* at(const Vec& v, size_t index) { return v.empty() ? nullptr : v.data() + index; }
double* at(Vec& v, size_t index) { return v.empty() ? nullptr : v.data() + index; }

// One MLP: the matrices of one expert, or their gradients.
template <typename Pointer>
struct Mlp {
  Pointer gate, up, down, gate_bias, up_bias, down_bias;
};
template <typename Pointer, typename Weights>
Mlp<Pointer> mlp_of(Weights& w, size_t e, size_t hidden, size_t inter) {
  return {at(w.gate, e * inter * hidden), at(w.up, e * inter * hidden),
          at(w.down, e * hidden * inter), at(w.gate_bias, e * inter),
          at(w.up_bias, e * inter),       at(w.down_bias, e * hidden)};
}

struct Shape {
  size_t hidden, inter;
  Activation act;
  Fault fault;
};

// Everything one row computes in one MLP. The activation is multiplied by act_weight before the
// down projection, whose bias is multiplied by it, too.
struct MlpRow {
  Vec g, u, h, y;
};
MlpRow mlp_forward(const Shape& s, const Mlp<const double*>& m, const double* x,
                   double act_weight) {
  MlpRow row{Vec(s.inter, 0.0), Vec(s.inter), Vec(s.inter), Vec(s.hidden)};
  for (size_t i = 0; i < s.inter; ++i) {
    if (m.gate) row.g[i] = dot(m.gate + i * s.hidden, x, s.hidden);
    if (m.gate_bias) row.g[i] += m.gate_bias[i];
    row.u[i] = dot(m.up + i * s.hidden, x, s.hidden);
    if (m.up_bias) row.u[i] += m.up_bias[i];
    row.h[i] = activate(s.act, row.g[i], row.u[i], s.fault);
  }
  const double bias_weight = s.fault == Fault::kDownBiasUnweighted ? 1 : act_weight;
  for (size_t o = 0; o < s.hidden; ++o) {
    row.y[o] = act_weight * dot(m.down + o * s.inter, row.h.data(), s.inter);
    if (m.down_bias) row.y[o] += bias_weight * m.down_bias[o];
  }
  return row;
}

// Adds the weights' gradients and the gradient at x; returns the gradient of act_weight.
double mlp_backward(const Shape& s, const Mlp<const double*>& m, const double* x,
                    double act_weight, const MlpRow& row, const Vec& d_y, const Mlp<double*>& d,
                    double* d_x) {
  Vec d_hw(s.inter, 0.0);
  double d_weight = 0;
  for (size_t o = 0; o < s.hidden; ++o) {
    add_scaled(d_hw.data(), d_y[o], m.down + o * s.inter, s.inter);
    add_scaled(d.down + o * s.inter, d_y[o] * act_weight, row.h.data(), s.inter);
    if (m.down_bias) {
      d.down_bias[o] += d_y[o] * act_weight;
      d_weight += d_y[o] * m.down_bias[o];
    }
  }
  d_weight += dot(d_hw.data(), row.h.data(), s.inter);
  for (size_t i = 0; i < s.inter; ++i) {
    double dg = 0;
    double du = 0;
    activate_backward(s.act, row.g[i], row.u[i], &dg, &du, s.fault);
    dg *= d_hw[i] * act_weight;
    du *= d_hw[i] * act_weight;
    add_scaled(d_x, du, m.up + i * s.hidden, s.hidden);
    add_scaled(d.up + i * s.hidden, du, x, s.hidden);
    if (d.up_bias) d.up_bias[i] += du;
    if (!m.gate) continue;
    add_scaled(d_x, dg, m.gate + i * s.hidden, s.hidden);
    add_scaled(d.gate + i * s.hidden, dg, x, s.hidden);
    if (d.gate_bias) d.gate_bias[i] += dg;
  }
  return d_weight;
}

void zero_like(const MlpWeights& w, MlpWeights* d) {
  d->gate.assign(w.gate.size(), 0.0);
  d->up.assign(w.up.size(), 0.0);
  d->down.assign(w.down.size(), 0.0);
  d->gate_bias.assign(w.gate_bias.size(), 0.0);
  d->up_bias.assign(w.up_bias.size(), 0.0);
  d->down_bias.assign(w.down_bias.size(), 0.0);
}

// One (token, slot) of the routed sum.
struct Assignment {
  int id;
  bool identity, active;
  double weight;
};
Assignment assignment_of(const Config& config, const Route& route, const Plan& plan, size_t a) {
  const int experts = config.router.num_experts;
  const int id = route.ids[a];
  const bool identity = id >= experts && id < config.router.columns();
  const bool active = identity ? config.fault != Fault::kIdentityDropped
                               : plan.assignment_row[a] >= 0;
  return {id, identity, active, route.weights[a]};
}

Shape shape_of(const Config& c) {
  return {static_cast<size_t>(c.experts.hidden), static_cast<size_t>(c.experts.inter),
          c.experts.activation, c.fault};
}
Shape shared_shape(const Config& c) {
  return {static_cast<size_t>(c.experts.hidden), static_cast<size_t>(c.experts.shared_inter),
          c.experts.shared_activation, c.fault};
}

// The routed sum of one token, before output_scale.
Vec routed_row(const Config& config, const Inputs& in, const double* x, const Route& route,
               const Plan& plan, size_t t) {
  const Shape s = shape_of(config);
  const WeightPosition position = config.experts.weight_position;
  Vec sum(s.hidden, 0.0);
  const auto slots = static_cast<size_t>(route.slots);
  for (size_t a = t * slots; a < (t + 1) * slots; ++a) {
    const Assignment one = assignment_of(config, route, plan, a);
    if (!one.active) continue;
    if (one.identity) {
      add_scaled(sum.data(), one.weight, x, s.hidden);
      continue;
    }
    const auto local = static_cast<size_t>(one.id - config.plan.expert_begin);
    const auto mlp = mlp_of<const double*>(in.experts, local, s.hidden, s.inter);
    Vec scaled(x, x + s.hidden);
    if (position == WeightPosition::kInput)
      for (double& v : scaled) v *= one.weight;
    const double act_weight = position == WeightPosition::kActivation ? one.weight : 1;
    const MlpRow row = mlp_forward(s, mlp, scaled.data(), act_weight);
    add_scaled(sum.data(), position == WeightPosition::kOutput ? one.weight : 1, row.y.data(),
               s.hidden);
  }
  return sum;
}

// d_sum is the gradient at the routed sum of token t.
void routed_backward(const Config& config, const Inputs& in, const double* x, const Route& route,
                     const Plan& plan, size_t t, const Vec& d_sum, double* d_x, Gradients* grads) {
  const Shape s = shape_of(config);
  const WeightPosition position = config.experts.weight_position;
  const auto slots = static_cast<size_t>(route.slots);
  for (size_t a = t * slots; a < (t + 1) * slots; ++a) {
    const Assignment one = assignment_of(config, route, plan, a);
    if (!one.active) continue;
    double& d_weight = grads->routing_weights[a];
    if (one.identity) {
      d_weight = dot(d_sum.data(), x, s.hidden);
      add_scaled(d_x, one.weight, d_sum.data(), s.hidden);
      continue;
    }
    const auto local = static_cast<size_t>(one.id - config.plan.expert_begin);
    const auto mlp = mlp_of<const double*>(in.experts, local, s.hidden, s.inter);
    const auto d_mlp = mlp_of<double*>(grads->experts, local, s.hidden, s.inter);
    const bool on_input = position == WeightPosition::kInput;
    Vec scaled(x, x + s.hidden);
    for (double& v : scaled) v *= on_input ? one.weight : 1;
    const double act_weight = position == WeightPosition::kActivation ? one.weight : 1;
    const MlpRow row = mlp_forward(s, mlp, scaled.data(), act_weight);
    Vec d_y = d_sum;
    if (position == WeightPosition::kOutput) {
      d_weight = dot(d_sum.data(), row.y.data(), s.hidden);
      for (double& v : d_y) v *= one.weight;
    }
    Vec d_scaled(s.hidden, 0.0);
    const double d_act = mlp_backward(s, mlp, scaled.data(), act_weight, row, d_y, d_mlp,
                                      d_scaled.data());
    if (position == WeightPosition::kActivation) d_weight = d_act;
    if (on_input) d_weight = dot(d_scaled.data(), x, s.hidden);
    add_scaled(d_x, on_input ? one.weight : 1, d_scaled.data(), s.hidden);
  }
}

// Mixing coefficients of the routed sum and the shared expert.
struct Mix {
  double routed = 1, shared = 1;
};
Mix mix_of(const Config& config, const Inputs& in, const double* x) {
  const auto hidden = static_cast<size_t>(config.experts.hidden);
  if (config.experts.shared == Shared::kSigmoidGate)
    return {1, 1 / (1 + std::exp(-dot(x, in.shared_gate.data(), hidden)))};
  if (config.experts.shared != Shared::kSoftmax2) return {};
  double z[2];
  for (size_t i = 0; i < 2; ++i)
    z[i] = dot(x, in.shared_gate.data() + i * hidden, hidden) +
           (in.shared_gate_bias.empty() ? 0 : in.shared_gate_bias[i]);
  const double first = 1 / (1 + std::exp(z[1] - z[0]));
  return {first, 1 - first};
}

// d_mix is the gradient at (c0, c1).
void mix_backward(const Config& config, const Inputs& in, const double* x, const Mix& mix,
                  const Mix& d_mix, double* d_x, Gradients* grads) {
  const auto hidden = static_cast<size_t>(config.experts.hidden);
  const bool sigmoid = config.experts.shared == Shared::kSigmoidGate;
  const double slope = mix.shared * (sigmoid ? 1 - mix.shared : mix.routed);
  // The two logits of a softmax over two get opposite gradients.
  const double d_last = (sigmoid ? d_mix.shared : d_mix.shared - d_mix.routed) * slope;
  const size_t logits = sigmoid ? 1 : 2;
  for (size_t i = 0; i < logits; ++i) {
    const double d = i + 1 == logits ? d_last : -d_last;
    add_scaled(grads->shared_gate.data() + i * hidden, d, x, hidden);
    add_scaled(d_x, d, in.shared_gate.data() + i * hidden, hidden);
    if (!grads->shared_gate_bias.empty()) grads->shared_gate_bias[i] += d;
  }
}

}  // namespace

Vec experts_forward(const Config& config, const Inputs& in, const Vec& x, const Route& route,
                    const Plan& plan) {
  const auto hidden = static_cast<size_t>(config.experts.hidden);
  const bool has_shared = config.experts.shared != Shared::kNone;
  Vec y(x.size(), 0.0);
  for (size_t t = 0; t < static_cast<size_t>(in.tokens); ++t) {
    const double* row = &x[t * hidden];
    const Mix mix = mix_of(config, in, row);
    const Vec routed = routed_row(config, in, row, route, plan, t);
    add_scaled(&y[t * hidden], mix.routed * config.experts.output_scale, routed.data(), hidden);
    if (has_shared) {
      const Shape s = shared_shape(config);
      const auto mlp = mlp_of<const double*>(in.shared, 0, s.hidden, s.inter);
      add_scaled(&y[t * hidden], mix.shared, mlp_forward(s, mlp, row, 1).y.data(), hidden);
    }
    if (!in.output_bias.empty()) add_scaled(&y[t * hidden], 1, in.output_bias.data(), hidden);
    if (!in.residual.empty()) add_scaled(&y[t * hidden], 1, &in.residual[t * hidden], hidden);
  }
  return y;
}

Vec experts_backward(const Config& config, const Inputs& in, const Vec& x, const Route& route,
                     const Plan& plan, const Vec& d_y, Gradients* grads) {
  const auto hidden = static_cast<size_t>(config.experts.hidden);
  const ExpertsConfig& e = config.experts;
  Vec d_x(x.size(), 0.0);
  zero_like(in.experts, &grads->experts);
  zero_like(in.shared, &grads->shared);
  grads->routing_weights.assign(route.ids.size(), 0.0);
  grads->shared_gate.assign(in.shared_gate.size(), 0.0);
  grads->shared_gate_bias.assign(in.shared_gate_bias.size(), 0.0);
  grads->output_bias.assign(in.output_bias.size(), 0.0);
  grads->residual = in.residual.empty() ? Vec{} : d_y;
  for (size_t t = 0; t < static_cast<size_t>(in.tokens); ++t) {
    const double* row = &x[t * hidden];
    const double* d_out = &d_y[t * hidden];
    const Mix mix = mix_of(config, in, row);
    Vec d_sum(d_out, d_out + hidden);
    for (double& v : d_sum) v *= mix.routed * e.output_scale;
    routed_backward(config, in, row, route, plan, t, d_sum, &d_x[t * hidden], grads);
    if (!in.output_bias.empty()) add_scaled(grads->output_bias.data(), 1, d_out, hidden);
    if (e.shared == Shared::kNone) continue;
    const Shape s = shared_shape(config);
    const auto mlp = mlp_of<const double*>(in.shared, 0, s.hidden, s.inter);
    const MlpRow shared = mlp_forward(s, mlp, row, 1);
    Vec d_shared(d_out, d_out + hidden);
    for (double& v : d_shared) v *= mix.shared;
    mlp_backward(s, mlp, row, 1, shared, d_shared,
                 mlp_of<double*>(grads->shared, 0, s.hidden, s.inter), &d_x[t * hidden]);
    if (e.shared == Shared::kAdd) continue;
    Mix d_mix{0, dot(d_out, shared.y.data(), hidden)};
    if (e.shared == Shared::kSoftmax2)
      d_mix.routed =
          e.output_scale * dot(d_out, routed_row(config, in, row, route, plan, t).data(), hidden);
    mix_backward(config, in, row, mix, d_mix, &d_x[t * hidden], grads);
  }
  return d_x;
}

}  // namespace moec::oracle
