// SPDX-License-Identifier: Apache-2.0
// Experts whose codes warps of a product's own kernel decode ahead of its tiles: bit for bit what
// the same kernels make of their values.
#include <numeric>
#include <string>
#include <vector>

#include "backend/cuda/sm90/ahead.h"
#include "value_bits.h"

namespace moec::test {
namespace {

const testing::Environment* const kHopperOnly =
    testing::AddGlobalTestEnvironment(new OnePath("sm90", true));

constexpr int kExperts = 4, kTopK = 2;  // of random_quant_problem
constexpr int kTokens = int((cuda::kAheadFrom + cuda::kAheadBelow) / 2 * kExperts / kTopK);

std::vector<QuantCase> cases() {
  std::vector<QuantCase> all;
  for (const QuantCase& c : kQuantCases)
    for (const char* name : {"int8", "fp8_channel", "fp8_block128", "codebook4_64",
                             "codebook4_32_bf16", "mxfp4", "int4_g32"})
      if (name == std::string(c.name)) all.push_back(c);
  all.push_back({.name = "int4_g32_bf16",
                 .scheme = oracle::Scheme::kInt4,
                 .block_k = 32,
                 .scale_type = oracle::Number::kBf16});
  return all;
}

// k-blocks, chunks and feature tiles that are not whole, and more chunks than the ring has slots.
QuantProblem problem(const QuantCase& c, uint32_t layout, bool per_expert, int turn,
                     Random* random) {
  const int multiple = std::lcm(32, std::lcm(c.multiple_n, c.multiple_k));
  const QuantShape shape = {layout,
                            false,
                            false,
                            per_expert,
                            rounded_up(turn % 2 ? 608 : 1056, multiple),
                            rounded_up(turn % 2 ? 928 : 352, multiple)};
  QuantProblem p = random_quant_problem(c, shape, MOEC_BF16, kTokens + 3, random);
  p.save = turn % 2 ? MOEC_SAVE_PREACT : MOEC_SAVE_INPUT;
  return p;
}

class Ahead : public testing::TestWithParam<QuantCase> {};
INSTANTIATE_TEST_SUITE_P(Hopper, Ahead, testing::ValuesIn(cases()),
                         [](const auto& one) { return std::string(one.param.name); });

TEST_P(Ahead, HasTheBitsOfItsValues) {
  SCOPED_TRACE(seed_note());
  Random random(76);
  int turn = 0;
  for (const uint32_t layout : {MOEC_GATE_SPLIT, MOEC_GATE_THEN_UP, MOEC_GATE_INTERLEAVED})
    for (const bool per_expert : {false, true}) {
      if (is_small_run() && turn > 1) return;
      SCOPED_TRACE("layout " + std::to_string(layout) + (per_expert ? " per expert" : " stack"));
      QuantProblem p = problem(GetParam(), layout, per_expert, turn++, &random);
      expect_values(p);
      if (is_small_run() || turn % 2 == 0) continue;
      adapt(&p, turn % 3 == 0 ? 72 : 16, &random);
      expect_values(p);
    }
}

}  // namespace
}  // namespace moec::test
