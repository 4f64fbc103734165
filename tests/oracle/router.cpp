// SPDX-License-Identifier: Apache-2.0
// Router of the oracle, forward: gate GEMM, scores, selection, weights.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <numeric>

#include "moe_oracle.h"
#include "router_parts.h"

namespace moec::oracle {
namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();

// Order of choice scores: NaN first, then larger first, ties to the lowest index.
bool precedes(double a, int index_a, double b, int index_b, Fault fault) {
  const bool nan_a = std::isnan(a);
  const bool nan_b = std::isnan(b);
  if (nan_a != nan_b) return nan_a;
  if (!nan_a && a != b) return a > b;
  return fault == Fault::kTieToHighestId ? index_a > index_b : index_a < index_b;
}

// Indices of the `count` first values in that order.
Ids first_in_order(const Vec& values, int count, Fault fault) {
  Ids order(values.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int a, int b) {
    return precedes(values[static_cast<size_t>(a)], a, values[static_cast<size_t>(b)], b, fault);
  });
  order.resize(static_cast<size_t>(count));
  return order;
}

// Experts outside the best groups get the fill value.
void limit_groups(const Config& config, Vec* choice) {
  const RouterConfig& r = config.router;
  const int size = r.columns() / r.num_groups;
  const int best = std::min(std::max(r.group_top_m, 1), size);
  Vec group_score(static_cast<size_t>(r.num_groups), 0.0);
  for (int g = 0; g < r.num_groups; ++g) {
    const Vec members(choice->begin() + g * size, choice->begin() + (g + 1) * size);
    for (int i : first_in_order(members, best, config.fault))
      group_score[static_cast<size_t>(g)] += members[static_cast<size_t>(i)];
  }
  std::vector<bool> keep(static_cast<size_t>(r.num_groups), false);
  for (int g : first_in_order(group_score, r.top_groups, config.fault))
    keep[static_cast<size_t>(g)] = true;
  const double fill = r.group_fill == GroupFill::kZero ? 0.0 : -kInf;
  for (size_t e = 0; e < choice->size(); ++e) {
    if (!keep[e / static_cast<size_t>(size)]) (*choice)[e] = fill;
  }
}

// A softmax of nothing but -inf chooses nobody.
bool chooses(const RouterConfig& r, const Vec& capped) {
  return r.score != Score::kSoftmax ||
         std::any_of(capped.begin(), capped.end(), [](double z) { return z != -kInf; });
}

Vec choice_row(const Inputs& in, const Vec& scores) {
  Vec choice = scores;
  for (size_t e = 0; e < in.select_bias.size(); ++e) choice[e] += in.select_bias[e];
  return choice;
}

// Ids of one token for the selections that look at scores; -1 fills the slots that find nobody.
Ids select_row(const Config& config, const Inputs& in, const Vec& capped, const Vec& scores) {
  const RouterConfig& r = config.router;
  Ids ids(static_cast<size_t>(r.top_k), -1);
  if (r.select == Select::kSparseMixer) {
    const Mixer mixer = sparse_mixer(r, capped, config.fault);
    ids = {mixer.id[0], mixer.id[1]};
  } else if (chooses(r, capped)) {
    Vec choice = choice_row(in, scores);
    if (r.select == Select::kGroupTopK) limit_groups(config, &choice);
    const Ids order = first_in_order(choice, r.top_k, config.fault);
    for (size_t k = 0; k < order.size(); ++k)
      if (choice[static_cast<size_t>(order[k])] != -kInf) ids[k] = order[k];
  }
  if (r.slot_order == SlotOrder::kByExpert)
    std::sort(ids.begin(), ids.end(), [](int a, int b) {  // -1 last
      return static_cast<unsigned>(a) < static_cast<unsigned>(b);
    });
  return ids;
}

// Ids of one token that come from outside: the slots stay where they are.
Ids given_row(const Config& config, const Inputs& in, int t) {
  const RouterConfig& r = config.router;
  const bool table = r.select == Select::kTable;
  const int rows = table ? static_cast<int>(in.table.size()) / r.top_k : in.tokens;
  const int row = table ? in.token_ids[static_cast<size_t>(t)] : t;
  Ids ids(static_cast<size_t>(r.top_k), -1);
  if (row < 0 || row >= rows) return ids;
  const Ids& source = table ? in.table : in.given_ids;
  for (int k = 0; k < r.top_k; ++k) {
    const int id = source[static_cast<size_t>(row * r.top_k + k)];
    if (id >= 0 && id < r.columns()) ids[static_cast<size_t>(k)] = id;
  }
  return ids;
}

