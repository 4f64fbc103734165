// SPDX-License-Identifier: Apache-2.0
// Cases of the experts: activations, weight positions, clamps, biases, shared experts, combine.
#include <iterator>
#include <utility>

#include "feature_cases.h"

namespace moec::oracle {
namespace {

constexpr const char* kPositionNames[] = {"output", "activation", "input"};

// The next kind of the table, with a gate if this one has it.
Act next_act(Act act) {
  size_t i = static_cast<size_t>(act);
  do i = (i + 1) % std::size(kActs);
  while (kActs[i].gated != is_gated(act));
  return kActs[i].kind;
}

// Pre-activations of about 1.6; the limit of 1 is reached often, from both sides.
FeatureCase act_case(const std::string& name, Act act) {
  FeatureCase c = base_case(name);
  c.config.experts.activation.kind = act;
  c.config.experts.activation.limit = 1;
  if (!is_gated(act)) c.in.experts.gate.clear();
  return c;
}

void add_act_mutations(FeatureCase* c, Act act) {
  if (act == Act::kGptoss || act == Act::kClampSwiglu)
    mutate(c, "lower clamp", Fault::kGateLowerClamp);
  if (info_of(act).limit) {
    mutate(c, "no up clamp", Fault::kNoUpClamp);
    mutate(c, "limit", [](Config* m, Inputs*) { m->experts.activation.limit = 1.5; });
  }
  if (info_of(act).alpha)
    mutate(c, "alpha", [](Config* m, Inputs*) { m->experts.activation.alpha = 1; });
  if (is_gated(act))
    mutate(c, "gate and up swapped", [](Config*, Inputs* in) {
      std::swap(in->experts.gate, in->experts.up);
      std::swap(in->experts.gate_bias, in->experts.up_bias);
    });
  mutate(c, "other activation",
         [next = next_act(act)](Config* m, Inputs*) { m->experts.activation.kind = next; });
}

void add_activation_cases(std::vector<FeatureCase>* cases) {
  for (const ActInfo& info : kActs) {
    for (size_t p = 0; p < std::size(kPositionNames); ++p) {
      const Act act = info.kind;
      FeatureCase c =
          act_case(std::string("act_") + info.name + "_weight_on_" + kPositionNames[p], act);
      c.config.experts.weight_position = static_cast<WeightPosition>(p);
      add_expert_biases(&c);
      add_act_mutations(&c, act);
      // Without biases output and activation are equal: all three positions need them to differ.
      const auto other = static_cast<WeightPosition>((p + 1) % std::size(kPositionNames));
      if (c.config.experts.weight_position != WeightPosition::kOutput)
        mutate(&c, "other position",
               [other](Config* m, Inputs*) { m->experts.weight_position = other; });
      if (c.config.experts.weight_position == WeightPosition::kActivation)
        mutate(&c, "down bias unweighted", Fault::kDownBiasUnweighted);
      mutate(&c, "no up bias", [](Config*, Inputs* in) { in->experts.up_bias.clear(); });
      mutate(&c, "no down bias", [](Config*, Inputs* in) { in->experts.down_bias.clear(); });
      if (is_gated(act))
        mutate(&c, "no gate bias", [](Config*, Inputs* in) { in->experts.gate_bias.clear(); });
      cases->push_back(c);
    }
  }
}

void add_parameter_cases(std::vector<FeatureCase>* cases) {
  FeatureCase seven = act_case("gptoss_limit_7", Act::kGptoss);
  seven.config.experts.activation.limit = 7;
  for (double& v : seven.in.experts.gate) v *= 8;
  for (double& v : seven.in.experts.up) v *= 8;
  mutate(&seven, "lower clamp", Fault::kGateLowerClamp);
  mutate(&seven, "no up clamp", Fault::kNoUpClamp);
  cases->push_back(seven);

  FeatureCase offset = act_case("quick_geglu_offset", Act::kQuickGeglu);
  offset.config.experts.activation.offset = 1;
  offset.config.experts.activation.alpha = 1.25;
  mutate(&offset, "none", [](Config* c, Inputs*) { c->experts.activation.offset = 0; });
  cases->push_back(offset);

  FeatureCase situ = act_case("situ_bounded", Act::kSitu);
  situ.config.experts.activation.beta = 1.5;
  situ.config.experts.activation.linear_beta = 2;
  mutate(&situ, "unbounded", [](Config* c, Inputs*) { c->experts.activation.linear_beta = 0; });
  mutate(&situ, "beta", [](Config* c, Inputs*) { c->experts.activation.beta = 4; });
  cases->push_back(situ);

  // g == L and u == +-L exactly: zero weights, the biases are the pre-activations.
  for (const Act act : {Act::kGptoss, Act::kClampSwiglu}) {
    FeatureCase edge = act_case(std::string("clamp_boundary_") + info_of(act).name, act);
    edge.in.experts.gate.assign(edge.in.experts.gate.size(), 0.0);
    edge.in.experts.up.assign(edge.in.experts.up.size(), 0.0);
    edge.in.experts.gate_bias.assign(80, 1.0);
    edge.in.experts.up_bias.assign(80, 1.0);
    for (size_t i = 0; i < 80; i += 2) edge.in.experts.up_bias[i] = -1;
    edge.differentiable = false;
    mutate(&edge, "exclusive", Fault::kClampGradExclusive);
    cases->push_back(edge);
  }
  FeatureCase edge = act_case("relu2_at_zero", Act::kRelu2);
  edge.in.experts.up.assign(edge.in.experts.up.size(), 0.0);
  edge.differentiable = false;
  mutate(&edge, "above", [](Config*, Inputs* in) { in->experts.up_bias.assign(80, 0.5); });
  cases->push_back(edge);
}

void add_output_cases(std::vector<FeatureCase>* cases) {
  FeatureCase scale = base_case("output_scale");
  scale.config.experts.output_scale = 2.5;
  add_shared(&scale, Shared::kAdd, 7, Act::kSwiglu);
  mutate(&scale, "off", [](Config* c, Inputs*) { c->experts.output_scale = 1; });
  cases->push_back(scale);

  FeatureCase bias = base_case("output_bias");
  bias.in.output_bias = random_values("output_bias", 12);
  bias.config.experts.output_scale = 0.5;
  mutate(&bias, "absent", [](Config*, Inputs* in) { in->output_bias.clear(); });
  cases->push_back(bias);

  FeatureCase residual = base_case("residual");
  residual.in.residual = random_values("residual", residual.in.x.size());
  residual.config.experts.output_scale = 0.5;
  mutate(&residual, "absent", [](Config*, Inputs* in) { in->residual.clear(); });
  cases->push_back(residual);
}

void add_shared_cases(std::vector<FeatureCase>* cases) {
  const std::pair<Shared, const char*> kinds[] = {{Shared::kAdd, "shared_add"},
                                                  {Shared::kSigmoidGate, "shared_sigmoid_gate"},
                                                  {Shared::kSoftmax2, "shared_softmax2"}};
  for (const auto& [kind, name] : kinds) {
    FeatureCase c = base_case(name);
    add_shared(&c, kind, 7, Act::kSwiglu);
    mutate(&c, "none", [](Config* m, Inputs*) { m->experts.shared = Shared::kNone; });
    if (kind != Shared::kAdd)
      mutate(&c, "plain sum", [](Config* m, Inputs*) { m->experts.shared = Shared::kAdd; });
    cases->push_back(c);

    // Everything at once: own activation, biases, output bias and scale, residual, other input.
    FeatureCase full = base_case(std::string(name) + "_full");
    full.config.experts.activation.kind = Act::kGegluErf;
    full.config.experts.output_scale = 1.5;
    add_expert_biases(&full);
    add_shared(&full, kind, 16, Act::kRelu2);
    full.in.shared.up_bias = random_values("shared.up_bias", 16, 0.5);
    full.in.shared.down_bias = random_values("shared.down_bias", 12, 0.5);
    full.in.output_bias = random_values("output_bias", 12);
    full.in.residual = random_values("residual", full.in.x.size());
    full.in.router_x = random_values("router_x", full.in.x.size());
    mutate(&full, "routed activation",
           [](Config* m, Inputs*) { m->experts.shared_activation.kind = Act::kSilu; });
    mutate(&full, "no up bias", [](Config*, Inputs* in) { in->shared.up_bias.clear(); });
    mutate(&full, "no down bias", [](Config*, Inputs* in) { in->shared.down_bias.clear(); });
    if (kind == Shared::kSoftmax2)
      mutate(&full, "no mix bias", [](Config*, Inputs* in) { in->shared_gate_bias.clear(); });
    cases->push_back(full);
  }
  for (const ActInfo& info : kActs) {
    FeatureCase c = base_case(std::string("shared_act_") + info.name);
    add_shared(&c, Shared::kAdd, 9, info.kind);
    c.config.experts.shared_activation.limit = 1;
    mutate(&c, "none", [](Config* m, Inputs*) { m->experts.shared = Shared::kNone; });
    cases->push_back(c);
  }
}

}  // namespace

std::vector<FeatureCase> expert_cases() {
  std::vector<FeatureCase> cases;
  add_activation_cases(&cases);
  add_parameter_cases(&cases);
  add_output_cases(&cases);
  add_shared_cases(&cases);
  return cases;
}

}  // namespace moec::oracle
