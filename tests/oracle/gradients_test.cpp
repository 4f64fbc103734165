// SPDX-License-Identifier: Apache-2.0
// Every feature case: the oracle's gradients against central differences of its forward, and each
// mutation of the case must change a result visibly. So a test that compares a library with the
// oracle on these cases fails when the library has one of these errors.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <ostream>
#include <set>
#include <string>

#include "cases/feature_cases.h"
#include "oracle/parameters.h"
#include "support/compare.h"
#include "support/random.h"

namespace moec::oracle {

void PrintTo(const FeatureCase& c, std::ostream* out) {
  *out << c.name;
}

namespace {

constexpr double kSteps[] = {1e-5, 1e-7};  // the second one where the first crosses a kink
constexpr double kGradientError = 1e-6;
constexpr double kVisible = 6e-5;  // three times the bar of an fp32 comparison (2e-5)

class FeatureTest : public testing::TestWithParam<FeatureCase> {};

double inner(const Vec& a, const Vec& b) {
  double sum = 0;
  for (size_t i = 0; i < a.size(); ++i) sum += a[i] * b[i];
  return sum;
}
double norm(const Vec& a) {
  return std::sqrt(inner(a, a));
}

double loss_of(const FeatureCase& c, const Inputs& in) {
  const Layer layer = forward(c.config, in);
  return inner(layer.y, c.d_y) + inner(c.d_logits_in, layer.gate.logits);
}

// Directional derivative of `loss` as `*value` moves along a random direction, against
// <gradient, direction>, relative to |gradient| |direction|.
template <typename Loss>
void check_gradient(const std::string& name, Vec* value, const Vec& gradient, Loss loss) {
  ASSERT_EQ(gradient.size(), value->size()) << name;
  test::Random random(7);
  for (int trial = 0; trial < 2; ++trial) {
    const Vec direction = random.normals(value->size());
    const Vec start = *value;
    const auto loss_at = [&](double step) {
      for (size_t i = 0; i < start.size(); ++i) (*value)[i] = start[i] + step * direction[i];
      return loss();
    };
    const double expected = inner(gradient, direction);
    const double allowed = kGradientError * std::max(norm(gradient) * norm(direction), 1e-3);
    double slope = 0;
    for (const double step : kSteps) {
      slope = (loss_at(step) - loss_at(-step)) / (2 * step);
      if (std::fabs(slope - expected) <= allowed) break;
    }
    *value = start;
    EXPECT_NEAR(slope, expected, allowed) << name;
  }
}

TEST_P(FeatureTest, GradientsMatchFiniteDifferences) {
  FeatureCase c = GetParam();
  if (!c.differentiable) return;
  SCOPED_TRACE(test::seed_note());
  const Layer layer = forward(c.config, c.in);
  Gradients grads = backward(c.config, c.in, layer, c.d_y, c.d_logits_in);
  for_each_parameter(c.config, c.in, grads, [&](const char* name, Vec& value, Vec& grad, size_t) {
    check_gradient(name, &value, grad, [&] { return loss_of(c, c.in); });
  });
  // The intermediate gradients that the API hands out: routing weights, then logits.
  Route route = layer.route;
  check_gradient("routing_weights", &route.weights, grads.routing_weights, [&] {
    return inner(experts_forward(c.config, c.in, layer.gate.expert_x, route, layer.plan), c.d_y);
  });
  Vec logits = layer.gate.logits;
  const Plan& plan = layer.plan;
  check_gradient("logits", &logits, grads.logits, [&] {
    const Route moved = route_forward(c.config, c.in, logits);
    return inner(c.d_logits_in, logits) +
           inner(experts_forward(c.config, c.in, layer.gate.expert_x, moved, plan), c.d_y);
  });
}

struct Results {
  Layer layer;
  Gradients grads;
};
Results run(const FeatureCase& c) {
  Results r{forward(c.config, c.in), {}};
  r.grads = backward(c.config, c.in, r.layer, c.d_y, c.d_logits_in);
  return r;
}

// The largest row error over everything that a comparison looks at.
double difference(const FeatureCase& c, const Results& got, const Results& reference) {
  const auto hidden = static_cast<size_t>(c.config.experts.hidden);
  const auto slots = static_cast<size_t>(reference.layer.route.slots);
  if (got.layer.route.ids != reference.layer.route.ids) return INFINITY;
  if (got.layer.plan.assignment_row != reference.layer.plan.assignment_row) return INFINITY;
  double worst = test::row_error(got.layer.y, reference.layer.y, hidden).error;
  worst = std::max(
      worst, test::row_error(got.layer.route.weights, reference.layer.route.weights, slots).error);
  for_each_parameter(c.config, got.grads, reference.grads,
                     [&](const char*, const Vec& a, const Vec& b, size_t columns) {
                       if (!b.empty())
                         worst = std::max(worst, test::row_error(a, b, columns).error);
                     });
  return worst;
}

TEST_P(FeatureTest, EveryMutationShows) {
  const FeatureCase& c = GetParam();
  SCOPED_TRACE(test::seed_note());
  const Results reference = run(c);
  for (double v : reference.layer.y) ASSERT_TRUE(std::isfinite(v)) << "the case itself is broken";
  EXPECT_EQ(difference(c, reference, reference), 0);
  for (const Mutation& mutation : c.mutations) {
    FeatureCase mutant = c;
    mutation.apply(&mutant.config, &mutant.in);
    EXPECT_GT(difference(mutant, run(mutant), reference), kVisible) << mutation.name;
  }
}

INSTANTIATE_TEST_SUITE_P(Oracle, FeatureTest, testing::ValuesIn(all_cases()),
                         [](const auto& one) { return one.param.name; });

TEST(FeatureCases, HaveDistinctNamesAndMutations) {
  std::set<std::string> names;
  size_t mutations = 0;
  for (const FeatureCase& c : all_cases()) {
    EXPECT_TRUE(names.insert(c.name).second) << c.name;
    EXPECT_TRUE(c.name == "plain" || !c.mutations.empty()) << c.name;
    mutations += c.mutations.size();
  }
  std::printf("%zu cases, %zu mutations\n", names.size(), mutations);
}

}  // namespace
}  // namespace moec::oracle
