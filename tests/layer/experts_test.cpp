// SPDX-License-Identifier: Apache-2.0
// The experts with plans that a whole layer does not make: expert choice, a local range
// of experts, padded groups. Forward and every gradient against the oracle.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "cases/feature_cases.h"
#include "support/compare.h"
#include "support/handles.h"
#include "support/layer_check.h"
#include "support/layer_runner.h"
#include "support/random.h"
#include "support/skip.h"
#include "support/tensors.h"
#include "support/weight_sets.h"

namespace moec::test {
namespace {

using oracle::FeatureCase;
using oracle::Vec;

constexpr double kTolerance = 2e-5;

// The descriptor of the plan that a case needs; capacity is that of expert choice or a drop.
moec_plan_desc plan_desc(const oracle::Config& config, int tokens, bool choice) {
  auto desc = sized<moec_plan_desc>();
  desc.max_tokens = tokens;
  desc.num_experts = config.router.num_experts;
  desc.top_k = choice ? 0 : config.router.top_k;
  desc.kind = choice ? MOEC_PLAN_EXPERT_CHOICE : MOEC_PLAN_TOPK;
  desc.expert_begin = config.plan.expert_begin;
  desc.expert_end = config.plan.expert_end;
  desc.align = config.plan.align;
  desc.drop = static_cast<uint32_t>(config.plan.drop);
  desc.capacity = config.plan.capacity;
  return desc;
}

// Runs one case on a plan already built. `route` and `plan` are the oracle's.
class ExpertsRun {
 public:
  ExpertsRun(const FeatureCase& c, const moec_plan* plan, bool choice, moec_dtype dtype = MOEC_F32,
             uint32_t combine = MOEC_COMBINE_FP32_SLOT)
      : c_(c), plan_(plan), choice_(choice) {
    RunOptions options;
    options.combine = combine;
    options.dtype = layout_.dtype = dtype;
    moec_experts_desc desc = experts_desc(c.config, c.in, options);
    local_ = static_cast<int>(c.in.experts.down.size()) / (desc_hidden() * c.config.experts.inter);
    if (choice) {
      desc.top_k = 0;
      desc.max_rows_base = local_ * c.config.plan.capacity;
    }
    experts_ = make<Experts>(moec_experts_create, test_context(), &desc);
    check(moec_experts_query(experts_.get(), &sizes_));
    set_ = std::make_unique<WeightSet>(c.in.experts, local_, desc_hidden(), c.config.experts.inter,
                                       layout_, false);
    const moec_weights_desc weights = set_->desc(false);
    weights_ = make<Weights>(moec_weights_create, test_context(), &weights);
    check(moec_weights_bind(weights_.get(), set_->set()));
    x_ = tensors_.input(c.in.x, dtype, {c.in.tokens, desc_hidden()});
    saved_ = tensors_.buffer(bytes(sizes_.saved));
  }

  Vec forward(uint32_t flags = 0) {
    auto args = sized<moec_experts_args>();
    args.flags = flags;
    args.plan = plan_;
    args.weights = weights_.get();
    args.x = x_;
    args.y = tensors_.output(layout_.dtype, {c_.in.tokens, desc_hidden()});
    args.saved = saved_;
    args.workspace = tensors_.buffer(bytes(sizes_.forward_workspace));
    check(moec_experts_forward(experts_.get(), &args, nullptr));
    return tensors_.read(args.y);
  }

  struct Result {
    Vec d_x, d_routing_weights;
    oracle::MlpWeights d_experts;
  };
  Result backward(int64_t rows) {
    WeightSet d_set(c_.in.experts, local_, desc_hidden(), c_.config.experts.inter, layout_, true);
    auto args = sized<moec_experts_grad_args>();
    args.plan = plan_;
    args.weights = weights_.get();
    args.x = x_;
    args.d_y = tensors_.input(c_.d_y, layout_.dtype, {c_.in.tokens, desc_hidden()});
    args.saved = saved_;
    args.d_x = tensors_.output(layout_.dtype, {c_.in.tokens, desc_hidden()});
    args.d_routing_weights =
        choice_ ? tensors_.output(MOEC_F32, {rows})
                : tensors_.output(MOEC_F32, {c_.in.tokens, c_.config.router.top_k});
    args.d_expert_weights = d_set.set();
    args.workspace = tensors_.buffer(bytes(sizes_.backward_workspace));
    check(moec_experts_backward(experts_.get(), &args, nullptr));
    check(moec_context_sync(test_context(), nullptr));
    EXPECT_TRUE(tensors_.neighbours_untouched() && d_set.neighbours_untouched());
    return {tensors_.read(args.d_x), tensors_.read(args.d_routing_weights), d_set.read()};
  }

