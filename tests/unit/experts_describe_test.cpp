// SPDX-License-Identifier: Apache-2.0
// describe() is members of a JSON object that name a kernel and a tile for each product; the packed
// form.
#include "support/json.h"
#include "unit/experts_case.h"

namespace moec::test {
namespace {

std::string describe(const ExpertsProblem& problem, int64_t tokens) {
  const CpuDevice device;
  return cpu::experts_describe(device, problem.desc, problem.experts.view, tokens);
}

TEST(ExpertsDescribe, NamesKernelsAndTiles) {
  const ExpertsProblem problem({.dtype = MOEC_BF16, .shared = MOEC_SHARED_ADD, .shared_inter = 8});
  for (int64_t tokens : {int64_t(0), int64_t(1), int64_t(1000000)}) {
    const std::string json = '{' + describe(problem, tokens) + '}';
    const Json parsed = parse_json(json);
    EXPECT_EQ(parsed.at("products").array.size(), 12u) << json;
    for (const Json& product : parsed.at("products").array) {
      EXPECT_FALSE(product.at("kernel").string.empty()) << json;
      EXPECT_NE(product.at("tile").string.find('x'), std::string::npos) << json;
    }
  }
}

TEST(ExpertsDescribe, GradientsOfWeightsMultiplyActivations) {
  ExpertsProblem problem({.dtype = MOEC_BF16});
  const auto kernels = [&] {
    std::vector<std::string> of_gradients;
    const Json parsed = parse_json('{' + describe(problem, 100) + '}');
    for (const Json& product : parsed.at("products").array)
      if (product.at("name").string == "d_down" || product.at("name").string == "d_gate_up")
        of_gradients.push_back(product.at("kernel").string + product.at("tile").string);
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
    const CpuDevice device;
    WeightsView& view = problem.experts.view;
    const GuardedBuffer memory(cpu::packed_bytes(view), GuardedBuffer::Side::kStart);
    cpu::pack_weights(device, view, memory.data(), 0, view.num_experts);
    EXPECT_TRUE(memory.slack_is_untouched());
    const auto* const bytes = memory.data<uint8_t>();
    const std::vector<uint8_t> before(bytes, bytes + memory.size());
    problem.experts.fill(1);
    cpu::pack_weights(device, view, memory.data(), 2, 3);
    const size_t each = memory.size() / size_t(view.num_experts);
    for (size_t e = 0; e < size_t(view.num_experts); ++e) {
      const bool same = std::equal(bytes + e * each, bytes + (e + 1) * each, &before[e * each]);
      EXPECT_EQ(same, e < 2 || e >= 5) << e;
    }
  }
}

}  // namespace
}  // namespace moec::test
