// SPDX-License-Identifier: Apache-2.0
// Plans.
#include "layer/plan.h"

#include "boundary.h"

using namespace moec;
using namespace moec::capi;

moec_status moec_plan_size(const moec_plan_desc* desc, uint64_t* bytes, int64_t* max_rows) {
  return guard(__func__, [&] {
    const moec_plan_desc own = checked_plan_desc(read_sized(desc, "desc", 1));
    uint64_t& to_bytes = required(bytes, "bytes", 2);
    int64_t& to_rows = required(max_rows, "max_rows", 3);
    to_bytes = Plan::memory_bytes(own);
    to_rows = plan_max_rows(own, own.max_tokens);
  });
}

moec_status moec_plan_create(const moec_context* context, const moec_plan_desc* desc,
                             const moec_buffer* memory, moec_plan** out) {
  return guard(__func__, [&] {
    const Context& c = self<Context>(context, "context");
    moec_plan*& result = required(out, "out", 4);
    result = to_handle<moec_plan>(new Plan(c, read_sized(desc, "desc", 2), memory));
  });
}

void moec_plan_free(moec_plan* plan) {
  free_handle<Plan>(plan);
}

moec_status moec_plan_from_topk(moec_plan* plan, const moec_tensor* expert_ids,
                                const moec_tensor* routing_weights, moec_stream stream) {
  return guard(__func__, [&] {
    self<Plan>(plan, "plan")
        .from_topk(required(expert_ids, "expert_ids", 2), routing_weights, stream);
  });
}

moec_status moec_plan_from_logits(moec_plan* plan, const moec_router* router,
                                  const moec_route_args* args, moec_stream stream) {
  return guard(__func__, [&] {
    Plan& p = self<Plan>(plan, "plan");
    p.from_logits(object<Router>(router, "router", 2), read_sized(args, "args", 3), stream);
  });
}

moec_status moec_plan_from_map(moec_plan* plan, const moec_tensor* routing_map,
                               const moec_tensor* probs, moec_stream stream) {
  return guard(__func__, [&] {
    self<Plan>(plan, "plan").from_map(required(routing_map, "routing_map", 2), probs, stream);
  });
}

moec_status moec_plan_from_rule(moec_plan* plan, uint32_t rule, int64_t num_tokens,
                                const moec_tensor* routing_weights, moec_stream stream) {
  return guard(__func__, [&] {
    self<Plan>(plan, "plan").from_rule(rule, num_tokens, routing_weights, stream);
  });
}

moec_status moec_plan_from_scores(moec_plan* plan, const moec_tensor* scores,
                                  const moec_tensor* token_mask, moec_stream stream) {
  return guard(__func__, [&] {
    self<Plan>(plan, "plan").from_scores(required(scores, "scores", 2), token_mask, stream);
  });
}

moec_status moec_plan_attach(moec_plan* plan, int64_t num_tokens) {
  return guard(__func__, [&] { self<Plan>(plan, "plan").attach(num_tokens); });
}

moec_status moec_plan_view(const moec_plan* plan, int32_t field, moec_tensor* out) {
  return guard(__func__, [&] {
    const Plan& p = self<Plan>(plan, "plan");
    required(out, "out", 3) = p.field(field);
  });
}

moec_status moec_plan_export(const moec_plan* plan, int32_t field, const moec_tensor* dst,
                             moec_stream stream) {
  return guard(__func__, [&] {
    self<Plan>(plan, "plan").export_field(field, required(dst, "dst", 3), stream);
  });
}

moec_status moec_plan_totals_sync(const moec_plan* plan, int32_t totals[4], moec_stream stream) {
  return guard(__func__, [&] {
    self<Plan>(plan, "plan").totals_sync(&required(totals, "totals", 2), stream);
  });
}

moec_status moec_plan_save_sync(const moec_plan* plan, void* buffer, uint64_t bytes, uint64_t* need,
                                moec_stream stream) {
  return guard(__func__, [&] {
    const Plan& p = self<Plan>(plan, "plan");
    uint64_t& to = required(need, "need", 4);
    to = p.saved_bytes();
    if (!buffer) return;
    check_buffer("buffer", {buffer, bytes}, to);
    p.save_sync(buffer, stream);
  });
}

moec_status moec_plan_restore_sync(moec_plan* plan, const void* buffer, uint64_t bytes,
                                   moec_stream stream) {
  return guard(__func__, [&] {
    Plan& p = self<Plan>(plan, "plan");
    if (!buffer) fail_argument(2, MOEC_E_INVALID_ARG, "buffer is NULL; it is required");
    p.restore_sync(buffer, bytes, stream);
  });
}
