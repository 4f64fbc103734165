// SPDX-License-Identifier: Apache-2.0
// Frozen quantised experts of a checkpoint: y, d_x and d_routing_weights of the library's own
// values. ref is of values in fp32, ref_lib of values that the library rounded to bf16. Shown once
// to fail: scales of gate and up exchanged.
#include <gtest/gtest.h>

#include <ostream>
#include <string>

#include "golden/golden_case.h"
#include "support/compare.h"
#include "support/layer_runner.h"
#include "support/skip.h"

namespace moec::golden {
namespace {

using oracle::Vec;

struct Case {
  const char *name, *file, *reference;
  moec_dtype dtype;
  double tolerance;
};
void PrintTo(const Case& c, std::ostream* out) {
  *out << c.name;
}
const Case kCases[] = {
    {"ct_int8_channel_f32", "quant/ct_int8_channel", "ref.", MOEC_F32, 1e-5},
    {"ct_int8_channel_bf16", "quant/ct_int8_channel", "ref_lib.", MOEC_BF16, 1e-2},
};

// A checkpoint's experts, one after the other.
oracle::Coded coded(const test::SafeTensors& file, int experts, const std::string& matrix) {
  oracle::Coded all;
  const auto append = [&](Vec* to, const std::string& name) {
    const Vec part = file.at(name).as_double();
    to->insert(to->end(), part.begin(), part.end());
  };
  for (int e = 0; e < experts; ++e) {
    const std::string name = "ckpt.experts." + std::to_string(e) + "." + matrix + ".weight";
    append(&all.codes, name);
    append(&all.scales, name + "_scale");
  }
  return all;
}

class Frozen : public testing::TestWithParam<Case> {};
INSTANTIATE_TEST_SUITE_P(Golden, Frozen, testing::ValuesIn(kCases),
                         [](const auto& one) { return std::string(one.param.name); });

TEST_P(Frozen, LayerOfQuantisedExperts) {
  const Case& c = GetParam();
  const auto file = test::load_safetensors(golden_path(std::string(c.file) + ".safetensors"));
  const int experts = 4, hidden = 96, inter = 32, slots = 2;
  oracle::Config config;
  config.experts.hidden = hidden;
  config.experts.inter = inter;
  // The file gives routing weights: logits of an identity score are those of a router that reads
  // them from its own input.
  config.router.num_experts = experts;
  config.router.top_k = slots;
  config.router.select = oracle::Select::kGiven;
  config.router.score = oracle::Score::kIdentity;
  oracle::Inputs in;
  in.x = file.at("x").as_double();
  in.tokens = static_cast<int>(in.x.size()) / hidden;
  in.gate_weight.assign(size_t(experts * hidden), 0);
  for (int e = 0; e < experts; ++e) in.gate_weight[size_t(e * hidden + e)] = 1;
  in.router_x.assign(in.x.size(), 0);
  const Vec ids = file.at("ids").as_double(), weights = file.at("weights").as_double();
  for (size_t i = 0; i < ids.size(); ++i) {
    in.given_ids.push_back(static_cast<int>(ids[i]));
    in.router_x[i / slots * hidden + size_t(ids[i])] = weights[i];
  }
  const oracle::CodedMlp codes{coded(file, experts, "gate_proj"), coded(file, experts, "up_proj"),
                               coded(file, experts, "down_proj")};
  in.experts.gate = oracle::dequantise_int8(codes.gate, test::rounding_of(c.dtype));
  in.experts.up = oracle::dequantise_int8(codes.up, test::rounding_of(c.dtype));
  in.experts.down = oracle::dequantise_int8(codes.down, test::rounding_of(c.dtype));
  test::RunOptions options;
  options.dtype = c.dtype;
  options.codes = &codes;
  options.layout.scale_dtype = MOEC_BF16;  // as in the checkpoint
  for (const bool packed : {false, true}) {
    SCOPED_TRACE(packed ? "packed" : "as bound");
    options.frozen = packed;
    options.layout.gate_layout = packed ? MOEC_GATE_THEN_UP : MOEC_GATE_SPLIT;
    const test::LayerRun run = test::run_layer(config, in, file.at("dy").as_double(), {}, options);
    ASSERT_EQ(run.status, MOEC_OK) << run.message;
    const auto compare = [&](const char* name, const Vec& got, size_t columns) {
      const Vec expected = file.at(std::string(c.reference) + name).as_double();
      const test::RowError error = test::row_error(got, expected, columns);
      EXPECT_LE(error.error, c.tolerance) << name << ": " << error;
    };
    compare("y", run.y, hidden);
    compare("dx", run.grads.x, hidden);
    compare("dweights", run.grads.routing_weights, slots);
  }
}

}  // namespace
}  // namespace moec::golden
