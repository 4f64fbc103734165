// SPDX-License-Identifier: Apache-2.0
// The forward path: check everything, lay out the memory, then gate -> route -> plan -> experts.
#include "core/dtype.h"
#include "layer/layer.h"

namespace moec {

void Layer::forward(const moec_layer_args& args, const LayerWeights& weights,
                    moec_stream stream) const {
  check_flags("args.flags", args.flags, 0);
  const moec_experts_desc& desc = experts_->desc();
  TensorCheck check(*context_);
  Inputs in = check_inputs(args, weights, check);
  const int64_t T = in.num_tokens, H = desc.hidden, N = router_->num_ids(), K = router_->top_k();
  ExpertsArgs& experts = in.experts;
  experts.output_bias =
      check.optional_in("output_bias", args.output_bias, {H}, {desc.dtype, MOEC_F32});
  experts.residual = check.optional_in("residual", args.residual, {T, H}, {desc.dtype}).data;
  experts.y = check.out("y", args.y, {T, H}, {desc.dtype}).data;
  const Array logits = check.optional_out("logits", args.logits, {T, N}, kFloat);
  const Array ids = check.optional_out("expert_ids", args.expert_ids, {T, K}, kInt);
  const Array out_weights =
      check.optional_out("routing_weights", args.routing_weights, {T, K}, kFloat);
  in.route.counts = check.optional_out("counts", args.counts, {N}, kId);
  const moec_experts_sizes own = sizes(weights.adapters);
  const uint64_t saved_bytes = checked_bytes("saved", own.saved, T);
  const uint64_t need = checked_bytes("workspace", own.forward_workspace, T);
  check.saved_out(args.saved, saved_bytes);
  check.memory_out("workspace", args.workspace.ptr, need);
  check.may_be_same("y", "residual");
  check.finish();

  const uint64_t wide = round_up(wide_router_bytes(in.gate), kCacheLine);
  const Workspace workspace(*context_, args.workspace, need, stream,
                            wide + SavedBuffer::copy_bytes(args.saved, saved_bytes));
  Arena arena(workspace.data(), T);
  Memory memory = lay_out_forward(own_sizes(weights.adapters), arena);
  const SavedBuffer saved(*context_, args.saved, saved_bytes, workspace.extra() + wide, stream);
  if (experts_->saves()) {
    begin_saved(saved.data(), T, weights.adapters, stream);
    experts.saved = open_saved(saved.data(), T, memory.kept);
  }
  const Kept& kept = memory.kept;
  PlanView& plan = memory.plan;
  set_plan_tokens(plan_desc_, T, plan);
  if (!parted_) {
    plan.expert_ids = kept.expert_ids;
    plan.routing_weights = kept.routing_weights;
  }

  const Backend& backend = context_->backend();
  {
    const Context::Timer timer(*context_, Phase::kRoute);
    const ScratchScope scope(*context_, wide ? workspace.extra() : memory.experts,
                             wide ? wide : bytes_for(router_scratch_, T));
    in.gate.logits = kept.logits;
    if (kept.x_jittered) in.gate.x_jittered = experts.x = {kept.x_jittered, desc.dtype};
    backend.run(in.gate, stream);
    in.route.logits = {kept.logits, MOEC_F32};
    in.route.expert_ids = kept.expert_ids;
    in.route.routing_weights = kept.routing_weights;
    backend.run(in.route, stream);
  }
  if (!parted_) build_plan(plan, kept, stream);
  {
    const Context::Timer timer(*context_, Phase::kExperts);
    experts.plan = &plan;
    experts.workspace = memory.experts;
    if (parted_)
      parted_->forward(experts,
                       {kept.expert_ids, kept.routing_weights, in.bound, in.has_adapter_ids, &plan},
                       stream);
    else
      context_->count_path(experts::forward(backend.experts_paths(), experts, stream));
  }
  if (logits) backend.copy(logits.data, kept.logits, uint64_t(T * N) * 4, stream);
  if (ids) backend.copy(ids.data, kept.expert_ids, uint64_t(T * K) * 4, stream);
  if (out_weights)
    backend.copy(out_weights.data, kept.routing_weights, uint64_t(T * K) * 4, stream);
  saved.store();
}

}  // namespace moec
