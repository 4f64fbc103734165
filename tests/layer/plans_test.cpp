// SPDX-License-Identifier: Apache-2.0
// Plans and row primitives through the public C API against the oracle: every field, from ids, maps
// and scores, with padding, capacity and local ranges; save and restore; permute and unpermute.
#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "cases/feature_cases.h"
#include "support/compare.h"
#include "support/handles.h"
#include "support/plan_check.h"
#include "support/random.h"
#include "support/skip.h"
#include "support/tensors.h"

namespace moec::test {
namespace {

using oracle::Ids;
using oracle::Vec;

constexpr int kTokens = 77, kExperts = 9, kZero = 2, kTopK = 3, kHidden = 13;
constexpr double kTolerance = 2e-5;

struct PlanCase {
  std::string name;
  int begin = 0, end = 0, align = 1;
  oracle::Drop drop = oracle::Drop::kNone;
  int64_t capacity = 0;
  double factor = 0;
};
const PlanCase kCases[] = {
    {.name = "plain"},
    {.name = "aligned", .align = 8},
    {.name = "wide_alignment", .align = 512},
    {.name = "range", .begin = 2, .end = 7, .align = 4},
    {.name = "last_expert", .begin = 8, .end = 9},
    {.name = "position", .align = 4, .drop = oracle::Drop::kByPosition, .capacity = 10},
    {.name = "weight", .drop = oracle::Drop::kByWeight, .capacity = 7},
    {.name = "weight_aligned_range",
     .begin = 1,
     .end = 5,
     .align = 16,
     .drop = oracle::Drop::kByWeight,
     .capacity = 9},
    {.name = "factor", .drop = oracle::Drop::kByPosition, .factor = 0.5},
};
void PrintTo(const PlanCase& c, std::ostream* out) {
  *out << c.name;
}

oracle::Config config_of(const PlanCase& c) {
  oracle::Config config;
  config.router.num_experts = kExperts;
  config.router.num_zero_experts = kZero;
  config.router.top_k = kTopK;
  config.plan = {c.begin, c.end, c.align, c.drop, c.capacity, c.factor};
  return config;
}

moec_plan_desc desc_of(const PlanCase& c) {
  auto desc = sized<moec_plan_desc>();
  desc.max_tokens = kTokens + 5;
  desc.num_experts = kExperts;
  desc.num_zero_experts = kZero;
  desc.top_k = kTopK;
  desc.expert_begin = c.begin;
  desc.expert_end = c.end;
  desc.align = c.align;
  desc.drop = static_cast<uint32_t>(c.drop);
  desc.capacity = c.capacity;
  desc.capacity_factor = static_cast<float>(c.factor);
  return desc;
}

// Distinct ids of each token, some of them -1, identity or out of range; weights with ties.
struct Routing {
  Ids ids;
  Vec weights;
};
Routing make_routing() {
  Random random(11);
  Routing r;
  for (int t = 0; t < kTokens; ++t) {
    Ids pool;
    for (int id = -1; id < kExperts + kZero + 1; ++id) pool.push_back(id);
    for (int k = 0; k < kTopK; ++k) {
      const auto pick = static_cast<size_t>(random.below(static_cast<int64_t>(pool.size())));
      r.ids.push_back(pool[pick]);
      pool.erase(pool.begin() + static_cast<std::ptrdiff_t>(pick));
      r.weights.push_back(static_cast<double>(random.below(16)) / 16);
    }
  }
  return r;
}

class PlanTest : public testing::TestWithParam<PlanCase> {
 protected:
  void SetUp() override {
    const moec_plan_desc desc = desc_of(GetParam());
    uint64_t bytes = 0;
    int64_t rows = 0;
    check(moec_plan_size(&desc, &bytes, &rows));
    memory_ = tensors_.buffer(bytes);
    plan_ = make<PlanHandle>(moec_plan_create, test_context(), &desc, &memory_);
  }
  // Build from ids of a type and compare with the oracle.
  oracle::Plan build(moec_dtype dtype) {
    const moec_tensor ids = tensors_.input_ids(routing_.ids, dtype, {kTokens, kTopK});
    const moec_tensor weights = tensors_.input(routing_.weights, MOEC_F32, {kTokens, kTopK});
    check(moec_plan_from_topk(plan_.get(), &ids, &weights, nullptr));
    return oracle::build_plan(config_of(GetParam()), kTokens, kTopK, routing_.ids,
                              routing_.weights);
  }

