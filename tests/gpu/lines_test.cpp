// SPDX-License-Identifier: Apache-2.0
// Experts whose codes lie in lines, on Hopper's kernels: bit for bit what the same kernels make of
// the values that the codes stand for, rounded once, in every layout and orientation; and which
// matrices these kernels leave to others.
#include <string>

#include "value_bits.h"

namespace moec::test {
namespace {

const testing::Environment* const kHopperOnly =
    testing::AddGlobalTestEnvironment(new OnePath("sm90", true));

using oracle::Number;
using oracle::Scheme;

struct LineCase {
  QuantCase format;
  int multiple = 32;          // of hidden and inter: rows end with blocks and with 16 bytes
  bool along_inputs = false;  // blocks run along k: not along a line of [K,N]
};
const LineCase kCases[] = {
    {{.name = "nf4_64", .scheme = Scheme::kCodebook4, .block_k = 64}, 64},
    {{.name = "nf4_64_nested", .scheme = Scheme::kCodebook4, .block_k = 64, .nested = true}, 64},
    {{.name = "nf4_128_bf16",
      .scheme = Scheme::kCodebook4,
      .block_k = 128,
      .scale_type = Number::kBf16},
     128},
    {{.name = "nf4_32_f16",
      .scheme = Scheme::kCodebook4,
      .block_k = 32,
      .scale_type = Number::kF16}},
    {{.name = "mxfp4",
      .scheme = Scheme::kMxfp4,
      .block_k = 32,
      .scale_type = Number::kE8m0,
      .multiple_k = 32}},
    {{.name = "mxfp4_blocks",
      .scheme = Scheme::kMxfp4,
      .block_k = 32,
      .scale_type = Number::kE8m0,
      .multiple_k = 32,
      .whole_shape = true}},
    {{.name = "int4_g32", .scheme = Scheme::kInt4, .block_k = 32}, 32, true},
    {{.name = "int4_g32_bf16", .scheme = Scheme::kInt4, .block_k = 32, .scale_type = Number::kBf16},
     32,
     true},
    {{.name = "int4_g128_f16", .scheme = Scheme::kInt4, .block_k = 128, .scale_type = Number::kF16},
     32,
     true},
    {{.name = "int4_channel", .scheme = Scheme::kInt4}, 32, true},
    {{.name = "fp8_block128",
      .scheme = Scheme::kFp8,
      .block_n = 128,
      .block_k = 128,
      .code_type = Number::kE4m3}},
    {{.name = "fp8_tensor", .scheme = Scheme::kFp8, .block_n = 0, .code_type = Number::kE4m3}},
    {{.name = "fp8_channel_bf16",
      .scheme = Scheme::kFp8,
      .scale_type = Number::kBf16,
      .code_type = Number::kE4m3},
     16,
     true},
    {{.name = "mxfp8",
      .scheme = Scheme::kFp8,
      .block_k = 32,
      .scale_type = Number::kE8m0,
      .code_type = Number::kE4m3},
     16,
     true},
};
void PrintTo(const LineCase& c, std::ostream* out) {
  *out << c.format.name;
}
class Lines : public testing::TestWithParam<LineCase> {};
INSTANTIATE_TEST_SUITE_P(Hopper, Lines, testing::ValuesIn(kCases),
                         [](const auto& one) { return std::string(one.param.format.name); });

// Of each way to decode; racecheck takes a minute for one.
bool is_of_a_small_run(const LineCase& c) {
  const std::string name = c.format.name;
  return name == "nf4_64" || (!is_under("racecheck") &&
                              (name == "mxfp4" || name == "int4_g32" || name == "fp8_block128"));
}

TEST_P(Lines, HaveTheBitsOfTheirValues) {
  SCOPED_TRACE(seed_note());
  const LineCase& c = GetParam();
  if (is_small_run() && !is_of_a_small_run(c)) GTEST_SKIP() << "another one of its kind runs";
  Random random(61);
  struct Size {
    int hidden, inter, many;
  };
  const Size kSizes[] = {{64, 96, 3}, {200, 336, 33}, {336, 136, 150}};
  int turn = 0;
  for (const uint32_t layout :
       {MOEC_GATE_SPLIT, MOEC_GATE_THEN_UP, MOEC_UP_THEN_GATE, MOEC_GATE_INTERLEAVED})
    for (const bool up_in_out : {false, true})
      for (const bool down_in_out : {false, true})
        for (const Size& size : kSizes) {
          if (is_small_run() && (&size != kSizes + 1 || up_in_out != down_in_out)) continue;
          if (is_under("racecheck") && layout != MOEC_GATE_INTERLEAVED) continue;
          if (c.along_inputs && (up_in_out || down_in_out)) continue;
          const QuantShape shape = {layout,
                                    up_in_out,
                                    down_in_out,
                                    false,
                                    rounded_up(size.hidden, c.multiple),
                                    rounded_up(size.inter, c.multiple)};
          const moec_dtype dtype = turn % 3 == 2 ? MOEC_F16 : MOEC_BF16;
          SCOPED_TRACE("layout " + std::to_string(layout) + (up_in_out ? " in_out" : " out_in") +
                       (down_in_out ? " in_out " : " out_in ") + std::to_string(shape.hidden) +
                       " x " + std::to_string(shape.inter) + ", dtype " + std::to_string(dtype));
          QuantProblem p = random_quant_problem(c.format, shape, dtype, size.many, &random);
          p.save = turn++ % 2 ? MOEC_SAVE_PREACT : MOEC_SAVE_INPUT;
          expect_values(p);
        }
}

// The k-blocks of an adapter are not decoded.
void expect_values_beside_an_adapter(const LineCase& c) {
  SCOPED_TRACE(seed_note());
  Random random(65);
  int turn = 0;
  for (const uint32_t layout :
       {MOEC_GATE_SPLIT, MOEC_GATE_THEN_UP, MOEC_UP_THEN_GATE, MOEC_GATE_INTERLEAVED})
    for (const bool in_out : {false, true}) {
      if (c.along_inputs && in_out) continue;
      if (is_small_run() && layout != MOEC_GATE_THEN_UP) continue;
      const int hidden = rounded_up(200, c.multiple), inter = rounded_up(336, c.multiple);
      const QuantShape shape = {layout, in_out, in_out, false, hidden, inter};
      const moec_dtype dtype = turn % 3 == 2 ? MOEC_F16 : MOEC_BF16;
      SCOPED_TRACE("layout " + std::to_string(layout) + (in_out ? " in_out" : " out_in") +
                   ", dtype " + std::to_string(dtype));
      QuantProblem p = random_quant_problem(c.format, shape, dtype, 150, &random);
      adapt(&p, turn % 2 ? 72 : 16, &random);
      p.save = turn++ % 2 ? MOEC_SAVE_PREACT : MOEC_SAVE_INPUT;
      expect_values(p);
    }
}
TEST_P(Lines, HaveTheBitsOfTheirValuesBesideAnAdapter) {
  if (is_small_run() && !is_of_a_small_run(GetParam())) GTEST_SKIP() << "another one runs";
  expect_values_beside_an_adapter(GetParam());
}
TEST(Channels, HaveTheBitsOfTheirValuesBesideAnAdapter) {
  expect_values_beside_an_adapter({{.name = "int8", .scheme = Scheme::kInt8}, 16});
}

// Few rows on average, whose codes the warps that multiply decode: experts of several tiles, of one
// and of none.
void expect_values_of_few_rows(const LineCase& c) {
  SCOPED_TRACE(seed_note());
  Random random(66);
  struct Size {
    int hidden, inter;
  };
  const Size kSizes[] = {{72, 96}, {200, 136}, {136, 336}};
  constexpr int kExperts = 12, kMany[] = {1, 16, 31, 32, 33, 63, 96};  // 16 rows on average
  int turn = 0;
  for (const uint32_t layout :
       {MOEC_GATE_SPLIT, MOEC_GATE_THEN_UP, MOEC_UP_THEN_GATE, MOEC_GATE_INTERLEAVED})
    for (const moec_dtype dtype : {MOEC_BF16, MOEC_F16})
      for (const Size& size : kSizes) {
        const int many = kMany[turn % 7];
        const QuantShape shape = {layout,
                                  false,
                                  false,
                                  false,
                                  rounded_up(size.hidden, c.multiple),
                                  rounded_up(size.inter, c.multiple)};
        const uint32_t save = turn++ % 2 ? MOEC_SAVE_PREACT : MOEC_SAVE_INPUT;
        if (is_small_run() && many != 33) continue;
        SCOPED_TRACE("layout " + std::to_string(layout) + ", dtype " + std::to_string(dtype) +
                     ", " + std::to_string(shape.hidden) + " x " + std::to_string(shape.inter) +
                     ", " + std::to_string(many) + " rows, save " + std::to_string(save));
        QuantProblem p = random_quant_problem(c.format, shape, dtype, many, &random, kExperts);
        p.save = save;
        expect_values(p);
      }
}
TEST_P(Lines, OfFewRows) {
  if (is_small_run() && !is_of_a_small_run(GetParam())) GTEST_SKIP() << "another one runs";
  expect_values_of_few_rows(GetParam());
}
TEST(Channels, OfFewRows) {
  expect_values_of_few_rows({{.name = "int8", .scheme = Scheme::kInt8}, 16});
  if (is_small_run()) return;
  expect_values_of_few_rows(
      {{.name = "int8_bf16", .scheme = Scheme::kInt8, .scale_type = Number::kBf16}, 16});
  expect_values_of_few_rows({{.name = "int8_zeros", .scheme = Scheme::kInt8, .zeros = true}, 16});
}

// Several tiles of features and many k-blocks.
TEST_P(Lines, OfManyTiles) {
  if (is_small_run()) GTEST_SKIP() << "too large";
  SCOPED_TRACE(seed_note());
  const LineCase& c = GetParam();
  Random random(62);
  const QuantShape shape = {
      MOEC_GATE_INTERLEAVED, !c.along_inputs, !c.along_inputs, false, 1152, 640};
  expect_values(random_quant_problem(c.format, shape, MOEC_BF16, 200, &random));
}

// So many rows that the CTAs of a pair load codes for each other: of each way to decode.
TEST(Shared, CodesArePassedBetweenCtas) {
  if (is_small_run()) GTEST_SKIP() << "too large";
  SCOPED_TRACE(seed_note());
  Random random(63);
  for (const char* name : {"nf4_64_nested", "mxfp4", "int4_g32_bf16", "fp8_block128"})
    for (const LineCase& c : kCases) {
      if (std::string(c.format.name) != name) continue;
      SCOPED_TRACE(name);
      const QuantShape shape = {MOEC_GATE_THEN_UP, false, false, false, 256, 4096};
      QuantProblem p = random_quant_problem(c.format, shape, MOEC_BF16, 20000, &random);
      expect_values(p);
      adapt(&p, 16, &random);
      expect_values(p);
    }
}

TEST(Others, AreLeftToOtherKernels) {
  const struct {
    QuantCase format;
    int hidden, inter;
    bool in_out;
    const char* reason;
  } kOthers[] = {
      {{.name = "straddling", .scheme = Scheme::kCodebook4, .block_k = 64},
       96,
       96,
       false,
       "blocks that do not end with rows"},
      {{.name = "zeros", .scheme = Scheme::kInt4, .block_k = 32, .zeros = true},
       128,
       128,
       false,
       "zero points"},
      {{.name = "e5m2", .scheme = Scheme::kFp8, .block_n = 0, .code_type = Number::kE5m2},
       128,
       128,
       false,
       "e5m2"},
  };
  Random random(64);
  for (const auto& other : kOthers) {
    const QuantShape shape = {MOEC_GATE_SPLIT, other.in_out, other.in_out,
                              false,           other.hidden, other.inter};
    const QuantResults got =
        run(random_quant_problem(other.format, shape, MOEC_BF16, 5, &random), false);
    EXPECT_EQ(got.status, MOEC_E_UNSUPPORTED) << other.format.name;
    EXPECT_NE(got.message.find(other.reason), std::string::npos) << got.message;
  }
}

}  // namespace
}  // namespace moec::test
