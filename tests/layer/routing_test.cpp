// SPDX-License-Identifier: Apache-2.0
// The router's entry points one by one against the oracle: gate, route, their backwards, the bias
// update; and the auxiliary losses. Whole layers are in features_test.
#include <gtest/gtest.h>

#include <cmath>
#include <ostream>
#include <string>
#include <vector>

#include "cases/feature_cases.h"
#include "support/compare.h"
#include "support/handles.h"
#include "support/layer_runner.h"
#include "support/random.h"
#include "support/skip.h"
#include "support/tensors.h"

namespace moec::oracle {
void PrintTo(const FeatureCase& c, std::ostream* out) {
  *out << c.name;
}
}  // namespace moec::oracle

namespace moec::test {
namespace {

using oracle::FeatureCase;
using oracle::Vec;

constexpr double kTolerance = 2e-5;

std::vector<FeatureCase> routing_cases() {
  std::vector<FeatureCase> cases = oracle::router_cases();
  for (FeatureCase& c : oracle::selection_cases())
    if (c.config.plan.drop == oracle::Drop::kNone) cases.push_back(std::move(c));
  return cases;
}

class RoutingTest : public testing::TestWithParam<FeatureCase> {
 protected:
  RoutingTest()
      : tokens_(c_.in.tokens),
        hidden_(c_.config.experts.hidden),
        columns_(c_.config.router.columns()),
        slots_(c_.config.router.top_k) {
    const moec_router_desc desc = router_desc(c_.config.router, c_.in);
    router_ = make<Router>(moec_router_create, test_context(), &desc);
  }
  moec_tensor f32(const Vec& values, const std::vector<int64_t>& shape) {
    return tensors_.input(values, MOEC_F32, shape);
  }
  moec_tensor out(bool wanted, const std::vector<int64_t>& shape) {
    return wanted ? tensors_.output(MOEC_F32, shape) : moec_tensor{};
  }
  void expect_rows(const moec_tensor& got, const Vec& expected, int64_t columns, const char* what) {
    if (!got.data) return;
    EXPECT_LE(row_error(tensors_.read(got), expected, static_cast<size_t>(columns)).error,
              kTolerance)
        << what;
  }
  static bool finite(const Vec& values) {
    for (double v : values)
      if (!std::isfinite(v)) return false;
    return true;
  }

