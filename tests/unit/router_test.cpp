// SPDX-License-Identifier: Apache-2.0
// Routing forward and backward beside the oracle; the same bits for every instruction set and
// number of threads.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <utility>

#include "oracle/moe_oracle.h"
#include "support/compare.h"
#include "support/random.h"
#include "unit/cpu_device.h"

namespace moec::test {
namespace {

using oracle::Config;
using oracle::Inputs;

struct RouterCase {
  const char* name;
  std::function<void(oracle::RouterConfig&)> set;  // starting from 16 experts, top 3, softmax
  bool select_bias = false, per_expert_scale = false, mask = false;
};
void PrintTo(const RouterCase& c, std::ostream* out) {
  *out << c.name;
}

void deepseek(oracle::RouterConfig& r) {
  r.score = oracle::Score::kSigmoid;
  r.select = oracle::Select::kGroupTopK;
  r.num_groups = 4, r.top_groups = 2, r.group_top_m = 2;
  r.norm = oracle::Norm::kSum, r.norm_eps = 1e-20, r.scale = 2.5;
}
void selected_softmax(oracle::RouterConfig& r) {
  r.score = oracle::Score::kIdentity;
  r.weight_rule = oracle::WeightRule::kSoftmaxSelected;
}
using R = oracle::RouterConfig;
const RouterCase kCases[] = {
    {"softmax", [](R&) {}},
    {"softmax_scaled", [](R& r) { r.scale = 16; }, true},
    {"softmax_sum", [](R& r) { r.norm = oracle::Norm::kSum; }},
    {"softmax_sum_eps", [](R& r) { r.norm = oracle::Norm::kSum, r.norm_eps = 0.25; }},
    {"softmax_clamp", [](R& r) { r.norm = oracle::Norm::kClampSum, r.norm_eps = 1e-12; }, true},
    {"softmax_clamped", [](R& r) { r.norm = oracle::Norm::kClampSum, r.norm_eps = 0.7; }},
    {"softmax_p1", [](R& r) { r.norm = oracle::Norm::kP; }},
    {"softmax_p2", [](R& r) { r.norm = oracle::Norm::kP, r.norm_p = 2; }},
    {"softmax_p3", [](R& r) { r.norm = oracle::Norm::kP, r.norm_p = 3; }},
    {"softmax_zero_experts", [](R& r) { r.num_zero_experts = 7, r.scale = 6; }, true, true},
    {"softmax_bf16",
     [](R& r) {
       r.score_rounding = r.norm_rounding = r.weight_rounding = oracle::Rounding::kBf16;
       r.norm = oracle::Norm::kSum;
     }},
    {"sigmoid", [](R& r) { r.score = oracle::Score::kSigmoid; }, true, false, true},
    {"sigmoid_k1",
     [](R& r) {
       r.top_k = 1, r.score = oracle::Score::kSigmoid;
       r.norm = oracle::Norm::kSum, r.norm_if_k_gt_1 = true;
     }},
    {"sqrt_softplus",
     [](R& r) { r.score = oracle::Score::kSqrtSoftplus, r.norm = oracle::Norm::kSum; }, true},
    {"identity", [](R& r) { r.score = oracle::Score::kIdentity; }},
    {"groups", deepseek, true, false, true},
    {"groups_max_zero",
     [](R& r) {
       r.select = oracle::Select::kGroupTopK, r.num_groups = 8, r.top_groups = 3;
       r.group_fill = oracle::GroupFill::kZero, r.scale = 16;
     }},
    {"groups_fill_zero",  // a bias below -1: every masked expert beats every other one
     [](R& r) { deepseek(r), r.group_fill = oracle::GroupFill::kZero; }, true},
    {"selected_softmax", selected_softmax},
    {"selected_softmax_bf16",
     [](R& r) { selected_softmax(r), r.norm_rounding = oracle::Rounding::kBf16; }},
    {"selected_softmax_by_expert",
     [](R& r) { selected_softmax(r), r.slot_order = oracle::SlotOrder::kByExpert; }},
    {"selected_sigmoid",
     [](R& r) {
       r.score = oracle::Score::kIdentity;
       r.weight_rule = oracle::WeightRule::kSigmoidSelected;
       r.weight_rounding = oracle::Rounding::kFp16;
     },
     false, true},
    {"softcap", [](R& r) { r.logit_softcap = 1.5, r.score = oracle::Score::kSigmoid; }},
    {"softcap_softmax", [](R& r) { r.logit_softcap = 2, r.norm = oracle::Norm::kSum; }},
    {"mixer", [](R& r) { r.top_k = 2, r.select = oracle::Select::kSparseMixer, r.mixer_eps = .3; }},
    {"mixer_by_expert",
     [](R& r) {
       r.top_k = 2, r.select = oracle::Select::kSparseMixer, r.mixer_eps = .1;
       r.slot_order = oracle::SlotOrder::kByExpert;
     }},
    {"table", [](R& r) { r.select = oracle::Select::kTable, r.norm = oracle::Norm::kSum; }},
    {"given", [](R& r) { r.select = oracle::Select::kGiven; }, false, true, true},
    {"many_experts", [](R& r) { r.num_experts = 1100, r.top_k = 9; }, true},
    {"all_experts", [](R& r) { r.num_experts = 5, r.top_k = 5, r.norm = oracle::Norm::kSum; }},
    {"one_expert", [](R& r) { r.num_experts = r.top_k = 1; }},
};

uint32_t value(auto enumerator) {
  return static_cast<uint32_t>(enumerator);
}

moec_router_desc desc_of(const R& r) {
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

Result run(const Problem& p, const cpu::Device& device, bool wide_ids = false) {
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
  args.scores = out.scores.data(), args.counts = out.counts.data();
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

// The gradient of a logit that weighs w is w (d - sum of w d), with d the gradients of the weights:
// where one weight is nearly 1, the difference cancels, and what is rounded is as large as w d.
std::vector<double> logit_terms(const Problem& p, const oracle::Route& route) {
  const auto K = static_cast<size_t>(p.config.router.top_k);
  const auto C = static_cast<size_t>(p.config.router.columns());
  std::vector<double> terms(p.logits.size(), 0.0);
  for (size_t i = 0; i < route.ids.size(); ++i)
    if (route.ids[i] >= 0)
      terms[i / K * C + size_t(route.ids[i])] = route.weights[i] * p.d_routing_weights[i];
  return terms;
}

class RouterTest : public testing::TestWithParam<RouterCase> {};
INSTANTIATE_TEST_SUITE_P(cases, RouterTest, testing::ValuesIn(kCases),
                         [](const auto& test) { return std::string(test.param.name); });

// Shown to fail when (one at a time): ties go to the highest id, the bias enters the weight, eps is
// left out of the divisor, the clamp passes its gradient, the scale is forgotten in backward, the
// mixer's threshold moves.
TEST_P(RouterTest, matches_oracle) {
  SCOPED_TRACE(seed_note());
  const Problem p(GetParam());
  const oracle::Route route = oracle::route_forward(p.config, p.in, p.logits);
  oracle::Gradients grads;
  oracle::route_backward(p.config, p.in, route, p.d_routing_weights, &grads);
  for (size_t i = 0; i < grads.logits.size(); ++i) grads.logits[i] += p.d_logits_in[i];

  const CpuDevice device(2);
  const Result got = run(p, device);
  EXPECT_LE(device.peak(),
            bytes_for(cpu::router_scratch(device, desc_of(p.config.router), 1), p.in.tokens));
  const auto K = static_cast<size_t>(p.config.router.top_k);
  const auto C = static_cast<size_t>(p.config.router.columns());
  const R& r = p.config.router;
  const bool is_rounded = r.score_rounding != oracle::Rounding::kNone ||
                          r.norm_rounding != oracle::Rounding::kNone ||
                          r.weight_rounding != oracle::Rounding::kNone;
  const double limit = is_rounded ? 8e-3 : 4e-6;  // a step may round to the neighbour
  EXPECT_EQ(got.ids, route.ids);
  EXPECT_LT(row_error(got.weights, route.weights, K).error, limit);
  EXPECT_LT(row_error(got.scores, route.scores, C).error, limit);
  EXPECT_LT(row_error(got.d_logits, grads.logits, C, kRowFloor, logit_terms(p, route)).error,
            limit);
  if (!grads.per_expert_scale.empty()) {
    EXPECT_LT(row_error(got.d_scale, grads.per_expert_scale, C).error, limit);
  }
  for (size_t e = 0; e < C; ++e) EXPECT_EQ(got.counts[e], 100 + route.counts[e]);
}

TEST_P(RouterTest, bits_depend_neither_on_threads_nor_on_the_instruction_set) {
  const Problem p(GetParam(), 600);
  const Result one = run(p, CpuDevice(1));
  EXPECT_TRUE(one == run(p, CpuDevice(3)));
  EXPECT_TRUE(one == run(p, CpuDevice(1), true));
  for (const std::string& isa : isa_names()) {
    cpu::select_isa(isa.c_str());
    EXPECT_TRUE(one == run(p, CpuDevice(2))) << isa;
  }
  cpu::select_isa(nullptr);
}

Result route_rows(const std::vector<double>& logits, std::function<void(R&)> set,
                  std::vector<double> bias = {}) {
  Problem p({"", std::move(set)}, 1);
  p.logits = logits, p.in.select_bias = std::move(bias);
  p.config.router.num_experts = int(logits.size());
  p.d_routing_weights.assign(static_cast<size_t>(p.config.router.top_k), 1);
  p.d_logits_in.assign(logits.size(), 0);
  return run(p, CpuDevice(1));
}
using Ids = std::vector<int32_t>;
constexpr double kInf = std::numeric_limits<double>::infinity();

TEST(Router, numbers_of_the_specification) {  // spec 9.1, 9.2, 9.3
  const std::vector<double> z = {.5, 1.25, -.75, 2, .125, 1.5, -2, .75};
  const auto near = [](const std::vector<float>& got, std::vector<double> want) {
    for (size_t i = 0; i < want.size(); ++i) EXPECT_NEAR(got[i], want[i], 6e-8) << i;
  };
  Result r = route_rows(z, [](R&) {});
  EXPECT_EQ(r.ids, (Ids{3, 5, 1}));
  near(r.weights, {.35409129, .21476722, .16726087});
  near(r.scores,
       {.07900845, .16726087, .02263630, .35409129, .05430166, .21476722, .00648541, .10144886});
  near(route_rows(z, [](R& c) { c.norm = oracle::Norm::kSum; }).weights,
       {.48102427, .29175594, .22721976});
  near(route_rows(z, selected_softmax).weights, {.48102427, .29175597, .22721978});
  r = route_rows(z, [](R& c) {
    c.score = oracle::Score::kSigmoid, c.score_rounding = oracle::Rounding::kBf16;
  });
  near(r.scores,
       {.62109375, .77734375, .3203125, .87890625, .53125, .81640625, .119140625, .6796875});
  r = route_rows(z, deepseek, {0, -.9, .3, -.9, .4, -.9, 0, .2});
  EXPECT_EQ(r.ids, (Ids{4, 7, 6}));
  for (size_t k = 0; k < 3; ++k)
    EXPECT_NEAR(r.weights[k], (std::vector<double>{.99882096, 1.27704430, .22413453})[k], 3e-7);
  const std::vector<double> low(8, -2.0);
  EXPECT_EQ(route_rows(z, deepseek, low).ids, (Ids{5, 1, 0}));
  const auto zero_fill = [](R& c) { deepseek(c), c.group_fill = oracle::GroupFill::kZero; };
  EXPECT_EQ(route_rows(z, zero_fill, low).ids, (Ids{2, 3, 6}));  // ties at 0: the lowest ids
}

TEST(Router, ties_go_to_the_lowest_id_and_nan_is_never_chosen) {
  const auto identity = [](R& c) { c.score = oracle::Score::kIdentity; };
  EXPECT_EQ(route_rows({1, 2, 2, 2, 0}, identity).ids, (Ids{1, 2, 3}));
  EXPECT_EQ(route_rows({0.0, -0.0, -1, 0.0}, identity).ids, (Ids{0, 1, 3}));
  EXPECT_EQ(route_rows({NAN, 3, -kInf, NAN, 1}, identity).ids, (Ids{1, 4, -1}));
  EXPECT_EQ(route_rows({NAN, NAN, -kInf}, identity).ids, (Ids{-1, -1, -1}));
  EXPECT_EQ(route_rows({-NAN, kInf, -3, 7}, identity).ids, (Ids{1, 3, 2}));
  const Result r = route_rows({NAN, 1, 2, 3}, [](R&) {});  // a NaN spoils a softmax row
  EXPECT_EQ(r.ids, (Ids{-1, -1, -1}));
  EXPECT_EQ(r.weights, (std::vector<float>{0, 0, 0}));
  EXPECT_EQ(r.d_logits, (std::vector<float>{0, 0, 0, 0}));
  const auto groups = [](R& c) {
    c.score = oracle::Score::kIdentity, c.select = oracle::Select::kGroupTopK;
    c.num_groups = 2, c.top_groups = 1, c.group_top_m = 2;
  };
  EXPECT_EQ(route_rows({NAN, 90, 5, 4}, groups).ids, (Ids{2, 3, -1}));
  const auto filled = [](R& c) {  // the fill does not make a NaN eligible
    c.score = oracle::Score::kIdentity, c.select = oracle::Select::kGroupTopK;
    c.num_groups = 2, c.top_groups = 1, c.group_fill = oracle::GroupFill::kZero;
  };
  EXPECT_EQ(route_rows({NAN, -3, 5, 4}, filled).ids, (Ids{2, 3, 1}));
}

// A sigmoid of -inf is 0, which can be chosen; the softmax of such logits alone weighs nothing.
TEST(Router, a_softmax_of_nothing_but_minus_infinity_is_zero) {
  const auto sigmoid = [](R& c) {
    c.score = oracle::Score::kSigmoid, c.weight_rule = oracle::WeightRule::kSoftmaxSelected;
  };
  Result r = route_rows({-kInf, -kInf, -kInf}, sigmoid);
  EXPECT_EQ(r.ids, (Ids{0, 1, 2}));
  EXPECT_EQ(r.weights, (std::vector<float>{0, 0, 0}));
  EXPECT_EQ(r.d_logits, (std::vector<float>{0, 0, 0}));
  r = route_rows({-kInf, 2, -kInf}, sigmoid);
  EXPECT_EQ(r.ids, (Ids{1, 0, 2}));
  EXPECT_EQ(r.weights, (std::vector<float>{1, 0, 0}));
}

// Shown to fail where powers are summed as they are, and where a slope divides by a sigmoid that is
// 0 already.
TEST(Router, weights_and_gradients_of_logits_far_below_zero) {
  const auto norm_p = [](double p) {
    return [p](R& c) {
      c.top_k = 2, c.score = oracle::Score::kSigmoid, c.norm = oracle::Norm::kP, c.norm_p = p;
    };
  };
  const auto near = [](float got, double want) { EXPECT_NEAR(got, want, 1e-6 * std::abs(want)); };
  for (const double p : {2.0, 3.0, 8.0})
    for (const double z : {-1.0, -20.0, -60.0, -80.0}) {
      const Result r = route_rows({z, z - 1}, norm_p(p));
      const double a = 1 / (1 + std::exp(-z)), b = 1 / (1 + std::exp(1 - z));
      const double norm = a * std::pow(1 + std::pow(b / a, p), 1 / p);
      near(r.weights[0], a / norm);
      near(r.weights[1], b / norm);
    }
  const auto root = [](R& c) { c.top_k = 1, c.score = oracle::Score::kSqrtSoftplus; };
  for (const double z : {-7.0, -8.2, -8.4, -40.0, -88.0}) {
    const double value = std::sqrt(std::log1p(std::exp(z)));
    near(route_rows({z}, root).weights[0], value);
    near(route_rows({z}, root).d_logits[0], 1 / (1 + std::exp(-z)) / (2 * value));
  }
}

TEST(Router, unselected_logits_get_exactly_no_gradient_when_weights_sum_to_one) {
  for (const oracle::Norm norm : {oracle::Norm::kSum, oracle::Norm::kClampSum, oracle::Norm::kP}) {
    Problem p({"", [&](R& c) { c.norm = norm; }});
    p.d_logits_in.assign(p.logits.size(), 0);
    const Result r = run(p, CpuDevice(1));
    for (size_t i = 0; i < r.d_logits.size(); ++i) {
      const auto* ids = &r.ids[i / 16 * 3];
      if (std::count(ids, ids + 3, int32_t(i % 16)) == 0) {
        EXPECT_EQ(r.d_logits[i], 0.0f) << i;
      }
    }
  }
}

TEST(Router, no_tokens) {
  Problem p({"", [](R&) {}}, 0);
  EXPECT_EQ(run(p, CpuDevice(2)).counts, Ids(16, 100));
}

TEST(Router, bias_update_moves_towards_the_mean) {
  std::vector<int32_t> counts = {4, 0, 2, 2};
  std::vector<float> bias = {1, 1, 1, 1};
  cpu::bias_update(CpuDevice(1), {4, counts.data(), 0.5f, bias.data()});
  EXPECT_EQ(bias, (std::vector<float>{0.5f, 1.5f, 1, 1}));
}

}  // namespace
}  // namespace moec::test
