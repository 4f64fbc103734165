// SPDX-License-Identifier: Apache-2.0
// The oracle's configuration as descriptors of the C API.
#include <stdexcept>

#include "layer_runner.h"

namespace moec::test {
namespace {

template <typename Enum>
constexpr bool same(Enum value, uint32_t constant) {
  return static_cast<uint32_t>(value) == constant;
}
static_assert(same(oracle::RouterInput::kRmsScaled, MOEC_INPUT_RMS_SCALED));
static_assert(same(oracle::Score::kIdentity, MOEC_SCORE_IDENTITY) &&
              same(oracle::Score::kSigmoid, MOEC_SCORE_SIGMOID));
static_assert(same(oracle::Select::kGiven, MOEC_SELECT_GIVEN) &&
              same(oracle::Select::kTable, MOEC_SELECT_TABLE));
static_assert(same(oracle::GroupFill::kZero, MOEC_FILL_ZERO));
static_assert(same(oracle::WeightRule::kSigmoidSelected, MOEC_WEIGHT_SIGMOID_SELECTED));
static_assert(same(oracle::Norm::kP, MOEC_NORM_P) && same(oracle::Norm::kSum, MOEC_NORM_SUM));
static_assert(same(oracle::SlotOrder::kByExpert, MOEC_SLOT_BY_EXPERT));
static_assert(same(oracle::Act::kIdentity, MOEC_ACT_IDENTITY) &&
              same(oracle::Act::kSitu, MOEC_ACT_SITU));
static_assert(same(oracle::WeightPosition::kInput, MOEC_WEIGHT_ON_INPUT));
static_assert(same(oracle::Shared::kSoftmax2, MOEC_SHARED_SOFTMAX2));
static_assert(same(oracle::Drop::kByWeight, MOEC_DROP_BY_WEIGHT));
static_assert(same(oracle::LossKind::kZ, MOEC_LOSS_Z));

template <typename Enum>
uint32_t raw(Enum value) {
  return static_cast<uint32_t>(value);
}

moec_dtype dtype_of(oracle::Rounding rounding) {
  switch (rounding) {
    case oracle::Rounding::kBf16:
      return MOEC_BF16;
    case oracle::Rounding::kFp16:
      return MOEC_F16;
    default:
      return MOEC_F32;
  }
}

// Parameters that a kind does not use stay 0.
moec_activation activation_of(const oracle::Activation& act) {
  const oracle::ActInfo& reads = info_of(act.kind);
  moec_activation out{};
  out.kind = raw(act.kind);
  if (reads.alpha) out.alpha = static_cast<float>(act.alpha);
  if (reads.limit) out.limit = static_cast<float>(act.limit);
  if (reads.offset) out.offset = static_cast<float>(act.offset);
  if (reads.beta) {
    out.beta = static_cast<float>(act.beta);
    out.linear_beta = static_cast<float>(act.linear_beta);
  }
  return out;
}

}  // namespace

moec_router_desc router_desc(const oracle::RouterConfig& r, const oracle::Inputs& in) {
  moec_router_desc d;
  moec_struct_init(&d, sizeof(d));
  d.flags = (in.gate_bias.empty() ? 0 : MOEC_ROUTER_LOGIT_BIAS) |
            (in.select_bias.empty() ? 0 : MOEC_ROUTER_SELECT_BIAS) |
            (in.per_expert_scale.empty() ? 0 : MOEC_ROUTER_PER_EXPERT_SCALE) |
            (r.norm_if_k_gt_1 ? MOEC_ROUTER_NORM_IF_K_GT_1 : 0) |
            (r.jitter_x ? MOEC_ROUTER_JITTER_X : 0);
  d.num_experts = r.num_experts;
  d.num_zero_experts = r.num_zero_experts;
  d.top_k = r.top_k;
  d.input = raw(r.input);
  d.rms_eps = static_cast<float>(r.rms_eps);
  d.jitter = static_cast<float>(r.jitter);
  d.logit_softcap = static_cast<float>(r.logit_softcap);
  d.score = raw(r.score);
  d.selection = raw(r.select);
  if (r.select == oracle::Select::kGroupTopK) {
    d.num_groups = r.num_groups;
    d.top_groups = r.top_groups;
    d.group_top_m = r.group_top_m;
    d.group_fill = raw(r.group_fill);
  }
  d.mixer_eps = static_cast<float>(r.mixer_eps);
  d.weight_rule = raw(r.weight_rule);
  d.norm = raw(r.norm);
  d.norm_eps = static_cast<float>(r.norm_eps);
  d.norm_p = static_cast<float>(r.norm_p);
  d.scale = static_cast<float>(r.scale);
  d.slot_order = raw(r.slot_order);
  d.seed = r.seed;
  d.data_dtype = MOEC_F32;
  const std::pair<oracle::Rounding, uint32_t*> steps[] = {{r.logit_rounding, &d.logit_precision},
                                                          {r.score_rounding, &d.score_precision},
                                                          {r.norm_rounding, &d.norm_precision},
                                                          {r.weight_rounding, &d.weight_precision}};
  for (const auto& [rounding, precision] : steps) {
    if (rounding == oracle::Rounding::kNone) continue;
    *precision = MOEC_PREC_DATA;
    d.data_dtype = dtype_of(rounding);
  }
  return d;
}

moec_experts_desc experts_desc(const oracle::Config& config, const oracle::Inputs& in,
                               const RunOptions& options) {
  const oracle::ExpertsConfig& e = config.experts;
  moec_experts_desc d;
  moec_struct_init(&d, sizeof(d));
  d.hidden = e.hidden;
  d.inter = e.inter;
  d.shared_inter = e.shared_inter;
  d.num_experts = config.router.num_experts;
  d.num_zero_experts = config.router.num_zero_experts;
  d.top_k = config.router.top_k;
  d.expert_begin = config.plan.expert_begin;
  d.expert_end = config.plan.expert_end;
  d.align = config.plan.align;
  d.gate_layout = options.layout.gate_layout;
  if (in.experts.gate.empty()) d.gate_layout = MOEC_GATE_NONE;
  d.dtype = options.dtype;
  d.activation = activation_of(e.activation);
  if (e.shared != oracle::Shared::kNone) d.shared_activation = activation_of(e.shared_activation);
  d.weight_position = raw(e.weight_position);
  d.combine = options.combine;
  d.act_rounding = options.act_rounding;
  d.shared = raw(e.shared);
  d.save = options.save;
  d.output_scale = static_cast<float>(e.output_scale);
  return d;
}

oracle::Rounding rounding_of(moec_dtype dtype) {
  switch (dtype) {
    case MOEC_F32:
      return oracle::Rounding::kFp32;
    case MOEC_BF16:
      return oracle::Rounding::kBf16;
    case MOEC_F16:
      return oracle::Rounding::kFp16;
    default:
      throw std::runtime_error("rounding_of: f32, bf16 or f16");
  }
}

void round_inputs(oracle::Rounding rounding, oracle::Inputs* in) {
  const auto round = [rounding](oracle::Vec* values) {
    for (double& v : *values) v = oracle::round_to(rounding, v);
  };
  for (oracle::MlpWeights* w : {&in->experts, &in->shared})
    for (oracle::Vec* v : {&w->gate, &w->up, &w->down, &w->gate_bias, &w->up_bias, &w->down_bias})
      round(v);
  for (oracle::Vec* v : {&in->x, &in->router_x, &in->gate_weight, &in->gate_bias, &in->input_scale,
                         &in->per_expert_scale, &in->shared_gate, &in->shared_gate_bias,
                         &in->output_bias, &in->residual})
    round(v);
  for (oracle::Adapter& adapter : in->adapters)
    for (oracle::Factors* f : {&adapter.gate, &adapter.up, &adapter.down}) {
      round(&f->a);
      round(&f->b);
    }
}

}  // namespace moec::test
