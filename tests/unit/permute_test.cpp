// SPDX-License-Identifier: Apache-2.0
// Permute, unpermute and their gradients beside the oracle, in every dtype, with rows wider than a
// block.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <string>

#include "support/compare.h"
#include "support/random.h"
#include "unit/plan_case.h"

namespace moec::test {
namespace {

struct RowsCase {
  const char* name;
  PlanCase plan;
  int width;
  moec_dtype dtype;
  double limit;
};
void PrintTo(const RowsCase& c, std::ostream* out) {
  *out << c.name;
}
const RowsCase kCases[] = {
    {"f32", {.align = 8}, 33, MOEC_F32, 1e-6},
    {"f32_wide", {.tokens = 7}, 2501, MOEC_F32, 1e-6},
    {"bf16", {.zero = 3, .align = 4}, 96, MOEC_BF16, 8e-3},
    {"bf16_narrow", {}, 1, MOEC_BF16, 8e-3},
    {"f16", {.begin = 2, .end = 6, .align = 16}, 1057, MOEC_F16, 1e-3},
    {"capacity", {.drop = MOEC_DROP_BY_WEIGHT, .capacity = 5}, 31, MOEC_F32, 1e-6},
    {"no_tokens", {.tokens = 0, .align = 4}, 8, MOEC_F32, 0},
    {"choice",
     {.experts = 6, .top_k = 0, .align = 4, .kind = MOEC_PLAN_EXPERT_CHOICE, .capacity = 9},
     48,
     MOEC_F32,
     1e-6},
};

oracle::Vec squares(oracle::Vec values) {
  for (double& v : values) v *= v;
  return values;
}

// A plan, the oracle's view of it (slots = E for expert choice), and rows of data as stored.
struct Problem {
  const RowsCase& c;
  CpuDevice device;
  PlanMemory plan;
  oracle::Plan want;
  int slots;
  size_t T, P, W;
  std::vector<float> weights;  // merging weights [T,K]; every 7th is 0
  Stored x, rows, d_y, residual;

  explicit Problem(const RowsCase& test, int32_t threads = 2)
      : c(test),
        device(threads),
        plan(c.plan, device),
        slots(c.plan.top_k ? c.plan.top_k : c.plan.experts),
        T(size_t(c.plan.tokens)),
        P(size_t(c.plan.max_rows()) + 3),
        W(size_t(c.width)) {
    Random random;
    build(random);
    for (size_t a = 0; a < T * size_t(c.plan.top_k); ++a)
      weights.push_back(a % 7 == 3 ? 0.0f : float(random.normal()));
    x = {c.dtype, random.normals(T * W)};
    rows = {c.dtype, random.normals(P * W)};
    d_y = {c.dtype, random.normals(T * W)};
    residual = {c.dtype, random.normals(T * W)};
  }

