// SPDX-License-Identifier: Apache-2.0
// One row per golden file: how the model family's configuration and tensors map to the router and
// experts descriptors. Data only; the oracle test, the C API test and the Python package say the
// same facts. Sources: the family table of the numerics notes (6.3), confirmed by the vectors.
#pragma once

#include "oracle/moe_oracle.h"

namespace moec::golden {

using oracle::Act;
using oracle::GroupFill;
using oracle::Norm;
using oracle::Score;
using oracle::Select;
using oracle::Shared;
using oracle::WeightPosition;
using oracle::WeightRule;

enum class GateLayout { kSplit, kGateThenUp, kUpThenGate, kInterleaved, kNone };

// Steps that round to the data type in the family's code (bf16 checkpoints; in fp32 all are equal).
enum Rounded : unsigned { kLogits = 1, kScores = 2, kNormed = 4, kWeights = 8 };

struct RouterFacts {
  Score score = Score::kSoftmax;
  Select select = Select::kTopK;
  int group_top_m = 1;
  GroupFill group_fill = GroupFill::kNegInf;
  WeightRule weight_rule = WeightRule::kScore;
  Norm norm = Norm::kNone;
  double norm_eps = 0;
  bool norm_if_k_gt_1 = false;
  unsigned rounded = 0;  // Rounded
};

struct ExpertsFacts {
  Act act = Act::kSwiglu;
  GateLayout layout = GateLayout::kGateThenUp;
  bool in_out = false;  // matrices are [E,in,out]
  WeightPosition weight_position = WeightPosition::kOutput;
  Shared shared = Shared::kNone;  // the shared expert has the activation of the others
};

// Configuration keys; null = the family has no such key and the fact or default holds.
struct ConfigKeys {
  const char* experts;
  const char* top_k;
  const char* zero_experts = nullptr;
  const char* groups = nullptr;
  const char* top_groups = nullptr;
  const char* scale = nullptr;
  const char* normalise = nullptr;  // false: no normalisation
  const char* mixer_eps = nullptr;
  const char* norm_eps = nullptr;
  const char* alpha = nullptr;
  const char* limit = nullptr;
};

// Tensor names after "p." and "g."; null = absent.
struct TensorNames {
  const char* gate;
  const char* gate_bias = nullptr;
  const char* select_bias = nullptr;
  const char* gate_up = "experts.gate_up_proj";  // a plain MLP's up matrix
  const char* gate_up_bias = nullptr;
  const char* down = "experts.down_proj";
  const char* down_bias = nullptr;
  const char* output_bias = nullptr;
  const char* shared_gate_up = nullptr;  // one matrix, or
  const char* shared_gate = nullptr;     // two
  const char* shared_up = nullptr;
  const char* shared_down = nullptr;
  const char* shared_mix = nullptr;  // [1,H], sigmoid gate
};

struct Family {
  const char* name;
  RouterFacts router;
  ExpertsFacts experts;
  ConfigKeys keys;
  TensorNames names;
};

// ---- routers that several families share ----
constexpr RouterFacts kSoftmax{.rounded = kLogits};
constexpr RouterFacts kSoftmaxOutData{.rounded = kLogits | kWeights};
constexpr RouterFacts kSoftmaxSum{.norm = Norm::kSum, .rounded = kLogits};
constexpr RouterFacts kTopKThenSoftmax{.score = Score::kIdentity,
                                       .weight_rule = WeightRule::kSoftmaxSelected,
                                       .rounded = kLogits | kWeights};
// DeepSeek-V3's: sigmoid, selection bias, groups by the sum of their two best, renormalised.
constexpr RouterFacts kSigmoidGroups{.score = Score::kSigmoid,
                                     .select = Select::kGroupTopK,
                                     .group_top_m = 2,
                                     .norm = Norm::kSum,
                                     .norm_eps = 1e-20};
constexpr RouterFacts kSigmoidSum{.score = Score::kSigmoid, .norm = Norm::kSum};

constexpr ExpertsFacts kSwiglu{};
constexpr ExpertsFacts kSwigluShared{.shared = Shared::kAdd};
constexpr ExpertsFacts kSwigluGatedShared{.shared = Shared::kSigmoidGate};

// ---- configuration keys ----
constexpr ConfigKeys kLocalKeys{.experts = "num_local_experts", .top_k = "num_experts_per_tok"};
constexpr ConfigKeys kQwenKeys{
    .experts = "num_experts", .top_k = "num_experts_per_tok", .normalise = "norm_topk_prob"};
constexpr ConfigKeys kDeepSeekKeys{.experts = "n_routed_experts",
                                   .top_k = "num_experts_per_tok",
                                   .groups = "n_group",
                                   .top_groups = "topk_group",
                                   .scale = "routed_scaling_factor",
                                   .normalise = "norm_topk_prob"};

// ---- tensor names ----
constexpr TensorNames kGateNames{.gate = "gate.weight"};
constexpr TensorNames kRouterNames{.gate = "router.weight"};
constexpr TensorNames kDeepSeekNames{.gate = "gate.weight",
                                     .select_bias = "gate.e_score_correction_bias",
                                     .shared_gate = "shared_experts.gate_proj.weight",
                                     .shared_up = "shared_experts.up_proj.weight",
                                     .shared_down = "shared_experts.down_proj.weight"};
constexpr TensorNames kDeepSeek2Names{.gate = "gate.weight",
                                      .shared_gate = "shared_experts.gate_proj.weight",
                                      .shared_up = "shared_experts.up_proj.weight",
                                      .shared_down = "shared_experts.down_proj.weight"};
constexpr TensorNames kQwenSharedNames{.gate = "gate.weight",
                                       .shared_gate = "shared_expert.gate_proj.weight",
                                       .shared_up = "shared_expert.up_proj.weight",
                                       .shared_down = "shared_expert.down_proj.weight",
                                       .shared_mix = "shared_expert_gate.weight"};

constexpr Family kFamilies[] = {
    {"afmoe",
     {.score = Score::kSigmoid, .norm = Norm::kSum, .norm_eps = 1e-20, .norm_if_k_gt_1 = true},
     kSwigluShared,
     {.experts = "num_experts", .top_k = "num_experts_per_tok", .scale = "route_scale"},
     {.gate = "router.gate.weight",
      .select_bias = "expert_bias",
      .shared_gate = "shared_experts.gate_proj.weight",
      .shared_up = "shared_experts.up_proj.weight",
      .shared_down = "shared_experts.down_proj.weight"}},
    {"cohere2_moe", kSoftmaxSum, kSwiglu, kQwenKeys, kGateNames},
    {"deepseek_v2_group",
     {.select = Select::kGroupTopK, .group_fill = GroupFill::kZero},
     kSwigluShared,
     {.experts = "n_routed_experts",
      .top_k = "num_experts_per_tok",
      .groups = "n_group",
      .top_groups = "topk_group",
      .scale = "routed_scaling_factor"},
     kDeepSeek2Names},
    {"deepseek_v2_lite",
     {},
     kSwigluShared,
     {.experts = "n_routed_experts",
      .top_k = "num_experts_per_tok",
      .scale = "routed_scaling_factor"},
     kDeepSeek2Names},
    {"deepseek_v3", kSigmoidGroups, kSwigluShared, kDeepSeekKeys, kDeepSeekNames},
    {"dots1", kSigmoidGroups, kSwigluShared, kDeepSeekKeys, kDeepSeekNames},
    {"ernie4_5_moe",
     {.norm = Norm::kClampSum, .norm_eps = 1e-12, .rounded = kWeights},
     kSwigluShared,
     {.experts = "moe_num_experts", .top_k = "moe_k", .norm_eps = "moe_norm_min"},
     {.gate = "gate.weight",
      .select_bias = "gate.moe_statics.e_score_correction_bias",
      .shared_gate = "shared_experts.gate_proj.weight",
      .shared_up = "shared_experts.up_proj.weight",
      .shared_down = "shared_experts.down_proj.weight"}},
    {"exaone_moe",
     kSigmoidGroups,
     kSwigluShared,
     {.experts = "num_experts",
      .top_k = "num_experts_per_tok",
      .groups = "n_group",
      .top_groups = "topk_group",
      .scale = "routed_scaling_factor",
      .normalise = "norm_topk_prob"},
     kDeepSeekNames},
    {"flex_olmo", kSoftmaxOutData, kSwiglu, kQwenKeys, kGateNames},
    {"glm4_moe", kSigmoidGroups, kSwigluShared, kDeepSeekKeys, kDeepSeekNames},
    {"glm4_moe_lite", kSigmoidGroups, kSwigluShared, kDeepSeekKeys, kDeepSeekNames},
    {"glm_moe_dsa", kSigmoidGroups, kSwigluShared, kDeepSeekKeys, kDeepSeekNames},
    {"gpt_oss",
     {.score = Score::kIdentity,
      .weight_rule = WeightRule::kSoftmaxSelected,
      .rounded = kLogits | kNormed | kWeights},
     {.act = Act::kGptoss, .layout = GateLayout::kInterleaved, .in_out = true},
     kLocalKeys,
     {.gate = "router.weight",
      .gate_bias = "router.bias",
      .gate_up_bias = "experts.gate_up_proj_bias",
      .down_bias = "experts.down_proj_bias"}},
    {"granitemoe", kTopKThenSoftmax, kSwiglu, kLocalKeys, kRouterNames},
    {"granitemoeshared", kTopKThenSoftmax, kSwiglu, kLocalKeys, kRouterNames},
    {"hunyuan_v1_moe",
     {.norm = Norm::kSum},
     kSwigluShared,
     {.experts = "num_experts", .top_k = "moe_topk"},
     {.gate = "gate.wg.weight",
      .shared_gate = "shared_mlp.gate_proj.weight",
      .shared_up = "shared_mlp.up_proj.weight",
      .shared_down = "shared_mlp.down_proj.weight"}},
    {"jamba",
     kSoftmaxOutData,
     kSwiglu,
     {.experts = "num_experts", .top_k = "num_experts_per_tok"},
     kRouterNames},
    {"jetmoe",
     kTopKThenSoftmax,
     kSwiglu,
     kLocalKeys,
     {.gate = "router.layer.weight",
      .gate_up = "input_linear.weight",
      .down = "output_linear.weight",
      .output_bias = "bias"}},
    {"kimi_linear",
     kSigmoidGroups,
     kSwigluShared,
     {.experts = "num_experts",
      .top_k = "num_experts_per_token",
      .groups = "num_expert_group",
      .top_groups = "topk_group",
      .scale = "routed_scaling_factor",
      .normalise = "moe_renormalize"},
     kDeepSeekNames},
    {"lfm2_moe",
     {.score = Score::kSigmoid,
      .norm = Norm::kSum,
      .norm_eps = 1e-6,
      .rounded = kLogits | kScores | kNormed | kWeights},
     kSwiglu,
     {.experts = "num_experts",
      .top_k = "num_experts_per_tok",
      .scale = "routed_scaling_factor",
      .normalise = "norm_topk_prob"},
     {.gate = "gate.weight", .select_bias = "expert_bias"}},
    {"llama4",
     {.score = Score::kIdentity,
      .weight_rule = WeightRule::kSigmoidSelected,
      .rounded = kLogits | kWeights},
     {.in_out = true, .weight_position = WeightPosition::kInput, .shared = Shared::kAdd},
     kLocalKeys,
     {.gate = "router.weight",
      .shared_gate = "shared_expert.gate_proj.weight",
      .shared_up = "shared_expert.up_proj.weight",
      .shared_down = "shared_expert.down_proj.weight"}},
    {"longcat_flash",
     {},
     kSwiglu,
     {.experts = "n_routed_experts",
      .top_k = "moe_topk",
      .zero_experts = "zero_expert_num",
      .scale = "routed_scaling_factor"},
     {.gate = "router.classifier.weight", .select_bias = "router.e_score_correction_bias"}},
    {"minimax", kSoftmaxSum, kSwiglu, kLocalKeys, kGateNames},
    {"minimax_m2",
     kSigmoidSum,
     kSwiglu,
     kLocalKeys,
     {.gate = "gate.weight", .select_bias = "e_score_correction_bias"}},
    {"minimax_m3",
     kSigmoidSum,
     {.act = Act::kGptoss, .shared = Shared::kAdd},
     {.experts = "num_local_experts",
      .top_k = "num_experts_per_tok",
      .scale = "routed_scaling_factor",
      .alpha = "swiglu_alpha",
      .limit = "swiglu_limit"},
     {.gate = "gate.weight",
      .select_bias = "gate.e_score_correction_bias",
      .shared_gate_up = "shared_experts.gate_up_proj.weight",
      .shared_down = "shared_experts.down_proj.weight"}},
    {"mixtral", kSoftmaxSum, kSwiglu, kLocalKeys, kGateNames},
    {"nemotron_h",
     kSigmoidGroups,
     {.act = Act::kRelu2, .layout = GateLayout::kNone, .shared = Shared::kAdd},
     kDeepSeekKeys,
     {.gate = "gate.weight",
      .select_bias = "gate.e_score_correction_bias",
      .gate_up = "experts.up_proj",
      .shared_up = "shared_experts.up_proj.weight",
      .shared_down = "shared_experts.down_proj.weight"}},
    {"olmoe", kSoftmaxOutData, kSwiglu, kQwenKeys, kGateNames},
    {"phimoe",
     {.score = Score::kIdentity, .select = Select::kSparseMixer, .rounded = kLogits | kWeights},
     kSwiglu,
     {.experts = "num_local_experts",
      .top_k = "num_experts_per_tok",
      .mixer_eps = "router_jitter_noise"},
     kRouterNames},
    {"qwen2_moe", kSoftmaxSum, kSwigluGatedShared, kQwenKeys, kQwenSharedNames},
    {"qwen3_5_moe",
     kSoftmaxSum,
     kSwigluGatedShared,
     {.experts = "num_experts", .top_k = "num_experts_per_tok"},
     kQwenSharedNames},
    {"qwen3_moe",
     kSoftmaxSum,
     kSwiglu,
     {.experts = "num_local_experts",
      .top_k = "num_experts_per_tok",
      .normalise = "norm_topk_prob"},
     kGateNames},
    {"qwen3_next", kSoftmaxSum, kSwigluGatedShared, kQwenKeys, kQwenSharedNames},
    {"solar_open", kSigmoidGroups, kSwigluShared, kDeepSeekKeys, kDeepSeekNames},
};

}  // namespace moec::golden
