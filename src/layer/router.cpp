// SPDX-License-Identifier: Apache-2.0
#include "layer/router.h"

#include <cmath>

#include "core/dtype.h"
#include "math/score.h"

namespace moec {
namespace {

constexpr uint32_t kRouterFlags = MOEC_ROUTER_LOGIT_BIAS | MOEC_ROUTER_SELECT_BIAS |
                                  MOEC_ROUTER_PER_EXPERT_SCALE | MOEC_ROUTER_NORM_IF_K_GT_1 |
                                  MOEC_ROUTER_JITTER_X;
constexpr uint32_t kGateGradFlags =
    MOEC_GRAD_ACCUMULATE | MOEC_GRAD_ACCUMULATE_X | MOEC_GRAD_SKIP_IDLE;

void check_selection(const moec_router_desc& desc) {
  const int64_t num_ids = int64_t(desc.num_experts) + desc.num_zero_experts;
  if (desc.selection == MOEC_SELECT_GROUP_TOPK) {
    check_range("desc.num_groups", desc.num_groups, 1, num_ids);
    MOEC_REQUIRE(num_ids % desc.num_groups == 0, MOEC_E_INVALID_ARG,
                 "desc.num_groups is %d; expected a divisor of the %lld ids", desc.num_groups,
                 static_cast<long long>(num_ids));
    const int64_t group = num_ids / desc.num_groups;
    check_range("desc.top_groups", desc.top_groups, 1, desc.num_groups);
    check_range("desc.group_top_m", desc.group_top_m, 0, group);
    MOEC_REQUIRE(desc.group_fill == MOEC_FILL_ZERO || desc.top_k <= desc.top_groups * group,
                 MOEC_E_INVALID_ARG,
                 "desc.top_k is %d; expected at most the %lld experts of %d groups", desc.top_k,
                 static_cast<long long>(desc.top_groups * group), desc.top_groups);
  }
  MOEC_REQUIRE(desc.selection != MOEC_SELECT_ROUND_ROBIN || desc.top_k <= desc.num_experts,
               MOEC_E_INVALID_ARG, "desc.top_k is %d; ROUND_ROBIN takes at most num_experts, %d",
               desc.top_k, desc.num_experts);
  if (desc.selection == MOEC_SELECT_SPARSE_MIXER) {
    MOEC_REQUIRE(desc.top_k == 2, MOEC_E_INVALID_ARG, "desc.top_k is %d; SPARSE_MIXER needs 2",
                 desc.top_k);
    MOEC_REQUIRE(desc.mixer_eps > 0 && std::isfinite(desc.mixer_eps), MOEC_E_INVALID_ARG,
                 "desc.mixer_eps is %g; SPARSE_MIXER needs a number above 0",
                 double(desc.mixer_eps));
    MOEC_REQUIRE(!(desc.flags & MOEC_ROUTER_SELECT_BIAS) && desc.weight_rule == MOEC_WEIGHT_SCORE,
                 MOEC_E_UNSUPPORTED,
                 "desc.flags is %u and desc.weight_rule %u; SPARSE_MIXER has its own weights and "
                 "takes no selection bias: clear the flag and use MOEC_WEIGHT_SCORE",
                 desc.flags, desc.weight_rule);
  }
}

void check_desc(const moec_router_desc& desc) {
  check_flags("desc.flags", desc.flags, kRouterFlags);
  const int64_t num_ids = checked_num_ids(desc.num_experts, desc.num_zero_experts);
  check_range("desc.top_k", desc.top_k, 1, num_ids);

  const struct {
    const char* name;
    uint32_t value, last;
  } enums[] = {{"desc.input", desc.input, MOEC_INPUT_RMS_SCALED},
               {"desc.logit_precision", desc.logit_precision, MOEC_PREC_DATA},
               {"desc.score", desc.score, math::Scores::kCount - 1},
               {"desc.score_precision", desc.score_precision, MOEC_PREC_DATA},
               {"desc.selection", desc.selection, MOEC_SELECT_ROUND_ROBIN},
               {"desc.group_fill", desc.group_fill, MOEC_FILL_ZERO},
               {"desc.weight_rule", desc.weight_rule, MOEC_WEIGHT_SIGMOID_SELECTED},
               {"desc.norm", desc.norm, MOEC_NORM_P},
               {"desc.norm_precision", desc.norm_precision, MOEC_PREC_DATA},
               {"desc.weight_precision", desc.weight_precision, MOEC_PREC_DATA},
               {"desc.slot_order", desc.slot_order, MOEC_SLOT_BY_EXPERT},
               {"desc.reserved0", desc.reserved0, 0}};
  for (const auto& row : enums) check_enum(row.name, row.value, row.last);

  const struct {
    const char* name;
    float value;
  } numbers[] = {{"desc.rms_eps", desc.rms_eps},
                 {"desc.jitter", desc.jitter},
                 {"desc.logit_softcap", desc.logit_softcap},
                 {"desc.mixer_eps", desc.mixer_eps},
                 {"desc.norm_eps", desc.norm_eps},
                 {"desc.norm_p", desc.norm_p},
                 {"desc.scale", desc.scale}};
  for (const auto& row : numbers) check_not_negative(row.name, row.value);
  MOEC_REQUIRE(desc.norm != MOEC_NORM_P || desc.norm_eps == 0, MOEC_E_INVALID_ARG,
               "desc.norm_eps is %g; expected 0 with MOEC_NORM_P, which has none",
               double(desc.norm_eps));
  MOEC_REQUIRE(desc.jitter < 1, MOEC_E_INVALID_ARG, "desc.jitter is %g; expected less than 1",
               double(desc.jitter));
  MOEC_REQUIRE(desc.data_dtype == 0 || is_real(desc.data_dtype), MOEC_E_DTYPE,
               "desc.data_dtype is 0x%x; expected 0, f32, f16 or bf16", desc.data_dtype);
  check_selection(desc);
}

moec_router_desc with_defaults(moec_router_desc desc) {
  check_desc(desc);
  desc.struct_size = sizeof desc;                // stored descriptions are compared whole
  if (desc.selection != MOEC_SELECT_GROUP_TOPK)  // what nobody checks, nobody reads
    desc.num_groups = desc.top_groups = desc.group_top_m = 0;
  if (desc.rms_eps == 0) desc.rms_eps = 1e-6f;
  if (desc.group_top_m == 0) desc.group_top_m = 1;
  if (desc.norm_p == 0) desc.norm_p = 1;
  if (desc.scale == 0) desc.scale = 1;
  if (desc.data_dtype == 0) desc.data_dtype = MOEC_F32;
  return desc;
}

}  // namespace

// The scratch of one call in one block.
struct Router::Scratch {
  Scratch(const Router& router, int64_t num_tokens, int64_t hidden, moec_stream stream)
      : bytes(checked_bytes("scratch", router.scratch(hidden), num_tokens)),
        workspace(*router.context_, {}, 0, stream, bytes),
        scope(*router.context_, workspace.extra(), bytes) {}
  const uint64_t bytes;
  const Workspace workspace;
  const ScratchScope scope;
};

Router::Router(const Context& context, const moec_router_desc& desc)
    : Object(kKind), context_(context), desc_(with_defaults(desc)) {
  context.backend().prepare_router(desc_);
}

void Router::check_gate_weights(const moec_tensor& weight, const moec_tensor& bias,
                                const moec_tensor& input_scale, TensorCheck& check,
                                GateArgs& gate) const {
  const int64_t H = gate.hidden, N = num_ids();
  gate.weight = check.in("gate weight", weight, {N, H}, kReal);
  const Dtypes parameter = {gate.weight.dtype, MOEC_F32};
  gate.bias =
      check.in_if(has(MOEC_ROUTER_LOGIT_BIAS), "LOGIT_BIAS", "gate bias", bias, {N}, parameter);
  gate.input_scale =
      check.in_if(scales_input(), "RMS_SCALED", "input_scale", input_scale, {H}, parameter);
}

GateGradArgs Router::gradients_of(const GateArgs& forward) {
  GateGradArgs gate = {};
  gate.desc = forward.desc;
  gate.num_tokens = forward.num_tokens;
  gate.hidden = forward.hidden;
  gate.rng_offset = forward.rng_offset;
  gate.x = forward.x;
  gate.weight = forward.weight;
  gate.input_scale = forward.input_scale;
  return gate;
}

void Router::check_gate_gradients(const moec_tensor& d_weight, const moec_tensor& d_bias,
                                  const moec_tensor& d_input_scale, TensorCheck& check,
                                  GateGradArgs& gate) const {
  const int64_t H = gate.hidden, N = num_ids();
  const Dtypes parameter = {gate.weight.dtype, MOEC_F32};
  gate.d_weight = check.optional_out("gradient of the gate weight", d_weight, {N, H}, parameter);
  if (!has(MOEC_ROUTER_LOGIT_BIAS)) check.absent("gradient of the gate bias", d_bias, "LOGIT_BIAS");
  gate.d_bias = check.optional_out("gradient of the gate bias", d_bias, {N}, parameter);
  if (!scales_input()) check.absent("d_input_scale", d_input_scale, "RMS_SCALED");
  gate.d_input_scale = check.optional_out("d_input_scale", d_input_scale, {H}, parameter);
}

Array Router::per_expert_scale_gradient(const moec_tensor& gradient, TensorCheck& check) const {
  if (!has(MOEC_ROUTER_PER_EXPERT_SCALE))
    check.absent("d_per_expert_scale", gradient, "PER_EXPERT_SCALE");
  return check.optional_out("d_per_expert_scale", gradient, {num_ids()}, kReal);
}

GateArgs Router::checked_x(const moec_tensor& x, uint64_t rng_offset, TensorCheck& check) const {
  GateArgs gate = {};
  gate.desc = &desc_;
  gate.num_tokens = check.tokens("x", x);
  gate.hidden = x.shape[1];
  check_at_least("H of x", gate.hidden, 1);
  gate.rng_offset = rng_offset;
  gate.x = check.in("x", x, {gate.num_tokens, gate.hidden}, kReal);
  return gate;
}

void Router::gate_forward(const moec_gate_args& args, moec_stream stream) const {
  check_flags("args.flags", args.flags, 0);
  TensorCheck check(*context_);
  GateArgs gate = checked_x(args.x, args.rng_offset, check);
  const int64_t T = gate.num_tokens, H = gate.hidden, N = num_ids();
  check_gate_weights(args.weight, args.bias, args.input_scale, check, gate);
  gate.logits = static_cast<float*>(check.out("logits", args.logits, {T, N}, kFloat).data);
  if (!jitters())
    check.absent("x_jittered", args.x_jittered, "jitter");
  else if (jitters_experts() || !is_absent(args.x_jittered))
    gate.x_jittered = check.out("x_jittered", args.x_jittered, {T, H}, {gate.x.dtype});
  check.finish();
  const Scratch scratch(*this, T, gate.hidden, stream);
  const Context::Timer timer(*context_, Phase::kRoute);
  context_->backend().run(gate, stream);
}

void Router::gate_backward(const moec_gate_grad_args& args, moec_stream stream) const {
  check_flags("args.flags", args.flags, kGateGradFlags);
  TensorCheck check(*context_);
  GateArgs forward = checked_x(args.x, args.rng_offset, check);
  const int64_t T = forward.num_tokens, H = forward.hidden, N = num_ids();
  forward.weight = check.in("weight", args.weight, {N, H}, kReal);
  forward.input_scale = check.in_if(scales_input(), "RMS_SCALED", "input_scale", args.input_scale,
                                    {H}, {forward.weight.dtype, MOEC_F32});
  GateGradArgs gate = gradients_of(forward);
  gate.accumulate = args.flags & MOEC_GRAD_ACCUMULATE;
  gate.accumulate_x = args.flags & MOEC_GRAD_ACCUMULATE_X;
  gate.skips_idle = (args.flags & MOEC_GRAD_SKIP_IDLE) || may_leave_out();
  gate.d_logits = static_cast<float*>(check.in("d_logits", args.d_logits, {T, N}, kFloat).data);
  gate.d_x = check.optional_out("d_x", args.d_x, {T, H}, {gate.x.dtype, MOEC_F32});
  check_gate_gradients(args.d_weight, args.d_bias, args.d_input_scale, check, gate);
  if (!jitters()) check.absent("d_x_jittered", args.d_x_jittered, "jitter");
  gate.d_x_jittered =
      check.optional_in("d_x_jittered", args.d_x_jittered, {T, H}, {gate.x.dtype, MOEC_F32});
  check.finish();
  const Scratch scratch(*this, T, gate.hidden, stream);
  const Context::Timer timer(*context_, Phase::kRoute);
  context_->backend().run(gate, stream);
}

void Router::check_route_inputs(const moec_route_args& args, int64_t T, TensorCheck& check,
                                RouteArgs& route) const {
  const int64_t N = num_ids(), K = top_k();
  const bool by_table = desc_.selection == MOEC_SELECT_TABLE;
  checked_rows("T * K", checked_product("T * K", T, K));
  route.desc = &desc_;
  route.num_tokens = T;
  route.select_bias =
      static_cast<const float*>(check
                                    .in_if(has(MOEC_ROUTER_SELECT_BIAS), "SELECT_BIAS",
                                           "select_bias", args.select_bias, {N}, kFloat)
                                    .data);
  route.per_expert_scale = check.in_if(has(MOEC_ROUTER_PER_EXPERT_SCALE), "PER_EXPERT_SCALE",
                                       "per_expert_scale", args.per_expert_scale, {N}, kReal);
  route.token_mask = static_cast<const uint8_t*>(
      check.optional_in("token_mask", args.token_mask, {T}, kMask).data);
  if (by_table && !is_absent(args.table)) {
    check_is_matrix("table", args.table);
    route.table_rows = args.table.shape[0];
  }
  route.table =
      check.in_if(by_table, "SELECT_TABLE", "table", args.table, {route.table_rows, K}, kId);
  route.token_ids = check.in_if(by_table, "SELECT_TABLE", "token_ids", args.token_ids, {T}, kId);
  route.given_ids = check.in_if(desc_.selection == MOEC_SELECT_GIVEN, "SELECT_GIVEN", "given_ids",
                                args.given_ids, {T, K}, kId);
}

void Router::route_forward(const moec_route_args& args, moec_stream stream) const {
  check_flags("args.flags", args.flags, 0);
  TensorCheck check(*context_);
  const int64_t T = check.tokens("logits", args.logits), N = num_ids(), K = top_k();
  RouteArgs route = {};
  route.logits = check.in("logits", args.logits, {T, N}, kReal);
  check_route_inputs(args, T, check, route);
  route.expert_ids =
      static_cast<int32_t*>(check.out("expert_ids", args.expert_ids, {T, K}, kInt).data);
  route.routing_weights =
      static_cast<float*>(check.out("routing_weights", args.routing_weights, {T, K}, kFloat).data);
  route.scores =
      static_cast<float*>(check.optional_out("scores", args.scores, {T, N}, kFloat).data);
  route.counts = check.optional_out("counts", args.counts, {N}, kId);
  check.finish();
  const Scratch scratch(*this, T, 0, stream);
  const Context::Timer timer(*context_, Phase::kRoute);
  context_->backend().run(route, stream);
}

void Router::route_backward(const moec_route_grad_args& args, moec_stream stream) const {
  check_flags("args.flags", args.flags, MOEC_GRAD_ACCUMULATE);
  TensorCheck check(*context_);
  const int64_t T = check.tokens("logits", args.logits), N = num_ids(), K = top_k();
  const bool scaled = has(MOEC_ROUTER_PER_EXPERT_SCALE);
  checked_rows("T * K", checked_product("T * K", T, K));
  RouteGradArgs route = {};
  route.desc = &desc_;
  route.num_tokens = T;
  route.accumulate = args.flags & MOEC_GRAD_ACCUMULATE;
  route.logits = check.in("logits", args.logits, {T, N}, kReal);
  route.per_expert_scale = check.in_if(scaled, "PER_EXPERT_SCALE", "per_expert_scale",
                                       args.per_expert_scale, {N}, kReal);
  route.expert_ids = check.in("expert_ids", args.expert_ids, {T, K}, kId);
  route.d_routing_weights = static_cast<float*>(
      check.in("d_routing_weights", args.d_routing_weights, {T, K}, kFloat).data);
  route.d_logits_in = static_cast<const float*>(
      check.optional_in("d_logits_in", args.d_logits_in, {T, N}, kFloat).data);
  route.d_logits = static_cast<float*>(check.out("d_logits", args.d_logits, {T, N}, kFloat).data);
  route.d_per_expert_scale = per_expert_scale_gradient(args.d_per_expert_scale, check);
  check.finish();
  const Scratch scratch(*this, T, 0, stream);
  const Context::Timer timer(*context_, Phase::kRoute);
  context_->backend().run(route, stream);
}

void Router::bias_update(const moec_tensor& counts, float rate, const moec_tensor& bias,
                         moec_stream stream) const {
  MOEC_REQUIRE(std::isfinite(rate), MOEC_E_INVALID_ARG, "rate is %g; expected a finite number",
               double(rate));
  TensorCheck check(*context_);
  const int64_t N = num_ids();
  BiasUpdateArgs update = {};
  update.num_ids = num_ids();
  update.counts = check.in("counts", counts, {N}, kId);
  update.rate = rate;
  update.bias = static_cast<float*>(check.out("bias", bias, {N}, kFloat).data);
  check.finish();
  context_->backend().run(update, stream);
}

}  // namespace moec
