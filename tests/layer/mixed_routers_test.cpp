// SPDX-License-Identifier: Apache-2.0
// Routers whose every property is drawn at random, from given logits, forward and backward, against
// the oracle. MOEC_MIXED_CASES of them (100), others for each MOEC_TEST_SEED.
// Mutation noted: groups ranked by their best expert instead of their best m.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "cases/feature_cases.h"
#include "support/compare.h"
#include "support/draw.h"
#include "support/handles.h"
#include "support/layer_runner.h"
#include "support/skip.h"
#include "support/tensors.h"

namespace moec::test {
namespace {

using oracle::Score;
using oracle::Select;
using oracle::Vec;

constexpr double kTolerance = 3e-4;  // few weights of many nearly cancel

struct Problem {
  oracle::Config config;
  oracle::Inputs in;
  Vec logits, d_routing_weights, d_logits_in;
  std::string text;  // what was drawn
};

class Maker {
 public:
  explicit Maker(int index) : draw_(49979687 * static_cast<uint64_t>(index) + 7) {
    draw_sizes();
    draw_numbers();
    draw_selection();
    draw_data();
  }
  Problem take() { return std::move(p_); }

 private:
  template <typename T>
  T noted(const char* what, T value) {
    p_.text += std::string(" ") + what + " " + std::to_string(static_cast<double>(value));
    return value;
  }
  Vec values(int64_t count, double scale, double middle = 0) {
    Vec v = draw_.normals(static_cast<size_t>(count), scale);
    for (double& value : v) value = oracle::round_to(oracle::Rounding::kFp32, value + middle);
    return v;
  }
  void draw_sizes() {
    oracle::RouterConfig& r = p_.config.router;
    r.num_experts = noted("E", draw_.one_of({1, 2, 3, 4, 8, 31, 32, 33, 64, 120, 128, 256, 300}));
    r.num_zero_experts = noted("Z", draw_.one_of({0, 0, 0, 1, 8}));
    r.top_k = noted("K", std::min(draw_.one_of({1, 1, 2, 3, 4, 6, 8, 22, 64}), r.columns()));
    p_.in.tokens = noted("T", draw_.one_of({1, 2, 5, 16, 33, 64}));
  }
  void draw_numbers() {
    oracle::RouterConfig& r = p_.config.router;
    r.logit_softcap = noted("softcap", draw_.one_of({0.0, 0.0, 4.0, 30.0}));
    r.score = draw_.one_of(oracle::kScores).kind;
    r.weight_rule =
        draw_.one_of({oracle::WeightRule::kScore, oracle::WeightRule::kScore,
                      oracle::WeightRule::kSoftmaxSelected, oracle::WeightRule::kSigmoidSelected});
    r.norm = draw_.one_of(
        {oracle::Norm::kNone, oracle::Norm::kSum, oracle::Norm::kClampSum, oracle::Norm::kP});
    // Of one expert a weight may be 1 whatever the logits: its gradient is rounding on both sides.
    if (r.top_k == 1) {
      r.norm = oracle::Norm::kNone;
      r.weight_rule = oracle::WeightRule::kSigmoidSelected;
    }
    r.norm_eps = draw_.one_of({0.0, 1e-20, 0.0625});
    if (r.norm == oracle::Norm::kP) r.norm_eps = 0;
    r.norm_p = draw_.one_of({1.0, 2.0, 3.0});
    r.norm_if_k_gt_1 = draw_.chance(0.3);
    r.scale = draw_.one_of({1.0, 1.0, 2.5});
    r.slot_order = draw_.one_of({oracle::SlotOrder::kByValue, oracle::SlotOrder::kByExpert});
    noted("score", static_cast<int>(r.score));
    noted("rule", static_cast<int>(r.weight_rule));
    noted("norm", static_cast<int>(r.norm));
    noted("eps", r.norm_eps);
    noted("p", r.norm_p);
    noted("scale", r.scale);
    noted("order", static_cast<int>(r.slot_order));
  }
  void draw_selection() {
    oracle::RouterConfig& r = p_.config.router;
    r.select = draw_.one_of({Select::kTopK, Select::kTopK, Select::kGroupTopK, Select::kGroupTopK,
                             Select::kTable, Select::kGiven, Select::kSparseMixer});
    if (r.select == Select::kGroupTopK) draw_groups();
    if (r.select == Select::kSparseMixer) {
      r.mixer_eps = 0.01;
      r.weight_rule = oracle::WeightRule::kScore;
      if (r.top_k != 2) r.select = Select::kTopK;
      if (r.top_k == 1) r.weight_rule = oracle::WeightRule::kSigmoidSelected;
    }
    noted("select", static_cast<int>(r.select));
    if (r.select != Select::kSparseMixer && noted("bias", draw_.chance(0.4)))
      p_.in.select_bias = values(r.columns(), draw_.one_of({0.05, 1.0}));
    if (r.select == Select::kTable) draw_ids(&p_.in.table, 50);
    if (r.select == Select::kGiven) draw_ids(&p_.in.given_ids, p_.in.tokens);
    for (int t = 0; t < p_.in.tokens && r.select == Select::kTable; ++t)
      p_.in.token_ids.push_back(static_cast<int>(draw_.below(50)));
  }
  void draw_groups() {
    oracle::RouterConfig& r = p_.config.router;
    do {
      r.num_groups = draw_.one_of({1, 2, 3, 4, 8});
    } while (r.columns() % r.num_groups != 0);
    const int size = r.columns() / r.num_groups;
    r.top_groups = 1 + static_cast<int>(draw_.below(r.num_groups));
    r.group_top_m = 1 + static_cast<int>(draw_.below(std::min(size, 3)));
    r.group_fill = draw_.one_of({oracle::GroupFill::kNegInf, oracle::GroupFill::kZero});
    if (r.top_k > r.top_groups * size) r.group_fill = oracle::GroupFill::kZero;
    noted("groups", r.num_groups);
    noted("top_groups", r.top_groups);
    noted("top_m", r.group_top_m);
    noted("fill", static_cast<int>(r.group_fill));
  }
  // Rows of K different ids, some of them none; at least two where one would weigh 1 whatever its
  // logit is.
  void draw_ids(oracle::Ids* ids, int rows) {
    const oracle::RouterConfig& r = p_.config.router;
    const bool relative =
        r.norm != oracle::Norm::kNone || r.weight_rule == oracle::WeightRule::kSoftmaxSelected;
    const int sure = relative ? 2 : 0;
    for (int row = 0; row < rows; ++row) {
      const oracle::Ids all = shuffled(r.columns());
      for (int k = 0; k < r.top_k; ++k)
        ids->push_back(draw_.chance(0.05) && k >= sure ? -1 : all[static_cast<size_t>(k)]);
    }
  }
  oracle::Ids shuffled(int count) {
    oracle::Ids all;
    for (int i = 0; i < count; ++i) {
      all.push_back(i);
      std::swap(all.back(), all[static_cast<size_t>(draw_.below(i + 1))]);
    }
    return all;
  }
  // The logits of a token are different numbers, so that rounding does not decide who is chosen.
  void draw_data() {
    const oracle::RouterConfig& r = p_.config.router;
    const auto size = static_cast<size_t>(p_.in.tokens) * static_cast<size_t>(r.columns());
    // Sums of logits stay away from 0; 1 - sigmoid(9) in fp32 has four digits.
    const bool logits_weigh =
        r.score == Score::kIdentity && r.weight_rule == oracle::WeightRule::kScore;
    const double middle = logits_weigh ? 5 : 0;
    for (int t = 0; t < p_.in.tokens; ++t) {
      const oracle::Ids places = shuffled(2048);
      for (int c = 0; c < r.columns(); ++c)
        p_.logits.push_back(middle + (places[static_cast<size_t>(c)] - 1024) / 256.0);
    }
    // Not where those left out could be chosen all the same, or only one would be left.
    const bool may_exclude = r.norm == oracle::Norm::kNone && p_.in.select_bias.empty() &&
                             r.group_fill != oracle::GroupFill::kZero &&
                             r.select != Select::kTable && r.select != Select::kGiven;
    if (noted("excluded", may_exclude && draw_.chance(0.4)))
      for (double& z : p_.logits)
        if (draw_.chance(0.1)) z = -std::numeric_limits<double>::infinity();
    if (noted("masked", draw_.chance(0.2)))
      for (int t = 0; t < p_.in.tokens; ++t) p_.in.token_mask.push_back(draw_.chance(0.7));
    if (noted("per_expert_scale", draw_.chance(0.3)))
      p_.in.per_expert_scale = values(r.columns(), 0.2, 1);
    p_.d_routing_weights = values(int64_t{p_.in.tokens} * r.top_k, 1);
    if (noted("d_logits_in", draw_.chance(0.3)))
      p_.d_logits_in = values(static_cast<int64_t>(size), 0.1);
  }

