// SPDX-License-Identifier: Apache-2.0
#include "layer/parted_experts.h"

#include <algorithm>
#include <cstring>

#include "core/dtype.h"
#include "layer/experts_desc.h"
#include "layer/plan_layout.h"

namespace moec {
namespace {

using ll = long long;

void check_agreement(const ep::Exchange& exchange, const moec_experts_desc& desc) {
  const ep::Shape& s = exchange.shape();
  const struct {
    const char* name;
    int64_t desc, ep;
  } rows[] = {{"hidden", desc.hidden, s.hidden},
              {"num_experts", desc.num_experts, s.num_experts},
              {"num_zero_experts", desc.num_zero_experts, s.num_zero},
              {"top_k", desc.top_k, s.top_k},
              {"dtype", desc.dtype, s.dtype},
              {"expert_begin", desc.expert_begin, exchange.expert_begin()},
              {"expert_end", desc.expert_end, exchange.expert_end()}};
  for (const auto& row : rows)
    MOEC_REQUIRE(row.desc == row.ep, MOEC_E_INVALID_ARG,
                 "desc.experts.%s is %lld and desc.ep has %lld; expected equal", row.name,
                 ll(row.desc), ll(row.ep));
  MOEC_REQUIRE(desc.shared != MOEC_SHARED_SOFTMAX2, MOEC_E_UNSUPPORTED,
               "desc.experts.shared is MOEC_SHARED_SOFTMAX2, which scales the routed sum; with an "
               "ep expected NONE, ADD or SIGMOID_GATE");
  MOEC_REQUIRE(
      desc.combine != MOEC_COMBINE_DATA_EXPERT, MOEC_E_UNSUPPORTED,
      "desc.experts.combine is MOEC_COMBINE_DATA_EXPERT, which rounds after each expert of "
      "a token; with an ep expected FP32_SLOT or FP32_EXPERT");
  MOEC_REQUIRE(s.partial_dtype == s.dtype, MOEC_E_UNSUPPORTED,
               "the ep has partial rows of %s; a layer writes %s", dtype_name(s.partial_dtype),
               dtype_name(s.dtype));
  MOEC_REQUIRE(desc.save == MOEC_SAVE_NONE || !(s.flags & MOEC_EP_FORWARD_ONLY), MOEC_E_INVALID_ARG,
               "desc.experts.save is %u and the ep was made with MOEC_EP_FORWARD_ONLY; expected "
               "MOEC_SAVE_NONE",
               desc.save);
}

moec_experts_desc routed_desc(const moec_experts_desc& desc) {
  moec_experts_desc routed = desc;
  routed.shared = MOEC_SHARED_NONE;
  routed.shared_inter = 0;
  return routed;
}

// No routed row is at home, so that the width of its experts is of no matter: a small one takes
// least memory. A path may want a multiple of 8.
moec_experts_desc home_desc(const moec_experts_desc& desc) {
  moec_experts_desc home = desc;
  home.inter = desc.inter % 8 == 0 ? 8 : 1;
  home.align = 1;
  return home;
}

moec_plan_desc guest_plan_desc(const moec_plan_desc& plan, int64_t max_guests) {
  moec_plan_desc desc = plan;
  desc.max_tokens = max_guests;
  return checked_plan_desc(desc);
}

moec_size of_tokens(const moec_size& size, int64_t tokens) {
  return {bytes_for(size, tokens), 0};
}

}  // namespace

PartedExperts::PartedExperts(const Context& context, Ep& ep, const moec_plan_desc& plan,
                             const moec_experts_desc& desc)
    : context_(context),
      ep_(ep),
      plan_desc_(guest_plan_desc(plan, ep.exchange().most_guests())),
      plan_scratch_(context.backend().plan_scratch(plan_desc_)),
      routed_(routed_desc(desc)),
      home_(home_desc(desc)),
      always_home_(desc.shared != MOEC_SHARED_NONE || desc.num_zero_experts > 0) {
  MOEC_REQUIRE(&ep.context() == &context, MOEC_E_INVALID_ARG,
               "desc.ep is of another context; expected the layer's");
  check_agreement(ep.exchange(), desc);
  const ExpertsPaths paths = context.backend().experts_paths();
  plain_sizes_ = experts::sizes(paths, routed_);
  home_sizes_ = experts::sizes(paths, home_);
}

experts::Sizes PartedExperts::routed_sizes(const AdaptersView* adapters) const {
  if (!adapters) return plain_sizes_;
  return experts::sizes(context_->backend().experts_paths(), routed_, adapters);
}

uint64_t PartedExperts::routed_saved(const experts::Sizes& routed) const {
  return round_up(bytes_for(routed.saved, plan_desc_.max_tokens), kCacheLine);
}

experts::Sizes PartedExperts::sizes(const AdaptersView* adapters) const {
  const experts::Sizes routed = routed_sizes(adapters);
  Arena forward, backward;
  lay_out(forward, routed, false);
  lay_out(backward, routed, true);
  experts::Sizes sizes;
  sizes.saved = {routed_saved(routed) + home_sizes_.saved.base, home_sizes_.saved.per_token};
  sizes.forward = forward.size();
  sizes.backward = backward.size();
  return sizes;
}

PartedExperts::Memory PartedExperts::lay_out(Arena& arena, const experts::Sizes& routed_sizes,
                                             bool backward) const {
  const int64_t guests = plan_desc_.max_tokens, K = routed_.top_k;
  const auto size = [&](const experts::Sizes& of) { return backward ? of.backward : of.forward; };
  Memory memory = {};
  Arena plan;
  lay_out_plan(plan_desc_, true, plan);
  const uint64_t plan_bytes = bytes_for(plan.size(), guests);
  void* const plan_memory = arena.take(plan_bytes, 0);
  Arena at(plan_memory, guests);
  memory.plan = lay_out_plan(plan_desc_, true, at);
  memory.plan.scratch = arena.take(bytes_for(plan_scratch_, guests), 0);
  memory.capacity = arena.take_array<int32_t>(1, 0);
  if (backward) {
    memory.d_guest_weights = arena.take_array<float>(uint64_t(guests * K), 0);
    memory.d_home_weights = arena.take_array<float>(0, uint64_t(K));
  }
  const moec_size routed = of_tokens(size(routed_sizes), guests), home = size(home_sizes_);
  memory.experts = arena.take(std::max(routed.base, home.base), home.per_token);
  return memory;
}

// Capacities are of the tokens of all ranks.
PlanView PartedExperts::plan_guests(const ep::Guests& guests, int64_t bound, const Memory& memory,
                                    moec_stream stream) const {
  const bool is_known = guests.total_tokens >= 0;
  moec_plan_desc desc = plan_desc_;
  desc.capacity = plan_capacity(desc, is_known ? guests.total_tokens : guests.count);
  desc.capacity_factor = 0;
  PlanView plan = memory.plan;
  set_plan_tokens(desc, guests.count, plan);
  plan.choice_tokens = ep_->exchange().comm().size() * bound;
  plan.choice_rows = plan_max_rows(plan_desc_, plan.choice_tokens);
  if (!is_known && plan_desc_.capacity_factor > 0) {
    context_->backend().between_ranks(
        ep_->exchange().capacity_of_all(double(plan_desc_.capacity_factor), memory.capacity),
        stream);
    plan.capacity_at = memory.capacity;
  }
  PlanSource source = {};
  source.expert_ids = {guests.ids, MOEC_I32};
  source.routing_weights = guests.weights;
  const Context::Timer timer(*context_, Phase::kPlan);
  context_->backend().run(PlanArgs{&source, &plan}, stream);
  return plan;
}

// The plan of the own tokens without a row: identity experts alone keep their slots. Its extents
// are those of home_, not the layer's.
PlanView PartedExperts::plan_home(const Routing& routing, moec_stream stream) const {
  PlanView plan = *routing.home;
  const int64_t slots = plan.num_tokens * plan.top_k;
  plan.align = home_.align;
  plan.max_rows = plan.choice_rows = slots;
  plan.drop = MOEC_DROP_NONE;
  plan.capacity = 0;
  context_->backend().between_ranks(
      KeepIdentities{slots, plan.num_experts, routing.ids, plan.expert_ids}, stream);
  PlanSource source = {};
  source.expert_ids = {plan.expert_ids, MOEC_I32};
  source.routing_weights = routing.weights;
  context_->backend().run(PlanArgs{&source, &plan}, stream);
  return plan;
}

void PartedExperts::forward(const ExpertsArgs& args, const Routing& routing,
                            moec_stream stream) const {
  const Backend& backend = context_->backend();
  ep::Exchange& exchange = ep_->exchange();
  const experts::Sizes sizes = routed_sizes(args.adapters);
  const uint64_t saved_bytes = routed_saved(sizes);
  char* const saved = static_cast<char*>(args.saved);
  Arena arena(args.workspace, args.num_tokens);
  const Memory memory = lay_out(arena, sizes, false);
  const ep::Guests guests = exchange.dispatch(
      {{args.num_tokens, {const_cast<int32_t*>(routing.ids), MOEC_I32}, routing.weights},
       routing.bound,
       args.x.data,
       nullptr,
       false,
       1.0f,
       args.adapter_ids,
       routing.has_adapter_ids},
      stream);
  const bool at_home = always_home_ || args.residual || args.output_bias;
  if (at_home) {
    const PlanView own = plan_home(routing, stream);
    ExpertsArgs home = args;
    home.desc = &home_;
    home.plan = &own;
    home.adapters = nullptr;
    home.saved = saved ? saved + saved_bytes : nullptr;
    home.workspace = memory.experts;
    context_->count_path(experts::forward(backend.experts_paths(), home, stream));
  } else if (saved) {
    backend.zero(saved + saved_bytes, bytes_for(home_sizes_.saved, args.num_tokens), stream);
  }
  const PlanView plan = plan_guests(guests, routing.bound, memory, stream);
  ExpertsArgs routed = {};
  routed.desc = &routed_;
  routed.num_tokens = guests.count;
  routed.plan = &plan;
  routed.weights = args.weights;
  routed.x = {guests.rows, routed_.dtype};
  routed.y = guests.partial;
  routed.saved = args.saved;
  routed.workspace = memory.experts;
  routed.adapters = args.adapters;
  routed.adapter_ids = guests.adapter_ids;
  // A guest whose rows were all dropped is awaited at home: with a capacity every row is written.
  routed.skip_absent = plan_desc_.drop == MOEC_DROP_NONE;
  context_->count_path(experts::forward(backend.experts_paths(), routed, stream));
  if (saved) {
    const uint64_t used = bytes_for(sizes.saved, guests.count);
    backend.zero(saved + used, saved_bytes - used, stream);
  }
  ep::Homecoming to = {};
  to.y = args.y;
  to.add = at_home;
  exchange.combine(to, stream);
}

void PartedExperts::backward(const ExpertsGradArgs& args, const Routing& routing,
                             moec_stream stream) const {
  const Backend& backend = context_->backend();
  ep::Exchange& exchange = ep_->exchange();
  const float scale = exchange.shape().grad_scale;
  const int64_t T = args.num_tokens, K = routed_.top_k;
  const experts::Sizes sizes = routed_sizes(args.adapters);
  Arena arena(args.workspace, T);
  const Memory memory = lay_out(arena, sizes, true);
  const ep::Guests guests =
      exchange.dispatch({{T, {const_cast<int32_t*>(routing.ids), MOEC_I32}, routing.weights},
                         routing.bound,
                         args.x.data,
                         args.d_y,
                         true,
                         scale,
                         args.adapter_ids,
                         routing.has_adapter_ids},
                        stream);
  const bool has_identity = home_.num_zero_experts > 0 && args.d_routing_weights;
  const bool at_home = always_home_ || args.d_output_bias || args.d_residual;
  if (at_home) {
    const PlanView own = plan_home(routing, stream);
    ExpertsGradArgs home = args;
    home.desc = &home_;
    home.plan = &own;
    home.adapters = nullptr;
    home.d_adapters = nullptr;
    home.saved = static_cast<const char*>(args.saved) + routed_saved(sizes);
    home.d_routing_weights = has_identity ? memory.d_home_weights : nullptr;
    home.d_expert_weights = nullptr;
    home.workspace = memory.experts;
    context_->count_path(experts::backward(backend.experts_paths(), home, stream));
  }
  const PlanView plan = plan_guests(guests, routing.bound, memory, stream);
  ExpertsGradArgs routed = {};
  routed.desc = &routed_;
  routed.num_tokens = guests.count;
  routed.accumulate = args.accumulate;
  routed.plan = &plan;
  routed.weights = args.weights;
  routed.x = {guests.rows, routed_.dtype};
  routed.d_y = guests.beside;
  routed.saved = args.saved;
  routed.d_x = guests.partial;
  routed.d_routing_weights = memory.d_guest_weights;
  routed.d_expert_weights = args.d_expert_weights;
  routed.adapters = args.adapters;
  routed.adapter_ids = guests.adapter_ids;
  routed.d_adapters = args.d_adapters;
  routed.workspace = memory.experts;
  context_->count_path(experts::backward(backend.experts_paths(), routed, stream));
  ep::Homecoming to = {};
  to.has_weights = true;
  to.d_guest_weights = memory.d_guest_weights;
  to.y = args.d_x;
  to.add = at_home || args.accumulate_x;
  to.scale = 1.0f / scale;
  to.d_routing_weights = args.d_routing_weights;
  exchange.combine(to, stream);
  if (has_identity)
    backend.between_ranks(TakeIdentities{T * K, home_.num_experts, routing.ids,
                                         memory.d_home_weights, args.d_routing_weights},
                          stream);
}

}  // namespace moec
