// SPDX-License-Identifier: Apache-2.0
// The one way anything fails inside the library: an Error is thrown and becomes a status at the C
// boundary.
#pragma once

#include <moec/moec.h>

#include <cstdarg>
#include <cstdio>
#include <exception>
#include <new>
#include <string>

namespace moec {

struct Error {
  moec_status code;
  int32_t native_code;
  char text[512];
  int32_t arg_index = 0;  // 1-based argument of the entry point, 0 = not one argument
};

#if defined(__GNUC__)
#define MOEC_PRINTF(index) __attribute__((format(printf, (index), (index) + 1)))
#else
#define MOEC_PRINTF(index)
#endif

[[noreturn]] MOEC_PRINTF(3) inline void fail_native(moec_status code, int32_t native_code,
                                                    const char* format, ...) {
  Error error{code, native_code, {}};
  std::va_list list;
  va_start(list, format);
  std::vsnprintf(error.text, sizeof error.text, format, list);
  va_end(list);
  throw error;
}

// What the exception that is being handled says.
inline Error current_error() noexcept {
  const auto plain = [](moec_status code, const char* text) {
    Error error = {code, 0, {}, 0};
    std::snprintf(error.text, sizeof error.text, "%s", text);
    return error;
  };
  try {
    throw;
  } catch (const Error& error) {
    return error;
  } catch (const std::bad_alloc&) {
    return plain(MOEC_E_OUT_OF_MEMORY, "host memory is exhausted");
  } catch (const std::exception& error) {
    return plain(MOEC_E_INTERNAL, error.what());
  } catch (...) {
    return plain(MOEC_E_INTERNAL, "an unknown exception");
  }
}

// The end of a long path: what follows it in a text must fit, too.
inline std::string end_of(const std::string& path) {
  constexpr size_t kMost = 100;
  if (path.size() <= kMost) return path;
  size_t begin = path.size() - kMost + 3;
  while (begin < path.size() && (path[begin] & 0xc0) == 0x80) ++begin;  // not inside a character
  return "..." + path.substr(begin);
}

// fail(code, format, ...): text is "what is wrong, with both values; what would be right".
// The C boundary puts the entry point's name in front.
#define MOEC_FAIL(code, ...) ::moec::fail_native((code), 0, __VA_ARGS__)

// A promise of the caller; always checked. Invariants of ours are plain assert().
#define MOEC_REQUIRE(condition, code, ...) \
  do {                                     \
    if (!(condition)) [[unlikely]]         \
      MOEC_FAIL(code, __VA_ARGS__);        \
  } while (0)

}  // namespace moec