 private:
  int desc_hidden() const { return c_.config.experts.hidden; }
  uint64_t bytes(const moec_size& size) const {
    return size.base + static_cast<uint64_t>(c_.in.tokens) * size.per_token;
  }

  const FeatureCase& c_;
  const moec_plan* plan_;
  bool choice_;
  WeightLayout layout_;
  int local_ = 0;
  Experts experts_;
  Weights weights_;
  std::unique_ptr<WeightSet> set_;
  moec_experts_sizes sizes_ = sized<moec_experts_sizes>();
  Tensors tensors_;
  moec_tensor x_{};
  moec_buffer saved_{};
};

void expect_result(const ExpertsRun::Result& got, const Vec& d_x, const oracle::Gradients& expected,
                   const FeatureCase& c) {
  const auto hidden = static_cast<size_t>(c.config.experts.hidden);
  const auto inter = static_cast<size_t>(c.config.experts.inter);
  const auto compare = [](const char* name, const Vec& a, const Vec& b, size_t columns,
                          const Vec& terms = {}) {
    if (b.empty()) return;
    const RowError error = row_error(a, b, columns, kRowFloor, terms);
    EXPECT_LE(error.error, kTolerance) << name << ": " << error;
  };
  compare("d_x", got.d_x, d_x, hidden);
  compare("d_gate", got.d_experts.gate, expected.experts.gate, hidden, expected.terms.experts.gate);
  compare("d_up", got.d_experts.up, expected.experts.up, hidden, expected.terms.experts.up);
  compare("d_down", got.d_experts.down, expected.experts.down, inter, expected.terms.experts.down);
  compare("d_gate_bias", got.d_experts.gate_bias, expected.experts.gate_bias, inter,
          expected.terms.experts.gate_bias);
  compare("d_up_bias", got.d_experts.up_bias, expected.experts.up_bias, inter,
          expected.terms.experts.up_bias);
  compare("d_down_bias", got.d_experts.down_bias, expected.experts.down_bias, hidden,
          expected.terms.experts.down_bias);
}

// Experts 2..6 of 8, rows padded to 8, some dropped; in each position of the weight.
TEST(LocalExperts, MatchTheOracle) {
  SCOPED_TRACE(seed_note());
  for (const auto position : {oracle::WeightPosition::kOutput, oracle::WeightPosition::kActivation,
                              oracle::WeightPosition::kInput}) {
    FeatureCase c = oracle::base_case("local_experts", 67);
    oracle::add_expert_biases(&c);
    c.config.experts.weight_position = position;
    c.config.plan = {2, 7, 8, oracle::Drop::kByWeight, 13, 0};
    for (Vec* w : {&c.in.experts.gate, &c.in.experts.up, &c.in.experts.down,
                   &c.in.experts.gate_bias, &c.in.experts.up_bias, &c.in.experts.down_bias}) {
      const auto one = static_cast<std::ptrdiff_t>(w->size() / 8);
      *w = Vec(w->begin() + 2 * one, w->begin() + 7 * one);
    }
    const oracle::Layer layer = oracle::forward(c.config, c.in);
    Vec weights = layer.route.weights;
    for (double& w : weights) w = oracle::round_to(oracle::Rounding::kFp32, w);
    Tensors tensors;
    const moec_plan_desc desc = plan_desc(c.config, c.in.tokens, false);
    const moec_buffer* const own = nullptr;
    const auto plan = make<PlanHandle>(moec_plan_create, test_context(), &desc, own);
    const std::vector<int64_t> shape = {c.in.tokens, c.config.router.top_k};
    const moec_tensor ids = tensors.input_ids(layer.route.ids, MOEC_I32, shape);
    const moec_tensor w = tensors.input(weights, MOEC_F32, shape);
    check(moec_plan_from_topk(plan.get(), &ids, &w, nullptr));

    ExpertsRun run(c, plan.get(), false);
    EXPECT_LE(row_error(run.forward(), layer.y, 12).error, kTolerance);
    oracle::Gradients expected;
    const Vec d_x =
        oracle::experts_backward(c.config, c.in, c.in.x, layer.route, layer.plan, c.d_y, &expected);
    const ExpertsRun::Result got = run.backward(0);
    expect_result(got, d_x, expected, c);
    EXPECT_LE(row_error(got.d_routing_weights, expected.routing_weights, 3, kRowFloor,
                        expected.terms.routing_weights)
                  .error,
              kTolerance);
  }
}

// Rows of tokens without a row in the plan keep the NaN of fresh memory; the others keep their
// bits.
void expect_rows_left(const oracle::Ids& rows, int tokens, const Vec& all, const Vec& some) {
  const size_t slots = rows.size() / size_t(tokens), hidden = all.size() / size_t(tokens);
  int left = 0;
  for (size_t t = 0; t < size_t(tokens); ++t) {
    bool any = false;
    for (size_t k = 0; k < slots; ++k) any |= rows[t * slots + k] >= 0;
    left += !any;
    for (size_t i = t * hidden; i < (t + 1) * hidden; ++i) {
      if (any)
        ASSERT_EQ(some[i], all[i]) << t;
      else
        ASSERT_TRUE(std::isnan(some[i]) && !std::isnan(all[i])) << t;
    }
  }
  EXPECT_GT(left, 0);
}

// Every fourth token has no expert here, another has one that is dropped.
// Shown to fail when: the flag is ignored; a token whose first slot has no row is taken for absent.
TEST(SkipAbsent, LeavesRowsOfTokensWithoutARow) {
  SCOPED_TRACE(seed_note());
  constexpr int kHidden = 64, kInter = 72, kTopK = 3, kLocal = 5;
  for (const Type& type : kTypes) {
    for (const int tokens : {1, 16, 150}) {
      for (const uint32_t combine : {MOEC_COMBINE_FP32_SLOT, MOEC_COMBINE_FP32_EXPERT}) {
        SCOPED_TRACE(std::string(type.name) + ", tokens: " + std::to_string(tokens));
        FeatureCase c = oracle::base_case("skip_absent", tokens);
        c.config.plan = {2, 7, 1, oracle::Drop::kByPosition, tokens * 9 / 16 + 1, 0};
        c.config.experts.hidden = kHidden;
        c.config.experts.inter = kInter;
        c.in.x = oracle::random_values("x", size_t(tokens * kHidden));
        for (Vec* matrix : {&c.in.experts.gate, &c.in.experts.up, &c.in.experts.down})
          *matrix = oracle::random_values("matrix", size_t(kLocal * kHidden * kInter));
        oracle::Ids ids;
        Vec weights;
        for (int t = 0; t < tokens; ++t) {
          ids.insert(ids.end(), {t % 4 ? 2 : 0, t % 4 == 1 ? 5 : 1, 7});
          weights.insert(weights.end(), {0.5, 0.0, 0.25});
        }
        Tensors tensors;
        const moec_plan_desc desc = plan_desc(c.config, tokens, false);
        const moec_buffer* const own = nullptr;
        const auto plan = make<PlanHandle>(moec_plan_create, test_context(), &desc, own);
        const moec_tensor i = tensors.input_ids(ids, MOEC_I32, {tokens, kTopK});
        const moec_tensor w = tensors.input(weights, MOEC_F32, {tokens, kTopK});
        check(moec_plan_from_topk(plan.get(), &i, &w, nullptr));
        ExpertsRun run(c, plan.get(), false, type.dtype, combine);
        const Vec all = run.forward(), some = run.forward(MOEC_EXPERTS_SKIP_ABSENT);
        const oracle::Plan want = oracle::build_plan(c.config, tokens, kTopK, ids, weights);
        expect_rows_left(want.assignment_row, tokens, all, some);
      }
    }
  }
}

// Of each token's three experts the second, 3, has the weight 0. It may compute anything then.
TEST(Weightless, ExpertChangesNoBit) {
  SCOPED_TRACE(seed_note());
  constexpr int kHidden = 64, kInter = 72, kExperts = 6, kTopK = 3, kMatrix = kHidden * kInter;
  for (const Type& type : kTypes) {
    for (const int tokens : {1, 16, 150}) {
      SCOPED_TRACE(std::string(type.name) + ", tokens: " + std::to_string(tokens));
      FeatureCase c = oracle::base_case("weightless", tokens);
      c.config.router.num_experts = kExperts;
      c.config.router.top_k = kTopK;
      c.config.experts.hidden = kHidden;
      c.config.experts.inter = kInter;
      c.in.x = oracle::random_values("x", size_t(tokens * kHidden));
      c.d_y = oracle::random_values("d_y", size_t(tokens * kHidden));
      for (Vec* matrix : {&c.in.experts.gate, &c.in.experts.up, &c.in.experts.down})
        *matrix = oracle::random_values("matrix", size_t(kExperts * kMatrix));
      oracle::Ids ids;
      Vec weights;
      for (int t = 0; t < tokens; ++t) {
        ids.insert(ids.end(), {t % 3, 3, 5});
        weights.insert(weights.end(), {0.5, 0.0, 0.25});
      }
      Tensors tensors;
      const moec_plan_desc desc = plan_desc(c.config, tokens, false);
      const moec_buffer* const own = nullptr;
      const auto plan = make<PlanHandle>(moec_plan_create, test_context(), &desc, own);
      const moec_tensor i = tensors.input_ids(ids, MOEC_I32, {tokens, kTopK});
      const moec_tensor w = tensors.input(weights, MOEC_F32, {tokens, kTopK});
      check(moec_plan_from_topk(plan.get(), &i, &w, nullptr));
      ExpertsRun run(c, plan.get(), false, type.dtype);
      const Vec y = run.forward();
      const ExpertsRun::Result d = run.backward(0);

      FeatureCase wild = c;
      for (Vec* matrix : {&wild.in.experts.gate, &wild.in.experts.up, &wild.in.experts.down})
        std::fill_n(matrix->begin() + 3 * kMatrix, kMatrix, NAN);
      ExpertsRun wild_run(wild, plan.get(), false, type.dtype);
      EXPECT_EQ(wild_run.forward(), y);
      const ExpertsRun::Result wild_d = wild_run.backward(0);
      EXPECT_EQ(wild_d.d_x, d.d_x);
      EXPECT_EQ(wild_d.d_experts.gate, d.d_experts.gate);
      EXPECT_EQ(wild_d.d_experts.up, d.d_experts.up);
      EXPECT_EQ(wild_d.d_experts.down, d.d_experts.down);
      for (size_t a = 0; a < ids.size(); a += kTopK) {
        EXPECT_EQ(wild_d.d_routing_weights[a], d.d_routing_weights[a]);
        EXPECT_EQ(wild_d.d_routing_weights[a + 2], d.d_routing_weights[a + 2]);
      }
    }
  }
}

TEST(ExpertChoice, MatchesTheOracle) {
  SCOPED_TRACE(seed_note());
  for (const bool masked : {false, true}) {
    FeatureCase c = oracle::base_case("expert_choice", 29);
    oracle::add_expert_biases(&c);
    c.config.plan.align = 4;
    c.config.plan.capacity = 6;
    Vec scores = oracle::random_values("scores", 29 * 8);
    for (size_t i = 0; i < scores.size(); i += 5) scores[i] = 0.5;  // ties
    scores[3] = -INFINITY;                                          // never chosen
    oracle::Mask mask;
    for (int t = 0; t < 29 && masked; ++t) mask.push_back(t % 4 == 0);
    const oracle::Route route = oracle::expert_choice(scores, 29, 8, 6, mask);
    const oracle::Plan expected_plan =
        oracle::build_plan(c.config, 29, route.slots, route.ids, route.weights);
    Tensors tensors;
    const moec_plan_desc desc = plan_desc(c.config, 29, true);
    const moec_buffer* const own = nullptr;
    const auto plan = make<PlanHandle>(moec_plan_create, test_context(), &desc, own);
    const moec_tensor s = tensors.input(scores, MOEC_F32, {29, 8});
    const moec_tensor m = tensors.input_ids(mask, MOEC_U8, {29});
    check(moec_plan_from_scores(plan.get(), &s, masked ? &m : nullptr, nullptr));
    moec_tensor row_token;
    check(moec_plan_view(plan.get(), MOEC_PLAN_ROW_TOKEN, &row_token));
    int32_t totals[4];
    check(moec_plan_totals_sync(plan.get(), totals, nullptr));
    EXPECT_EQ(oracle::Ids(totals, totals + 4), expected_plan.totals);

    ExpertsRun run(c, plan.get(), true);
    const Vec y = oracle::experts_forward(c.config, c.in, c.in.x, route, expected_plan);
    const Vec all = run.forward();
    EXPECT_LE(row_error(all, y, 12).error, kTolerance);
    expect_rows_left(expected_plan.assignment_row, 29, all, run.forward(MOEC_EXPERTS_SKIP_ABSENT));
    oracle::Gradients expected;
    const Vec d_x =
        oracle::experts_backward(c.config, c.in, c.in.x, route, expected_plan, c.d_y, &expected);
    const ExpertsRun::Result got = run.backward(row_token.shape[0]);
    expect_result(got, d_x, expected, c);
    Vec d_rows(static_cast<size_t>(row_token.shape[0]), 0.0);
    for (size_t a = 0; a < expected_plan.assignment_row.size(); ++a)
      if (expected_plan.assignment_row[a] >= 0)
        d_rows[static_cast<size_t>(expected_plan.assignment_row[a])] = expected.routing_weights[a];
    EXPECT_LE(row_error(got.d_routing_weights, d_rows, d_rows.size()).error, kTolerance);
  }
}

}  // namespace
}  // namespace moec::test
