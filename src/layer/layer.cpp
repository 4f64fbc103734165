// SPDX-License-Identifier: Apache-2.0
#include "layer/layer.h"

#include <algorithm>
#include <string>

#include "core/checksum.h"
#include "core/dtype.h"

namespace moec {
namespace {

moec_plan_desc plan_desc_of(const moec_layer_desc& layer, const moec_experts_desc& experts) {
  moec_plan_desc desc = {};
  desc.num_experts = experts.num_experts;
  desc.num_zero_experts = experts.num_zero_experts;
  desc.top_k = experts.top_k;
  desc.expert_begin = experts.expert_begin;
  desc.expert_end = experts.expert_end;
  desc.align = experts.align;
  desc.drop = layer.drop;
  desc.capacity = layer.capacity;
  desc.capacity_factor = layer.capacity_factor;
  return checked_plan_desc(desc);
}

void check_agreement(const moec_router_desc& router, const moec_experts_desc& experts) {
  const struct {
    const char* name;
    int32_t router, experts;
  } rows[] = {{"num_experts", router.num_experts, experts.num_experts},
              {"num_zero_experts", router.num_zero_experts, experts.num_zero_experts},
              {"top_k", router.top_k, experts.top_k}};
  for (const auto& row : rows)
    MOEC_REQUIRE(row.router == row.experts, MOEC_E_INVALID_ARG,
                 "desc.router.%s is %d and desc.experts.%s is %d; expected equal", row.name,
                 row.router, row.name, row.experts);
}

// With an ep, 0, 0 are the experts of this rank.
moec_experts_desc of_rank(const moec_experts_desc& given, const Ep* ep) {
  moec_experts_desc desc = given;
  if (!ep || desc.expert_end != 0) return desc;
  desc.expert_begin = ep->exchange().expert_begin();
  desc.expert_end = ep->exchange().expert_end();
  return desc;
}

moec_size affine(uint64_t extra, const Arena& arena) {
  return {arena.size().base + extra, arena.size().per_token};
}

}  // namespace

Layer::Layer(const Context& context, const moec_layer_desc& desc, const moec_router_desc& router,
             const moec_experts_desc& experts, Ep* ep)
    : Object(kKind), context_(context) {
  check_flags("desc.flags", desc.flags, 0);
  check_agreement(router, experts);
  router_ = Ref<const Router>::of_new(new Router(context, router));
  experts_ = Ref<const Experts>::of_new(new Experts(context, of_rank(experts, ep)));
  plan_desc_ = plan_desc_of(desc, experts_->desc());
  if (ep) parted_ = std::make_unique<PartedExperts>(context, *ep, plan_desc_, experts_->desc());
  plan_scratch_ = context.backend().plan_scratch(plan_desc_);
  router_scratch_ = router_->scratch(experts_->desc().hidden);
  sizes_ = sizes_of(own_sizes(nullptr));
}

moec_experts_sizes Layer::sizes_of(const experts::Sizes& own) const {
  moec_experts_sizes sizes = {};
  Arena forward, backward, saved;
  lay_out_forward(own, forward);
  sizes.forward_workspace = affine(kAlignSlack, forward);
  if (!experts_->saves()) return sizes;
  lay_out_backward(own, backward);
  lay_out_kept(saved);
  sizes.backward_workspace = affine(kAlignSlack, backward);
  sizes.saved = affine(own.saved.base, saved);
  sizes.saved.per_token += own.saved.per_token;
  return sizes;
}

moec_experts_sizes Layer::sizes(const Adapters* adapters) const {
  return adapters ? sizes_of(own_sizes(adapters)) : sizes_;
}

// Of the experts alone.
experts::Sizes Layer::own_sizes(const Adapters* adapters) const {
  if (!parted_) return experts_->backend_sizes(adapters);
  if (!adapters) return parted_->sizes(nullptr);
  experts_->check_adapters_fit(*adapters);
  return parted_->sizes(&adapters->view());
}

Layer::Kept Layer::lay_out_kept(Arena& arena) const {
  const uint64_t N = uint64_t(router_->num_ids()), K = uint64_t(router_->top_k());
  const moec_experts_desc& desc = experts_->desc();
  Kept kept = {};
  if (experts_->saves()) arena.take(sizeof(SavedHeader), 0);
  kept.logits = arena.take_array<float>(0, N);
  kept.expert_ids = arena.take_array<int32_t>(0, K);
  kept.routing_weights = arena.take_array<float>(0, K);
  if (router_->jitters_experts())
    kept.x_jittered = arena.take(0, uint64_t(desc.hidden * dtype_bytes(desc.dtype)));
  return kept;
}

PlanView Layer::plan_in(Arena& arena) const {
  PlanView plan = lay_out_plan(plan_desc_, true, arena);
  plan.scratch = arena.take(plan_scratch_.base, plan_scratch_.per_token);
  return plan;
}

// One region, for the router's scratch and the experts' workspace are never in use together.
void* Layer::experts_in(Arena& arena, const moec_size& own) const {
  return arena.take(std::max(own.base, router_scratch_.base),
                    std::max(own.per_token, router_scratch_.per_token));
}

// Scratch of a router whose input is wider than the experts', for which that region has no room;
// else 0.
uint64_t Layer::wide_router_bytes(const GateArgs& gate) const {
  const moec_size need = router_->scratch(gate.hidden);
  const uint64_t bytes = checked_bytes("scratch", need, gate.num_tokens);
  return bytes > bytes_for(router_scratch_, gate.num_tokens) ? bytes : 0;
}

Layer::Memory Layer::lay_out_forward(const experts::Sizes& own, Arena& arena) const {
  Memory memory;
  if (!experts_->saves()) memory.kept = lay_out_kept(arena);
  memory.plan = plan_in(arena);
  memory.experts = experts_in(arena, own.forward);
  return memory;
}

Layer::Memory Layer::lay_out_backward(const experts::Sizes& own, Arena& arena) const {
  const uint64_t N = uint64_t(router_->num_ids()), K = uint64_t(router_->top_k());
  const moec_experts_desc& desc = experts_->desc();
  Memory memory;
  memory.plan = plan_in(arena);
  memory.d_routing_weights = arena.take_array<float>(0, K);
  memory.d_logits = arena.take_array<float>(0, N);
  if (router_->jitters_experts())
    memory.d_x_jittered = arena.take(0, uint64_t(desc.hidden * dtype_bytes(desc.dtype)));
  memory.experts = experts_in(arena, own.backward);
  return memory;
}

Layer::Inputs Layer::check_inputs(const moec_layer_args& args, const LayerWeights& weights,
                                  TensorCheck& check) const {
  Inputs inputs;
  const int64_t T = check.tokens("x", args.x), H = experts_->desc().hidden, N = router_->num_ids();
  inputs.num_tokens = T;
  if (parted_)
    inputs.bound = parted_->ep().checked_bound(args.bound, T);
  else
    check_range("args.bound", args.bound, 0, 0);
  ExpertsArgs& experts = inputs.experts;
  experts.num_tokens = T;
  experts_->check_weights(weights.weights, weights.shared, check, experts);
  experts_->check_inputs(args.x, args.shared_gate, args.shared_gate_bias, check, experts);
  experts_->check_adapters(weights.adapters, args.adapter_ids, check, experts);
  inputs.has_adapter_ids = !is_absent(args.adapter_ids);

  GateArgs& gate = inputs.gate;
  gate.desc = &router_->desc();
  gate.num_tokens = T;
  gate.rng_offset = args.rng_offset;
  const bool own_x = is_absent(args.router_x);
  MOEC_REQUIRE(
      own_x || !router_->jitters_experts(), MOEC_E_INVALID_ARG,
      "router_x is given with MOEC_ROUTER_JITTER_X; expected absent, for the experts see the "
      "router's x");
  gate.hidden = own_x ? H : args.router_x.ndim == 2 ? args.router_x.shape[1] : 1;
  check_at_least("H of router_x", gate.hidden, 1);
  gate.x = own_x ? experts.x : check.in("router_x", args.router_x, {T, gate.hidden}, kReal);
  router_->check_gate_weights(args.gate_weight, args.gate_bias, args.input_scale, check, gate);

  moec_route_args route = {};
  route.select_bias = args.select_bias;
  route.per_expert_scale = args.per_expert_scale;
  route.token_mask = args.token_mask;
  route.table = args.table;
  route.token_ids = args.token_ids;
  route.given_ids = args.given_ids;
  router_->check_route_inputs(route, T, check, inputs.route);
  plan_max_rows(plan_desc_, T);
  checked_product("T * (E+Z)", T, N);
  return inputs;
}

SavedHeader Layer::saved_header(int64_t num_tokens, const Adapters* adapters) const {
  SavedHeader header =
      experts_->saved_header(num_tokens, plan_max_rows(plan_desc_, num_tokens), adapters);
  header.desc_hash = checksum(&router_->desc(), sizeof(moec_router_desc), header.desc_hash);
  header.desc_hash = checksum(&plan_desc_, sizeof plan_desc_, header.desc_hash);
  return header;
}

// Lays out the layer's part of `saved`; returns the experts' part, which ends the buffer.
void* Layer::open_saved(void* saved, int64_t num_tokens, Kept& kept) const {
  Arena arena(saved, num_tokens);
  kept = lay_out_kept(arena);
  return static_cast<char*>(saved) + arena.used();  // a cache line's start, whatever T
}

// The header, and zeros where no region will be written: behind each region up to the next, and
// behind the experts' part.
void Layer::begin_saved(void* saved, int64_t num_tokens, const Adapters* adapters,
                        moec_stream stream) const {
  const uint64_t N = uint64_t(router_->num_ids()), K = uint64_t(router_->top_k());
  const uint64_t T = uint64_t(num_tokens);
  Kept kept;
  char* const experts = static_cast<char*>(open_saved(saved, num_tokens, kept));
  const auto after = [](void* region, uint64_t bytes) {
    return static_cast<char*>(region) + bytes;
  };
  const auto zero_to = [&](char* begin, void* next) {
    context_->backend().zero(begin, uint64_t(static_cast<char*>(next) - begin), stream);
  };
  write_saved_header(*context_, saved, saved_header(num_tokens, adapters), stream);
  zero_to(after(kept.logits, T * N * sizeof(float)), kept.expert_ids);
  zero_to(after(kept.expert_ids, T * K * sizeof(int32_t)), kept.routing_weights);
  const moec_experts_desc& desc = experts_->desc();
  const uint64_t x_bytes = T * uint64_t(desc.hidden * dtype_bytes(desc.dtype));
  char* last = after(kept.routing_weights, T * K * sizeof(float));
  if (kept.x_jittered) {
    zero_to(last, kept.x_jittered);
    last = after(kept.x_jittered, x_bytes);
  }
  zero_to(last, experts);
  zero_to(after(experts, bytes_for(own_sizes(adapters).saved, num_tokens)),
          after(saved, bytes_for(sizes(adapters).saved, num_tokens)));
}

void Layer::build_plan(const PlanView& plan, const Kept& kept, moec_stream stream) const {
  PlanSource source = {};
  source.expert_ids = {kept.expert_ids, MOEC_I32};
  source.routing_weights = kept.routing_weights;
  const Context::Timer timer(*context_, Phase::kPlan);
  context_->backend().run(PlanArgs{&source, &plan}, stream);
}

std::string Layer::describe(const Weights& weights, int64_t num_tokens) const {
  const std::string experts = experts_->describe(weights, num_tokens);
  const std::string ep = parted_ ? ", \"ep\": " + parted_->ep().describe() : "";
  return "{\"num_tokens\": " + std::to_string(num_tokens) + bytes_members(sizes_, num_tokens) +
         ", \"plan_rows\": " + std::to_string(plan_max_rows(plan_desc_, num_tokens)) +
         ", \"experts\": " + experts + ep + "}";
}

}  // namespace moec
