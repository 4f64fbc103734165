// SPDX-License-Identifier: Apache-2.0
// Worked examples with published or independently computed numbers, one step of the oracle each.
#include <gtest/gtest.h>

#include <cmath>

#include "oracle/moe_oracle.h"

namespace moec::oracle {
namespace {

const Vec kLogits = {0.5, 1.25, -0.75, 2.0, 0.125, 1.5, -2.0, 0.75};

Config router_config(int top_k) {
  Config c;
  c.router.num_experts = 8;
  c.router.top_k = top_k;
  return c;
}
Route route(const Config& c, const Inputs& in = {}) {
  Inputs one = in;
  one.tokens = 1;
  return route_forward(c, one, kLogits);
}
// The numbers were computed in fp32.
void expect_near(const Vec& got, const Vec& expected, double tolerance = 2e-7) {
  ASSERT_EQ(got.size(), expected.size());
  for (size_t i = 0; i < got.size(); ++i) EXPECT_NEAR(got[i], expected[i], tolerance) << i;
}

TEST(Examples, Scores) {
  Config c = router_config(3);
  expect_near(route(c).scores, {.07900845, .16726087, .02263630, .35409129, .05430166, .21476722,
                                .00648541, .10144886});

  c.router.score = Score::kSigmoid;
  expect_near(route(c).scores, {.62245935, .77729988, .32082129, .88079703, .53120941, .81757444,
                                .11920292, .67917871});

  c.router.score_rounding = Rounding::kBf16;
  EXPECT_EQ(route(c).scores, (Vec{.62109375, .77734375, .3203125, .87890625, .53125, .81640625,
                                  .119140625, .6796875}));
}

TEST(Examples, TopThreeWeights) {
  Config c = router_config(3);
  EXPECT_EQ(route(c).ids, (Ids{3, 5, 1}));
  expect_near(route(c).weights, {.35409129, .21476722, .16726087});
  c.router.norm = Norm::kSum;
  expect_near(route(c).weights, {.48102427, .29175594, .22721976});
  c.router.norm = Norm::kNone;
  c.router.weight_rule = WeightRule::kSoftmaxSelected;
  expect_near(route(c).weights, {.48102427, .29175597, .22721978});
}

TEST(Examples, GroupedSelection) {
  Config c = router_config(3);
  c.router.score = Score::kSigmoid;
  c.router.select = Select::kGroupTopK;
  c.router.num_groups = 4;
  c.router.top_groups = 2;
  c.router.group_top_m = 2;
  c.router.norm = Norm::kSum;
  c.router.norm_eps = 1e-20;
  c.router.scale = 2.5;
  Inputs in;
  in.select_bias = {0, -.9, .3, -.9, .4, -.9, 0, .2};
  EXPECT_EQ(route(c, in).ids, (Ids{4, 7, 6}));
  expect_near(route(c, in).weights, {.99882096, 1.27704430, .22413453});
  // A bias of -2 everywhere: groups 0 and 2 win, and then the fill decides.
  in.select_bias.assign(8, -2.0);
  EXPECT_EQ(route(c, in).ids, (Ids{5, 1, 0}));
  c.router.group_fill = GroupFill::kZero;
  EXPECT_EQ(route(c, in).ids, (Ids{2, 3, 6}));  // 2, 3, 6, 7 tie at 0: the lowest ids
}

TEST(Examples, GptossActivation) {
  const Activation act{.kind = Act::kGptoss, .alpha = 1.702, .limit = 7};
  const Vec g = {0.5, -1, 3, 9, -20, 6.96875};
  const Vec u = {0.25, 2, -8.5, 7.5, 1, -7};
  const Vec expected = {.43798554, -.46261269, -17.891573, 55.999626, -6.5868142e-14, -41.812206};
  for (size_t i = 0; i < g.size(); ++i)
    EXPECT_NEAR(activate(act, g[i], u[i]), expected[i], 2e-6 * std::fabs(expected[i])) << i;
}

// Map rows (110), (101), (001), (110), (000).
const Mask kMap = {1, 1, 0, 1, 0, 1, 0, 0, 1, 1, 1, 0, 0, 0, 0};

TEST(Examples, TransformerEngineMaskMap) {
  EXPECT_EQ(te_row_id_map(kMap, 5, 3),
            (Ids{3,  0,  -1, 1, 0, -1, 2, 5, 1,  -1, 2,  0,  -1, 2,  6,  -1, -1, 2,
                 -1, -1, 1,  4, 2, -1, 1, 0, -1, 2,  -1, -1, -1, -1, -1, -1, 0}));
  EXPECT_EQ(te_pad_offsets(kMap, 5, 3, 4), (Ids{0, 1, 3}));
}

TEST(Examples, PaddedPlan) {
  Config c;
  c.router.num_experts = 3;
  c.plan.align = 4;
  Ids ids;
  Vec weights;
  from_map(kMap, {}, 5, 3, 2, &ids, &weights);
  EXPECT_EQ(ids, (Ids{0, 1, 0, 2, 2, -1, 0, 1, -1, -1}));
  const Plan plan = build_plan(c, 5, 2, ids, weights);
  EXPECT_EQ(plan.counts, (Ids{3, 2, 2}));
  EXPECT_EQ(plan.group_offsets, (Ids{0, 4, 8, 12}));
  EXPECT_EQ(plan.row_token, (Ids{0, 1, 3, -1, 0, 3, -1, -1, 1, 2, -1, -1}));
  EXPECT_EQ(plan.row_slot, (Ids{0, 0, 0, -1, 1, 1, -1, -1, 1, 0, -1, -1}));
  EXPECT_EQ(plan.assignment_row, (Ids{0, 4, 1, 8, 9, -1, 2, 5, -1, -1}));
  EXPECT_EQ(plan.totals, (Ids{7, 12, 0, 3}));
}

TEST(Examples, TransformerEngineIndexMap) {
  // Sorted stably by id as unsigned: (t0,1) (t1,0) (t0,0) (t2,1) | (t1,1) and (t2,0) have none.
  const Ids ids = {2, 0, 1, -1, -1, 2};
  EXPECT_EQ(te_index_map(ids, 3, 2, 4), (Ids{2, 1, -1, 0, -1, 3}));
  EXPECT_EQ(te_index_map({2, 0, 1, 0, 1, 2}, 3, 2, 0), (Ids{4, 2, 3, 0, 1, 5}));
  EXPECT_EQ(te_index_map({2, 0, 1, 0, 1, 2}, 3, 2, 4), (Ids{-1, 2, 3, 0, 1, -1}));
}

// Salmon et al., Random123 known answers of Philox4x32-10.
TEST(Examples, Philox) {
  EXPECT_EQ(philox(0, 0), 0x6627e8d5u);
}

TEST(Examples, Rounding) {
  EXPECT_EQ(round_to(Rounding::kBf16, 1 + 0x1p-8), 1.0);         // tie to even
  EXPECT_EQ(round_to(Rounding::kBf16, 1 + 0x3p-8), 1 + 0x1p-6);  // tie to even
  EXPECT_EQ(round_to(Rounding::kBf16, 1 + 0x1.1p-8), 1 + 0x1p-7);
  EXPECT_EQ(round_to(Rounding::kFp16, 0x1.8p-25), 0x1p-24);  // subnormal
  EXPECT_EQ(round_to(Rounding::kFp16, 65520.0), INFINITY);
  EXPECT_EQ(round_to(Rounding::kFp16, 65519.0), 65504.0);
  EXPECT_EQ(round_to(Rounding::kFp32, 1 + 0x1p-24), 1.0);
}

TEST(Examples, BiasUpdate) {
  Vec bias = {0.5, 0.5, 0.5};
  bias_update({4, 2, 0}, 0.25, &bias);
  EXPECT_EQ(bias, (Vec{0.25, 0.5, 0.75}));
}

}  // namespace
}  // namespace moec::oracle
