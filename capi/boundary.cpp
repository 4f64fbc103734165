// SPDX-License-Identifier: Apache-2.0
#include "boundary.h"

#include <algorithm>
#include <cstdarg>
#include <cstring>

#include "core/log.h"

namespace moec::capi {
namespace {

constexpr size_t kLargestStruct = 65536;  // bytes; anything longer is garbage

// No destructor, so that a thread may fail at any point of its life.
thread_local moec_error_info last = {};

moec_status keep(const char* site, const Error& error) noexcept {
  last = {};
  last.struct_size = sizeof last;
  last.code = error.code;
  last.native_code = error.native_code;
  last.arg_index = error.arg_index;
  std::snprintf(last.site, sizeof last.site, "%s", site);
  std::snprintf(last.message, sizeof last.message, "%s: %.430s", site, error.text);
  make_printable(last.message);
  log(MOEC_LOG_DEBUG, "%s", last.message);
  return error.code;
}

}  // namespace

void make_printable(char* text) noexcept {
  for (auto* at = reinterpret_cast<unsigned char*>(text); *at;) {
    const int more = *at < 0x80       ? 0
                     : *at >> 5 == 6  ? 1
                     : *at >> 4 == 14 ? 2
                     : *at >> 3 == 30 ? 3
                                      : -1;
    uint32_t point = more <= 0 ? *at : *at & (0x3fu >> more);
    bool holds = more >= 0;
    for (int i = 1; holds && i <= more; ++i) {
      holds = at[i] >> 6 == 2;
      point = point << 6 | (at[i] & 0x3fu);
    }
    constexpr uint32_t kLeast[] = {0x20, 0xa0, 0x800, 0x10000};  // of so many bytes more
    holds = holds && point >= kLeast[more] && point != 0x7f && point <= 0x10ffff &&
            point >> 11 != 0xd800 >> 11;
    if (!holds) *at = '?';
    at += holds ? 1 + more : 1;
  }
}

const moec_error_info& last_error() noexcept {
  return last;
}

moec_status record_failure(const char* site) noexcept {
  return keep(site, current_error());
}

void fail_argument(int32_t index, moec_status code, const char* format, ...) {
  Error error = {code, 0, {}, index};
  std::va_list list;
  va_start(list, format);
  std::vsnprintf(error.text, sizeof error.text, format, list);
  va_end(list);
  throw error;
}

void check_handle(const Object* object, Kind kind, const char* name, int32_t index) {
  if (!object)
    fail_argument(index, MOEC_E_INVALID_ARG, "%s is NULL; expected a live %s", name,
                  kind_name(kind));
  if (object->kind() != kind)
    fail_argument(index, MOEC_E_INVALID_ARG, "%s is a handle of %s; expected %s", name,
                  kind_name(object->kind()), kind_name(kind));
  if (object->forked())
    fail_argument(index, MOEC_E_FORKED,
                  "%s was made before fork() and is used in the child; make it again there", name);
}

void free_object(const Object* object, Kind kind) noexcept {
  if (object && object->kind() == kind && !object->forked()) object->release();
}

uint32_t checked_size(const void* from, size_t first, const char* name, int32_t index) {
  if (!from) fail_argument(index, MOEC_E_INVALID_ARG, "%s is NULL; it is required", name);
  uint32_t size;
  std::memcpy(&size, from, sizeof size);
  if (size < first || size > kLargestStruct || size % 8 != 0)
    fail_argument(index, MOEC_E_ABI,
                  "%s.struct_size is %u; expected %zu to %zu, a multiple of 8, as "
                  "moec_struct_init sets it",
                  name, size, first, kLargestStruct);
  return size;
}

void read_bytes(void* to, size_t own, size_t first, const void* from, const char* name,
                int32_t index) {
  const uint32_t size = checked_size(from, first, name, index);
  const char* const bytes = static_cast<const char*>(from);
  const char* const tail = bytes + std::min<size_t>(size, own);
  if (std::any_of(tail, bytes + size, [](char byte) { return byte != 0; }))
    fail_argument(
        index, MOEC_E_ABI,
        "%s has %u bytes of which this library knows %zu, and the rest is not zero; use a "
        "library that knows the new fields, or leave them zero",
        name, size, own);
  std::memset(to, 0, own);
  std::memcpy(to, from, std::min<size_t>(size, own));
}

void write_bytes(void* to, const void* from, size_t own) noexcept {
  uint32_t size;
  std::memcpy(&size, from, sizeof size);  // the caller's, kept
  std::memcpy(to, from, std::min<size_t>(size, own));
  if (size > own) std::memset(static_cast<char*>(to) + own, 0, size - own);
}

}  // namespace moec::capi
