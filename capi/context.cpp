// SPDX-License-Identifier: Apache-2.0
// Backends, devices, contexts.
#include "layer/context.h"

#include "boundary.h"
#include "layer/devices.h"
#include "text_out.h"

using namespace moec;
using namespace moec::capi;

moec_status moec_backend_load(const char* path) {
  return guard(__func__, [&] { load_backend(&required(path, "path", 1)); });
}

moec_status moec_device_count(int32_t device_type, int32_t* count) {
  return guard(__func__, [&] { required(count, "count", 2) = device_count(device_type); });
}

moec_status moec_backend_describe(int32_t device_type, char* buffer, uint64_t bytes,
                                  uint64_t* need) {
  return guard(__func__, [&] {
    uint64_t& to = required(need, "need", 4);
    std::string text = describe_backend(device_type);
    make_printable(text.data());
    write_text(text, buffer, bytes, to);
  });
}

moec_status moec_device_query(int32_t device_type, int32_t device_id, moec_device_info* out) {
  return guard(__func__, [&] {
    Out<moec_device_info> info(out, "out", 3);
    query_device(device_type, device_id, *info);
    info.commit();
  });
}

moec_status moec_context_create(const moec_context_desc* desc, moec_context** out) {
  return guard(__func__, [&] {
    moec_context*& result = required(out, "out", 2);
    moec_context_desc own = {};
    moec_allocator allocator;
    moec_thread_pool pool;
    read_optional(desc, own, "desc", 1);
    own.allocator = read_optional(own.allocator, allocator, "desc.allocator", 1);
    own.pool = read_optional(own.pool, pool, "desc.pool", 1);
    result = to_handle<moec_context>(new Context(own));
  });
}

void moec_context_free(moec_context* context) {
  free_handle<Context>(context);
}

moec_status moec_context_device(const moec_context* context, moec_device_info* out) {
  return guard(__func__, [&] {
    const Context& c = object<Context>(context, "context", 1);
    Out<moec_device_info> info(out, "out", 2);
    c.backend().device_info(*info);
    info->device_id = c.device_id();
    info.commit();
  });
}

moec_status moec_context_reserve(const moec_context* context, uint64_t bytes, moec_stream stream) {
  return guard(__func__, [&] { self<Context>(context, "context").reserve(bytes, stream); });
}

moec_status moec_context_trim(const moec_context* context) {
  return guard(__func__, [&] { self<Context>(context, "context").trim(); });
}

moec_status moec_context_poll(const moec_context* context, moec_status* deferred) {
  return guard(__func__, [&] {
    required(deferred, "deferred", 2) = object<Context>(context, "context", 1).poll();
  });
}

moec_status moec_context_sync(const moec_context* context, moec_stream stream) {
  return guard(__func__, [&] { self<Context>(context, "context").synchronize(stream); });
}

moec_status moec_context_stats(const moec_context* context, moec_stats* out) {
  return guard(__func__, [&] {
    const Context& c = object<Context>(context, "context", 1);
    Out<moec_stats> stats(out, "out", 2);
    c.stats(*stats);
    stats.commit();
  });
}

moec_status moec_context_stats_reset(const moec_context* context) {
  return guard(__func__, [&] { object<Context>(context, "context", 1).reset_stats(); });
}
