// SPDX-License-Identifier: Apache-2.0
// The library inside a process: fork, idle threads, the affinity mask.
// Mutations noted: without the generation check of handles fork_in_mid_call fails; without
// check_isa in make_cpu_backend an instruction set is refused too late.
#include <gtest/gtest.h>
#include <sched.h>
#include <sys/resource.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <initializer_list>
#include <iterator>
#include <string>
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

// A set that no machine has, and one that came too late: refused before anything is made.
TEST(Process, an_instruction_set_is_refused_at_context_creation) {
  const auto refused = [](const char* isa, moec_status status,
                          std::initializer_list<const char*> words) {
    setenv("MOEC_CPU_ISA", isa, 1);
    moec_context* context = nullptr;
    if (moec_context_create(nullptr, &context) != status || context) return false;
    const std::string text = error_info().message;
    return std::string(error_info().site) == "moec_context_create" &&
           std::all_of(words.begin(), words.end(),
                       [&](const char* word) { return text.find(word) != std::string::npos; });
  };
  EXPECT_EQ(
      in_child([&] {
        auto device = sized<moec_device_info>();
        if (moec_device_query(MOEC_CPU, 0, &device) != MOEC_OK) return 1;
        if (!refused("sse9", MOEC_E_UNSUPPORTED, {"\"sse9\"", device.arch, "portable"})) return 2;
        const bool portable = std::string(device.arch) == "portable";
        if (!portable && !refused("portable", MOEC_E_INVALID_STATE, {"\"portable\"", device.arch}))
          return 3;
        setenv("MOEC_CPU_ISA", device.arch, 1);
        moec_context* context = nullptr;
        if (moec_context_create(nullptr, &context) != MOEC_OK) return 4;
        moec_context_free(context);
        return 0;
      }),
      0);
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
