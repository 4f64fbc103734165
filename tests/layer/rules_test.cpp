// SPDX-License-Identifier: Apache-2.0
// Ids that follow from the place of a slot: routers and plans of forced balance, and plans of
// experts that have as many rows each. They are what ids given by the caller make, bit for bit. It
// was seen to catch a round that goes over the identity experts, too, and a rule whose range begins
// at 0.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "support/handles.h"
#include "support/plan_check.h"
#include "support/random.h"
#include "support/skip.h"
#include "support/tensors.h"

namespace moec::test {
namespace {

constexpr int64_t kTokens = 37;
constexpr int32_t kExperts = 6, kZero = 2, kTopK = 4;

std::vector<double> draw(uint64_t seed, int64_t count) {
  Random random(seed);
  std::vector<double> values(static_cast<size_t>(count));
  for (double& value : values) value = random.normal();
  return values;
}

moec_plan_desc plan_desc(int32_t top_k, int32_t begin = 0, int32_t end = 0, int32_t align = 0) {
  auto desc = sized<moec_plan_desc>();
  desc.max_tokens = kTokens + 30;
  desc.num_experts = kExperts;
  desc.num_zero_experts = kZero;
  desc.top_k = top_k;
  desc.expert_begin = begin;
  desc.expert_end = end;
  desc.align = align;
  return desc;
}
PlanHandle make_plan(const moec_plan_desc& desc) {
  const moec_buffer* const own = nullptr;
  return make<PlanHandle>(moec_plan_create, test_context(), &desc, own);
}

void expect_equal(const moec_plan* plan, const moec_plan* expected) {
  for (int32_t id = MOEC_PLAN_COUNTS; id <= MOEC_PLAN_TOTALS; ++id)
    EXPECT_EQ(field(plan, id), field(expected, id)) << "field " << id;
}

std::vector<int32_t> round_robin(int32_t top_k) {
  std::vector<int32_t> ids;
  for (int64_t slot = 0; slot < kTokens * top_k; ++slot)
    ids.push_back(static_cast<int32_t>(slot % kExperts));
  return ids;
}

struct Routed {
  std::vector<double> ids, weights, d_logits, counts;
  bool operator==(const Routed&) const = default;
};
Routed route(moec_router_desc desc, uint32_t selection, bool masked) {
  SCOPED_TRACE(seed_note());
  desc.selection = selection;
  const auto router = make<Router>(moec_router_create, test_context(), &desc);
  Tensors m;
  const int64_t N = kExperts + kZero;
  std::vector<double> logits = draw(3, kTokens * N);
  logits[5] = std::numeric_limits<double>::quiet_NaN();  // scores are not looked at
  for (int64_t i = 0; i < N; ++i) logits[static_cast<size_t>(2 * N + i)] = -INFINITY;
  std::vector<double> mask(static_cast<size_t>(kTokens), 1);
  for (size_t t = 1; t < mask.size(); t += 5) mask[t] = 0;
  auto args = sized<moec_route_args>();
  args.logits = m.input(logits, MOEC_F32, {kTokens, N});
  if (masked) args.token_mask = m.input(mask, MOEC_U8, {kTokens});
  if (desc.flags & MOEC_ROUTER_SELECT_BIAS) args.select_bias = m.input(draw(4, N), MOEC_F32, {N});
  if (selection == MOEC_SELECT_GIVEN)
    args.given_ids = m.input_ids(round_robin(kTopK), MOEC_I32, {kTokens, kTopK});
  args.expert_ids = m.output(MOEC_I32, {kTokens, kTopK});
  args.routing_weights = m.output(MOEC_F32, {kTokens, kTopK});
  args.counts = m.input(std::vector<double>(static_cast<size_t>(N), 0), MOEC_I32, {N});
  check(moec_route_forward(router.get(), &args, nullptr));
  auto grads = sized<moec_route_grad_args>();
  grads.logits = args.logits;
  grads.expert_ids = args.expert_ids;
  grads.d_routing_weights = m.input(draw(5, kTokens * kTopK), MOEC_F32, {kTokens, kTopK});
  grads.d_logits = m.output(MOEC_F32, {kTokens, N});
  check(moec_route_backward(router.get(), &grads, nullptr));
  Routed out = {m.read(args.expert_ids), comparable(m.read(args.routing_weights)),
                comparable(m.read(grads.d_logits)), m.read(args.counts)};
  EXPECT_TRUE(m.neighbours_untouched());
  return out;
}

TEST(ForcedBalance, RoutersGiveEachExpertAsManyRows) {
  auto desc = sized<moec_router_desc>();
  desc.num_experts = kExperts;
  desc.num_zero_experts = kZero;
  desc.top_k = kTopK;
  const struct {
    uint32_t score, weight_rule, norm, order, flags;
    bool masked;
  } cases[] = {
      {MOEC_SCORE_SOFTMAX, MOEC_WEIGHT_SCORE, MOEC_NORM_NONE, MOEC_SLOT_BY_VALUE, 0, false},
      {MOEC_SCORE_SIGMOID, MOEC_WEIGHT_SCORE, MOEC_NORM_SUM, MOEC_SLOT_BY_EXPERT,
       MOEC_ROUTER_SELECT_BIAS, true},
      {MOEC_SCORE_SOFTMAX, MOEC_WEIGHT_SOFTMAX_SELECTED, MOEC_NORM_NONE, MOEC_SLOT_BY_VALUE, 0,
       true},
  };
  for (const auto& c : cases) {
    desc.score = c.score;
    desc.weight_rule = c.weight_rule;
    desc.norm = c.norm;
    desc.slot_order = c.order;
    desc.flags = c.flags;
    const Routed got = route(desc, MOEC_SELECT_ROUND_ROBIN, c.masked);
    EXPECT_EQ(got, route(desc, MOEC_SELECT_GIVEN, c.masked));
    if (c.masked) continue;
    EXPECT_EQ(got.ids, as_values(round_robin(kTopK)));
    const auto [least, most] = std::minmax_element(got.counts.begin(), got.counts.end() - kZero);
    EXPECT_LE(*most - *least, 1);
    EXPECT_EQ(got.counts.back(), 0);
  }
}

TEST(ForcedBalance, PlansHaveRoundRobinIds) {
  SCOPED_TRACE(seed_note());
  for (const moec_plan_desc& desc : {plan_desc(kTopK), plan_desc(kTopK, 1, 4, 8), plan_desc(1)}) {
    Tensors m;
    const int64_t K = desc.top_k;
    const PlanHandle plan = make_plan(desc), expected = make_plan(desc);
    const moec_tensor ids = m.input_ids(round_robin(desc.top_k), MOEC_I32, {kTokens, K});
    const moec_tensor weights = m.input(draw(7, kTokens * K), MOEC_F32, {kTokens, K});
    const moec_tensor* const none = nullptr;
    for (const moec_tensor* given : {&weights, none}) {
      check(moec_plan_from_topk(expected.get(), &ids, given, nullptr));
      check(moec_plan_from_rule(plan.get(), MOEC_PLAN_ROUND_ROBIN, kTokens, given, nullptr));
      expect_equal(plan.get(), expected.get());
    }
  }
}

TEST(EqualCounts, RowsOfTheBatchStayWhereTheyAre) {
  for (const moec_plan_desc& desc : {plan_desc(1), plan_desc(1, 2, 5, 4), plan_desc(1, 5, 6, 16)}) {
    const int32_t local = desc.expert_end ? desc.expert_end - desc.expert_begin : kExperts;
    for (const int64_t each : {0, 1, 4, 10}) {  // C: rows of an expert
      Tensors m;
      const int64_t T = local * each;
      std::vector<int32_t> ids;
      for (int64_t t = 0; t < T; ++t)
        ids.push_back(static_cast<int32_t>(desc.expert_begin + t / each));
      const PlanHandle plan = make_plan(desc), expected = make_plan(desc);
      const moec_tensor given = m.input_ids(ids, MOEC_I32, {T, 1});
      if (T) {
        check(moec_plan_from_topk(expected.get(), &given, nullptr, nullptr));
        check(moec_plan_from_rule(plan.get(), MOEC_PLAN_EQUAL_COUNTS, T, nullptr, nullptr));
        expect_equal(plan.get(), expected.get());
      } else {
        check(moec_plan_from_rule(plan.get(), MOEC_PLAN_EQUAL_COUNTS, T, nullptr, nullptr));
      }
      EXPECT_EQ(field(plan.get(), MOEC_PLAN_COUNTS),
                std::vector<double>(static_cast<size_t>(local), static_cast<double>(each)));
      if (desc.align) continue;  // a row is its token: x is read in its order
      const std::vector<double> token = field(plan.get(), MOEC_PLAN_ROW_TOKEN);
      for (size_t row = 0; row < token.size(); ++row)
        EXPECT_EQ(token[row], static_cast<double>(row));
    }
  }
}

// Segments of experts end in padding, so that each begins at a multiple of `align`.
TEST(EqualCounts, PaddingEndsEachSegment) {
  constexpr int32_t kAlign = 8, kEach = 5;
  const PlanHandle plan = make_plan(plan_desc(1, 0, 0, kAlign));
  check(
      moec_plan_from_rule(plan.get(), MOEC_PLAN_EQUAL_COUNTS, kExperts * kEach, nullptr, nullptr));
  const std::vector<double> offsets = field(plan.get(), MOEC_PLAN_GROUP_OFFSETS),
                            token = field(plan.get(), MOEC_PLAN_ROW_TOKEN);
  for (size_t e = 0; e < kExperts; ++e) {
    EXPECT_EQ(offsets[e], static_cast<double>(e * kAlign));
    for (size_t row = 0; row < kAlign; ++row)
      EXPECT_EQ(token[e * kAlign + row], row < kEach ? static_cast<double>(e * kEach + row) : -1.0);
  }
}

TEST(Rules, RefuseWhatTheyCannotGive) {
  const PlanHandle top4 = make_plan(plan_desc(kTopK)), top1 = make_plan(plan_desc(1));
  const PlanHandle wide = make_plan(plan_desc(kExperts + 1));
  const auto build = [](const PlanHandle& plan, uint32_t rule, int64_t tokens) {
    return moec_plan_from_rule(plan.get(), rule, tokens, nullptr, nullptr);
  };
  EXPECT_EQ(build(top1, 2, 6), MOEC_E_INVALID_ARG);
  EXPECT_EQ(build(top1, MOEC_PLAN_EQUAL_COUNTS, -6), MOEC_E_INVALID_ARG);
  EXPECT_EQ(build(top1, MOEC_PLAN_EQUAL_COUNTS, 7), MOEC_E_SHAPE);
  EXPECT_EQ(build(top1, MOEC_PLAN_ROUND_ROBIN, kTokens + 31), MOEC_E_SHAPE);
  EXPECT_EQ(build(top4, MOEC_PLAN_EQUAL_COUNTS, 6), MOEC_E_MISMATCH);
  EXPECT_EQ(build(wide, MOEC_PLAN_ROUND_ROBIN, 6), MOEC_E_MISMATCH);
  auto choice = sized<moec_plan_desc>();
  choice.max_tokens = 6;
  choice.num_experts = kExperts;
  choice.kind = MOEC_PLAN_EXPERT_CHOICE;
  choice.capacity = 2;
  EXPECT_EQ(build(make_plan(choice), MOEC_PLAN_ROUND_ROBIN, 6), MOEC_E_MISMATCH);
  Tensors m;
  const moec_tensor weights = m.input(draw(1, 5), MOEC_F32, {5, 1});
  EXPECT_EQ(moec_plan_from_rule(top1.get(), MOEC_PLAN_ROUND_ROBIN, 6, &weights, nullptr),
            MOEC_E_SHAPE);
  moec_tensor view = {};
  EXPECT_EQ(moec_plan_view(top1.get(), MOEC_PLAN_COUNTS, &view), MOEC_E_INVALID_STATE);
  auto desc = sized<moec_router_desc>();
  desc.num_experts = 3;
  desc.num_zero_experts = 2;
  desc.top_k = 4;
  desc.selection = MOEC_SELECT_ROUND_ROBIN;
  moec_router* router = nullptr;
  EXPECT_EQ(moec_router_create(test_context(), &desc, &router), MOEC_E_INVALID_ARG);
}

}  // namespace
}  // namespace moec::test
