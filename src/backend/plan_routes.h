// SPDX-License-Identifier: Apache-2.0
// Which token goes to which rank, and to which place of the outbox, where not all go to all.
//
//   a token visits rank r  once, where one of its ids is in [expert_begin[r], expert_begin[r + 1])
//   a rank keeps           its first `most` visits; by weight the heaviest: of the largest sums of
//                          weights there, added in slot order; NaN first; of equals the first
//   a place                visits that are kept, in token order, from the rank's first place on
#pragma once

#include "backend/args.h"
#include "core/dtype.h"

namespace moec {

// The rank whose experts have an id; -1: it is none. A step has expert_begin [N+1], num_ranks and
// num_experts().
template <class Step>
MOEC_HD int32_t owner_of(const Step& step, int64_t id) {
  if (id < 0 || id >= step.num_experts()) return -1;
  int32_t low = 0, high = step.num_ranks;  // expert_begin[low] <= id < expert_begin[high]
  while (high - low > 1) {
    const int32_t middle = (low + high) / 2;
    (step.expert_begin[middle] <= id ? low : high) = middle;
  }
  return low;
}

// The places of each token from those of its slots: each once, ascending. What is read depends on
// nothing that was written.
struct IndexSums {
  int64_t num_tokens;
  int32_t top_k, width;     // width: min(K, N)
  const int32_t* slot_row;  // [T,K] place of the partial row that slot k is in, or -1
  int32_t* sum_index;  // [T,width] places of the partial rows of a token, by rank; -1 ends them

  MOEC_HD void operator()(int64_t t) const {
    int32_t last = -1;
    for (int32_t i = 0; i < width; ++i) {
      int32_t next = INT32_MAX;
      for (int32_t k = 0; k < top_k; ++k) {
        const int32_t place = slot_row[t * top_k + k];
        if (place > last && place < next) next = place;
      }
      sum_index[t * width + i] = next == INT32_MAX ? -1 : next;
      last = next;
    }
  }
};

// N ranks, T tokens of this one, K top-k. Each backend has its own loop of it.
struct PlanRoutes {
  int64_t num_tokens;
  int32_t top_k, num_ranks;
  Array expert_ids;              // [T,K] i32|i64
  const float* routing_weights;  // [T,K] or null = 1
  const int32_t* expert_begin;   // [N+1]
  int64_t stride;                // from a rank's first place to the next rank's; 0: its visits
  int64_t most;                  // visits that a rank keeps
  bool by_weight;
  int32_t* wanted;     // out [N] visits
  int32_t* token;      // out [places] whose it is, or -1
  int32_t* slot_row;   // out [T,K] place of the visit of slot k, or -1
  int32_t* sum_index;  // out [T,width] of IndexSums
  int32_t* counts;     // room [count_words()]
  void* keys;          // room [key_bytes()], by weight

  // Of ranks and tokens.
  static constexpr int64_t kBlock = 512;  // tokens that are counted together
  MOEC_HD static int64_t blocks(int64_t T) { return T > kBlock ? (T + kBlock - 1) / kBlock : 1; }
  // Two numbers of a block, and two of a rank.
  static uint64_t count_words(int64_t N, int64_t T) { return uint64_t(2 * N * (blocks(T) + 1)); }
  static uint64_t key_bytes(int64_t N, int64_t T) { return uint64_t(4 * T * (N > 2 ? N : 2)); }

  MOEC_HD int64_t id(int64_t slot) const {
    return load_integer(expert_ids.data, expert_ids.dtype, slot);
  }
  MOEC_HD int32_t num_experts() const { return expert_begin[num_ranks]; }
  MOEC_HD bool is_expert(int64_t id) const { return id >= 0 && id < num_experts(); }
  MOEC_HD bool is_of(int64_t id, int32_t rank) const {
    return id >= expert_begin[rank] && id < expert_begin[rank + 1];
  }
  MOEC_HD bool visits(int64_t t, int32_t rank) const {
    bool found = false;
    for (int64_t slot = t * top_k; slot < (t + 1) * top_k; ++slot) found |= is_of(id(slot), rank);
    return found;
  }
  MOEC_HD float weight_at(int64_t t, int32_t rank) const {
    float sum = 0;
    for (int64_t slot = t * top_k; slot < (t + 1) * top_k; ++slot)
      if (is_of(id(slot), rank)) sum += routing_weights ? routing_weights[slot] : 1.0f;
    return sum;
  }
  MOEC_HD bool drops_lightest(int32_t rank) const { return by_weight && wanted[rank] > most; }
  // Token t is at `place` of a rank, or, where that is -1, at none.
  MOEC_HD void settle(int64_t t, int32_t rank, int32_t place) const {
    if (place >= 0) token[place] = int32_t(t);
    for (int64_t slot = t * top_k; slot < (t + 1) * top_k; ++slot)
      if (is_of(id(slot), rank)) slot_row[slot] = place;
  }
  IndexSums index_sums() const {
    const int32_t width = top_k < num_ranks ? top_k : num_ranks;
    return {num_tokens, top_k, width, slot_row, sum_index};
  }
};

}  // namespace moec
