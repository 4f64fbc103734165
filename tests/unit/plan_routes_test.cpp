// SPDX-License-Identifier: Apache-2.0
// Routes of ROWS and EXACT against plain loops, entry for entry; blocks with headers. It was seen
// to catch ties that went to the last token, and a weight of one slot instead of the sum.
#include "backend/plan_routes.h"

#include <gtest/gtest.h>

#include "backend/rank_steps.h"
#include "support/routes_case.h"
#include "unit/cpu_device.h"

namespace moec::test {
namespace {

class Planned {
 public:
  explicit Planned(const RoutesCase& c, const ExpectedRoutes& like, bool wide)
      : narrow_(c.ids.begin(), c.ids.end()),
        counts_(PlanRoutes::count_words(c.ranks(), c.tokens)),
        keys_(PlanRoutes::key_bytes(c.ranks(), c.tokens) / sizeof(int64_t) + 1) {
    got.wanted.assign(like.wanted.size(), 77);
    got.token.assign(like.token.size(), 77);
    got.slot_row.assign(like.slot_row.size(), 77);
    got.sum_index.assign(like.sum_index.size(), 77);
    PlanRoutes plan = {};
    plan.num_tokens = c.tokens;
    plan.top_k = c.top_k;
    plan.num_ranks = c.ranks();
    plan.expert_ids = wide ? Array{const_cast<int64_t*>(c.ids.data()), MOEC_I64}
                           : Array{narrow_.data(), MOEC_I32};
    plan.routing_weights = c.weights.empty() ? nullptr : c.weights.data();
    plan.expert_begin = c.begin.data();
    plan.stride = c.stride;
    plan.most = c.most;
    plan.by_weight = c.by_weight;
    plan.wanted = got.wanted.data();
    plan.token = got.token.data();
    plan.slot_row = got.slot_row.data();
    plan.sum_index = got.sum_index.data();
    plan.counts = counts_.data();
    plan.keys = keys_.data();
    cpu::between_ranks(CpuDevice(), plan);
  }
  ExpectedRoutes got;

 private:
  std::vector<int32_t> narrow_, counts_;
  std::vector<int64_t> keys_;
};

TEST(PlanRoutes, FollowsTheDefinition) {
  SCOPED_TRACE(seed_note());
  Draw draw(1);
  for (int round = 0; round < 300; ++round) {
    const RoutesCase c = draw_routes(round % 10 ? 40 : 1500, round % 7 ? 6 : 70, draw);
    SCOPED_TRACE(c.note());
    const ExpectedRoutes want = expect_routes(c);
    const Planned planned(c, want, draw.chance(0.5));
    ASSERT_EQ(planned.got.wanted, want.wanted);
    ASSERT_EQ(planned.got.token, want.token);
    ASSERT_EQ(planned.got.slot_row, want.slot_row);
    ASSERT_EQ(planned.got.sum_index, want.sum_index);
  }
}

// Two ranks, of which one sends 2 places to each: headers, lines and counters as they arrive.
TEST(PlanRoutes, BlocksBeginWithWhatDidNotFit) {
  CpuDevice device;
  constexpr int32_t kRanks = 2, kColumns = 2;
  constexpr int64_t kStride = 2;
  const int64_t block = header_block(kStride, kColumns);
  std::vector<int32_t> ids = {0, 1, 1, 1}, token = {0, -1, 1, 2}, wanted = {1, 3};
  std::vector<int32_t> words(size_t(kRanks * block), 77);
  PackBlocks pack = {};
  pack.pack.num_tokens = 4;
  pack.pack.places = kRanks * kStride;
  pack.pack.top_k = 1;
  pack.pack.num_experts = 2;
  pack.pack.columns = kColumns;
  pack.pack.expert_ids = {ids.data(), MOEC_I32};
  pack.pack.token = token.data();
  pack.pack.to = words.data();
  pack.header = {{9, 8}, 4, 0, 0};
  pack.wanted = wanted.data();
  pack.num_ranks = kRanks;
  pack.stride = kStride;
  pack.block = block;
  cpu::between_ranks(device, pack);

  // Both blocks arrive at one rank, as if from two that say the same.
  Overflow overflow[kRanks] = {{5, 7}, {0, 1}};
  Disagreement disagreements[kRanks] = {};
  int32_t broken = 0;
  std::vector<int32_t> guest_ids(4, 77);
  std::vector<float> guest_weights(4, 7.0f);
  UnpackIds unpack = {};
  unpack.guests = kRanks * kStride;
  unpack.bound = kStride;
  unpack.block = block;
  unpack.overflow = overflow;
  unpack.top_k = 1;
  unpack.columns = kColumns;
  unpack.expert_end = 2;
  unpack.from = words.data();
  unpack.own = {{9, 8}, 0, 0, 0};
  unpack.disagreements = disagreements;
  unpack.broken = &broken;
  unpack.ids = guest_ids.data();
  unpack.weights = guest_weights.data();
  cpu::between_ranks(device, unpack);
  EXPECT_EQ(guest_ids, (std::vector<int32_t>{0, -1, 1, 1}));
  EXPECT_EQ(guest_weights, (std::vector<float>{1, 0, 1, 1}));
  const auto expect = [&](int rank, int64_t needed, int64_t dropped) {
    EXPECT_EQ(overflow[rank].rows_needed, needed);
    EXPECT_EQ(overflow[rank].rows_dropped, dropped);
  };
  expect(0, 5, 7 + 1);
  expect(1, 3, 1 + 1);
  wanted[1] = 6;
  cpu::between_ranks(device, pack);
  cpu::between_ranks(device, unpack);
  expect(0, 6, 8 + 4);
  expect(1, 6, 2 + 4);
}

}  // namespace
}  // namespace moec::test
