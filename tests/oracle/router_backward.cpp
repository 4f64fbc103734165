// SPDX-License-Identifier: Apache-2.0
// Router of the oracle, backward. Roundings are passed through (gradient 1).
#include <algorithm>
#include <cmath>

#include "moe_oracle.h"
#include "router_parts.h"

namespace moec::oracle {
namespace {

// Gradient at the raw weights from that at the normalised ones.
Vec norm_backward(const RouterConfig& r, const Vec& raw, const Ids& ids, const Vec& d_normed) {
  if (!normalises(r)) return d_normed;
  const double divisor = norm_divisor(r, raw);
  if (divisor == 0) return Vec(raw.size(), 0.0);
  double dot = 0;  // the gradient at the divisor is -dot / divisor^2
  double sum = 0;
  for (size_t k = 0; k < raw.size(); ++k) {
    dot += d_normed[k] * raw[k];
    sum += raw[k];
  }
  Vec d_raw(raw.size(), 0.0);
  for (size_t k = 0; k < raw.size(); ++k) {
    if (ids[k] < 0) continue;
    double d_divisor_d_raw = 1;
    if (r.norm == Norm::kClampSum && sum < r.norm_eps) d_divisor_d_raw = 0;
    if (r.norm == Norm::kP)
      d_divisor_d_raw = std::copysign(std::pow(std::fabs(raw[k]) / divisor, r.norm_p - 1), raw[k]);
    d_raw[k] = d_normed[k] / divisor - dot / (divisor * divisor) * d_divisor_d_raw;
  }
  return d_raw;
}

// Gradient at the capped logits from that at the scores of `ids`. A score that nobody chose is not
// looked at: it may be NaN.
void score_backward(const RouterConfig& r, const Vec& z, const Vec& s, const Ids& ids,
                    const Vec& d_s, Vec* d_z) {
  std::vector<bool> chosen(s.size(), false);
  for (int id : ids)
    if (id >= 0) chosen[static_cast<size_t>(id)] = true;
  double dot = 0;
  for (size_t e = 0; e < s.size(); ++e) dot += chosen[e] ? d_s[e] * s[e] : 0;
  const bool any = std::find(chosen.begin(), chosen.end(), true) != chosen.end();
  for (size_t e = 0; e < s.size(); ++e) {
    if (r.score == Score::kSoftmax ? !any : !chosen[e]) continue;
    (*d_z)[e] += r.score == Score::kSoftmax ? s[e] * (d_s[e] - dot)
                                            : d_s[e] * score_slope(r.score, z[e], s[e]);
  }
}

void rule_backward(const Config& config, const Vec& z, const Vec& s, const Ids& ids, const Vec& raw,
                   const Vec& d_raw, Vec* d_z) {
  const RouterConfig& r = config.router;
  if (r.select == Select::kSparseMixer) {
    const Mixer mixer = sparse_mixer(r, z, config.fault);
    for (size_t k = 0; k < ids.size(); ++k) {
      if (ids[k] < 0) continue;
      const size_t step = ids[k] == mixer.id[0] ? 0 : 1;
      (*d_z)[static_cast<size_t>(ids[k])] += d_raw[k] * raw[k];
      for (size_t e = 0; e < z.size(); ++e) (*d_z)[e] -= d_raw[k] * raw[k] * mixer.probs[step][e];
    }
    return;
  }
  double dot = 0;
  for (size_t k = 0; k < ids.size(); ++k) dot += d_raw[k] * raw[k];
  Vec d_s(s.size(), 0.0);
  for (size_t k = 0; k < ids.size(); ++k) {
    if (ids[k] < 0) continue;
    const auto id = static_cast<size_t>(ids[k]);
    switch (r.weight_rule) {
      case WeightRule::kScore:
        d_s[id] += d_raw[k];
        break;
      case WeightRule::kSoftmaxSelected:
        (*d_z)[id] += raw[k] * (d_raw[k] - dot);
        break;
      case WeightRule::kSigmoidSelected:
        (*d_z)[id] += d_raw[k] * raw[k] * (1 - raw[k]);
        break;
    }
  }
  if (r.weight_rule == WeightRule::kScore) score_backward(r, z, s, ids, d_s, d_z);
}

// d_row [H] at rms(x) * scale / sqrt(H) becomes the gradient at x.
void rms_backward(const RouterConfig& r, const Vec& x, const Vec& scale, Vec* d_row, Vec* d_scale) {
  const auto hidden = static_cast<double>(x.size());
  const double inverse = inverse_rms(x.data(), static_cast<int>(x.size()), r.rms_eps);
  double dot = 0;
  for (size_t h = 0; h < x.size(); ++h) {
    (*d_scale)[h] += (*d_row)[h] * x[h] * inverse / std::sqrt(hidden);
    (*d_row)[h] *= scale[h] / std::sqrt(hidden);
    dot += (*d_row)[h] * x[h] * inverse;
  }
  for (size_t h = 0; h < x.size(); ++h)
    (*d_row)[h] = inverse * ((*d_row)[h] - x[h] * inverse * dot / hidden);
}

}  // namespace

void route_backward(const Config& config, const Inputs& in, const Route& route,
                    const Vec& d_routing_weights, Gradients* grads) {
  const RouterConfig& r = config.router;
  const auto columns = static_cast<size_t>(r.columns());
  const auto slots = static_cast<size_t>(r.top_k);
  grads->logits.clear();
  grads->per_expert_scale.assign(in.per_expert_scale.size(), 0.0);
  for (size_t t = 0; t < static_cast<size_t>(in.tokens); ++t) {
    const Vec z = row_of(route.capped, t, columns);
    const Ids ids = row_of(route.ids, t, slots);
    const Vec raw = row_of(route.raw, t, slots);
    Vec d_normed = row_of(d_routing_weights, t, slots);
    for (size_t k = 0; k < slots; ++k) {
      const double before = r.scale * route.normed[t * slots + k];
      d_normed[k] = ids[k] < 0 ? 0 : d_normed[k] * r.scale;
      if (ids[k] < 0 || in.per_expert_scale.empty()) continue;
      const auto id = static_cast<size_t>(ids[k]);
      grads->per_expert_scale[id] += d_routing_weights[t * slots + k] * before;
      d_normed[k] *= in.per_expert_scale[id];
    }
    Vec d_z(columns, 0.0);
    rule_backward(config, z, row_of(route.scores, t, columns), ids, raw,
                  norm_backward(r, raw, ids, d_normed), &d_z);
    for (size_t e = 0; e < columns; ++e) {
      const double ratio = r.logit_softcap == 0 || d_z[e] == 0 ? 0 : z[e] / r.logit_softcap;
      grads->logits.push_back(d_z[e] * (1 - ratio * ratio));
    }
  }
}

void gate_backward(const Config& config, const Inputs& in, const Gate& gate, const Vec& d_logits,
                   const Vec& d_expert_x, Gradients* grads) {
  const RouterConfig& r = config.router;
  const auto hidden = static_cast<size_t>(config.experts.hidden);
  const auto columns = static_cast<size_t>(r.columns());
  const bool own_input = !in.router_x.empty();
  const Vec& source = own_input ? in.router_x : in.x;
  grads->x = d_expert_x;
  if (!gate.factor.empty() && r.jitter_x)
    for (size_t i = 0; i < gate.factor.size(); ++i) grads->x[i] *= gate.factor[i];
  grads->router_x.assign(own_input ? source.size() : 0, 0.0);
  grads->gate_weight.assign(in.gate_weight.size(), 0.0);
  grads->gate_bias.assign(in.gate_bias.size(), 0.0);
  grads->input_scale.assign(in.input_scale.size(), 0.0);
  for (size_t t = 0; t < static_cast<size_t>(in.tokens); ++t) {
    const Vec d = row_of(d_logits, t, columns);  // of zeros: x has no part in it, and may be NaN
    if (std::all_of(d.begin(), d.end(), [](double g) { return g == 0; })) continue;
    Vec d_row(hidden, 0.0);
    for (size_t c = 0; c < columns; ++c) {
      if (!grads->gate_bias.empty()) grads->gate_bias[c] += d[c];
      for (size_t h = 0; h < hidden; ++h) {
        d_row[h] += d[c] * in.gate_weight[c * hidden + h];
        grads->gate_weight[c * hidden + h] += d[c] * gate.router_x[t * hidden + h];
      }
    }
    Vec x = row_of(source, t, hidden);
    for (size_t h = 0; h < hidden && !gate.factor.empty(); ++h) x[h] *= gate.factor[t * hidden + h];
    if (r.input == RouterInput::kRmsScaled)
      rms_backward(r, x, in.input_scale, &d_row, &grads->input_scale);
    Vec& target = own_input ? grads->router_x : grads->x;
    for (size_t h = 0; h < hidden; ++h)
      target[t * hidden + h] += d_row[h] * (gate.factor.empty() ? 1 : gate.factor[t * hidden + h]);
  }
}

}  // namespace moec::oracle
