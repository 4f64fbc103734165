// SPDX-License-Identifier: Apache-2.0
// The library inside a process: fork, idle threads, the affinity mask.
// Mutation noted: without the generation check of handles fork_in_mid_call fails.
#include <gtest/gtest.h>
#include <sched.h>
#include <sys/resource.h>

#include <atomic>
#include <chrono>
#include <filesystem>
#include <iterator>
#include <thread>

#include "child.h"
#include "problem.h"

namespace moec::test {
namespace {

TEST(Process, handles_of_the_parent_are_refused_in_the_child) {
  Problem p;
  const auto args = p.forward_args();
  check(moec_layer_forward(p.layer.get(), &args, nullptr));
  const int status = in_child([&] {
    if (moec_layer_forward(p.layer.get(), &args, nullptr) != MOEC_E_FORKED) return 1;
    if (error_info().code != MOEC_E_FORKED) return 2;
    if (moec_context_trim(p.context) != MOEC_E_FORKED) return 3;
    p.layer.reset();  // frees are harmless
    p.weights.reset();
    p.own_context.reset();
    return 0;
  });
  EXPECT_EQ(status, 0);
  EXPECT_EQ(moec_layer_forward(p.layer.get(), &args, nullptr), MOEC_OK);
}

TEST(Process, the_child_makes_its_own) {
  Problem p;
  const auto args = p.forward_args();
  check(moec_layer_forward(p.layer.get(), &args, nullptr));
  const int status = in_child([&] {
    Problem mine;
    const auto own = mine.forward_args();
    if (moec_layer_forward(mine.layer.get(), &own, nullptr) != MOEC_OK) return 1;
    return mine.y == p.y ? 0 : 2;
  });
  EXPECT_EQ(status, 0);
}

TEST(Process, fork_in_mid_call) {
  Problem p;
  std::atomic<bool> stop{false};
  std::thread busy([&] {
    const auto args = p.forward_args();
    while (!stop) {
      check(moec_layer_forward(p.layer.get(), &args, nullptr));
      (void)moec_plan_attach(nullptr, 1);  // the error path, too
      int32_t count = 0;
      check(moec_device_count(MOEC_CUDA, &count));
    }
  });
  const auto args = p.forward_args();
  for (int i = 0; i < 20; ++i)
    EXPECT_EQ(in_child([&] {
                if (moec_layer_forward(p.layer.get(), &args, nullptr) != MOEC_E_FORKED) return 1;
                Problem mine;
                const auto own = mine.forward_args();
                return moec_layer_forward(mine.layer.get(), &own, nullptr) == MOEC_OK ? 0 : 2;
              }),
              0);
  stop = true;
  busy.join();
}

double cpu_seconds() {
  rusage usage = {};
  getrusage(RUSAGE_SELF, &usage);
  const auto seconds = [](const timeval& t) { return double(t.tv_sec) + 1e-6 * double(t.tv_usec); };
  return seconds(usage.ru_utime) + seconds(usage.ru_stime);
}

TEST(Process, idle_threads_sleep) {
  auto desc = sized<moec_context_desc>();
  desc.num_threads = 4;
  const auto context =
      make<Context>(moec_context_create, static_cast<const moec_context_desc*>(&desc));
  Problem p(context.get(), MOEC_SAVE_ALL, 67);
  const auto args = p.forward_args();
  check(moec_layer_forward(p.layer.get(), &args, nullptr));
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  const double before = cpu_seconds();
  std::this_thread::sleep_for(std::chrono::milliseconds(300));
  EXPECT_LT(cpu_seconds() - before, 0.01);
}

int64_t threads_here() {
  return std::distance(std::filesystem::directory_iterator("/proc/self/task"), {});
}

TEST(Process, the_affinity_mask_is_respected) {
  EXPECT_EQ(in_child([] {
              cpu_set_t allowed, one;
              sched_getaffinity(0, sizeof allowed, &allowed);
              CPU_ZERO(&one);
              for (size_t cpu = 0; cpu < CPU_SETSIZE && CPU_COUNT(&one) == 0; ++cpu)
                if (CPU_ISSET(cpu, &allowed)) CPU_SET(cpu, &one);
              sched_setaffinity(0, sizeof one, &one);
              const int64_t before = threads_here();
              Problem p;
              auto info = sized<moec_device_info>();
              check(moec_context_device(p.context, &info));
              const auto args = p.forward_args();
              check(moec_layer_forward(p.layer.get(), &args, nullptr));
              if (info.multiprocessors != 1) return 1;
              return threads_here() == before ? 0 : 2;
            }),
            0);
}

TEST(Process, the_asked_number_of_threads_is_used) {
  for (const int32_t num_threads : {1, 2, 3}) {
    const int64_t before = threads_here();
    auto desc = sized<moec_context_desc>();
    desc.num_threads = num_threads;
    const auto context =
        make<Context>(moec_context_create, static_cast<const moec_context_desc*>(&desc));
    EXPECT_EQ(threads_here() - before, num_threads - 1);
  }
}

}  // namespace
}  // namespace moec::test
