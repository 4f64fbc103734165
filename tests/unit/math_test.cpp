// SPDX-License-Identifier: Apache-2.0
// Elementary functions beside libm in double, and the same bits for every instruction set; Philox
// beside its authors' known answers.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "backend/cpu/vectorised.h"
#include "math/exp.h"
#include "math/philox.h"
#include "unit/cpu_device.h"

namespace moec::test {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();

// Every 4099th fp32 value: both signs, subnormals, infinities, NaN.
std::vector<float> samples() {
  std::vector<float> all = {0.0f, -0.0f, 1.0f, -1.0f, kInf, -kInf, 0x1p-149f, 88.7228f, -103.98f};
  for (uint64_t bits = 0; bits < uint64_t(1) << 32; bits += 4099)
    all.push_back(math::float_of(uint32_t(bits)));
  return all;
}

struct Function {
  const char* name;
  float (*ours)(float);
  double (*reference)(double);
  float low;
  double ulps;
};
double softplus(double x) {
  return std::max(x, 0.0) + std::log1p(std::exp(-std::fabs(x)));
}
double sigmoid(double x) {
  return 1 / (1 + std::exp(-x));
}
const Function kFunctions[] = {
    {"exp", math::exp, std::exp, -kInf, 1.1},           {"log", math::log, std::log, 0, 0.8},
    {"log1p", math::log1p, std::log1p, 0, 1.2},         {"tanh", math::tanh, std::tanh, -kInf, 1.4},
    {"sigmoid", math::sigmoid, sigmoid, -87, 2.4},  // below: 1 / infinity
    {"softplus", math::softplus, softplus, -kInf, 2.1},
};

// Shown to fail when the last coefficient of any of the polynomials is left out.
TEST(Math, functions_are_within_their_ulps) {
  for (const Function& f : kFunctions) {
    for (const float x : samples()) {
      const float got = f.ours(x);
      if (std::isnan(x)) {
        ASSERT_TRUE(std::isnan(got)) << f.name;
        continue;
      }
      if (x < f.low) continue;
      const double want = f.reference(double(x));
      const auto rounded = float(want);
      if (std::isinf(rounded)) {
        ASSERT_EQ(got, rounded) << f.name << " of " << x;
        continue;
      }
      const float size = std::fabs(rounded);
      const double ulp = double(std::nextafter(size, kInf)) - double(size);
      ASSERT_LE(std::fabs(double(got) - want), f.ulps * ulp) << f.name << " of " << x;
    }
  }
  EXPECT_TRUE(std::isnan(math::log(-1.0f)));
}

void evaluate(const float* x, float* y, int64_t count) {
  for (int64_t i = 0; i < count; ++i)
    y[i] = math::exp(x[i]) + math::tanh(x[i]) * math::softplus(x[i]) + math::log(x[i]);
}

TEST(Math, bits_do_not_depend_on_the_instruction_set) {
  std::vector<float> x, one, other;
  for (const float v : samples())
    if (v > 0x1p-20f && v < 80.0f) x.push_back(v);
  one.resize(x.size()), other.resize(x.size());
  evaluate(x.data(), one.data(), int64_t(x.size()));
  for (const std::string& isa : isa_names()) {
    cpu::select_isa(isa.c_str());
    cpu::vectorised<evaluate>(x.data(), other.data(), int64_t(x.size()));
    EXPECT_EQ(one, other) << isa;
  }
  cpu::select_isa(nullptr);
}

TEST(Math, philox_known_answers) {  // Random123's kat_vectors
  const math::Philox4 zero = math::philox(0, 0);
  EXPECT_EQ(zero.word[0], 0x6627e8d5u);
  EXPECT_EQ(zero.word[1], 0xe169c58du);
  EXPECT_EQ(zero.word[2], 0xbc57ac4cu);
  EXPECT_EQ(zero.word[3], 0x9b00dbd8u);
}

TEST(Math, jitter_stays_within_its_bounds_and_covers_them) {
  float low = 2, high = 0;
  for (uint64_t i = 0; i < 20000; ++i) {
    const float factor = math::jitter_factor(0.25f, 7, (uint64_t(1) << 32) - 10000 + i);
    low = std::min(low, factor), high = std::max(high, factor);
  }
  EXPECT_GE(low, 0.75f);
  EXPECT_LT(low, 0.7502f);
  EXPECT_LT(high, 1.25f);
  EXPECT_GT(high, 1.2498f);
}

}  // namespace
}  // namespace moec::test
