// SPDX-License-Identifier: Apache-2.0
// A whole step in one CUDA graph: replayed with other data and other routings it gives what an
// eager step gives, byte for byte, and neither waits for the host nor allocates.
#include <gtest/gtest.h>

#include <set>
#include <thread>

#include "step.h"

namespace moec::test {
namespace {

struct Kind {
  const char* name;
  std::unique_ptr<Step> (*make)(const moec_context*, int32_t, int32_t);
  int32_t top_k;
};
class Graphs : public testing::TestWithParam<Kind> {
 protected:
  std::unique_ptr<Step> step(const Context& context) const {
    return GetParam().make(context.get(), GetParam().top_k, 0);
  }
};
INSTANTIATE_TEST_SUITE_P(
    Steps, Graphs,
    testing::Values(Kind{"experts_top1", experts_step, 1}, Kind{"experts_top2", experts_step, 2},
                    Kind{"adapted_top1", adapted_step, 1}, Kind{"adapted_top2", adapted_step, 2},
                    Kind{"coded_top1", coded_step, 1}, Kind{"coded_top2", coded_step, 2},
                    Kind{"coded_few_rows", coded_step_of_few_rows, 1},
                    Kind{"layer_top1", layer_step, 1}, Kind{"layer_top2", layer_step, 2}),
    [](const auto& param) { return param.param.name; });

class Graph {
 public:
  // Captured in the mode in which every call fails that waits or allocates outside the stream.
  // meanwhile: what another thread does.
  template <class Meanwhile>
  Graph(const Step& step, cudaStream_t stream, const Meanwhile& meanwhile) {
    CHECK_CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
    step.queue(stream);
    std::thread(meanwhile).join();
    CHECK_CUDA(cudaStreamEndCapture(stream, &graph_));
    CHECK_CUDA(cudaGraphInstantiate(&program_, graph_, 0));
  }
  Graph(const Step& step, cudaStream_t stream) : Graph(step, stream, [] {}) {}
  ~Graph() {
    cudaGraphExecDestroy(program_);
    cudaGraphDestroy(graph_);
  }
  Graph(const Graph&) = delete;
  void launch(cudaStream_t stream) const { CHECK_CUDA(cudaGraphLaunch(program_, stream)); }
  std::set<cudaGraphNodeType> node_types() const {
    size_t count = 0;
    CHECK_CUDA(cudaGraphGetNodes(graph_, nullptr, &count));
    std::vector<cudaGraphNode_t> nodes(count);
    CHECK_CUDA(cudaGraphGetNodes(graph_, nodes.data(), &count));
    std::set<cudaGraphNodeType> types;
    for (const cudaGraphNode_t node : nodes) {
      cudaGraphNodeType type;
      CHECK_CUDA(cudaGraphNodeGetType(node, &type));
      types.insert(type);
    }
    return types;
  }

