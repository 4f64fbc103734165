// SPDX-License-Identifier: Apache-2.0
// Experts on ranks that share a GPU, or have one each, with a context and a stream of their own, in
// each scheme: over callbacks that queue, and as peers that write to each other's memory. Layers
// give the bits of one process, forward and every gradient; graphs of a step give, replayed with
// other routings, what eager steps give; nobody waits or allocates, but EXACT for its counts; ranks
// that disagree, or do not come, are named by poll and by the next call; rows that do not fit are
// counted, of replays, too. It was seen to catch a plan of home whose rows are padded beyond its
// memory, and headers without the bound.
#include <algorithm>
#include <barrier>
#include <cmath>
#include <utility>

#include "gpu/ep_steps.h"
#include "support/compare.h"
#include "support/ep_problem.h"
#include "support/tensors.h"

namespace moec::test {
namespace {

// A kernel that is loaded at its first call waits for those that wait for other ranks.
const int kLoadsAtOnce = setenv("CUDA_MODULE_LOADING", "EAGER", 1);

class EpGpu : public testing::Test {
 protected:
  void SetUp() override { setenv("MOEC_TEST_DEVICE", "cuda", 1); }  // of the support code
};
constexpr uint32_t kSchemes[] = {MOEC_EP_GATHER, MOEC_EP_PEER, MOEC_EP_ROWS, MOEC_EP_EXACT};
std::string name_of(uint32_t scheme) {
  static constexpr const char* kNames[] = {"auto", "gather", "peer", "rows", "exact"};
  return kNames[scheme];
}
// Few ranks, which share GPUs where there are fewer; and the most where those are more.
std::vector<int> and_most(std::vector<int> ranks) {
  if (most_ranks() > ranks.back()) ranks.push_back(most_ranks());
  return ranks;
}
class EpGpuScheme : public EpGpu, public testing::WithParamInterface<uint32_t> {};
INSTANTIATE_TEST_SUITE_P(, EpGpuScheme, testing::ValuesIn(kSchemes),
                         [](const auto& param) { return name_of(param.param); });

template <typename Board = DeviceBoard>
void expect_bits_of_one_process(const EpProblem& p) {
  Board board(p.ranks);
  if (p.scheme == MOEC_EP_PEER) {
    // What is loaded at its first use, such as cuBLASLt's kernels, waits for kernels that wait for
    // other ranks on the same GPU: GATHER uses all of it before.
    EpProblem gather = p;
    gather.scheme = MOEC_EP_GATHER;
    run_ep_layers(gather, board);
  }
  const std::vector<Outputs> got = run_ep_layers(p, board);
  if (testing::Test::HasFailure()) return;
  const std::vector<Outputs> want = run_in_sequence(p);
  for (size_t r = 0; r < got.size(); ++r)
    for (const auto& [name, bytes] : got[r])
      EXPECT_TRUE(bytes == want[r].at(name)) << name << " of rank " << r;
}

TEST_P(EpGpuScheme, LayersGiveTheBitsOfOneProcess) {
  SCOPED_TRACE(seed_note());
  Draw draw(3);
  const int rounds = is_small_run() ? 1 : 8;
  for (const int ranks : and_most(is_small_run() ? std::vector{2} : std::vector{1, 2, 3, 4}))
    for (int round = 0; round < rounds; ++round) {
      EpProblem p = draw_ep_problem(ranks, GetParam(), draw);
      if (round % 4 == 2) quantise_weights(&p, draw);
      if (round % 4 >= 2) draw_adapters(&p, draw);
      SCOPED_TRACE(std::to_string(ranks) + " ranks, round " + std::to_string(round));
      expect_bits_of_one_process(p);
      if (HasFailure()) return;
    }
}

// What Hopper's kernels take, of so many tokens of each rank.
EpProblem hopper_problem(std::vector<int> tokens, uint32_t scheme, Draw& draw) {
  EpProblem p;
  p.ranks = static_cast<int>(tokens.size());
  p.scheme = scheme;
  p.experts = 8;
  p.top_k = 2;
  p.hidden = 128;
  p.inter = 64;
  p.shared = MOEC_SHARED_SIGMOID_GATE;
  p.shared_inter = 64;
  p.dtype = MOEC_BF16;
  p.begin = {0};
  for (int r = 1; r < p.ranks; ++r) p.begin.push_back(std::min(4 + r, p.experts - p.ranks + r));
  p.begin.push_back(p.experts);
  p.tokens = std::move(tokens);
  fill_values(&p, draw);
  return p;
}
// More rows than a tile has, and a rank without a token.
std::vector<int> tokens_of(int ranks) {
  if (ranks == 2) return {200, 77};
  std::vector<int> tokens = {150, 0, 210};
  while (static_cast<int>(tokens.size()) < ranks) tokens.push_back(tokens.back() - 30);
  return tokens;
}

TEST_P(EpGpuScheme, LargerLayersToo) {
  if (is_under("racecheck")) GTEST_SKIP() << "takes minutes; kernel_check has these kernels";
  SCOPED_TRACE(seed_note());
  Draw draw(4);
  for (const int ranks : and_most({2, 3})) {
    EpProblem p = hopper_problem(tokens_of(ranks), GetParam(), draw);
    expect_bits_of_one_process(p);
    p.select_bias.assign(8, 0.0);  // all tokens to the first ranks, rank 0 alone of two and three
    for (size_t e = 0; e < 5; ++e) p.select_bias[e] = 100;
    expect_bits_of_one_process(p);
    p.select_bias.clear();  // a capacity of the tokens of all ranks, which the host does not know
    for (const uint32_t drop : {MOEC_DROP_BY_POSITION, MOEC_DROP_BY_WEIGHT}) {
      p.drop = drop;
      p.capacity_factor = 1.0f;
      expect_bits_of_one_process(p);
    }
    if (HasFailure() || is_small_run()) return;
  }
}

// At the bound 24 rows an expert, of which a rank gets 6 by ROWS and EXACT: portable kernels of few
// rows have other bits than those of many. They are chosen as for the bound by each scheme.
TEST_P(EpGpuScheme, BoundsChooseTheKernelsOfCodes) {
  SCOPED_TRACE(seed_note());
  Draw draw(7);
  for (const char* format : {"codebook4_64", "int8"})
    for (const int tokens : {4, 12}) {
      EpProblem p = hopper_problem(std::vector<int>(4, tokens), GetParam(), draw);
      p.top_k = 1;
      p.begin = {0, 2, 4, 6, 8};
      SCOPED_TRACE(quantise_weights(&p, draw, format) + ", " + std::to_string(tokens) + " tokens");
      expect_bits_of_one_process(p);
    }
}

// What a sanitizer sees of kernels on several GPUs that wait for each other.
TEST_F(EpGpu, PeersOfSixteenTokens) {
  SCOPED_TRACE(seed_note());
  Draw draw(6);
  const std::vector<int> tokens(static_cast<size_t>(and_most({2}).back()), 16);
  expect_bits_of_one_process(hopper_problem(tokens, MOEC_EP_PEER, draw));
}

TEST_P(EpGpuScheme, OverTheFunctionsOfNccl) {
  SCOPED_TRACE(seed_note());
  Draw draw(5);
  for (const int ranks : and_most({1, 3}))
    expect_bits_of_one_process<NcclBoard>(draw_ep_problem(ranks, GetParam(), draw));
}

// ---- graphs
// What replays give, each `times` over, and an eager step for each: of GATHER, or where rows may
// be dropped of the same scheme.
void expect_replays(int ranks, uint32_t scheme, int replays, int times, int64_t pair_rows = 0) {
  SCOPED_TRACE(name_of(scheme) + " of " + std::to_string(ranks) + " ranks");
  DeviceBoard board(ranks), eager_board(ranks);
  const bool counts = scheme == MOEC_EP_ROWS;
  RankSteps captured(board, 2, scheme, pair_rows);
  RankSteps eager(eager_board, 2, counts ? scheme : uint32_t{MOEC_EP_GATHER}, pair_rows);
  eager.fill(1, Routing::kRandom);
  eager.queue();
  eager.wait();
  captured.fill(1, Routing::kRandom);
  captured.queue();
  captured.wait();
  const moec_stats before = captured.stats(0);
  const std::vector<cudaGraphExec_t> programs = captured.capture();
  const moec_stats after = captured.stats(0);
  EXPECT_EQ(after.allocs, before.allocs);
  EXPECT_EQ(after.host_syncs, before.host_syncs);
  const int64_t dropped = captured.state(0).rows_dropped, of_eager = eager.state(0).rows_dropped;
  std::vector<uint8_t> last;
  for (int replay = 0; replay < replays; ++replay) {
    const Routing routing = replay % 10 == 5 ? Routing::kOneExpert : Routing::kRandom;
    captured.fill(100 + static_cast<uint64_t>(replay), routing);
    eager.fill(100 + static_cast<uint64_t>(replay), routing);
    eager.queue();
    eager.wait();
    const std::vector<uint8_t> want = eager.outputs();
    for (int time = 0; time < times; ++time) {
      captured.replay(programs);
      ASSERT_TRUE(captured.outputs() == want) << "replay " << replay;
    }
    ASSERT_TRUE(want != last) << "replay " << replay << " did nothing new";
    last = want;
  }
  for (int r = 0; counts && r < ranks; ++r) {
    EXPECT_EQ(captured.state(r).rows_dropped - dropped,
              times * (eager.state(r).rows_dropped - of_eager));
    EXPECT_EQ(eager.state(r).rows_dropped > 0, pair_rows > 0);
    EXPECT_GT(eager.state(r).rows_needed, 0);
    EXPECT_GE(captured.state(r).rows_needed, eager.state(r).rows_needed);
  }
  for (const cudaGraphExec_t program : programs) cudaGraphExecDestroy(program);
}

TEST_F(EpGpu, ReplaysWithOtherRoutingsEqualEagerSteps) {
  if (is_under("racecheck")) GTEST_SKIP() << "takes minutes; eager steps have these kernels";
  for (const int ranks : and_most({2, 3})) {
    expect_replays(ranks, MOEC_EP_GATHER, is_small_run() ? 2 : 50, 1);
    expect_replays(ranks, MOEC_EP_PEER, is_small_run() ? 2 : 100, is_small_run() ? 1 : 10);
  }
  expect_replays(2, MOEC_EP_ROWS, is_small_run() ? 2 : 50, 1);
  expect_replays(3, MOEC_EP_ROWS, is_small_run() ? 2 : 50, 1, Step::kTokens / 4);
}

// ---- ranks that disagree
struct Call {  // one rank's dispatch and combine
  Call(const Rank& rank, int64_t tokens, uint32_t scheme, uint32_t timeout_ms = 6000)
      : rank_(rank) {
    auto desc = sized<moec_ep_desc>();
    desc.scheme = scheme;
    desc.timeout_ms = timeout_ms;
    desc.hidden = kHidden;
    desc.max_tokens = 8;
    desc.num_experts = 16;
    desc.top_k = 1;
    desc.dtype = MOEC_F32;
    ep = make<Ep>(moec_ep_create, rank.comm.get(), &desc);
    args = sized<moec_ep_args>();
    const auto T = static_cast<size_t>(tokens);
    args.x = m.input(std::vector<double>(T * kHidden, 1.0), MOEC_F32, {tokens, kHidden});
    args.expert_ids = m.input(std::vector<double>(T, 9.0), MOEC_I32, {tokens, 1});
    args.y = m.output(MOEC_F32, {tokens, kHidden});
  }
  void queue(int64_t bound) {
    args.bound = bound;
    check(moec_ep_dispatch(ep.get(), &args, rank_.stream));
    CHECK_CUDA(cudaMemsetAsync(args.partial.data, 0,
                               static_cast<size_t>(args.partial.shape[0]) * kHidden * 4,
                               static_cast<cudaStream_t>(rank_.stream)));
    check(moec_ep_combine(ep.get(), &args, rank_.stream));
  }
  std::vector<double> run(int64_t bound) {
    queue(bound);
    check(moec_context_sync(rank_.context.get(), rank_.stream));
    return m.read(args.y);
  }
  void expect_broken(moec_status status, const std::string& part) {
    EXPECT_EQ(poll(), status);
    try {
      run(4);
      ADD_FAILURE() << "a broken ep took a call";
    } catch (const Failure& failure) {
      const std::string text = failure.what();
      EXPECT_EQ(failure.status, status) << text;
      EXPECT_NE(text.find(part), std::string::npos) << text;
    }
  }
  moec_status poll() const {
    auto state = sized<moec_ep_state>();
    check(moec_ep_poll(ep.get(), &state));
    return state.status;
  }
  static constexpr int64_t kHidden = 4;
  const Rank& rank_;
  Tensors m;
  Ep ep;
  moec_ep_args args;
};

TEST_P(EpGpuScheme, ADisagreementIsReportedByPollAndByTheNextCall) {
  const uint32_t scheme = GetParam();
  if (scheme == MOEC_EP_EXACT) GTEST_SKIP() << "its ranks meet";
  const int ranks = and_most({2}).back();
  DeviceBoard board(ranks);
  // Under a sanitizer a copy to the host waits for all kernels of its GPU, and so for those of a
  // rank that waits for this one. So all have read before any goes on.
  std::barrier read(ranks);
  for (const std::string& error : run_ranks(ranks, [&](int r) {
         const Rank rank(board, r);
         Call call(rank, 2, scheme);
         EXPECT_EQ(call.run(4), std::vector<double>(8, 0.0));
         EXPECT_EQ(call.args.total_tokens, -1);  // nobody waited for it
         EXPECT_EQ(call.poll(), MOEC_OK);
         read.arrive_and_wait();
         try {
           for (const double v : call.run(r == 0 ? 4 : 8)) EXPECT_TRUE(std::isnan(v)) << v;
         } catch (const Failure& failure) {  // of the combine: the device was quick to say it
           EXPECT_EQ(failure.status, MOEC_E_MISMATCH) << failure.what();
         }
         call.expect_broken(MOEC_E_MISMATCH, r == 0 ? " had bound = 8" : "rank 0 had bound = 4");
         Call other(rank, 2, scheme);  // the comm is well
         EXPECT_EQ(other.run(4), std::vector<double>(8, 0.0));
       }))
    EXPECT_EQ(error, "");
}

// A rank that does not take part is told of at the meeting; the next call is well.
TEST_F(EpGpu, ExactMeetsToExchangeCounts) {
  DeviceBoard board(2);
  for (const std::string& error : run_ranks(2, [&](int r) {
         const Rank rank(board, r);
         Call call(rank, 2, MOEC_EP_EXACT);
         const auto expect_refused = [&](moec_status status, const char* part) {
           EXPECT_EQ(moec_ep_dispatch(call.ep.get(), &call.args, rank.stream), status);
           EXPECT_NE(last_error().find(part), std::string::npos) << last_error();
           call.args.bound = 0;
           EXPECT_EQ(call.run(0), std::vector<double>(8, 0.0));
           EXPECT_EQ(call.args.total_tokens, 4);
         };
         call.args.bound = r == 0 ? 4 : 8;
         expect_refused(MOEC_E_MISMATCH, "bound = ");
         call.args.bound = r == 0 ? 1 : 0;
         if (r == 0)
           expect_refused(MOEC_E_SHAPE, "the bound is 1");
         else
           expect_refused(MOEC_E_COMM, "rank 0 left a dispatch");

         const auto stream = static_cast<cudaStream_t>(rank.stream);
         CHECK_CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
         EXPECT_EQ(moec_ep_dispatch(call.ep.get(), &call.args, rank.stream), MOEC_E_WOULD_SYNC);
         EXPECT_NE(last_error().find("MOEC_EP_EXACT"), std::string::npos) << last_error();
         cudaGraph_t graph;
         CHECK_CUDA(cudaStreamEndCapture(stream, &graph));
         cudaGraphDestroy(graph);
         EXPECT_EQ(call.run(0), std::vector<double>(8, 0.0));
       }))
    EXPECT_EQ(error, "");
}

TEST_F(EpGpu, APeerThatDoesNotComeIsATimeout) {
  DeviceBoard board(2);
  for (const std::string& error : run_ranks(2, [&](int r) {
         const Rank rank(board, r);
         Call call(rank, 2, MOEC_EP_PEER, 300);
         EXPECT_EQ(call.run(4), std::vector<double>(8, 0.0));
         if (r == 0) {
           for (const double v : call.run(4)) EXPECT_TRUE(std::isnan(v)) << v;
           call.expect_broken(MOEC_E_TIMEOUT, "rank 1 did not come to a dispatch within 300 ms");
         }
         Call other(rank, 2, MOEC_EP_PEER);
         EXPECT_EQ(other.run(4), std::vector<double>(8, 0.0));
       }))
    EXPECT_EQ(error, "");
}

// A comm whose callbacks wait, or do not say that they may be captured.
TEST_F(EpGpu, WhatCannotBeCapturedIsRefused) {
  for (const bool queues : {true, false}) {
    struct Plain : RankBoard {  // one rank, which copies
      explicit Plain(bool on_device) : RankBoard(1), queues(on_device) {
        CHECK_CUDA(cudaStreamCreateWithFlags(&own, cudaStreamNonBlocking));
      }
      ~Plain() override { cudaStreamDestroy(own); }
      moec_comm_callbacks callbacks(int, bool) override {
        auto c = sized<moec_comm_callbacks>();
        c.flags = queues ? uint32_t{MOEC_COMM_DEVICE} : 0;
        c.all_gather = c.all_to_all = [](void*, const void* send, void* recv, uint64_t bytes,
                                         moec_stream to) -> int32_t {
          return cudaMemcpyAsync(recv, send, bytes, cudaMemcpyDefault,
                                 static_cast<cudaStream_t>(to));
        };
        return c;
      }
      moec_stream stream(int) const override { return own; }
      bool queues;
      cudaStream_t own = nullptr;
    } board(queues);
    const Rank rank(board, 0);
    Call call(rank, 3, MOEC_EP_GATHER), peer(rank, 3, MOEC_EP_PEER);
    EXPECT_EQ(call.run(0), std::vector<double>(12, 0.0));
    EXPECT_EQ(peer.run(0), std::vector<double>(12, 0.0));
    CHECK_CUDA(cudaStreamBeginCapture(board.own, cudaStreamCaptureModeThreadLocal));
    EXPECT_EQ(moec_ep_dispatch(call.ep.get(), &call.args, board.own), MOEC_E_WOULD_SYNC);
    EXPECT_NE(last_error().find("MOEC_COMM_CAPTURE"), std::string::npos) << last_error();
    peer.queue(0);  // calls no callback
    cudaGraph_t graph;
    CHECK_CUDA(cudaStreamEndCapture(board.own, &graph));
    cudaGraphDestroy(graph);
    EXPECT_EQ(call.run(0), std::vector<double>(12, 0.0));
  }
}

}  // namespace
}  // namespace moec::test
