// SPDX-License-Identifier: Apache-2.0
// Routers.
#include "layer/router.h"

#include "boundary.h"

using namespace moec;
using namespace moec::capi;

moec_status moec_router_create(const moec_context* context, const moec_router_desc* desc,
                               moec_router** out) {
  return guard(__func__, [&] {
    const Context& c = self<Context>(context, "context");
    moec_router*& result = required(out, "out", 3);
    result = to_handle<moec_router>(new Router(c, read_sized(desc, "desc", 2)));
  });
}

void moec_router_free(moec_router* router) {
  free_handle<Router>(router);
}

moec_status moec_gate_forward(const moec_router* router, const moec_gate_args* args,
                              moec_stream stream) {
  return guard(__func__, [&] {
    self<Router>(router, "router").gate_forward(read_sized(args, "args", 2), stream);
  });
}

moec_status moec_gate_backward(const moec_router* router, const moec_gate_grad_args* args,
                               moec_stream stream) {
  return guard(__func__, [&] {
    self<Router>(router, "router").gate_backward(read_sized(args, "args", 2), stream);
  });
}

moec_status moec_route_forward(const moec_router* router, const moec_route_args* args,
                               moec_stream stream) {
  return guard(__func__, [&] {
    self<Router>(router, "router").route_forward(read_sized(args, "args", 2), stream);
  });
}

moec_status moec_route_backward(const moec_router* router, const moec_route_grad_args* args,
                                moec_stream stream) {
  return guard(__func__, [&] {
    self<Router>(router, "router").route_backward(read_sized(args, "args", 2), stream);
  });
}

moec_status moec_router_bias_update(const moec_router* router, const moec_tensor* counts,
                                    float rate, const moec_tensor* bias, moec_stream stream) {
  return guard(__func__, [&] {
    const Router& r = self<Router>(router, "router");
    r.bias_update(required(counts, "counts", 2), rate, required(bias, "bias", 4), stream);
  });
}
