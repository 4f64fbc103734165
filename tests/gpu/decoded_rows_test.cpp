// SPDX-License-Identifier: Apache-2.0
// Experts on the portable kernels whose codes these cannot read eight at once: values of some
// experts at a time, bit for bit what the same kernels make of these values, forward and backward,
// in every format, layout and orientation, with many rows, few and none.
#include <string>

#include "backend/cuda/weights/decoded_experts.h"
#include "value_bits.h"

namespace moec::test {
namespace {

const testing::Environment* const kPortableOnly =
    testing::AddGlobalTestEnvironment(new OnePath("portable", false));

// Formats that few_rows.cu never multiplies, whose sums are others.
bool is_never_of_few_rows(const QuantCase& c) {
  const std::string name = c.name;
  return name.starts_with("awq") || name.starts_with("gptq") || name.starts_with("gguf");
}

class DecodedRows : public testing::TestWithParam<QuantCase> {};
INSTANTIATE_TEST_SUITE_P(Portable, DecodedRows, testing::ValuesIn(kQuantCases),
                         [](const auto& one) { return std::string(one.param.name); });

void expect_values_of_forms(const QuantCase& c, int tokens, uint64_t stream, bool adapted = false) {
  SCOPED_TRACE(seed_note());
  Random random(stream);
  for_each_form(c, tokens, &random, [&](QuantProblem& p, int turn) {
    if (adapted) adapt(&p, turn % 2 ? 72 : 16, &random);
    expect_values(p, true);
  });
}

TEST_P(DecodedRows, HaveTheBitsOfTheirValues) {
  expect_values_of_forms(GetParam(), 150, 81);
}
TEST_P(DecodedRows, HaveTheBitsOfTheirValuesBesideAnAdapter) {
  if (is_small_run()) GTEST_SKIP() << "those without one run";
  expect_values_of_forms(GetParam(), 150, 82, true);
}
TEST_P(DecodedRows, OfFewTokens) {
  if (is_small_run()) GTEST_SKIP() << "those of many run";
  if (!is_never_of_few_rows(GetParam())) GTEST_SKIP() << "other kernels multiply few rows";
  expect_values_of_forms(GetParam(), 1, 83);
  expect_values_of_forms(GetParam(), 7, 84);
}

// More experts than a turn has room for.
TEST(Turns, OfThePortableKernels) {
  if (is_small_run()) GTEST_SKIP() << "too large";
  SCOPED_TRACE(seed_note());
  Random random(85);
  constexpr int kOfTurns = 16, kWidth = 1536;
  static_assert(2 * kWidth * kWidth * kOfTurns > cuda::kDecodedBytes);
  for (const QuantCase& c : kQuantCases) {
    if (std::string(c.name) != "awq" && std::string(c.name) != "gguf_q4_0") continue;
    SCOPED_TRACE(c.name);
    const QuantShape shape = {
        MOEC_GATE_THEN_UP, c.only_in_out, c.only_in_out, false, kWidth, kWidth};
    expect_values(random_quant_problem(c, shape, MOEC_BF16, 64, &random, kOfTurns));
  }
}

}  // namespace
}  // namespace moec::test
