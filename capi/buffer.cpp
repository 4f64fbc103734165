// SPDX-License-Identifier: Apache-2.0
// Memory of a device that callers own, and copies to and from it.
#include "layer/buffers.h"

#include "boundary.h"

using namespace moec;
using namespace moec::capi;

moec_status moec_buffer_alloc(const moec_context* context, uint64_t bytes, moec_buffer* out) {
  return guard(__func__, [&] {
    Buffers& buffers = object<Context>(context, "context", 1).buffers();
    moec_buffer& result = required(out, "out", 3);
    result = buffers.allocate(bytes);
  });
}

moec_status moec_buffer_free(const moec_context* context, moec_buffer* buffer) {
  return guard(__func__, [&] {
    Buffers& buffers = object<Context>(context, "context", 1).buffers();
    if (!buffer) return;
    buffers.release(*buffer);
    *buffer = {};
  });
}

moec_status moec_tensor_copy(const moec_context* context, const moec_tensor* source,
                             const moec_tensor* target, moec_stream stream) {
  return guard(__func__, [&] {
    const Context& c = self<Context>(context, "context");
    const moec_tensor& from = required(source, "source", 2);
    copy_tensor(c, from, required(target, "target", 3), stream);
  });
}

moec_status moec_tensor_zero(const moec_context* context, const moec_tensor* tensor,
                             moec_stream stream) {
  return guard(__func__, [&] {
    const Context& c = self<Context>(context, "context");
    zero_tensor(c, required(tensor, "tensor", 2), stream);
  });
}
