// SPDX-License-Identifier: Apache-2.0
// A training step of all ranks of an ep, eager and in graphs: one graph of all ranks whose streams
// wait for each other, or one for each rank where they meet on the device.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>

#include "gpu/ep_board.h"

namespace moec::test {

class RankSteps {
 public:
  RankSteps(DeviceBoard& board, int top_k, uint32_t scheme, int64_t pair_rows = 0)
      : board_(board), ranks_(board.size()), scheme_(scheme) {
    parts_.resize(static_cast<size_t>(ranks_));
    run([&](int r) {
      Part& part = parts_[static_cast<size_t>(r)];
      part.rank = std::make_unique<Rank>(board, r);
      auto desc = sized<moec_ep_desc>();
      desc.hidden = Step::kHidden;
      desc.max_tokens = Step::kTokens;
      desc.num_experts = Step::kExperts;
      desc.top_k = top_k;
      desc.scheme = scheme;
      desc.pair_rows = pair_rows;
      desc.timeout_ms = 6000;
      desc.dtype = MOEC_BF16;
      std::vector<int32_t> begin = {0};  // unequal where there are experts enough
      for (int next = 1; next < ranks_; ++next)
        begin.push_back(std::min(2 + next, Step::kExperts - ranks_ + next));
      begin.push_back(Step::kExperts);
      desc.expert_begin = begin.data();
      part.ep = make<Ep>(moec_ep_create, part.rank->comm.get(), &desc);
      part.step = ep_layer_step(part.rank->context.get(), top_k, part.ep.get(), test_device().id);
      part.step->take_workspace();
      check(moec_context_reserve(part.rank->context.get(), uint64_t{16} << 20, stream(r)));
    });
  }
  void fill(uint64_t seed, Routing routing) {
    run([&](int r) { step(r).fill(seed * 10 + static_cast<uint64_t>(r), routing); });
  }
  void queue() {
    run([&](int r) { step(r).queue(stream(r)); });
  }
  void wait() const {
    for (int r = 0; r < ranks_; ++r) CHECK_CUDA(cudaStreamSynchronize(stream(r)));
  }
  std::vector<cudaGraphExec_t> capture() {
    if (scheme_ != MOEC_EP_PEER) return {capture_all()};
    std::vector<cudaGraphExec_t> programs(static_cast<size_t>(ranks_));
    run([&](int r) {
      CHECK_CUDA(cudaStreamBeginCapture(stream(r), cudaStreamCaptureModeThreadLocal));
      step(r).queue(stream(r));
      cudaGraph_t graph;
      CHECK_CUDA(cudaStreamEndCapture(stream(r), &graph));
      CHECK_CUDA(cudaGraphInstantiate(&programs[static_cast<size_t>(r)], graph, 0));
      cudaGraphDestroy(graph);
    });
    return programs;
  }
  void replay(const std::vector<cudaGraphExec_t>& programs) {
    run([&](int r) {
      const auto i = static_cast<size_t>(r);
      if (i < programs.size()) CHECK_CUDA(cudaGraphLaunch(programs[i], stream(r)));
    });
    wait();
  }
  std::vector<uint8_t> outputs() const {
    std::vector<uint8_t> all;
    for (const Part& part : parts_) {
      const std::vector<uint8_t> own = part.step->outputs();
      all.insert(all.end(), own.begin(), own.end());
    }
    return all;
  }
  moec_stats stats(int r) const { return stats_of(parts_[size_t(r)].rank->context.get()); }
  moec_ep_state state(int r) const {
    auto state = sized<moec_ep_state>();
    check(moec_ep_poll(parts_[size_t(r)].ep.get(), &state));
    return state;
  }
  cudaStream_t stream(int r) const { return static_cast<cudaStream_t>(board_.stream(r)); }
  int size() const { return ranks_; }

 private:
  struct Part {  // the step ends before the ep
    std::unique_ptr<Rank> rank;
    Ep ep;
    std::unique_ptr<Step> step;
  };
  Step& step(int r) const { return *parts_[static_cast<size_t>(r)].step; }
  // One graph: the streams of the others join the capture of the first, and end in it.
  cudaGraphExec_t capture_all() {
    const auto make_event = [&](int r) {
      cudaEvent_t event;
      board_.enter(r);
      CHECK_CUDA(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
      return event;
    };
    std::vector<cudaEvent_t> joins;
    for (int r = 1; r < ranks_; ++r) joins.push_back(make_event(r));
    const cudaEvent_t fork = make_event(0);
    CHECK_CUDA(cudaStreamBeginCapture(stream(0), cudaStreamCaptureModeRelaxed));
    CHECK_CUDA(cudaEventRecord(fork, stream(0)));
    for (int r = 1; r < ranks_; ++r) CHECK_CUDA(cudaStreamWaitEvent(stream(r), fork, 0));
    queue();
    for (int r = 1; r < ranks_; ++r) {
      const cudaEvent_t join = joins[static_cast<size_t>(r) - 1];
      CHECK_CUDA(cudaEventRecord(join, stream(r)));
      CHECK_CUDA(cudaStreamWaitEvent(stream(0), join, 0));
    }
    cudaGraph_t graph;
    cudaGraphExec_t program;
    CHECK_CUDA(cudaStreamEndCapture(stream(0), &graph));
    CHECK_CUDA(cudaGraphInstantiate(&program, graph, 0));
    cudaGraphDestroy(graph);
    cudaEventDestroy(fork);
    for (const cudaEvent_t join : joins) cudaEventDestroy(join);
    return program;
  }
  // Peers meet on the device, where all have to come: they take no turns.
  void run(const std::function<void(int)>& body) {
    const auto enter = [&](int r) {
      board_.enter(r);
      body(r);
    };
    for (const std::string& error :
         scheme_ == MOEC_EP_PEER ? run_ranks(ranks_, enter) : board_.in_turns(body))
      ASSERT_EQ(error, "");
  }

  DeviceBoard& board_;
  const int ranks_;
  const uint32_t scheme_;
  std::vector<Part> parts_;
};

}  // namespace moec::test
