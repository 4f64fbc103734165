// SPDX-License-Identifier: Apache-2.0
// Expert choice: every local expert takes its `capacity` best tokens, ties to the lowest token.
// Scores [T,E] are read in tiles of 16 experts, one cache line a token. Scratch: a Cut per expert.
#include <new>

#include "backend/cpu/plan_parts.h"
#include "core/workspace.h"

namespace moec::cpu {
namespace {

constexpr int64_t kTileExperts = 16, kChunkTokens = 256;

struct ChoiceTile {
  const PlanSource& source;
  const PlanView& plan;
  int64_t begin, size;  // local experts [begin, begin + size)
  Cut* cuts;            // of the tile

  // body(t, lane, score) for every score that may be chosen, tokens ascending.
  template <class Body>
  void for_each(Body&& body) const {
    for (int64_t t = 0; t < plan.num_tokens; ++t) {
      if (source.token_mask && !source.token_mask[t]) continue;
      const float* const row = source.scores + t * plan.num_experts + plan.expert_begin + begin;
      for (int64_t lane = 0; lane < size; ++lane)
        if (math::is_selectable(row[lane])) body(t, lane, row[lane]);
    }
  }

  void find_cuts() const {
    int64_t eligible[kTileExperts] = {};
    for_each([&](int64_t, int64_t lane, float) { ++eligible[lane]; });
    for (int64_t lane = 0; lane < size; ++lane) {
      const int64_t taken = std::min(plan.capacity, eligible[lane]);
      plan.counts[begin + lane] = int32_t(taken);
      new (&cuts[lane]) Cut(taken);
    }
    for (int shift = 24; shift >= 0; shift -= 8) {
      int32_t histogram[kTileExperts][256] = {};
      for_each([&](int64_t, int64_t lane, float score) {
        const uint32_t key = Cut::key(score);
        if (cuts[lane].is_candidate(key, shift)) ++histogram[lane][key >> shift & 255];
      });
      for (int64_t lane = 0; lane < size; ++lane) cuts[lane].narrow(histogram[lane], shift);
    }
  }

  void put_rows() const {
    int32_t next[kTileExperts];
    std::copy_n(plan.group_offsets + begin, size, next);
    for_each([&](int64_t t, int64_t lane, float score) {
      if (next[lane] - plan.group_offsets[begin + lane] < plan.counts[begin + lane] &&
          cuts[lane].takes(Cut::key(score)))
        put_row(plan, next[lane]++, int32_t(t), -1, score);  // list_chunk sets the slot
    });
  }
};

// Rows of tokens [first, last), for each expert: body(row).
template <class Body>
void for_rows_of(const PlanView& plan, int64_t e, int64_t first, int64_t last, Body&& body) {
  const int32_t* const begin = plan.row_token + plan.group_offsets[e];
  const int32_t* const end = begin + plan.counts[e];
  for (const int32_t* at = std::lower_bound(begin, end, first); at < end && *at < last; ++at)
    body(int32_t(at - plan.row_token));
}

// token_offsets[t] = number of rows of token t.
void count_chunk(const PlanView& plan, int64_t first, int64_t last) {
  std::fill(plan.token_offsets + first, plan.token_offsets + last, 0);
  for (int64_t e = 0; e < plan.num_local; ++e)
    for_rows_of(plan, e, first, last,
                [&](int32_t row) { ++plan.token_offsets[plan.row_token[row]]; });
}

// token_offsets[t] is the end of token t's list; filling it from the last expert backwards makes it
// the start.
void list_chunk(const PlanView& plan, int64_t first, int64_t last) {
  const int32_t end = plan.token_offsets[last - 1];
  for (int64_t e = plan.num_local - 1; e >= 0; --e)
    for_rows_of(plan, e, first, last, [&](int32_t row) {
      plan.token_rows[--plan.token_offsets[plan.row_token[row]]] = row;
    });
  for (int64_t t = first; t < last; ++t) {
    const int32_t start = plan.token_offsets[t];
    const int32_t stop = t + 1 < last ? plan.token_offsets[t + 1] : end;
    for (int32_t i = start; i < stop; ++i) plan.row_slot[plan.token_rows[i]] = i - start;
  }
}

}  // namespace

uint64_t choice_scratch_bytes(int64_t num_local) {
  return round_up(uint64_t(num_local) * sizeof(Cut), kCacheLine);
}

void build_choice_plan(const Device& device, const PlanSource& source, const PlanView& plan) {
  const int64_t tiles = (plan.num_local + kTileExperts - 1) / kTileExperts;
  const auto tile = [&](int64_t i) {
    const int64_t begin = i * kTileExperts;
    return ChoiceTile{source, plan, begin, std::min(kTileExperts, plan.num_local - begin),
                      static_cast<Cut*>(plan.scratch) + begin};
  };
  device.pool.parallel_for(tiles, [&](int32_t, int64_t i) { tile(i).find_cuts(); });
  set_groups(plan);
  device.pool.parallel_for(tiles, [&](int32_t, int64_t i) { tile(i).put_rows(); });
  fill_padding(device, plan);

  const Chunks chunks(plan.num_tokens, kChunkTokens);
  device.pool.parallel_for(
      chunks.count, [&](int32_t, int64_t i) { count_chunk(plan, chunks.begin(i), chunks.end(i)); });
  int32_t total = 0;
  for (int64_t t = 0; t < plan.num_tokens; ++t)
    plan.token_offsets[t] = total += plan.token_offsets[t];
  plan.token_offsets[plan.num_tokens] = total;
  device.pool.parallel_for(
      chunks.count, [&](int32_t, int64_t i) { list_chunk(plan, chunks.begin(i), chunks.end(i)); });
  std::fill(plan.token_rows + total, plan.token_rows + plan.num_local * plan.capacity, -1);
}

}  // namespace moec::cpu
