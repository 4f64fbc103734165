// SPDX-License-Identifier: Apache-2.0
// What has become of the dispatches and combines of an ep whose callbacks queue. Nobody waits for
// them, so that a rank that died shows only in this: calls are queued, and none ends any more.
#pragma once

#include <chrono>
#include <mutex>

#include "backend/rank_steps.h"

namespace moec::ep {

class Progress {
 public:
  using Clock = std::chrono::steady_clock;
  enum Step { kDispatch, kCombine, kSteps };
  struct Shown {  // of one step, in memory that host and device reach
    volatile uint64_t begun, ended;
  };
  static constexpr uint64_t kCounts = 2 * kSteps;  // of the device: what is shown, once more

  Progress(bool is_kept, uint32_t timeout_ms) : is_kept_(is_kept), timeout_(timeout_ms) {}
  void set_memory(uint64_t* counts, Shown* shown);

  // What the first kernel of a step counts: replays of a graph, which no host sees begin.
  CountUp begun(Step step, bool is_captured) const {
    return is_kept_ && is_captured ? CountUp{counts_ + step, &shown_[step].begun} : CountUp{};
  }
  // And the first one behind its collectives.
  CountUp ended(Step step) const {
    return is_kept_ ? CountUp{counts_ + kSteps + step, &shown_[step].ended} : CountUp{};
  }
  // A step that is queued now, and one that failed after this.
  void queue(Step step, bool is_captured, Clock::time_point now = Clock::now());
  void take_back(Step step);

  struct Late {
    Step step;                              // that waits for another rank
    uint64_t queued, dispatches, combines;  // steps that have not ended, and those that have
  };
  // Whether steps are queued and none has ended for the timeout. The time begins when the first of
  // them is queued and when one ends; of replays when this is called first.
  bool is_late(Late& late, Clock::time_point now = Clock::now()) const;

 private:
  uint64_t pending(Late& late) const;

  const bool is_kept_;
  const std::chrono::milliseconds timeout_;
  uint64_t* counts_ = nullptr;
  Shown* shown_ = nullptr;
  mutable std::mutex mutex_;  // of all below
  uint64_t queued_[kSteps] = {};
  mutable uint64_t ended_ = 0;  // when `since_` was set
  mutable Clock::time_point since_ = {};
};

}  // namespace moec::ep
