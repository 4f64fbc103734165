// SPDX-License-Identifier: Apache-2.0
// Gates and routes, forward and backward.
#include <iterator>

#include "corpus.h"

namespace moec::bits {
namespace {

struct Frame {
  const char* name;
  int64_t tokens, hidden;
  int32_t experts, top_k;
  DtypeName type;
};
constexpr Frame kFrames[] = {{"small", 37, 100, 12, 2, kReals[0]},
                             {"half", 7, 77, 8, 3, kReals[1]},
                             {"large", 300, 256, 64, 6, kReals[2]}};

struct Variation {
  const char* name;
  void (*apply)(moec_router_desc& desc);
};

constexpr Variation kGates[] = {
    {"plain", [](moec_router_desc&) {}},
    {"bias", [](moec_router_desc& d) { d.flags = MOEC_ROUTER_LOGIT_BIAS; }},
    {"rounded", [](moec_router_desc& d) { d.logit_precision = MOEC_PREC_DATA; }},
    {"rms",
     [](moec_router_desc& d) {
       d.input = MOEC_INPUT_RMS_SCALED;
       d.flags = MOEC_ROUTER_LOGIT_BIAS;
     }},
    {"jitter", [](moec_router_desc& d) { d.jitter = 0.25f; }},
    {"jitter_rms",
     [](moec_router_desc& d) {
       d.jitter = 0.25f;
       d.input = MOEC_INPUT_RMS_SCALED;
     }},
    {"zero_experts", [](moec_router_desc& d) { d.num_zero_experts = 3; }},
};

constexpr Variation kRoutes[] = {
    {"plain", [](moec_router_desc&) {}},
    {"softcap", [](moec_router_desc& d) { d.logit_softcap = 1.5f; }},
    {"rounded",
     [](moec_router_desc& d) {
       d.score_precision = d.norm_precision = d.weight_precision = MOEC_PREC_DATA;
       d.norm = MOEC_NORM_SUM;
       d.scale = 2.5f;
     }},
    {"bias_of_selection",
     [](moec_router_desc& d) {
       d.flags = MOEC_ROUTER_SELECT_BIAS;
       d.score = MOEC_SCORE_SIGMOID;
       d.norm = MOEC_NORM_SUM;
       d.norm_eps = 1e-20f;
     }},
    {"per_expert_scale",
     [](moec_router_desc& d) {
       d.flags = MOEC_ROUTER_PER_EXPERT_SCALE;
       d.norm = MOEC_NORM_SUM;
     }},
    {"by_expert", [](moec_router_desc& d) { d.slot_order = MOEC_SLOT_BY_EXPERT; }},
    {"softmax_selected", [](moec_router_desc& d) { d.weight_rule = MOEC_WEIGHT_SOFTMAX_SELECTED; }},
    {"sigmoid_selected", [](moec_router_desc& d) { d.weight_rule = MOEC_WEIGHT_SIGMOID_SELECTED; }},
    {"groups",
     [](moec_router_desc& d) {
       d.selection = MOEC_SELECT_GROUP_TOPK;
       d.num_groups = 4;
       d.top_groups = 3;
     }},
    {"groups_of_two_best",
     [](moec_router_desc& d) {
       d.selection = MOEC_SELECT_GROUP_TOPK;
       d.num_groups = 4;
       d.top_groups = 3;
       d.group_top_m = 2;
       d.group_fill = MOEC_FILL_ZERO;
       d.score = MOEC_SCORE_SIGMOID;
       d.flags = MOEC_ROUTER_SELECT_BIAS;
       d.norm = MOEC_NORM_SUM;
       d.scale = 2.5f;
     }},
    {"table", [](moec_router_desc& d) { d.selection = MOEC_SELECT_TABLE; }},
    {"given", [](moec_router_desc& d) { d.selection = MOEC_SELECT_GIVEN; }},
    {"sparse_mixer",
     [](moec_router_desc& d) {
       d.selection = MOEC_SELECT_SPARSE_MIXER;
       d.top_k = 2;
       d.mixer_eps = 0.2f;
     }},
    {"top_1",
     [](moec_router_desc& d) {
       d.top_k = 1;
       d.norm = MOEC_NORM_SUM;
       d.flags = MOEC_ROUTER_NORM_IF_K_GT_1;
     }},
    {"zero_experts", [](moec_router_desc& d) { d.num_zero_experts = 4; }},
};

constexpr const char* kScores[] = {"softmax", "sigmoid", "sqrt_softplus", "identity"};
constexpr const char* kNorms[] = {"none", "sum", "clamp_sum", "p"};

moec_router_desc router_of(const Frame& frame) {
  auto desc = sized<moec_router_desc>();
  desc.num_experts = frame.experts;
  desc.top_k = frame.top_k;
  desc.data_dtype = frame.type.dtype;
  desc.seed = 0x123456789ABCDEFu;
  return desc;
}

void run_gate(Case& c, const Frame& frame, const moec_router_desc& desc, bool accumulate) {
  const moec_dtype type = frame.type.dtype;
  const Shape x = {frame.tokens, frame.hidden};
  const int64_t columns = desc.num_experts + desc.num_zero_experts;
  const auto router = make<Router>("router_create", moec_router_create, c.context(), &desc);
  auto args = sized<moec_gate_args>();
  args.rng_offset = 77;
  args.x = c.input(type, x);
  args.weight = c.input(type, {columns, frame.hidden}, {.scale = 0.2});
  if (desc.flags & MOEC_ROUTER_LOGIT_BIAS) args.bias = c.input(type, {columns});
  if (desc.input == MOEC_INPUT_RMS_SCALED) args.input_scale = c.input(type, {frame.hidden});
  args.logits = c.output("logits", MOEC_F32, {frame.tokens, columns});
  if (desc.jitter > 0) args.x_jittered = c.output("x_jittered", type, x);
  require("gate_forward", moec_gate_forward(router.get(), &args, nullptr));

  auto grad = sized<moec_gate_grad_args>();
  if (accumulate) grad.flags = MOEC_GRAD_ACCUMULATE | MOEC_GRAD_ACCUMULATE_X;
  const auto gradient = [&](const char* name, moec_dtype dtype, const Shape& shape) {
    return accumulate ? c.sum(name, dtype, shape) : c.output(name, dtype, shape);
  };
  const moec_dtype parameter = accumulate ? type : moec_dtype{MOEC_F32};
  grad.rng_offset = args.rng_offset;
  grad.x = args.x;
  grad.weight = args.weight;
  grad.input_scale = args.input_scale;
  grad.d_logits = c.input(MOEC_F32, {frame.tokens, columns});
  grad.d_x = gradient("d_x", type, x);
  grad.d_weight = gradient("d_weight", parameter, {columns, frame.hidden});
  if (args.bias.data) grad.d_bias = gradient("d_bias", MOEC_F32, {columns});
  if (args.input_scale.data)
    grad.d_input_scale = gradient("d_input_scale", MOEC_F32, {frame.hidden});
  if (desc.jitter > 0) grad.d_x_jittered = c.input(type, x);
  require("gate_backward", moec_gate_backward(router.get(), &grad, nullptr));
  c.finish();
}

void add_inputs_of_selection(Case& c, const Frame& frame, const moec_router_desc& desc,
                             moec_route_args* args) {
  const int64_t columns = desc.num_experts + desc.num_zero_experts;
  if (desc.flags & MOEC_ROUTER_SELECT_BIAS)
    args->select_bias = c.input(MOEC_F32, {columns}, {.scale = 0.25, .step = 0.125});
  if (desc.flags & MOEC_ROUTER_PER_EXPERT_SCALE)
    args->per_expert_scale = c.input(frame.type.dtype, {columns}, {.scale = 0.5, .offset = 1});
  if (desc.selection == MOEC_SELECT_TABLE) {
    args->table = c.input_ids(MOEC_I32, {50, desc.top_k}, -1, columns + 1);
    args->token_ids = c.input_ids(MOEC_I64, {frame.tokens}, 0, 50);
  }
  if (desc.selection == MOEC_SELECT_GIVEN)
    args->given_ids = c.input_ids(MOEC_I32, {frame.tokens, desc.top_k}, -1, columns + 1);
}

void run_route(Case& c, const Frame& frame, const moec_router_desc& desc, bool masked) {
  const int64_t columns = desc.num_experts + desc.num_zero_experts;
  const Shape logits = {frame.tokens, columns}, chosen = {frame.tokens, desc.top_k};
  const auto router = make<Router>("router_create", moec_router_create, c.context(), &desc);
  auto args = sized<moec_route_args>();
  const moec_dtype type = masked ? frame.type.dtype : moec_dtype{MOEC_F32};
  args.logits = c.input(type, logits, {.scale = 3, .offset = 0.5, .step = masked ? 0.125 : 0});
  if (masked) args.token_mask = c.input_ids(MOEC_U8, {frame.tokens}, 0, 2);
  add_inputs_of_selection(c, frame, desc, &args);
  args.expert_ids = c.output("expert_ids", MOEC_I32, chosen);
  args.routing_weights = c.output("routing_weights", MOEC_F32, chosen);
  args.scores = c.output("scores", MOEC_F32, logits);
  args.counts = c.sum("counts", MOEC_I32, {columns});
  require("route_forward", moec_route_forward(router.get(), &args, nullptr));

  auto grad = sized<moec_route_grad_args>();
  grad.logits = args.logits;
  grad.per_expert_scale = args.per_expert_scale;
  grad.expert_ids = args.expert_ids;
  grad.d_routing_weights = c.input(MOEC_F32, chosen);
  if (masked) grad.d_logits_in = c.input(MOEC_F32, logits);
  grad.d_logits = c.output("d_logits", MOEC_F32, logits);
  if (args.per_expert_scale.data)
    grad.d_per_expert_scale = c.output("d_per_expert_scale", MOEC_F32, {columns});
  require("route_backward", moec_route_backward(router.get(), &grad, nullptr));

  const moec_tensor bias = c.sum("select_bias", MOEC_F32, {columns});
  require("bias_update",
          moec_router_bias_update(router.get(), &args.counts, 0.001f, &bias, nullptr));
  c.finish();
}

std::string route_name(const Frame& frame, const std::string& variation, bool masked) {
  return std::string("route/") + frame.name + "/" + variation + (masked ? "_masked" : "");
}

}  // namespace

void gate_cases(const moec_context* context) {
  for (const Frame& frame : kFrames)
    for (const Variation& variation : kGates)
      for (const bool accumulate : {false, true}) {
        moec_router_desc desc = router_of(frame);
        variation.apply(desc);
        run_case(context,
                 std::string("gate/") + frame.name + "/" + variation.name +
                     (accumulate ? "_accumulate" : ""),
                 [&](Case& c) { run_gate(c, frame, desc, accumulate); });
      }
}

void route_cases(const moec_context* context) {
  for (const Frame& frame : kFrames)
    for (const bool masked : {false, true}) {
      for (const Variation& variation : kRoutes) {
        moec_router_desc desc = router_of(frame);
        variation.apply(desc);
        run_case(context, route_name(frame, variation.name, masked),
                 [&](Case& c) { run_route(c, frame, desc, masked); });
      }
      for (uint32_t score = 0; score < std::size(kScores); ++score)
        for (uint32_t norm = 0; norm < std::size(kNorms); ++norm) {
          moec_router_desc desc = router_of(frame);
          desc.score = score;
          desc.norm = norm;
          if (norm == MOEC_NORM_P) desc.norm_p = 1.5f;
          if (norm == MOEC_NORM_CLAMP_SUM) desc.norm_eps = 0.5f;
          run_case(context,
                   route_name(frame, std::string(kScores[score]) + "_" + kNorms[norm], masked),
                   [&](Case& c) { run_route(c, frame, desc, masked); });
        }
    }
}

}  // namespace moec::bits
