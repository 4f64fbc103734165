// SPDX-License-Identifier: Apache-2.0
// Experts of many rows on Hopper's kernels, whose codes become values in scratch once: bit for bit
// what the same kernels make of these values, in every format, layout and orientation, as stacks
// and as a tensor of each expert.
#include <algorithm>
#include <string>

#include "backend/cuda/weights/decoded_experts.h"
#include "value_bits.h"

namespace moec::test {
namespace {

const testing::Environment* const kHopperOnly =
    testing::AddGlobalTestEnvironment(new OnePath("sm90", true));

constexpr int64_t kMany = cuda::once_rows(cuda::Otherwise::kRowGemm, cuda::kSmallExpert + 1);
// Of large experts, which have wide tiles below.
constexpr int64_t kManyOfLarge = std::max(kMany, cuda::kWideBelow);
constexpr int64_t kFew = cuda::once_rows(cuda::Otherwise::kPortable, 1);
constexpr int kExperts = 4, kTopK = 2;  // of random_quant_problem
// Tokens of so many rows an expert on average.
constexpr int tokens_of(int64_t rows, int experts = kExperts) {
  return int(rows * experts / kTopK);
}

bool is_of_a_small_run(const QuantCase& c) {
  const std::string name = c.name;
  return name == "awq" || (!is_under("racecheck") &&
                           (name == "gptq_g_idx" || name == "nvfp4" || name == "gguf_q4_0"));
}

class Decoded : public testing::TestWithParam<QuantCase> {};
INSTANTIATE_TEST_SUITE_P(Hopper, Decoded, testing::ValuesIn(kQuantCases),
                         [](const auto& one) { return std::string(one.param.name); });

// Formats without kernels of their own, and the others where these do not take the matrices.
TEST_P(Decoded, HaveTheBitsOfTheirValues) {
  if (is_small_run() && !is_of_a_small_run(GetParam())) GTEST_SKIP() << "another one runs";
  SCOPED_TRACE(seed_note());
  Random random(71);
  for_each_form(GetParam(), tokens_of(kFew) + 3, &random,
                [](const QuantProblem& p, int) { expect_values(p, true); });
}
TEST_P(Decoded, HaveTheBitsOfTheirValuesBesideAnAdapter) {
  if (is_small_run()) GTEST_SKIP() << "those without one run";
  SCOPED_TRACE(seed_note());
  Random random(72);
  for_each_form(GetParam(), tokens_of(kFew) + 3, &random, [&](QuantProblem& p, int turn) {
    adapt(&p, turn % 2 ? 72 : 16, &random);
    expect_values(p, true);
  });
}
// So many rows that formats with kernels of their own are decoded once, too.
TEST_P(Decoded, OfManyRows) {
  if (is_small_run()) GTEST_SKIP() << "too large";
  SCOPED_TRACE(seed_note());
  Random random(73);
  for_each_form(GetParam(), tokens_of(kMany) + 3, &random, [](QuantProblem& p, int turn) {
    if (turn % 3 == 0) expect_values(p, true);
  });
}

// More experts than a turn has room for, and tiles of which there are several.
constexpr int kOfTurns = 16;
void expect_values_of_turns(const char* name, int64_t rows, int width = 1536) {
  if (is_small_run()) GTEST_SKIP() << "too large";
  SCOPED_TRACE(seed_note());
  SCOPED_TRACE(name);
  Random random(74);
  ASSERT_GT(int64_t(2) * width * width * kOfTurns, cuda::kDecodedBytes);
  for (const QuantCase& c : kQuantCases) {
    if (std::string(c.name) != name) continue;
    const QuantShape shape = {MOEC_GATE_THEN_UP, c.only_in_out, c.only_in_out, false, width, width};
    QuantProblem p =
        random_quant_problem(c, shape, MOEC_BF16, tokens_of(rows, kOfTurns), &random, kOfTurns);
    expect_values(p);
    adapt(&p, 16, &random);
    expect_values(p);
  }
}
TEST(Turns, OfAwq) {
  expect_values_of_turns("awq", kFew);
}
TEST(Turns, OfQ4) {
  expect_values_of_turns("gguf_q4_0", kFew);
}
TEST(Turns, OfMxfp4) {
  expect_values_of_turns("mxfp4", kManyOfLarge);
}
// So many rows that values of up and of grad down lie where those of a later product will.
TEST(Turns, InRowsOfALaterProduct) {
  constexpr int kWidth = 2112;
  static_assert(kManyOfLarge * kOfTurns * kWidth * 2 > cuda::kDecodedBytes);
  expect_values_of_turns("int8", kManyOfLarge, kWidth);
}

// With fewer rows they are left to other kernels, but where the portable path is slow.
TEST(Few, AreNotDecodedOnce) {
  Random random(75);
  for (const QuantCase& c : kQuantCases) {
    const bool quick = std::string(c.name) == "nvfp4";
    if (!quick && std::string(c.name) != "awq") continue;
    const bool in_out = c.only_in_out;
    const QuantShape shape = {MOEC_GATE_SPLIT, in_out, in_out, false, 64, 64};
    const auto status = [&](int tokens) {
      return run(random_quant_problem(c, shape, MOEC_BF16, tokens, &random), false).status;
    };
    EXPECT_EQ(status(tokens_of(kFew)), MOEC_OK);
    EXPECT_EQ(status(tokens_of(kFew) - 1), quick ? MOEC_E_UNSUPPORTED : MOEC_OK);
    EXPECT_EQ(status(1), quick ? MOEC_E_UNSUPPORTED : MOEC_OK);
  }
}

}  // namespace
}  // namespace moec::test
