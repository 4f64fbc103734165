// SPDX-License-Identifier: Apache-2.0
// Layers with adapters in PEFT's storage against PEFT's numbers: one adapter, another, and both.
#include <gtest/gtest.h>

#include <cmath>
#include <string>

#include "golden/golden_case.h"
#include "support/adapter_check.h"
#include "support/golden_adapters.h"
#include "support/layer_runner.h"
#include "support/safetensors.h"
#include "support/skip.h"

namespace moec::test {
namespace {

using oracle::Adapter;
using oracle::Vec;

TEST(Adapters, GiveTheNumbersOfPeft) {
  const SafeTensors file =
      load_safetensors(golden::golden_path("adapters/bf16_two_adapters.safetensors"));
  const int E = 4, H = 96, I = 32, K = 2;
  oracle::Config config;
  config.experts.hidden = H;
  config.experts.inter = I;
  config.router.num_experts = E;
  config.router.top_k = K;
  config.router.select = oracle::Select::kGiven;
  config.router.score = oracle::Score::kIdentity;  // weights are logits, read from router_x
  oracle::Inputs in;
  in.x = file.at("x").as_double();
  in.tokens = static_cast<int>(in.x.size()) / H;
  in.gate_weight.assign(size_t(E * H), 0);
  for (int e = 0; e < E; ++e) in.gate_weight[size_t(e * H + e)] = 1;
  in.router_x.assign(in.x.size(), 0);
  const Vec ids = file.at("ids").as_double(), weights = file.at("weights").as_double();
  for (size_t i = 0; i < ids.size(); ++i) {
    in.given_ids.push_back(static_cast<int>(ids[i]));
    in.router_x[i / K * H + size_t(ids[i])] = weights[i];
  }
  golden::split_gate_up({E, 2 * I, H, false}, golden::GateLayout::kGateThenUp,
                        file.at("ckpt.experts.gate_up_proj").as_double(), &in.experts.gate,
                        &in.experts.up);
  in.experts.down = file.at("ckpt.experts.down_proj").as_double();
  const auto tensor = [&](const std::string& name) { return file.at(name).as_double(); };
  const GoldenExperts of = {E, H, I, golden::GateLayout::kGateThenUp};
  const struct {
    const char* tag;
    std::string names;
  } sets[] = {{"ref_lora", "a"}, {"ref_lora_b", "b"}, {"ref_lora_ab", "ab"}};
  for (const auto& set : sets) {
    SCOPED_TRACE(set.tag);
    const std::string tag = std::string(set.tag) + ".";
    in.adapters.clear();
    std::vector<Adapter> expected;
    for (const char name : set.names) {
      const double scale = name == 'a' ? 2 : double(float(std::sqrt(8.0)));
      const std::string own = std::string(1, name) + ".";
      in.adapters.push_back(golden_adapter(file, "lora." + own, "weight", of, scale));
      expected.push_back(golden_adapter(file, tag + own, "grad", of, scale));
    }
    for (const bool is_f32 : {true, false}) {
      SCOPED_TRACE(is_f32 ? "f32" : "bf16");
      RunOptions options;
      options.dtype = is_f32 ? MOEC_F32 : MOEC_BF16;
      options.layout.gate_layout = MOEC_GATE_THEN_UP;
      options.adapters = {MOEC_GATE_THEN_UP, true, false, FactorStorage::kPeft, MOEC_F32};
      const LayerRun run = run_layer(config, in, tensor("dy"), {}, options);
      ASSERT_EQ(run.status, MOEC_OK) << run.message;
      const double tolerance = is_f32 ? 1e-5 : 2e-2;
      const auto compare = [&](const char* name, const Vec& got, size_t columns) {
        const RowError error = row_error(got, tensor(tag + name), columns, kTypicalRow);
        EXPECT_LE(error.error, tolerance) << name << ": " << error;
      };
      compare("y", run.y, H);
      compare("dx", run.grads.x, H);
      compare("dweights", run.grads.routing_weights, K);
      expect_adapters(run.grads.adapters, expected, H, I, tolerance);
    }
  }
}

}  // namespace
}  // namespace moec::test