  Draw draw_;
  Problem p_;
};

// Whether fp32 may well choose another of two experts here than the oracle.
bool is_near(const Problem& p, const oracle::Route& route, size_t slot, int got) {
  const size_t columns = static_cast<size_t>(p.config.router.columns());
  const size_t token = slot / static_cast<size_t>(p.config.router.top_k);
  const auto choice = [&](int id) {
    const auto c = static_cast<size_t>(id);
    return route.scores[token * columns + c] + (p.in.select_bias.empty() ? 0 : p.in.select_bias[c]);
  };
  return got >= 0 && route.ids[slot] >= 0 &&
         std::fabs(choice(got) - choice(route.ids[slot])) < 1e-6;
}

class MixedRouters : public testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Layer, MixedRouters, testing::Range(0, mixed_cases(100)));

TEST_P(MixedRouters, MatchTheOracle) {
  SCOPED_TRACE(seed_note());
  const Problem p = Maker(GetParam()).take();
  SCOPED_TRACE(p.text);
  const oracle::RouterConfig& r = p.config.router;
  const oracle::Route route = oracle::route_forward(p.config, p.in, p.logits);
  const moec_router_desc desc = router_desc(r, p.in);
  const auto router = make<Router>(moec_router_create, test_context(), &desc);
  const int64_t tokens = p.in.tokens, columns = r.columns(), slots = r.top_k;
  Tensors tensors;
  auto forward = sized<moec_route_args>();
  forward.logits = tensors.input(p.logits, MOEC_F32, {tokens, columns});
  forward.select_bias = tensors.input(p.in.select_bias, MOEC_F32, {columns});
  forward.per_expert_scale = tensors.input(p.in.per_expert_scale, MOEC_F32, {columns});
  forward.token_mask = tensors.input_ids(p.in.token_mask, MOEC_U8, {tokens});
  forward.table = tensors.input_ids(p.in.table, MOEC_I32, {50, slots});
  forward.token_ids = tensors.input_ids(p.in.token_ids, MOEC_I64, {tokens});
  forward.given_ids = tensors.input_ids(p.in.given_ids, MOEC_I32, {tokens, slots});
  forward.expert_ids = tensors.output(MOEC_I32, {tokens, slots});
  forward.routing_weights = tensors.output(MOEC_F32, {tokens, slots});
  forward.counts =
      tensors.input_ids(oracle::Ids(static_cast<size_t>(columns), 3), MOEC_I32, {columns});
  check(moec_route_forward(router.get(), &forward, nullptr));
  check(moec_context_sync(test_context(), nullptr));
  const Vec ids = tensors.read(forward.expert_ids);
  for (size_t i = 0; i < ids.size(); ++i) {
    const int got = static_cast<int>(ids[i]);
    if (got == route.ids[i]) continue;
    ASSERT_TRUE(is_near(p, route, i, got))
        << "slot " << i << ": " << got << " for " << route.ids[i];
    GTEST_SKIP() << "two scores lie too close";
  }
  Vec counts(route.counts.begin(), route.counts.end());
  for (double& n : counts) n += 3;  // added to what is there
  EXPECT_EQ(tensors.read(forward.counts), counts);
  const auto expect_rows = [&](const moec_tensor& got, const Vec& want, int64_t width,
                               const char* what) {
    const auto wide = static_cast<size_t>(width);
    EXPECT_LE(row_error(tensors.read(got), want, wide, kTypicalRow).error, kTolerance) << what;
  };
  expect_rows(forward.routing_weights, route.weights, slots, "routing_weights");

  oracle::Gradients expected;
  oracle::route_backward(p.config, p.in, route, p.d_routing_weights, &expected);
  for (size_t i = 0; i < p.d_logits_in.size(); ++i) expected.logits[i] += p.d_logits_in[i];
  auto grad = sized<moec_route_grad_args>();
  grad.logits = forward.logits;
  grad.per_expert_scale = forward.per_expert_scale;
  grad.expert_ids = forward.expert_ids;
  grad.d_routing_weights = tensors.input(p.d_routing_weights, MOEC_F32, {tokens, slots});
  grad.d_logits_in = tensors.input(p.d_logits_in, MOEC_F32, {tokens, columns});
  grad.d_logits = tensors.output(MOEC_F32, {tokens, columns});
  if (!p.in.per_expert_scale.empty()) grad.d_per_expert_scale = tensors.output(MOEC_F32, {columns});
  check(moec_route_backward(router.get(), &grad, nullptr));
  check(moec_context_sync(test_context(), nullptr));
  expect_rows(grad.d_logits, expected.logits, columns, "d_logits");
  if (grad.d_per_expert_scale.data) {
    expect_rows(grad.d_per_expert_scale, expected.per_expert_scale, columns, "d_per_expert_scale");
  }
  EXPECT_TRUE(tensors.neighbours_untouched());
}

}  // namespace
}  // namespace moec::test
