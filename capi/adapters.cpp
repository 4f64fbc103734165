// SPDX-License-Identifier: Apache-2.0
// Adapters.
#include "layer/adapters.h"

#include "boundary.h"

using namespace moec;
using namespace moec::capi;

moec_status moec_adapters_create(const moec_context* context, const moec_adapters_desc* desc,
                                 moec_adapters** out) {
  return guard(__func__, [&] {
    const Context& c = self<Context>(context, "context");
    moec_adapters*& result = required(out, "out", 3);
    result = to_handle<moec_adapters>(new Adapters(c, read_sized(desc, "desc", 2)));
  });
}

void moec_adapters_free(moec_adapters* adapters) {
  free_handle<Adapters>(adapters);
}

moec_status moec_adapters_bind(moec_adapters* adapters, const moec_adapter* list, int32_t count) {
  return guard(__func__, [&] {
    self<Adapters>(adapters, "adapters").bind(&required(list, "list", 2), count);
  });
}

moec_status moec_adapters_merge(const moec_adapters* adapters, moec_weights* weights,
                                moec_stream stream) {
  return guard(__func__, [&] {
    self<Adapters>(adapters, "adapters").merge(object<Weights>(weights, "weights", 2), 1, stream);
  });
}

moec_status moec_adapters_unmerge(const moec_adapters* adapters, moec_weights* weights,
                                  moec_stream stream) {
  return guard(__func__, [&] {
    self<Adapters>(adapters, "adapters").merge(object<Weights>(weights, "weights", 2), -1, stream);
  });
}