 private:
  cudaGraph_t graph_ = nullptr;
  cudaGraphExec_t program_ = nullptr;
};

void run(const Step& step, const GpuStream& stream) {
  step.queue(stream);
  stream.wait();
}

// With the eager step given one input less (a routing of another seed) every replay differs.
TEST_P(Graphs, hundred_replays_with_other_routings_equal_eager_steps) {
  const Context captured_context = gpu_context(), eager_context = gpu_context();
  const auto captured = step(captured_context), eager = step(eager_context);
  const GpuStream stream, eager_stream;
  captured->fill(1, Routing::kRandom);
  run(*captured, stream);
  const Graph graph(*captured, stream);
  std::vector<uint8_t> last;
  for (uint64_t replay = 0; replay < 100; ++replay) {
    const Routing routing = replay == 50 ? Routing::kOneExpert : Routing::kRandom;
    captured->fill(100 + replay, routing);
    eager->fill(100 + replay, routing);
    graph.launch(stream);
    stream.wait();
    run(*eager, eager_stream);
    const std::vector<uint8_t> got = captured->outputs();
    ASSERT_EQ(got, eager->outputs()) << "replay " << replay;
    ASSERT_NE(got, last) << "replay " << replay << " did nothing new";
    last = got;
  }
}

TEST_P(Graphs, capture_and_replay_neither_wait_nor_allocate) {
  const Context context = gpu_context();
  const auto one = step(context);
  const GpuStream stream;
  one->fill(1, Routing::kRandom);
  run(*one, stream);
  const moec_stats before = stats_of(context.get());
  const Graph graph(*one, stream);
  for (int i = 0; i < 10; ++i) graph.launch(stream);
  stream.wait();
  const moec_stats after = stats_of(context.get());
  EXPECT_EQ(after.allocs, before.allocs);
  EXPECT_EQ(after.host_syncs, before.host_syncs);
  const std::set<cudaGraphNodeType> types = graph.node_types();
  EXPECT_FALSE(types.count(cudaGraphNodeTypeMemAlloc) || types.count(cudaGraphNodeTypeMemFree));
  EXPECT_FALSE(types.count(cudaGraphNodeTypeHost)) << "work on the host inside the graph";
  EXPECT_TRUE(types.count(cudaGraphNodeTypeKernel));
}

PlanHandle small_plan(const Context& context) {
  auto desc = sized<moec_plan_desc>();
  desc.max_tokens = 64;
  desc.num_experts = Step::kExperts;
  desc.top_k = 2;
  return make<PlanHandle>(moec_plan_create, context.get(),
                          static_cast<const moec_plan_desc*>(&desc),
                          static_cast<const moec_buffer*>(nullptr));
}

// Mutations noted: cudaDeviceSynchronize in a free, or allocating in the thread's own capture mode,
// ends the capture; scratch of a graph that is given back is not held any more; a header that is
// copied from the stack is another one when the graph runs.
TEST_P(Graphs, keep_their_memory_and_what_is_saved) {
  const Context context = gpu_context(), eager_context = gpu_context();
  const auto one = step(context), eager = step(eager_context);
  const GpuStream stream, other, eager_stream;
  one->fill(1, Routing::kRandom);
  run(*one, stream);
  PlanHandle freed = small_plan(context);
  std::unique_ptr<const Graph> graph;
  std::thread([&] {  // whose stack is gone when the graph runs
    graph = std::make_unique<Graph>(*one, stream, [&] {
      freed.reset();
      freed = small_plan(context);
      check(moec_context_reserve(context.get(), 1 << 20, static_cast<cudaStream_t>(other)));
    });
  })
      .join();
  check(moec_context_reserve(context.get(), 64 << 20, static_cast<cudaStream_t>(stream)));
  check(moec_context_trim(context.get()));
  EXPECT_GT(stats_of(context.get()).workspace_bytes, 0);
  one->poison();
  one->fill(2, Routing::kRandom);
  eager->fill(2, Routing::kRandom);
  graph->launch(stream);
  stream.wait();
  run(*eager, eager_stream);
  EXPECT_EQ(one->outputs(), eager->outputs());
  EXPECT_EQ(one->saved(), eager->saved());
}

TEST_P(Graphs, eager_steps_in_steady_state_neither_wait_nor_allocate) {
  const Context context = gpu_context();
  const auto one = step(context);
  const GpuStream stream;
  one->fill(1, Routing::kRandom);
  run(*one, stream);
  const moec_stats before = stats_of(context.get());
  for (uint64_t seed = 2; seed < 12; ++seed) {
    one->fill(seed, seed == 7 ? Routing::kOneExpert : Routing::kRandom);
    run(*one, stream);
  }
  const moec_stats after = stats_of(context.get());
  EXPECT_EQ(after.allocs, before.allocs);
  EXPECT_EQ(after.host_syncs, before.host_syncs);
  EXPECT_GT(after.kernel_launches, before.kernel_launches);
}

TEST_P(Graphs, a_cold_context_refuses_to_allocate_in_a_capture) {
  const Context context = gpu_context();
  const auto one = step(context);
  const GpuStream stream;
  one->fill(1, Routing::kRandom);
  CHECK_CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
  moec_status status = MOEC_OK;
  try {
    one->queue(stream);
  } catch (const Failure& failure) {
    status = failure.status;
  }
  EXPECT_EQ(status, MOEC_E_WOULD_ALLOC);
  EXPECT_EQ(moec_context_sync(context.get(), stream), MOEC_E_WOULD_SYNC);
  cudaGraph_t graph = nullptr;
  EXPECT_EQ(cudaStreamEndCapture(stream, &graph), cudaSuccess) << "the refusal broke the capture";
  cudaGraphDestroy(graph);
  run(*one, stream);  // and the context still works
}

}  // namespace
}  // namespace moec::test
