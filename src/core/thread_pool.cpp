// SPDX-License-Identifier: Apache-2.0
#include "core/thread_pool.h"

#include <pthread.h>
#include <sched.h>
#include <signal.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <exception>
#include <fstream>
#include <string>
#include <system_error>
#include <thread>
#include <vector>

#include "core/error.h"
#include "core/float_mode.h"
#include "core/portable.h"

namespace moec {
namespace {

constexpr auto kSpin = std::chrono::microseconds(50);  // longer than the gaps inside one layer

// Counts the forks behind this process: workers do not survive one.
std::atomic<uint32_t> fork_count{0};

uint32_t watch_forks() {
  static const int registered =
      pthread_atfork(nullptr, nullptr, [] { fork_count.fetch_add(1, std::memory_order_relaxed); });
  (void)registered;
  return fork_count.load(std::memory_order_relaxed);
}

thread_local bool inside_body = false;

void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

// Spin while keep_waiting(), at most kSpin; true when it became false.
template <class Condition>
bool spin_while(Condition keep_waiting) {
  const auto end = std::chrono::steady_clock::now() + kSpin;
  do {
    for (int i = 0; i < 64; ++i) {
      if (!keep_waiting()) return true;
      pause();
    }
  } while (std::chrono::steady_clock::now() < end);
  return false;
}

struct Job {
  void (*call)(void* body, int32_t slot, int64_t i) = nullptr;
  void* body = nullptr;
  int64_t n = 0;
  alignas(kCacheLine) std::atomic<int64_t> next{0};
  std::atomic<bool> failed{false};
  // Of the body that failed first; code 0: none. An exception_ptr needs a newer libstdc++ than
  // packages are linked for.
  Error error = {};

  void set(void (*new_call)(void*, int32_t, int64_t), void* new_body, int64_t new_n) {
    call = new_call;
    body = new_body;
    n = new_n;
    next.store(0, std::memory_order_relaxed);
    failed.store(false, std::memory_order_relaxed);
    error = {};
  }
  void work(int32_t slot) {
    const FloatMode mode;  // of a caller's threads
    inside_body = true;
    for (int64_t i; !failed.load(std::memory_order_relaxed) && (i = next.fetch_add(1)) < n;) {
      try {
        call(body, slot, i);
      } catch (...) {
        if (!failed.exchange(true)) error = current_error();
      }
    }
    inside_body = false;
  }
};

}  // namespace

// A job is open while `state` lacks kClosed; the low bits count the workers inside it. A worker
// enters only an open job, and the caller reuses the job only after closing it and seeing the count
// at zero.
struct ThreadPool::Workers {
  static constexpr uint32_t kClosed = 1u << 31;

  Job job;
  alignas(kCacheLine) std::atomic<uint32_t> state{kClosed};
  alignas(kCacheLine) std::atomic<uint32_t> generation{0};
  std::atomic<bool> stop{false};
  std::atomic_flag busy = ATOMIC_FLAG_INIT;
  uint32_t born = watch_forks();
  std::vector<std::thread> threads;

  bool forked() const { return fork_count.load(std::memory_order_relaxed) != born; }

  void start(int32_t count) {
    sigset_t all, old;  // signals belong to the host's threads
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &old);
    try {
      threads.reserve(size_t(count));
      for (int32_t slot = 1; slot <= count; ++slot)
        threads.emplace_back([this, slot] { loop(slot); });
    } catch (const std::exception&) {  // thread or memory limit: go on with those there are
    }
    pthread_sigmask(SIG_SETMASK, &old, nullptr);
  }

  void loop(int32_t slot) {
    for (uint32_t seen = 0;;) {
      const auto unchanged = [&] { return generation.load(std::memory_order_acquire) == seen; };
      if (!spin_while(unchanged)) generation.wait(seen);
      seen = generation.load(std::memory_order_acquire);
      if (stop.load(std::memory_order_relaxed)) return;
      uint32_t now = state.load(std::memory_order_relaxed);
      while (!(now & kClosed) && !state.compare_exchange_weak(now, now + 1)) {
      }
      if (now & kClosed) continue;
      job.work(slot);
      if (state.fetch_sub(1) == (kClosed | 1u)) state.notify_one();
    }
  }

