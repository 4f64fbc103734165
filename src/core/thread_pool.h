// SPDX-License-Identifier: Apache-2.0
// Threads of one context: our own small pool, or the caller's parallel_for.
//
// One parallel call runs at a time; a call that finds the pool busy, or that is made in a forked
// child or from inside a body, runs all its work on its own thread. Idle workers spin for some
// microseconds, then sleep. The calling thread always takes part, and waits only for workers that
// took part, so a worker that is slow to wake costs nothing. No call allocates.
#pragma once

#include <moec/moec.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <type_traits>

namespace moec {

class ThreadPool {
 public:
  // num_threads 0: usable_cores(). `external` (copied, may be null): run on the caller's threads.
  explicit ThreadPool(int32_t num_threads = 0, const moec_thread_pool* external = nullptr);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int32_t size() const { return size_; }

  // body(slot, i) for each i in [0, n), handed out in ascending order. No two bodies use the same
  // slot in [0, size()) at once. What the first body threw is thrown here, as an Error where it
  // ran on another thread; work not begun is skipped.
  template <class Body>
  void parallel_for(int64_t n, Body&& body) const {
    using Function = std::remove_reference_t<Body>;
    run(
        n, [](void* self, int32_t slot, int64_t i) { (*static_cast<Function*>(self))(slot, i); },
        const_cast<void*>(static_cast<const void*>(std::addressof(body))));
  }

  // Cores this process may use: affinity mask and cgroup quota, at least 1.
  static int32_t usable_cores();

 private:
  using Call = void (*)(void* body, int32_t slot, int64_t i);
  void run(int64_t n, Call call, void* body) const;

  struct Workers;
  int32_t size_ = 1;
  moec_thread_pool external_ = {};
  std::unique_ptr<Workers> workers_;
};

// Cores that the quotas of this process's cgroups allow; infinity without one.
double cgroup_cores(const std::string& groups_file = "/proc/self/cgroup",
                    const std::string& folder = "/sys/fs/cgroup");

}  // namespace moec
