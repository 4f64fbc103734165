// SPDX-License-Identifier: Apache-2.0
// Routes of ROWS and EXACT against plain host loops, entry for entry.
#include "backend/cuda/ranks/plan_routes.h"
#include "gpu/device_problem.h"
#include "gpu/harness.h"
#include "support/routes_case.h"

namespace moec::test {
namespace {

class DeviceRoutes {
 public:
  DeviceRoutes(const RoutesCase& c, const ExpectedRoutes& like, bool wide)
      : ids_(c.ids),
        narrow_(std::vector<int32_t>(c.ids.begin(), c.ids.end())),
        begin_(c.begin),
        wanted_(like.wanted.size()),
        token_(like.token.size()),
        slot_row_(like.slot_row.size()),
        sum_index_(like.sum_index.size()),
        counts_(PlanRoutes::count_words(c.ranks(), c.tokens)),
        weights_(c.weights),
        keys_(PlanRoutes::key_bytes(c.ranks(), c.tokens)) {
    plan.num_tokens = c.tokens;
    plan.top_k = c.top_k;
    plan.num_ranks = c.ranks();
    plan.expert_ids = wide ? Array{ids_.data(), MOEC_I64} : Array{narrow_.data(), MOEC_I32};
    plan.routing_weights = c.weights.empty() ? nullptr : weights_.data();
    plan.expert_begin = begin_.data();
    plan.stride = c.stride;
    plan.most = c.most;
    plan.by_weight = c.by_weight;
    plan.wanted = wanted_.data();
    plan.token = token_.data();
    plan.slot_row = slot_row_.data();
    plan.sum_index = sum_index_.data();
    plan.counts = counts_.data();
    plan.keys = keys_.data();
  }
  void queue() const {
    const HostServices none = {};
    cuda::plan_routes(cuda::Op{none, 132, true, false, nullptr, nullptr}, plan);
  }
  void expect(const ExpectedRoutes& want) const {
    CHECK_CUDA(cudaDeviceSynchronize());
    EXPECT_EQ(first_difference(wanted_.host(), want.wanted), -1);
    EXPECT_EQ(first_difference(token_.host(), want.token), -1);
    EXPECT_EQ(first_difference(slot_row_.host(), want.slot_row), -1);
    EXPECT_EQ(first_difference(sum_index_.host(), want.sum_index), -1);
    for (const auto* array : {&wanted_, &token_, &slot_row_, &sum_index_, &counts_})
      EXPECT_TRUE(array->guards_intact());
  }
  PlanRoutes plan = {};

 private:
  DeviceArray<int64_t> ids_;
  DeviceArray<int32_t> narrow_, begin_, wanted_, token_, slot_row_, sum_index_, counts_;
  DeviceArray<float> weights_;
  DeviceArray<char> keys_;
};

TEST(Routes, FollowTheDefinition) {
  Draw draw(test_seed());
  for (int round = 0; round < (is_small_run() ? 12 : 150); ++round) {
    const RoutesCase c = draw_routes(round % 4 ? 60 : 3000, round % 5 ? 8 : 70, draw);
    SCOPED_TRACE(c.note());
    const ExpectedRoutes want = expect_routes(c);
    const DeviceRoutes routes(c, want, draw.chance(0.5));
    routes.queue();
    routes.expect(want);
    if (HasFailure()) return;
  }
}

// As many tokens and ranks as a large call has.
TEST(Routes, OfManyTokens) {
  if (is_small_run()) return;
  for (const int64_t tokens : {16384, 65536})
    for (const int ranks : {2, 64})
      for (const int kind : {0, 1, 2}) {
        RoutesCase c;
        c.tokens = tokens;
        c.top_k = 8;
        for (int r = 0; r <= ranks; ++r) c.begin.push_back(128 / ranks * r);
        c.most = kind == 0 ? tokens : ranks == 2 ? tokens / 2 : tokens / 9;
        c.stride = kind == 0 ? 0 : c.most;
        c.by_weight = kind == 2;
        Draw draw(test_seed() + static_cast<uint64_t>(kind));
        for (int64_t slot = 0; slot < tokens * c.top_k; ++slot) {
          c.ids.push_back(draw.below(128));
          c.weights.push_back(static_cast<float>(draw.below(4000)) / 4000);
        }
        SCOPED_TRACE(c.note());
        const ExpectedRoutes want = expect_routes(c);
        const DeviceRoutes routes(c, want, false);
        routes.queue();
        routes.expect(want);
      }
}

}  // namespace
}  // namespace moec::test
