// SPDX-License-Identifier: Apache-2.0
// Routing forward and backward beside the oracle; the same bits for every instruction set and
// number of threads.
#include <gtest/gtest.h>

#include <algorithm>
#include <limits>

#include "support/compare.h"
#include "unit/router_case.h"

namespace moec::test {
namespace {

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

// Counts of 32 bits stay at their largest; those of 64 bits do not end there.
TEST(Router, counts_do_not_wrap) {
  const auto counts_of = [](auto start) {
    std::vector<decltype(start)> counts(4, start);
    const std::vector<float> values = {4, 3, 2, 1, 9, 8, 7, 6, 1, 2, 9, 8};
    const moec_router_desc desc = desc_of([] {
      R r;
      r.num_experts = 4, r.top_k = 2;
      return r;
    }());
    std::vector<int32_t> ids(6);
    std::vector<float> weights(6);
    RouteArgs args = {};
    args.desc = &desc, args.num_tokens = 3;
    args.logits = {const_cast<float*>(values.data()), MOEC_F32};
    args.expert_ids = ids.data(), args.routing_weights = weights.data();
    args.counts = {counts.data(), moec_dtype(sizeof start == 4 ? MOEC_I32 : MOEC_I64)};
    cpu::route_forward(CpuDevice(1), args);
    return counts;
  };
  constexpr int32_t kMost = std::numeric_limits<int32_t>::max();
  EXPECT_EQ(counts_of(kMost - 1), (Ids{kMost, kMost, kMost, kMost}));
  EXPECT_EQ(counts_of(int32_t(5)), (Ids{7, 7, 6, 6}));
  EXPECT_EQ(counts_of(int64_t(kMost)),
            (std::vector<int64_t>{kMost + int64_t(2), kMost + int64_t(2), kMost + int64_t(1),
                                  kMost + int64_t(1)}));
}

TEST(Router, bias_update_moves_towards_the_mean) {
  std::vector<int32_t> counts = {4, 0, 2, 2};
  std::vector<float> bias = {1, 1, 1, 1};
  cpu::bias_update(CpuDevice(1), {4, {counts.data(), MOEC_I32}, 0.5f, bias.data()});
  EXPECT_EQ(bias, (std::vector<float>{0.5f, 1.5f, 1, 1}));
  std::vector<int64_t> wide = {int64_t(5) << 31, 0, int64_t(1) << 31, int64_t(2) << 31};
  cpu::bias_update(CpuDevice(1), {4, {wide.data(), MOEC_I64}, 0.5f, bias.data()});
  EXPECT_EQ(bias, (std::vector<float>{0, 2, 1.5f, 1}));
}

}  // namespace
}  // namespace moec::test
