// SPDX-License-Identifier: Apache-2.0
// The oracle against the reference outputs and gradients of 34 model families and the reference
// load-balancing loss. A float64 evaluation stays under 1e-5; the bar is 2e-5.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <ostream>
#include <set>
#include <string>

#include "golden/golden_case.h"
#include "support/compare.h"

namespace moec::golden {

void PrintTo(const Family& family, std::ostream* out) {
  *out << family.name;
}

namespace {

constexpr double kTolerance = 2e-5;

class FamilyTest : public testing::TestWithParam<Family> {};

TEST_P(FamilyTest, OutputAndGradients) {
  const GoldenCase golden = load_golden(GetParam());
  const oracle::Layer layer = oracle::forward(golden.config, golden.in);
  const oracle::Gradients grads = oracle::backward(golden.config, golden.in, layer, golden.d_y);
  std::set<std::string> compared;
  double worst = 0;
  std::string worst_name;
  for (const Comparison& c : comparisons(golden, layer.y, grads)) {
    const test::RowError error = test::row_error(c.got, c.expected, c.columns);
    EXPECT_LE(error.error, kTolerance) << c.name << ": " << error;
    compared.insert(c.name);
    if (error.error >= worst) worst_name = c.name;
    worst = std::max(worst, error.error);
  }
  for (const auto& [name, tensor] : golden.file.tensors) {
    if (name.rfind("g.", 0) == 0) {
      EXPECT_TRUE(compared.count(name)) << name << " is not compared";
    }
  }
  std::printf("%-18s %zu tensors, worst %.2e in %s\n", GetParam().name, compared.size(), worst,
              worst_name.c_str());
}

INSTANTIATE_TEST_SUITE_P(Golden, FamilyTest, testing::ValuesIn(kFamilies),
                         [](const auto& one) { return std::string(one.param.name); });

TEST(Golden, HasThirtyFourFamilies) {
  EXPECT_EQ(std::size(kFamilies), 34u);
}

TEST(Golden, LoadBalancingLoss) {
  const auto file = test::load_safetensors(golden_path("load_balancing_loss.safetensors"));
  const std::vector<oracle::Vec> logits = {file.at("logits.0").as_double(),
                                           file.at("logits.1").as_double()};
  oracle::LossConfig config;
  config.experts = static_cast<int>(file.at("logits.0").shape[1]);
  config.top_k = std::stoi(file.metadata.at("top_k"));
  oracle::Mask mask;
  for (double m : file.at("mask").as_double()) mask.push_back(m != 0);
  for (const std::string kind : {"nomask", "mask"}) {
    const auto loss = oracle::aux_loss(config, logits, kind == "mask" ? mask : oracle::Mask{});
    const double expected = file.at(kind + ".loss").as_double()[0];
    EXPECT_NEAR(loss.value, expected, kTolerance * expected) << kind;
    for (size_t layer = 0; layer < 2; ++layer) {
      const auto gradient = file.at(kind + ".g." + std::to_string(layer)).as_double();
      const test::RowError error =
          test::row_error(loss.d_logits[layer], gradient, static_cast<size_t>(config.experts));
      EXPECT_LE(error.error, kTolerance) << kind << " layer " << layer << ": " << error;
    }
  }
}

}  // namespace
}  // namespace moec::golden
