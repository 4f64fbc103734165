// SPDX-License-Identifier: Apache-2.0
#include "ep/progress.h"

namespace moec::ep {

void Progress::set_memory(uint64_t* counts, Shown* shown) {
  counts_ = counts;
  shown_ = shown;
}

// What has begun is read first: steps that begin and end meanwhile look ended.
uint64_t Progress::pending(Late& late) const {
  uint64_t begun[kSteps], ended[kSteps], waiting[kSteps];
  for (int i = 0; i < kSteps; ++i) begun[i] = shown_[i].begun + queued_[i];
  for (int i = 0; i < kSteps; ++i) {
    ended[i] = shown_[i].ended;
    waiting[i] = begun[i] > ended[i] ? begun[i] - ended[i] : 0;
  }
  const bool combines =
      waiting[kCombine] && (!waiting[kDispatch] || ended[kDispatch] > ended[kCombine]);
  late = {combines ? kCombine : kDispatch, waiting[kDispatch] + waiting[kCombine], ended[kDispatch],
          ended[kCombine]};
  return late.queued;
}

void Progress::queue(Step step, bool is_captured, Clock::time_point now) {
  if (!is_kept_ || is_captured) return;
  const std::lock_guard lock(mutex_);
  Late late;
  if (!pending(late)) {
    ended_ = late.dispatches + late.combines;
    since_ = now;
  }
  ++queued_[step];
}

void Progress::take_back(Step step) {
  if (!is_kept_) return;
  const std::lock_guard lock(mutex_);
  --queued_[step];
}

bool Progress::is_late(Late& late, Clock::time_point now) const {
  if (!is_kept_) return false;
  const std::lock_guard lock(mutex_);
  const bool waits = pending(late), moves = late.dispatches + late.combines != ended_;
  if (waits && !moves) return now - since_ > timeout_;
  ended_ = late.dispatches + late.combines;
  since_ = now;
  return false;
}

}  // namespace moec::ep
