// SPDX-License-Identifier: Apache-2.0
// Functions that queue work on the default stream take turns in windows, each round in another
// order. A window begins with calls that are not counted, half as many as those of the window: at
// the power limit the clock follows what a function draws only after a while, and what ran before
// it would decide.
#pragma once

#include <algorithm>
#include <chrono>
#include <functional>
#include <numeric>
#include <random>
#include <thread>
#include <vector>

#include "gpu/device_problem.cuh"

namespace moec::test {

struct Turn {
  std::function<void()> run;
  std::vector<float> ms = {};  // of a call, one of each round, sorted

  float median() const { return ms[ms.size() / 2]; }
};

class Windows {
 public:
  Windows() {
    CHECK_CUDA(cudaEventCreate(&start_));
    CHECK_CUDA(cudaEventCreate(&stop_));
  }
  // load_ms: of work before the first window.
  template <typename Turns>
  void measure(Turns& turns, float window_ms, int rounds, float load_ms = 0) {
    std::vector<int> calls;
    for (const Turn& turn : turns) {
      window(turn, 2);
      calls.push_back(std::max(1, int(window_ms / window(turn, 3))));
    }
    for (float spent = 0; spent < load_ms;) {
      for (size_t i = 0; i < calls.size(); ++i) spent += window(turns[i], calls[i]) * calls[i];
    }
    take_turns(turns, rounds, [&](int i) {
      window(turns[i], std::max(1, calls[i] / 2));
      return window(turns[i], calls[i]);
    });
  }

  // Single calls, each behind one that is not counted and a rest: the chip stays below its power
  // limit and at one clock.
  template <typename Turns>
  void measure_rested(Turns& turns, int rounds) {
    constexpr float kRest = 8;  // times as long as a call
    take_turns(turns, rounds, [&](int i) {
      window(turns[i], 1);
      const float ms = window(turns[i], 1);
      std::this_thread::sleep_for(std::chrono::duration<float, std::milli>(kRest * ms));
      return ms;
    });
  }

 private:
  // sample(i): the milliseconds of one of turn i.
  template <typename Turns, typename Sample>
  void take_turns(Turns& turns, int rounds, Sample sample) {
    std::vector<int> order(turns.size());
    std::iota(order.begin(), order.end(), 0);
    for (int round = 0; round < rounds; ++round) {
      std::shuffle(order.begin(), order.end(), random_);
      for (const int i : order) turns[i].ms.push_back(sample(i));
    }
    for (Turn& turn : turns) std::sort(turn.ms.begin(), turn.ms.end());
  }
  float window(const Turn& turn, int calls) {
    CHECK_CUDA(cudaEventRecord(start_));
    for (int i = 0; i < calls; ++i) turn.run();
    CHECK_CUDA(cudaEventRecord(stop_));
    CHECK_CUDA(cudaEventSynchronize(stop_));
    float ms = 0;
    CHECK_CUDA(cudaEventElapsedTime(&ms, start_, stop_));
    return ms / float(calls);
  }

  cudaEvent_t start_, stop_;
  std::mt19937 random_{1};
};

}  // namespace moec::test
