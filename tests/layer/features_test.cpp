// SPDX-License-Identifier: Apache-2.0
// Every enumerator and trap of the descriptors (tests/cases) through the public C API against the
// oracle, forward and every gradient, in fp32. That each case can fail is shown by oracle_test: its
// mutations move a result by three times this tolerance or more.
#include <gtest/gtest.h>

#include <ostream>
#include <string>
#include <vector>

#include "cases/feature_cases.h"
#include "support/layer_check.h"
#include "support/random.h"
#include "support/skip.h"

namespace moec::oracle {

void PrintTo(const FeatureCase& c, std::ostream* out) {
  *out << c.name;
}

namespace {

constexpr double kTolerance = 2e-5;
// Of the largest row: a gradient's row is the sum of a few tokens, and may nearly cancel or lie
// where an activation is all but flat. Where 0.01 counted, one seed in ten had such a row.
constexpr double kSmallRow = 0.1;

class FeatureLayerTest : public testing::TestWithParam<FeatureCase> {};

TEST_P(FeatureLayerTest, MatchesTheOracle) {
  SCOPED_TRACE(test::seed_note());
  const FeatureCase& c = GetParam();
  const test::OracleRun reference = test::run_oracle(c.config, c.in, c.d_y, c.d_logits_in);
  const test::LayerRun run = test::run_layer(c.config, c.in, c.d_y, c.d_logits_in);
  test::expect_matches(run, reference, c.config, c.in, kTolerance, kSmallRow);
}

INSTANTIATE_TEST_SUITE_P(Layer, FeatureLayerTest, testing::ValuesIn(all_cases()),
                         [](const auto& one) { return one.param.name; });

// What changes how a result is computed, never what it is.
struct Variant {
  std::string name;
  test::RunOptions options;
  int align = 1;  // rows of an expert
};
void PrintTo(const Variant& c, std::ostream* out) {
  *out << c.name;
}
std::vector<Variant> variants() {
  std::vector<Variant> all;
  const auto add = [&](const std::string& name) -> test::RunOptions& {
    all.push_back({name, {}});
    return all.back().options;
  };
  const char* const layouts[] = {"split", "gate_then_up", "up_then_gate", "interleaved"};
  for (uint32_t layout = MOEC_GATE_SPLIT; layout <= MOEC_GATE_INTERLEAVED; ++layout) {
    for (uint32_t orientation : {MOEC_OUT_IN, MOEC_IN_OUT}) {
      for (bool per_expert : {false, true}) {
        const char* const order = orientation == MOEC_IN_OUT ? "_in_out" : "_out_in";
        test::RunOptions& o =
            add(std::string(layouts[layout]) + order + (per_expert ? "_per_expert" : ""));
        o.layout.gate_layout = layout;
        o.layout.gate_up_orientation = orientation;
        if (!per_expert) o.layout.down_orientation = orientation;
        o.layout.per_expert = per_expert;
      }
    }
  }
  add("frozen").frozen = true;
  const char* const saves[] = {"none", "input", "preact", "all"};
  for (uint32_t save = MOEC_SAVE_NONE; save <= MOEC_SAVE_PREACT; ++save)
    add(std::string("save_") + saves[save]).save = save;
  add("combine_fp32_expert").combine = MOEC_COMBINE_FP32_EXPERT;
  add("combine_data_expert").combine = MOEC_COMBINE_DATA_EXPERT;
  add("act_per_op").act_rounding = MOEC_ACT_PER_OP;
  add("one_thread").num_threads = 1;
  add("three_threads").num_threads = 3;
  for (const int align : {2, 16, 64, 1024}) {
    add("align_" + std::to_string(align));
    all.back().align = align;
  }
  return all;
}

// A gated case with everything, and a plain one.
std::vector<FeatureCase> variant_cases() {
  FeatureCase gated = base_case("variants");
  gated.config.experts.activation.kind = Act::kGptoss;
  gated.config.experts.activation.limit = 1;
  gated.config.router.norm = Norm::kSum;
  add_expert_biases(&gated);
  add_shared(&gated, Shared::kSigmoidGate, 7, Act::kSwiglu);
  gated.in.residual = random_values("residual", gated.in.x.size());
  FeatureCase plain = gated;
  plain.config.experts.activation.kind = Act::kRelu2;
  plain.config.experts.weight_position = WeightPosition::kActivation;
  plain.in.experts.gate.clear();
  plain.in.experts.gate_bias.clear();
  return {gated, plain};
}

class VariantTest : public testing::TestWithParam<Variant> {};

TEST_P(VariantTest, MatchesTheOracle) {
  SCOPED_TRACE(test::seed_note());
  for (FeatureCase c : variant_cases()) {
    c.config.plan.align = GetParam().align;
    const test::OracleRun reference = test::run_oracle(c.config, c.in, c.d_y, c.d_logits_in);
    const test::LayerRun run =
        test::run_layer(c.config, c.in, c.d_y, c.d_logits_in, GetParam().options);
    test::expect_matches(run, reference, c.config, c.in, kTolerance, kSmallRow);
  }
}

INSTANTIATE_TEST_SUITE_P(Layer, VariantTest, testing::ValuesIn(variants()),
                         [](const auto& one) { return one.param.name; });

}  // namespace
}  // namespace moec::oracle
