// SPDX-License-Identifier: Apache-2.0
// Experts of INT8 codes on each path of the CUDA backend: against the oracle with the values that
// the codes stand for, and bit for bit against the same kernels with these values.
#include <map>
#include <string>

#include "coded_problem.h"
#include "step.h"
#include "support/compare.h"
#include "support/layer_check.h"

namespace moec::test {
namespace {

// MOEC_CUDA_KERNELS
constexpr const char *kAny = "", *kHopper = "sm90", *kFewRows = "few_rows", *kPortable = "portable";

const moec_context* context_of(const char* path) {
  static std::map<std::string, Context> contexts;
  Context& context = contexts[path];
  if (context) return context.get();
  setenv("MOEC_TEST_DEVICE", "cuda", 1);  // of the tensors
  setenv("MOEC_CUDA_KERNELS", path, 1);
  context = gpu_context();
  unsetenv("MOEC_CUDA_KERNELS");
  return context.get();
}

bool aligned(const CodedCase& c) {  // rows of codes
  return c.hidden % 16 == 0 && c.inter % 16 == 0;
}
bool is_stack_of_gates(const CodedCase& c) {
  return c.dtype != MOEC_F32 && c.gate_layout != MOEC_GATE_NONE && !c.per_expert && aligned(c);
}
bool hopper_takes(const CodedCase& c) {
  return is_stack_of_gates(c) && !c.unlike_up;
}
// Whether experts have few rows, in bf16, of codes.
bool has_few_rows(const CodedCase& c) {
  const bool coded = c.coded_gate_up || c.coded_down;
  return c.dtype == MOEC_BF16 && coded && c.tokens * kCodedTopK <= 16 * kCodedExperts;
}
// Whether the path of few rows surely takes forward and backward. It takes others, too.
bool few_rows_takes(const CodedCase& c) {
  const bool out_in = c.gate_up_orientation == MOEC_OUT_IN && c.down_orientation == MOEC_OUT_IN;
  return is_stack_of_gates(c) && has_few_rows(c) && out_in && c.coded_gate_up && c.coded_down &&
         c.hidden >= 64 && c.inter >= 64;
}
double tolerance(moec_dtype dtype) {  // against the exact oracle (layer_check.h)
  for (const Type& type : kTypes)
    if (type.dtype == dtype) return 2 * type.tolerance;
  return 0;
}

void expect_near(const CodedResults& got, const CodedResults& want, const CodedCase& c) {
  ASSERT_EQ(got.status, MOEC_OK) << got.message;
  const auto near = [&](const char* name, const oracle::Vec& a, const oracle::Vec& b, int columns,
                        const oracle::Vec& terms = {}) {
    const RowError error = row_error(a, b, size_t(columns), kTypicalRow, terms);
    EXPECT_LE(error.error, tolerance(c.dtype)) << name << ": " << error;
  };
  near("y", got.y, want.y, c.hidden);
  near("d_x", got.d_x, want.d_x, c.hidden);
  near("d_routing_weights", got.d_routing_weights, want.d_routing_weights, kCodedTopK, want.terms);
}

// But for what follows a product of few rows, which adds up codes in an order of its own, and where
// values alternate, so that the tensor cores take them from a turn's scratch alone.
void expect_bits_of_values(const CodedResults& codes, const CodedResults& values) {
  constexpr const char *kOwnOrder = "portable few rows", *kPlain = "portable plain";
  ASSERT_EQ(values.status, MOEC_OK) << values.message;
  ASSERT_FALSE(values.forward.count(kOwnOrder) || values.backward.count(kOwnOrder));
  const auto differ = [&](const auto& of_codes, const auto& of_values) {
    return of_codes.count(kOwnOrder) ||
           (of_codes.count("decode_experts") && of_values.count(kPlain));
  };
  if (differ(codes.forward, values.forward)) return;
  EXPECT_TRUE(codes.y == values.y) << "y has other bits than from the values";
  if (differ(codes.backward, values.backward)) return;
  EXPECT_TRUE(codes.d_x == values.d_x) << "d_x has other bits than from the values";
  EXPECT_TRUE(codes.d_routing_weights == values.d_routing_weights)
      << "d_routing_weights have other bits than from the values";
}

void check_case(const CodedCase& c) {
  SCOPED_TRACE(c.text() + ", " + seed_note());
  const CodedProblem problem(c);
  const CodedResults want = reference(problem);
  for (const char* path : {kAny, kHopper, kFewRows, kPortable}) {
    SCOPED_TRACE(std::string("kernels: ") + (*path ? path : "any"));
    if (path == kHopper && !(is_hopper() && hopper_takes(c))) continue;
    if (path == kFewRows && !is_hopper()) continue;
    const moec_context* const context = context_of(path);
    const CodedResults got = run(context, problem, Held::kCodes, c.save);
    if (path == kFewRows && got.status == MOEC_E_UNSUPPORTED && !few_rows_takes(c)) continue;
    expect_near(got, want, c);
    if (!aligned(c) || path == kAny) continue;  // few tokens of plain values have their own kernels
    if (path != kFewRows)                       // which refuses values
      expect_bits_of_values(got, run(context, problem, Held::kValues, c.save));
    const CodedResults bare = run(context, problem, Held::kCodes, MOEC_SAVE_NONE);
    EXPECT_EQ(bare.status, MOEC_OK) << bare.message;
    EXPECT_TRUE(bare.y == got.y) << "other bits where nothing is saved";
  }
}

class Layouts : public testing::TestWithParam<uint32_t> {};

TEST_P(Layouts, EachOrientationSizeAndType) {
  constexpr moec_dtype kDtypes[] = {MOEC_BF16, MOEC_F16, MOEC_F32};
  constexpr struct {
    int tokens, hidden, inter;
  } kSizes[] = {{40, 64, 48}, {3, 128, 80}, {150, 336, 208}, {37, 72, 40}, {20, 37, 29}};
  int turn = int(GetParam());
  for (const uint32_t gate_up : {MOEC_OUT_IN, MOEC_IN_OUT})
    for (const uint32_t down : {MOEC_OUT_IN, MOEC_IN_OUT})
      for (const auto& size : kSizes)
        for (const moec_dtype dtype : kDtypes) {
          CodedCase c;
          c.gate_layout = GetParam();
          c.gate_up_orientation = gate_up;
          c.down_orientation = down;
          c.tokens = size.tokens;
          c.hidden = size.hidden;
          c.inter = size.inter;
          c.dtype = dtype;
          c.scale_dtype = turn % 4 < 2 ? dtype : moec_dtype(MOEC_F32);
          c.asymmetric = turn % 2;
          c.bias = turn % 3 == 0;
          c.save = turn % 5 < 3 ? MOEC_SAVE_PREACT : MOEC_SAVE_INPUT;
          if (c.gate_layout == MOEC_GATE_NONE) c.act = oracle::Act::kRelu2;
          ++turn;
          check_case(c);
        }
}
INSTANTIATE_TEST_SUITE_P(Coded, Layouts,
                         testing::Values(MOEC_GATE_SPLIT, MOEC_GATE_THEN_UP, MOEC_UP_THEN_GATE,
                                         MOEC_GATE_INTERLEAVED, MOEC_GATE_NONE));

TEST(Coded, ExpertsThatAreSeparateTensors) {
  for (const uint32_t layout : {MOEC_GATE_SPLIT, MOEC_GATE_INTERLEAVED})
    for (const uint32_t orientation : {MOEC_OUT_IN, MOEC_IN_OUT})
      for (const bool asymmetric : {false, true}) {
        CodedCase c;
        c.gate_layout = layout;
        c.gate_up_orientation = c.down_orientation = orientation;
        c.asymmetric = asymmetric;
        c.per_expert = c.bias = true;
        check_case(c);
      }
}

// Few rows: their kernel is chosen by the scales of both parts.
TEST(Coded, GateAndUpWithUnlikeScales) {
  for (const moec_dtype scales : {MOEC_F32, MOEC_BF16})
    for (const bool asymmetric : {false, true}) {
      CodedCase c;
      c.scale_dtype = scales;
      c.asymmetric = asymmetric;
      c.unlike_up = true;
      c.tokens = 20;
      c.inter = 80;
      check_case(c);
    }
}

TEST(Coded, BesidePlainMatrices) {
  for (const bool gate_up : {false, true})
    for (const uint32_t orientation : {MOEC_OUT_IN, MOEC_IN_OUT}) {
      CodedCase c;
      c.gate_layout = MOEC_GATE_INTERLEAVED;
      c.gate_up_orientation = c.down_orientation = orientation;
      c.coded_gate_up = gate_up;
      c.coded_down = !gate_up;
      c.asymmetric = true;
      check_case(c);
    }
}

// Blocks of features and of k that are not whole, several tiles of each; clusters that keep pace.
TEST(Coded, ManyTiles) {
  for (const uint32_t orientation : {MOEC_OUT_IN, MOEC_IN_OUT})
    for (const uint32_t layout : {MOEC_GATE_THEN_UP, MOEC_GATE_INTERLEAVED}) {
      CodedCase c;
      c.gate_layout = layout;
      c.gate_up_orientation = c.down_orientation = orientation;
      c.asymmetric = c.bias = true;
      c.tokens = 300;
      c.hidden = 720;
      c.inter = 1040;
      check_case(c);
      c.tokens = 40;
      c.hidden = 5200;
      c.inter = 80;
      check_case(c);
    }
}

// So many rows that the CTAs of a pair load codes for each other: too many for the oracle.
TEST(Coded, CtasThatShareCodes) {
  if (!is_hopper()) GTEST_SKIP() << "needs a Hopper GPU";
  for (const uint32_t orientation : {MOEC_OUT_IN, MOEC_IN_OUT}) {
    CodedCase c;
    c.gate_layout = MOEC_GATE_INTERLEAVED;
    c.gate_up_orientation = c.down_orientation = orientation;
    c.asymmetric = true;
    c.tokens = 20000;
    c.hidden = c.inter = 1024;
    const CodedProblem problem(c);
    const CodedResults got = run(context_of(kHopper), problem, Held::kCodes, c.save);
    ASSERT_EQ(got.status, MOEC_OK) << got.message;
    expect_bits_of_values(got, run(context_of(kHopper), problem, Held::kValues, c.save));
  }
}

TEST(Coded, SwigluIsNearTheOracle) {
  for (const char* path : {kHopper, kPortable}) {
    if (path == kHopper && !is_hopper()) continue;
    CodedCase c;
    c.act = oracle::Act::kSwiglu;
    const CodedProblem problem(c);
    expect_near(run(context_of(path), problem, Held::kCodes, c.save), reference(problem), c);
  }
}

}  // namespace
}  // namespace moec::test
