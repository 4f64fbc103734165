// SPDX-License-Identifier: Apache-2.0
// Backward of the experts on the CPU: every gradient against the oracle, for every activation,
// layout, data type, position of the weight, save policy, shared expert, and odd plan.
// Mutations seen to fail: a row's factor forgotten in either gradient; <dY, b2> or a routing weight
// left out of a weight's gradient; output_scale left out of the mix's; slopes of sigmoid and
// softmax; gate and up exchanged in dx; old gradients not added; x not scaled for the weight
// gradient; d_routing_weights of unrouted slots left as they were; one column of the gradient at
// the gates 1 % too large.
#include "unit/experts_case.h"

namespace moec::test {
namespace {

double backward_error(const ExpertsCase& c, std::string* worst,
                      const ExpertsProblem::Wanted& wanted = {}) {
  const CpuDevice device;
  ExpertsProblem problem(c);
  const auto saved = problem.forward(device).saved;
  return problem.gradient_error(*problem.backward(device, saved, wanted), worst);
}

void expect_backward(ExpertsCase c, const ExpertsProblem::Wanted& wanted = {}) {
  for (const moec_dtype dtype : {MOEC_F32, MOEC_BF16, MOEC_F16}) {
    c.dtype = dtype;
    std::string worst;
    EXPECT_LE(backward_error(c, &worst, wanted), tolerance(dtype))
        << c.name << ' ' << dtype_name(dtype) << ": " << worst;
  }
}

TEST(ExpertsBackward, ActivationsAndSavePolicies) {
  for (const oracle::ActInfo& act : oracle::kActs)
    for (uint32_t save = MOEC_SAVE_INPUT; save <= MOEC_SAVE_ALL; ++save)
      expect_backward({.name = std::string(act.name) + " save " + std::to_string(save),
                       .tokens = 30,
                       .act = uint32_t(act.kind),
                       .save = save,
                       .bias = true,
                       .input_size = 2});
}

TEST(ExpertsBackward, Layouts) {
  for (const Layout layout :
       {Layout::kOutIn, Layout::kInOut, Layout::kInterleaved, Layout::kPointers})
    for (const bool packed : {false, true})
      expect_backward({.name = "layout " + std::to_string(int(layout)) + (packed ? " packed" : ""),
                       .hidden = 33,
                       .inter = 31,
                       .bias = true,
                       .packed = packed,
                       .layout = layout});
}

TEST(ExpertsBackward, WeightPositions) {
  for (uint32_t position = 0; position <= MOEC_WEIGHT_ON_INPUT; ++position)
    for (uint32_t save = MOEC_SAVE_INPUT; save <= MOEC_SAVE_ALL; ++save)
      for (uint32_t shared : {MOEC_SHARED_NONE, MOEC_SHARED_SOFTMAX2})
        expect_backward({.name = "position " + std::to_string(position) + " save " +
                                 std::to_string(save) + " shared " + std::to_string(shared),
                         .top_k = 4,
                         .zero = 3,
                         .position = position,
                         .shared = shared,
                         .save = save,
                         .shared_inter = shared ? 20 : 0,
                         .bias = true,
                         .residual = true,
                         .scale = 0.5f});
}

TEST(ExpertsBackward, SharedExperts) {
  for (uint32_t kind = MOEC_SHARED_ADD; kind <= MOEC_SHARED_SOFTMAX2; ++kind)
    for (const bool bias : {false, true})
      expect_backward({.name = "shared " + std::to_string(kind),
                       .shared_act = bias ? MOEC_ACT_RELU2 : MOEC_ACT_GEGLU_TANH,
                       .shared = kind,
                       .save = bias ? MOEC_SAVE_ALL : MOEC_SAVE_INPUT,
                       .shared_inter = 50,
                       .bias = bias,
                       .residual = bias,
                       .output_bias = true,
                       .accumulate = bias,
                       .scale = 2});
}

TEST(ExpertsBackward, Plans) {
  expect_backward({.name = "no tokens",
                   .tokens = 0,
                   .shared = MOEC_SHARED_SOFTMAX2,
                   .shared_inter = 8,
                   .bias = true,
                   .output_bias = true});
  expect_backward({.name = "one token", .tokens = 1, .hidden = 600});
  expect_backward({.name = "aligned", .align = 8, .bias = true});
  expect_backward({.name = "local range", .zero = 2, .begin = 2, .end = 4});
  expect_backward({.name = "one expert", .tokens = 70, .experts = 1, .top_k = 1, .bias = true});
  expect_backward({.name = "expert choice", .capacity = 4, .residual = true});
  expect_backward({.name = "expert choice, aligned", .align = 4, .capacity = 3});
  expect_backward({.name = "wide", .tokens = 40, .hidden = 300, .inter = 290, .top_k = 3});
}

TEST(ExpertsBackward, AccumulatesInTheTypeOfTheGradient) {
  for (const moec_dtype grad : {MOEC_F32, MOEC_BF16}) {
    ExpertsCase c{.name = "accumulate",
                  .dtype = MOEC_BF16,
                  .grad_dtype = grad,
                  .bias = true,
                  .accumulate = true};
    std::string worst;
    EXPECT_LE(backward_error(c, &worst), tolerance(c.dtype)) << dtype_name(grad) << ' ' << worst;
  }
}

// Every subset of outputs gives the right ones, with nothing else to write to.
TEST(ExpertsBackward, AbsentOutputs) {
  for (int mask = 0; mask < 128; ++mask) {
    const auto bit = [&](int i) { return (mask >> i & 1) != 0; };
    const ExpertsProblem::Wanted wanted{bit(0), bit(1), bit(2), bit(3), bit(4), bit(5), bit(6)};
    const bool odd = __builtin_parity(unsigned(mask));
    const ExpertsCase c{.tokens = 5,
                        .zero = 1,
                        .position = odd ? MOEC_WEIGHT_ON_INPUT : MOEC_WEIGHT_ON_OUTPUT,
                        .shared = mask % 3 ? MOEC_SHARED_SOFTMAX2 : MOEC_SHARED_SIGMOID_GATE,
                        .save = mask % 2 ? MOEC_SAVE_INPUT : MOEC_SAVE_PREACT,
                        .shared_inter = 20,
                        .bias = true,
                        .residual = true,
                        .output_bias = true};
    std::string worst;
    EXPECT_LE(backward_error(c, &worst, wanted), 2e-5) << mask << ' ' << worst;
  }
}

// Products of one matrix that a backward pass ran, per row.
uint64_t products_run(uint32_t save, const ExpertsProblem::Wanted& wanted) {
  const ExpertsCase c{.save = save};
  ExpertsProblem problem(c);
  const auto saved = problem.forward(CpuDevice()).saved;
  uint64_t flops = 0;
  const HostServices services = {&flops, nullptr, nullptr, [](void* self, uint64_t, uint64_t more) {
                                   *static_cast<uint64_t*>(self) += more;
                                 }};
  const ThreadPool pool(1);
  problem.backward({pool, &services}, saved, wanted);
  return flops / (2 * uint64_t(problem.plan.plan.totals[0] * c.hidden * c.inter));
}

TEST(ExpertsBackward, AbsentOutputsCostNothing) {
  const bool yes = true, no = false;
  EXPECT_EQ(products_run(MOEC_SAVE_PREACT, {}), 6u);
  EXPECT_EQ(products_run(MOEC_SAVE_INPUT, {}), 8u);
  EXPECT_EQ(products_run(MOEC_SAVE_PREACT, {yes, yes, no, no, no, no, no}), 3u);  // frozen experts
  EXPECT_EQ(products_run(MOEC_SAVE_PREACT, {no, yes, no, no, no, no, no}), 1u);
  EXPECT_EQ(products_run(MOEC_SAVE_PREACT, {no, no, no, yes, no, no, no}), 1u);
  EXPECT_EQ(products_run(MOEC_SAVE_INPUT, {no, no, no, no, no, no, yes}), 0u);
}

TEST(ExpertsBackward, EmptyExpertsGetZero) {
  const ExpertsCase c{.tokens = 1, .experts = 8, .top_k = 1, .dtype = MOEC_BF16, .bias = true};
  ExpertsProblem problem(c);
  const CpuDevice device;
  const auto g = problem.backward(device, problem.forward(device).saved, {});
  const oracle::Vec up = g->experts.up.values(), bias = g->experts.down.bias_values();
  size_t experts_without = 0;
  for (size_t e = 0; e < 8; ++e) {
    if (problem.plan.plan.counts[e]) continue;
    ++experts_without;
    const size_t each = size_t(c.inter * c.hidden);
    for (size_t i = 0; i < each; ++i) EXPECT_EQ(up[e * each + i], 0.0);
    for (size_t i = 0; i < size_t(c.hidden); ++i) EXPECT_EQ(bias[e * size_t(c.hidden) + i], 0.0);
  }
  EXPECT_GE(experts_without, 7u);
}

// Bits do not depend on threads or packing; nor, before SAVE_ALL, on what was saved.
TEST(ExpertsBackward, SameBits) {
  for (const moec_dtype dtype : {MOEC_F32, MOEC_BF16}) {
    ExpertsCase c{.tokens = 70,
                  .hidden = 96,
                  .inter = 96,
                  .dtype = dtype,
                  .act = MOEC_ACT_GPTOSS,
                  .shared = MOEC_SHARED_SOFTMAX2,
                  .shared_inter = 40,
                  .bias = true};
    const auto bits = [&](int threads) {
      const CpuDevice device(threads);
      ExpertsProblem problem(c);
      const auto g = problem.backward(device, problem.forward(device).saved, {});
      std::vector<oracle::Vec> all = {g->x.values(),
                                      g->routing.values(),
                                      g->experts.gate.values(),
                                      g->experts.down.values(),
                                      g->experts.up.bias_values(),
                                      g->shared.up.values(),
                                      g->shared_gate.values()};
      return all;
    };
    const auto reference = bits(1);
    EXPECT_EQ(bits(3), reference);
    c.save = MOEC_SAVE_INPUT;
    EXPECT_EQ(bits(2), reference);
    c.save = MOEC_SAVE_PREACT;
    c.packed = true;
    EXPECT_EQ(bits(2), reference);
  }
}

}  // namespace
}  // namespace moec::test
