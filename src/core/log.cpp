// SPDX-License-Identifier: Apache-2.0
#include "core/log.h"

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <mutex>

namespace moec {
namespace {

struct Sink {
  moec_log_function function = nullptr;
  void* user = nullptr;
  int32_t min_level = MOEC_LOG_OFF;
};

std::mutex sink_mutex;  // trivially destroyed: usable until the very end of the process
Sink sink;

Sink current_sink() {
  const std::lock_guard lock(sink_mutex);
  return sink;
}

}  // namespace

void set_log(moec_log_function function, void* user, int32_t min_level) {
  const std::lock_guard lock(sink_mutex);
  sink = function ? Sink{function, user, min_level} : Sink{};
}

void log(int32_t level, const char* format, ...) {
  const Sink to = current_sink();
  if (!to.function || level < to.min_level) return;
  char text[600];
  std::va_list list;
  va_start(list, format);
  const int length = std::vsnprintf(text, sizeof text, format, list);
  va_end(list);
  if (length < 0) return;
  to.function(to.user, level, text, std::min(size_t(length), sizeof text - 1));
}

}  // namespace moec
