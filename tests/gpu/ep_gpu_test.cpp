// SPDX-License-Identifier: Apache-2.0
// Experts on ranks that share a GPU, each with a context and a stream of its own, over callbacks
// that queue: layers give the bits of one process, forward and every gradient, in each scheme; a
// graph of a step of all ranks gives, replayed with other routings, what eager steps give; nobody
// waits or allocates, but EXACT for its counts; ranks that disagree are named by poll and by the
// next call; rows that do not fit are counted, of replays, too. It was seen to catch a plan of home
// whose rows are padded beyond its memory, and headers without the bound.
#include <cmath>

#include "gpu/ep_board.h"
#include "support/compare.h"
#include "support/ep_problem.h"
#include "support/tensors.h"

namespace moec::test {
namespace {

class EpGpu : public testing::Test {
 protected:
  void SetUp() override { setenv("MOEC_TEST_DEVICE", "cuda", 1); }  // of the support code
};

template <typename Board = DeviceBoard>
void expect_bits_of_one_process(const EpProblem& p) {
  Board board(p.ranks);
  const std::vector<Outputs> got = run_ep_layers(p, board);
  if (testing::Test::HasFailure()) return;
  const std::vector<Outputs> want = run_in_sequence(p);
  for (size_t r = 0; r < got.size(); ++r)
    for (const auto& [name, bytes] : got[r])
      EXPECT_TRUE(bytes == want[r].at(name)) << name << " of rank " << r;
}

constexpr uint32_t kSchemes[] = {MOEC_EP_GATHER, MOEC_EP_ROWS, MOEC_EP_EXACT};
std::string name_of(uint32_t scheme) {
  return scheme == MOEC_EP_GATHER ? "gather" : scheme == MOEC_EP_ROWS ? "rows" : "exact";
}

class EpGpuScheme : public EpGpu, public testing::WithParamInterface<uint32_t> {};
INSTANTIATE_TEST_SUITE_P(, EpGpuScheme, testing::ValuesIn(kSchemes),
                         [](const auto& param) { return name_of(param.param); });

TEST_P(EpGpuScheme, LayersGiveTheBitsOfOneProcess) {
  SCOPED_TRACE(seed_note());
  Draw draw(3);
  const int rounds = is_small_run() ? 1 : 8;
  for (const int ranks : {1, 2, 3})
    for (int round = 0; round < rounds; ++round) {
      EpProblem p = draw_ep_problem(ranks, GetParam(), draw);
      if (round % 4 == 2) quantise_weights(&p, draw);
      if (round % 4 >= 2) draw_adapters(&p, draw);
      SCOPED_TRACE(std::to_string(ranks) + " ranks, round " + std::to_string(round));
      expect_bits_of_one_process(p);
      if (HasFailure()) return;
    }
}

// What Hopper's kernels take, with more rows than a tile has, and a rank without a token.
EpProblem large_problem(int ranks, Draw& draw) {
  EpProblem p;
  p.ranks = ranks;
  p.experts = 8;
  p.top_k = 2;
  p.hidden = 128;
  p.inter = 64;
  p.shared = MOEC_SHARED_SIGMOID_GATE;
  p.shared_inter = 64;
  p.dtype = MOEC_BF16;
  p.begin = {0, 5};
  if (ranks == 3) p.begin.push_back(6);
  p.begin.push_back(8);
  p.tokens = {200, 77};
  if (ranks == 3) p.tokens = {150, 0, 210};
  fill_values(&p, draw);
  return p;
}

TEST_P(EpGpuScheme, LargerLayersToo) {
  SCOPED_TRACE(seed_note());
  Draw draw(4);
  for (const int ranks : {2, 3}) {
    EpProblem p = large_problem(ranks, draw);
    p.scheme = GetParam();
    expect_bits_of_one_process(p);
    p.select_bias.assign(8, 0.0);  // all tokens to rank 0, whose experts are the first ones
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

TEST_P(EpGpuScheme, OverTheFunctionsOfNccl) {
  SCOPED_TRACE(seed_note());
  Draw draw(5);
  for (const int ranks : {1, 3})
    expect_bits_of_one_process<NcclBoard>(draw_ep_problem(ranks, GetParam(), draw));
}

// ---- a step of all ranks in one graph
class RankSteps {
 public:
  RankSteps(DeviceBoard& board, int top_k, uint32_t scheme, int64_t pair_rows = 0)
      : board_(board), ranks_(board.size()) {
    parts_.resize(static_cast<size_t>(ranks_));
    run([&](int r) {
      Part& part = parts_[static_cast<size_t>(r)];
      part.rank = std::make_unique<Rank>(board, r);
      auto desc = sized<moec_ep_desc>();
      desc.hidden = Step::kHidden;
      desc.max_tokens = Step::kTokens;
      desc.num_experts = Step::kExperts;
      desc.top_k = top_k;
      desc.scheme = scheme;
      desc.pair_rows = pair_rows;
      desc.dtype = MOEC_BF16;
      static constexpr int32_t kTwo[] = {0, 3, 8}, kThree[] = {0, 3, 4, 8};
      desc.expert_begin = ranks_ == 2 ? kTwo : kThree;
      part.ep = make<Ep>(moec_ep_create, part.rank->comm.get(), &desc);
      part.step = ep_layer_step(part.rank->context.get(), top_k, part.ep.get());
    });
  }
  void fill(uint64_t seed, Routing routing) {
    for (int r = 0; r < ranks_; ++r) step(r).fill(seed * 10 + static_cast<uint64_t>(r), routing);
  }
  void queue() {
    run([&](int r) { step(r).queue(stream(r)); });
  }
  void wait() const {
    for (int r = 0; r < ranks_; ++r) CHECK_CUDA(cudaStreamSynchronize(stream(r)));
  }
  // The streams of the others join the capture of the first, and end in it.
  cudaGraphExec_t capture() {
    cudaEvent_t fork, join;
    CHECK_CUDA(cudaEventCreateWithFlags(&fork, cudaEventDisableTiming));
    CHECK_CUDA(cudaEventCreateWithFlags(&join, cudaEventDisableTiming));
    CHECK_CUDA(cudaStreamBeginCapture(stream(0), cudaStreamCaptureModeRelaxed));
    CHECK_CUDA(cudaEventRecord(fork, stream(0)));
    for (int r = 1; r < ranks_; ++r) CHECK_CUDA(cudaStreamWaitEvent(stream(r), fork, 0));
    queue();
    for (int r = 1; r < ranks_; ++r) {
      CHECK_CUDA(cudaEventRecord(join, stream(r)));
      CHECK_CUDA(cudaStreamWaitEvent(stream(0), join, 0));
    }
    cudaGraph_t graph;
    cudaGraphExec_t program;
    CHECK_CUDA(cudaStreamEndCapture(stream(0), &graph));
    CHECK_CUDA(cudaGraphInstantiate(&program, graph, 0));
    cudaGraphDestroy(graph);
    cudaEventDestroy(fork);
    cudaEventDestroy(join);
    return program;
  }
  std::vector<uint8_t> outputs() const {
    std::vector<uint8_t> all;
    for (const Part& part : parts_) {
      const std::vector<uint8_t> own = part.step->outputs();
      all.insert(all.end(), own.begin(), own.end());
    }
    return all;
  }
  moec_stats stats(int r) const { return stats_of(parts_[size_t(r)].rank->context.get()); }
  moec_ep_state state(int r) const {
    auto state = sized<moec_ep_state>();
    check(moec_ep_poll(parts_[size_t(r)].ep.get(), &state));
    return state;
  }
  cudaStream_t stream(int r) const { return static_cast<cudaStream_t>(board_.stream(r)); }
  int size() const { return ranks_; }

 private:
  struct Part {  // the step ends before the ep
    std::unique_ptr<Rank> rank;
    Ep ep;
    std::unique_ptr<Step> step;
  };
  Step& step(int r) const { return *parts_[static_cast<size_t>(r)].step; }
  void run(const std::function<void(int)>& body) {
    for (const std::string& error : board_.in_turns(body)) ASSERT_EQ(error, "");
  }

  DeviceBoard& board_;
  const int ranks_;
  std::vector<Part> parts_;
};

// GATHER; ROWS with room for all, and with too little: what is dropped is counted.
TEST_F(EpGpu, ReplaysWithOtherRoutingsEqualEagerSteps) {
  const int replays = is_small_run() ? 2 : 60;
  const struct {
    int ranks;
    uint32_t scheme;
    int64_t pair_rows;
  } rows[] = {{2, MOEC_EP_GATHER, 0},
              {3, MOEC_EP_GATHER, 0},
              {2, MOEC_EP_ROWS, 0},
              {3, MOEC_EP_ROWS, Step::kTokens / 4}};
  for (const auto& [ranks, scheme, pair_rows] : rows) {
    SCOPED_TRACE(name_of(scheme) + " of " + std::to_string(ranks) + " ranks");
    DeviceBoard board(ranks), eager_board(ranks);
    RankSteps captured(board, 2, scheme, pair_rows), eager(eager_board, 2, scheme, pair_rows);
    captured.fill(1, Routing::kRandom);
    captured.queue();
    captured.wait();
    const moec_stats before = captured.stats(0);
    const cudaGraphExec_t program = captured.capture();
    const moec_stats after = captured.stats(0);
    EXPECT_EQ(after.allocs, before.allocs);
    EXPECT_EQ(after.host_syncs, before.host_syncs);
    const int64_t dropped = captured.state(0).rows_dropped;
    std::vector<uint8_t> last;
    for (int replay = 0; replay < replays; ++replay) {
      const Routing routing = replay % 10 == 5 ? Routing::kOneExpert : Routing::kRandom;
      captured.fill(100 + static_cast<uint64_t>(replay), routing);
      eager.fill(100 + static_cast<uint64_t>(replay), routing);
      CHECK_CUDA(cudaGraphLaunch(program, captured.stream(0)));
      CHECK_CUDA(cudaStreamSynchronize(captured.stream(0)));
      eager.queue();
      eager.wait();
      const std::vector<uint8_t> got = captured.outputs();
      ASSERT_TRUE(got == eager.outputs()) << "replay " << replay;
      ASSERT_TRUE(got != last) << "replay " << replay << " did nothing new";
      last = got;
    }
    for (int r = 0; r < ranks; ++r) {
      EXPECT_EQ(captured.state(r).rows_dropped - dropped, eager.state(r).rows_dropped);
      EXPECT_EQ(eager.state(r).rows_dropped > 0, pair_rows > 0);
      EXPECT_EQ(eager.state(r).rows_needed > 0, scheme == MOEC_EP_ROWS);
      EXPECT_GE(captured.state(r).rows_needed, eager.state(r).rows_needed);
    }
    cudaGraphExecDestroy(program);
  }
}

// ---- ranks that disagree
struct Call {  // one rank's dispatch and combine
  Call(const Rank& rank, int64_t tokens, uint32_t scheme = MOEC_EP_AUTO) : rank_(rank) {
    auto desc = sized<moec_ep_desc>();
    desc.hidden = kHidden;
    desc.max_tokens = 8;
    desc.num_experts = 4;
    desc.top_k = 1;
    desc.scheme = scheme;
    desc.dtype = MOEC_F32;
    ep = make<Ep>(moec_ep_create, rank.comm.get(), &desc);
    args = sized<moec_ep_args>();
    const auto T = static_cast<size_t>(tokens);
    args.x = m.input(std::vector<double>(T * kHidden, 1.0), MOEC_F32, {tokens, kHidden});
    args.expert_ids = m.input(std::vector<double>(T, 3.0), MOEC_I32, {tokens, 1});
    args.y = m.output(MOEC_F32, {tokens, kHidden});
  }
  std::vector<double> run(int64_t bound) {
    args.bound = bound;
    check(moec_ep_dispatch(ep.get(), &args, rank_.stream));
    CHECK_CUDA(cudaMemsetAsync(args.partial.data, 0,
                               static_cast<size_t>(args.partial.shape[0]) * kHidden * 4,
                               static_cast<cudaStream_t>(rank_.stream)));
    check(moec_ep_combine(ep.get(), &args, rank_.stream));
    check(moec_context_sync(rank_.context.get(), rank_.stream));
    return m.read(args.y);
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
  if (GetParam() == MOEC_EP_EXACT) GTEST_SKIP() << "its ranks meet";
  DeviceBoard board(2);
  for (const std::string& error : run_ranks(2, [&](int r) {
         const Rank rank(board, r);
         Call call(rank, 2, GetParam());
         EXPECT_EQ(call.run(4), std::vector<double>(8, 0.0));
         EXPECT_EQ(call.args.total_tokens, -1);  // nobody waited for it
         EXPECT_EQ(call.poll(), MOEC_OK);
         for (const double v : call.run(r == 0 ? 4 : 8)) EXPECT_TRUE(std::isnan(v)) << v;
         EXPECT_EQ(call.poll(), MOEC_E_MISMATCH);
         try {
           call.run(4);
           ADD_FAILURE() << "a broken ep took a call";
         } catch (const Failure& failure) {
           const std::string text = failure.what();
           EXPECT_EQ(failure.status, MOEC_E_MISMATCH) << text;
           const std::string said = "rank " + std::to_string(1 - r) + " had bound = ";
           EXPECT_NE(text.find(said), std::string::npos) << text;
         }
         Call other(rank, 2, GetParam());  // the comm is well
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
    Call call(rank, 3);
    EXPECT_EQ(call.run(0), std::vector<double>(12, 0.0));
    CHECK_CUDA(cudaStreamBeginCapture(board.own, cudaStreamCaptureModeThreadLocal));
    EXPECT_EQ(moec_ep_dispatch(call.ep.get(), &call.args, board.own), MOEC_E_WOULD_SYNC);
    EXPECT_NE(last_error().find("MOEC_COMM_CAPTURE"), std::string::npos) << last_error();
    cudaGraph_t graph;
    CHECK_CUDA(cudaStreamEndCapture(board.own, &graph));
    cudaGraphDestroy(graph);
    EXPECT_EQ(call.run(0), std::vector<double>(12, 0.0));
  }
}

}  // namespace
}  // namespace moec::test
