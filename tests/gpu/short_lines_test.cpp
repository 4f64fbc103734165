// SPDX-License-Identifier: Apache-2.0
// Frozen experts of few rows whose down projection has many features and few inputs, against the
// oracle, in every format: where lines of codes are short and tiles many, CTAs of few rows have two
// warps (sm80/few_lines.cu).
#include <numeric>
#include <string>
#include <vector>

#include "support/compare.h"
#include "support/layer_check.h"
#include "value_bits.h"

namespace moec::test {
namespace {

const testing::Environment* const kPortable =
    testing::AddGlobalTestEnvironment(new OnePath("portable", false));

// 64 features a tile, for each expert: more than 1,024 tiles of down.
constexpr int kExperts = 5, kHidden = 64 * 210, kInter = 128;

std::vector<QuantCase> cases() {
  std::vector<QuantCase> all = kQuantCases;
  all.push_back({.name = "int4_g32_bf16",
                 .scheme = oracle::Scheme::kInt4,
                 .block_k = 32,
                 .scale_type = oracle::Number::kBf16});
  return all;
}

class ShortLines : public testing::TestWithParam<QuantCase> {};
INSTANTIATE_TEST_SUITE_P(Schemes, ShortLines, testing::ValuesIn(cases()),
                         [](const auto& one) { return std::string(one.param.name); });

TEST_P(ShortLines, MatchTheOracle) {
  if (is_small_run() && !runs_when_small(GetParam())) GTEST_SKIP() << "another one runs";
  SCOPED_TRACE(seed_note());
  const QuantCase& c = GetParam();
  const int multiple = std::lcm(c.multiple_n, c.multiple_k);
  const QuantShape shape = {MOEC_GATE_THEN_UP,
                            c.only_in_out,
                            c.only_in_out,
                            false,
                            rounded_up(kHidden, multiple),
                            rounded_up(kInter, multiple)};
  Random random(35);
  QuantProblem p = random_quant_problem(c, shape, MOEC_BF16, 18, &random, kExperts);
  const QuantResults got = run(p, false), want = reference(p);
  ASSERT_EQ(got.status, MOEC_OK) << got.message;
  const RowError error = row_error(got.y, want.y, size_t(p.hidden), kTypicalRow, {});
  EXPECT_LE(error.error, 2e-2) << error;
}

}  // namespace
}  // namespace moec::test
