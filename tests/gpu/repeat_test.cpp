// SPDX-License-Identifier: Apache-2.0
// The same step gives the same bytes each time, alone and beside a kernel that keeps half of the
// multiprocessors. Memory and outputs start as NaN each time, so that a kernel that starts before
// what it reads is written shows. Mutations noted: see the counter below, without which the second
// half proves nothing; down's weight gradient told not to wait for grad down differs in run 1.
#include <gtest/gtest.h>

#include <algorithm>

#include "occupy.h"
#include "step.h"

namespace moec::test {
namespace {

struct Kind {
  const char* name;
  std::unique_ptr<Step> (*make)(const moec_context*, int32_t, int32_t);
};
class Repeat : public testing::TestWithParam<Kind> {};
INSTANTIATE_TEST_SUITE_P(Steps, Repeat,
                         testing::Values(Kind{"experts", experts_step}, Kind{"layer", layer_step},
                                         Kind{"coded", coded_step},
                                         Kind{"coded_few_rows", coded_step_of_few_rows}),
                         [](const auto& param) { return param.param.name; });

TEST_P(Repeat, hundred_runs_half_of_them_beside_another_kernel) {
  const Context context = gpu_context();
  const auto step = GetParam().make(context.get(), 2, 0);
  step->take_workspace();
  const GpuStream stream, other;
  int multiprocessors = 0;
  CHECK_CUDA(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, 0));
  int* stop = nullptr;
  CHECK_CUDA(cudaHostAlloc(reinterpret_cast<void**>(&stop), sizeof(int), cudaHostAllocMapped));
  int beside = 0;
  std::vector<uint8_t> first;
  for (int i = 0; i < 100; ++i) {
    step->fill(9, Routing::kRandom);  // restores what the step updates
    step->poison();
    *static_cast<volatile int*>(stop) = 0;
    if (i % 2) CHECK_CUDA(occupy(multiprocessors / 2, stop, 2000, other));
    step->queue(stream);
    stream.wait();
    beside += i % 2 && cudaStreamQuery(other) == cudaErrorNotReady;  // it ran all the while
    *static_cast<volatile int*>(stop) = 1;
    other.wait();
    const std::vector<uint8_t> got = step->outputs();
    if (first.empty()) first = got;
    ASSERT_EQ(got, first) << "run " << i;
  }
  EXPECT_EQ(beside, 50);
  cudaFreeHost(stop);
}

// Its counters hold anything before, and what comes before it on the stream still runs. Mutation
// noted: weight gradients that do not wait for the kernel that clears the counters.
TEST(Repeat, no_tokens_make_gradients_of_zero) {
  const Context context = gpu_context();
  const auto before = experts_step(context.get(), 2),
             step = experts_step_of_no_tokens(context.get());
  for (Step* one : {before.get(), step.get()}) {
    one->take_workspace();
    one->fill(9, Routing::kRandom);
  }
  const GpuStream stream;
  for (int i = 0; i < 50; ++i) {
    step->poison();
    before->queue(stream);
    step->queue(stream);
    stream.wait();
    const std::vector<uint8_t> got = step->outputs();
    ASSERT_EQ(std::count(got.end() - Step::kWeightBytes, got.end(), 0), Step::kWeightBytes)
        << "run " << i;
  }
}

// Whose stream moec cannot know any more.
TEST(Free, waits_for_work_that_may_use_the_memory) {
  const Context context = gpu_context();
  auto desc = sized<moec_plan_desc>();
  desc.max_tokens = 1 << 16;
  desc.num_experts = 8;
  desc.top_k = 2;
  PlanHandle plan =
      make<PlanHandle>(moec_plan_create, context.get(), static_cast<const moec_plan_desc*>(&desc),
                       static_cast<const moec_buffer*>(nullptr));
  const GpuStream stream;
  int* stop = nullptr;
  CHECK_CUDA(cudaHostAlloc(reinterpret_cast<void**>(&stop), sizeof(int), cudaHostAllocMapped));
  *stop = 0;
  CHECK_CUDA(occupy(1, stop, 300, stream));
  EXPECT_EQ(cudaStreamQuery(stream), cudaErrorNotReady);
  plan.reset();
  EXPECT_EQ(cudaStreamQuery(stream), cudaSuccess);
  stream.wait();
  cudaFreeHost(stop);
}

}  // namespace
}  // namespace moec::test
