// SPDX-License-Identifier: Apache-2.0
// Expert weights.
#include "layer/weights.h"

#include "boundary.h"

using namespace moec;
using namespace moec::capi;

namespace {

// A set with the structs of its matrices, which go to `quants`.
moec_weight_set read_set(const moec_weight_set* set, const char* name, moec_quant (&quants)[4]) {
  moec_weight_set own = read_sized(set, name, 2);
  moec_quant* next = quants;
  for (moec_matrix* matrix : {&own.gate_up, &own.gate, &own.up, &own.down})
    matrix->quant = read_optional(matrix->quant, *next++, "set.quant", 2);
  return own;
}

}  // namespace

moec_status moec_weights_create(const moec_context* context, const moec_weights_desc* desc,
                                moec_weights** out) {
  return guard(__func__, [&] {
    const Context& c = self<Context>(context, "context");
    moec_weights*& result = required(out, "out", 3);
    result = to_handle<moec_weights>(new Weights(c, read_sized(desc, "desc", 2)));
  });
}

void moec_weights_free(moec_weights* weights) {
  free_handle<Weights>(weights);
}

moec_status moec_weights_bind(moec_weights* weights, const moec_weight_set* set) {
  return guard(__func__, [&] {
    moec_quant quants[4];
    self<Weights>(weights, "weights").bind(read_set(set, "set", quants));
  });
}

moec_status moec_weights_query(const moec_weights* weights, moec_weights_info* out) {
  return guard(__func__, [&] {
    const Weights& w = self<Weights>(weights, "weights");
    Out<moec_weights_info> info(out, "out", 2);
    w.query(*info);
    info.commit();
  });
}

moec_status moec_weights_pack(moec_weights* weights, const moec_buffer* memory,
                              moec_stream stream) {
  return guard(__func__, [&] { self<Weights>(weights, "weights").pack(memory, stream); });
}

moec_status moec_weights_refresh(moec_weights* weights, int32_t first, int32_t count,
                                 moec_stream stream) {
  return guard(__func__, [&] { self<Weights>(weights, "weights").refresh(first, count, stream); });
}

moec_status moec_weights_dequantise(const moec_weights* weights, uint32_t matrix, int32_t expert,
                                    const moec_tensor* to, moec_stream stream) {
  return guard(__func__, [&] {
    self<Weights>(weights, "weights").dequantise(matrix, expert, required(to, "to", 4), stream);
  });
}

moec_status moec_weights_release_source(moec_weights* weights) {
  return guard(__func__, [&] { self<Weights>(weights, "weights").release_source(); });
}

moec_status moec_weights_unpack(const moec_weights* weights, const moec_weight_set* to,
                                moec_stream stream) {
  return guard(__func__, [&] {
    moec_quant quants[4];
    self<Weights>(weights, "weights").unpack(read_set(to, "to", quants), stream);
  });
}

moec_status moec_weights_save_sync(const moec_weights* weights, const char* path) {
  return guard(__func__, [&] { self<Weights>(weights, "weights").save_sync(path); });
}

moec_status moec_weights_map_sync(moec_weights* weights, const char* path) {
  return guard(__func__, [&] { self<Weights>(weights, "weights").map_sync(path); });
}
