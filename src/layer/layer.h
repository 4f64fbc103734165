// SPDX-License-Identifier: Apache-2.0
// The whole layer: gate, route, plan, experts, in one call with one workspace and one saved buffer.
//
//   saved      header | logits [T,E+Z] | expert_ids [T,K] | routing_weights [T,K] |
//              x_jittered [T,H] | the experts' own
//   workspace
//   forward    plan arrays | plan scratch | the experts' own; without `saved` its arrays, from
//              logits to x_jittered, come first
//   backward   plan arrays | plan scratch | d_routing_weights [T,K] | d_logits [T,E+Z] |
//              d_x_jittered [T,H] | the experts' own
//
// With an ep the experts' own parts are those of PartedExperts, and the plan is that of home.
//
// The experts' own part of a workspace serves the router as scratch, too: they run in turn.
// Backward builds the plan again from expert_ids and weights: it costs less than keeping its rows.
#pragma once

#include <memory>

#include "layer/parted_experts.h"

namespace moec {

struct LayerWeights {
  const Weights& weights;
  const Weights* shared;     // null without shared expert
  const Adapters* adapters;  // null: none
};

class Layer final : public Object {
 public:
  static constexpr Kind kKind = Kind::kLayer;
  // ep: or null.
  Layer(const Context& context, const moec_layer_desc& desc, const moec_router_desc& router,
        const moec_experts_desc& experts, Ep* ep);

  const Context& context() const { return *context_; }
  const Router& router() const { return *router_; }
  const Experts& experts() const { return *experts_; }
  const moec_experts_sizes& sizes() const { return sizes_; }
  moec_experts_sizes sizes(const Adapters* adapters) const;

  // A call from its first byte on: with an ep, a failure of this rank alone is told to the others.
  template <class Body>
  void attend(Body&& body) const {
    if (!parted_) return body();
    parted_->ep().exchange().attend(ep::Call::kLayer, body);
  }
  void forward(const moec_layer_args& args, const LayerWeights& weights, moec_stream stream) const;
  void backward(const moec_layer_grad_args& args, const moec_layer_args& forward,
                const LayerWeights& weights, const moec_weight_set* d_expert_weights,
                const moec_weight_set* d_shared_weights, moec_stream stream) const;
  std::string describe(const Weights& weights, int64_t num_tokens) const;

 private:
  struct Kept {              // from forward to backward, or for forward only
    float* logits;           // [T,E+Z]
    int32_t* expert_ids;     // [T,K]
    float* routing_weights;  // [T,K]
    void* x_jittered;        // [T,H] dtype of x, with JITTER_X
  };
  struct Inputs;
  struct Memory;

  Inputs check_inputs(const moec_layer_args& args, const LayerWeights& weights,
                      TensorCheck& check) const;
  Kept lay_out_kept(Arena& arena) const;
  // own: of the experts.
  Memory lay_out_forward(const experts::Sizes& own, Arena& arena) const;
  Memory lay_out_backward(const experts::Sizes& own, Arena& arena) const;
  moec_experts_sizes sizes_of(const experts::Sizes& own) const;
  experts::Sizes own_sizes(const Adapters* adapters) const;
  PlanView plan_in(Arena& arena) const;
  void* experts_in(Arena& arena, const moec_size& own) const;
  uint64_t wide_router_bytes(const GateArgs& gate) const;
  void build_plan(const PlanView& plan, const Kept& kept, moec_stream stream) const;
  void* open_saved(void* saved, int64_t num_tokens, Kept& kept) const;
  void begin_saved(void* saved, int64_t num_tokens, const Adapters* adapters,
                   moec_stream stream) const;
  SavedHeader saved_header(int64_t num_tokens, const Adapters* adapters) const;

  Ref<const Context> context_;
  Ref<const Router> router_;
  Ref<const Experts> experts_;
  std::unique_ptr<const PartedExperts> parted_;  // with an ep
  moec_plan_desc plan_desc_ = {};
  moec_size plan_scratch_ = {}, router_scratch_ = {};
  moec_experts_sizes sizes_ = {};
};

// Arguments of a call, checked, in the form the backend takes.
struct Layer::Inputs {
  int64_t num_tokens = 0, bound = 0;
  bool has_adapter_ids = false;
  GateArgs gate = {};
  RouteArgs route = {};
  ExpertsArgs experts = {};
};

// Where the regions of one workspace lie.
struct Layer::Memory {
  Kept kept = {};
  PlanView plan;
  float *d_routing_weights = nullptr, *d_logits = nullptr;  // backward
  void *d_x_jittered = nullptr, *experts = nullptr;         // experts: the router's scratch as well
};

}  // namespace moec
