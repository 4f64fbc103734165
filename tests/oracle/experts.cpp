// SPDX-License-Identifier: Apache-2.0
// Experts, shared expert and combine of the oracle, forward and backward.
//   y = residual + output_bias + c0 * output_scale * routed + c1 * shared
// with c0 = 1; c1 = 1 (add), sigmoid(x.wg) (sigmoid gate) or (c0, c1) = softmax(x Wc^T + bc).
#include <cmath>
#include <cstddef>

#include "mlp.h"

namespace moec::oracle {
namespace {

void zero_like(const MlpWeights& w, MlpWeights* d) {
  d->gate.assign(w.gate.size(), 0.0);
  d->up.assign(w.up.size(), 0.0);
  d->down.assign(w.down.size(), 0.0);
  d->gate_bias.assign(w.gate_bias.size(), 0.0);
  d->up_bias.assign(w.up_bias.size(), 0.0);
  d->down_bias.assign(w.down_bias.size(), 0.0);
}

// Assignments (t * K + slot) that expert `id` computes, kRowsAtOnce at a time; for an identity
// expert, those it passes on.
using Assignments = std::vector<size_t>;
std::vector<Assignments> assignments_of(const Config& config, const Route& route, const Plan& plan,
                                        int id) {
  const bool identity = id >= config.router.num_experts;
  std::vector<Assignments> found;
  if (identity && config.fault == Fault::kIdentityDropped) return found;
  for (size_t a = 0; a < route.ids.size(); ++a) {
    if (route.ids[a] != id || (!identity && plan.assignment_row[a] < 0)) continue;
    if (found.empty() || found.back().size() == kRowsAtOnce) found.emplace_back();
    found.back().push_back(a);
  }
  return found;
}

Shape shape_of(const Config& c, bool shared = false) {
  const ExpertsConfig& e = c.experts;
  return {static_cast<size_t>(e.hidden),
          static_cast<size_t>(shared ? e.shared_inter : e.inter),
          shared ? e.shared_activation : e.activation,
          c.fault,
          e.operands,
          e.between,
          e.terms_apart,
          e.shifts};
}

// The factors of one expert, with the places of their gradients where there are any.
ExpertAdapters adapters_of(const ExpertsConfig& e, const Inputs& in, size_t expert,
                           std::vector<Adapter>* gradients) {
  ExpertAdapters found;
  const auto hidden = static_cast<size_t>(e.hidden), inter = static_cast<size_t>(e.inter);
  for (size_t i = 0; i < in.adapters.size(); ++i) {
    const auto add = [&](const Factors& f, Factors* d, size_t out, size_t inputs,
                         std::vector<ExpertFactors>* to) {
      if (!f.rank) return;
      const auto rank = static_cast<size_t>(f.rank);
      const size_t a = expert * rank * inputs, b = expert * out * rank;
      to->push_back({rank, inputs, out, f.scale, &f.a[a], &f.b[b], d ? &d->a[a] : nullptr,
                     d ? &d->b[b] : nullptr, static_cast<int>(i)});
    };
    Adapter* const d = gradients ? &(*gradients)[i] : nullptr;
    const Adapter& from = in.adapters[i];
    add(from.gate, d ? &d->gate : nullptr, inter, hidden, &found.gate);
    add(from.up, d ? &d->up : nullptr, inter, hidden, &found.up);
    add(from.down, d ? &d->down : nullptr, hidden, inter, &found.down);
  }
  return found;
}

// fp32 can round a product to half-way between two values of 16 bits. Rounding once would take the
// other neighbour then, and a pre-activation that cancels shows it.
double scaled_input(const Shape& s, double weight, double x) {
  if (s.operands == Rounding::kNone) return weight * x;
  return round_to(s.operands, round_to(Rounding::kFp32, weight * x));
}

// The rows of one expert, computed.
MlpRows expert_rows(const Config& config, const Inputs& in, const Vec& x, const Route& route,
                    const Assignments& assignments, int id,
                    std::vector<Adapter>* d_adapters = nullptr) {
  const Shape s = shape_of(config);
  const WeightPosition position = config.experts.weight_position;
  MlpRows rows;
  for (size_t a : assignments) {
    const double* source = &x[a / static_cast<size_t>(route.slots) * s.hidden];
    const double weight = route.weights[a];
    for (size_t h = 0; h < s.hidden; ++h)
      rows.x.push_back(position == WeightPosition::kInput ? scaled_input(s, weight, source[h])
                                                          : source[h]);
    rows.act_weight.push_back(position == WeightPosition::kActivation ? weight : 1);
    if (!in.adapter_ids.empty())
      rows.adapter.push_back(in.adapter_ids[a / static_cast<size_t>(route.slots)]);
  }
  const auto local = static_cast<size_t>(id - config.plan.expert_begin);
  rows.adapters = adapters_of(config.experts, in, local, d_adapters);
  mlp_forward(s, mlp_of<const double*>(in.experts, local, s.hidden, s.inter), &rows);
  return rows;
}

// The rows as backward sees them.
void round_kept(const Shape& s, MlpRows* rows) {
  if (s.between == Rounding::kNone && s.act.steps == Rounding::kNone) return;
  Activation act = s.act;
  act.steps = Rounding::kNone;
  for (size_t i = 0; i < rows->h.size(); ++i) {
    rows->g[i] = round_to(s.between, rows->g[i]);
    rows->u[i] = round_to(s.between, rows->u[i]);
    rows->h[i] = activate(act, rows->g[i], rows->u[i], s.fault);
  }
}

void add_output(const ExpertsConfig& e, double weight, const double* row, double* sum) {
  if (e.sums == Rounding::kNone) return add_scaled(sum, weight, row, static_cast<size_t>(e.hidden));
  const auto round = [&](double value) { return round_to(e.sums, value); };
  for (int h = 0; h < e.hidden; ++h) sum[h] = round(sum[h] + round(weight * round(row[h])));
}

// The sums over each token's experts [T,H], before output_scale.
Vec routed_forward(const Config& config, const Inputs& in, const Vec& x, const Route& route,
                   const Plan& plan) {
  const auto hidden = static_cast<size_t>(config.experts.hidden);
  const bool on_output = config.experts.weight_position == WeightPosition::kOutput;
  Vec sums(x.size(), 0.0);
  for (int id = 0; id < config.router.columns(); ++id) {
    const bool identity = id >= config.router.num_experts;
    for (const Assignments& assignments : assignments_of(config, route, plan, id)) {
      MlpRows rows;
      if (!identity) rows = expert_rows(config, in, x, route, assignments, id);
      for (size_t r = 0; r < assignments.size(); ++r) {
        const size_t first = assignments[r] / static_cast<size_t>(route.slots) * hidden;
        add_output(config.experts, identity || on_output ? route.weights[assignments[r]] : 1,
                   identity ? &x[first] : &rows.y[r * hidden], &sums[first]);
      }
    }
  }
  return sums;
}

// The gradient at y [T,H], and the factor of each token's routed sum in y [T]: c0 output_scale.
struct OutputGradient {
  const Vec &d_y, &factor;
};

// One expert's part of the backward. d_factor [T]: the gradient at the factors. In exact arithmetic
// a weight on the output may as well multiply the activations, and backends round the product.
void expert_backward(const Config& config, const Inputs& in, const Vec& x, const Route& route,
                     const Assignments& assignments, int id, const OutputGradient& output, Vec* d_x,
                     Vec* d_factor, Gradients* grads) {
  const Shape s = shape_of(config);
  const bool on_input = config.experts.weight_position == WeightPosition::kInput;
  MlpRows rows = expert_rows(config, in, x, route, assignments, id, &grads->adapters);
  round_kept(s, &rows);
  Vec d_y;
  for (size_t r = 0; r < assignments.size(); ++r) {
    const size_t a = assignments[r];
    const size_t token = a / static_cast<size_t>(route.slots);
    const double* d_out = &output.d_y[token * s.hidden];
    d_y.insert(d_y.end(), d_out, d_out + s.hidden);
    rows.act_weight[r] = (on_input ? 1 : route.weights[a]) * output.factor[token];
  }
  const auto local = static_cast<size_t>(id - config.plan.expert_begin);
  Vec d_rows;
  WeightSums d_weight;
  mlp_backward(s, mlp_of<const double*>(in.experts, local, s.hidden, s.inter), rows, d_y,
               {mlp_of<double*>(grads->experts, local, s.hidden, s.inter),
                mlp_of<double*>(grads->terms.experts, local, s.hidden, s.inter),
                mlp_of<double*>(grads->shifts.experts, local, s.hidden, s.inter)},
               &d_rows, &d_weight);
  for (size_t r = 0; r < assignments.size(); ++r) {
    const size_t a = assignments[r];
    const size_t token = a / static_cast<size_t>(route.slots), first = token * s.hidden;
    const double* d_row = &d_rows[r * s.hidden];
    double& term = grads->terms.routing_weights[a];
    if (on_input) {
      grads->routing_weights[a] = dot(d_row, &x[first], s.hidden);
      for (size_t h = 0; h < s.hidden; ++h)
        term += d_row[h] * x[first + h] * d_row[h] * x[first + h];
      term = std::sqrt(term);
    } else {
      grads->routing_weights[a] = output.factor[token] * d_weight.d[r];
      term = std::abs(output.factor[token]) * std::sqrt(d_weight.squares[r]);
    }
    (*d_factor)[token] += (on_input ? 1 : route.weights[a]) * d_weight.d[r];
    add_scaled(&(*d_x)[first], on_input ? route.weights[a] : 1, d_row, s.hidden);
  }
}

void routed_backward(const Config& config, const Inputs& in, const Vec& x, const Route& route,
                     const Plan& plan, const OutputGradient& output, Vec* d_x, Vec* d_factor,
                     Gradients* grads) {
  const auto hidden = static_cast<size_t>(config.experts.hidden);
  for (int id = 0; id < config.router.columns(); ++id) {
    for (const Assignments& assignments : assignments_of(config, route, plan, id)) {
      if (id < config.router.num_experts) {
        expert_backward(config, in, x, route, assignments, id, output, d_x, d_factor, grads);
        continue;
      }
      for (size_t a : assignments) {
        const size_t token = a / static_cast<size_t>(route.slots), first = token * hidden;
        const double factor = output.factor[token];
        const double d_weight = dot(&output.d_y[first], &x[first], hidden);
        grads->routing_weights[a] = factor * d_weight;
        (*d_factor)[token] += route.weights[a] * d_weight;
        add_scaled(&(*d_x)[first], factor * route.weights[a], &output.d_y[first], hidden);
      }
    }
  }
}

// The shared expert's rows: every token.
MlpRows shared_rows(const Config& config, const Inputs& in, const Vec& x) {
  MlpRows rows;
  if (config.experts.shared == Shared::kNone) return rows;
  const Shape s = shape_of(config, true);
  rows.x = x;
  rows.act_weight.assign(static_cast<size_t>(in.tokens), 1.0);
  mlp_forward(s, mlp_of<const double*>(in.shared, 0, s.hidden, s.inter), &rows);
  return rows;
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
  const Vec routed = routed_forward(config, in, x, route, plan);
  const MlpRows shared = shared_rows(config, in, x);
  Vec y(x.size(), 0.0);
  for (size_t first = 0; first < y.size(); first += hidden) {
    const Mix mix = mix_of(config, in, &x[first]);
    add_scaled(&y[first], mix.routed * config.experts.output_scale, &routed[first], hidden);
    if (!shared.y.empty()) add_scaled(&y[first], mix.shared, &shared.y[first], hidden);
    if (!in.output_bias.empty()) add_scaled(&y[first], 1, in.output_bias.data(), hidden);
    if (!in.residual.empty()) add_scaled(&y[first], 1, &in.residual[first], hidden);
  }
  return y;
}

Vec experts_backward(const Config& config, const Inputs& in, const Vec& x, const Route& route,
                     const Plan& plan, const Vec& d_y, Gradients* grads) {
  const auto hidden = static_cast<size_t>(config.experts.hidden);
  const ExpertsConfig& e = config.experts;
  for (MlpWeights* d : {&grads->experts, &grads->terms.experts}) zero_like(in.experts, d);
  for (MlpWeights* d : {&grads->shared, &grads->terms.shared}) zero_like(in.shared, d);
  grads->shifts = {};
  if (e.shifts) zero_like(in.experts, &grads->shifts.experts);
  if (e.shifts) zero_like(in.shared, &grads->shifts.shared);
  for (Vec* d : {&grads->routing_weights, &grads->terms.routing_weights})
    d->assign(route.ids.size(), 0.0);
  grads->adapters = in.adapters;
  for (Adapter& adapter : grads->adapters)
    for (Factors* d : {&adapter.gate, &adapter.up, &adapter.down})
      for (Vec* v : {&d->a, &d->b}) v->assign(v->size(), 0.0);
  grads->shared_gate.assign(in.shared_gate.size(), 0.0);
  grads->shared_gate_bias.assign(in.shared_gate_bias.size(), 0.0);
  grads->output_bias.assign(in.output_bias.size(), 0.0);
  grads->residual = in.residual.empty() ? Vec{} : d_y;
  MlpRows shared = shared_rows(config, in, x);
  Vec d_x(x.size(), 0.0);
  Vec factor;  // of the routed sums
  Vec d_factor(static_cast<size_t>(in.tokens), 0.0);
  Vec d_shared;                // at the shared expert's x
  WeightSums d_shared_weight;  // at its weight c1, which its activations get as well as its output
  if (e.shared != Shared::kNone) {
    const Shape s = shape_of(config, true);
    round_kept(s, &shared);
    for (size_t t = 0; t < shared.count(); ++t)
      shared.act_weight[t] = mix_of(config, in, &x[t * hidden]).shared;
    mlp_backward(s, mlp_of<const double*>(in.shared, 0, s.hidden, s.inter), shared, d_y,
                 {mlp_of<double*>(grads->shared, 0, s.hidden, s.inter),
                  mlp_of<double*>(grads->terms.shared, 0, s.hidden, s.inter),
                  mlp_of<double*>(grads->shifts.shared, 0, s.hidden, s.inter)},
                 &d_shared, &d_shared_weight);
    add_scaled(d_x.data(), 1, d_shared.data(), d_x.size());
  }
  for (size_t first = 0; first < d_y.size(); first += hidden)
    factor.push_back(mix_of(config, in, &x[first]).routed * e.output_scale);
  routed_backward(config, in, x, route, plan, {d_y, factor}, &d_x, &d_factor, grads);
  for (size_t first = 0; first < d_y.size(); first += hidden) {
    if (!in.output_bias.empty()) add_scaled(grads->output_bias.data(), 1, &d_y[first], hidden);
    if (e.shared == Shared::kNone || e.shared == Shared::kAdd) continue;
    const size_t token = first / hidden;
    const Mix d_mix{e.output_scale * d_factor[token], d_shared_weight.d[token]};
    mix_backward(config, in, &x[first], mix_of(config, in, &x[first]), d_mix, &d_x[first], grads);
  }
  for (MlpWeights* w :
       {&grads->terms.experts, &grads->terms.shared, &grads->shifts.experts, &grads->shifts.shared})
    for (Vec* v : {&w->gate, &w->up, &w->down, &w->gate_bias, &w->up_bias, &w->down_bias})
      take_roots(v);
  return d_x;
}

}  // namespace moec::oracle
