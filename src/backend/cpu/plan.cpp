// SPDX-License-Identifier: Apache-2.0
// Plans from top-k ids or from a routing map: a stable counting sort of the assignments by expert.
// Scratch: histogram [kMax chunks][El], first list entry of each expert [El+1], and (drop by
// weight) the assignments of each expert in token order [T,K].
#include "backend/cpu/plan_parts.h"
#include "backend/cpu/score_row.h"
#include "core/error.h"
#include "core/workspace.h"

namespace moec::cpu {
namespace {

constexpr int64_t kChunkAssignments = 2048;  // least number per parallel piece
constexpr int64_t kFillRows = 4096;

static_assert(Chunks::kMax + 2 <= kPlanCounts);
uint64_t sort_scratch_bytes(int64_t num_local) {
  return round_up(uint64_t((Chunks::kMax + 1) * num_local + 1) * sizeof(int32_t), kCacheLine);
}

bool is_routed(const Array& map, int64_t index) {
  return map.dtype == MOEC_I32 ? static_cast<const int32_t*>(map.data)[index] != 0
                               : static_cast<const uint8_t*>(map.data)[index] != 0;
}

class TopkPlan {
 public:
  TopkPlan(const Device& device, const PlanSource& source, const PlanView& plan)
      : device_(device),
        source_(source),
        plan_(plan),
        columns_(int64_t(plan.num_experts) + plan.num_zero),
        by_weight_(plan.drop == MOEC_DROP_BY_WEIGHT),
        capacity_(plan.drop == MOEC_DROP_NONE ? INT64_MAX : plan.kept_rows()),
        chunks_(plan.num_tokens, std::max<int64_t>(1, kChunkAssignments / plan.top_k)),
        histogram_(static_cast<int32_t*>(plan.scratch)),
        list_offsets_(histogram_ + Chunks::kMax * plan.num_local),
        list_(reinterpret_cast<int32_t*>(static_cast<char*>(plan.scratch) +
                                         sort_scratch_bytes(plan.num_local))) {}

  void build() {
    check();
    device_.pool.parallel_for(chunks_.count, [&](int32_t, int64_t chunk) {
      for (int64_t t = chunks_.begin(chunk); t < chunks_.end(chunk); ++t) take_token(t);
      count(chunk);
    });
    rank_chunks();
    device_.pool.parallel_for(chunks_.count, [&](int32_t, int64_t chunk) { place(chunk); });
    if (by_weight_)
      device_.pool.parallel_for(plan_.num_local, [&](int32_t, int64_t e) { keep_heaviest(e); });
    fill_padding(device_, plan_);
  }

 private:
  int64_t first(int64_t chunk) const { return chunks_.begin(chunk) * plan_.top_k; }
  int64_t last(int64_t chunk) const { return chunks_.end(chunk) * plan_.top_k; }
  uint32_t local(int32_t id) const { return uint32_t(id) - uint32_t(plan_.expert_begin); }
  bool is_local(int32_t id) const { return local(id) < uint32_t(plan_.num_local); }

  // Refuse before anything is written.
  void check() const {
    if (source_.routing_map) return check_map();
    if (!source_.check || source_.rule.run) return;
    for (int64_t a = 0; a < plan_.num_tokens * plan_.top_k; ++a) {
      const int64_t id = load_id(source_.expert_ids, a);
      MOEC_REQUIRE(id >= -1 && id < columns_, MOEC_E_INVALID_ARG,
                   "expert_ids[%lld,%lld] is %lld; ids are -1 or in [0, %lld)",
                   static_cast<long long>(a / plan_.top_k), static_cast<long long>(a % plan_.top_k),
                   static_cast<long long>(id), static_cast<long long>(columns_));
    }
  }
  void check_map() const {
    device_.pool.parallel_for(chunks_.count, [&](int32_t, int64_t chunk) {
      for (int64_t t = chunks_.begin(chunk); t < chunks_.end(chunk); ++t) {
        int64_t routed = 0;
        for (int64_t e = 0; e < plan_.num_experts; ++e)
          routed += is_routed(source_.routing_map, t * plan_.num_experts + e);
        MOEC_REQUIRE(routed <= plan_.top_k, MOEC_E_OVERFLOW,
                     "routing_map routes token %lld to %lld experts; at most top_k = %d",
                     static_cast<long long>(t), static_cast<long long>(routed), plan_.top_k);
      }
    });
  }

