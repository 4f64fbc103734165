// SPDX-License-Identifier: Apache-2.0
// Layers of quantised experts: forward, d_x, d_routing_weights and the gradients of biases against
// the oracle on the dequantised weights; on the CPU with the bits of a layer that holds those
// values, packed or not. Shown once to fail: zero points left out, the scale of the next channel,
// a packed copy whose down has the form of up.
#include <gtest/gtest.h>

#include <cmath>
#include <ostream>
#include <string>

#include "cases/feature_cases.h"
#include "support/int8_codes.h"
#include "support/layer_check.h"
#include "support/quant_draw.h"
#include "support/skip.h"

namespace moec::test {
namespace {

using oracle::Coded;
using oracle::CodedMlp;
using oracle::Vec;

constexpr int kHidden = 77, kInter = 45, kSharedInter = 19, kExperts = 5, kTokens = 60;

struct Case {
  const char* name;
  uint32_t gate_layout, gate_up, down;  // orientations
  bool per_expert, zeros, biases;
  bool codes_gate_up = true, codes_down = true;
  bool f32_scales = true;  // else of the type of the layer
  oracle::Act activation = oracle::Act::kSwiglu;
};
void PrintTo(const Case& c, std::ostream* out) {
  *out << c.name;
}
constexpr uint32_t kOutIn = MOEC_OUT_IN, kInOut = MOEC_IN_OUT;
const Case kCases[] = {
    {"split", MOEC_GATE_SPLIT, kOutIn, kOutIn, false, false, false},
    {"split_per_expert", MOEC_GATE_SPLIT, kOutIn, kInOut, true, true, true, true, true, false},
    {"gate_then_up", MOEC_GATE_THEN_UP, kOutIn, kOutIn, false, true, true, true, true, false},
    {"gate_then_up_in_out", MOEC_GATE_THEN_UP, kInOut, kInOut, false, true, false},
    {"up_then_gate_per_expert", MOEC_UP_THEN_GATE, kInOut, kOutIn, true, false, true},
    {"interleaved", MOEC_GATE_INTERLEAVED, kOutIn, kInOut, false, false, true, true, true, false},
    {"interleaved_in_out_per_expert", MOEC_GATE_INTERLEAVED, kInOut, kOutIn, true, true, true},
    {"plain_mlp", MOEC_GATE_NONE, kOutIn, kOutIn, false, true, true, true, true, true,
     oracle::Act::kRelu2},
    {"only_gate_up", MOEC_GATE_THEN_UP, kOutIn, kOutIn, false, true, true, true, false},
    {"only_down", MOEC_GATE_SPLIT, kInOut, kOutIn, true, true, true, false, true},
};

Vec values(const std::string& seed, int64_t count, double scale) {
  Vec v = oracle::random_values(seed, static_cast<size_t>(count), scale);
  oracle::round_to_all(&v);
  return v;
}

struct Problem {
  oracle::Config config;
  oracle::Inputs in;
  Vec d_y;
  CodedMlp codes, shared_codes;

  Problem(const Case& c, moec_dtype dtype) {
    Random random(11);
    config.router.num_experts = kExperts;
    config.router.top_k = 2;
    config.router.norm = oracle::Norm::kSum;
    config.router.select = oracle::Select::kGiven;
    config.experts.hidden = kHidden;
    config.experts.inter = kInter;
    config.experts.activation.kind = config.experts.shared_activation.kind = c.activation;
    in.tokens = kTokens;
    for (int t = 0; t < kTokens; ++t) {  // expert 3 has no rows, expert 4 few
      const int first = static_cast<int>(random.below(3));
      in.given_ids.insert(in.given_ids.end(), {first, t < 3 ? 4 : (first + 1) % 3});
    }
    in.x = values("x", kTokens * kHidden, 1);
    d_y = values("d_y", kTokens * kHidden, 1);
    in.gate_weight = values("router", kExperts * kHidden, 1 / std::sqrt(kHidden));
    if (c.biases) {
      config.experts.shared = oracle::Shared::kAdd;
      config.experts.shared_inter = kSharedInter;
    }
    const moec_dtype scale_dtype = c.f32_scales ? moec_dtype(MOEC_F32) : dtype;
    fill(c, dtype, scale_dtype, kExperts, kInter, &random, &in.experts, &codes);
    if (c.biases) fill(c, dtype, scale_dtype, 1, kSharedInter, &random, &in.shared, &shared_codes);
  }