  FeatureCase c_ = GetParam();
  int64_t tokens_, hidden_, columns_, slots_;
  Tensors tensors_;
  Router router_;
};

TEST_P(RoutingTest, GateForwardAndBackward) {
  SCOPED_TRACE(seed_note());
  const oracle::Gate gate = oracle::gate_forward(c_.config, c_.in);
  const bool jitters = c_.config.router.jitter != 0;
  auto forward = sized<moec_gate_args>();
  forward.rng_offset = c_.config.router.rng_offset;
  const Vec& x = c_.in.router_x.empty() ? c_.in.x : c_.in.router_x;
  forward.x = f32(x, {tokens_, hidden_});
  forward.weight = f32(c_.in.gate_weight, {columns_, hidden_});
  forward.bias = f32(c_.in.gate_bias, {columns_});
  forward.input_scale = f32(c_.in.input_scale, {hidden_});
  forward.logits = tensors_.output(MOEC_F32, {tokens_, columns_});
  forward.x_jittered = out(jitters, {tokens_, hidden_});
  check(moec_gate_forward(router_.get(), &forward, nullptr));
  if (finite(gate.logits)) expect_rows(forward.logits, gate.logits, columns_, "logits");
  Vec jittered = x;
  for (size_t i = 0; i < gate.factor.size(); ++i) jittered[i] *= gate.factor[i];
  expect_rows(forward.x_jittered, jittered, hidden_, "x_jittered");

  Vec d_logits = oracle::random_values("d_logits", gate.logits.size());
  const oracle::Ids ids = oracle::route_forward(c_.config, c_.in, gate.logits).ids;
  for (int64_t t = 0; t < tokens_; ++t) {  // a token without an expert has no gradient
    const auto first = ids.begin() + t * slots_;
    if (std::all_of(first, first + slots_, [](int id) { return id < 0; }))
      std::fill_n(d_logits.begin() + t * columns_, columns_, 0.0);
  }
  oracle::Gradients expected;
  oracle::gate_backward(c_.config, c_.in, gate, d_logits, Vec(c_.in.x.size(), 0.0), &expected);
  auto grad = sized<moec_gate_grad_args>();
  grad.flags = MOEC_GRAD_SKIP_IDLE;
  grad.rng_offset = forward.rng_offset;
  grad.x = forward.x;
  grad.weight = forward.weight;
  grad.input_scale = forward.input_scale;
  grad.d_logits = f32(d_logits, {tokens_, columns_});
  grad.d_x = tensors_.output(MOEC_F32, {tokens_, hidden_});
  grad.d_weight = tensors_.output(MOEC_F32, {columns_, hidden_});
  grad.d_bias = out(!c_.in.gate_bias.empty(), {columns_});
  grad.d_input_scale = out(!c_.in.input_scale.empty(), {hidden_});
  check(moec_gate_backward(router_.get(), &grad, nullptr));
  const Vec& d_x = c_.in.router_x.empty() ? expected.x : expected.router_x;
  expect_rows(grad.d_x, d_x, hidden_, "d_x");
  expect_rows(grad.d_weight, expected.gate_weight, hidden_, "d_weight");
  expect_rows(grad.d_bias, expected.gate_bias, columns_, "d_bias");
  expect_rows(grad.d_input_scale, expected.input_scale, hidden_, "d_input_scale");
  EXPECT_TRUE(tensors_.neighbours_untouched());
}

TEST_P(RoutingTest, RouteForwardAndBackward) {
  SCOPED_TRACE(seed_note());
  Vec logits = oracle::gate_forward(c_.config, c_.in).logits;
  for (double& z : logits) z = oracle::round_to(oracle::Rounding::kFp32, z);
  const oracle::Route route = oracle::route_forward(c_.config, c_.in, logits);
  const moec_tensor scale = f32(c_.in.per_expert_scale, {columns_});
  auto forward = sized<moec_route_args>();
  forward.logits = f32(logits, {tokens_, columns_});
  forward.select_bias = f32(c_.in.select_bias, {columns_});
  forward.per_expert_scale = scale;
  forward.token_mask = tensors_.input_ids(c_.in.token_mask, MOEC_BOOL, {tokens_});
  forward.table = tensors_.input_ids(c_.in.table, MOEC_I64,
                                     {static_cast<int64_t>(c_.in.table.size()) / slots_, slots_});
  forward.token_ids = tensors_.input_ids(c_.in.token_ids, MOEC_I32, {tokens_});
  forward.given_ids = tensors_.input_ids(c_.in.given_ids, MOEC_I64, {tokens_, slots_});
  forward.expert_ids = tensors_.output(MOEC_I32, {tokens_, slots_});
  forward.routing_weights = tensors_.output(MOEC_F32, {tokens_, slots_});
  forward.scores = tensors_.output(MOEC_F32, {tokens_, columns_});
  forward.counts =
      tensors_.input_ids(oracle::Ids(static_cast<size_t>(columns_), 7), MOEC_I32, {columns_});
  check(moec_route_forward(router_.get(), &forward, nullptr));
  check(moec_context_sync(test_context(), nullptr));
  EXPECT_EQ(tensors_.read(forward.expert_ids), Vec(route.ids.begin(), route.ids.end()));
  expect_rows(forward.routing_weights, route.weights, slots_, "routing_weights");
  if (finite(route.scores)) expect_rows(forward.scores, route.scores, columns_, "scores");
  Vec counts(route.counts.begin(), route.counts.end());
  for (double& n : counts) n += 7;  // added to what is there
  EXPECT_EQ(tensors_.read(forward.counts), counts);

  const Vec d_routing_weights = oracle::random_values("d_routing_weights", route.weights.size());
  oracle::Gradients expected;
  oracle::route_backward(c_.config, c_.in, route, d_routing_weights, &expected);
  for (size_t i = 0; i < c_.d_logits_in.size(); ++i) expected.logits[i] += c_.d_logits_in[i];
  auto grad = sized<moec_route_grad_args>();
  grad.logits = forward.logits;
  grad.per_expert_scale = scale;
  grad.expert_ids = forward.expert_ids;
  grad.d_routing_weights = f32(d_routing_weights, {tokens_, slots_});
  grad.d_logits_in = f32(c_.d_logits_in, {tokens_, columns_});
  grad.d_logits = tensors_.output(MOEC_F32, {tokens_, columns_});
  grad.d_per_expert_scale = out(!c_.in.per_expert_scale.empty(), {columns_});
  check(moec_route_backward(router_.get(), &grad, nullptr));
  expect_rows(grad.d_logits, expected.logits, columns_, "d_logits");
  expect_rows(grad.d_per_expert_scale, expected.per_expert_scale, columns_, "d_per_expert_scale");
  EXPECT_TRUE(tensors_.neighbours_untouched());
}

INSTANTIATE_TEST_SUITE_P(Layer, RoutingTest, testing::ValuesIn(routing_cases()),
                         [](const auto& one) { return one.param.name; });

TEST(BiasUpdate, MatchesTheOracle) {
  oracle::RouterConfig config;
  config.num_experts = 5;
  config.top_k = 2;
  const moec_router_desc desc = router_desc(config, {});
  const auto router = make<Router>(moec_router_create, test_context(), &desc);
  for (const std::vector<int64_t>& counts :
       {std::vector<int64_t>{4, 2, 0, 3, 1}, std::vector<int64_t>{1, 0, 0, 0, 0},
        std::vector<int64_t>{3, 3, 3, 3, 3}}) {
    Vec expected = {0.5, -0.25, 0, 1, 2};
    Tensors tensors;
    const moec_tensor n = tensors.input_ids(counts, MOEC_I32, {5});
    const moec_tensor bias = tensors.input(expected, MOEC_F32, {5});
    check(moec_router_bias_update(router.get(), &n, 0.125f, &bias, nullptr));
    check(moec_context_sync(test_context(), nullptr));
    oracle::bias_update(counts, 0.125, &expected);
    EXPECT_EQ(tensors.read(bias), expected);
  }
}

// ---- auxiliary losses ----
struct LossCase {
  oracle::LossConfig config;
  bool masked = false, counted = false;
};
std::vector<LossCase> loss_cases() {
  using oracle::LossKind;
  std::vector<LossCase> cases;
  for (const bool masked : {false, true}) {
    cases.push_back({{.kind = LossKind::kMixtral}, masked, false});
    cases.push_back({{.kind = LossKind::kZ}, masked, false});
    for (const oracle::ScoreInfo& score : oracle::kScores) {
      if (score.negative) continue;
      for (const bool counted : {false, true})
        cases.push_back({{.kind = LossKind::kSwitch, .score = score.kind}, masked, counted});
      cases.push_back(
          {{.kind = LossKind::kSequence, .seq_len = 16, .score = score.kind}, masked, false});
    }
  }
  return cases;
}

TEST(Losses, MatchTheOracle) {
  SCOPED_TRACE(seed_note());
  constexpr int64_t kTokens = 48, kExperts = 7;
  for (LossCase& c : loss_cases()) {
    SCOPED_TRACE("kind " + std::to_string(static_cast<int>(c.config.kind)) + " score " +
                 std::to_string(static_cast<int>(c.config.score)) + (c.masked ? " masked" : "") +
                 (c.counted ? " counted" : ""));
    c.config.experts = kExperts;
    c.config.top_k = 3;
    c.config.coefficient = 0.5;
    const size_t layers = c.config.kind == oracle::LossKind::kMixtral ? 2 : 1;
    oracle::Mask mask;
    for (int64_t t = 0; t < kTokens && c.masked; ++t) mask.push_back(t % 3 != 1);
    const std::vector<int64_t> counts =
        c.counted ? std::vector<int64_t>{9, 0, 30, 12, 5, 60, 28} : std::vector<int64_t>{};
    std::vector<Vec> logits;
    for (size_t l = 0; l < layers; ++l)
      logits.push_back(oracle::random_values(std::to_string(l) + "loss", kTokens * kExperts));
    const oracle::Loss expected = oracle::aux_loss(c.config, logits, mask, counts);

    Tensors tensors;
    std::vector<moec_tensor> in;
    for (const Vec& layer : logits)
      in.push_back(tensors.input(layer, MOEC_F32, {kTokens, kExperts}));
    auto args = sized<moec_loss_args>();
    args.kind = static_cast<uint32_t>(c.config.kind);
    args.top_k = c.config.top_k;
    args.coefficient = static_cast<float>(c.config.coefficient);
    args.seq_len = c.config.seq_len;
    args.score = static_cast<uint32_t>(c.config.score);
    args.logits = in.data();
    args.count = static_cast<int64_t>(layers);
    args.counts = tensors.input_ids(counts, MOEC_I32, {kExperts});
    args.token_mask = tensors.input_ids(mask, MOEC_U8, {kTokens});
    args.loss = tensors.output(MOEC_F32, {1});
    check(moec_loss_forward(test_context(), &args, nullptr));
    check(moec_context_sync(test_context(), nullptr));
    EXPECT_NEAR(tensors.read(args.loss)[0], expected.value, 1e-5 * std::fabs(expected.value));
    args.loss = {};
    args.d_loss = tensors.input(Vec{2}, MOEC_F32, {1});
    std::vector<Vec> alone;
    for (const double before : {0.0, 0.25}) {  // gradients are added to what is there
      std::vector<moec_tensor> d;
      for (const Vec& layer : logits)
        d.push_back(tensors.input(Vec(layer.size(), before), MOEC_F32, {kTokens, kExperts}));
      args.d_logits = d.data();
      check(moec_loss_backward(test_context(), &args, nullptr));
      check(moec_context_sync(test_context(), nullptr));
      for (size_t l = 0; l < layers; ++l) {
        Vec gradient = tensors.read(d[l]);
        if (before == 0) alone.push_back(gradient);
        Vec sum = alone[l];
        for (double& g : sum) g = oracle::round_to(oracle::Rounding::kFp32, g + before);
        EXPECT_LE(row_error(gradient, sum, kExperts).error, 1e-7) << before;
        if (before != 0) continue;
        for (double& g : gradient) g /= 2;  // d_loss
        // One sum over the experts is taken from all of a row, which may come near to nothing.
        const RowError error = row_error(gradient, expected.d_logits[l], kExperts, kTypicalRow);
        EXPECT_LE(error.error, kTolerance) << error;
      }
    }
  }
}

}  // namespace
}  // namespace moec::test
