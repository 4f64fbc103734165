// SPDX-License-Identifier: Apache-2.0
#include "layer/buffers.h"

#include "core/dtype.h"
#include "layer/check.h"
#include "layer/context.h"

namespace moec {
namespace {

using ull = unsigned long long;

struct Memory {
  void* data;
  uint64_t bytes;
};

Memory memory_of(const char* name, const moec_tensor& tensor) {
  MOEC_REQUIRE(!is_absent(tensor), MOEC_E_INVALID_ARG, "%s is absent; it is required", name);
  check_tensor(name, tensor);
  return {static_cast<char*>(tensor.data) + tensor.byte_offset,
          uint64_t(tensor_numel(tensor) * dtype_bytes(tensor.dtype))};
}

// Memory that the driver can only copy while the caller waits.
bool is_pageable(const Context& context, const moec_tensor& tensor) {
  return !context.on_host() && tensor.device_type == MOEC_CPU;
}

}  // namespace

Buffers::~Buffers() {
  for (const auto& [data, bytes] : blocks_)
    context_.deallocate(const_cast<void*>(data), bytes, nullptr);
}

moec_buffer Buffers::allocate(uint64_t bytes) {
  if (!bytes) return {};
  Block block(context_, bytes, nullptr);
  const std::lock_guard lock(mutex_);
  blocks_.emplace(block.data(), bytes);
  return {block.release(), bytes};
}

void Buffers::release(const moec_buffer& buffer) {
  if (!buffer.ptr && !buffer.bytes) return;
  {
    const std::lock_guard lock(mutex_);
    const auto found = blocks_.find(buffer.ptr);
    MOEC_REQUIRE(found != blocks_.end(), MOEC_E_INVALID_ARG,
                 "buffer.ptr is %p; expected a buffer of moec_buffer_alloc on this context",
                 buffer.ptr);
    MOEC_REQUIRE(found->second == buffer.bytes, MOEC_E_INVALID_ARG,
                 "buffer.bytes is %llu; %llu were allocated", ull(buffer.bytes),
                 ull(found->second));
    blocks_.erase(found);
  }
  context_.deallocate(buffer.ptr, buffer.bytes, nullptr);
}

void copy_tensor(const Context& context, const moec_tensor& source, const moec_tensor& target,
                 moec_stream stream) {
  const Memory from = memory_of("source", source), to = memory_of("target", target);
  const bool waits = is_pageable(context, target), reads = is_pageable(context, source);
  if (!reads) check_device("source", source, context);
  if (!waits) check_device("target", target, context);
  check_alike("target", target, "source", source);
  TensorCheck check(context);
  check.memory_in("source", from.data, from.bytes);
  check.memory_out("target", to.data, to.bytes);
  check.finish();
  if (!from.bytes) return;
  MOEC_REQUIRE(!(waits || reads) || !context.backend().capturing(stream), MOEC_E_WOULD_SYNC,
               "the stream is being captured and %s is pageable host memory; use pinned memory, "
               "or copy before or after the capture",
               reads ? "source" : "target");
  if (waits) {
    context.count_sync();
    context.backend().copy_to_host(to.data, from.data, from.bytes, stream);
  } else {
    context.backend().copy(to.data, from.data, from.bytes, stream);
  }
}

void zero_tensor(const Context& context, const moec_tensor& tensor, moec_stream stream) {
  const Memory memory = memory_of("tensor", tensor);
  check_device("tensor", tensor, context);
  if (memory.bytes) context.backend().zero(memory.data, memory.bytes, stream);
}

}  // namespace moec
