// SPDX-License-Identifier: Apache-2.0
// Routing of NaN, infinities and logits far below zero.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "unit/router_case.h"

namespace moec::test {
namespace {

using Truth = std::vector<bool>;
Truth are_nan(const std::vector<float>& values) {
  Truth truth;
  for (const float value : values) truth.push_back(std::isnan(value));
  return truth;
}

void identity(R& c) {
  c.score = oracle::Score::kIdentity;
}

// Shown to fail where NaN ranks below -inf, and where its key is one that next_key passes over.
TEST(Router, nan_is_the_best_score_and_ties_go_to_the_lowest_id) {
  EXPECT_EQ(route_rows({1, 2, 2, 2, 0}, identity).ids, (Ids{1, 2, 3}));
  EXPECT_EQ(route_rows({0.0, -0.0, -1, 0.0}, identity).ids, (Ids{0, 1, 3}));
  Result r = route_rows({NAN, 3, -kInf, NAN, 1}, identity);
  EXPECT_EQ(r.ids, (Ids{0, 3, 1}));
  EXPECT_EQ(are_nan(r.weights), (Truth{true, true, false}));
  EXPECT_EQ(are_nan(r.d_logits), (Truth{false, false, false, false, false}));  // of w = z it is 1
  EXPECT_EQ(route_rows({2, NAN, -kInf}, identity).ids, (Ids{1, 0, -1}));
  EXPECT_EQ(route_rows({7, kInf, -3, -NAN}, identity).ids, (Ids{3, 1, 0}));
  std::vector<double> many(100, 1.0);
  many[0] = many[40] = many[99] = NAN, many[17] = kInf;
  EXPECT_EQ(route_rows(many, identity).ids, (Ids{0, 40, 99}));
  many[40] = 1;
  EXPECT_EQ(route_rows(many, identity).ids, (Ids{0, 99, 17}));
}

// As in PyTorch: a NaN and a +inf spoil the row of a softmax, and one weight the sum of all.
TEST(Router, nan_shows_in_weights_and_gradients) {
  for (const double bad : {double(NAN), double(-NAN), kInf}) {
    const Result r = route_rows({1, bad, 2, 3}, [](R&) {});
    EXPECT_EQ(r.ids, (Ids{0, 1, 2}));
    EXPECT_EQ(are_nan(r.weights), Truth(3, true));
    EXPECT_EQ(are_nan(r.d_logits), Truth(4, true));
  }
  Result r = route_rows({1, NAN, 2, 3}, [](R& c) { c.score = oracle::Score::kSigmoid; });
  EXPECT_EQ(r.ids, (Ids{1, 3, 2}));
  EXPECT_EQ(are_nan(r.weights), (Truth{true, false, false}));
  EXPECT_EQ(are_nan(r.d_logits), (Truth{false, true, false, false}));
  for (const oracle::Norm norm : {oracle::Norm::kSum, oracle::Norm::kClampSum, oracle::Norm::kP}) {
    r = route_rows({1, NAN, 2, 3}, [norm](R& c) {
      c.score = oracle::Score::kSigmoid, c.norm = norm, c.norm_p = 3;
    });
    EXPECT_EQ(are_nan(r.weights), Truth(3, true));
    EXPECT_EQ(are_nan(r.d_logits), (Truth{false, true, true, true}));
  }
  r = route_rows({1, NAN, 2, 3}, selected_softmax);
  EXPECT_EQ(r.ids, (Ids{1, 3, 2}));
  EXPECT_EQ(are_nan(r.weights), Truth(3, true));
  r = route_rows({1, kInf, 2, 3}, [](R& c) { c.score = oracle::Score::kSigmoid; });
  EXPECT_EQ(r.ids, (Ids{1, 3, 2}));
  EXPECT_EQ(r.weights[0], 1.0f);
  const auto mixer = [](R& c) {
    c.top_k = 2, c.select = oracle::Select::kSparseMixer, c.mixer_eps = .3;
  };
  r = route_rows({1, NAN, 2, NAN}, mixer);
  EXPECT_EQ(r.ids, (Ids{1, 3}));
  EXPECT_EQ(are_nan(r.weights), Truth(2, true));
  r = route_rows({1, 3, NAN, 2}, mixer);
  EXPECT_EQ(r.ids, (Ids{2, 1}));
  EXPECT_EQ(are_nan(r.weights), (Truth{true, false}));
  EXPECT_EQ(are_nan(r.d_logits), Truth(4, true));
}

// A bias of NaN chooses the expert, and its weight says so, though the score is a number.
TEST(Router, nan_of_a_selection_bias_is_the_weight) {
  const auto sigmoid = [](R& c) { c.top_k = 2, c.score = oracle::Score::kSigmoid; };
  Result r = route_rows({1, 2, 3}, sigmoid, {NAN, 0, 0});
  EXPECT_EQ(r.ids, (Ids{0, 2}));
  EXPECT_EQ(are_nan(r.weights), (Truth{true, false}));
  r = route_rows({1, 2, 3},
                 [](R& c) { selected_softmax(c), c.slot_order = oracle::SlotOrder::kByExpert; },
                 {-kInf, 0, NAN});
  EXPECT_EQ(r.ids, (Ids{1, 2, -1}));
  EXPECT_EQ(are_nan(r.weights), (Truth{true, true, false}));
}

TEST(Router, nan_makes_its_group_the_best) {
  const auto groups = [](R& c) {
    identity(c), c.select = oracle::Select::kGroupTopK;
    c.num_groups = 2, c.top_groups = 1, c.group_top_m = 2;
  };
  EXPECT_EQ(route_rows({90, 80, NAN, 4}, groups).ids, (Ids{2, 3, -1}));
  EXPECT_EQ(route_rows({kInf, 80, 5, NAN}, groups).ids, (Ids{3, 2, -1}));
  EXPECT_EQ(route_rows({4, NAN, NAN, 90}, groups).ids, (Ids{1, 0, -1}));  // a tie of two groups
  const auto filled = [](R& c) {  // what is filled is no NaN any more
    identity(c), c.select = oracle::Select::kGroupTopK;
    c.num_groups = 2, c.top_groups = 1, c.group_fill = oracle::GroupFill::kZero;
  };
  EXPECT_EQ(route_rows({-5, NAN, NAN, 4}, filled).ids, (Ids{1, 2, 3}));
}

TEST(Router, minus_infinity_is_never_chosen) {
  const Result r = route_rows({-kInf, -kInf, -kInf, -kInf}, [](R&) {});  // a softmax of nothing
  EXPECT_EQ(r.ids, (Ids{-1, -1, -1}));
  EXPECT_EQ(r.weights, (std::vector<float>{0, 0, 0}));
  EXPECT_EQ(r.d_logits, (std::vector<float>{0, 0, 0, 0}));
  EXPECT_EQ(route_rows({-kInf, NAN, -kInf, -kInf}, [](R&) {}).ids, (Ids{0, 1, 2}));
  EXPECT_EQ(route_rows({-kInf, 1, -kInf, 2}, identity).ids, (Ids{3, 1, -1}));
}

// A masked token's logits are not looked at.
TEST(Router, nan_of_a_masked_token_shows_nowhere) {
  Problem p({"", [](R& c) { c.norm = oracle::Norm::kSum; }}, 2);
  p.in.token_mask = {1, 0};
  std::fill_n(p.logits.begin() + 16, 16, NAN);
  std::fill(p.d_logits_in.begin(), p.d_logits_in.end(), 0.0);
  std::fill_n(p.d_routing_weights.begin() + 3, 3, NAN);
  const Result r = run(p, CpuDevice(1));
  EXPECT_EQ(std::vector(r.ids.begin() + 3, r.ids.end()), (Ids{-1, -1, -1}));
  EXPECT_EQ(std::vector(r.weights.begin() + 3, r.weights.end()), std::vector<float>(3, 0.0f));
  EXPECT_EQ(std::vector(r.d_logits.begin() + 16, r.d_logits.end()), std::vector<float>(16, 0.0f));
}

// Shown to fail (NaN) where weights are divided by a sum of 0.
TEST(Router, weights_that_sum_to_nothing_are_zero_as_are_their_gradients) {
  for (const oracle::Score score : {oracle::Score::kSigmoid, oracle::Score::kSqrtSoftplus})
    for (const oracle::Norm norm : {oracle::Norm::kSum, oracle::Norm::kClampSum, oracle::Norm::kP})
      for (const double p : {0.5, 1.0, 2.0, 3.0}) {
        const auto set = [=](R& c) { c.score = score, c.norm = norm, c.norm_p = p; };
        const Result r = route_rows({-300, -301, -1e30, -400}, set);
        EXPECT_EQ(r.ids, (Ids{0, 1, 2}));
        EXPECT_EQ(r.weights, (std::vector<float>{0, 0, 0}));
        EXPECT_EQ(r.d_logits, (std::vector<float>{0, 0, 0, 0}));
      }
  const auto sum = [](R& c) { identity(c), c.top_k = 2, c.norm = oracle::Norm::kSum; };
  const Result r = route_rows({3, -3}, sum);
  EXPECT_EQ(r.weights, (std::vector<float>{0, 0}));
  EXPECT_EQ(r.d_logits, (std::vector<float>{0, 0}));
  const auto mixed = [](R& c) { c.score = oracle::Score::kSigmoid, c.norm = oracle::Norm::kSum; };
  EXPECT_EQ(route_rows({-300, 0, -301, -302}, mixed).weights, (std::vector<float>{1, 0, 0}));
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

}  // namespace
}  // namespace moec::test
