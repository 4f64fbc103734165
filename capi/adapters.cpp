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

moec_status moec_adapters_merge_copy(const moec_adapters* adapters, const moec_weights* weights,
                                     uint32_t matrix, const moec_tensor* values,
                                     const moec_quantise_args* quantised, moec_stream stream) {
  return guard(__func__, [&] {
    const Adapters& own = self<Adapters>(adapters, "adapters");
    const Weights& from = object<Weights>(weights, "weights", 2);
    const moec_tensor& to = required(values, "values", 4);
    moec_quantise_args args = {};
    moec_quantise_desc desc = {};
    moec_quant quant = {};
    if (quantised) {
      args = read_sized(quantised, "quantised", 5);
      desc = read_sized(args.desc, "quantised.desc", 5);
      quant = read_sized(args.quant, "quantised.quant", 5);
      args.desc = &desc;
      args.quant = &quant;
    }
    own.merge_copy(from, matrix, to, quantised ? &args : nullptr, stream);
  });
}

moec_status moec_adapters_unmerge(const moec_adapters* adapters, moec_weights* weights,
                                  moec_stream stream) {
  return guard(__func__, [&] {
    self<Adapters>(adapters, "adapters").merge(object<Weights>(weights, "weights", 2), -1, stream);
  });
}
