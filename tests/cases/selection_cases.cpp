// SPDX-License-Identifier: Apache-2.0
// Cases of the choice of experts: bias, groups, tables, given ids, ties, NaN, capacity.
#include <limits>

#include "feature_cases.h"

namespace moec::oracle {
namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

void add_bias_cases(std::vector<FeatureCase>* cases) {
  for (const ScoreInfo& score : kScores) {
    FeatureCase c = base_case(std::string("select_bias_") + score.name, 67);
    c.config.router.score = score.kind;
    c.in.select_bias = random_values("select_bias", 8);
    mutate(&c, "enters the weight", Fault::kBiasInWeight);
    mutate(&c, "absent", [](Config*, Inputs* in) { in->select_bias.clear(); });
    cases->push_back(c);
  }
}

FeatureCase group_case(const std::string& name, int top_m, GroupFill fill, double bias) {
  FeatureCase c = base_case(name, 67);
  c.config.router.score = Score::kSigmoid;
  c.config.router.select = Select::kGroupTopK;
  c.config.router.num_groups = top_m == 3 ? 2 : 4;
  c.config.router.top_groups = top_m == 3 ? 1 : 2;
  c.config.router.group_top_m = top_m;
  c.config.router.group_fill = fill;
  c.in.select_bias = random_values("group_bias", 8, 0.1);
  for (double& b : c.in.select_bias) b = round_to(Rounding::kFp32, b + bias);
  mutate(&c, "no groups", [](Config* m, Inputs*) { m->router.select = Select::kTopK; });
  mutate(&c, "one group more", [](Config* m, Inputs*) { m->router.top_groups += 1; });
  return c;
}

void add_group_cases(std::vector<FeatureCase>* cases) {
  FeatureCase best = group_case("group_max", 1, GroupFill::kNegInf, 0);
  mutate(&best, "sum of two", [](Config* c, Inputs*) { c->router.group_top_m = 2; });
  cases->push_back(best);
  FeatureCase sum = group_case("group_top_2_sum", 2, GroupFill::kNegInf, 0);
  mutate(&sum, "best one", [](Config* c, Inputs*) { c->router.group_top_m = 1; });
  cases->push_back(sum);
  FeatureCase three = group_case("group_top_3_sum", 3, GroupFill::kNegInf, 0);
  mutate(&three, "best one", [](Config* c, Inputs*) { c->router.group_top_m = 1; });
  cases->push_back(three);
  // With every choice score below 0 a fill of 0 makes the masked experts win.
  FeatureCase neg = group_case("group_fill_neg_inf_negative", 2, GroupFill::kNegInf, -2);
  mutate(&neg, "fill 0", [](Config* c, Inputs*) { c->router.group_fill = GroupFill::kZero; });
  cases->push_back(neg);
  FeatureCase zero = group_case("group_fill_zero_negative", 2, GroupFill::kZero, -2);
  mutate(&zero, "fill -inf", [](Config* c, Inputs*) { c->router.group_fill = GroupFill::kNegInf; });
  zero.mutations.erase(zero.mutations.begin() + 1);  // more groups: the masked still win
  cases->push_back(zero);
  // Fewer experts than slots are left: -1 with one fill, masked experts with the other.
  FeatureCase few = group_case("group_few_neg_inf", 1, GroupFill::kNegInf, 0);
  few.config.router.num_groups = 2;
  few.config.router.top_groups = 1;
  few.config.router.norm = Norm::kSum;
  few.in.select_bias[0] = few.in.select_bias[2] = few.in.select_bias[5] = few.in.select_bias[6] =
      -kInf;
  mutate(&few, "other fill", [](Config* c, Inputs*) { c->router.group_fill = GroupFill::kZero; });
  cases->push_back(few);
  FeatureCase masked = group_case("group_few_zero", 1, GroupFill::kZero, 0);
  masked.config.router.top_groups = 1;
  masked.config.router.norm = Norm::kSum;
  mutate(&masked, "other fill",
         [](Config* c, Inputs*) { c->router.group_fill = GroupFill::kNegInf; });
  cases->push_back(masked);
}

// C = 8 + 4 columns.
void add_zero_experts(FeatureCase* c) {
  c->config.router.num_zero_experts = 4;
  c->in.gate_weight = random_values(c->name + ".gate_weight", 12 * 12, 0.4);
  c->d_logits_in = random_values(c->name + ".d_logits_in", 11 * 12, 0.2);
}

void add_outside_cases(std::vector<FeatureCase>* cases) {
  FeatureCase table = base_case("table");
  table.config.router.select = Select::kTable;
  table.config.router.score = Score::kSqrtSoftplus;
  table.config.router.norm = Norm::kSum;
  table.in.table = {0, 5, 2, 7, 1, 3, 6, 4, 0, 2, 3, 4, 7, 6, 5};
  table.in.token_ids = {4, 0, 1, 2, 3, 3, 1, 0, 4, 2, 2};
  mutate(&table, "top-k", [](Config* c, Inputs*) { c->router.select = Select::kTopK; });
  mutate(&table, "other token", [](Config*, Inputs* in) { in->token_ids[3] = 0; });
  cases->push_back(table);

  FeatureCase given = base_case("given_ids");  // -1, too large, INT_MIN and identity ids
  add_zero_experts(&given);
  given.config.router.select = Select::kGiven;
  given.config.router.norm = Norm::kSum;
  given.in.given_ids = {0, 1, 2, 7, -1, 3, 11, 8, 0, 12, 5,  4,  -1, -1,         -1,          6, 2,
                        9, 1, 0, 7, 10, 3, 4,  5, 6, 12, 13, 99, 2,  2147483647, -2147483647, 1};
  mutate(&given, "top-k", [](Config* c, Inputs*) { c->router.select = Select::kTopK; });
  mutate(&given, "identity as none", [](Config*, Inputs* in) { in->given_ids[6] = -1; });
  cases->push_back(given);

  FeatureCase zero = base_case("zero_experts");
  add_zero_experts(&zero);
  zero.config.experts.output_scale = 1.5;
  zero.in.select_bias = random_values("zero_bias", 12, 0.1);
  zero.in.select_bias[9] = 0.4;  // an identity expert that is chosen, whatever the seed
  zero.in.per_expert_scale = random_values("zero_scale", 12);
  mutate(&zero, "dropped", Fault::kIdentityDropped);
  cases->push_back(zero);

  zero.name = "zero_experts_weight_on_input";
  zero.config.experts.weight_position = WeightPosition::kInput;
  cases->push_back(zero);

  FeatureCase mixer = base_case("sparse_mixer");
  mixer.config.router.select = Select::kSparseMixer;
  mixer.config.router.top_k = 2;
  mixer.config.router.score = Score::kIdentity;
  mixer.config.router.mixer_eps = 0.25;
  mixer.config.router.scale = 1.25;
  mutate(&mixer, "threshold off", Fault::kMixerThresholdOff);
  mutate(&mixer, "eps", [](Config* c, Inputs*) { c->router.mixer_eps = 0.5; });
  mutate(&mixer, "top-2 of a softmax", [](Config* c, Inputs*) {
    c->router.select = Select::kTopK;
    c->router.weight_rule = WeightRule::kSoftmaxSelected;
  });
  cases->push_back(mixer);

  FeatureCase order = base_case("slot_by_expert");
  order.config.router.slot_order = SlotOrder::kByExpert;
  mutate(&order, "by value",
         [](Config* c, Inputs*) { c->router.slot_order = SlotOrder::kByValue; });
  cases->push_back(order);
}

void add_special_value_cases(std::vector<FeatureCase>* cases) {
  FeatureCase ties = base_case("ties");  // columns 1, 4, 6 are equal, and so are 0 and 7
  const size_t hidden = 12;
  for (size_t h = 0; h < hidden; ++h) {
    Vec& w = ties.in.gate_weight;
    w[4 * hidden + h] = w[6 * hidden + h] = w[hidden + h];
    w[7 * hidden + h] = w[h];
  }
  ties.config.router.top_k = 2;
  ties.differentiable = false;
  mutate(&ties, "highest id", Fault::kTieToHighestId);
  cases->push_back(ties);

  FeatureCase all_equal = base_case("ties_everywhere");
  all_equal.in.gate_weight.assign(all_equal.in.gate_weight.size(), 0.0);
  all_equal.differentiable = false;
  mutate(&all_equal, "highest id", Fault::kTieToHighestId);
  cases->push_back(all_equal);

  for (const bool scaled : {false, true}) {  // a masked token's x leaves no trace
    FeatureCase nan = base_case(scaled ? "nan_of_masked_scaled" : "nan_of_masked");
    if (scaled) {
      nan.config.router.input = RouterInput::kRmsScaled;
      nan.in.input_scale = random_values("nan_scale", hidden);
    }
    nan.in.token_mask = {1, 0, 1, 1, 0, 1, 1, 1, 1, 0, 1};
    for (size_t t = 0; t < nan.in.token_mask.size(); ++t)
      for (size_t h = t; nan.in.token_mask[t] == 0 && h < hidden; ++h)
        nan.in.x[t * hidden + h] = h % 3 == 0 ? kInf : kNan;
    nan.d_logits_in.clear();
    nan.differentiable = false;
    mutate(&nan, "not masked", [](Config*, Inputs* in) { in->token_mask.clear(); });
    cases->push_back(nan);
  }

  FeatureCase given = base_case("nan_of_given");  // as of tokens whose ids are nobody's
  given.config.router.select = Select::kGiven;
  given.config.router.norm = Norm::kSum;
  for (int t = 0; t < 11; ++t)
    for (int k = 0; k < 3; ++k) given.in.given_ids.push_back(t % 4 == 1 ? -1 : (t + 2 * k) % 8);
  for (size_t t = 1; t < 11; t += 4) given.in.x[t * hidden] = kNan;
  given.d_logits_in.clear();
  given.differentiable = false;
  mutate(&given, "an expert of one", [](Config*, Inputs* in) { in->given_ids[3] = 5; });
  cases->push_back(given);

  FeatureCase inf = base_case("minus_inf_logits");  // only two experts are left for three slots
  inf.config.router.score = Score::kIdentity;
  inf.config.router.weight_rule = WeightRule::kSoftmaxSelected;
  for (double& w : inf.in.gate_weight) w /= 4;  // two weights: neither comes close to 0
  inf.in.gate_bias = {-kInf, 0, -kInf, -kInf, -kInf, 0.5, -kInf, -kInf};
  inf.differentiable = false;
  mutate(&inf, "a third one", [](Config*, Inputs* in) { in->gate_bias[0] = 0; });
  cases->push_back(inf);

  FeatureCase all = base_case("every_expert_chosen");
  all.config.router.top_k = 8;
  mutate(&all, "one less",
         [](Config*, Inputs* in) { in->select_bias = {0, 0, 0, 0, 0, 0, 0, -kInf}; });
  cases->push_back(all);
}

void add_capacity_cases(std::vector<FeatureCase>* cases) {
  const auto case_of = [](const std::string& name, Drop drop) {
    FeatureCase c = base_case(name);
    c.config.router.norm = Norm::kSum;
    c.config.plan.drop = drop;
    c.config.plan.capacity = 3;
    mutate(&c, "dropless", [](Config* m, Inputs*) { m->plan.drop = Drop::kNone; });
    mutate(&c, "one more", [](Config* m, Inputs*) { m->plan.capacity += 1; });
    mutate(&c, "renormalised", Fault::kDroppedRenormed);
    return c;
  };
  FeatureCase position = case_of("capacity_by_position", Drop::kByPosition);
  mutate(&position, "weight", [](Config* c, Inputs*) { c->plan.drop = Drop::kByWeight; });
  cases->push_back(position);
  FeatureCase weight = case_of("capacity_by_weight", Drop::kByWeight);
  mutate(&weight, "position", [](Config* c, Inputs*) { c->plan.drop = Drop::kByPosition; });
  cases->push_back(weight);
  FeatureCase factor = case_of("capacity_factor", Drop::kByPosition);
  factor.config.plan.capacity = 0;
  factor.config.plan.capacity_factor = 0.75;  // ceil(11 * 3 / 8 * 0.75) = ceil(3.09) = 4
  factor.mutations.erase(factor.mutations.begin() + 1);
  mutate(&factor, "floor", [](Config* c, Inputs*) { c->plan.capacity = 3; });
  cases->push_back(factor);
}

}  // namespace

std::vector<FeatureCase> selection_cases() {
  std::vector<FeatureCase> cases;
  add_bias_cases(&cases);
  add_group_cases(&cases);
  add_outside_cases(&cases);
  add_special_value_cases(&cases);
  add_capacity_cases(&cases);
  return cases;
}

}  // namespace moec::oracle
