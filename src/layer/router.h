// SPDX-License-Identifier: Apache-2.0
// A validated router description and its calls: gate GEMM, routing, their gradients, bias update.
#pragma once

#include "backend/args.h"
#include "layer/check.h"
#include "layer/context.h"

namespace moec {

class Router final : public Object {
 public:
  static constexpr Kind kKind = Kind::kRouter;
  Router(const Context& context, const moec_router_desc& desc);

  const Context& context() const { return *context_; }
  const moec_router_desc& desc() const { return desc_; }  // defaults filled in
  int32_t num_ids() const { return desc_.num_experts + desc_.num_zero_experts; }
  int32_t top_k() const { return desc_.top_k; }
  bool has(uint32_t flag) const { return desc_.flags & flag; }
  bool scales_input() const { return desc_.input == MOEC_INPUT_RMS_SCALED; }
  bool jitters() const { return desc_.jitter > 0; }
  // Ids come from the caller, and may be nobody's.
  bool may_leave_out() const {
    return desc_.selection == MOEC_SELECT_TABLE || desc_.selection == MOEC_SELECT_GIVEN;
  }
  // The experts see the jittered x, too.
  bool jitters_experts() const { return jitters() && has(MOEC_ROUTER_JITTER_X); }

  void gate_forward(const moec_gate_args& args, moec_stream stream) const;
  void gate_backward(const moec_gate_grad_args& args, moec_stream stream) const;
  void route_forward(const moec_route_args& args, moec_stream stream) const;
  void route_backward(const moec_route_grad_args& args, moec_stream stream) const;
  void bias_update(const moec_tensor& counts, float rate, const moec_tensor& bias,
                   moec_stream stream) const;

  // x and what says how a gate reads it; no weights yet.
  GateArgs checked_x(const moec_tensor& x, uint64_t rng_offset, TensorCheck& check) const;
  // Gate weight, bias and scale, checked into `gate`, whose hidden is set.
  void check_gate_weights(const moec_tensor& weight, const moec_tensor& bias,
                          const moec_tensor& input_scale, TensorCheck& check, GateArgs& gate) const;
  // The inputs of a backward call, of those of its forward call.
  static GateGradArgs gradients_of(const GateArgs& forward);
  void check_gate_gradients(const moec_tensor& d_weight, const moec_tensor& d_bias,
                            const moec_tensor& d_input_scale, TensorCheck& check,
                            GateGradArgs& gate) const;
  Array per_expert_scale_gradient(const moec_tensor& gradient, TensorCheck& check) const;
  // The inputs of routing besides the logits, checked into `route`. Used by plans and layers as
  // well.
  void check_route_inputs(const moec_route_args& args, int64_t num_tokens, TensorCheck& check,
                          RouteArgs& route) const;

  // Bytes that a gate or route call may acquire besides.
  moec_size scratch(int64_t hidden) const {
    return context_->backend().router_scratch(desc_, hidden);
  }

 private:
  struct Scratch;
  Ref<const Context> context_;
  moec_router_desc desc_;
};

}  // namespace moec
