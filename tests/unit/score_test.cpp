// SPDX-License-Identifier: Apache-2.0
// Every score against the oracle's own formulas, and the rows of each instruction set against the
// scalar ones, bit for bit.
// Mutations seen to fail: the slope of sqrt_softplus without its branch near 0; sigmoid's slope
// taken at the logit; identity not negative; the largest logit left out of softmax.
#include "math/score.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <iterator>
#include <string>
#include <vector>

#include "backend/cpu/score_row.h"
#include "backend/cpu/vectorised.h"
#include "oracle/moe_oracle.h"
#include "support/random.h"
#include "unit/isas.h"

namespace moec {
namespace {

using math::Scores;

// Logits around 0 and far out.
std::vector<float> logits() {
  std::vector<float> z = {0.0f, -0.0f, 1e-6f, -1e-3f, 30.0f, -30.0f, -16.0f, -87.0f, -90.0f, 1e30f};
  test::Random random(3);
  while (z.size() < 96) z.push_back(float(3 * random.normal()));
  return z;
}

// terms: the size of what ref is a difference of.
void expect_near(double got, double ref, const std::string& what, double terms = 0) {
  EXPECT_LE(std::abs(got - ref), 2e-6 * std::abs(ref) + 2e-7 * terms + 1e-37)
      << what << ": " << got;
}

TEST(Score, ListIsTheOracles) {
  ASSERT_EQ(Scores::kCount, std::size(oracle::kScores));
  for (uint32_t i = 0; i < Scores::kCount; ++i) {
    EXPECT_STREQ(Scores::kInfos[i].name, oracle::kScores[i].name);
    EXPECT_EQ(Scores::kInfos[i].negative, oracle::kScores[i].negative) << oracle::kScores[i].name;
  }
}

TEST(Score, MatchesOracle) {
  Scores::for_each([]<class Kind>() {
    if constexpr (!Kind::kInfo.over_row) {
      const auto score = oracle::Score(Kind::kInfo.kind);
      for (const float z : logits()) {
        const std::string what = std::string(Kind::kInfo.name) + "(" + std::to_string(z) + ")";
        const float value = Kind::value(z);
        const double exact = oracle::score_value(score, z);
        expect_near(value, exact, what);
        expect_near(Kind::slope(z, value), oracle::score_slope(score, z, exact), what + " slope",
                    std::min(std::abs(exact), 1.0));
        EXPECT_EQ(math::score_slope(Kind::kInfo.kind, z, value), Kind::slope(z, value)) << what;
      }
      EXPECT_TRUE(std::isnan(Kind::value(NAN))) << Kind::kInfo.name;
    }
  });
}

TEST(Score, RowsHaveTheBitsOfScalars) {
  const std::vector<float> z = logits();
  const auto lanes = int64_t(z.size());
  test::on_each_isa([&] {
    Scores::for_each([&]<class Kind>() {
      std::vector<float> row(z.size()), expected;
      cpu::vectorised<cpu::score_row>(Kind::kInfo.kind, z.data(), lanes, row.data());
      if constexpr (Kind::kInfo.over_row) {
        const float largest = *std::max_element(z.begin(), z.end());
        for (const float logit : z) expected.push_back(Kind::value(logit, largest));
        const float sum = cpu::row_sum(expected.data(), lanes);
        for (float& share : expected) share /= sum;
      } else {
        for (const float logit : z) expected.push_back(Kind::value(logit));
      }
      EXPECT_EQ(row, expected) << Kind::kInfo.name;
    });
  });
}

}  // namespace
}  // namespace moec