// R7: one weight per slot, 0 where the id is -1.
Vec weight_row(const Config& config, const Inputs& in, const Vec& capped, const Vec& scores,
               const Ids& ids) {
  const RouterConfig& r = config.router;
  Vec raw(ids.size(), 0.0);
  if (r.select == Select::kSparseMixer) {
    const Mixer mixer = sparse_mixer(r, capped, config.fault);
    for (size_t k = 0; k < ids.size(); ++k)
      for (size_t step = 0; step < 2; ++step)
        if (ids[k] >= 0 && ids[k] == mixer.id[step]) raw[k] = mixer.weight[step];
    return raw;
  }
  double largest = std::numeric_limits<double>::lowest();  // of nothing but -inf weights are 0
  for (int id : ids)
    if (id >= 0) largest = std::max(largest, capped[static_cast<size_t>(id)]);
  const bool by_score = r.select == Select::kTopK || r.select == Select::kGroupTopK;
  const Vec choice = by_score ? choice_row(in, scores) : Vec(scores.size(), 0.0);
  double sum = 0;
  for (size_t k = 0; k < ids.size(); ++k) {
    if (ids[k] < 0) continue;
    const auto id = static_cast<size_t>(ids[k]);
    switch (r.weight_rule) {
      case WeightRule::kScore:
        raw[k] = scores[id];
        break;
      case WeightRule::kSoftmaxSelected:
        raw[k] = std::exp(capped[id] - largest);
        break;
      case WeightRule::kSigmoidSelected:
        raw[k] = 1 / (1 + std::exp(-capped[id]));
        break;
    }
    if (std::isnan(choice[id])) raw[k] = choice[id];
    if (config.fault == Fault::kBiasInWeight) raw[k] += in.select_bias[id];
    sum += raw[k];
  }
  if (config.fault == Fault::kNormBeforeSelect) {
    sum = 0;
    for (double z : capped) sum += std::exp(z - largest);
  }
  for (double& w : raw) {
    if (r.weight_rule == WeightRule::kSoftmaxSelected && sum != 0) w /= sum;
    w = round_to(r.norm_rounding, w);
  }
  return raw;
}

}  // namespace

Mixer sparse_mixer(const RouterConfig& r, const Vec& z, Fault fault) {
  Mixer mixer;
  Vec rest = z;
  for (size_t step = 0; step < 2; ++step) {
    int id = first_in_order(rest, 1, Fault::kNone)[0];
    if (rest[static_cast<size_t>(id)] == -kInf) id = -1;
    mixer.id[step] = id;
    mixer.probs[step].assign(rest.size(), 0.0);
    if (id < 0) continue;
    const double largest = rest[static_cast<size_t>(id)];
    double sum = 0;
    for (size_t e = 0; e < rest.size(); ++e) {  // NaN stays and shows in the weights
      const double gap = (largest - z[e]) / std::max(std::fabs(z[e]), largest);
      if (gap > 2 * r.mixer_eps && fault != Fault::kMixerThresholdOff) continue;
      mixer.probs[step][e] = std::exp(rest[e] - largest);
      sum += mixer.probs[step][e];
    }
    for (double& p : mixer.probs[step]) p /= sum;
    mixer.weight[step] = mixer.probs[step][static_cast<size_t>(id)];
    rest[static_cast<size_t>(id)] = -kInf;
  }
  return mixer;
}

bool normalises(const RouterConfig& r) {
  return r.norm != Norm::kNone && !(r.norm_if_k_gt_1 && r.top_k == 1);
}

double norm_divisor(const RouterConfig& r, const Vec& raw) {
  double sum = 0;
  for (double w : raw) sum += r.norm == Norm::kP ? std::pow(std::fabs(w), r.norm_p) : w;
  switch (r.norm) {
    case Norm::kNone:
      return 1;
    case Norm::kSum:
      return sum + r.norm_eps;
    case Norm::kClampSum:
      return std::max(sum, r.norm_eps);
    case Norm::kP:
      return std::pow(sum, 1 / r.norm_p);
  }
  return 1;
}

Gate gate_forward(const Config& config, const Inputs& in) {
  const RouterConfig& r = config.router;
  const int hidden = config.experts.hidden;
  const int columns = r.columns();
  Gate gate;
  gate.expert_x = in.x;
  gate.router_x = in.router_x.empty() ? in.x : in.router_x;
  if (r.jitter != 0) {
    gate.factor.resize(gate.router_x.size());
    for (size_t i = 0; i < gate.factor.size(); ++i) {
      gate.factor[i] = jitter_factor(r.jitter, r.seed, r.rng_offset + i);
      gate.router_x[i] *= gate.factor[i];
    }
    if (r.jitter_x) gate.expert_x = gate.router_x;
  }
  if (r.input == RouterInput::kRmsScaled) {
    for (int t = 0; t < in.tokens; ++t) {
      double* row = &gate.router_x[static_cast<size_t>(t) * static_cast<size_t>(hidden)];
      const double inverse = inverse_rms(row, hidden, r.rms_eps);
      for (int h = 0; h < hidden; ++h)
        row[h] *= inverse * in.input_scale[static_cast<size_t>(h)] / std::sqrt(hidden);
    }
  }
  gate.logits.assign(static_cast<size_t>(in.tokens) * static_cast<size_t>(columns), 0.0);
  for (int t = 0; t < in.tokens; ++t) {
    const double* row = &gate.router_x[static_cast<size_t>(t) * static_cast<size_t>(hidden)];
    for (int c = 0; c < columns; ++c) {
      const double* weight = &in.gate_weight[static_cast<size_t>(c) * static_cast<size_t>(hidden)];
      double sum = in.gate_bias.empty() ? 0 : in.gate_bias[static_cast<size_t>(c)];
      for (int h = 0; h < hidden; ++h) sum += row[h] * weight[h];
      gate.logits[static_cast<size_t>(t * columns + c)] = round_to(r.logit_rounding, sum);
    }
  }
  return gate;
}

