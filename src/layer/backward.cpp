// SPDX-License-Identifier: Apache-2.0
// The backward path: plan again, then experts -> route -> gate. The gradient of x is the experts'
// plus the router's; with MOEC_ROUTER_JITTER_X both pass the jitter, so that the gate adds the
// experts' to its own.
#include "core/dtype.h"
#include "layer/layer.h"

namespace moec {

void Layer::backward(const moec_layer_grad_args& args, const moec_layer_args& forward,
                     const LayerWeights& weights, const moec_weight_set* d_expert_weights,
                     const moec_weight_set* d_shared_weights, moec_stream stream) const {
  check_flags("args.flags", args.flags, kGradFlags);
  check_flags("args.forward->flags", forward.flags, 0);
  MOEC_REQUIRE(
      experts_->saves(), MOEC_E_INVALID_STATE,
      "desc.experts.save is MOEC_SAVE_NONE; create the layer with another to call backward");
  const moec_experts_desc& desc = experts_->desc();
  TensorCheck check(*context_);
  const Inputs in = check_inputs(forward, weights, check);
  const int64_t T = in.num_tokens, H = desc.hidden, N = router_->num_ids(), K = router_->top_k();
  const GradientBinding d_experts(*context_, &weights.weights, d_expert_weights, "d_expert_weights",
                                  check);
  const GradientBinding d_shared(*context_, weights.shared, d_shared_weights, "d_shared_weights",
                                 check);
  const AdapterGradients d_adapters(*context_, weights.adapters, args.d_adapters, check);
  ExpertsGradArgs experts = experts_->gradients_of(in.experts);
  experts.accumulate = args.flags & MOEC_GRAD_ACCUMULATE;
  experts.accumulate_x = args.flags & MOEC_GRAD_ACCUMULATE_X;
  experts.d_y = check.in("d_y", args.d_y, {T, H}, {desc.dtype}).data;
  experts.d_x = check.optional_out("d_x", args.d_x, {T, H}, {desc.dtype}).data;
  experts.d_expert_weights = d_experts.view();
  experts.d_shared_weights = d_shared.view();
  experts.d_adapters = d_adapters.view();
  experts_->check_gradients(
      {args.d_shared_gate, args.d_shared_gate_bias, args.d_output_bias, args.d_residual}, check,
      experts);
  const Array d_routing =
      check.optional_out("d_routing_weights", args.d_routing_weights, {T, K}, kFloat);

  GateGradArgs gate = router_->gradients_of(in.gate);
  gate.accumulate = experts.accumulate;
  gate.accumulate_x = experts.accumulate_x;
  gate.skips_idle = in.route.token_mask || router_->may_leave_out();
  const bool own_x = is_absent(forward.router_x);
  if (own_x) check.absent("d_router_x", args.d_router_x, "router_x");
  gate.d_x =
      own_x ? Array{experts.d_x, desc.dtype}
            : check.optional_out("d_router_x", args.d_router_x, {T, gate.hidden}, {gate.x.dtype});
  router_->check_gate_gradients(args.d_gate_weight, args.d_gate_bias, args.d_input_scale, check,
                                gate);
  RouteGradArgs route = {};
  route.desc = &router_->desc();
  route.num_tokens = T;
  route.accumulate = experts.accumulate;
  route.per_expert_scale = in.route.per_expert_scale;
  route.d_logits_in = static_cast<const float*>(
      check.optional_in("d_logits_in", args.d_logits_in, {T, N}, kFloat).data);
  route.d_per_expert_scale = router_->per_expert_scale_gradient(args.d_per_expert_scale, check);
  const moec_experts_sizes own = sizes(weights.adapters);
  const uint64_t saved_bytes = checked_bytes("saved", own.saved, T);
  const uint64_t need = checked_bytes("workspace", own.backward_workspace, T);
  check.saved_in(forward.saved, saved_bytes);
  check.memory_out("workspace", args.workspace.ptr, need);
  check.finish();
  check_saved_header(*context_, forward.saved.ptr, saved_header(T, weights.adapters));

  const bool trains_router =
      gate.d_x || gate.d_weight || gate.d_bias || gate.d_input_scale || route.d_per_expert_scale;
  const uint64_t wide = trains_router ? round_up(wide_router_bytes(in.gate), kCacheLine) : 0;
  const Workspace workspace(*context_, args.workspace, need, stream,
                            wide + SavedBuffer::copy_bytes(forward.saved, saved_bytes));
  Arena arena(workspace.data(), T);
  const Memory memory = lay_out_backward(own_sizes(weights.adapters), arena);
  const SavedBuffer saved(*context_, forward.saved, saved_bytes, workspace.extra() + wide, stream);
  saved.load();
  Kept kept;
  experts.saved = open_saved(saved.data(), T, kept);
  PlanView plan = memory.plan;
  set_plan_tokens(plan_desc_, T, plan);
  if (!parted_) build_plan(plan, kept, stream);

  const Backend& backend = context_->backend();
  experts.plan = &plan;
  experts.workspace = memory.experts;
  experts.d_routing_weights = d_routing       ? static_cast<float*>(d_routing.data)
                              : trains_router ? memory.d_routing_weights
                                              : nullptr;
  if (kept.x_jittered) {
    experts.x = {kept.x_jittered, desc.dtype};
    if (experts.d_x) {
      gate.d_x_jittered = {memory.d_x_jittered, desc.dtype};
      experts.d_x = memory.d_x_jittered;
      experts.accumulate_x = false;
    }
  } else if (own_x) {
    gate.accumulate_x = true;  // on top of the experts' part
  }
  {
    const Context::Timer timer(*context_, Phase::kExperts);
    if (parted_)
      parted_->backward(
          experts, {kept.expert_ids, kept.routing_weights, in.bound, in.has_adapter_ids, &plan},
          stream);
    else
      context_->count_path(experts::backward(backend.experts_paths(), experts, stream));
  }
  if (!trains_router) return;
  const Context::Timer timer(*context_, Phase::kRoute);
  const ScratchScope scope(*context_, wide ? workspace.extra() : memory.experts,
                           wide ? wide : bytes_for(router_scratch_, T));
  route.logits = {kept.logits, MOEC_F32};
  route.expert_ids = {kept.expert_ids, MOEC_I32};
  route.d_routing_weights = experts.d_routing_weights;
  route.d_logits = memory.d_logits;
  backend.run(route, stream);
  gate.d_logits = memory.d_logits;
  if (gate.d_x || gate.d_weight || gate.d_bias || gate.d_input_scale) backend.run(gate, stream);
}

}  // namespace moec
