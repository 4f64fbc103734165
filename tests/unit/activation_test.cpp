// SPDX-License-Identifier: Apache-2.0
// Every activation against the oracle's own formulas, at clamps and far out; the row loops of each
// instruction set against the scalar formulas, bit for bit.
// Mutations seen to fail: `<=` of keeps_gate made `<`; a lower clamp on the gate of gptoss; the +1
// of gptoss dropped; one coefficient of normal_cdf changed in its last digit but two.
#include "math/activation.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <iterator>
#include <string>
#include <vector>

#include "backend/cpu/row_math.h"
#include "core/dtype.h"
#include "oracle/moe_oracle.h"
#include "support/random.h"
#include "unit/isas.h"

namespace moec {
namespace {

using math::Activations;

moec_activation with_defaults(uint32_t kind) {
  const math::ActivationInfo& info = math::activation_info(kind);
  moec_activation p = {};
  p.kind = kind;
  p.alpha = info.default_alpha;
  p.limit = info.uses_limit ? 3.0f : 0.0f;
  p.offset = info.uses_offset ? 0.75f : 0.0f;
  p.beta = info.default_beta;
  p.linear_beta = info.uses_beta ? 5.0f : 0.0f;
  return p;
}

oracle::Activation oracle_of(const moec_activation& p) {
  return {oracle::Act(p.kind), p.alpha, p.limit, p.offset, p.beta, p.linear_beta};
}

// Values around 0, at and beside the clamps, and far out.
std::vector<float> points() {
  std::vector<float> v = {0.0f, -0.0f, 3.0f, -3.0f, 1e-6f, -1e-3f, 30.0f, -30.0f, -90.0f, 90.0f};
  v.push_back(std::nextafter(3.0f, 4.0f));
  v.push_back(-std::nextafter(3.0f, 4.0f));
  test::Random random(1);
  for (int i = 0; i < 60; ++i) v.push_back(float(3 * random.normal()));
  return v;
}

// terms: the size of what ref is a sum of, where that may cancel.
void expect_near(float got, double ref, const std::string& what, double terms = 0) {
  const double size = std::max(std::abs(ref), terms);
  EXPECT_LE(std::abs(got - ref), 2e-6 * size + 2e-7) << what << ": " << got << " not " << ref;
}

TEST(Activation, ListIsTheOracles) {
  ASSERT_EQ(Activations::kCount, std::size(oracle::kActs));
  for (uint32_t i = 0; i < Activations::kCount; ++i) {
    const math::ActivationInfo& ours = Activations::kInfos[i];
    const oracle::ActInfo& reference = oracle::kActs[i];
    EXPECT_STREQ(ours.name, reference.name);
    EXPECT_EQ(ours.gated, reference.gated) << ours.name;
    EXPECT_EQ(ours.uses_alpha, reference.alpha) << ours.name;
    EXPECT_EQ(ours.uses_limit, reference.limit) << ours.name;
    EXPECT_EQ(ours.uses_offset, reference.offset) << ours.name;
    EXPECT_EQ(ours.uses_beta, reference.beta) << ours.name;
  }
}

// What backends with one code for all such activations evaluate.
TEST(Activation, SigmoidFormIsTheActivation) {
  int forms = 0;
  for (uint32_t kind = 0; kind < Activations::kCount; ++kind) {
    const moec_activation p = with_defaults(kind);
    const auto form = math::sigmoid_form(p);
    if (!form) continue;
    ++forms;
    for (float g : points())
      for (float u : points()) {
        const double limit = form->limit, gate = std::min<double>(g, limit);
        const double exponent = form->alpha * (gate + form->cubic * gate * gate * gate);
        const double up = std::clamp<double>(u, -limit, limit) + form->offset;
        expect_near(float(gate / (1 + std::exp(-exponent)) * up),
                    oracle::activate(oracle_of(p), g, u), math::activation_info(kind).name);
      }
  }
  EXPECT_EQ(forms, 5);
}

// A bounded up has the slope 1 - tanh^2: a difference of two terms, each at most what it is at 0.
double up_slope_terms(const moec_activation& p, float g) {
  double d_gate = 0, d_up = 0;
  if (p.linear_beta > 0) oracle::activate_backward(oracle_of(p), g, 0, &d_gate, &d_up);
  return std::abs(d_up);
}

TEST(Activation, MatchesOracle) {
  Activations::for_each([]<class Kind>() {
    const moec_activation p = with_defaults(Kind::kInfo.kind);
    for (float g : points())
      for (float u : points()) {
        const std::string what = std::string(Kind::kInfo.name) + "(" + std::to_string(g) + ", " +
                                 std::to_string(u) + ")";
        double d_gate = 0, d_up = 0;
        oracle::activate_backward(oracle_of(p), g, u, &d_gate, &d_up);
        const math::Slopes slopes = Kind::slopes(p, g, u);
        expect_near(Kind::value(p, g, u, math::NoRounding()), oracle::activate(oracle_of(p), g, u),
                    what);
        if (Kind::kInfo.gated) expect_near(slopes.gate, d_gate, what + " d_gate", std::abs(u));
        expect_near(slopes.up, d_up, what + " d_up", up_slope_terms(p, g));
      }
  });
}

TEST(Activation, SituWithoutBoundOnUp) {
  moec_activation p = with_defaults(MOEC_ACT_SITU);
  p.linear_beta = 0;
  for (float g : points()) {
    expect_near(math::Situ::value(p, g, 50.0f, math::NoRounding()),
                oracle::activate(oracle_of(p), g, 50.0), "situ");
    double d_gate = 0, d_up = 0;
    oracle::activate_backward(oracle_of(p), g, 50.0, &d_gate, &d_up);
    expect_near(math::Situ::slopes(p, g, 50.0f).up, d_up, "situ d_up");
  }
}

TEST(Activation, NanStaysNan) {
  Activations::for_each([]<class Kind>() {
    const moec_activation p = with_defaults(Kind::kInfo.kind);
    EXPECT_TRUE(std::isnan(Kind::value(p, 1.0f, NAN, math::NoRounding()))) << Kind::kInfo.name;
    const float nan_gate = Kind::value(p, NAN, 1.0f, math::NoRounding());
    EXPECT_EQ(std::isnan(nan_gate), Kind::kInfo.gated) << Kind::kInfo.name;
  });
}

struct RoundBf16 {
  float operator()(float v) const { return to_float(from_float<bf16>(v)); }
};

// Published values of gptoss (alpha 1.702, limit 7), in fp32 and rounded to bf16 step by step.
TEST(Activation, GptossReferenceValues) {
  moec_activation p = with_defaults(MOEC_ACT_GPTOSS);
  p.limit = 7.0f;
  const float g[] = {0.5f, -1, 3, 9, -20, 6.96875f}, u[] = {0.25f, 2, -8.5f, 7.5f, 1, -7};
  const double once[] = {.43798554, -.46261269, -17.891573, 55.999626, -6.5868142e-14, -41.812206};
  const double stepped[] = {.4375, -.462890625, -17.75, 56, -6.8389737e-14, -41.75};
  for (int i = 0; i < 6; ++i) {
    const double a = math::Gptoss::value(p, g[i], u[i], math::NoRounding());
    const double b = math::Gptoss::value(p, g[i], u[i], RoundBf16());
    EXPECT_NEAR(a / once[i], 1, 1e-6) << i;
    EXPECT_NEAR(b / stepped[i], 1, 1e-7) << i;
  }
}

TEST(RowMath, SameBitsAsScalarFormulas) {
  std::vector<float> g, u;
  for (float a : points())
    for (float b : points()) g.push_back(a), u.push_back(b);
  const int64_t n = int64_t(g.size()) - 5;  // a ragged tail
  test::on_each_isa([&] {
    Activations::for_each([&]<class Kind>() {
      const moec_activation p = with_defaults(Kind::kInfo.kind);
      std::vector<float> out(g.size(), 99.0f), stepped = out, dg = g, du = u, h = out;
      cpu::activate(p, cpu::StepRounding::kNone, g.data(), u.data(), out.data(), n);
      cpu::activate(p, cpu::StepRounding::kBf16, g.data(), u.data(), stepped.data(), n);
      cpu::activation_slopes(p, dg.data(), du.data(), h.data(), n);
      for (size_t i = 0; i < size_t(n); ++i) {
        const math::Slopes slopes = Kind::slopes(p, g[i], u[i]);
        const bool same = out[i] == Kind::value(p, g[i], u[i], math::NoRounding()) &&
                          stepped[i] == Kind::value(p, g[i], u[i], RoundBf16()) && h[i] == out[i] &&
                          du[i] == slopes.up && (!Kind::kInfo.gated || dg[i] == slopes.gate);
        EXPECT_TRUE(same) << Kind::kInfo.name << " at " << g[i] << ", " << u[i];
      }
      EXPECT_EQ(out[size_t(n)], 99.0f);
    });
  });
}

TEST(RowMath, DotIsTheSameEverywhere) {
  test::Random random(2);
  std::vector<float> a(333), b(333);
  double exact = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    a[i] = float(random.normal());
    b[i] = float(random.normal());
    exact += double(a[i]) * b[i];
  }
  cpu::select_isa("portable");
  const float plain = cpu::dot(a.data(), b.data(), 333);
  EXPECT_NEAR(plain, exact, 1e-4);
  test::on_each_isa([&] { EXPECT_EQ(cpu::dot(a.data(), b.data(), 333), plain); });
}

}  // namespace
}  // namespace moec
