// SPDX-License-Identifier: Apache-2.0
// Layers whose experts lie on N ranks, forward and every gradient: bit for bit what one process
// gives that runs the N ranges and adds their rows in rank order; and near the layer of one rank on
// the concatenated batch. Planted faults that it was seen to catch: partial rows added
// from the last rank on, and a capacity of the guests instead of all tokens.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "support/compare.h"
#include "support/device.h"
#include "support/ep_data.h"
#include "support/ep_problem.h"
#include "support/tensors.h"

namespace moec::test {
namespace {

using oracle::Vec;

void expect_equal(const std::vector<Outputs>& got, const std::vector<Outputs>& want) {
  ASSERT_EQ(got.size(), want.size());
  for (size_t r = 0; r < got.size(); ++r)
    for (const auto& [name, bytes] : got[r]) {
      const auto expected = want[r].find(name);
      ASSERT_NE(expected, want[r].end()) << name;
      EXPECT_TRUE(bytes == expected->second) << name << " of rank " << r;
    }
}

// Rows of `columns` values of all ranks, one after the other.
Vec joined(const std::vector<Outputs>& all, const std::string& name, moec_dtype dtype) {
  Vec values;
  for (const Outputs& one : all) {
    const Vec part = decode(one.at(name), dtype);
    values.insert(values.end(), part.begin(), part.end());
  }
  return values;
}
Vec added(const std::vector<Outputs>& all, const std::string& name, moec_dtype dtype) {
  Vec sum;
  for (const Outputs& one : all) {
    const Vec part = decode(one.at(name), dtype);
    sum.resize(part.size());
    for (size_t i = 0; i < part.size(); ++i) sum[i] += part[i];
  }
  return sum;
}

// Each rank rounds its partial rows once more than one rank does.
void expect_near_one_rank(const EpProblem& p, const std::vector<Outputs>& got) {
  const Outputs one = run_one_layer(p);
  const double unit = p.dtype == MOEC_F32 ? 1e-6 : p.dtype == MOEC_F16 ? 0x1p-11 : 0x1p-8;
  const double bound = (p.ranks + 4) * unit;
  const auto H = static_cast<size_t>(p.hidden), K = static_cast<size_t>(p.top_k);
  EXPECT_EQ(joined(got, "expert_ids", MOEC_I32), decode(one.at("expert_ids"), MOEC_I32));
  const auto expect_rows = [&](const char* name, moec_dtype dtype, size_t columns) {
    EXPECT_LT(row_error(joined(got, name, dtype), decode(one.at(name), dtype), columns, kTypicalRow)
                  .error,
              bound)
        << name;
  };
  if (joined(got, "y", p.dtype).empty()) return;
  expect_rows("y", p.dtype, H);
  expect_rows("d_x", p.dtype, H);
  expect_rows("d_routing_weights", MOEC_F32, K);
  if (p.accumulate) return;
  if (one.count("d_shared_a")) {  // the same on all ranks, once added up
    const Vec want = decode(one.at("d_shared_a"), MOEC_F32);
    const Vec sum = decode(got[0].at("d_shared_a"), MOEC_F32);
    EXPECT_LT(row_error(sum, want, want.size(), kTypicalRow).error, bound);
  }
  EXPECT_LT(row_error(added(got, "d_gate_weight", MOEC_F32),
                      decode(one.at("d_gate_weight"), MOEC_F32), H, kTypicalRow)
                .error,
            bound);
}

// Kernels that wait for other ranks on one GPU need streams of their own, which ep_gpu_test has.
bool is_left_out(uint32_t scheme) {
  return scheme == MOEC_EP_PEER && test_device().type == MOEC_CUDA;
}
std::vector<uint32_t> all_schemes() {
  std::vector<uint32_t> schemes;
  for (const uint32_t scheme : {MOEC_EP_GATHER, MOEC_EP_PEER, MOEC_EP_ROWS, MOEC_EP_EXACT}) {
    if (!is_left_out(scheme)) schemes.push_back(scheme);
  }
  return schemes;
}

class EpLayerTest : public testing::TestWithParam<std::tuple<int, uint32_t>> {};

TEST_P(EpLayerTest, SameBitsAsInSequence) {
  const auto [ranks, scheme] = GetParam();
  if (is_left_out(scheme)) GTEST_SKIP() << "ep_gpu_test has peers of GPUs";
  SCOPED_TRACE(seed_note());
  Draw draw(static_cast<uint64_t>(ranks) * 16 + scheme);
  for (int round = 0; round < (is_small_run() ? 2 : 6); ++round) {
    const EpProblem p = draw_ep_problem(ranks, scheme, draw);
    SCOPED_TRACE("round " + std::to_string(round));
    const std::vector<Outputs> got = run_ep_layers(p);
    if (testing::Test::HasFailure()) return;
    expect_equal(got, run_in_sequence(p));
    expect_near_one_rank(p, got);
    if (testing::Test::HasFailure()) return;
  }
}

INSTANTIATE_TEST_SUITE_P(, EpLayerTest,
                         testing::Combine(testing::Values(1, 2, 3, 4, 8),
                                          testing::Values(MOEC_EP_GATHER, MOEC_EP_PEER,
                                                          MOEC_EP_ROWS, MOEC_EP_EXACT)),
                         [](const auto& param) {
                           const uint32_t scheme = std::get<1>(param.param);
                           return std::string(scheme == MOEC_EP_GATHER ? "gather"
                                              : scheme == MOEC_EP_PEER ? "peer"
                                              : scheme == MOEC_EP_ROWS ? "rows"
                                                                       : "exact") +
                                  "_" + std::to_string(std::get<0>(param.param));
                         });

// ---- what is rarely drawn
struct Edge {
  const char* name;
  void (*change)(EpProblem&);
};
constexpr Edge kEdges[] = {
    {"no token anywhere", [](EpProblem& p) { p.tokens.assign(p.tokens.size(), 0); }},
    {"tokens of the last rank alone",
     [](EpProblem& p) {
       p.tokens.assign(p.tokens.size(), 0);
       p.tokens.back() = 5;
     }},
    {"a bound of 1",
     [](EpProblem& p) {
       for (size_t r = 0; r < p.tokens.size(); ++r) p.tokens[r] = r % 2 ? 0 : 1;
       p.bound = 1;
     }},
    {"one expert of a token", [](EpProblem& p) { p.top_k = 1; }},
    {"all experts of a token", [](EpProblem& p) { p.top_k = p.experts; }},
    {"the first rank with all experts but one each",
     [](EpProblem& p) {
       for (int r = 1; r <= p.ranks; ++r) p.begin[size_t(r)] = p.experts - p.ranks + r;
     }},
};

// Of tokens that are all masked on the last rank, too.
TEST(EpLayer, EdgesGiveTheBitsToo) {
  SCOPED_TRACE(seed_note());
  Draw draw(96);
  for (const uint32_t scheme : all_schemes())
    for (const int ranks : {1, 3})
      for (const Edge& edge : kEdges)
        for (const bool masked : {false, true}) {
          SCOPED_TRACE(std::string(edge.name) + (masked ? ", masked" : "") + ", scheme " +
                       std::to_string(scheme) + ", ranks " + std::to_string(ranks));
          EpProblem p = draw_ep_problem(ranks, scheme, draw);
          for (auto* values : {&p.x, &p.d_y, &p.residual}) values->clear();
          p.token_mask.clear();
          p.bound = 0;
          edge.change(p);
          fill_values(&p, draw);
          if (masked)
            for (const int T : p.tokens)
              p.token_mask.emplace_back(size_t(T), int(p.token_mask.size()) + 1 < ranks);
          const std::vector<Outputs> got = run_ep_layers(p);
          if (testing::Test::HasFailure()) return;
          expect_equal(got, run_in_sequence(p));
          expect_near_one_rank(p, got);
          if (testing::Test::HasFailure()) return;
        }
}

// Quantised experts of any format, adapters, both: as plain weights. Seen to fail: adapter ids that
// stay at home, and a codebook of each expert where the first one's is bound.
TEST(EpLayer, CodesAndAdaptersGiveTheBitsToo) {
  SCOPED_TRACE(seed_note());
  Draw draw(97);
  for (const uint32_t scheme : all_schemes())
    for (const int kind : {1, 2, 3}) {
      EpProblem p = draw_ep_problem(draw.one_of({1, 2, 3, 5}), scheme, draw);
      std::string note = "kind " + std::to_string(kind) + ", scheme " + std::to_string(scheme);
      if (kind & 1) note += ", " + quantise_weights(&p, draw);
      if (kind & 2) draw_adapters(&p, draw);
      SCOPED_TRACE(note);
      const std::vector<Outputs> got = run_ep_layers(p);
      if (testing::Test::HasFailure()) return;
      expect_equal(got, run_in_sequence(p));
      expect_near_one_rank(p, got);
      if (testing::Test::HasFailure()) return;
    }
}

double largest_of(const std::vector<Outputs>& all, const std::string& name) {
  double largest = 0;
  for (const double v : joined(all, name, MOEC_F32)) largest = std::max(largest, std::fabs(v));
  return largest;
}

// The gradients of experts alone, and for a power of two by nothing but a shift.
TEST(EpLayer, GradScaleOfExpertsAlone) {
  SCOPED_TRACE(seed_note());
  Draw draw(99);
  EpProblem p = draw_ep_problem(4, MOEC_EP_AUTO, draw);
  p.accumulate = false;
  p.dtype = p.grad_dtype = MOEC_F32;
  p.tokens = {5, 0, 9, 2};  // unequal: the mean of DDP divides by ranks, not by tokens
  p.bound = 0;
  p.x.clear();
  p.d_y.clear();
  p.residual.clear();
  p.token_mask.clear();
  fill_values(&p, draw);
  const std::vector<Outputs> plain = run_ep_layers(p);
  for (const float scale : {0.25f, 1.0f / 3}) {
    p.grad_scale = scale;
    const std::vector<Outputs> scaled = run_ep_layers(p);
    for (size_t r = 0; r < plain.size(); ++r)
      for (const auto& [name, bytes] : scaled[r]) {
        const bool is_int = name == "expert_ids";
        Vec want = decode(plain[r].at(name), is_int ? MOEC_I32 : MOEC_F32);
        const Vec got = decode(bytes, is_int ? MOEC_I32 : MOEC_F32);
        if (name == "d_experts")
          for (double& v : want) v *= static_cast<double>(scale);
        ASSERT_EQ(got.size(), want.size());
        if (scale == 0.25f) {
          EXPECT_EQ(got, want) << name << " of rank " << r;
          continue;
        }
        // A rounding of d_y and one of what comes back. What the router makes of it may cancel.
        if (name != "d_x" && name != "d_experts" && name != "d_routing_weights") continue;
        const double near = 1e-5 * largest_of(plain, name);
        for (size_t i = 0; i < got.size(); ++i)
          ASSERT_NEAR(got[i], want[i], near) << name << " of rank " << r;
      }
  }
}

TEST(EpLayer, TrainsAsOneProcess) {
  SCOPED_TRACE(seed_note());
  Draw draw(17);
  const EpProblem p = training_problem(3, draw);
  const std::vector<double> one = train_one(p, 20);
  RankBoard board(3);
  for (const std::string& error : run_ranks(3, [&](int r) {
         Rank rank(board, r);
         const std::vector<double> losses = train_ep(p, r, rank.context.get(), rank.comm.get(), 20);
         ASSERT_EQ(losses.size(), one.size());
         for (size_t i = 0; i < one.size(); ++i) EXPECT_NEAR(losses[i], one[i], 1e-5 * one[i]) << i;
         EXPECT_LT(losses.back(), 0.95 * losses.front());
       }))
    EXPECT_EQ(error, "");
}

// With a callback table that has no all_to_all_v, and what AUTO makes of it.
TEST(EpLayer, AutoGivesTheBitsToo) {
  SCOPED_TRACE(seed_note());
  Draw draw(98);
  for (const int ranks : {3, 6})
    for (const bool counts : {true, false}) {
      EpProblem p = draw_ep_problem(ranks, MOEC_EP_AUTO, draw);
      p.counts = counts;
      expect_equal(run_ep_layers(p), run_in_sequence(p));
    }
}

// Each rank runs the layer of its own problem; what each threw.
std::vector<std::string> run_apart(const std::vector<EpProblem>& problems) {
  const int ranks = static_cast<int>(problems.size());
  RankBoard board(ranks);
  return run_ranks(ranks, [&](int r) {
    Rank rank(board, r);
    run_ep_layer(problems[static_cast<size_t>(r)], rank);
  });
}

TEST(EpLayer, AdapterIdsOfSomeRanksAreNamed) {
  Draw draw(8);
  EpProblem p = training_problem(2, draw);
  draw_adapters(&p, draw);
  p.adapter_ids = {std::vector<int>(size_t(p.tokens[0])), std::vector<int>(size_t(p.tokens[1]))};
  EpProblem without = p;
  without.adapter_ids.clear();
  for (const std::string& error : run_apart({p, without}))
    EXPECT_TRUE(error.find("MOEC_E_MISMATCH") == 0 && error.find("adapter_ids") != error.npos)
        << error;
}

TEST(EpLayer, ARankWhoseCallIsRefusedIsTold) {
  Draw draw(5);
  std::vector<EpProblem> problems(3, training_problem(3, draw));
  problems[1].bound = 2;
  const std::vector<std::string> errors = run_apart(problems);
  EXPECT_NE(errors[1].find("MOEC_E_SHAPE"), std::string::npos) << errors[1];
  for (const int other : {0, 2}) {
    const std::string& error = errors[static_cast<size_t>(other)];
    EXPECT_NE(error.find("MOEC_E_COMM"), std::string::npos) << error;
    EXPECT_NE(error.find("rank 1 left a call of a layer"), std::string::npos) << error;
  }
}

TEST(EpLayer, AnotherBoundIsNamed) {
  Draw draw(6);
  std::vector<EpProblem> problems(3, training_problem(3, draw));
  problems[0].bound = problems[0].tokens[0];  // others: max_tokens
  const std::vector<std::string> errors = run_apart(problems);
  for (const std::string& error : errors)
    EXPECT_TRUE(error.find("MOEC_E_MISMATCH") == 0 && error.find("bound = ") != std::string::npos)
        << error;
}

TEST(EpLayer, RefusesWhatCannotBeParted) {
  Draw draw(7);
  for (const bool shared : {true, false}) {
    EpProblem p = training_problem(2, draw);
    if (shared)
      p.shared = MOEC_SHARED_SOFTMAX2, p.shared_inter = 8;
    else
      p.combine = MOEC_COMBINE_DATA_EXPERT;
    for (const std::string& error : run_apart({p, p}))
      EXPECT_NE(error.find("with an ep expected"), std::string::npos) << error;
  }
}

}  // namespace
}  // namespace moec::test
