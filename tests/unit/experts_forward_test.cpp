// SPDX-License-Identifier: Apache-2.0
// Forward of the experts on the CPU against the oracle: every activation, layout, data type,
// position of the weight, combine mode, shared expert, and odd plan.
// Mutations seen to fail: the routed sum unscaled; c0 and c1 exchanged or c1 = 1; the down bias
// unweighted with the weight on the activation; a zero weight on the input taken as "no expert";
// the first expert's bias packed for all; saved padding not cleared; a region of the workspace too
// small.
#include "experts/experts.h"
#include "unit/experts_case.h"

namespace moec::test {
namespace {

double forward_error(const ExpertsCase& c) {
  const CpuDevice device;
  ExpertsProblem problem(c);
  const auto out = problem.forward(device);
  if (c.tokens == 0) return 0;
  return row_error(out.y.values(), problem.expected_y(), size_t(c.hidden)).error;
}

void expect_forward(ExpertsCase c) {
  for (const moec_dtype dtype : {MOEC_F32, MOEC_BF16, MOEC_F16}) {
    c.dtype = dtype;
    // Eager: the square of a pre-activation that rounds to its other neighbour is off by twice
    // that.
    const double times = c.rounding == MOEC_ACT_PER_OP ? 2 : 1;
    EXPECT_LE(forward_error(c), times * tolerance(dtype)) << c.name << ' ' << dtype_name(dtype);
  }
}

TEST(ExpertsForward, Activations) {
  for (const oracle::ActInfo& act : oracle::kActs) {
    ExpertsCase c{.name = act.name, .act = uint32_t(act.kind), .bias = true};
    c.input_size = 2;
    expect_forward(c);
  }
}

TEST(ExpertsForward, Layouts) {
  for (const Layout layout :
       {Layout::kOutIn, Layout::kInOut, Layout::kInterleaved, Layout::kPointers})
    for (const bool packed : {false, true})
      expect_forward({.name = "layout " + std::to_string(int(layout)) + (packed ? " packed" : ""),
                      .hidden = 33,
                      .inter = 31,
                      .bias = true,
                      .packed = packed,
                      .layout = layout});
}

TEST(ExpertsForward, WeightPositionsAndCombines) {
  for (uint32_t position = 0; position <= MOEC_WEIGHT_ON_INPUT; ++position)
    for (uint32_t combine = 0; combine <= MOEC_COMBINE_DATA_EXPERT; ++combine)
      expect_forward(
          {.name = "position " + std::to_string(position) + " combine " + std::to_string(combine),
           .top_k = 4,
           .zero = 3,
           .position = position,
           .combine = combine,
           .bias = true,
           .residual = true,
           .scale = 0.5f});
}

TEST(ExpertsForward, SharedExperts) {
  for (uint32_t kind = MOEC_SHARED_ADD; kind <= MOEC_SHARED_SOFTMAX2; ++kind)
    for (const bool bias : {false, true})
      expect_forward({.name = "shared " + std::to_string(kind),
                      .shared_act = bias ? MOEC_ACT_RELU2 : MOEC_ACT_GEGLU_TANH,
                      .shared = kind,
                      .save = bias ? MOEC_SAVE_ALL : MOEC_SAVE_NONE,
                      .shared_inter = 50,
                      .bias = bias,
                      .residual = bias,
                      .output_bias = true,
                      .scale = 2});
}

TEST(ExpertsForward, Plans) {
  expect_forward({.name = "no tokens", .tokens = 0, .shared = MOEC_SHARED_ADD, .shared_inter = 8});
  expect_forward({.name = "one token", .tokens = 1, .hidden = 600});
  expect_forward({.name = "one token of few columns", .tokens = 1, .hidden = 3, .inter = 5});
  expect_forward({.name = "aligned", .align = 8, .bias = true});
  expect_forward({.name = "local range", .zero = 2, .begin = 2, .end = 4});
  expect_forward({.name = "one expert", .tokens = 70, .experts = 1, .top_k = 1});
  expect_forward({.name = "expert choice", .capacity = 4, .residual = true});
  expect_forward({.name = "expert choice, aligned", .align = 4, .capacity = 3});
  expect_forward({.name = "wide", .tokens = 40, .hidden = 300, .inter = 290, .top_k = 3});
}

TEST(ExpertsForward, PerOpRounding) {
  for (const oracle::ActInfo& act : oracle::kActs)
    expect_forward({.name = std::string("per op ") + act.name,
                    .act = uint32_t(act.kind),
                    .combine = MOEC_COMBINE_DATA_EXPERT,
                    .rounding = MOEC_ACT_PER_OP});
}

// y is the residual itself.
TEST(ExpertsForward, InPlaceResidual) {
  const CpuDevice device;
  ExpertsProblem apart({.residual = true});
  const auto expected = apart.forward(device);
  ExpertsProblem same({.residual = true});
  const cpu::Device& on = device;
  const cpu::CpuExperts path(on.pool, *on.host);
  const ExpertsPath* const paths[] = {&path};
  const experts::Sizes sizes = experts::sizes(paths, same.desc);
  const GuardedBuffer workspace(bytes_for(sizes.forward, same.c.tokens),
                                GuardedBuffer::Side::kStart);
  std::vector<uint8_t> saved(bytes_for(sizes.saved, same.c.tokens));
  ExpertsArgs args = {};
  args.desc = &same.desc, args.num_tokens = same.c.tokens, args.plan = &same.plan.view;
  args.weights = &same.experts.view, args.x = same.x.array();
  args.residual = args.y = same.residual.data();
  args.saved = saved.data(), args.workspace = workspace.data();
  experts::forward(paths, args, nullptr);
  EXPECT_EQ(same.residual.bytes(), expected.y.bytes());
}

// Bits do not depend on threads, on packing, or on what is saved.
TEST(ExpertsForward, SameBits) {
  for (const moec_dtype dtype : {MOEC_F32, MOEC_BF16}) {
    ExpertsCase c{.tokens = 70, .hidden = 96, .inter = 96, .dtype = dtype, .bias = true};
    const auto reference = ExpertsProblem(c).forward(CpuDevice(1)).y.bytes();
    EXPECT_EQ(ExpertsProblem(c).forward(CpuDevice(3)).y.bytes(), reference);
    for (uint32_t save = 0; save <= MOEC_SAVE_ALL; ++save) {
      c.save = save;
      EXPECT_EQ(ExpertsProblem(c).forward(CpuDevice(2)).y.bytes(), reference) << save;
    }
    c.packed = true;
    EXPECT_EQ(ExpertsProblem(c).forward(CpuDevice(2)).y.bytes(), reference);
  }
}

// Saved state: the stated bytes, padding rows and gaps zero, nothing left as it was.
TEST(ExpertsForward, SavedIsWrittenInFull) {
  for (uint32_t save = MOEC_SAVE_INPUT; save <= MOEC_SAVE_ALL; ++save) {
    const ExpertsCase c{.dtype = MOEC_BF16,
                        .shared = MOEC_SHARED_ADD,
                        .save = save,
                        .shared_inter = 7,
                        .align = 4,
                        .begin = 1,
                        .end = 5};
    ExpertsProblem problem(c);
    const auto saved = problem.forward(CpuDevice(2)).saved;
    ASSERT_EQ(saved.empty(), save == MOEC_SAVE_INPUT);
    if (saved.empty()) continue;
    std::vector<uint32_t> words(saved.size() / sizeof(uint32_t));
    std::memcpy(words.data(), saved.data(), saved.size());
    EXPECT_EQ(std::count(words.begin(), words.end(), 0xFFFFFFFFu), 0) << save;
    const int64_t rows = problem.plan.plan.totals[0];
    EXPECT_EQ(int64_t(words.size()) - std::count(words.begin(), words.end(), 0u),
              2 * (rows * c.inter + c.tokens * c.shared_inter))
        << save;
  }
}

}  // namespace
}  // namespace moec::test
