// SPDX-License-Identifier: Apache-2.0
// The functions that the fuzzer passes to the library, by the names of their fields.
#pragma once

#include <moec/moec.h>

#include <cstdlib>
#include <cstring>
#include <string>

namespace moec_fuzz {

inline void* hook_alloc(void*, size_t bytes, size_t align, int32_t, int32_t, moec_stream) {
  void* out = nullptr;
  const size_t at_least = align < sizeof(void*) ? sizeof(void*) : align;
  return bytes < (1u << 28) && posix_memalign(&out, at_least, bytes) == 0 ? out : nullptr;
}
inline void hook_release(void*, void* pointer, size_t, int32_t, int32_t, moec_stream) {
  std::free(pointer);
}
inline int32_t hook_parallel(void*, int64_t n, void (*body)(void*, int64_t), void* arg) {
  for (int64_t i = n; i-- > 0;) body(arg, i);
  return 0;
}
// Of a communicator of one rank.
inline int32_t hook_exchange(void*, const void* send, void* recv, uint64_t bytes, moec_stream) {
  if (bytes > 0) std::memcpy(recv, send, bytes);
  return 0;
}
inline int32_t hook_exchange_v(void*, const void* send, const uint64_t* send_bytes,
                               const uint64_t* send_at, void* recv, const uint64_t*,
                               const uint64_t* recv_at, uint64_t, moec_stream) {
  if (send_bytes[0] == 0) return 0;
  std::memcpy(static_cast<char*>(recv) + recv_at[0], static_cast<const char*>(send) + send_at[0],
              send_bytes[0]);
  return 0;
}
inline int32_t hook_poll(void*) {
  return 0;
}
inline void hook_comm_release(void*) {}
inline void* hook_named(const std::string& field) {
  if (field == "comm all_gather" || field == "comm all_to_all")
    return reinterpret_cast<void*>(&hook_exchange);
  if (field == "comm all_to_all_v") return reinterpret_cast<void*>(&hook_exchange_v);
  if (field == "comm poll") return reinterpret_cast<void*>(&hook_poll);
  if (field == "comm abort") return reinterpret_cast<void*>(&hook_poll);
  if (field == "comm release") return reinterpret_cast<void*>(&hook_comm_release);
  if (field == "alloc") return reinterpret_cast<void*>(&hook_alloc);
  if (field == "release") return reinterpret_cast<void*>(&hook_release);
  return reinterpret_cast<void*>(&hook_parallel);
}

}  // namespace moec_fuzz
