// SPDX-License-Identifier: Apache-2.0
// Auxiliary losses and the bias update over the tokens of all ranks: as on one device with the
// concatenated batch. Planted faults that it was seen to catch: a z loss
// over the tokens of one rank.
#include <gtest/gtest.h>

#include <cmath>

#include "support/draw.h"
#include "support/rank_threads.h"
#include "support/tensors.h"

namespace moec::test {
namespace {

constexpr int64_t kExperts = 37, kSeqLen = 4;
constexpr int kLayers = 2;

struct LossRun {
  double loss;
  std::vector<double> d_logits;  // [layers * T, E]
};

// logits: [layers] of [T,E].
LossRun run_loss(const moec_context* context, moec_comm* comm, uint32_t kind,
                 const std::vector<std::vector<double>>& logits, bool masked) {
  Tensors m;
  const auto T = static_cast<int64_t>(logits[0].size()) / kExperts;
  const auto filled = [&](const std::vector<double>& v) {
    return T ? m.input(v, MOEC_F32, {T, kExperts}) : m.output(MOEC_F32, {T, kExperts});
  };
  std::vector<moec_tensor> in, d;
  for (const auto& layer : logits) {
    in.push_back(filled(layer));
    d.push_back(filled(std::vector<double>(layer.size(), 0.0)));
  }
  auto args = sized<moec_loss_args>();
  args.kind = kind;
  args.comm = comm;
  args.top_k = kind == MOEC_LOSS_Z ? 0 : 3;
  args.coefficient = 0.5f;
  args.score = kind == MOEC_LOSS_BALANCE_SWITCH ? MOEC_SCORE_SIGMOID : MOEC_SCORE_SOFTMAX;
  if (kind == MOEC_LOSS_BALANCE_SEQUENCE) args.seq_len = kSeqLen;
  args.logits = in.data();
  args.d_logits = d.data();
  args.count = kind == MOEC_LOSS_BALANCE_MIXTRAL ? kLayers : 1;
  std::vector<double> mask;  // the same tokens, on one rank or on many: by their logits
  for (int64_t t = 0; t < T; ++t)
    mask.push_back(std::fmod(std::fabs(logits[0][size_t(t * kExperts)]), 0.5) < 0.4 ? 1 : 0);
  if (masked) args.token_mask = T ? m.input(mask, MOEC_U8, {T}) : m.output(MOEC_U8, {T});
  args.loss = m.output(MOEC_F32, {1});
  check(moec_loss_forward(context, &args, nullptr));
  check(moec_loss_backward(context, &args, nullptr));
  LossRun run{m.read(args.loss)[0], {}};
  for (int64_t layer = 0; layer < args.count && T; ++layer)
    for (const double v : m.read(d[size_t(layer)])) run.d_logits.push_back(v);
  return run;
}

class EpLossKinds : public testing::TestWithParam<uint32_t> {};

TEST_P(EpLossKinds, AreOfTheConcatenatedBatch) {
  SCOPED_TRACE(seed_note());
  const uint32_t kind = GetParam();
  Draw draw(kind);
  for (const bool masked : {false, true}) {
    const std::vector<int64_t> tokens = {8, 0, 20, 4};
    std::vector<std::vector<std::vector<double>>> parts;  // [N][layers]
    std::vector<std::vector<double>> all(kLayers);
    for (const int64_t T : tokens) {
      parts.emplace_back();
      for (auto& layer : all) {
        parts.back().push_back(draw.normals(size_t(T * kExperts)));
        layer.insert(layer.end(), parts.back().back().begin(), parts.back().back().end());
      }
    }
    const LossRun one = run_loss(test_context(), nullptr, kind, all, masked);
    RankBoard board(4);
    std::vector<LossRun> runs(4);
    for (const std::string& error : run_ranks(4, [&](int r) {
           Rank rank(board, r);
           runs[size_t(r)] =
               run_loss(rank.context.get(), rank.comm.get(), kind, parts[size_t(r)], masked);
         }))
      EXPECT_EQ(error, "");
    const size_t layers = kind == MOEC_LOSS_BALANCE_MIXTRAL ? kLayers : 1;
    size_t first = 0;
    for (size_t r = 0; r < runs.size(); ++r) {
      EXPECT_EQ(runs[r].loss, runs[0].loss);
      EXPECT_NEAR(runs[r].loss, one.loss, 1e-5 * std::fabs(one.loss));
      const auto rows = size_t(tokens[r]), own = rows * size_t(kExperts);
      ASSERT_EQ(runs[r].d_logits.size(), layers * own);
      for (size_t layer = 0; layer < layers; ++layer)
        for (size_t i = 0; i < own; ++i) {
          const double want =
              one.d_logits[layer * 32 * size_t(kExperts) + first * size_t(kExperts) + i];
          ASSERT_NEAR(runs[r].d_logits[layer * own + i], want, 1e-5 * std::fabs(want) + 1e-9);
        }
      first += rows;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(, EpLossKinds,
                         testing::Values(MOEC_LOSS_BALANCE_MIXTRAL, MOEC_LOSS_BALANCE_SWITCH,
                                         MOEC_LOSS_BALANCE_SEQUENCE, MOEC_LOSS_Z));

TEST(EpLosses, OtherOptionsAreNamed) {
  RankBoard board(2);
  const std::vector<double> logits(size_t(4 * kExperts), 0.5);
  for (const std::string& error : run_ranks(2, [&](int r) {
         Rank rank(board, r);
         const uint32_t kind = r ? MOEC_LOSS_Z : MOEC_LOSS_BALANCE_SWITCH;
         try {
           run_loss(rank.context.get(), rank.comm.get(), kind, {logits}, false);
           ADD_FAILURE() << "no error";
         } catch (const Failure& failure) {
           EXPECT_EQ(failure.status, MOEC_E_MISMATCH) << failure.what();
         }
       }))
    EXPECT_EQ(error, "");
}

// counts of all ranks, then the update: the same bias on each rank.
TEST(EpLosses, BiasUpdateIsOfAllRanks) {
  RankBoard board(3);
  for (const std::string& error : run_ranks(3, [&](int r) {
         Rank rank(board, r);
         auto desc = sized<moec_router_desc>();
         desc.flags = MOEC_ROUTER_SELECT_BIAS;
         desc.num_experts = 3;
         desc.top_k = 1;
         const Router router = make<Router>(moec_router_create, rank.context.get(), &desc);
         Tensors m;
         // Of all ranks 6, 3, 0: alone, rank 1 would lower expert 1.
         const std::vector<double> own[] = {{4, 0, 0}, {0, 3, 0}, {2, 0, 0}};
         const moec_tensor counts = m.input(own[r], MOEC_I64, {3});
         const moec_tensor bias = m.input({0, 0, 0}, MOEC_F32, {3});
         check(moec_comm_sum(rank.comm.get(), &counts, nullptr));
         check(moec_router_bias_update(router.get(), &counts, 0.5f, &bias, nullptr));
         EXPECT_EQ(m.read(bias), (std::vector<double>{-0.5, 0, 0.5}));
       }))
    EXPECT_EQ(error, "");
}

}  // namespace
}  // namespace moec::test
