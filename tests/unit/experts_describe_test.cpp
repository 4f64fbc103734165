// SPDX-License-Identifier: Apache-2.0
// describe() is members of a JSON object that name a kernel and a tile for each product; the packed
// form.
#include "experts/experts.h"
#include "support/json.h"
#include "unit/experts_case.h"

namespace moec::test {
namespace {

Json describe(const ExpertsProblem& problem, int64_t tokens) {
  const std::unique_ptr<Backend> backend = make_cpu_backend({});
  return parse_json('{' + experts::describe(*backend, problem.desc, problem.experts.view, tokens) +
                    '}');
}
std::vector<std::string> steps_of(const Json& call) {
  std::vector<std::string> steps;
  for (const Json& kernel : call.at("kernels").array) steps.push_back(kernel.at("step").string);
  return steps;
}

TEST(ExpertsDescribe, NamesKernelsAndTiles) {
  const ExpertsProblem problem({.dtype = MOEC_BF16, .shared = MOEC_SHARED_ADD, .shared_inter = 8});
  for (int64_t tokens : {int64_t(0), int64_t(1), int64_t(1000000)}) {
    const Json parsed = describe(problem, tokens);
    EXPECT_EQ(steps_of(parsed.at("forward")),
              (std::vector<std::string>{"gate_up", "down", "shared_gate_up", "shared_down"}));
    EXPECT_EQ(steps_of(parsed.at("backward")),
              (std::vector<std::string>{"shared_d_act", "shared_d_down", "shared_d_gate_up",
                                        "shared_d_x", "d_act", "d_x", "d_down", "d_gate_up"}));
    for (const char* direction : {"forward", "backward"})
      for (const Json& kernel : parsed.at(direction).at("kernels").array) {
        EXPECT_FALSE(kernel.at("kernel").string.empty());
        EXPECT_NE(kernel.at("tile").string.find('x'), std::string::npos);
      }
  }
}

TEST(ExpertsDescribe, GradientsOfWeightsMultiplyActivations) {
  ExpertsProblem problem({.dtype = MOEC_BF16});
  const auto kernels = [&] {
    std::vector<std::string> of_gradients;
    const Json described = describe(problem, 100);
    for (const Json& kernel : described.at("backward").at("kernels").array)
      if (kernel.at("step").string == "d_down" || kernel.at("step").string == "d_gate_up")
        of_gradients.push_back(kernel.at("kernel").string + kernel.at("tile").string);
    return of_gradients;
  };
  const std::vector<std::string> same = kernels();
  EXPECT_EQ(same.size(), 2u);
  problem.experts.view.down.dtype = MOEC_F32;  // whatever the weights are
  EXPECT_EQ(kernels(), same);
}

// Bytes beside the stated ones stay; packing a range again gives the same bytes as packing all.
TEST(ExpertsPack, ExactAndRefreshable) {
  for (const moec_dtype dtype : {MOEC_F32, MOEC_BF16}) {
    ExpertsProblem problem({.hidden = 33, .inter = 31, .dtype = dtype, .bias = true});
    const ThreadPool pool(2);
    WeightsView& view = problem.experts.view;
    const cpu::CpuPacking packing(pool);
    const GuardedBuffer memory(packing.bytes(view), GuardedBuffer::Side::kStart);
    packing.pack(view, memory.data(), 0, view.num_experts, nullptr);
    EXPECT_TRUE(memory.slack_is_untouched());
    const auto* const bytes = memory.data<uint8_t>();
    const std::vector<uint8_t> before(bytes, bytes + memory.size());
    problem.experts.fill(1);
    packing.pack(view, memory.data(), 2, 3, nullptr);
    const size_t each = memory.size() / size_t(view.num_experts);
    for (size_t e = 0; e < size_t(view.num_experts); ++e) {
      const bool same = std::equal(bytes + e * each, bytes + (e + 1) * each, &before[e * each]);
      EXPECT_EQ(same, e < 2 || e >= 5) << e;
    }
  }
}

}  // namespace
}  // namespace moec::test
