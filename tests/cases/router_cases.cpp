// SPDX-License-Identifier: Apache-2.0
// Cases of the router's numbers: input, logits, scores, weight rules, normalisation, scale.
#include <algorithm>
#include <cmath>
#include <iterator>
#include <numeric>

#include "feature_cases.h"

namespace moec::oracle {
namespace {

constexpr const char* kNormNames[] = {"none", "sum", "clamp_sum", "p"};

FeatureCase score_case(const std::string& name, Score score) {
  FeatureCase c = base_case(name);
  c.config.router.score = score;
  if (score == Score::kIdentity) {  // positive, so that sums stay away from 0
    c.in.gate_bias = random_values(name + ".gate_bias", 8, 0.2);
    for (double& b : c.in.gate_bias) b = round_to(Rounding::kFp32, b + 3);
  }
  return c;
}

void add_input_cases(std::vector<FeatureCase>* cases) {
  FeatureCase rms = base_case("input_rms_scaled");
  rms.config.router.input = RouterInput::kRmsScaled;
  rms.config.router.rms_eps = 0.125;
  rms.in.input_scale = random_values("input_scale", 12, 3);
  mutate(&rms, "plain", [](Config* c, Inputs*) { c->router.input = RouterInput::kPlain; });
  mutate(&rms, "other eps", [](Config* c, Inputs*) { c->router.rms_eps = 1e-6; });
  cases->push_back(rms);

  FeatureCase jitter = base_case("jitter");
  jitter.config.router.jitter = 0.25;
  jitter.config.router.seed = 0x123456789ABCDEFu;
  jitter.config.router.rng_offset = 77;
  mutate(&jitter, "off", [](Config* c, Inputs*) { c->router.jitter = 0; });
  mutate(&jitter, "seed", [](Config* c, Inputs*) { c->router.seed += 1; });
  mutate(&jitter, "offset", [](Config* c, Inputs*) { c->router.rng_offset += 1; });
  mutate(&jitter, "experts see it", [](Config* c, Inputs*) { c->router.jitter_x = true; });
  cases->push_back(jitter);

  jitter.name = "jitter_x";
  jitter.config.router.jitter_x = true;
  add_shared(&jitter, Shared::kSigmoidGate, 7, Act::kSwiglu);
  jitter.mutations.pop_back();
  mutate(&jitter, "copy only", [](Config* c, Inputs*) { c->router.jitter_x = false; });
  cases->push_back(jitter);

  jitter.name = "jitter_rms_scaled";
  jitter.config.router.input = RouterInput::kRmsScaled;
  jitter.in.input_scale = rms.in.input_scale;
  jitter.mutations.clear();
  mutate(&jitter, "off", [](Config* c, Inputs*) { c->router.jitter = 0; });
  cases->push_back(jitter);

  FeatureCase own = base_case("router_x");
  own.in.router_x = random_values("router_x", own.in.x.size());
  mutate(&own, "absent", [](Config*, Inputs* in) { in->router_x = in->x; });
  cases->push_back(own);

  FeatureCase bias = base_case("logit_bias");
  bias.in.gate_bias = random_values("logit_bias", 8, 0.5);
  mutate(&bias, "absent", [](Config*, Inputs* in) { in->gate_bias.clear(); });
  cases->push_back(bias);

  FeatureCase cap = base_case("softcap");
  cap.config.router.logit_softcap = 1.5;
  mutate(&cap, "off", [](Config* c, Inputs*) { c->router.logit_softcap = 0; });
  cases->push_back(cap);

  FeatureCase mask = base_case("token_mask");
  mask.in.token_mask = {1, 0, 1, 1, 0, 0, 1, 1, 1, 1, 0};
  mutate(&mask, "absent", [](Config*, Inputs* in) { in->token_mask.clear(); });
  cases->push_back(mask);
}

// The four steps that can round.
struct RoundingStep {
  const char* name;
  Rounding RouterConfig::* rounding;
  Vec Route::* values;  // null: the logits, of a gate
};
constexpr RoundingStep kRoundingSteps[] = {
    {"logits", &RouterConfig::logit_rounding, nullptr},
    {"scores", &RouterConfig::score_rounding, &Route::scores},
    {"norm", &RouterConfig::norm_rounding, &Route::raw},
    {"weights", &RouterConfig::weight_rounding, &Route::weights}};

// What the step rounds. A norm rounds what it divides, and what comes of that.
Vec before_rounding(const FeatureCase& c, const RoundingStep& step) {
  Config exact = c.config;
  exact.router.*step.rounding = Rounding::kNone;
  const Vec logits = gate_forward(exact, c.in).logits;
  if (!step.values) return logits;
  Vec before = route_forward(exact, c.in, logits).*step.values;
  if (step.values != &Route::raw) return before;
  const Vec raw = route_forward(c.config, c.in, logits).raw;
  for (auto row = raw.begin(); row != raw.end(); row += c.config.router.top_k) {
    const double sum = std::accumulate(row, row + c.config.router.top_k, 0.0);
    for (int k = 0; k < c.config.router.top_k; ++k) before.push_back(row[k] / sum);
  }
  return before;
}

// Whether a value lies so close to a tie that fp32 may round it to the other side: a sigmoid by its
// own size, a sum of products by that of the largest.
bool is_near_a_tie(const FeatureCase& c, const RoundingStep& step) {
  const Vec values = before_rounding(c, step);
  double largest = 0;
  for (const double v : values) largest = std::max(largest, std::fabs(v));
  const auto rounded = [&](double v) { return round_to(c.config.router.*step.rounding, v); };
  return std::any_of(values.begin(), values.end(), [&](double v) {
    const double off = 2e-6 * (step.values ? std::fabs(v) : largest);
    return rounded(v - off) != rounded(v + off);
  });
}

FeatureCase rounding_case(const std::string& name, const RoundingStep& step, Rounding rounding) {
  FeatureCase c = score_case(name, Score::kSigmoid);
  c.config.router.*step.rounding = rounding;
  for (double& w : c.in.gate_weight) w *= 2;  // few sigmoids of which fp32 makes 1
  c.config.router.norm = Norm::kSum;
  c.config.router.scale = 1.625;
  c.differentiable = false;
  const auto member = step.rounding;
  mutate(&c, "not rounded", [member](Config* m, Inputs*) { m->router.*member = Rounding::kNone; });
  return c;
}

// In both 16-bit types; one step at a time tells them apart. Drawn until nothing is near a tie.
void add_rounding_cases(std::vector<FeatureCase>* cases) {
  for (const Rounding rounding : {Rounding::kBf16, Rounding::kFp16}) {
    for (const RoundingStep& step : kRoundingSteps) {
      const char* type = rounding == Rounding::kBf16 ? "bf16" : "fp16";
      const std::string name = std::string("round_") + step.name + "_" + type;
      FeatureCase c = rounding_case(name, step, rounding);
      for (int i = 0; is_near_a_tie(c, step); ++i)
        c = rounding_case(name + std::to_string(i), step, rounding);
      c.name = name;
      cases->push_back(c);
    }
  }
}

void add_score_cases(std::vector<FeatureCase>* cases) {
  for (const ScoreInfo& info : kScores) {
    for (size_t n = 0; n < std::size(kNormNames); ++n) {
      FeatureCase c =
          score_case(std::string("score_") + info.name + "_norm_" + kNormNames[n], info.kind);
      c.config.router.norm = static_cast<Norm>(n);
      c.config.router.norm_eps = c.config.router.norm == Norm::kSum ? 0.0625 : 0;
      c.config.router.norm_p = 2;
      c.config.router.scale = 2.5;
      const size_t next = (static_cast<size_t>(info.kind) + 1) % std::size(kScores);
      const Score other = kScores[next].kind;
      mutate(&c, "other score", [other](Config* m, Inputs*) { m->router.score = other; });
      mutate(&c, "scale off", [](Config* m, Inputs*) { m->router.scale = 1; });
      if (c.config.router.norm == Norm::kNone)
        mutate(&c, "scale with norm only", Fault::kScaleOnlyWithNorm);
      else
        mutate(&c, "norm off", [](Config* m, Inputs*) { m->router.norm = Norm::kNone; });
      if (c.config.router.norm == Norm::kSum)
        mutate(&c, "eps missing", [](Config* m, Inputs*) { m->router.norm_eps = 0; });
      if (c.config.router.norm == Norm::kP)
        mutate(&c, "p = 1", [](Config* m, Inputs*) { m->router.norm_p = 1; });
      cases->push_back(c);
    }
  }
}

void add_weight_cases(std::vector<FeatureCase>* cases) {
  for (const Norm norm : {Norm::kNone, Norm::kSum}) {
    const std::string suffix = std::string("_norm_") + kNormNames[static_cast<int>(norm)];
    FeatureCase softmax = score_case("weight_softmax_selected" + suffix, Score::kIdentity);
    softmax.config.router.weight_rule = WeightRule::kSoftmaxSelected;
    softmax.config.router.norm = norm;
    softmax.config.router.norm_eps = 0.5;
    softmax.in.select_bias = random_values("select_bias", 8);
    mutate(&softmax, "softmax over all", Fault::kNormBeforeSelect);
    mutate(&softmax, "score",
           [](Config* c, Inputs*) { c->router.weight_rule = WeightRule::kScore; });
    cases->push_back(softmax);

    FeatureCase sigmoid = score_case("weight_sigmoid_selected" + suffix, Score::kSoftmax);
    sigmoid.config.router.weight_rule = WeightRule::kSigmoidSelected;
    sigmoid.config.router.norm = norm;
    mutate(&sigmoid, "score",
           [](Config* c, Inputs*) { c->router.weight_rule = WeightRule::kScore; });
    cases->push_back(sigmoid);
  }

  FeatureCase clamp = base_case("norm_clamp_sum_clamped", 67);
  clamp.config.router.norm = Norm::kClampSum;
  clamp.config.router.norm_eps = 0.75;  // some sums lie below, some above
  mutate(&clamp, "added, not clamped", [](Config* c, Inputs*) { c->router.norm = Norm::kSum; });
  mutate(&clamp, "not clamped", [](Config* c, Inputs*) { c->router.norm_eps = 0; });
  cases->push_back(clamp);

  FeatureCase negative = base_case("norm_p_negative_scores");  // |w|^p of negative weights
  negative.config.router.score = Score::kIdentity;
  negative.config.router.norm = Norm::kP;
  negative.config.router.norm_p = 3;
  negative.config.router.top_k = 7;
  mutate(&negative, "p = 2", [](Config* c, Inputs*) { c->router.norm_p = 2; });
  cases->push_back(negative);

  FeatureCase p_one = score_case("norm_p_1", Score::kSoftmax);
  p_one.config.router.norm = Norm::kP;
  mutate(&p_one, "p = 2", [](Config* c, Inputs*) { c->router.norm_p = 2; });
  cases->push_back(p_one);

  for (const bool skip : {true, false}) {
    FeatureCase one = score_case(skip ? "norm_if_k_gt_1" : "norm_with_k_1", Score::kSigmoid);
    one.config.router.top_k = 1;
    one.config.router.norm = Norm::kSum;
    one.config.router.norm_if_k_gt_1 = skip;
    mutate(&one, "flag", [skip](Config* c, Inputs*) { c->router.norm_if_k_gt_1 = !skip; });
    cases->push_back(one);
  }

  FeatureCase scale = score_case("per_expert_scale", Score::kSigmoid);
  scale.config.router.norm = Norm::kSum;
  scale.config.router.scale = 0.5;
  scale.in.per_expert_scale = random_values("per_expert_scale", 8);
  mutate(&scale, "absent", [](Config*, Inputs* in) { in->per_expert_scale.clear(); });
  mutate(&scale, "scale off", [](Config* c, Inputs*) { c->router.scale = 1; });
  cases->push_back(scale);
}

}  // namespace

std::vector<FeatureCase> router_cases() {
  std::vector<FeatureCase> cases;
  cases.push_back(base_case("plain"));
  add_input_cases(&cases);
  add_rounding_cases(&cases);
  add_score_cases(&cases);
  add_weight_cases(&cases);
  return cases;
}

}  // namespace moec::oracle