  // Slots of one token into the plan: valid ids, -1 for the rest.
  void take_token(int64_t t) const {
    int32_t* const ids = plan_.expert_ids + t * plan_.top_k;
    float* const weights = plan_.routing_weights + t * plan_.top_k;
    if (source_.routing_map) return take_map_row(t, ids, weights);
    for (int64_t k = 0; k < plan_.top_k; ++k) {
      const int64_t a = t * plan_.top_k + k;
      ids[k] = source_.rule.run ? source_.rule.id(a)
                                : math::valid_id(load_id(source_.expert_ids, a), columns_);
      weights[k] = source_.routing_weights ? source_.routing_weights[a] : 1.0f;
    }
  }
  void take_map_row(int64_t t, int32_t* ids, float* weights) const {
    int64_t slot = 0;
    for (int64_t e = 0; e < plan_.num_experts; ++e) {
      const int64_t index = t * plan_.num_experts + e;
      if (!is_routed(source_.routing_map, index)) continue;
      ids[slot] = int32_t(e);
      weights[slot++] = source_.probs ? source_.probs[index] : 1.0f;
    }
    std::fill(ids + slot, ids + plan_.top_k, -1);
    std::fill(weights + slot, weights + plan_.top_k, 0.0f);
  }

  void count(int64_t chunk) const {
    int32_t* const counts = histogram_ + chunk * plan_.num_local;
    std::fill_n(counts, plan_.num_local, 0);
    for (int64_t a = first(chunk); a < last(chunk); ++a)
      if (is_local(plan_.expert_ids[a])) ++counts[local(plan_.expert_ids[a])];
  }

  // Histogram -> rank of the chunk's first assignment of each expert; counts, groups and totals.
  void rank_chunks() const {
    std::fill_n(plan_.counts, plan_.num_local, 0);
    for (int64_t chunk = 0; chunk < chunks_.count; ++chunk) {
      int32_t* const counts = histogram_ + chunk * plan_.num_local;
      for (int64_t e = 0; e < plan_.num_local; ++e) {
        const int32_t before = plan_.counts[e];
        plan_.counts[e] += counts[e];
        counts[e] = before;
      }
    }
    int64_t dropped = 0;
    list_offsets_[0] = 0;
    for (int64_t e = 0; e < plan_.num_local; ++e) {
      const int32_t routed = plan_.counts[e];
      list_offsets_[e + 1] = list_offsets_[e] + routed;
      plan_.counts[e] = int32_t(std::min<int64_t>(routed, capacity_));
      dropped += routed - plan_.counts[e];
    }
    set_groups(plan_);
    plan_.totals[2] = int32_t(dropped);
  }

  void place(int64_t chunk) const {
    int32_t* const ranks = histogram_ + chunk * plan_.num_local;
    for (int64_t t = chunks_.begin(chunk), a = first(chunk); t < chunks_.end(chunk); ++t) {
      for (int32_t k = 0; k < plan_.top_k; ++k, ++a) {
        plan_.assignment_row[a] = -1;
        if (!is_local(plan_.expert_ids[a])) continue;
        const uint32_t e = local(plan_.expert_ids[a]);
        const int32_t rank = ranks[e]++;
        if (by_weight_)
          list_[list_offsets_[e] + rank] = int32_t(a);
        else if (rank < capacity_)
          put(e, rank, a, int32_t(t), k);
      }
    }
  }
  void put(int64_t e, int64_t rank, int64_t a, int32_t token, int32_t slot) const {
    const int64_t row = plan_.group_offsets[e] + rank;
    plan_.assignment_row[a] = int32_t(row);
    put_row(plan_, row, token, slot, plan_.routing_weights[a]);
  }

  // The heaviest `capacity` assignments of one expert; equal weights: the first in token order.
  void keep_heaviest(int64_t e) const {
    const int32_t* const begin = list_ + list_offsets_[e];
    const int32_t* const end = list_ + list_offsets_[e + 1];
    Cut cut(plan_.counts[e]);
    if (end - begin > plan_.counts[e] && plan_.counts[e] > 0) {
      for (int shift = 24; shift >= 0; shift -= 8) {
        int32_t histogram[256] = {};
        for (const int32_t* a = begin; a < end; ++a) {
          const uint32_t key = Cut::key(plan_.routing_weights[*a]);
          if (cut.is_candidate(key, shift)) ++histogram[key >> shift & 255];
        }
        cut.narrow(histogram, shift);
      }
    }
    int32_t rank = 0;
    for (const int32_t* a = begin; a < end && rank < plan_.counts[e]; ++a)
      if (end - begin == plan_.counts[e] || cut.takes(Cut::key(plan_.routing_weights[*a])))
        put(e, rank++, *a, *a / plan_.top_k, *a % plan_.top_k);
  }

