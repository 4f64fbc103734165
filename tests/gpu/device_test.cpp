// SPDX-License-Identifier: Apache-2.0
// The CUDA backend in a process: streams of the caller, several contexts, threads and devices, the
// allocator hook, errors of the device, fork, exit with live handles.
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <map>
#include <mutex>
#include <thread>

#include "capi/child.h"
#include "step.h"

namespace moec::test {
namespace {

std::vector<uint8_t> answer(const Step& step, cudaStream_t stream) {
  step.queue(stream);
  CHECK_CUDA(cudaStreamSynchronize(stream));
  return step.outputs();
}

TEST(Device, threads_with_contexts_and_streams_of_their_own_agree) {
  const Context context = gpu_context();
  const auto alone = experts_step(context.get(), 2);
  const GpuStream stream;
  std::vector<std::vector<uint8_t>> want;
  for (uint64_t seed = 0; seed < 4; ++seed) {
    alone->fill(seed, Routing::kRandom);
    want.push_back(answer(*alone, stream));
  }
  std::vector<int> wrong(4, 0);
  std::vector<std::thread> threads;
  for (uint64_t seed = 0; seed < 4; ++seed) {
    threads.emplace_back([&, seed] {
      const Context mine = gpu_context();
      const auto step = experts_step(mine.get(), 2);
      const GpuStream own;
      step->fill(seed, Routing::kRandom);
      for (int i = 0; i < 25; ++i) wrong[seed] += answer(*step, own) != want[seed];
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(wrong, std::vector<int>(4, 0));
}

TEST(Device, one_context_serves_two_streams_at_once) {
  const Context context = gpu_context();
  const auto a = experts_step(context.get(), 2), b = experts_step(context.get(), 2);
  const GpuStream one, two;
  a->fill(1, Routing::kRandom);
  b->fill(2, Routing::kRandom);
  const auto want_a = answer(*a, one), want_b = answer(*b, two);
  for (int round = 0; round < 20; ++round) {  // scratch of one stream must not serve the other
    for (int i = 0; i < 5; ++i) {
      a->queue(one);
      b->queue(two);
    }
    one.wait();
    two.wait();
    ASSERT_EQ(a->outputs(), want_a);
    ASSERT_EQ(b->outputs(), want_b);
  }
}

class SeveralDevices : public testing::Test {
 protected:
  void SetUp() override {
    check(moec_device_count(MOEC_CUDA, &devices_));
    if (devices_ < 2) GTEST_SKIP() << "one GPU here";
  }
  void TearDown() override { CHECK_CUDA(cudaSetDevice(0)); }

  int32_t devices_ = 0;
};

TEST_F(SeveralDevices, every_one_works_and_the_callers_stays_current) {
  std::vector<uint8_t> want;
  for (int32_t device = 0; device < devices_; ++device) {
    const Context context = gpu_context(0, nullptr, device);
    const auto step = experts_step(context.get(), 2, device);
    step->fill(3, Routing::kRandom);
    const GpuStream stream;  // of this device
    CHECK_CUDA(cudaSetDevice(0));
    step->queue(stream);
    check(moec_context_sync(context.get(), static_cast<cudaStream_t>(stream)));
    int current = -1;
    CHECK_CUDA(cudaGetDevice(&current));
    EXPECT_EQ(current, 0);
    const std::vector<uint8_t> got = step->outputs();
    if (device == 0) want = got;
    EXPECT_EQ(got, want) << "device " << device;
  }
}

TEST_F(SeveralDevices, at_once_agree_with_the_first_alone) {
  const auto repeat = [](int32_t device, int times, const std::vector<uint8_t>& want) {
    const Context context = gpu_context(0, nullptr, device);
    const auto step = experts_step(context.get(), 2, device);
    step->fill(3, Routing::kRandom);
    const GpuStream stream;
    int wrong = 0;
    for (int i = 0; i < times; ++i) wrong += answer(*step, stream) != want;
    return std::pair(wrong, step->outputs());
  };
  const std::vector<uint8_t> want = repeat(0, 1, {}).second;
  std::vector<int> wrong(devices_, -1);
  std::vector<std::thread> threads;
  for (int32_t device = 0; device < devices_; ++device) {
    threads.emplace_back([&, device] { wrong[device] = repeat(device, 50, want).first; });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(wrong, std::vector<int>(devices_, 0));
}

TEST_F(SeveralDevices, memory_of_another_is_refused) {
  const Context first = gpu_context();
  try {
    experts_step(first.get(), 2, 1);  // binds weights of device 1
    ADD_FAILURE() << "weights of another device were bound";
  } catch (const Failure& failure) {
    EXPECT_EQ(failure.status, MOEC_E_DEVICE) << failure.what();
  }
}

struct Allocations {
  std::mutex mutex;
  std::map<void*, size_t> live;
  int calls = 0;
  bool refuse = false;

  moec_allocator hook() {
    auto made = sized<moec_allocator>();
    made.user = this;
    made.alloc = [](void* user, size_t bytes, size_t, int32_t type, int32_t, moec_stream stream) {
      auto& all = *static_cast<Allocations*>(user);
      const std::lock_guard lock(all.mutex);
      void* block = nullptr;
      ++all.calls;
      if (all.refuse || type != MOEC_CUDA) return block;
      cudaMallocAsync(&block, bytes, static_cast<cudaStream_t>(stream));
      all.live[block] = bytes;
      return block;
    };
    made.release = [](void* user, void* block, size_t bytes, int32_t, int32_t, moec_stream stream) {
      auto& all = *static_cast<Allocations*>(user);
      const std::lock_guard lock(all.mutex);
      if (all.live.at(block) == bytes) all.live.erase(block);
      cudaFreeAsync(block, static_cast<cudaStream_t>(stream));
    };
    return made;
  }
};

TEST(Device, memory_comes_from_the_callers_allocator_and_goes_back_to_it) {
  Allocations all;
  const moec_allocator hook = all.hook();
  const GpuStream stream;
  {
    const Context context = gpu_context(0, &hook);
    const auto step = experts_step(context.get(), 2);
    step->fill(1, Routing::kRandom);
    (void)answer(*step, stream);
    const int warm = all.calls;
    EXPECT_GT(warm, 0);
    for (int i = 0; i < 10; ++i) (void)answer(*step, stream);
    EXPECT_EQ(all.calls, warm);
    EXPECT_EQ(stats_of(context.get()).allocs, uint64_t(warm));
  }
  EXPECT_TRUE(all.live.empty());
  stream.wait();
}

// One handle, two streams. Mutation noted: scratch by handles is allocated once.
TEST(Device, a_buffer_that_kernels_do_not_reach_is_refused) {
  int pageable = 0;
  CHECK_CUDA(cudaDeviceGetAttribute(&pageable, cudaDevAttrPageableMemoryAccess, 0));
  if (pageable) GTEST_SKIP() << "kernels reach all memory of a process here";
  const Context context = gpu_context();
  auto desc = sized<moec_plan_desc>();
  desc.max_tokens = 4;
  desc.num_experts = 4;
  desc.top_k = 2;
  uint64_t bytes = 0;
  int64_t rows = 0;
  check(moec_plan_size(&desc, &bytes, &rows));
  std::vector<uint8_t> pageable_memory(bytes);
  void* pinned = nullptr;
  CHECK_CUDA(cudaMallocHost(&pinned, bytes));
  const moec_buffer refused{pageable_memory.data(), bytes}, accepted{pinned, bytes};
  moec_plan* plan = nullptr;
  EXPECT_EQ(moec_plan_create(context.get(), &desc, &refused, &plan), MOEC_E_DEVICE);
  EXPECT_EQ(moec_plan_create(context.get(), &desc, &accepted, &plan), MOEC_OK);
  moec_plan_free(plan);
  CHECK_CUDA(cudaFreeHost(pinned));
}

TEST(Device, cuda_stream_per_thread_has_scratch_for_each_thread) {
  const Context context = gpu_context();
  uint64_t allocs[2];
  for (uint64_t& count : allocs) {
    std::thread([&] {
      const auto step = experts_step(context.get(), 2);
      step->fill(1, Routing::kRandom);
      const uint64_t before = stats_of(context.get()).allocs;
      (void)answer(*step, cudaStreamPerThread);
      (void)answer(*step, cudaStreamPerThread);
      count = stats_of(context.get()).allocs - before;
    }).join();
  }
  EXPECT_GT(allocs[0], 0);
  EXPECT_EQ(allocs[1], allocs[0]);
}

TEST(Device, scratch_of_many_streams_is_given_back) {
  const Context context = gpu_context();
  uint64_t most = 0;
  for (int i = 0; i < 200; ++i) {
    const GpuStream stream;
    check(moec_context_reserve(context.get(), 4096, static_cast<cudaStream_t>(stream)));
    most = std::max(most, stats_of(context.get()).workspace_bytes);
  }
  EXPECT_LE(most, 65u * 4096);
}

TEST(Device, an_allocator_that_refuses_is_an_error_and_no_more) {
  Allocations all;
  const moec_allocator hook = all.hook();
  const GpuStream stream;  // outlives what the hook gives back on it
  const Context context = gpu_context(0, &hook);
  const auto step = experts_step(context.get(), 2);
  step->fill(1, Routing::kRandom);
  all.refuse = true;
  EXPECT_THROW(step->queue(stream), Failure);
  EXPECT_EQ(moec_context_sync(context.get(), static_cast<cudaStream_t>(stream)), MOEC_OK);
  all.refuse = false;
  EXPECT_EQ(answer(*step, stream), answer(*step, stream));
}

TEST(Device, handles_of_the_parent_are_refused_in_the_child) {
  Context context = gpu_context();
  auto step = experts_step(context.get(), 2);
  const GpuStream stream;
  step->fill(1, Routing::kRandom);
  const auto want = answer(*step, stream);
  const int status = in_child([&] {
    try {
      step->queue(stream);
      return 1;
    } catch (const Failure& failure) {
      if (failure.status != MOEC_E_FORKED) return 2;
    }
    if (moec_context_sync(context.get(), nullptr) != MOEC_E_FORKED) return 3;
    moec_context_free(context.release());  // frees are harmless
    return 0;
  });
  EXPECT_EQ(status, 0);
  EXPECT_EQ(answer(*step, stream), want);
}

// ---- in processes of their own, which start again from main()
class OwnProcess : public testing::Test {
 protected:
  void SetUp() override { GTEST_FLAG_SET(death_test_style, "threadsafe"); }
};
using OwnProcessDeathTest = OwnProcess;  // GoogleTest runs such suites first

// A step whose ids lie nowhere, then what the context says.
int fault(bool poll) {
  const Context context = gpu_context();
  const auto step = experts_step(context.get(), 2);
  const GpuStream stream;
  step->fill(1, Routing::kRandom);
  if (answer(*step, stream).empty()) return 10;
  auto desc = sized<moec_plan_desc>();
  desc.max_tokens = 64;
  desc.num_experts = 8;
  desc.top_k = 2;
  PlanHandle plan =
      make<PlanHandle>(moec_plan_create, context.get(), static_cast<const moec_plan_desc*>(&desc),
                       static_cast<const moec_buffer*>(nullptr));
  const int64_t shape[] = {64, 2};
  moec_tensor nowhere;
  check(moec_tensor_make(&nowhere, reinterpret_cast<void*>(0x1000), MOEC_I32, MOEC_CUDA, 0, 2,
                         shape));
  moec_status deferred = MOEC_OK;
  if (moec_context_poll(context.get(), &deferred) != MOEC_OK || deferred != MOEC_OK) return 11;
  check(moec_plan_from_topk(plan.get(), &nowhere, nullptr, static_cast<cudaStream_t>(stream)));
  if (poll) {  // never waits: ask until the fault has happened
    for (int i = 0; i < 500 && (deferred == MOEC_OK || deferred == MOEC_S_NOT_READY); ++i) {
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
      check(moec_context_poll(context.get(), &deferred));
    }
    if (deferred != MOEC_E_CUDA) return 12;
  }
  if (moec_context_sync(context.get(), static_cast<cudaStream_t>(stream)) != MOEC_E_CUDA) return 13;
  auto info = sized<moec_error_info>();
  check(moec_last_error(&info));
  if (info.code != MOEC_E_CUDA || info.native_code != cudaErrorIllegalAddress) return 14;
  check(moec_context_poll(context.get(), &deferred));
  if (deferred != MOEC_E_CUDA) return 15;
  return 0;  // handles of a lost device are freed on the way out
}

TEST_F(OwnProcessDeathTest, sync_reports_an_error_of_the_device) {
  EXPECT_EXIT(std::exit(fault(false)), testing::ExitedWithCode(0), "");
}
TEST_F(OwnProcessDeathTest, poll_reports_an_error_of_the_device) {
  EXPECT_EXIT(std::exit(fault(true)), testing::ExitedWithCode(0), "");
}

// Work under way, handles alive, and one that is freed by a static destructor.
int leave_everything() {
  static Context last = gpu_context();
  static auto step = experts_step(last.get(), 2);
  static GpuStream* const stream = new GpuStream;
  step->fill(1, Routing::kRandom);
  for (int i = 0; i < 50; ++i) step->queue(*stream);
  (void)gpu_context().release();
  return 0;
}
TEST_F(OwnProcessDeathTest, exit_with_live_handles_is_clean) {
  EXPECT_EXIT(std::exit(leave_everything()), testing::ExitedWithCode(0), "^$");
}

}  // namespace
}  // namespace moec::test
