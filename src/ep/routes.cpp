// SPDX-License-Identifier: Apache-2.0
#include "ep/routes.h"

#include <algorithm>
#include <bit>
#include <limits>

#include "core/dtype.h"

namespace moec::ep {
namespace {

// NaN above +inf, as in routers.
bool heavier(float a, float b) {
  return b == b && (a != a || a > b);
}

}  // namespace

RoutePlanner::RoutePlanner(const Shape& shape, int32_t num_ranks)
    : shape_(shape), owner_(size_t(shape.num_experts)), last_(size_t(num_ranks)) {
  for (int32_t r = 0; r < num_ranks; ++r)
    std::fill(owner_.begin() + shape.expert_begin[size_t(r)],
              owner_.begin() + shape.expert_begin[size_t(r) + 1], r);
  if (shape.scheme != MOEC_EP_ROWS || shape.overflow != MOEC_EP_DROP_BY_WEIGHT) return;
  cuts_.resize(size_t(num_ranks));
  visits_.reserve(size_t(shape.max_tokens));
}

Routes RoutePlanner::make_routes() const {
  const size_t ranks = last_.size();
  Routes routes;
  routes.width = std::min(shape_.top_k, int32_t(ranks));
  for (auto* rows :
       {&routes.wanted, &routes.sent, &routes.sent_at, &routes.received, &routes.received_at})
    rows->resize(ranks);
  return routes;
}

int32_t RoutePlanner::owner(int64_t id) const {
  return id >= 0 && id < shape_.num_experts ? owner_[size_t(id)] : -1;
}

// body(t, rank) once for each rank that has an expert of token t; tokens ascend.
template <class Body>
void RoutePlanner::for_visits(const Tokens& tokens, const Body& body) {
  std::fill(last_.begin(), last_.end(), -1);
  for (int64_t t = 0; t < tokens.count; ++t)
    for (int32_t k = 0; k < shape_.top_k; ++k) {
      const int64_t a = t * shape_.top_k + k;
      const int32_t rank = owner(load_integer(tokens.expert_ids.data, tokens.expert_ids.dtype, a));
      if (rank < 0 || last_[size_t(rank)] == t) continue;
      last_[size_t(rank)] = t;
      body(t, rank);
    }
}

// Of the slots of token t at a rank, in slot order.
float RoutePlanner::weight_at(const Tokens& tokens, int64_t t, int32_t rank) const {
  float sum = 0;
  for (int64_t a = t * shape_.top_k; a < (t + 1) * shape_.top_k; ++a)
    if (owner(load_integer(tokens.expert_ids.data, tokens.expert_ids.dtype, a)) == rank)
      sum += tokens.routing_weights ? tokens.routing_weights[a] : 1.0f;
  return sum;
}

void RoutePlanner::cut_by_weight(const Tokens& tokens, int32_t rank, int64_t most) {
  const auto above = [](const Cut& a, const Cut& b) {
    if (heavier(a.weight, b.weight) || heavier(b.weight, a.weight))
      return heavier(a.weight, b.weight);
    return a.token < b.token;
  };
  visits_.clear();
  for_visits(tokens, [&](int64_t t, int32_t r) {
    if (r == rank) visits_.push_back({weight_at(tokens, t, rank), int32_t(t)});
  });
  std::nth_element(visits_.begin(), visits_.begin() + (most - 1), visits_.end(), above);
  cuts_[size_t(rank)] = visits_[size_t(most - 1)];
}

void RoutePlanner::plan(const Tokens& tokens, const Places& places, Routes& routes) {
  const int64_t ranks = int64_t(last_.size()), K = shape_.top_k;
  std::fill(routes.wanted.begin(), routes.wanted.end(), 0);
  for_visits(tokens, [&](int64_t, int32_t rank) { ++routes.wanted[size_t(rank)]; });

  routes.rows_needed = routes.rows_dropped = routes.num_sent = 0;
  for (int64_t r = 0; r < ranks; ++r) {
    const size_t i = size_t(r);
    routes.sent[i] = std::min(routes.wanted[i], places.most);
    routes.sent_at[i] = places.stride ? r * places.stride : routes.num_sent;
    routes.num_sent = routes.sent_at[i] + (places.stride ? places.stride : routes.sent[i]);
    routes.rows_needed = std::max(routes.rows_needed, routes.wanted[i]);
    routes.rows_dropped += routes.wanted[i] - routes.sent[i];
    if (!cuts_.empty() && routes.wanted[i] > places.most)
      cut_by_weight(tokens, int32_t(r), places.most);
  }
  std::fill_n(routes.token, routes.num_sent, -1);
  std::fill_n(routes.sum_index, tokens.count * routes.width, -1);
  std::fill_n(routes.slot_row, tokens.count * K, -1);

  const auto keeps = [&](int64_t t, size_t rank, int64_t already) {
    if (routes.wanted[rank] <= places.most) return true;
    if (cuts_.empty()) return already < places.most;
    const Cut cut = cuts_[rank];
    const float weight = weight_at(tokens, t, int32_t(rank));
    return heavier(weight, cut.weight) || (!heavier(cut.weight, weight) && t <= cut.token);
  };
  std::fill(routes.received.begin(), routes.received.end(), 0);  // counts rows so far
  for_visits(tokens, [&](int64_t t, int32_t r) {
    const size_t rank = size_t(r);
    if (!keeps(t, rank, routes.received[rank])) return;
    const auto place = int32_t(routes.sent_at[rank] + routes.received[rank]++);
    routes.token[place] = int32_t(t);
    for (int64_t k = 0; k < K; ++k) {
      const int64_t a = t * K + k;
      if (owner(load_integer(tokens.expert_ids.data, tokens.expert_ids.dtype, a)) == r)
        routes.slot_row[a] = place;
    }
    // by rank: places ascend with it, and there is room for another
    int32_t *at = routes.sum_index + t * routes.width, *const end = at + routes.width;
    while (*at >= 0 && *at < place) ++at;
    std::copy_backward(at, end - 1, end);
    *at = place;
  });
}

}  // namespace moec::ep
