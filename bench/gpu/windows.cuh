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

#include "gpu/device_memory.h"

namespace moec::test {

struct Turn {
  std::function<void()> run;
  std::vector<float> ms = {}, clocks = {};  // of a call, one of each round, sorted

  float median() const { return middle(ms); }
  static float middle(const std::vector<float>& sorted) { return sorted[sorted.size() / 2]; }
};

// The clock counters of all multiprocessors, [SM].
constexpr int kMostSms = 1024;
__global__ void read_clocks(long long* at) {
  unsigned sm;
  asm volatile("mov.u32 %0, %%smid;" : "=r"(sm));
  if (threadIdx.x == 0 && sm < kMostSms) at[sm] = clock64();
}

// Clocks of the multiprocessors from begin() to end(), both queued on the default stream: their
// mean. The clock rate that the driver names is too high where power throttles.
class SmClocks {
 public:
  SmClocks() {
    CHECK_CUDA(cudaDeviceGetAttribute(&sms_, cudaDevAttrMultiProcessorCount, 0));
    CHECK_CUDA(
        cudaFuncSetAttribute(read_clocks, cudaFuncAttributeMaxDynamicSharedMemorySize, kWholeSm));
  }
  void begin() { read(begin_); }
  void end() { read(end_); }
  // Waits for both.
  double mean() const {
    const std::vector<long long> from = begin_.host(), to = end_.host();
    double sum = 0;
    int seen = 0;
    for (int sm = 0; sm < kMostSms; ++sm) {
      if (from[sm] == 0 || to[sm] == 0) continue;
      sum += double(to[sm] - from[sm]);
      ++seen;
    }
    return sum / std::max(1, seen);
  }

 private:
  static constexpr int kWholeSm = 200 << 10;  // bytes of shared memory: no room for a second CTA
  void read(DeviceArray<long long>& at) {
    CHECK_CUDA(cudaMemsetAsync(at.data(), 0, kMostSms * sizeof(long long)));
    read_clocks<<<sms_, 32, kWholeSm>>>(at.data());
    CHECK_CUDA(cudaGetLastError());
  }

  int sms_ = 0;
  DeviceArray<long long> begin_{kMostSms}, end_{kMostSms};
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
      calls.push_back(std::max(1, int(window_ms / window(turn, 3).ms)));
    }
    for (float spent = 0; spent < load_ms;) {
      for (size_t i = 0; i < calls.size(); ++i) spent += window(turns[i], calls[i]).ms * calls[i];
    }
    take_turns(turns, rounds, [&](int i) {
      window(turns[i], std::max(1, calls[i] / 2));
      return window(turns[i], calls[i]);
    });
  }

  // Single calls, each behind one that is not counted and a rest: the mean power stays far below
  // the limit.
  template <typename Turns>
  void measure_rested(Turns& turns, int rounds) {
    constexpr float kRest = 8;  // times as long as a call
    take_turns(turns, rounds, [&](int i) {
      window(turns[i], 1);
      const Sample sample = window(turns[i], 1);
      std::this_thread::sleep_for(std::chrono::duration<float, std::milli>(kRest * sample.ms));
      return sample;
    });
  }

 private:
  struct Sample {
    float ms, clocks;  // of a call
  };

  // sample(i): one of turn i.
  template <typename Turns, typename Take>
  void take_turns(Turns& turns, int rounds, Take sample) {
    std::vector<int> order(turns.size());
    std::iota(order.begin(), order.end(), 0);
    for (int round = 0; round < rounds; ++round) {
      std::shuffle(order.begin(), order.end(), random_);
      for (const int i : order) {
        const Sample taken = sample(i);
        turns[i].ms.push_back(taken.ms);
        turns[i].clocks.push_back(taken.clocks);
      }
    }
    for (Turn& turn : turns) {
      std::sort(turn.ms.begin(), turn.ms.end());
      std::sort(turn.clocks.begin(), turn.clocks.end());
    }
  }
  Sample window(const Turn& turn, int calls) {
    clocks_.begin();
    CHECK_CUDA(cudaEventRecord(start_));
    for (int i = 0; i < calls; ++i) turn.run();
    CHECK_CUDA(cudaEventRecord(stop_));
    clocks_.end();
    CHECK_CUDA(cudaEventSynchronize(stop_));
    float ms = 0;
    CHECK_CUDA(cudaEventElapsedTime(&ms, start_, stop_));
    return {ms / float(calls), float(clocks_.mean() / calls)};
  }

  SmClocks clocks_;
  cudaEvent_t start_, stop_;
  std::mt19937 random_{1};
};

}  // namespace moec::test