  Tensors tensors_;
  moec_buffer memory_{};
  PlanHandle plan_;
  Routing routing_ = make_routing();
};

TEST_P(PlanTest, EveryFieldMatches) {
  SCOPED_TRACE(seed_note());
  for (moec_dtype dtype : {MOEC_I32, MOEC_I64}) {
    const oracle::Plan expected = build(dtype);
    expect_plan(plan_.get(), expected, routing_.weights);
  }
  EXPECT_TRUE(tensors_.neighbours_untouched());
}

TEST_P(PlanTest, SavedPlanComesBack) {
  SCOPED_TRACE(seed_note());
  const oracle::Plan expected = build(MOEC_I32);
  uint64_t need = 0;
  check(moec_plan_save_sync(plan_.get(), nullptr, 0, &need, nullptr));
  std::vector<uint8_t> saved(need);
  check(moec_plan_save_sync(plan_.get(), saved.data(), need, &need, nullptr));
  const moec_plan_desc desc = desc_of(GetParam());
  const moec_buffer* const own = nullptr;
  const auto other = make<PlanHandle>(moec_plan_create, test_context(), &desc, own);
  check(moec_plan_restore_sync(other.get(), saved.data(), need, nullptr));
  expect_plan(other.get(), expected, routing_.weights);
  for (size_t i = 0; i < saved.size(); i += 1 + saved.size() / 97) {
    saved[i] ^= 0x10;
    EXPECT_NE(moec_plan_restore_sync(other.get(), saved.data(), need, nullptr), MOEC_OK) << i;
    saved[i] ^= 0x10;
  }
}

TEST_P(PlanTest, RowsMoveAsTheOracleSays) {
  SCOPED_TRACE(seed_note());
  const oracle::Plan expected = build(MOEC_I32);
  const auto extent = static_cast<int64_t>(field(plan_.get(), MOEC_PLAN_ROW_TOKEN).size());
  const auto rows_of = [&](Vec rows) {  // with the plan's padded tail
    rows.resize(static_cast<size_t>(extent * kHidden), 0.0);
    return rows;
  };
  const Vec x = oracle::random_values("x", kTokens * kHidden);
  auto permute = sized<moec_permute_args>();
  permute.plan = plan_.get();
  permute.x = tensors_.input(x, MOEC_F32, {kTokens, kHidden});
  permute.rows = tensors_.output(MOEC_F32, {extent, kHidden});
  check(moec_permute(test_context(), &permute, nullptr));
  EXPECT_EQ(tensors_.read(permute.rows), rows_of(oracle::permute(expected, x, kHidden)));

  const Vec rows = oracle::random_values("rows", static_cast<size_t>(extent * kHidden));
  const Vec used(rows.begin(),
                 rows.begin() + static_cast<std::ptrdiff_t>(expected.row_token.size()) * kHidden);
  auto unpermute = sized<moec_unpermute_args>();
  unpermute.plan = plan_.get();
  unpermute.rows = tensors_.input(rows, MOEC_F32, {extent, kHidden});
  unpermute.routing_weights = tensors_.input(routing_.weights, MOEC_F32, {kTokens, kTopK});
  unpermute.residual = permute.x;
  unpermute.y = tensors_.output(MOEC_F32, {kTokens, kHidden});
  check(moec_unpermute(test_context(), &unpermute, nullptr));
  Vec y = oracle::unpermute(expected, kTokens, kTopK, used, routing_.weights, kHidden);
  for (size_t i = 0; i < y.size(); ++i) y[i] += x[i];
  EXPECT_LE(row_error(tensors_.read(unpermute.y), y, kHidden).error, kTolerance);

  auto back = sized<moec_permute_grad_args>();
  back.plan = plan_.get();
  back.d_rows = unpermute.rows;
  back.d_x = tensors_.output(MOEC_F32, {kTokens, kHidden});
  check(moec_permute_backward(test_context(), &back, nullptr));
  const Vec d_x = oracle::permute_backward(expected, kTokens, kTopK, used, kHidden);
  EXPECT_LE(row_error(tensors_.read(back.d_x), d_x, kHidden).error, kTolerance);

  auto grad = sized<moec_unpermute_grad_args>();
  grad.plan = plan_.get();
  grad.d_y = permute.x;
  grad.rows = unpermute.rows;
  grad.routing_weights = unpermute.routing_weights;
  grad.d_rows = tensors_.output(MOEC_F32, {extent, kHidden});
  grad.d_routing_weights = tensors_.output(MOEC_F32, {kTokens, kTopK});
  check(moec_unpermute_backward(test_context(), &grad, nullptr));
  Vec d_rows;
  Vec d_routing_weights;
  oracle::unpermute_backward(expected, kTopK, used, routing_.weights, x, kHidden, &d_rows,
                             &d_routing_weights);
  EXPECT_LE(row_error(tensors_.read(grad.d_rows), rows_of(d_rows), kHidden).error, kTolerance);
  EXPECT_LE(row_error(tensors_.read(grad.d_routing_weights), d_routing_weights, kTopK).error,
            kTolerance);
  EXPECT_TRUE(tensors_.neighbours_untouched());
}

INSTANTIATE_TEST_SUITE_P(Layer, PlanTest, testing::ValuesIn(kCases),
                         [](const auto& one) { return one.param.name; });

// A [T,E] map, and TransformerEngine's two maps of it.
TEST(PlanFromMap, MatchesTheOracle) {
  SCOPED_TRACE(seed_note());
  Random random(5);
  oracle::Mask map;
  Vec probs = oracle::random_values("probs", kTokens * kExperts);
  for (int t = 0; t < kTokens; ++t) {
    oracle::Mask row(kExperts, 0);
    for (int64_t n = random.below(kTopK + 1); n > 0; --n)
      row[static_cast<size_t>(random.below(kExperts))] = 1;
    map.insert(map.end(), row.begin(), row.end());
  }
  Ids ids;
  Vec weights;
  oracle::from_map(map, probs, kTokens, kExperts, kTopK, &ids, &weights);
  const moec_plan_desc desc = desc_of({.name = "map"});
  const moec_buffer* const own = nullptr;
  const auto plan = make<PlanHandle>(moec_plan_create, test_context(), &desc, own);
  for (moec_dtype dtype : {MOEC_U8, MOEC_BOOL, MOEC_I32}) {
    Tensors tensors;
    const moec_tensor routed = tensors.input_ids(map, dtype, {kTokens, kExperts});
    const moec_tensor values = tensors.input(probs, MOEC_F32, {kTokens, kExperts});
    check(moec_plan_from_map(plan.get(), &routed, &values, nullptr));
    expect_plan(plan.get(),
                oracle::build_plan(config_of({.name = "map"}), kTokens, kTopK, ids, weights),
                weights);
  }
  EXPECT_EQ(field(plan.get(), MOEC_PLAN_ROW_ID_MAP, {kTokens, 2 * kExperts + 1}),
            as_values(oracle::te_row_id_map(map, kTokens, kExperts)));
  const auto routed = std::count_if(ids.begin(), ids.end(), [](int id) { return id >= 0; });
  EXPECT_EQ(field(plan.get(), MOEC_PLAN_INDEX_MAP, {kTopK * kTokens}),
            as_values(oracle::te_index_map(ids, kTokens, kTopK, routed)));
}

}  // namespace
}  // namespace moec::test
