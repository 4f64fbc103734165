// SPDX-License-Identifier: Apache-2.0
// A plan in memory of its own, every byte poisoned before it is built.
#pragma once

#include <cstdint>
#include <vector>

#include "oracle/moe_oracle.h"
#include "unit/cpu_device.h"

namespace moec::test {

struct PlanCase {
  int tokens = 40, experts = 8, zero = 0, top_k = 3;
  int begin = 0, end = 0, align = 1;
  uint32_t drop = MOEC_DROP_NONE, kind = MOEC_PLAN_TOPK;
  int64_t capacity = 0;

  int local() const { return (end == 0 ? experts : end) - begin; }
  int64_t max_rows() const {
    const auto padded = [this](int64_t n) {
      return int64_t(round_up(uint64_t(n), uint64_t(align)));
    };
    if (kind == MOEC_PLAN_EXPERT_CHOICE) return local() * padded(capacity);
    return padded(int64_t(tokens) * top_k + int64_t(local()) * (align - 1));
  }
  moec_plan_desc desc() const {
    moec_plan_desc d = {};
    d.max_tokens = tokens, d.num_experts = experts, d.num_zero_experts = zero, d.top_k = top_k;
    d.kind = kind, d.expert_begin = begin, d.expert_end = begin + local(), d.align = align;
    d.drop = drop, d.capacity = capacity;
    return d;
  }
  oracle::Config config() const {
    oracle::Config c;
    c.router.num_experts = experts, c.router.num_zero_experts = zero, c.router.top_k = top_k;
    c.plan.expert_begin = begin, c.plan.expert_end = end, c.plan.align = align;
    c.plan.drop = static_cast<oracle::Drop>(drop), c.plan.capacity = capacity;
    return c;
  }
};

struct PlanMemory {
  std::vector<int32_t> counts, group_offsets, row_token, row_slot, assignment_row, expert_ids,
      totals, token_offsets, token_rows;
  std::vector<float> row_weight, weights;
  PlanView view;

  PlanMemory(const PlanCase& c, const cpu::Device& device) {
    const auto T = size_t(c.tokens), K = size_t(c.top_k), L = size_t(c.local());
    const auto P = size_t(c.max_rows());
    constexpr int32_t kPoison = -77;
    view.num_tokens = c.tokens, view.max_rows = c.max_rows(), view.capacity = c.capacity;
    view.num_experts = c.experts, view.num_zero = c.zero, view.top_k = c.top_k;
    view.expert_begin = c.begin, view.num_local = c.local(), view.align = c.align;
    view.drop = c.drop, view.kind = c.kind;
    const bool choice = c.kind == MOEC_PLAN_EXPERT_CHOICE;
    const auto give = [](auto& all, size_t count, auto poison) {
      all.assign(count, poison);
      return all.data();
    };
    view.counts = give(counts, L, kPoison);
    view.group_offsets = give(group_offsets, L + 1, kPoison);
    view.row_token = give(row_token, P, kPoison);
    view.row_slot = give(row_slot, P, kPoison);
    view.row_weight = give(row_weight, P, -77.0f);
    view.assignment_row = give(assignment_row, T * K, kPoison);
    view.expert_ids = give(expert_ids, T * K, kPoison);
    view.routing_weights = give(weights, T * K, -77.0f);
    view.totals = give(totals, 4, kPoison);
    view.token_offsets = give(token_offsets, choice ? T + 1 : 0, kPoison);
    view.token_rows = give(token_rows, choice ? L * size_t(c.capacity) : 0, kPoison);
    const moec_size bytes = cpu::plan_scratch(device, c.desc());
    scratch_.resize(bytes_for(bytes, c.tokens) / 8 + 8 + 1, kScratchEnd);
    const auto address = reinterpret_cast<uintptr_t>(scratch_.data());
    scratch_used_ = (round_up(address, kCacheLine) - address + bytes_for(bytes, c.tokens) + 7) / 8;
    view.scratch = reinterpret_cast<void*>(round_up(address, kCacheLine));
  }
  // Nothing behind the stated bytes was touched.
  bool scratch_is_exact() const { return scratch_[scratch_used_] == kScratchEnd; }
  bool operator==(const PlanMemory& o) const {
    return counts == o.counts && group_offsets == o.group_offsets && row_token == o.row_token &&
           row_slot == o.row_slot && assignment_row == o.assignment_row && totals == o.totals &&
           expert_ids == o.expert_ids && token_offsets == o.token_offsets &&
           token_rows == o.token_rows && row_weight == o.row_weight && weights == o.weights;
  }

 private:
  static constexpr uint64_t kScratchEnd = 0x5a5a5a5a5a5a5a5au;
  std::vector<uint64_t> scratch_;
  size_t scratch_used_ = 0;
};

}  // namespace moec::test
