// SPDX-License-Identifier: Apache-2.0
// Experts of codes along k whose products have wide tiles: beside what the same kernels make of
// their values, run after run with the same bits, and with rows of every number.
#include <numeric>
#include <string>
#include <vector>

#include "backend/cuda/weights/decoded_experts.h"
#include "value_bits.h"

namespace moec::test {
namespace {

const testing::Environment* const kHopperOnly =
    testing::AddGlobalTestEnvironment(new OnePath("sm90", true));

constexpr int kExperts = 4, kTopK = 2;  // of random_quant_problem
constexpr int tokens_of(int64_t rows) {
  return int(rows * kExperts / kTopK) + 3;
}

std::vector<QuantCase> cases() {
  std::vector<QuantCase> all =
      cases_of({"int8", "fp8_channel", "fp8_block128", "codebook4_64", "codebook4_32_bf16",
                "codebook4_nested", "mxfp4", "int4_g32"},
               {32, 128});
  all.push_back({.name = "int8_zeros", .scheme = oracle::Scheme::kInt8, .zeros = true});
  return all;
}

class Wide : public testing::TestWithParam<QuantCase> {};
INSTANTIATE_TEST_SUITE_P(Hopper, Wide, testing::ValuesIn(cases()),
                         [](const auto& one) { return std::string(one.param.name); });

// Integers whose scales are not of the weights' type are looked up, too.
bool has_table(const QuantCase& c) {
  return c.scheme == oracle::Scheme::kCodebook4 ||
         (c.scheme == oracle::Scheme::kInt4 && c.scale_type == oracle::Number::kF32);
}

// That up and down of a forward and both products of a backward have wide tiles, where the blocks
// of a stream end with lines, and the same bits each time. A backward of zero points has none, nor
// one of tables of small experts.
void expect_wide(const QuantCase& c, const QuantProblem& p, int runs) {
  Json described;
  const QuantResults first = run(p, false, &described);
  ASSERT_EQ(first.status, MOEC_OK) << first.message;
  const auto products = [&](const char* phase, const char* step) {
    int count = 0;
    for (const Json& entry : described.at(phase).at("kernels").array) {
      const Json* const wide = entry.find("wide");
      count += wide && wide->number == 1 && entry.at("step").string == step;
    }
    return count;
  };
  const int block = c.scheme == oracle::Scheme::kCodebook4 ? c.block_k : 1;
  const bool of_hidden = p.hidden % block == 0, of_inter = p.inter % block == 0;
  EXPECT_EQ(products("forward", "up"), of_hidden);
  EXPECT_EQ(products("forward", "down"), of_inter);
  const auto has_gradient = [&](int matrices) {
    const int64_t values = int64_t(matrices) * p.hidden * p.inter;
    return !c.zeros && !(has_table(c) && 2 * values <= cuda::kSmallExpert);
  };
  EXPECT_EQ(products("backward", "grad_down"), of_inter && has_gradient(1));
  EXPECT_EQ(products("backward", "grad_up"), of_hidden && has_gradient(2));
  for (int i = 1; i < runs; ++i) ASSERT_TRUE(run(p, false) == first) << "other bits in run " << i;
}

QuantProblem problem(const QuantCase& c, uint32_t layout, int turn, int64_t rows, Random* random) {
  constexpr int kHidden[] = {64, 200, 448, 1056, 2112}, kInter[] = {136, 64, 712, 320, 2080};
  const int multiple = std::lcm(32, std::lcm(c.multiple_n, c.multiple_k));
  const QuantShape shape = {layout,
                            false,
                            false,
                            false,
                            rounded_up(kHidden[turn], multiple),
                            rounded_up(kInter[turn], multiple)};
  QuantProblem p = random_quant_problem(c, shape, MOEC_BF16, tokens_of(rows), random);
  p.save = turn % 2 ? MOEC_SAVE_PREACT : MOEC_SAVE_INPUT;
  return p;
}

// k-blocks of an odd and an even number, one alone, feature tiles that are not whole; rows of up
// and down past several tiles; factors of one k-block and of two.
TEST_P(Wide, AreAlikeTheirValues) {
  const std::string name = GetParam().name;
  if (is_under("racecheck") && name != "mxfp4" && name != "codebook4_64")
    GTEST_SKIP() << "another one runs";
  SCOPED_TRACE(seed_note());
  Random random(76);
  int turn = 0;
  for (const uint32_t layout :
       {MOEC_GATE_SPLIT, MOEC_GATE_THEN_UP, MOEC_UP_THEN_GATE, MOEC_GATE_INTERLEAVED}) {
    if (is_small_run() && turn > 0) return;
    SCOPED_TRACE("layout " + std::to_string(layout));
    const int64_t rows = turn % 3 ? cuda::kWideFromOfSmall : 700;
    QuantProblem p = problem(GetParam(), layout, turn++, rows, &random);
    ASSERT_TRUE(may_have_wide_tiles(p));
    expect_values(p);
    expect_wide(GetParam(), p, 2);
    adapt(&p, turn % 4 < 2 ? 72 : 16, &random);
    expect_values(p);
  }
}

// Tables whose experts are not small: their backwards have wide tiles, too.
TEST_P(Wide, LargeTables) {
  if (!has_table(GetParam())) GTEST_SKIP() << "no table";
  if (is_small_run()) GTEST_SKIP() << "too large";
  SCOPED_TRACE(seed_note());
  Random random(79);
  for (const uint32_t layout : {MOEC_GATE_SPLIT, MOEC_GATE_INTERLEAVED}) {
    QuantProblem p = problem(GetParam(), layout, 4, cuda::kWideFromOfSmall + 50, &random);
    expect_values(p);
    expect_wide(GetParam(), p, 2);
    adapt(&p, 24, &random);
    expect_values(p);
  }
}

// A CTA has several tiles, and its codes come while others are multiplied. Mutation noted: codes of
// FP8 that are released while they are being read (zero_of() is a constant) give other bits in some
// run, in one program of three.
TEST_P(Wide, TilesOneAfterAnother) {
  if (is_small_run()) GTEST_SKIP() << "too large";
  SCOPED_TRACE(seed_note());
  Random random(78);
  const QuantShape shape = {MOEC_GATE_THEN_UP, false, false, false, 3072, 768};
  QuantProblem p = random_quant_problem(GetParam(), shape, MOEC_BF16, tokens_of(600), &random);
  for (size_t i = 0; i < p.ids.size(); ++i) p.ids[i] = int(i) % kExperts;
  expect_wide(GetParam(), p, 6);
  expect_values(p);
}

// Any number of rows of an expert, none, too.
TEST(Wide, RowsOfAnyNumber) {
  if (is_under("racecheck")) GTEST_SKIP() << "too large";
  SCOPED_TRACE(seed_note());
  Random random(77);
  for (const QuantCase& c : cases()) {
    if (std::string(c.name) != "int4_g32_bf16") continue;
    for (const int most : {0, 1, 31, 33, 65, 130, 161, 193, 225, 257, 300, 515}) {
      if (is_small_run() && most != 33) continue;
      SCOPED_TRACE("expert 1 has " + std::to_string(most) + " rows");
      QuantProblem p = problem(c, MOEC_GATE_THEN_UP, 1, 800, &random);
      int left = most;  // of expert 1; the others share the rest
      for (int t = 0; t < p.tokens; ++t) {
        const auto first = size_t(t) * size_t(p.top_k);
        p.ids[first] = left-- > 0 ? 1 : t % 2 * 2;
        p.ids[first + 1] = 3;
      }
      expect_values(p);
    }
  }
}

}  // namespace
}  // namespace moec::test
