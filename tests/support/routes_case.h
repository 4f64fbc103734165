// SPDX-License-Identifier: Apache-2.0
// Tokens of one rank and the ranges of experts of all: where each token goes, in plain words.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "support/draw.h"

namespace moec::test {

struct RoutesCase {
  int64_t tokens = 0;
  int top_k = 1;
  std::vector<int32_t> begin;  // [N+1]
  int64_t stride = 0, most = 0;
  bool by_weight = false;
  std::vector<int64_t> ids;    // [T,K]
  std::vector<float> weights;  // [T,K], or empty = 1

  int ranks() const { return static_cast<int>(begin.size()) - 1; }
  int width() const { return top_k < ranks() ? top_k : ranks(); }
  std::string note() const;
};
// Ranks, tokens and ids at random; now and then all to one rank, equal weights, ids that are no
// expert's, several of one rank, NaN, infinities and zeros of both signs.
RoutesCase draw_routes(int64_t most_tokens, int most_ranks, Draw& draw);

struct ExpectedRoutes {
  std::vector<int32_t> wanted, token, slot_row, sum_index;
};
ExpectedRoutes expect_routes(const RoutesCase& c);

}  // namespace moec::test
