// SPDX-License-Identifier: Apache-2.0
#include "core/log.h"

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <cstdarg>
#include <cstdint>
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
std::atomic<int32_t> lowest_level{INT32_MAX};  // of the sink; without one nothing is locked

void hold_mutex_over_fork() {  // so that the child does not find it locked
  static const int registered = pthread_atfork(
      [] { sink_mutex.lock(); }, [] { sink_mutex.unlock(); }, [] { sink_mutex.unlock(); });
  (void)registered;
}

}  // namespace

void set_log(moec_log_function function, void* user, int32_t min_level) {
  hold_mutex_over_fork();
  const std::lock_guard lock(sink_mutex);
  sink = function ? Sink{function, user, min_level} : Sink{};
  lowest_level = function ? min_level : INT32_MAX;
}

void log(int32_t level, const char* format, ...) {
  if (level < lowest_level.load(std::memory_order_relaxed)) return;
  Sink to;
  {
    const std::lock_guard lock(sink_mutex);
    to = sink;
  }
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
