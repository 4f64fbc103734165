// SPDX-License-Identifier: Apache-2.0
// What ranks do between collectives where no host meets: headers, ranks that disagree, a capacity
// of the tokens of all. Two ranks of a GATHER, whose blocks lie side by side as an all-gather
// leaves them. It was seen to catch a rank that keeps the ids of another that disagrees, and a
// capacity of one rank's tokens.
#include "backend/rank_steps.h"

#include <gtest/gtest.h>

#include <cmath>

#include "unit/cpu_device.h"

namespace moec::test {
namespace {

constexpr int32_t kRanks = 2, kTopK = 2, kExperts = 4, kColumns = 2 * kTopK;
constexpr int64_t kBound = 3, kGuests = kRanks * kBound;
constexpr int32_t kBegin[] = {0, 1, kExperts};  // rank 0 has expert 0
constexpr int32_t kOwners[kExperts] = {0, 1, 1, 1};

struct World {
  CpuDevice device;
  std::vector<int32_t> words =
      std::vector<int32_t>(size_t(kRanks * header_block(kBound, kColumns)), 77);
  std::vector<int32_t> ids[kRanks] = {{0, 1, 3, 0}, {2, -1}};  // T = 2 and 1
  std::vector<int32_t> sum_index[kRanks], slot_row[kRanks];
  Disagreement disagreements[kRanks] = {};
  int32_t broken = 0;
  std::vector<int32_t> guest_ids = std::vector<int32_t>(size_t(kGuests * kTopK), 77);
  std::vector<float> guest_weights = std::vector<float>(size_t(kGuests * kTopK), 7.0f);

  int32_t* block(int rank) { return words.data() + rank * header_block(kBound, kColumns); }
  static RankHeader header(int64_t tokens, int64_t fact = 5) {
    return {{1, 2, fact}, tokens, 0, 0};
  }

  // The block of a rank, which has `fact` as its third.
  void send(int rank, int64_t fact = 5) {
    const auto tokens = int64_t(ids[rank].size()) / kTopK;
    sum_index[rank].assign(size_t(tokens * kRanks), 77);
    slot_row[rank].assign(size_t(tokens * kTopK), 77);
    SendToAll step = {};
    step.pack.num_tokens = tokens;
    step.pack.places = kBound;
    step.pack.top_k = kTopK;
    step.pack.num_experts = kExperts;
    step.pack.columns = kColumns;
    step.pack.expert_ids = {ids[rank].data(), MOEC_I32};
    step.pack.to = block(rank) + kHeaderWords;
    step.header = header(tokens, fact);
    step.header_to = reinterpret_cast<RankHeader*>(block(rank));
    step.owners = kOwners;
    step.num_ranks = step.width = kRanks;
    step.sum_index = sum_index[rank].data();
    step.slot_row = slot_row[rank].data();
    cpu::between_ranks(device, step);
  }
  void unpack(int rank) {
    UnpackIds step = {};
    step.guests = kGuests;
    step.bound = kBound;
    step.block = header_block(kBound, kColumns);
    step.top_k = kTopK;
    step.columns = kColumns;
    step.expert_begin = kBegin[rank];
    step.expert_end = kBegin[rank + 1];
    step.from = words.data();
    step.own = header(0);  // how many tokens it has is its own affair
    step.disagreements = disagreements;
    step.broken = &broken;
    step.ids = guest_ids.data();
    step.weights = guest_weights.data();
    cpu::between_ranks(device, step);
  }
};

TEST(RankSteps, TokensKnowTheirPlaces) {
  World w;
  for (int rank = 0; rank < kRanks; ++rank) w.send(rank);
  // Token 0 has experts of both ranks, token 1 too, in the other order: places go by rank.
  EXPECT_EQ(w.sum_index[0], (std::vector<int32_t>{0, 3, 1, 4}));
  EXPECT_EQ(w.slot_row[0], (std::vector<int32_t>{0, 3, 4, 1}));
  EXPECT_EQ(w.sum_index[1], (std::vector<int32_t>{3, -1}));
  EXPECT_EQ(w.slot_row[1], (std::vector<int32_t>{3, -1}));
  w.unpack(1);
  EXPECT_EQ(w.guest_ids, (std::vector<int32_t>{-1, 1, 3, -1, -1, -1, 2, -1, -1, -1, -1, -1}));
  EXPECT_EQ(w.guest_weights, (std::vector<float>{0, 1, 1, 0, 0, 0, 1, 0, 0, 0, 0, 0}));
  EXPECT_EQ(w.broken, 0);
}

TEST(RankSteps, ARankThatDisagreesIsReportedForGood) {
  World w;
  w.send(0);
  w.send(1, 6);
  w.unpack(0);
  EXPECT_EQ(w.broken, 1);
  EXPECT_EQ(w.disagreements[0].fact, 0);
  EXPECT_EQ(w.disagreements[1].fact, 1 + 2);
  EXPECT_EQ(w.disagreements[1].theirs, 6);
  EXPECT_EQ(w.disagreements[1].own, 5);
  EXPECT_EQ(std::count(w.guest_ids.begin() + kBound * kTopK, w.guest_ids.end(), -1),
            kBound * kTopK);
  w.send(1);  // well again, but late
  w.unpack(0);
  EXPECT_EQ(std::count(w.guest_ids.begin(), w.guest_ids.end(), -1), kGuests * kTopK);
  EXPECT_EQ(w.disagreements[1].theirs, 6);

  float row[2] = {1, 2}, y[2] = {};
  const int32_t index[] = {0};
  SumRows sum = {1, 2, 1, index, {row, MOEC_F32}, 1.0f, false, {y, MOEC_F32}, &w.broken};
  cpu::between_ranks(w.device, sum);
  EXPECT_TRUE(std::isnan(y[0]) && std::isnan(y[1]));
  w.broken = 0;
  cpu::between_ranks(w.device, sum);
  EXPECT_EQ(y[1], 2.0f);
}

TEST(RankSteps, ACapacityIsOfTheTokensOfAll) {
  World w;
  for (int rank = 0; rank < kRanks; ++rank) w.send(rank);
  for (const double factor : {0.5, 1.0, 1.25, 3.0}) {
    int32_t capacity = -1;
    const CapacityOfAll step = {
        w.words.data(), header_block(kBound, kColumns), kRanks, kExperts, kTopK, factor, &capacity};
    cpu::between_ranks(w.device, step);
    EXPECT_EQ(capacity, std::ceil(3.0 * kTopK / kExperts * factor)) << factor;
  }
}

TEST(RankSteps, CountsSaturate) {
  CpuDevice device;
  const int32_t parts[] = {INT32_MAX, -5, 1, 3};
  int32_t sum[2] = {};
  cpu::between_ranks(device, AddRanks<int32_t>{2, 2, parts, sum});
  EXPECT_EQ(sum[0], INT32_MAX);
  EXPECT_EQ(sum[1], -2);
}

}  // namespace
}  // namespace moec::test
