// SPDX-License-Identifier: Apache-2.0
#include "support/routes_case.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace moec::test {
namespace {

bool is_of(const RoutesCase& c, int64_t id, size_t rank) {
  return id >= c.begin[rank] && id < c.begin[rank + 1];
}

struct Visit {
  int64_t token;
  float weight;
};

// Whether a is kept rather than b.
bool heavier(const Visit& a, const Visit& b) {
  const bool a_nan = std::isnan(a.weight), b_nan = std::isnan(b.weight);
  if (a_nan != b_nan) return a_nan;
  if (!a_nan && a.weight != b.weight) return a.weight > b.weight;
  return a.token < b.token;
}

std::vector<Visit> visits_of(const RoutesCase& c, size_t rank) {
  std::vector<Visit> visits;
  for (int64_t t = 0; t < c.tokens; ++t) {
    float weight = 0;
    bool visits_it = false;
    for (int k = 0; k < c.top_k; ++k) {
      const auto slot = static_cast<size_t>(t * c.top_k + k);
      if (!is_of(c, c.ids[slot], rank)) continue;
      visits_it = true;
      weight += c.weights.empty() ? 1.0f : c.weights[slot];
    }
    if (visits_it) visits.push_back({t, weight});
  }
  return visits;
}

}  // namespace

std::string RoutesCase::note() const {
  return "T " + std::to_string(tokens) + ", K " + std::to_string(top_k) + ", N " +
         std::to_string(ranks()) + ", E " + std::to_string(begin.back()) + ", stride " +
         std::to_string(stride) + ", most " + std::to_string(most) +
         (by_weight ? ", by weight" : "");
}

RoutesCase draw_routes(int64_t most_tokens, int most_ranks, Draw& draw) {
  RoutesCase c;
  const int ranks = 1 + static_cast<int>(draw.below(most_ranks));
  c.begin = {0};
  for (int r = 0; r < ranks; ++r)
    c.begin.push_back(c.begin.back() + 1 + static_cast<int>(draw.below(4)));
  c.tokens = draw.chance(0.1) ? 0 : 1 + draw.below(most_tokens);
  c.top_k = 1 + static_cast<int>(draw.below(9));
  const int64_t bound = c.tokens + draw.below(5) + 1;
  const bool counted = draw.chance(0.3);
  c.most = counted ? bound : 1 + draw.below(draw.chance(0.5) ? bound : std::min<int64_t>(bound, 9));
  c.stride = counted ? 0 : c.most;
  c.by_weight = !counted && draw.chance(0.6);
  const int only = draw.chance(0.2) ? static_cast<int>(draw.below(ranks)) : -1;
  const bool ties = draw.chance(0.3), strange = draw.chance(0.3);
  const bool has_weights = draw.chance(0.9);
  const float inf = std::numeric_limits<float>::infinity(), nan = std::nanf("");
  for (int64_t slot = 0; slot < c.tokens * c.top_k; ++slot) {
    const auto r = static_cast<size_t>(only < 0 ? draw.below(ranks) : only);
    int64_t id = c.begin[r] + draw.below(c.begin[r + 1] - c.begin[r]);
    if (draw.chance(0.1))
      id = draw.one_of(
          {int64_t{-1}, int64_t{c.begin.back()}, int64_t{INT32_MAX}, int64_t{INT32_MIN}});
    c.ids.push_back(id);
    float weight = static_cast<float>(ties ? draw.below(3) - 1 : draw.normal());
    if (strange && draw.chance(0.2)) weight = draw.one_of({inf, -inf, nan, -nan, 0.0f, -0.0f});
    if (has_weights) c.weights.push_back(weight);
  }
  return c;
}

ExpectedRoutes expect_routes(const RoutesCase& c) {
  ExpectedRoutes e;
  e.slot_row.assign(c.ids.size(), -1);
  std::vector<std::vector<int32_t>> places(static_cast<size_t>(c.tokens));
  for (size_t r = 0; r < static_cast<size_t>(c.ranks()); ++r) {
    std::vector<Visit> visits = visits_of(c, r);
    e.wanted.push_back(static_cast<int32_t>(visits.size()));
    if (c.by_weight) std::sort(visits.begin(), visits.end(), heavier);
    visits.resize(std::min(visits.size(), static_cast<size_t>(c.most)));
    std::sort(visits.begin(), visits.end(),
              [](const Visit& a, const Visit& b) { return a.token < b.token; });
    const size_t first = e.token.size();
    e.token.resize(first + (c.stride ? static_cast<size_t>(c.stride) : visits.size()), -1);
    for (size_t i = 0; i < visits.size(); ++i) {
      const auto place = static_cast<int32_t>(first + i);
      e.token[first + i] = static_cast<int32_t>(visits[i].token);
      places[static_cast<size_t>(visits[i].token)].push_back(place);
      for (int k = 0; k < c.top_k; ++k) {
        const auto slot = static_cast<size_t>(visits[i].token * c.top_k + k);
        if (is_of(c, c.ids[slot], r)) e.slot_row[slot] = place;
      }
    }
  }
  for (std::vector<int32_t>& of_token : places) {
    of_token.resize(static_cast<size_t>(c.width()), -1);
    e.sum_index.insert(e.sum_index.end(), of_token.begin(), of_token.end());
  }
  return e;
}

}  // namespace moec::test
