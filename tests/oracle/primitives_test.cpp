// SPDX-License-Identifier: Apache-2.0
// What stands beside the layer in the oracle: losses, expert choice, local ranges, permutation.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <string>
#include <vector>

#include "cases/feature_cases.h"
#include "support/compare.h"
#include "support/random.h"

namespace moec::oracle {
namespace {

double inner(const Vec& a, const Vec& b) {
  return std::inner_product(a.begin(), a.end(), b.begin(), 0.0);
}

// ---- losses ----
struct LossCase {
  std::string name;
  LossConfig config;
  bool masked = false;
  std::vector<int64_t> counts;
};
std::vector<LossCase> loss_cases() {
  std::vector<LossCase> cases;
  for (const bool masked : {false, true}) {
    const std::string suffix = masked ? "_masked" : "";
    cases.push_back({"mixtral" + suffix, {.kind = LossKind::kMixtral}, masked, {}});
    cases.push_back({"z" + suffix, {.kind = LossKind::kZ}, masked, {}});
    for (const ScoreInfo& score : kScores) {
      if (score.negative) continue;
      const std::string name = std::string(score.name) + suffix;
      LossConfig config{.kind = LossKind::kSwitch};
      config.score = score.kind;
      cases.push_back({"switch_" + name, config, masked, {}});
      cases.push_back({"switch_counts_" + name, config, masked, {9, 0, 3, 4, 1}});
      config.kind = LossKind::kSequence;
      config.seq_len = 4;
      cases.push_back({"sequence_" + name, config, masked, {}});
    }
  }
  for (LossCase& c : cases) {
    c.config.experts = 5;
    c.config.top_k = 2;
    c.config.coefficient = 0.75;
  }
  return cases;
}

TEST(Losses, GradientsMatchFiniteDifferences) {
  SCOPED_TRACE(test::seed_note());
  for (const LossCase& c : loss_cases()) {
    const size_t layers = c.config.kind == LossKind::kMixtral ? 2 : 1;
    const Mask mask = c.masked ? Mask{1, 0, 1, 1, 0, 0, 0, 0, 1, 1, 1, 0} : Mask{};
    std::vector<Vec> logits;
    for (size_t l = 0; l < layers; ++l)
      logits.push_back(random_values(c.name + std::to_string(l), 12 * 5, 2));
    const Loss loss = aux_loss(c.config, logits, mask, c.counts);
    for (size_t l = 0; l < layers; ++l) {
      const Vec start = logits[l];
      const Vec direction = random_values("direction", start.size());
      const auto value_at = [&](double step) {
        for (size_t i = 0; i < start.size(); ++i) logits[l][i] = start[i] + step * direction[i];
        return aux_loss(c.config, logits, mask, c.counts).value;
      };
      const double slope = (value_at(1e-5) - value_at(-1e-5)) / 2e-5;
      logits[l] = start;
      const Vec& gradient = loss.d_logits[l];
      const double scale = std::sqrt(inner(gradient, gradient) * inner(direction, direction));
      EXPECT_GT(scale, 0) << c.name;
      EXPECT_NEAR(slope, inner(gradient, direction), 1e-6 * scale) << c.name;
    }
    LossConfig wrong = c.config;
    wrong.fault = Fault::kLossDivisor;
    if (c.config.kind == LossKind::kMixtral || c.config.kind == LossKind::kSwitch) {
      EXPECT_GT(std::fabs(aux_loss(wrong, logits, mask, c.counts).value / loss.value - 1), 0.1)
          << c.name;
    }
  }
}

TEST(Losses, FormsAgreeWhereTheyMust) {
  const std::vector<Vec> logits = {random_values("forms", 12 * 5, 2)};
  LossConfig mixtral{.kind = LossKind::kMixtral};
  mixtral.experts = 5;
  mixtral.top_k = 2;
  LossConfig other = mixtral;
  other.kind = LossKind::kSwitch;  // Mixtral's form of one layer is K times Switch's
  EXPECT_NEAR(aux_loss(mixtral, logits).value, 2 * aux_loss(other, logits).value, 1e-12);
  LossConfig sequence = other;
  sequence.kind = LossKind::kSequence;
  sequence.seq_len = 12;
  EXPECT_NEAR(aux_loss(sequence, logits).value, aux_loss(other, logits).value, 1e-12);
  sequence.seq_len = 4;
  EXPECT_GT(std::fabs(aux_loss(sequence, logits).value - aux_loss(other, logits).value), 1e-3);
  LossConfig z = mixtral;
  z.kind = LossKind::kZ;
  EXPECT_NEAR(aux_loss(z, {Vec(10, 0.0)}).value, std::log(5.0) * std::log(5.0), 1e-12);
}

// ---- expert choice ----
TEST(ExpertChoice, TakesTheBestTokensOfEachExpert) {
  const Vec scores = {0.5, 0.1, 0.5, 0.9, NAN, 0.3, 0.2, 0.9};  // [4,2]
  const Route route = expert_choice(scores, 4, 2, 2, {});
  // Expert 0: token 2, whose NaN is above all, and 0 (0.5 twice, 0.2). Expert 1: tokens 1 and 3.
  EXPECT_EQ(route.ids, (Ids{0, -1, 1, -1, 0, -1, 1, -1}));
  EXPECT_EQ(route.weights[0], 0.5);
  EXPECT_TRUE(std::isnan(route.weights[4]));
  EXPECT_EQ(route.counts, (std::vector<int64_t>{2, 2}));
  // A tie goes to the lowest token, masked tokens to nobody.
  EXPECT_EQ(expert_choice(scores, 4, 2, 1, {}).ids, (Ids{-1, -1, 1, -1, 0, -1, -1, -1}));
  EXPECT_EQ(expert_choice(scores, 4, 2, 4, {1, 0, 1, 1}).ids, (Ids{0, 1, -1, -1, 0, 1, 0, 1}));
}

TEST(ExpertChoice, ExpertsHaveGradients) {
  FeatureCase c = base_case("expert_choice");
  Vec scores = random_values("scores", 11 * 8);
  for (double& s : scores) s = 1 / (1 + std::exp(-s));
  Route route = expert_choice(scores, 11, 8, 4, {});
  const Plan plan = build_plan(c.config, 11, route.slots, route.ids, route.weights);
  EXPECT_EQ(plan.totals[0], 8 * 4);
  Gradients grads;
  experts_backward(c.config, c.in, c.in.x, route, plan, c.d_y, &grads);
  const Vec direction = random_values("direction", route.weights.size());
  const auto loss_at = [&](double step) {
    Route moved = route;
    for (size_t i = 0; i < direction.size(); ++i) moved.weights[i] += step * direction[i];
    return inner(experts_forward(c.config, c.in, c.in.x, moved, plan), c.d_y);
  };
  EXPECT_NEAR((loss_at(1e-5) - loss_at(-1e-5)) / 2e-5, inner(grads.routing_weights, direction),
              1e-6);
}

// ---- local ranges ----
TEST(Plan, LocalRangesAddUpToTheWhole) {
  FeatureCase c = base_case("ranges");
  const Layer whole = forward(c.config, c.in);
  Vec sum(whole.y.size(), 0.0);
  for (const int begin : {0, 3}) {
    Config part = c.config;
    part.plan.expert_begin = begin;
    part.plan.expert_end = begin == 0 ? 3 : 8;
    Inputs in = c.in;
    const auto cut = [&](Vec* w) {
      const auto one = static_cast<std::ptrdiff_t>(w->size()) / 8;
      *w = Vec(w->begin() + part.plan.expert_begin * one, w->begin() + part.plan.expert_end * one);
    };
    cut(&in.experts.gate);
    cut(&in.experts.up);
    cut(&in.experts.down);
    const Layer layer = forward(part, in);
    EXPECT_LT(layer.plan.totals[0], whole.plan.totals[0]);
    for (size_t i = 0; i < sum.size(); ++i) sum[i] += layer.y[i];
  }
  EXPECT_LT(test::row_error(sum, whole.y, 12).error, 1e-12);
}

// ---- permutation ----
TEST(Permute, BackwardsAreAdjoint) {
  FeatureCase c = base_case("permute");
  c.config.plan = {.align = 4, .drop = Drop::kByPosition, .capacity = 3};
  const Layer layer = forward(c.config, c.in);
  const Plan& plan = layer.plan;
  const Vec& weights = layer.route.weights;
  const Vec rows = permute(plan, c.in.x, 12);
  const Vec d_rows = random_values("d_rows", rows.size());
  EXPECT_NEAR(inner(rows, d_rows), inner(c.in.x, permute_backward(plan, 11, 3, d_rows, 12)), 1e-10);
  const Vec y = unpermute(plan, 11, 3, d_rows, weights, 12);
  Vec back;
  Vec d_routing_weights;
  unpermute_backward(plan, 3, d_rows, weights, c.d_y, 12, &back, &d_routing_weights);
  EXPECT_NEAR(inner(y, c.d_y), inner(d_rows, back), 1e-10);
  EXPECT_NEAR(inner(y, c.d_y), inner(weights, d_routing_weights), 1e-10);  // linear in the weights
  for (size_t r = 0; r < plan.row_token.size(); ++r)
    for (size_t h = 0; h < 12 && plan.row_token[r] < 0; ++h) EXPECT_EQ(back[r * 12 + h], 0);
}

// ---- the comparison itself ----
TEST(RowError, SeesWhatItMust) {
  const Vec reference = {1, 0, 0, 1e-9, 3, 4};
  EXPECT_EQ(test::row_error(reference, reference, 2).error, 0);
  const Vec wrong = {1, 0, 0, 1e-9, 3, 4.5};
  EXPECT_NEAR(test::row_error(wrong, reference, 2).error, 0.1, 1e-12);
  EXPECT_EQ(test::row_error(wrong, reference, 2).row, 2);
  const Vec noise = {1, 0, 0, 2e-9, 3, 4};  // against the floor of 0.01 * 5
  EXPECT_NEAR(test::row_error(noise, reference, 2).error, 2e-8, 1e-12);
  EXPECT_EQ(test::row_error(Vec{1, NAN, 0, 0, 3, 4}, reference, 2).error, INFINITY);
  EXPECT_EQ(test::row_error(reference, Vec{1, NAN, 0, 0, 3, 4}, 2).error, INFINITY);
  EXPECT_EQ(test::row_error(Vec{1, 0}, reference, 2).error, INFINITY);
  EXPECT_EQ(test::row_error(Vec{0, 1e-30}, Vec{0, 0}, 2).error, INFINITY);
}

}  // namespace
}  // namespace moec::oracle
