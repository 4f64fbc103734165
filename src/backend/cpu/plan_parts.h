// SPDX-License-Identifier: Apache-2.0
// What building a plan from top-k ids and by expert choice share.
#pragma once

#include <algorithm>
#include <cstdint>

#include "backend/cpu/ops.h"
#include "backend/cpu/vectorised.h"
#include "math/router.h"

namespace moec::cpu {

// counts -> group_offsets, and all totals but the dropped rows, which are 0.
void set_groups(const PlanView& plan);
// -1, -1, 0 in every row that is not routed, up to max_rows.
void fill_padding(const Device& device, const PlanView& plan);

// Expert choice (plan_choice.cpp): scratch bytes, and the whole plan.
uint64_t choice_scratch_bytes(int64_t num_local);
void build_choice_plan(const Device& device, const PlanSource& source, const PlanView& plan);

inline void put_row(const PlanView& plan, int64_t row, int32_t token, int32_t slot, float weight) {
  plan.row_token[row] = token;
  plan.row_slot[row] = slot;
  plan.row_weight[row] = weight;
}

// The `count` best of n scored items: those above the threshold and the first `ties` equal to it.
// Found one byte at a time from histograms (radix select): no copy, no sorting, exact.
class Cut {
 public:
  explicit Cut(int64_t count) : ties_(count) {}

  static uint32_t key(float score) { return math::choice_key(score); }
  bool is_candidate(uint32_t key, int shift) const {  // agrees with all bytes above `shift`
    return shift >= 24 || key >> (shift + 8) == threshold_ >> (shift + 8);
  }
  // histogram: candidates by their byte at `shift` (24, 16, 8, 0).
  void narrow(const int32_t* histogram, int shift) {
    uint32_t byte = 255;
    for (; byte > 0 && histogram[byte] < ties_; --byte) ties_ -= histogram[byte];
    threshold_ |= byte << shift;
  }
  // Whether the next item in order is taken.
  bool takes(uint32_t key) {
    return key > threshold_ || (key == threshold_ && ties_ > 0 && ties_-- > 0);
  }

 private:
  uint32_t threshold_ = 0;
  int64_t ties_;
};

}  // namespace moec::cpu
