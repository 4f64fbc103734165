// SPDX-License-Identifier: Apache-2.0
// Steps of peers that no host looks at between them, as those of a graph: 48 layers whose other
// rank does not come wait for it once. It was seen to catch steps that go on after one that broke.
#include <gtest/gtest.h>

#include <chrono>
#include <cmath>

#include "ep/exchange.h"
#include "support/rank_threads.h"

namespace moec::test {
namespace {

constexpr int32_t kRanks = 2, kLayers = 48;
constexpr int64_t kTokens = 3, kHidden = 4;
constexpr uint32_t kTimeoutMs = 100;

ep::Shape shape() {
  ep::Shape s = {};
  s.hidden = kHidden;
  s.max_tokens = s.pair_rows = kTokens;
  s.num_experts = kRanks;
  s.top_k = 1;
  s.scheme = MOEC_EP_PEER;
  s.dtype = s.partial_dtype = MOEC_F32;
  s.grad_scale = 1;
  s.expert_begin = {0, 1, 2};
  s.timeout_ms = kTimeoutMs;
  return s;
}

// The graph of rank 0, whose tokens all have the expert of rank 1; seconds that it takes.
double run_layers(ep::Peers& peers) {
  std::vector<float> x(size_t(kTokens * kHidden), 1.0f), y(x.size());
  std::vector<int32_t> ids(size_t(kTokens), 1);
  ep::Departure from = {};
  from.tokens = {kTokens, {ids.data(), MOEC_I32}, nullptr};
  from.bound = kTokens;
  from.x = x.data();
  ep::Homecoming to = {};
  to.y = y.data();
  const auto begin = std::chrono::steady_clock::now();
  for (int layer = 0; layer < kLayers; ++layer) {
    const ep::Guests guests = peers.dispatch(from, nullptr);
    for (int64_t g = 0; g < guests.count; ++g) EXPECT_EQ(guests.ids[g], -1) << "layer " << layer;
    y.assign(y.size(), 0.0f);
    peers.combine(to, nullptr);
    for (const float value : y) EXPECT_TRUE(std::isnan(value)) << "layer " << layer;
  }
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

TEST(Peers, LayersOfAGraphWaitOnceForWhoDoesNotCome) {
  RankBoard board(kRanks);
  for (const std::string& error : run_ranks(kRanks, [&](int rank) {
         const std::unique_ptr<Backend> backend = make_cpu_backend({});
         auto desc = sized<moec_comm_desc>();
         desc.rank = rank;
         desc.size = kRanks;
         ep::Communicator comm(
             desc, board.callbacks(rank), ep::Reach::kDirect, *backend, [](moec_stream) {},
             nullptr);
         ep::Peers peers(comm, *backend, shape());
         EXPECT_EQ(peers.connect(false), "");
         Disagreement reports[kRanks] = {};
         peers.set_reports(reports);
         if (rank == 0) {
           EXPECT_LT(run_layers(peers), kLayers * kTimeoutMs / 2e3);
           try {
             peers.require_well();
             ADD_FAILURE() << "no error";
           } catch (const Error& error) {
             EXPECT_EQ(error.code, MOEC_E_TIMEOUT) << error.text;
             EXPECT_NE(std::string(error.text).find("rank 1 did not come to a dispatch"),
                       std::string::npos)
                 << error.text;
           }
         }
         board.wait_for_all();  // the memory of rank 1 stays until then
       }))
    EXPECT_EQ(error, "");
}

}  // namespace
}  // namespace moec::test