  Error run(int64_t n, Call call, void* body) {
    job.set(call, body, n);
    state.store(0);
    generation.fetch_add(1);
    generation.notify_all();
    job.work(0);
    state.fetch_or(kClosed);
    spin_while([&] { return state.load(std::memory_order_acquire) != kClosed; });
    for (uint32_t now; (now = state.load()) != kClosed;) state.wait(now);
    return job.error;
  }

  void finish() {
    stop.store(true, std::memory_order_relaxed);
    generation.fetch_add(1);
    generation.notify_all();
    for (std::thread& thread : threads) thread.join();
  }
};

ThreadPool::ThreadPool(int32_t num_threads, const moec_thread_pool* external) {
  if (external) {
    external_ = *external;
    size_ = std::max(1, external->num_threads);
    return;
  }
  const int32_t wanted = num_threads > 0 ? num_threads : usable_cores();
  if (wanted == 1) return;
  workers_ = std::make_unique<Workers>();
  workers_->start(wanted - 1);
  size_ = 1 + int32_t(workers_->threads.size());
}

ThreadPool::~ThreadPool() {
  if (!workers_) return;
  if (workers_->forked())
    (void)workers_.release();  // its threads live in the parent only: nothing to join, leave it
  else
    workers_->finish();
}

void ThreadPool::run(int64_t n, Call call, void* body) const {
  const auto alone = [&] {
    for (int64_t i = 0; i < n; ++i) call(body, 0, i);
  };
  if (n <= 1 || size_ == 1 || inside_body) return alone();
  if (external_.parallel_for) {
    Job job;
    job.set(call, body, n);
    const int32_t code = external_.parallel_for(
        external_.user, std::min<int64_t>(n, size_),
        [](void* arg, int64_t slot) { static_cast<Job*>(arg)->work(int32_t(slot)); }, &job);
    if (job.error.code) throw job.error;
    if (code != 0)
      fail_native(MOEC_E_CALLBACK, code, "parallel_for returned %d; 0 is success", int(code));
    return;
  }
  if (workers_->forked() || workers_->busy.test_and_set(std::memory_order_acquire)) return alone();
  const Error error = workers_->run(n, call, body);
  workers_->busy.clear(std::memory_order_release);
  if (error.code) throw error;
}

namespace {

// Cores allowed by one cgroup folder; infinity without a limit.
double cgroup_limit(const std::string& folder) {
  std::string quota, period;
  if (!(std::ifstream(folder + "/cpu.max") >> quota >> period)) {  // version 2: "max 100000"
    std::ifstream(folder + "/cpu.cfs_quota_us") >> quota;          // version 1: -1 = none
    std::ifstream(folder + "/cpu.cfs_period_us") >> period;
  }
  const double microseconds = std::strtod(quota.c_str(), nullptr);
  return microseconds > 0 ? microseconds / std::strtod(period.c_str(), nullptr) : INFINITY;
}

}  // namespace

// The strictest limit from our own cgroup up to the root.
double cgroup_cores(const std::string& groups_file, const std::string& folder) {
  double cores = INFINITY;
  std::ifstream groups(groups_file);  // "0::/path" or "4:cpu,cpuacct:/path"
  for (std::string line; std::getline(groups, line);) {
    const size_t first = line.find(':'), second = line.find(':', first + 1);
    if (second == std::string::npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1);
    const bool has_cpu = (',' + controllers + ',').find(",cpu,") != std::string::npos;
    if (!controllers.empty() && !has_cpu) continue;  // not cpuset
    const std::string root = controllers.empty() ? folder : folder + "/cpu";
    for (std::string path = line.substr(second + 1);; path.resize(path.rfind('/'))) {
      cores = std::min(cores, cgroup_limit(root + path));
      if (path.rfind('/') == std::string::npos) break;
    }
  }
  return cores;
}

int32_t ThreadPool::usable_cores() {
  cpu_set_t set;
  CPU_ZERO(&set);
  int32_t cores = sched_getaffinity(0, sizeof set, &set) == 0
                      ? CPU_COUNT(&set)
                      : int32_t(std::thread::hardware_concurrency());
  const double limit = cgroup_cores();
  if (limit < cores) cores = int32_t(std::ceil(limit));
  return std::max(1, cores);
}

}  // namespace moec
