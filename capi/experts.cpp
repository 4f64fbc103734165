// SPDX-License-Identifier: Apache-2.0
// Experts.
#include "layer/experts.h"

#include "boundary.h"
#include "text_out.h"

using namespace moec;
using namespace moec::capi;

moec_status moec_experts_create(const moec_context* context, const moec_experts_desc* desc,
                                moec_experts** out) {
  return guard(__func__, [&] {
    const Context& c = self<Context>(context, "context");
    moec_experts*& result = required(out, "out", 3);
    result = to_handle<moec_experts>(new Experts(c, read_sized(desc, "desc", 2)));
  });
}

void moec_experts_free(moec_experts* experts) {
  free_handle<Experts>(experts);
}

moec_status moec_experts_query(const moec_experts* experts, moec_experts_sizes* out) {
  return guard(__func__, [&] { write_sizes(self<Experts>(experts, "experts").sizes(), out, 2); });
}

moec_status moec_experts_query_adapters(const moec_experts* experts, const moec_adapters* adapters,
                                        moec_experts_sizes* out) {
  return guard(__func__, [&] {
    const Experts& e = self<Experts>(experts, "experts");
    write_sizes(e.sizes(&object<Adapters>(adapters, "adapters", 2)), out, 3);
  });
}

moec_status moec_experts_forward(const moec_experts* experts, const moec_experts_args* args,
                                 moec_stream stream) {
  return guard(__func__, [&] {
    const Experts& e = self<Experts>(experts, "experts");
    const moec_experts_args own = read_sized(args, "args", 2);
    e.forward(own, object<Plan>(own.plan, "args.plan", 2),
              object<Weights>(own.weights, "args.weights", 2),
              optional_object<Weights>(own.shared_weights, "args.shared_weights", 2),
              optional_object<Adapters>(own.adapters, "args.adapters", 2), stream);
  });
}

moec_status moec_experts_backward(const moec_experts* experts, const moec_experts_grad_args* args,
                                  moec_stream stream) {
  return guard(__func__, [&] {
    const Experts& e = self<Experts>(experts, "experts");
    const moec_experts_grad_args own = read_sized(args, "args", 2);
    moec_weight_set d_experts, d_shared;
    e.backward(own, object<Plan>(own.plan, "args.plan", 2),
               object<Weights>(own.weights, "args.weights", 2),
               optional_object<Weights>(own.shared_weights, "args.shared_weights", 2),
               optional_object<Adapters>(own.adapters, "args.adapters", 2),
               read_optional(own.d_expert_weights, d_experts, "args.d_expert_weights", 2),
               read_optional(own.d_shared_weights, d_shared, "args.d_shared_weights", 2), stream);
  });
}

moec_status moec_experts_describe(const moec_experts* experts, const moec_weights* weights,
                                  int64_t num_tokens, char* buffer, uint64_t bytes,
                                  uint64_t* need) {
  return guard(__func__, [&] {
    const Experts& e = self<Experts>(experts, "experts");
    const Weights& w = object<Weights>(weights, "weights", 2);
    uint64_t& to = required(need, "need", 6);
    write_text(e.describe(w, num_tokens), buffer, bytes, to);
  });
}