double inverse_rms(const double* row, int hidden, double eps) {
  double sum = 0;
  for (int h = 0; h < hidden; ++h) sum += row[h] * row[h];
  return 1 / std::sqrt(sum / hidden + eps);
}

Vec score_row(const RouterConfig& r, const Vec& z) {
  Vec s = z;
  if (r.score == Score::kSoftmax) {
    const double largest = *std::max_element(z.begin(), z.end());
    double sum = 0;
    for (double& v : s) sum += v = std::exp(v - largest);
    for (double& v : s) v /= sum;
  } else {
    for (double& v : s) v = score_value(r.score, v);
  }
  for (double& v : s) v = round_to(r.score_rounding, v);
  return s;
}

Route route_forward(const Config& config, const Inputs& in, const Vec& logits) {
  const RouterConfig& r = config.router;
  const auto columns = static_cast<size_t>(r.columns());
  Route route;
  route.slots = r.top_k;
  route.counts.assign(columns, 0);
  for (int t = 0; t < in.tokens; ++t) {
    Vec capped = row_of(logits, static_cast<size_t>(t), columns);
    if (r.logit_softcap != 0)
      for (double& z : capped) z = r.logit_softcap * std::tanh(z / r.logit_softcap);
    const Vec scores = score_row(r, capped);
    const bool outside = r.select == Select::kTable || r.select == Select::kGiven;
    Ids ids = outside ? given_row(config, in, t) : select_row(config, in, capped, scores);
    if (!in.token_mask.empty() && in.token_mask[static_cast<size_t>(t)] == 0)
      ids.assign(ids.size(), -1);
    const Vec raw = weight_row(config, in, capped, scores, ids);
    const double divisor = normalises(r) ? norm_divisor(r, raw) : 1;
    const bool scaled = config.fault != Fault::kScaleOnlyWithNorm || normalises(r);
    for (size_t k = 0; k < ids.size(); ++k) {
      double normed = 0;
      double weight = 0;
      if (ids[k] >= 0) {
        const auto id = static_cast<size_t>(ids[k]);
        normed = divisor == 0 ? 0 : round_to(r.norm_rounding, raw[k] / divisor);
        weight = normed * (scaled ? r.scale : 1);
        if (!in.per_expert_scale.empty()) weight *= in.per_expert_scale[id];
        ++route.counts[id];
      }
      route.normed.push_back(normed);
      route.weights.push_back(round_to(r.weight_rounding, weight));
    }
    route.capped.insert(route.capped.end(), capped.begin(), capped.end());
    route.scores.insert(route.scores.end(), scores.begin(), scores.end());
    route.ids.insert(route.ids.end(), ids.begin(), ids.end());
    route.raw.insert(route.raw.end(), raw.begin(), raw.end());
  }
  return route;
}

Route expert_choice(const Vec& scores, int tokens, int experts, int64_t capacity,
                    const Mask& mask) {
  Route route;
  route.slots = experts;
  const auto slots = static_cast<size_t>(experts);
  route.ids.assign(static_cast<size_t>(tokens) * slots, -1);
  route.weights.assign(route.ids.size(), 0.0);
  route.counts.assign(slots, 0);
  std::vector<size_t> used(static_cast<size_t>(tokens), 0);
  for (size_t e = 0; e < slots; ++e) {
    Vec column;
    for (size_t t = 0; t < used.size(); ++t)
      column.push_back(mask.empty() || mask[t] != 0 ? scores[t * slots + e] : -kInf);
    const auto count = static_cast<int>(std::min<int64_t>(capacity, tokens));
    for (int token : first_in_order(column, count, Fault::kNone)) {
      const auto t = static_cast<size_t>(token);
      if (column[t] == -kInf) continue;
      route.ids[t * slots + used[t]] = static_cast<int>(e);
      route.weights[t * slots + used[t]] = column[t];
      ++used[t];
      ++route.counts[e];
    }
  }
  return route;
}

void bias_update(const std::vector<int64_t>& counts, double rate, Vec* bias) {
  int64_t total = 0;
  for (int64_t n : counts) total += n;
  for (size_t e = 0; e < counts.size(); ++e) {  // sign(mean - n) without a division
    const int64_t gap = total - counts[e] * static_cast<int64_t>(counts.size());
    (*bias)[e] += rate * static_cast<double>((gap > 0) - (gap < 0));
  }
}

}  // namespace moec::oracle
