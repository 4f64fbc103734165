// SPDX-License-Identifier: Apache-2.0
// Between C and C++: nothing is thrown past guard(), every handle is looked at before it is used,
// and structs of an older or newer application are read and written by its own size.
#pragma once

#include <moec/moec.h>

#include <cstddef>
#include <type_traits>
#include <utility>

#include "core/error.h"
#include "core/float_mode.h"
#include "layer/context.h"
#include "layer/object.h"
#include "sizes.h"

namespace moec::capi {

// ---- failures
// Keeps the exception being handled as this thread's last error; returns its status.
moec_status record_failure(const char* site) noexcept;
const moec_error_info& last_error() noexcept;
// Names of files may be any bytes, and a text is cut where it ends: what is not printable UTF-8
// becomes '?'.
void make_printable(char* text) noexcept;

// Runs `body`; what it throws becomes a status. `site` is the entry point.
template <class Body>
moec_status guard(const char* site, Body&& body) noexcept {
  try {
    const FloatMode mode;
    body();
    return MOEC_OK;
  } catch (...) {
    return record_failure(site);
  }
}

[[noreturn]] MOEC_PRINTF(3) void fail_argument(int32_t index, moec_status code, const char* format,
                                               ...);

// ---- handles
template <class Handle, class T>
Handle* to_handle(T* object) {
  return reinterpret_cast<Handle*>(static_cast<Object*>(object));
}

void check_handle(const Object* object, Kind kind, const char* name, int32_t index);

// The object behind a handle that must be there: E_INVALID_ARG, E_FORKED.
template <class T, class Handle>
auto& object(Handle* handle, const char* name, int32_t index) {
  using Base = std::conditional_t<std::is_const_v<Handle>, const Object, Object>;
  using Result = std::conditional_t<std::is_const_v<Handle>, const T, T>;
  Base* const base = reinterpret_cast<Base*>(handle);
  check_handle(base, T::kKind, name, index);
  return static_cast<Result&>(*base);
}
template <class T, class Handle>
const T* optional_object(const Handle* handle, const char* name, int32_t index) {
  return handle ? &object<T>(handle, name, index) : nullptr;
}
// The first argument of most calls; counts the call.
template <class T, class Handle>
auto& self(Handle* handle, const char* name) {
  auto& result = object<T>(handle, name, 1);
  if constexpr (std::is_same_v<T, Context>)
    result.count_call();
  else
    result.context().count_call();
  return result;
}

// Drops the handle's reference. NULL, a wrong kind, and objects of a parent process are left alone.
void free_object(const Object* object, Kind kind) noexcept;
template <class T, class Handle>
void free_handle(Handle* handle) noexcept {
  free_object(reinterpret_cast<const Object*>(handle), T::kKind);
}

// ---- plain pointers
template <class T>
T& required(T* pointer, const char* name, int32_t index) {
  if (!pointer) fail_argument(index, MOEC_E_INVALID_ARG, "%s is NULL; it is required", name);
  return *pointer;
}

// ---- sized structs
// The caller's struct_size: E_INVALID_ARG (NULL), E_ABI.
uint32_t checked_size(const void* from, size_t first, const char* name, int32_t index);
void read_bytes(void* to, size_t own, size_t first, const void* from, const char* name,
                int32_t index);
void write_bytes(void* to, const void* from, size_t own) noexcept;

// A copy of the caller's struct. A shorter one (an older application) ends in zeros; a longer one
// must have a zero tail; any other size is E_ABI.
template <class T>
T read_sized(const T* from, const char* name, int32_t index) {
  T to;
  read_bytes(&to, sizeof to, kFirstSize<T>, from, name, index);
  to.struct_size = sizeof to;
  return to;
}
// What `pointer` points to, or null; `storage` lives as long as the result.
template <class T>
const T* read_optional(const T* pointer, T& storage, const char* name, int32_t index) {
  if (!pointer) return nullptr;
  storage = read_sized(pointer, name, index);
  return &storage;
}

// An output struct, zeroed, that reaches the caller in commit() in the size that the caller knows.
template <class T>
class Out {
 public:
  Out(T* to, const char* name, int32_t index) : to_(to) {
    value_.struct_size = checked_size(to, kFirstSize<T>, name, index);
  }
  T* operator->() { return &value_; }
  T& operator*() { return value_; }
  void commit() const { write_bytes(to_, &value_, sizeof value_); }

 private:
  T* to_;
  T value_ = {};
};

inline void write_sizes(const moec_experts_sizes& from, moec_experts_sizes* out, int32_t index) {
  Out<moec_experts_sizes> sizes(out, "out", index);
  sizes->forward_workspace = from.forward_workspace;
  sizes->backward_workspace = from.backward_workspace;
  sizes->saved = from.saved;
  sizes.commit();
}

}  // namespace moec::capi
