// SPDX-License-Identifier: Apache-2.0
// Planted faults that were seen to fail: a worker that enters a closed job, a forked child that
// joins the parent's workers (hangs), an exception not kept, idle workers that never sleep.
#include "core/thread_pool.h"

#include <gtest/gtest.h>
#include <sched.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "core/error.h"

namespace moec {
namespace {

void expect_each_once(const ThreadPool& pool, int64_t n) {
  std::vector<std::atomic<int>> seen(static_cast<size_t>(n));
  std::vector<std::atomic<int>> inside(static_cast<size_t>(pool.size()));
  pool.parallel_for(n, [&](int32_t slot, int64_t i) {
    EXPECT_EQ(inside[size_t(slot)].fetch_add(1), 0);
    ++seen[size_t(i)];
    inside[size_t(slot)].fetch_sub(1);
  });
  for (const auto& count : seen) EXPECT_EQ(count, 1);
}

TEST(ThreadPool, runs_each_index_once_and_no_slot_twice_at_once) {
  for (const int32_t threads : {1, 2, 3, 8}) {
    const ThreadPool pool(threads);
    EXPECT_EQ(pool.size(), threads);
    for (const int64_t n : {0, 1, 2, 7, 1000}) expect_each_once(pool, n);
    for (int repeat = 0; repeat < 300; ++repeat) expect_each_once(pool, 3);
  }
}

TEST(ThreadPool, all_threads_take_part) {
  const ThreadPool pool(4);
  for (int repeat = 0; repeat < 20; ++repeat) {
    std::atomic<int> arrived{0};
    const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(10);
    pool.parallel_for(4, [&](int32_t, int64_t) {
      ++arrived;  // nobody leaves before everybody has come
      while (arrived < 4 && std::chrono::steady_clock::now() < end) std::this_thread::yield();
    });
    ASSERT_LT(std::chrono::steady_clock::now(), end);
  }
}

TEST(ThreadPool, serves_many_callers_at_once_and_nested_calls) {
  const ThreadPool pool(3);
  std::atomic<int64_t> sum{0};
  std::vector<std::thread> callers;
  for (int t = 0; t < 4; ++t)
    callers.emplace_back([&] {
      for (int repeat = 0; repeat < 100; ++repeat)
        pool.parallel_for(10, [&](int32_t, int64_t i) {
          pool.parallel_for(2, [&](int32_t, int64_t j) { sum += i * 2 + j; });
        });
    });
  for (std::thread& caller : callers) caller.join();
  EXPECT_EQ(sum, 4 * 100 * 190);
}

TEST(ThreadPool, hands_an_exception_to_the_caller_and_goes_on) {
  for (const int32_t threads : {1, 4}) {
    const ThreadPool pool(threads);
    for (int repeat = 0; repeat < 50; ++repeat)
      EXPECT_THROW(pool.parallel_for(100,
                                     [](int32_t, int64_t i) {
                                       if (i == 37) MOEC_FAIL(MOEC_E_SHAPE, "37");
                                     }),
                   Error);
    expect_each_once(pool, 100);
  }
}

TEST(ThreadPool, works_in_a_forked_child) {
#if defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "the thread sanitizer does not support it";
#endif
  const ThreadPool pool(4);
  auto destroyed_in_child = std::make_unique<ThreadPool>(4);
  expect_each_once(pool, 100);
  const pid_t child = fork();
  if (child == 0) {
    alarm(10);  // a hang ends the child by a signal
    {
      const ThreadPool own(3);
      expect_each_once(pool, 100);
      expect_each_once(own, 100);
      destroyed_in_child.reset();
    }
    _exit(testing::Test::HasFailure() ? 1 : 0);
  }
  int status = -1;
  waitpid(child, &status, 0);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
  expect_each_once(pool, 100);
}

double cpu_seconds() {
  rusage usage;
  getrusage(RUSAGE_SELF, &usage);
  const auto seconds = [](timeval t) { return double(t.tv_sec) + double(t.tv_usec) * 1e-6; };
  return seconds(usage.ru_utime) + seconds(usage.ru_stime);
}

TEST(ThreadPool, idle_workers_sleep) {
  const ThreadPool pool(8);
  expect_each_once(pool, 100);
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  const double before = cpu_seconds();
  std::this_thread::sleep_for(std::chrono::milliseconds(200));
  EXPECT_LT(cpu_seconds() - before, 0.02);
}

TEST(ThreadPool, respects_the_affinity_mask) {
  cpu_set_t old, one;
  sched_getaffinity(0, sizeof old, &old);
  CPU_ZERO(&one);
  for (int cpu = 0; cpu < CPU_SETSIZE && CPU_COUNT(&one) == 0; ++cpu)
    if (CPU_ISSET(cpu, &old)) CPU_SET(cpu, &one);
  sched_setaffinity(0, sizeof one, &one);
  EXPECT_EQ(ThreadPool().size(), 1);
  sched_setaffinity(0, sizeof old, &old);
  EXPECT_GE(ThreadPool().size(), 1);
  EXPECT_LE(ThreadPool().size(), CPU_COUNT(&old));
}

// Trees of cgroups as version 2 and version 1 of the kernel's interface show them. Mutation noted:
// reading our own group alone misses the limit of the one above.
TEST(ThreadPool, respects_the_cgroup_quota) {
  const std::filesystem::path folder =
      testing::TempDir() + "moec-cgroup-" + std::to_string(getpid());
  const auto put = [&](const std::string& path, const std::string& text) {
    std::filesystem::create_directories((folder / path).parent_path());
    std::ofstream(folder / path) << text << "\n";
  };
  const auto cores = [&](const std::string& groups) {
    put("groups", groups);
    return cgroup_cores(folder / "groups", folder);
  };
  put("job/cpu.max", "150000 100000");
  put("job/step/cpu.max", "max 100000");
  put("free/cpu.max", "max 100000");
  EXPECT_EQ(cores("0::/job"), 1.5);
  EXPECT_EQ(cores("0::/job/step"), 1.5);
  EXPECT_EQ(cores("0::/free"), INFINITY);
  EXPECT_EQ(cores("0::/absent"), INFINITY);
  put("cpu/old/cpu.cfs_quota_us", "50000");
  put("cpu/old/cpu.cfs_period_us", "100000");
  put("cpu/open/cpu.cfs_quota_us", "-1");
  EXPECT_EQ(cores("7:memory:/job\n4:cpu,cpuacct:/old"), 0.5);
  EXPECT_EQ(cores("4:cpu,cpuacct:/open"), INFINITY);
  std::filesystem::remove_all(folder);
  EXPECT_LE(ThreadPool::usable_cores(), std::max(1.0, std::ceil(cgroup_cores())));
}

struct Host {  // a framework's pool: its own threads, in no order
  int32_t code = 0;
  int calls = 0;
};

int32_t host_parallel_for(void* user, int64_t n, void (*body)(void*, int64_t), void* arg) {
  auto* const host = static_cast<Host*>(user);
  ++host->calls;
  std::vector<std::thread> threads;
  for (int64_t i = n; i-- > 0;) threads.emplace_back(body, arg, i);
  for (std::thread& thread : threads) thread.join();
  return host->code;
}

TEST(ThreadPool, runs_on_the_callers_threads) {
  Host host;
  moec_thread_pool external = {sizeof(moec_thread_pool), 3, &host, host_parallel_for};
  const ThreadPool pool(0, &external);
  EXPECT_EQ(pool.size(), 3);
  expect_each_once(pool, 1000);
  EXPECT_EQ(host.calls, 1);
  try {
    pool.parallel_for(9, [](int32_t, int64_t) { throw std::runtime_error("any"); });
    ADD_FAILURE();
  } catch (const Error& error) {
    EXPECT_EQ(error.code, MOEC_E_INTERNAL);
    EXPECT_STREQ(error.text, "any");
  }
  host.code = -5;
  try {
    expect_each_once(pool, 10);
    ADD_FAILURE();
  } catch (const Error& error) {
    EXPECT_EQ(error.code, MOEC_E_CALLBACK);
    EXPECT_EQ(error.native_code, -5);
  }
}

}  // namespace
}  // namespace moec
