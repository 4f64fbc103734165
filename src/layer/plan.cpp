// SPDX-License-Identifier: Apache-2.0
#include "layer/plan.h"

#include <algorithm>
#include <cassert>

#include "core/dtype.h"

namespace moec {
namespace {

using ll = long long;

// Shape, type and address of one field of a built plan.
struct Field {
  const void* data;
  moec_dtype dtype;
  int32_t ndim;
  int64_t shape[2];
};

Field field_of(const PlanView& plan, int32_t field) {
  check_range("field", field, 0, kPlanFields - 1);
  const PlanArray& array = plan_array(field);
  MOEC_REQUIRE(array.is_of(plan.kind), MOEC_E_INVALID_ARG, "field is %d, which only %s plans have",
               field, array.only == MOEC_PLAN_TOPK ? "TOPK" : "EXPERT_CHOICE");
  const PlanExtent extent = array.extent(plan, {plan.max_rows, 0});
  if (extent.is_matrix)
    return {array.data(plan), array.dtype(), 2, {plan.num_tokens, extent.per_token}};
  return {array.data(plan), array.dtype(), 1, {array.elements(plan)}};
}

int64_t numel(const Field& field) {
  return field.ndim == 1 ? field.shape[0] : field.shape[0] * field.shape[1];
}

}  // namespace

uint64_t Plan::memory_bytes(const moec_plan_desc& checked) {
  Arena arena;
  lay_out_plan(checked, false, arena);
  take_plan_scratch(checked, arena);
  return checked_bytes("memory of the plan", arena.size(), checked.max_tokens);
}

Plan::Plan(const Context& context, const moec_plan_desc& desc, const moec_buffer* memory)
    : Object(kKind),
      context_(context),
      desc_(checked_plan_desc(desc)),
      bytes_(memory_bytes(desc_)) {
  if (memory) check_buffer(context, "memory", *memory, bytes_);
  memory_ = memory ? memory->ptr : context.allocate(bytes_, nullptr);
  owned_ = !memory;
}

Plan::~Plan() {
  if (owned_) context_->deallocate(memory_, bytes_, nullptr);
}

const PlanView& Plan::view() const {
  MOEC_REQUIRE(built_, MOEC_E_INVALID_STATE,
               "plan is not built; call a moec_plan_from function before");
  return view_;
}

PlanView Plan::view_for(int64_t num_tokens) const {
  MOEC_REQUIRE(num_tokens <= desc_.max_tokens, MOEC_E_SHAPE,
               "the batch has %lld tokens; the plan's max_tokens is %lld", ll(num_tokens),
               ll(desc_.max_tokens));
  // Bytes may start anywhere. Each array has a byte or more to spare for this (core/workspace.h).
  const uintptr_t memory = reinterpret_cast<uintptr_t>(memory_);
  const uint64_t skipped = round_up(memory, sizeof(int32_t)) - memory;
  Arena arena(static_cast<char*>(memory_) + skipped, desc_.max_tokens);
  PlanView plan = lay_out_plan(desc_, false, arena);
  plan.scratch = take_plan_scratch(desc_, arena);
  assert(skipped + arena.used() <= bytes_);
  set_plan_tokens(desc_, num_tokens, plan);
  return plan;
}

void Plan::require_kind(uint32_t kind, const char* instead) const {
  MOEC_REQUIRE(desc_.kind == kind, MOEC_E_MISMATCH, "plan has kind %u; expected %u, or call %s",
               desc_.kind, kind, instead);
}

void Plan::adopt(const PlanView& plan) {
  assert(!context_->on_host() || plan_holds(plan));
  view_ = plan;
  view_.scratch = nullptr;
  built_ = true;
}

void Plan::build(const PlanSource& source, const PlanView& plan, moec_stream stream) {
  const Context::Timer timer(*context_, Phase::kPlan);
  built_ = false;
  context_->backend().run(PlanArgs{&source, &plan}, stream);
  adopt(plan);
}

void Plan::from_topk(const moec_tensor& ids, const moec_tensor* routing_weights,
                     moec_stream stream) {
  require_kind(MOEC_PLAN_TOPK, "moec_plan_from_scores");
  TensorCheck check(*context_);
  const int64_t T = check.tokens("expert_ids", ids), K = desc_.top_k;
  const PlanView plan = view_for(T);
  PlanSource source = {};
  source.expert_ids = check.in("expert_ids", ids, {T, K}, kId);
  source.routing_weights = static_cast<const float*>(
      check
          .optional_in("routing_weights", routing_weights ? *routing_weights : moec_tensor{},
                       {T, K}, kFloat)
          .data);
  source.check = context_->checks_inputs();
  check.memory_out("plan", memory_, bytes_);
  check.finish();
  build(source, plan, stream);
}

void Plan::from_logits(const Router& router, const moec_route_args& args, moec_stream stream) {
  require_kind(MOEC_PLAN_TOPK, "moec_plan_from_scores");
  const moec_router_desc& r = router.desc();
  MOEC_REQUIRE(r.num_experts == desc_.num_experts && r.num_zero_experts == desc_.num_zero_experts &&
                   r.top_k == desc_.top_k,
               MOEC_E_MISMATCH, "router has E, Z, K = %d, %d, %d; the plan has %d, %d, %d",
               r.num_experts, r.num_zero_experts, r.top_k, desc_.num_experts,
               desc_.num_zero_experts, desc_.top_k);
  check_same_device("router", router.context(), *context_);
  check_flags("args.flags", args.flags, 0);
  TensorCheck check(*context_);
  const int64_t T = check.tokens("logits", args.logits), N = router.num_ids(), K = desc_.top_k;
  const PlanView plan = view_for(T);
  RouteArgs route = {};
  route.logits = check.in("logits", args.logits, {T, N}, kReal);
  router.check_route_inputs(args, T, check, route);
  const Array ids = check.optional_out("expert_ids", args.expert_ids, {T, K}, kInt);
  const Array weights = check.optional_out("routing_weights", args.routing_weights, {T, K}, kFloat);
  route.scores =
      static_cast<float*>(check.optional_out("scores", args.scores, {T, N}, kFloat).data);
  route.counts = check.optional_out("counts", args.counts, {N}, kId);
  check.memory_out("plan", memory_, bytes_);
  check.finish();
  route.expert_ids = plan.expert_ids;
  route.routing_weights = plan.routing_weights;
  // By this context, whose threads route: the router's may have fewer.
  const moec_size scratch = context_->backend().router_scratch(r, 0);
  const uint64_t bytes_of_route = checked_bytes("scratch", scratch, T);
  const Workspace workspace(*context_, {}, 0, stream, bytes_of_route);  // before the first output
  built_ = false;
  const Backend& backend = context_->backend();
  {
    const Context::Timer timer(*context_, Phase::kRoute);
    const ScratchScope scope(*context_, workspace.extra(), bytes_of_route);
    backend.run(route, stream);
  }
  const uint64_t bytes = uint64_t(T * K) * 4;
  if (ids) backend.copy(ids.data, plan.expert_ids, bytes, stream);
  if (weights) backend.copy(weights.data, plan.routing_weights, bytes, stream);
  PlanSource source = {};
  source.expert_ids = {plan.expert_ids, MOEC_I32};
  source.routing_weights = plan.routing_weights;
  build(source, plan, stream);
}

void Plan::from_map(const moec_tensor& map, const moec_tensor* probs, moec_stream stream) {
  require_kind(MOEC_PLAN_TOPK, "moec_plan_from_scores");
  TensorCheck check(*context_);
  const int64_t T = check.tokens("routing_map", map), E = desc_.num_experts;
  const PlanView plan = view_for(T);
  PlanSource source = {};
  source.routing_map = check.in("routing_map", map, {T, E}, {MOEC_U8, MOEC_BOOL, MOEC_I32});
  source.probs = static_cast<const float*>(
      check.optional_in("probs", probs ? *probs : moec_tensor{}, {T, E}, kFloat).data);
  source.check = context_->checks_inputs();
  check.memory_out("plan", memory_, bytes_);
  check.finish();
  build(source, plan, stream);
}

// E_MISMATCH, E_SHAPE: no such rule for this plan.
IdRule Plan::checked_rule(uint32_t rule, int64_t num_tokens) const {
  check_enum("rule", rule, MOEC_PLAN_EQUAL_COUNTS);
  check_at_least("num_tokens", num_tokens, 0);
  if (rule == MOEC_PLAN_ROUND_ROBIN) {
    MOEC_REQUIRE(desc_.top_k <= desc_.num_experts, MOEC_E_MISMATCH,
                 "plan has top_k %d; ROUND_ROBIN takes at most its num_experts, %d", desc_.top_k,
                 desc_.num_experts);
    return {1, 0, desc_.num_experts};
  }
  const int32_t local = desc_.expert_end - desc_.expert_begin;
  MOEC_REQUIRE(desc_.top_k == 1, MOEC_E_MISMATCH, "plan has top_k %d; EQUAL_COUNTS takes 1",
               desc_.top_k);
  MOEC_REQUIRE(num_tokens % local == 0, MOEC_E_SHAPE,
               "num_tokens is %lld; EQUAL_COUNTS takes a multiple of the local experts, %d",
               ll(num_tokens), local);
  return {std::max<int64_t>(num_tokens / local, 1), desc_.expert_begin, local};
}

void Plan::from_rule(uint32_t rule, int64_t num_tokens, const moec_tensor* routing_weights,
                     moec_stream stream) {
  require_kind(MOEC_PLAN_TOPK, "moec_plan_from_scores");
  PlanSource source = {};
  source.rule = checked_rule(rule, num_tokens);
  const PlanView plan = view_for(num_tokens);
  TensorCheck check(*context_);
  source.routing_weights = static_cast<const float*>(
      check
          .optional_in("routing_weights", routing_weights ? *routing_weights : moec_tensor{},
                       {num_tokens, desc_.top_k}, kFloat)
          .data);
  check.memory_out("plan", memory_, bytes_);
  check.finish();
  build(source, plan, stream);
}

void Plan::from_scores(const moec_tensor& scores, const moec_tensor* token_mask,
                       moec_stream stream) {
  require_kind(MOEC_PLAN_EXPERT_CHOICE, "moec_plan_from_topk");
  TensorCheck check(*context_);
  const int64_t T = check.tokens("scores", scores), E = desc_.num_experts;
  const PlanView plan = view_for(T);
  PlanSource source = {};
  source.scores = static_cast<const float*>(check.in("scores", scores, {T, E}, kFloat).data);
  source.token_mask = static_cast<const uint8_t*>(
      check.optional_in("token_mask", token_mask ? *token_mask : moec_tensor{}, {T}, kMask).data);
  check.memory_out("plan", memory_, bytes_);
  check.finish();
  build(source, plan, stream);
}

void Plan::attach(int64_t num_tokens) {
  check_at_least("num_tokens", num_tokens, 0);
  const PlanView plan = view_for(num_tokens);
  MOEC_REQUIRE(!context_->on_host() || plan_holds(plan), MOEC_E_CORRUPT,
               "the memory holds no plan of %lld tokens; expected one written by an equal desc",
               ll(num_tokens));
  adopt(plan);
}

moec_tensor Plan::field(int32_t id) const {
  const Field field = field_of(view(), id);
  MOEC_REQUIRE(field.data, MOEC_E_INVALID_ARG,
               "field is %d, which can only be exported; expected 0 to 10", id);
  moec_tensor out = {};
  out.data = const_cast<void*>(field.data);
  out.device_type = context_->device_type();
  out.device_id = context_->device_id();
  out.dtype = field.dtype;
  out.ndim = field.ndim;
  for (int32_t i = 0; i < field.ndim; ++i) out.shape[i] = field.shape[i];
  for (int64_t i = field.ndim - 1, step = 1; i >= 0; step *= field.shape[i--])
    out.strides[i] = step;
  return out;
}

void Plan::export_field(int32_t id, const moec_tensor& dst, moec_stream stream) const {
  const PlanView& plan = view();
  const Field field = field_of(plan, id);
  const bool wide = dst.dtype == MOEC_I64 && field.dtype == MOEC_I32;
  TensorCheck check(*context_);
  const moec_dtype dtype = wide ? moec_dtype(MOEC_I64) : field.dtype;
  const Array to = field.ndim == 1
                       ? check.out("dst", dst, {field.shape[0]}, {dtype})
                       : check.out("dst", dst, {field.shape[0], field.shape[1]}, {dtype});
  check_memory(check);
  check.finish();
  MOEC_REQUIRE(!wide || context_->on_host(), MOEC_E_UNSUPPORTED,
               "dst has dtype i64; on this device expected i32");
  const Backend& backend = context_->backend();
  const uint64_t bytes = uint64_t(numel(field)) * 4;
  const Workspace narrow(*context_, {}, 0, stream, wide && !field.data ? bytes : 0);
  void* const direct = wide ? narrow.extra() : to.data;
  if (!field.data)
    backend.run(MapArgs{&plan, id, static_cast<int32_t*>(direct)}, stream);
  else if (!wide)
    backend.copy(direct, field.data, bytes, stream);
  if (!wide) return;
  const auto* const from = static_cast<const int32_t*>(field.data ? field.data : direct);
  for (int64_t i = 0; i < numel(field); ++i) static_cast<int64_t*>(to.data)[i] = from[i];
}

void Plan::check_copy(const char* name, const void* to, uint64_t bytes) const {
  TensorCheck check(*context_);
  check.memory_out(name, to, bytes);
  check_memory(check);
  check.finish();
}

void Plan::totals_sync(int32_t totals[4], moec_stream stream) const {
  const PlanView& plan = view();
  check_copy("totals", totals, 4 * sizeof(int32_t));
  context_->synchronize(stream);
  context_->backend().copy_to_host(totals, plan.totals, 4 * sizeof(int32_t), stream);
}

}  // namespace moec
