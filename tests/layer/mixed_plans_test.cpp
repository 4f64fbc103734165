// SPDX-License-Identifier: Apache-2.0
// Plans of random sizes, ranges, paddings and drops, from random ids and scores, against the
// oracle: every field, exactly. MOEC_MIXED_CASES of them (100), others for each MOEC_TEST_SEED.
// Mutation noted: equal weights and scores kept until the capacity is full, before larger ones.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "support/draw.h"
#include "support/handles.h"
#include "support/plan_check.h"
#include "support/skip.h"
#include "support/tensors.h"

namespace moec::test {
namespace {

using oracle::Ids;
using oracle::Vec;

struct Case {
  oracle::Config config;
  moec_plan_desc desc = sized<moec_plan_desc>();
  int tokens = 0;
};

// Experts, the local range and the padding; `most` tokens.
Case draw_sizes(Draw* draw, int most) {
  Case c;
  oracle::PlanConfig& plan = c.config.plan;
  c.config.router.num_experts = draw->one_of({1, 2, 7, 8, 31, 32, 33, 64, 129, 256, 300, 1100});
  c.tokens = draw->one_of({0, 1, 2, 3, 4, 5, 17, 64, 200, 1024, 3000});
  c.tokens = std::min(c.tokens, most);
  if (draw->chance(0.3)) {
    plan.expert_begin = static_cast<int>(draw->below(c.config.router.num_experts));
    plan.expert_end =
        plan.expert_begin + 1 +
        static_cast<int>(draw->below(c.config.router.num_experts - plan.expert_begin));
  }
  plan.align = draw->one_of({1, 1, 1, 2, 16, 128, 1024});
  c.desc.max_tokens = c.tokens + draw->below(3);
  c.desc.num_experts = c.config.router.num_experts;
  c.desc.expert_begin = plan.expert_begin;
  c.desc.expert_end = plan.expert_end;
  c.desc.align = plan.align;
  return c;
}

std::string text_of(const Case& c) {
  const moec_plan_desc& d = c.desc;
  std::string text = "T " + std::to_string(c.tokens);
  const std::pair<const char*, int64_t> fields[] = {
      {"max_tokens", d.max_tokens}, {"E", d.num_experts},
      {"Z", d.num_zero_experts},    {"K", d.top_k},
      {"begin", d.expert_begin},    {"end", d.expert_end},
      {"align", d.align},           {"drop", d.drop},
      {"capacity", d.capacity}};
  for (const auto& [name, value] : fields)
    text += std::string(" ") + name + " " + std::to_string(value);
  return text;
}

// Ids of each token differ; weights are few, so that many are equal.
void draw_routing(Draw* draw, const Case& c, Ids* ids, Vec* weights) {
  const int columns = c.config.router.columns(), slots = c.config.router.top_k;
  const int used =
      draw->chance(0.3) ? slots + static_cast<int>(draw->below(columns - slots + 1)) : columns;
  const double absent = draw->one_of({0.0, 0.0, 0.1, 0.9});
  const int values = draw->one_of({1, 4, 1 << 20});
  Ids pool(static_cast<size_t>(used));
  for (int i = 0; i < used; ++i) pool[static_cast<size_t>(i)] = i;
  for (int t = 0; t < c.tokens; ++t) {
    for (int k = 0; k < slots; ++k) {
      std::swap(pool[static_cast<size_t>(k)], pool[static_cast<size_t>(k + draw->below(used - k))]);
      const int other = draw->one_of({-1, -7, columns, columns + 100});
      ids->push_back(draw->chance(absent) ? other : pool[static_cast<size_t>(k)]);
      weights->push_back(static_cast<double>(draw->below(values)) / values);
    }
  }
}

class MixedPlans : public testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Layer, MixedPlans, testing::Range(0, mixed_cases(100)));

TEST_P(MixedPlans, FromIdsMatch) {
  SCOPED_TRACE(seed_note());
  Draw draw(15485863 * static_cast<uint64_t>(GetParam()) + 3);
  Case c = draw_sizes(&draw, 3000);
  oracle::RouterConfig& router = c.config.router;
  router.num_zero_experts = c.desc.num_zero_experts = draw.one_of({0, 0, 1, 3});
  router.top_k = c.desc.top_k =
      std::min(draw.one_of({1, 1, 2, 3, 4, 6, 8, 10, 22, 64}), router.columns());
  if (draw.chance(0.4)) {
    oracle::PlanConfig& plan = c.config.plan;
    plan.drop = draw.one_of({oracle::Drop::kByPosition, oracle::Drop::kByWeight});
    plan.capacity = 1 + draw.below(2 * c.tokens * router.top_k / router.num_experts + 2);
    c.desc.drop = static_cast<uint32_t>(plan.drop);
    c.desc.capacity = plan.capacity;
  }
  SCOPED_TRACE(text_of(c));
  Ids ids;
  Vec weights;
  draw_routing(&draw, c, &ids, &weights);
  const auto plan = make<PlanHandle>(moec_plan_create, test_context(),
                                     static_cast<const moec_plan_desc*>(&c.desc),
                                     static_cast<const moec_buffer*>(nullptr));
  Tensors tensors;
  const moec_dtype type = draw.one_of<moec_dtype>({MOEC_I32, MOEC_I64});
  const std::vector<int64_t> shape = {c.tokens, router.top_k};
  const bool any = c.tokens > 0;  // no tokens are not an absent tensor
  const moec_tensor given = any ? tensors.input_ids(ids, type, shape) : tensors.output(type, shape),
                    weighed = any ? tensors.input(weights, MOEC_F32, shape)
                                  : tensors.output(MOEC_F32, shape);
  for (int turn = 0; turn < 2; ++turn) {  // the second over what the first has left
    check(moec_plan_from_topk(plan.get(), &given, &weighed, nullptr));
    expect_plan(plan.get(), oracle::build_plan(c.config, c.tokens, router.top_k, ids, weights),
                weights);
  }
}

TEST_P(MixedPlans, FromScoresMatch) {
  SCOPED_TRACE(seed_note());
  Draw draw(32452843 * static_cast<uint64_t>(GetParam()) + 5);
  Case c = draw_sizes(&draw, 1024);
  c.tokens = std::max(c.tokens, 1);
  c.desc.max_tokens = std::max<int64_t>(c.desc.max_tokens, 1);
  const int experts = c.config.router.num_experts;
  c.desc.kind = MOEC_PLAN_EXPERT_CHOICE;
  c.desc.capacity = c.config.plan.capacity =
      1 + draw.below(draw.one_of({2, 30, c.tokens, 2 * c.tokens}));
  SCOPED_TRACE(text_of(c));
  const int values = draw.one_of({1, 4, 1 << 20});
  Vec scores(static_cast<size_t>(c.tokens) * static_cast<size_t>(experts));
  for (double& score : scores) {
    score = static_cast<double>(draw.below(values)) / values - 0.25;
    if (draw.chance(0.01)) score = draw.one_of({0.0, -0.0, std::nan(""), -HUGE_VAL});
  }
  oracle::Mask mask;
  if (draw.chance(0.4))
    for (int t = 0; t < c.tokens; ++t) mask.push_back(draw.chance(0.6));
  const oracle::Route route =
      oracle::expert_choice(scores, c.tokens, experts, c.desc.capacity, mask);
  const oracle::Plan expected =
      oracle::build_plan(c.config, c.tokens, route.slots, route.ids, route.weights);
  const auto plan = make<PlanHandle>(moec_plan_create, test_context(),
                                     static_cast<const moec_plan_desc*>(&c.desc),
                                     static_cast<const moec_buffer*>(nullptr));
  Tensors tensors;
  const moec_tensor given = tensors.input(scores, MOEC_F32, {c.tokens, experts}),
                    masked = tensors.input_ids(mask, MOEC_U8, {c.tokens});
  for (int turn = 0; turn < 2; ++turn) {
    check(moec_plan_from_scores(plan.get(), &given, mask.empty() ? nullptr : &masked, nullptr));
    expect_rows(plan.get(), expected);
  }
}

}  // namespace
}  // namespace moec::test
