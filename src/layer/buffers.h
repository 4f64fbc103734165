// SPDX-License-Identifier: Apache-2.0
// Memory of a context's device that callers own, and copies between it and the host.
#pragma once

#include <moec/moec.h>

#include <map>
#include <mutex>

namespace moec {

class Context;

// The blocks that one context has handed out. The table makes a free of anything else an error.
class Buffers {
 public:
  explicit Buffers(const Context& context) : context_(context) {}
  ~Buffers();  // gives back what its owners left
  Buffers(const Buffers&) = delete;
  Buffers& operator=(const Buffers&) = delete;

  moec_buffer allocate(uint64_t bytes);     // 0 bytes: an absent buffer
  void release(const moec_buffer& buffer);  // E_INVALID_ARG: not one of allocate()

 private:
  const Context& context_;
  std::mutex mutex_;
  std::map<const void*, uint64_t> blocks_;  // bytes by address
};

// Every element of `source` to `target`, of the same dtype and shape. Each lies on the host or on
// the context's device. A target in pageable memory makes the call wait.
void copy_tensor(const Context& context, const moec_tensor& source, const moec_tensor& target,
                 moec_stream stream);
// Every byte of a tensor on the context's device becomes 0.
void zero_tensor(const Context& context, const moec_tensor& tensor, moec_stream stream);

}  // namespace moec
