// SPDX-License-Identifier: Apache-2.0
// The experts of a layer whose experts lie on the ranks of an ep.
//
//   at home    the T tokens of this rank: shared expert, identity experts, residual, output bias.
//              It is an experts call whose plan has no row; its y is rounded once.
//   routed     the guests of this rank and its experts: partial rows
//   then       y = sum of partial rows by rank + what home wrote
//
//   saved      routed (for as many guests as there can be) | home [T]
//   workspace  plan of the guests | d_guest_weights | weights of home's slots | one experts call
#pragma once

#include "layer/ep.h"
#include "layer/experts.h"

namespace moec {

class PartedExperts {
 public:
  // `plan`: of the layer; `desc`: checked, of the experts of this rank.
  PartedExperts(const Context& context, Ep& ep, const moec_plan_desc& plan,
                const moec_experts_desc& desc);

  Ep& ep() const { return *ep_; }
  // Of calls with adapters that fit the experts of this rank, or null.
  experts::Sizes sizes(const AdaptersView* adapters) const;

  struct Routing {         // of the tokens of this rank
    const int32_t* ids;    // [T,K]
    const float* weights;  // [T,K]
    int64_t bound;         // of the call
    bool has_adapter_ids;
    PlanView* home;  // memory for the plan of T tokens
  };
  // As experts::forward and backward; `args.plan` is not read.
  void forward(const ExpertsArgs& args, const Routing& routing, moec_stream stream) const;
  void backward(const ExpertsGradArgs& args, const Routing& routing, moec_stream stream) const;

 private:
  struct Memory {
    PlanView plan;           // of the guests
    int32_t* capacity;       // [1] where the host does not know it
    float* d_guest_weights;  // [R,K]
    float* d_home_weights;   // [T,K], with identity experts
    void* experts;
  };
  Memory lay_out(Arena& arena, const experts::Sizes& routed, bool backward) const;
  experts::Sizes routed_sizes(const AdaptersView* adapters) const;
  uint64_t routed_saved(const experts::Sizes& routed) const;  // bytes
  PlanView plan_guests(const ep::Guests& guests, int64_t bound, const Memory& memory,
                       moec_stream stream) const;
  PlanView plan_home(const Routing& routing, moec_stream stream) const;

  Ref<const Context> context_;
  Ref<Ep> ep_;
  moec_plan_desc plan_desc_;  // of max_guests tokens
  moec_size plan_scratch_;
  moec_experts_desc routed_, home_;
  experts::Sizes plain_sizes_, home_sizes_;  // plain: of routed calls without adapters
  bool always_home_;                         // a shared expert, or identity experts
};

}  // namespace moec
