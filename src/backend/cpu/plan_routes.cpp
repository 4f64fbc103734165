// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <functional>

#include "backend/cpu/plan_routes.h"
#include "math/router.h"

namespace moec::cpu {
namespace {

// body(slot, t, rank, whether it is the token's first slot there); tokens ascend.
template <class Body>
void for_slots(const PlanRoutes& p, const Body& body) {
  int32_t* const last = p.counts;  // token seen by a rank
  std::fill_n(last, p.num_ranks, -1);
  for (int64_t t = 0; t < p.num_tokens; ++t)
    for (int64_t slot = t * p.top_k; slot < (t + 1) * p.top_k; ++slot) {
      const int32_t rank = owner_of(p, p.id(slot));
      body(slot, t, rank, rank >= 0 && last[rank] != t);
      if (rank >= 0) last[rank] = int32_t(t);
    }
}

void keep_heaviest(const PlanRoutes& p, int32_t rank, int32_t place) {
  auto* const keys = static_cast<int64_t*>(p.keys);
  int64_t count = 0;
  const auto key = [&](int64_t t) { return math::rank_key(p.weight_at(t, rank), int32_t(t)); };
  for (int64_t t = 0; t < p.num_tokens; ++t)
    if (p.visits(t, rank)) keys[count++] = key(t);
  std::nth_element(keys, keys + (p.most - 1), keys + count, std::greater<>());
  const int64_t least = keys[p.most - 1];
  for (int64_t t = 0; t < p.num_tokens; ++t)
    if (p.visits(t, rank) && key(t) >= least) p.settle(t, rank, place++);
}

}  // namespace

void plan_routes(const PlanRoutes& p) {
  const int32_t N = p.num_ranks;
  std::fill_n(p.wanted, N, 0);
  for_slots(p, [&](int64_t, int64_t, int32_t rank, bool first) {
    if (first) ++p.wanted[rank];
  });
  int32_t *const next = p.counts + N, *const here = next + N;  // places: to fill, of token t
  int64_t places = 0;
  for (int32_t r = 0; r < N; ++r) {
    next[r] = int32_t(places);
    places += p.stride ? p.stride : p.wanted[r];
  }
  std::fill_n(p.token, places, -1);
  for_slots(p, [&](int64_t slot, int64_t t, int32_t rank, bool first) {
    if (first) {
      const bool full = p.stride && next[rank] == rank * p.stride + p.most;
      here[rank] = full || p.drops_lightest(rank) ? -1 : next[rank]++;
      if (here[rank] >= 0) p.token[here[rank]] = int32_t(t);
    }
    p.slot_row[slot] = rank < 0 ? -1 : here[rank];
  });
  for (int32_t r = 0; r < N; ++r)
    if (p.drops_lightest(r)) keep_heaviest(p, r, next[r]);
  const IndexSums index = p.index_sums();
  for (int64_t t = 0; t < p.num_tokens; ++t) index(t);
}

}  // namespace moec::cpu
