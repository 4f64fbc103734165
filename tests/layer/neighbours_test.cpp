// SPDX-License-Identifier: Apache-2.0
// A token's y, d_x and d_routing_weights have the same bits whatever the other tokens of the call
// hold: other values, NaN, or no expert at all. Of plain weights and of every format, wherever the
// rows of an expert stay as many that the same kernels serve them. Shown once to fail: a combine
// that adds 0 times the row before.
#include <gtest/gtest.h>

#include <cmath>
#include <numeric>
#include <string>

#include "support/layer_check.h"
#include "support/quant_draw.h"
#include "support/skip.h"

namespace moec::test {
namespace {

using oracle::Vec;

constexpr int kExperts = 3, kTopK = 2;

bool is_kept(int token) {
  return token % 2 == 1;
}
// Each expert has two thirds of all tokens, and of those that are kept.
void route(QuantProblem* p, int tokens, Random* random) {
  p->tokens = tokens;
  p->top_k = kTopK;
  p->ids.clear();
  p->routing_weights.clear();
  for (int t = 0; t < tokens; ++t) {
    const int first = t / 2 % kExperts;
    p->ids.insert(p->ids.end(), {first, (first + 1) % kExperts});
    for (int slot = 0; slot < kTopK; ++slot)
      p->routing_weights.push_back(
          oracle::round_to(oracle::Rounding::kFp32, random->uniform() + 0.25));
  }
  for (Vec* v : {&p->x, &p->d_y}) {
    *v = random->normals(size_t(tokens) * size_t(p->hidden));
    for (double& value : *v) value = oracle::round_to(rounding_of(p->dtype), value);
  }
}
// Calls change(value) for each value of x and d_y of the tokens that are not kept.
template <class Change>
QuantProblem with_others(QuantProblem p, Change change) {
  for (Vec* v : {&p.x, &p.d_y})
    for (int t = 0; t < p.tokens; ++t)
      for (int h = 0; h < p.hidden && !is_kept(t); ++h) {
        double& value = (*v)[size_t(t) * size_t(p.hidden) + size_t(h)];
        value = change(value);
      }
  return p;
}
QuantProblem without_others(QuantProblem p) {
  for (int i = 0; i < p.tokens * p.top_k; ++i)
    if (!is_kept(i / p.top_k)) p.ids[size_t(i)] = -1;
  return p;
}

void expect_kept(const char* name, const Vec& got, const Vec& want, int columns) {
  ASSERT_EQ(got.size(), want.size()) << name;
  for (size_t i = 0; i < got.size(); ++i) {
    if (!is_kept(int(i) / columns)) continue;
    ASSERT_FALSE(std::isnan(want[i])) << name << " of token " << i / size_t(columns);
    ASSERT_EQ(got[i], want[i]) << name << " of token " << i / size_t(columns);
  }
}
void expect_same_tokens(const char* others, const QuantProblem& p, const QuantResults& want,
                        bool as_values) {
  SCOPED_TRACE(others);
  const QuantResults got = run(p, as_values);
  ASSERT_EQ(got.status, MOEC_OK) << got.message;
  expect_kept("y", got.y, want.y, p.hidden);
  expect_kept("d_x", got.d_x, want.d_x, p.hidden);
  expect_kept("d_routing_weights", got.d_routing_weights, want.d_routing_weights, p.top_k);
}

void check_tokens(QuantProblem p, bool as_values, Random* random) {
  // 4 rows an expert, and 80, of which 40 are kept: more than any kernel of few rows takes.
  for (const int tokens : {6, 120}) {
    SCOPED_TRACE("tokens " + std::to_string(tokens));
    route(&p, tokens, random);
    const QuantResults want = run(p, as_values);
    ASSERT_EQ(want.status, MOEC_OK) << want.message;
    const auto larger = [&](double v) { return oracle::round_to(rounding_of(p.dtype), 3 - 5 * v); };
    expect_same_tokens("others", with_others(p, larger), want, as_values);
    expect_same_tokens("NaN", with_others(p, [](double) { return NAN; }), want, as_values);
    if (tokens > 6) expect_same_tokens("absent", without_others(p), want, as_values);
  }
}

class Neighbours : public testing::TestWithParam<QuantCase> {};
INSTANTIATE_TEST_SUITE_P(Formats, Neighbours, testing::ValuesIn(kQuantCases),
                         [](const auto& one) { return std::string(one.param.name); });

QuantProblem problem_of(const QuantCase& c, bool per_expert, moec_dtype dtype, Random* random) {
  const int multiple = std::lcm(64, std::lcm(c.multiple_n, c.multiple_k));
  const bool in_out = c.only_in_out;
  const QuantShape shape = {per_expert ? MOEC_GATE_SPLIT : MOEC_GATE_THEN_UP,
                            in_out,
                            in_out,
                            per_expert,
                            rounded_up(128, multiple),
                            rounded_up(64, multiple)};
  return random_quant_problem(c, shape, dtype, 1, random, kExperts);
}

TEST_P(Neighbours, LeaveTheBitsOfATokenAlone) {
  SCOPED_TRACE(seed_note());
  Random random(81);
  for (const Type& type : kTypes) {
    SCOPED_TRACE(type.name);
    check_tokens(problem_of(GetParam(), &type == kTypes, type.dtype, &random), false, &random);
  }
}

// The values of one format are as good as those of another.
TEST(Plain, NeighboursLeaveTheBitsOfATokenAlone) {
  SCOPED_TRACE(seed_note());
  Random random(82);
  for (const bool per_expert : {false, true})
    for (const Type& type : kTypes) {
      SCOPED_TRACE(type.name);
      check_tokens(problem_of(kQuantCases[0], per_expert, type.dtype, &random), true, &random);
    }
}

}  // namespace
}  // namespace moec::test
