// SPDX-License-Identifier: Apache-2.0
// A router's description, random inputs for it, and one call of the CPU backend in both directions.
#pragma once

#include <cmath>
#include <functional>
#include <limits>
#include <utility>
#include <vector>

#include "oracle/moe_oracle.h"
#include "support/random.h"
#include "unit/cpu_device.h"

namespace moec::test {

using oracle::Config;
using oracle::Inputs;
using R = oracle::RouterConfig;

struct RouterCase {
  const char* name;
  std::function<void(oracle::RouterConfig&)> set;  // starting from 16 experts, top 3, softmax
  bool select_bias = false, per_expert_scale = false, mask = false;
};
inline void PrintTo(const RouterCase& c, std::ostream* out) {
  *out << c.name;
}

inline void deepseek(oracle::RouterConfig& r) {
  r.score = oracle::Score::kSigmoid;
  r.select = oracle::Select::kGroupTopK;
  r.num_groups = 4, r.top_groups = 2, r.group_top_m = 2;
  r.norm = oracle::Norm::kSum, r.norm_eps = 1e-20, r.scale = 2.5;
}
inline void selected_softmax(oracle::RouterConfig& r) {
  r.score = oracle::Score::kIdentity;
  r.weight_rule = oracle::WeightRule::kSoftmaxSelected;
}
inline uint32_t value(auto enumerator) {
  return static_cast<uint32_t>(enumerator);
}

inline moec_router_desc desc_of(const R& r) {
  moec_router_desc d = {};
  d.num_experts = r.num_experts, d.num_zero_experts = r.num_zero_experts, d.top_k = r.top_k;
  d.logit_softcap = float(r.logit_softcap);
  d.score = value(r.score), d.selection = value(r.select);
  d.num_groups = r.num_groups, d.top_groups = r.top_groups, d.group_top_m = r.group_top_m;
  d.group_fill = value(r.group_fill), d.mixer_eps = float(r.mixer_eps);
  d.weight_rule = value(r.weight_rule), d.norm = value(r.norm);
  d.norm_eps = float(r.norm_eps), d.norm_p = float(r.norm_p), d.scale = float(r.scale);
  d.slot_order = value(r.slot_order);
  if (r.norm_if_k_gt_1) d.flags |= MOEC_ROUTER_NORM_IF_K_GT_1;
  d.data_dtype = MOEC_F32;
  const std::pair<oracle::Rounding, uint32_t*> steps[] = {{r.score_rounding, &d.score_precision},
                                                          {r.norm_rounding, &d.norm_precision},
                                                          {r.weight_rounding, &d.weight_precision}};
  for (const auto& [rounding, precision] : steps) {
    if (rounding == oracle::Rounding::kNone) continue;
    *precision = MOEC_PREC_DATA;
    d.data_dtype = rounding == oracle::Rounding::kBf16 ? MOEC_BF16 : MOEC_F16;
  }
  return d;
}

struct Problem {
  explicit Problem(const RouterCase& c, int tokens = 37) {
    R& r = config.router;
    r.num_experts = 16, r.top_k = 3;
    c.set(r);
    const auto T = static_cast<size_t>(tokens), C = static_cast<size_t>(r.columns());
    const auto K = static_cast<size_t>(r.top_k);
    Random random;
    in.tokens = tokens;
    logits = rounded(random.normals(T * C, 1.5));
    if (c.select_bias) {
      const bool below = r.group_fill == oracle::GroupFill::kZero;
      in.select_bias = rounded(random.normals(C, 0.3));
      for (double& b : in.select_bias) b = double(float(below ? b - 3 : b));
    }
    if (c.per_expert_scale) in.per_expert_scale = rounded(random.normals(C));
    if (c.mask)
      for (size_t t = 0; t < T; ++t) in.token_mask.push_back(t % 5 != 1);
    const auto any_id = [&] { return int(random.below(r.columns() + 2)) - 1; };  // -1 .. C
    if (r.select == oracle::Select::kGiven)
      for (size_t i = 0; i < T * K; ++i) in.given_ids.push_back(any_id());
    if (r.select == oracle::Select::kTable) {
      for (size_t i = 0; i < 11 * K; ++i) in.table.push_back(any_id());
      for (size_t t = 0; t < T; ++t) in.token_ids.push_back(int(random.below(13)) - 1);
    }
    d_routing_weights = rounded(random.normals(T * K));
    d_logits_in = rounded(random.normals(T * C, 0.1));
  }
  Config config;
  Inputs in;
  std::vector<double> logits, d_routing_weights, d_logits_in;
};

struct Result {
  std::vector<int32_t> ids, counts;
  std::vector<float> weights, scores, d_logits, d_scale;
  bool operator==(const Result&) const = default;
};

inline Result run(const Problem& p, const cpu::Device& device, bool wide_ids = false) {
  const moec_router_desc desc = desc_of(p.config.router);
  const auto T = static_cast<size_t>(p.in.tokens);
  const auto C = static_cast<size_t>(p.config.router.columns()),
             K = static_cast<size_t>(desc.top_k);
  Stored logits(MOEC_F32, p.logits), scale(MOEC_F32, p.in.per_expert_scale);
  std::vector<float> bias = to_floats(p.in.select_bias),
                     d_routing_weights = to_floats(p.d_routing_weights);
  std::vector<float> d_in = to_floats(p.d_logits_in);
  std::vector<int32_t> table = p.in.table, token_ids = p.in.token_ids, given = p.in.given_ids;
  const std::vector<int64_t> wide(given.begin(), given.end());
  Result out = {std::vector<int32_t>(T * K), std::vector<int32_t>(C, 100),
                std::vector<float>(T * K),   std::vector<float>(T * C),
                std::vector<float>(T * C),   std::vector<float>(scale.values().size())};
  RouteArgs args = {};
  args.desc = &desc;
  args.num_tokens = p.in.tokens, args.table_rows = int64_t(table.size() / K);
  args.logits = logits.array(), args.per_expert_scale = scale.array();
  args.select_bias = bias.empty() ? nullptr : bias.data();
  args.token_mask = p.in.token_mask.empty() ? nullptr : p.in.token_mask.data();
  args.table = {table.data(), MOEC_I32}, args.token_ids = {token_ids.data(), MOEC_I32};
  args.given_ids = {given.data(), MOEC_I32};
  if (wide_ids) args.given_ids = {const_cast<int64_t*>(wide.data()), MOEC_I64};
  args.expert_ids = out.ids.data(), args.routing_weights = out.weights.data();
  args.scores = out.scores.data(), args.counts = {out.counts.data(), MOEC_I32};
  cpu::route_forward(device, args);

  RouteGradArgs grad = {};
  grad.desc = &desc;
  grad.num_tokens = p.in.tokens;
  grad.logits = args.logits, grad.per_expert_scale = args.per_expert_scale;
  grad.expert_ids = {out.ids.data(), MOEC_I32};
  grad.d_routing_weights = d_routing_weights.data(), grad.d_logits_in = d_in.data();
  grad.d_logits = out.d_logits.data();
  grad.d_per_expert_scale = {out.d_scale.empty() ? nullptr : out.d_scale.data(), MOEC_F32};
  cpu::route_backward(device, grad);
  return out;
}

inline Result route_rows(const std::vector<double>& logits, std::function<void(R&)> set,
                         std::vector<double> bias = {}) {
  Problem p({"", std::move(set)}, 1);
  p.logits = logits, p.in.select_bias = std::move(bias);
  p.config.router.num_experts = int(logits.size());
  p.d_routing_weights.assign(static_cast<size_t>(p.config.router.top_k), 1);
  p.d_logits_in.assign(logits.size(), 0);
  return run(p, CpuDevice(1));
}
using Ids = std::vector<int32_t>;
inline constexpr double kInf = std::numeric_limits<double>::infinity();

}  // namespace moec::test