  const Device& device_;
  const PlanSource& source_;
  const PlanView& plan_;
  const int64_t columns_;
  const bool by_weight_;
  const int64_t capacity_;
  const Chunks chunks_;  // of tokens
  int32_t *const histogram_, *const list_offsets_, *const list_;
};

// Before anything is written. Of the others' plans no token has more rows than there are experts.
void check_row_id_map(const PlanView& plan) {
  if (plan.top_k <= plan.num_experts) return;
  for (int64_t t = 0; t < plan.num_tokens; ++t) {
    const int32_t* const rows = plan.assignment_row + t * plan.top_k;
    const int64_t used = std::count_if(rows, rows + plan.top_k, [](int32_t r) { return r >= 0; });
    MOEC_REQUIRE(used <= plan.num_experts, MOEC_E_UNSUPPORTED,
                 "token %lld has more rows than the %lld experts that a row id map holds",
                 static_cast<long long>(t), static_cast<long long>(plan.num_experts));
  }
}

// Rows of one token in descending order, the experts they belong to, and their number.
void export_row_id_map(const PlanView& plan, int64_t t, int32_t* to) {
  const int64_t experts = plan.num_experts;
  const bool choice = plan.kind == MOEC_PLAN_EXPERT_CHOICE;
  const int32_t* const rows =
      choice ? plan.token_rows + plan.token_offsets[t] : plan.assignment_row + t * plan.top_k;
  const int64_t entries = choice ? plan.token_offsets[t + 1] - plan.token_offsets[t] : plan.top_k;
  std::fill_n(to, 2 * experts + 1, -1);
  int32_t used = 0;
  for (int64_t i = 0; i < entries; ++i) {
    if (rows[i] < 0) continue;
    int32_t at = used++;
    for (; at > 0 && to[at - 1] < rows[i]; --at) to[at] = to[at - 1];
    to[at] = rows[i];
  }
  for (int32_t i = 0; i < used; ++i) {
    const int32_t *const begin = plan.group_offsets, *const end = begin + plan.num_local + 1;
    const int64_t group = std::upper_bound(begin, end, to[i]) - begin - 1;
    to[experts + i] = plan.expert_begin + int32_t(group);
  }
  to[2 * experts] = used;
}

}  // namespace

void set_groups(const PlanView& plan) {
  int64_t rows = 0, routed = 0, largest = 0;
  for (int64_t e = 0; e < plan.num_local; ++e) {
    const int32_t count = plan.counts[e];
    plan.group_offsets[e] = int32_t(rows);
    rows += int64_t(round_up(uint64_t(count), uint64_t(plan.align)));
    routed += count;
    largest = std::max<int64_t>(largest, count);
  }
  plan.group_offsets[plan.num_local] = int32_t(rows);
  const int64_t totals[4] = {routed, rows, 0, largest};
  for (int i = 0; i < 4; ++i) plan.totals[i] = int32_t(totals[i]);
}

void fill_padding(const Device& device, const PlanView& plan) {
  const Chunks chunks(plan.max_rows, kFillRows);
  device.pool.parallel_for(chunks.count, [&](int32_t, int64_t chunk) {
    const int64_t begin = chunks.begin(chunk), end = chunks.end(chunk);
    const int32_t* const offsets = plan.group_offsets;
    const auto fill = [&](int64_t from, int64_t to) {
      for (int64_t row = std::max(from, begin); row < std::min(to, end); ++row)
        put_row(plan, row, -1, -1, 0.0f);
    };
    int64_t e = std::upper_bound(offsets, offsets + plan.num_local, begin) - offsets - 1;
    for (e = std::max<int64_t>(e, 0); e < plan.num_local && offsets[e] < end; ++e)
      fill(offsets[e] + plan.counts[e], offsets[e + 1]);
    fill(offsets[plan.num_local], plan.max_rows);
  });
}

moec_size plan_scratch(const Device&, const moec_plan_desc& desc) {
  const int64_t num_local =
      desc.expert_end > desc.expert_begin ? desc.expert_end - desc.expert_begin : desc.num_experts;
  if (desc.kind == MOEC_PLAN_EXPERT_CHOICE) return {choice_scratch_bytes(num_local), 0};
  const bool by_weight = desc.drop == MOEC_DROP_BY_WEIGHT;
  return {sort_scratch_bytes(num_local), by_weight ? uint64_t(desc.top_k) * sizeof(int32_t) : 0};
}

void build_plan(const Device& device, const PlanSource& source, const PlanView& plan) {
  if (plan.kind == MOEC_PLAN_EXPERT_CHOICE) return build_choice_plan(device, source, plan);
  TopkPlan(device, source, plan).build();
}

void export_map(const Device& device, const PlanView& plan, int32_t field, int32_t* to) {
  if (field == MOEC_PLAN_ROW_ID_MAP) check_row_id_map(plan);
  const Chunks chunks(plan.num_tokens, kChunkAssignments / std::max(plan.top_k, 1) + 1);
  device.pool.parallel_for(chunks.count, [&](int32_t, int64_t chunk) {
    for (int64_t t = chunks.begin(chunk); t < chunks.end(chunk); ++t) {
      if (field == MOEC_PLAN_ROW_ID_MAP) {
        export_row_id_map(plan, t, to + t * (2 * int64_t(plan.num_experts) + 1));
        continue;
      }
      for (int64_t k = 0; k < plan.top_k; ++k)  // INDEX_MAP: slot-major
        to[k * plan.num_tokens + t] = plan.assignment_row[t * plan.top_k + k];
    }
  });
}

}  // namespace moec::cpu
