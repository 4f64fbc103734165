// SPDX-License-Identifier: Apache-2.0
// Shapes that no tile divides, in every dtype: H and I from {31, 33, 96, 1057}, with 289 for the
// second 1057 of a pair, which takes longer than all others; experts with 0, 1, 4, 5, 31, 33 and
// 300 rows, ids given, inputs rounded to the dtype. Forward and every gradient against the oracle;
// the expert without rows has gradients of exactly 0; one and three threads give the same bits. Run
// once per instruction set (MOEC_CPU_ISA).
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <map>
#include <numeric>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "cases/feature_cases.h"
#include "support/layer_check.h"
#include "support/random.h"
#include "support/skip.h"

namespace moec::test {
namespace {

using oracle::Vec;

constexpr int kWidths[] = {31, 33, 96, 1057};
constexpr int kRows[] = {0, 1, 4, 5, 31, 33, 226, 300, 300};
constexpr int kExperts = static_cast<int>(std::size(kRows));
constexpr int kTokens = 300;
// Each token has three experts (226 rows make the numbers come out): a row of the routing weights'
// gradient is K inner products, and one or two of them cancel to 1 % of the largest row too often.
constexpr int kTopK = 3;

// Every token has both experts of 300 rows; its third slot belongs to one of the others. Which slot
// is which alternates at random.
oracle::Ids given_ids() {
  oracle::Ids others;
  for (int e = 0; e + 2 < kExperts; ++e) others.insert(others.end(), size_t(kRows[e]), e);
  Random random(3);
  const auto shuffle = [&](auto first, auto last) {
    for (auto n = last - first; n > 1; --n)
      std::swap(first[n - 1], first[static_cast<size_t>(random.below(n))]);
  };
  shuffle(others.begin(), others.end());
  oracle::Ids ids;
  for (int other : others) {
    ids.insert(ids.end(), {other, kExperts - 2, kExperts - 1});
    shuffle(ids.end() - kTopK, ids.end());
  }
  return ids;
}

struct Problem {
  oracle::Config config;
  oracle::Inputs in;
  Vec d_y;
};

std::string shape_name(int hidden, int inter) {
  return std::string("H").append(std::to_string(hidden)).append("_I").append(std::to_string(inter));
}

Problem make_problem(int hidden, int inter) {
  const std::string name = shape_name(hidden, inter);
  const auto matrix = static_cast<size_t>(kExperts * hidden * inter);
  const auto batch = static_cast<size_t>(kTokens * hidden);
  Problem p;
  p.config.router.num_experts = kExperts;
  p.config.router.top_k = kTopK;
  p.config.router.select = oracle::Select::kGiven;
  p.config.router.norm = oracle::Norm::kSum;
  p.config.experts.hidden = hidden;
  p.config.experts.inter = inter;
  p.in.tokens = kTokens;
  p.in.given_ids = given_ids();
  const auto fill = [&](Vec* v, const char* what, size_t count, double scale) {
    *v = oracle::random_values(name + what, count, scale);
  };
  const double by_hidden = 1 / std::sqrt(hidden);
  fill(&p.in.x, ".x", batch, 1);
  fill(&p.d_y, ".d_y", batch, 1);
  fill(&p.in.gate_weight, ".router", static_cast<size_t>(kExperts * hidden), by_hidden);
  fill(&p.in.experts.gate, ".gate", matrix, by_hidden);
  fill(&p.in.experts.up, ".up", matrix, by_hidden);
  fill(&p.in.experts.down, ".down", matrix, 1 / std::sqrt(inter));
  fill(&p.in.experts.gate_bias, ".gate_bias", static_cast<size_t>(kExperts * inter), 0.5);
  fill(&p.in.experts.up_bias, ".up_bias", static_cast<size_t>(kExperts * inter), 0.5);
  fill(&p.in.experts.down_bias, ".down_bias", static_cast<size_t>(kExperts * hidden), 0.5);
  return p;
}

// So that one evaluation of the oracle serves both.
void round_problem(Problem* p) {
  for (Vec* v : {&p->in.x, &p->d_y, &p->in.gate_weight, &p->in.experts.gate, &p->in.experts.up,
                 &p->in.experts.down, &p->in.experts.gate_bias, &p->in.experts.up_bias,
                 &p->in.experts.down_bias})
    oracle::round_to_all(v);
}

bool all_zero(const Vec& values, size_t count) {
  return std::all_of(values.begin(), values.begin() + static_cast<std::ptrdiff_t>(count),
                     [](double v) { return v == 0; });
}

void check_type(const Problem& p, const OracleRun& exact, const Type& type) {
  SCOPED_TRACE(type.name);
  RunOptions options;
  options.dtype = type.dtype;
  options.num_threads = 1;
  options.only_bytes = true;
  const LayerRun first = run_layer(p.config, p.in, p.d_y, {}, options);
  options.num_threads = 3;
  options.only_bytes = false;
  const LayerRun run = run_layer(p.config, p.in, p.d_y, {}, options);
  std::optional<OracleRun> rounded;
  if (run.rounding.between != oracle::Rounding::kNone) {
    rounded = run_oracle(as_rounded(p.config, run.rounding), p.in, p.d_y, {});
    expect_matches(run, exact, p.config, p.in, 2 * type.tolerance, kTypicalRow);
  }
  const OracleRun& reference = rounded ? *rounded : exact;
  const double worst = expect_matches(run, reference, p.config, p.in, type.tolerance);
  ASSERT_EQ(run.status, MOEC_OK);
  const auto one = static_cast<size_t>(p.config.experts.hidden * p.config.experts.inter);
  EXPECT_TRUE(all_zero(run.grads.experts.gate, one) && all_zero(run.grads.experts.up, one) &&
              all_zero(run.grads.experts.down, one))
      << "the expert without rows has a gradient";
  EXPECT_TRUE(first.bytes == run.bytes) << "one and three threads give different bits";
  std::printf("H %4d I %4d %-4s worst %.2e of %.0e\n", p.config.experts.hidden,
              p.config.experts.inter, type.name, worst, type.tolerance);
}

std::vector<std::tuple<int, int>> all_shapes() {
  std::vector<std::tuple<int, int>> shapes;
  for (const int hidden : kWidths)
    for (const int inter : kWidths)
      shapes.emplace_back(hidden, hidden == 1057 && inter == 1057 ? 289 : inter);
  return shapes;
}

class SweepTest : public testing::TestWithParam<std::tuple<int, int>> {};

TEST_P(SweepTest, MatchesTheOracle) {
  SCOPED_TRACE(seed_note());
  const auto [hidden, inter] = GetParam();
  Problem p = make_problem(hidden, inter);
  for (const bool half : {false, true}) {
    if (half) round_problem(&p);
    const OracleRun reference = run_oracle(p.config, p.in, p.d_y, {});
    ASSERT_EQ(reference.layer.plan.counts, oracle::Ids(std::begin(kRows), std::end(kRows)));
    for (const Type& type : kTypes)
      if ((type.dtype != MOEC_F32) == half) check_type(p, reference, type);
  }
}

INSTANTIATE_TEST_SUITE_P(Layer, SweepTest, testing::ValuesIn(all_shapes()), [](const auto& one) {
  return shape_name(std::get<0>(one.param), std::get<1>(one.param));
});

}  // namespace
}  // namespace moec::test