  static void fill(const Case& c, moec_dtype dtype, moec_dtype scale_dtype, int experts, int inter,
                   Random* random, oracle::MlpWeights* w, CodedMlp* coded) {
    const auto matrix = [&](bool has_codes, int rows, int inputs, Vec* plain, Coded* codes) {
      *codes = int8_codes(experts, rows, inputs, c.zeros, scale_dtype, random);
      *plain = oracle::dequantise_int8(*codes, rounding_of(dtype));
      if (!has_codes) *codes = {};
    };
    const bool gated = oracle::is_gated(c.activation);
    if (gated) matrix(c.codes_gate_up, inter, kHidden, &w->gate, &coded->gate);
    matrix(c.codes_gate_up, inter, kHidden, &w->up, &coded->up);
    matrix(c.codes_down, kHidden, inter, &w->down, &coded->down);
    if (!c.biases) return;
    if (gated) w->gate_bias = values("gate_bias", experts * inter, 0.5);
    w->up_bias = values("up_bias", experts * inter, 0.5);
    w->down_bias = values("down_bias", experts * kHidden, 0.5);
  }
};

// Quantised matrices are frozen: what the oracle says of their gradients is left out.
void drop_frozen(const Case& c, oracle::Gradients* g) {
  for (oracle::MlpWeights* w : {&g->experts, &g->shared}) {
    if (c.codes_gate_up) w->gate = w->up = {};
    if (c.codes_down) w->down = {};
  }
}

RunOptions options_of(const Case& c, const Type& type) {
  RunOptions options;
  options.dtype = type.dtype;
  options.layout.gate_layout = c.gate_layout;
  options.layout.gate_up_orientation = c.gate_up;
  options.layout.down_orientation = c.down;
  options.layout.per_expert = c.per_expert;
  return options;
}

// A layer of codes, which `options` bind, as bound and packed. p: with the values of the codes.
void expect_of_values(const Problem& p, const Case& c, const Type& type, RunOptions options) {
  LayerRun plain;
  if (test_device().type == MOEC_CPU)
    plain = run_layer(p.config, p.in, p.d_y, {}, options_of(c, type));
  for (const bool packed : {false, true}) {
    SCOPED_TRACE(packed ? "packed" : "as bound");
    options.frozen = packed;
    options.save = packed ? MOEC_SAVE_INPUT : MOEC_SAVE_PREACT;
    const LayerRun run = run_layer(p.config, p.in, p.d_y, {}, options);
    OracleRun expected = run_oracle(as_rounded(p.config, run.rounding), p.in, p.d_y, {});
    drop_frozen(c, &expected.grads);
    expect_matches(run, expected, p.config, p.in, type.tolerance);
    if (test_device().type != MOEC_CPU) continue;
    if (type.dtype == MOEC_BF16) continue;  // few rows are summed in another order
    EXPECT_EQ(run.y, plain.y);
    EXPECT_EQ(run.grads.x, plain.grads.x);
    EXPECT_EQ(run.grads.routing_weights, plain.grads.routing_weights);
    EXPECT_EQ(run.grads.experts.down_bias, plain.grads.experts.down_bias);
  }
}

class Formats : public testing::TestWithParam<Case> {};
INSTANTIATE_TEST_SUITE_P(Int8, Formats, testing::ValuesIn(kCases),
                         [](const auto& one) { return std::string(one.param.name); });

TEST_P(Formats, MatchTheOracleAndThePlainLayer) {
  SCOPED_TRACE(seed_note());
  const Case& c = GetParam();
  for (const Type& type : kTypes) {
    SCOPED_TRACE(type.name);
    const Problem p(c, type.dtype);
    RunOptions options = options_of(c, type);
    options.codes = &p.codes;
    options.shared_codes = &p.shared_codes;
    options.layout.scale_dtype = c.f32_scales ? moec_dtype(MOEC_F32) : type.dtype;
    expect_of_values(p, c, type, options);
  }
}

// FP8 with biases and a shared expert.
TEST(Fp8, WithBiasesMatchesTheOracleAndThePlainLayer) {
  SCOPED_TRACE(seed_note());
  const Case c = {"fp8", MOEC_GATE_THEN_UP, kOutIn, kOutIn, false, false, true};
  Random random(12);
  for (const QuantCase& format : kQuantCases) {
    if (format.scheme != oracle::Scheme::kFp8) continue;
    for (const Type& type : kTypes) {
      SCOPED_TRACE(std::string(format.name) + " " + type.name);
      Problem p(c, type.dtype);
      const auto drawn = [&](int experts, int inter) {
        return DrawnCodes(&format, &format, {c.gate_layout, false, false, false, kHidden, inter},
                          experts, &random);
      };
      DrawnCodes codes = drawn(kExperts, kInter), shared = drawn(1, kSharedInter);
      codes.replace(type.dtype, &p.in.experts);
      shared.replace(type.dtype, &p.in.shared);
      RunOptions options = options_of(c, type);
      options.bound = &codes.bound();
      options.shared_bound = &shared.bound();
      expect_of_values(p, c, type, options);
    }
  }
}

}  // namespace
}  // namespace moec::test