  void build(Random& random) {
    const bool choice = c.plan.kind == MOEC_PLAN_EXPERT_CHOICE;
    std::vector<int32_t> ids;
    std::vector<float> values;
    for (size_t a = 0; a < T * size_t(slots); ++a) {
      ids.push_back(int32_t(random.below(c.plan.experts + c.plan.zero + 1)) - 1);
      values.push_back(a % 5 == 2 ? 0.0f : float(random.normal()));
    }
    PlanSource source = {};
    source.expert_ids = {ids.data(), MOEC_I32};
    source.routing_weights = source.scores = values.data();
    cpu::build_plan(device, source, plan.view);
    oracle::Vec wide(values.begin(), values.end());
    if (choice) {
      const auto route =
          oracle::expert_choice(wide, c.plan.tokens, c.plan.experts, c.plan.capacity, {});
      ids = route.ids, wide = route.weights;
    }
    want = oracle::build_plan(c.plan.config(), c.plan.tokens, slots, ids, wide);
  }
  std::vector<double> used_rows(const Stored& all) const {  // those of the oracle's plan
    std::vector<double> values = all.values();
    values.resize(want.row_token.size() * W);
    return values;
  }
};

class RowsTest : public testing::TestWithParam<RowsCase> {};
INSTANTIATE_TEST_SUITE_P(cases, RowsTest, testing::ValuesIn(kCases),
                         [](const auto& test) { return std::string(test.param.name); });

// Shown to fail when: padding rows keep their bytes, zero-weight rows are copied, the rest of the
// output is left alone.
TEST_P(RowsTest, permute) {
  Problem p(GetParam());
  const size_t bytes = size_t(dtype_bytes(p.c.dtype));
  Stored rows(p.c.dtype, p.P * p.W), scales(MOEC_U8, p.P * 3);
  std::vector<uint8_t> x_scale(p.T * 3), row_scale(p.P * 3, 77);
  for (size_t i = 0; i < x_scale.size(); ++i) x_scale[i] = uint8_t(i % 251);
  std::vector<float> row_weight(p.P, NAN);
  PermuteArgs args = {};
  args.plan = &p.plan.view;
  args.row_bytes = int64_t(p.W * bytes), args.scale_bytes = 3, args.out_rows = int64_t(p.P);
  args.x = p.x.data(), args.rows = rows.data();
  args.x_scale = x_scale.data(), args.row_scale = row_scale.data();
  cpu::permute(p.device, args);
  const oracle::Vec want = oracle::permute(p.want, p.x.values(), p.c.width);
  std::vector<double> got = rows.values();
  for (size_t i = 0; i < got.size(); ++i) ASSERT_EQ(got[i], i < want.size() ? want[i] : 0.0) << i;
  for (size_t r = 0; r < p.P; ++r) {
    const int token = r < p.want.row_token.size() ? p.want.row_token[r] : -1;
    ASSERT_EQ(row_scale[r * 3 + 1], token < 0 ? 0 : x_scale[size_t(token) * 3 + 1]) << r;
  }

  args.row_weight = row_weight.data();  // now rows of weight 0 are zero
  cpu::permute(p.device, args);
  got = rows.values();
  for (size_t r = 0; r < p.P; ++r) {
    const double weight = r < p.want.row_weight.size() ? p.want.row_weight[r] : 0.0;
    ASSERT_EQ(double(row_weight[r]), weight) << r;
    for (size_t i = r * p.W; i < (r + 1) * p.W; ++i)
      ASSERT_EQ(got[i], weight == 0 ? 0.0 : want[i]) << r;
  }
}

// Shown to fail when a dropped slot counts, slots are summed in bf16, the residual is forgotten.
TEST_P(RowsTest, unpermute) {
  Problem p(GetParam());
  for (const bool weighted : {false, true}) {
    Stored y(p.c.dtype, p.T * p.W);
    UnpermuteArgs args = {&p.plan.view, p.c.width,         p.c.dtype, p.rows.data(),
                          nullptr,      p.residual.data(), y.data()};
    oracle::Vec weights;
    if (weighted && p.c.plan.top_k) {
      args.routing_weights = p.weights.data();
      weights.assign(p.weights.begin(), p.weights.end());
    }
    cpu::unpermute(p.device, args);
    oracle::Vec want = oracle::unpermute(p.want, p.c.plan.tokens, p.slots, p.used_rows(p.rows),
                                         weights, p.c.width);
    const std::vector<double> residual = p.residual.values();
    for (size_t i = 0; i < want.size(); ++i) want[i] += residual[i];
    EXPECT_LE(row_error(y.values(), want, p.W).error, p.c.limit) << weighted;

    Stored in_place = p.residual;  // y may be the residual
    args.residual = args.y = in_place.data();
    cpu::unpermute(p.device, args);
    EXPECT_EQ(in_place.bytes(), y.bytes());
  }
}

TEST_P(RowsTest, gradients) {
  Problem p(GetParam());
  const auto K = size_t(p.c.plan.top_k);
  Stored d_x(p.c.dtype, p.T * p.W), d_rows(p.c.dtype, p.P * p.W);
  std::vector<float> d_routing_weights(p.T * K, NAN), d_row_weight(p.P, NAN);
  for (size_t r = 0; r < p.want.row_token.size(); ++r) d_row_weight[r] = float(r) + 1;
  cpu::permute_backward(p.device, {&p.plan.view, p.c.width, p.c.dtype, p.rows.data(),
                                   d_row_weight.data(), d_x.data(), d_routing_weights.data()});
  const oracle::Vec want_x =
      oracle::permute_backward(p.want, p.c.plan.tokens, p.slots, p.used_rows(p.rows), p.c.width);
  EXPECT_LE(row_error(d_x.values(), want_x, p.W).error, p.c.limit);
  for (size_t a = 0; a < d_routing_weights.size(); ++a) {
    const int row = p.want.assignment_row[a];
    ASSERT_EQ(d_routing_weights[a], row < 0 ? 0.0f : float(row) + 1) << a;
  }

  const oracle::Vec weights(p.weights.begin(), p.weights.end());
  oracle::Vec want_rows, want_weights;
  oracle::unpermute_backward(p.want, p.slots, p.used_rows(p.rows), K ? weights : oracle::Vec(),
                             p.d_y.values(), p.c.width, &want_rows, &want_weights);
  cpu::unpermute_backward(p.device, {&p.plan.view, p.c.width, int64_t(p.P), p.c.dtype, p.d_y.data(),
                                     p.rows.data(), K ? p.weights.data() : nullptr, d_rows.data(),
                                     K ? d_routing_weights.data() : nullptr});
  want_rows.resize(p.P * p.W, 0.0);  // padding and what follows is zero
  EXPECT_LE(row_error(d_rows.values(), want_rows, p.W).error, p.c.limit);
  if (!K) return;
  // A weight's gradient is a sum over the width: its size where the terms do not cancel.
  oracle::Vec not_wanted, terms;
  oracle::unpermute_backward(p.want, p.slots, squares(p.used_rows(p.rows)), {},
                             squares(p.d_y.values()), p.c.width, &not_wanted, &terms);
  for (double& v : terms) v = std::sqrt(v);
  EXPECT_LE(row_error(d_routing_weights, want_weights, K, kRowFloor, terms).error, 2e-6);
}

TEST_P(RowsTest, bits_depend_neither_on_threads_nor_on_the_instruction_set) {
  const auto run = [](int32_t threads) {
    Problem p(GetParam(), threads);
    const bool weighted = p.c.plan.top_k != 0;
    Stored y(p.c.dtype, p.T * p.W), d_rows(p.c.dtype, p.P * p.W);
    std::vector<float> d_routing_weights(p.weights.size(), NAN);
    const float* const weights = weighted ? p.weights.data() : nullptr;
    cpu::unpermute(p.device, {&p.plan.view, p.c.width, p.c.dtype, p.rows.data(), weights,
                              p.residual.data(), y.data()});
    cpu::unpermute_backward(
        p.device, {&p.plan.view, p.c.width, int64_t(p.P), p.c.dtype, p.d_y.data(), p.rows.data(),
                   weights, d_rows.data(), weighted ? d_routing_weights.data() : nullptr});
    return std::tuple(y.bytes(), d_rows.bytes(), d_routing_weights);
  };
  const auto one = run(1);
  EXPECT_TRUE(one == run(3));
  for (const std::string& isa : isa_names()) {
    cpu::select_isa(isa.c_str());
    EXPECT_TRUE(one == run(2)) << isa;
  }
  cpu::select_isa(nullptr);
}

TEST(Rows, zero_weight_skips_what_is_not_finite) {
  const PlanCase c = {.tokens = 1, .experts = 2, .top_k = 2};
  const CpuDevice device(1);
  PlanMemory plan(c, device);
  std::vector<int32_t> ids = {0, 1};
  PlanSource source = {};
  source.expert_ids = {ids.data(), MOEC_I32};
  cpu::build_plan(device, source, plan.view);
  const std::vector<float> rows = {INFINITY, 2}, weights = {0, 3}, d_y = {NAN};
  float y = -1, d_rows[2] = {-1, -1};
  cpu::unpermute(device, {&plan.view, 1, MOEC_F32, rows.data(), weights.data(), nullptr, &y});
  EXPECT_EQ(y, 6);
  cpu::unpermute_backward(device, {&plan.view, 1, 2, MOEC_F32, d_y.data(), rows.data(),
                                   weights.data(), d_rows, nullptr});
  EXPECT_EQ(d_rows[0], 0);
}

}  // namespace
}  // namespace moec::test
