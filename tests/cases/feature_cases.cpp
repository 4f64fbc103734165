// SPDX-License-Identifier: Apache-2.0
#include "feature_cases.h"

#include <cmath>
#include <utility>

#include "support/random.h"

namespace moec::oracle {
namespace {

constexpr int kHidden = 12, kInter = 10, kExperts = 8, kTopK = 3;

MlpWeights random_mlp(const std::string& seed, int experts, int hidden, int inter, bool gated) {
  const auto matrix = static_cast<size_t>(experts * hidden * inter);
  MlpWeights w;
  if (gated) w.gate = random_values(seed + ".gate", matrix, 0.4);
  w.up = random_values(seed + ".up", matrix, 0.4);
  w.down = random_values(seed + ".down", matrix, 0.4);
  return w;
}

}  // namespace

Vec random_values(const std::string& seed, size_t count, double scale) {
  uint64_t stream = 14695981039346656037u;  // FNV-1a of the name
  for (char c : seed) stream = (stream ^ static_cast<unsigned char>(c)) * 1099511628211u;
  Vec values = test::Random(stream).normals(count, scale);
  for (double& v : values) v = round_to(Rounding::kFp32, v);
  return values;
}

void round_to_all(Vec* values) {
  for (double& v : *values) {
    v = round_to(Rounding::kBf16, v);
    if (std::fabs(v) < 0x1p-14) v = 0;
  }
}

FeatureCase base_case(const std::string& name, int tokens) {
  const auto rows = static_cast<size_t>(tokens);
  FeatureCase c;
  c.name = name;
  c.config.router.num_experts = kExperts;
  c.config.router.top_k = kTopK;
  c.config.experts.hidden = kHidden;
  c.config.experts.inter = kInter;
  c.in.tokens = tokens;
  c.in.x = random_values(name + ".x", rows * kHidden);
  c.in.gate_weight = random_values(name + ".gate_weight", kExperts * kHidden, 0.4);
  c.in.experts = random_mlp(name, kExperts, kHidden, kInter, true);
  c.d_y = random_values(name + ".d_y", rows * kHidden);
  c.d_logits_in = random_values(name + ".d_logits_in", rows * kExperts, 0.2);
  return c;
}

void add_expert_biases(FeatureCase* c, double scale) {
  const auto inter = static_cast<size_t>(kExperts * kInter);
  if (!c->in.experts.gate.empty())
    c->in.experts.gate_bias = random_values(c->name + ".gate_bias", inter, scale);
  c->in.experts.up_bias = random_values(c->name + ".up_bias", inter, scale);
  c->in.experts.down_bias = random_values(c->name + ".down_bias", kExperts * kHidden, scale);
}

void add_shared(FeatureCase* c, Shared shared, int inter, Act act) {
  c->config.experts.shared = shared;
  c->config.experts.shared_inter = inter;
  c->config.experts.shared_activation.kind = act;
  c->in.shared = random_mlp(c->name + ".shared", 1, kHidden, inter, is_gated(act));
  if (shared == Shared::kSigmoidGate)
    c->in.shared_gate = random_values(c->name + ".mix", kHidden, 0.4);
  if (shared == Shared::kSoftmax2) {
    c->in.shared_gate = random_values(c->name + ".mix", 2 * kHidden, 0.4);
    c->in.shared_gate_bias = random_values(c->name + ".mix_bias", 2, 0.5);
  }
}

void mutate(FeatureCase* c, const std::string& name, std::function<void(Config*, Inputs*)> apply) {
  c->mutations.push_back({name, std::move(apply)});
}

void mutate(FeatureCase* c, const std::string& name, Fault fault) {
  mutate(c, name, [fault](Config* config, Inputs*) { config->fault = fault; });
}

std::vector<FeatureCase> all_cases() {
  std::vector<FeatureCase> cases = router_cases();
  for (FeatureCase& c : selection_cases()) cases.push_back(std::move(c));
  for (FeatureCase& c : expert_cases()) cases.push_back(std::move(c));
  return cases;
}

}  // namespace moec::oracle
