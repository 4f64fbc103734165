// SPDX-License-Identifier: Apache-2.0
#include "golden_case.h"

#include <cstdlib>

namespace moec::golden {
namespace {

using oracle::Vec;

double number(const test::Json& config, const char* key, double otherwise) {
  const test::Json* value = key == nullptr ? nullptr : config.find(key);
  return value == nullptr || value->kind != test::Json::Kind::kNumber ? otherwise : value->number;
}
int integer(const test::Json& config, const char* key, int otherwise) {
  return static_cast<int>(number(config, key, otherwise));
}

oracle::RouterConfig router_of(const Family& family, const test::Json& config) {
  const RouterFacts& facts = family.router;
  const ConfigKeys& keys = family.keys;
  oracle::RouterConfig r;
  r.num_experts = integer(config, keys.experts, 0);
  r.num_zero_experts = integer(config, keys.zero_experts, 0);
  r.top_k = integer(config, keys.top_k, 0);
  r.score = facts.score;
  r.select = facts.select;
  r.num_groups = integer(config, keys.groups, 1);
  r.top_groups = integer(config, keys.top_groups, 1);
  r.group_top_m = facts.group_top_m;
  r.group_fill = facts.group_fill;
  r.mixer_eps = number(config, keys.mixer_eps, 0);
  r.weight_rule = facts.weight_rule;
  const test::Json* switch_ = keys.normalise == nullptr ? nullptr : config.find(keys.normalise);
  r.norm = switch_ != nullptr && !switch_->boolean ? Norm::kNone : facts.norm;
  r.norm_eps = number(config, keys.norm_eps, facts.norm_eps);
  r.norm_if_k_gt_1 = facts.norm_if_k_gt_1;
  r.scale = number(config, keys.scale, 1);
  return r;
}

oracle::Activation activation_of(const Family& family, const test::Json& config) {
  oracle::Activation act;
  act.kind = family.experts.act;
  act.alpha = number(config, family.keys.alpha, act.alpha);
  act.limit = number(config, family.keys.limit, act.limit);
  return act;
}

Vec parameter(const test::SafeTensors& file, const char* name) {
  return name == nullptr ? Vec{} : file.at(std::string("p.") + name).as_double();
}

// The stack of a parameter with 1 (bias [N]), 2 (matrix) or 3 dimensions; a 2D bias of experts
// [E,N] has `bias` set.
Stack stack_of(const std::vector<int64_t>& shape, bool in_out, bool bias) {
  const auto at = [&](size_t i) { return static_cast<int>(shape[i]); };
  if (bias) return {at(0), at(1), 1, false};
  const size_t first = shape.size() - 2;
  const int experts = shape.size() == 3 ? at(0) : 1;
  return in_out ? Stack{experts, at(first + 1), at(first), true}
                : Stack{experts, at(first), at(first + 1), false};
}
Stack stack_of(const GoldenCase& golden, const char* name, bool in_out, bool bias = false) {
  return stack_of(golden.file.at(std::string("p.") + name).shape, in_out, bias);
}

void load_experts(GoldenCase* golden) {
  const TensorNames& names = golden->family->names;
  const ExpertsFacts& facts = golden->family->experts;
  oracle::MlpWeights& w = golden->in.experts;
  Stack matrix = stack_of(*golden, names.gate_up, facts.in_out);
  matrix.experts = golden->config.router.num_experts;  // longcat_flash stores E + Z, E are used
  split_gate_up(matrix, facts.layout, parameter(golden->file, names.gate_up), &w.gate, &w.up);
  if (names.gate_up_bias != nullptr)
    split_gate_up(stack_of(*golden, names.gate_up_bias, false, true), facts.layout,
                  parameter(golden->file, names.gate_up_bias), &w.gate_bias, &w.up_bias);
  const Stack down = stack_of(*golden, names.down, facts.in_out);
  w.down = to_out_in(down, parameter(golden->file, names.down));
  w.down_bias = parameter(golden->file, names.down_bias);
  golden->config.experts.hidden = down.rows;
  golden->config.experts.inter = down.inputs;
}

void load_shared(GoldenCase* golden) {
  const TensorNames& names = golden->family->names;
  oracle::MlpWeights& w = golden->in.shared;
  if (names.shared_down == nullptr) return;
  if (names.shared_gate_up != nullptr) {
    split_gate_up(stack_of(*golden, names.shared_gate_up, false), GateLayout::kGateThenUp,
                  parameter(golden->file, names.shared_gate_up), &w.gate, &w.up);
  } else {
    w.gate = parameter(golden->file, names.shared_gate);
    w.up = parameter(golden->file, names.shared_up);
  }
  w.down = parameter(golden->file, names.shared_down);
  golden->in.shared_gate = parameter(golden->file, names.shared_mix);
  golden->config.experts.shared_inter = stack_of(*golden, names.shared_down, false).inputs;
}

void add(const GoldenCase& golden, const char* name, Vec got, std::vector<Comparison>* out) {
  if (name == nullptr) return;
  const std::string key = std::string("g.") + name;
  const test::StoredTensor& expected = golden.file.at(key);
  const auto columns = static_cast<size_t>(expected.shape.back());
  got.resize(static_cast<size_t>(expected.numel()), 0.0);  // rows that nobody uses
  out->push_back({key, std::move(got), expected.as_double(), columns});
}

}  // namespace

std::string golden_path(const std::string& file) {
  const char* folder = std::getenv("MOEC_GOLDEN_DIR");
  return std::string(folder == nullptr ? MOEC_TESTS_DIR "/golden" : folder) + "/" + file;
}

GoldenCase load_golden(const Family& family) {
  GoldenCase golden;
  golden.family = &family;
  golden.file = test::load_safetensors(golden_path(std::string(family.name) + ".safetensors"));
  golden.metadata = test::parse_json(golden.file.metadata.at("config"));
  const test::SafeTensors& file = golden.file;
  golden.config.router = router_of(family, golden.metadata);
  oracle::ExpertsConfig& experts = golden.config.experts;
  experts.activation = activation_of(family, golden.metadata);
  experts.shared_activation = experts.activation;
  experts.weight_position = family.experts.weight_position;
  experts.shared = family.experts.shared;
  load_experts(&golden);
  load_shared(&golden);
  golden.in.tokens = static_cast<int>(file.at("x").shape[0]);
  golden.in.x = file.at("x").as_double();
  golden.in.gate_weight = parameter(file, family.names.gate);
  golden.in.gate_bias = parameter(file, family.names.gate_bias);
  golden.in.select_bias = parameter(file, family.names.select_bias);
  golden.in.output_bias = parameter(file, family.names.output_bias);
  golden.d_y = file.at("dout").as_double();
  return golden;
}

std::vector<Comparison> comparisons(const GoldenCase& golden, const Vec& y,
                                    const oracle::Gradients& g) {
  const TensorNames& names = golden.family->names;
  const ExpertsFacts& facts = golden.family->experts;
  const auto hidden = static_cast<size_t>(golden.config.experts.hidden);
  std::vector<Comparison> out;
  out.push_back({"y", y, golden.file.at("y").as_double(), hidden});
  add(golden, "x", g.x, &out);
  add(golden, names.gate, g.gate_weight, &out);
  add(golden, names.gate_bias, g.gate_bias, &out);
  Stack gate_up = stack_of(golden, names.gate_up, facts.in_out);
  gate_up.experts = golden.config.router.num_experts;
  add(golden, names.gate_up, join_gate_up(gate_up, facts.layout, g.experts.gate, g.experts.up),
      &out);
  if (names.gate_up_bias != nullptr)
    add(golden, names.gate_up_bias,
        join_gate_up(stack_of(golden, names.gate_up_bias, false, true), facts.layout,
                     g.experts.gate_bias, g.experts.up_bias),
        &out);
  add(golden, names.down, from_out_in(stack_of(golden, names.down, facts.in_out), g.experts.down),
      &out);
  add(golden, names.down_bias, g.experts.down_bias, &out);
  add(golden, names.output_bias, g.output_bias, &out);
  if (names.shared_gate_up != nullptr)
    add(golden, names.shared_gate_up,
        join_gate_up(stack_of(golden, names.shared_gate_up, false), GateLayout::kGateThenUp,
                     g.shared.gate, g.shared.up),
        &out);
  else
    add(golden, names.shared_up, g.shared.up, &out);
  add(golden, names.shared_gate, g.shared.gate, &out);
  add(golden, names.shared_down, g.shared.down, &out);
  add(golden, names.shared_mix, g.shared_gate, &out);
  return out;
}

}  // namespace moec::golden
