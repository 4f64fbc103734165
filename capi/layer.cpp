// SPDX-License-Identifier: Apache-2.0
// Whole layers.
#include "layer/layer.h"

#include "boundary.h"
#include "text_out.h"

using namespace moec;
using namespace moec::capi;

namespace {

LayerWeights weights_of(const moec_layer_args& args) {
  return {object<Weights>(args.weights, "args.weights", 2),
          optional_object<Weights>(args.shared_weights, "args.shared_weights", 2),
          optional_object<Adapters>(args.adapters, "args.adapters", 2)};
}

}  // namespace

moec_status moec_layer_create(const moec_context* context, const moec_layer_desc* desc,
                              moec_layer** out) {
  return guard(__func__, [&] {
    const Context& c = self<Context>(context, "context");
    moec_layer*& result = required(out, "out", 3);
    const moec_layer_desc own = read_sized(desc, "desc", 2);
    const moec_router_desc router = read_sized(own.router, "desc.router", 2);
    const moec_experts_desc experts = read_sized(own.experts, "desc.experts", 2);
    result = to_handle<moec_layer>(
        new Layer(c, own, router, experts, own.ep ? &object<Ep>(own.ep, "desc.ep", 2) : nullptr));
  });
}

void moec_layer_free(moec_layer* layer) {
  free_handle<Layer>(layer);
}

moec_status moec_layer_query(const moec_layer* layer, moec_experts_sizes* out) {
  return guard(__func__, [&] { write_sizes(self<Layer>(layer, "layer").sizes(), out, 2); });
}

moec_status moec_layer_query_adapters(const moec_layer* layer, const moec_adapters* adapters,
                                      moec_experts_sizes* out) {
  return guard(__func__, [&] {
    const Layer& l = self<Layer>(layer, "layer");
    write_sizes(l.sizes(&object<Adapters>(adapters, "adapters", 2)), out, 3);
  });
}

moec_status moec_layer_forward(const moec_layer* layer, const moec_layer_args* args,
                               moec_stream stream) {
  return guard(__func__, [&] {
    const Layer& l = self<Layer>(layer, "layer");
    l.attend([&] {
      const moec_layer_args own = read_sized(args, "args", 2);
      l.forward(own, weights_of(own), stream);
    });
  });
}

moec_status moec_layer_backward(const moec_layer* layer, const moec_layer_grad_args* args,
                                moec_stream stream) {
  return guard(__func__, [&] {
    const Layer& l = self<Layer>(layer, "layer");
    l.attend([&] {
      const moec_layer_grad_args own = read_sized(args, "args", 2);
      const moec_layer_args forward = read_sized(own.forward, "args.forward", 2);
      moec_weight_set d_experts, d_shared;
      l.backward(own, forward, weights_of(forward),
                 read_optional(own.d_expert_weights, d_experts, "args.d_expert_weights", 2),
                 read_optional(own.d_shared_weights, d_shared, "args.d_shared_weights", 2), stream);
    });
  });
}

moec_status moec_layer_describe(const moec_layer* layer, const moec_weights* weights,
                                int64_t num_tokens, char* buffer, uint64_t bytes, uint64_t* need) {
  return guard(__func__, [&] {
    const Layer& l = self<Layer>(layer, "layer");
    const Weights& w = object<Weights>(weights, "weights", 2);
    uint64_t& to = required(need, "need", 6);
    write_text(l.describe(w, num_tokens), buffer, bytes, to);
  });
}
