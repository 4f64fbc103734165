// SPDX-License-Identifier: Apache-2.0
// Ranks that write to each other's memory, as threads on the CPU, when something goes wrong: who
// differs or does not come is named at the next call, sums are NaN, the ep is broken and everything
// else lives. It was seen to catch a step that went on after it had heard another bound.
#include <cmath>
#include <optional>

#include "ep_ranks.h"
#include "support/process_ranks.h"

namespace moec::test {
namespace {

struct Seat {
  Seat(RankBoard& board, int r, uint32_t timeout_ms = 0, int32_t max_blocks = 0)
      : rank(board, r), ep(another(timeout_ms, max_blocks)) {}
  Ep another(uint32_t timeout_ms = 0, int32_t max_blocks = 0) const {
    moec_ep_desc desc = ep_desc();
    desc.scheme = MOEC_EP_PEER;
    desc.timeout_ms = timeout_ms;
    desc.max_blocks = max_blocks;
    return make<Ep>(moec_ep_create, rank.comm.get(), &desc);
  }
  moec_status dispatch() { return moec_ep_dispatch(ep.get(), &tokens.args, nullptr); }
  moec_status combine() {
    for (int64_t i = 0; i < moec_tensor_numel(&tokens.args.partial); ++i)
      static_cast<float*>(tokens.args.partial.data)[i] = 1;
    return moec_ep_combine(ep.get(), &tokens.args, nullptr);
  }
  moec_status poll() const {
    auto state = sized<moec_ep_state>();
    check(moec_ep_poll(ep.get(), &state));
    return state.status;
  }
  void expect_works() {
    check(dispatch());
    check(combine());
    EXPECT_EQ(poll(), MOEC_OK);
    EXPECT_EQ(tokens.y[0], 2.0f);  // ids 0 and 5 of token 0 are of two ranks
  }
  void expect_nan() const {
    for (const float y : tokens.y) EXPECT_TRUE(std::isnan(y)) << y;
  }
  Rank rank;
  Ep ep;
  std::optional<Tokens> held{std::in_place};
  Tokens& tokens = *held;
};

// The status of the next call of each rank; its message names `part`.
void expect_broken(Seat& seat, moec_status status, const std::string& part) {
  EXPECT_EQ(seat.poll(), status);
  EXPECT_EQ(seat.dispatch(), status);
  EXPECT_NE(last_error().find(part), std::string::npos) << last_error() << " lacks " << part;
  seat.ep = seat.another();
  seat.held.emplace();
  seat.expect_works();
}

void on_ranks(int ranks, const std::function<void(int)>& body) {
  for (const std::string& error : run_ranks(ranks, body)) EXPECT_EQ(error, "");
}

TEST(EpPeer, AnotherBoundIsNamed) {
  RankBoard board(3);
  on_ranks(3, [&](int r) {
    Seat seat(board, r);
    seat.expect_works();
    seat.tokens.args.bound = r == 1 ? 4 : 8;
    check(seat.dispatch());
    for (int64_t i = 0; i < moec_tensor_numel(&seat.tokens.args.guest_ids); ++i)
      EXPECT_EQ(static_cast<const int32_t*>(seat.tokens.args.guest_ids.data)[i], -1);
    EXPECT_EQ(seat.combine(), MOEC_E_MISMATCH);
    expect_broken(seat, MOEC_E_MISMATCH, r == 1 ? "rank 0 had bound = 8" : "rank 1 had bound = 4");
  });
}

TEST(EpPeer, AnotherKindOfCallIsNamed) {
  RankBoard board(2);
  on_ranks(2, [&](int r) {
    Seat seat(board, r);
    check(seat.dispatch());
    check(r == 1 ? seat.dispatch() : seat.combine());
    if (r == 0) seat.expect_nan();
    expect_broken(seat, MOEC_E_MISMATCH, r == 1 ? "rank 0 had the step" : "rank 1 had the step");
  });
}

TEST(EpPeer, WhatGoesBesideIsCompared) {
  RankBoard board(2);
  on_ranks(2, [&](int r) {
    Seat seat(board, r);
    if (r == 1) seat.tokens.args.x_beside = seat.tokens.args.x;
    check(seat.dispatch());
    seat.tokens.args.x_beside = {};
    expect_broken(seat, MOEC_E_MISMATCH, "x_beside");
  });
}

TEST(EpPeer, ARankThatStopsIsATimeout) {
  RankBoard board(3);
  on_ranks(3, [&](int r) {
    Seat seat(board, r, 200);
    seat.expect_works();
    check(seat.dispatch());
    if (r == 2) return;  // and never comes again; it frees what it has
    check(seat.combine());
    seat.expect_nan();
    EXPECT_EQ(seat.poll(), MOEC_E_TIMEOUT);
    EXPECT_EQ(seat.combine(), MOEC_E_TIMEOUT);
    EXPECT_NE(last_error().find("rank 2 did not come to a combine within 200 ms"),
              std::string::npos)
        << last_error();
  });
  RankBoard left(2);
  on_ranks(2, [&](int r) { Seat(left, r).expect_works(); });
}

TEST(EpPeer, ADispatchIsCombinedOnce) {
  RankBoard board(2);
  on_ranks(2, [&](int r) {
    Seat seat(board, r, 0, 3);
    EXPECT_EQ(moec_ep_combine(seat.ep.get(), &seat.tokens.args, nullptr), MOEC_E_INVALID_STATE);
    seat.expect_works();
    EXPECT_EQ(moec_ep_combine(seat.ep.get(), &seat.tokens.args, nullptr), MOEC_E_INVALID_STATE);
    seat.expect_works();
  });
}

// Nobody meets: what one rank refuses the others wait for.
TEST(EpPeer, ARefusedCallIsNotTold) {
  RankBoard board(2);
  on_ranks(2, [&](int r) {
    Seat seat(board, r, 200);
    if (r == 1) {
      seat.tokens.args.x.dtype = MOEC_I32;
      EXPECT_EQ(seat.dispatch(), MOEC_E_DTYPE);
      return;
    }
    check(seat.dispatch());
    EXPECT_EQ(seat.poll(), MOEC_E_TIMEOUT);
  });
}

TEST(EpPeer, SeventeenRanksAreTooMany) {
  RankBoard board(17);
  expect_all(outcomes(17,
                      [&](int r) {
                        const Rank rank(board, r);
                        moec_ep_desc desc = ep_desc();
                        desc.num_experts = 17;
                        desc.scheme = MOEC_EP_PEER;
                        moec_ep* ep = nullptr;
                        return moec_ep_create(rank.comm.get(), &desc, &ep);
                      }),
             MOEC_E_UNSUPPORTED, "at most 16");
}

// Another process has other memory: all ranks are told which two.
TEST(EpPeer, ProcessesHaveNoPeersOnTheCpu) {
  const std::vector<int> ends = run_processes(3, [](ProcessBoard::Seat& seat) {
    auto context_desc = sized<moec_context_desc>();
    context_desc.num_threads = 1;
    const Context context = make<Context>(moec_context_create, &context_desc);
    const Comm comm = seat.make_comm(context.get());
    moec_ep_desc desc = ep_desc();
    desc.scheme = MOEC_EP_PEER;
    moec_ep* ep = nullptr;
    EXPECT_EQ(moec_ep_create(comm.get(), &desc, &ep), MOEC_E_UNSUPPORTED);
    EXPECT_NE(last_error().find("rank 0 does not reach the memory of rank 1"), std::string::npos)
        << last_error();
    desc.scheme = MOEC_EP_GATHER;  // the comm is well
    EXPECT_EQ(moec_ep_create(comm.get(), &desc, &ep), MOEC_OK) << last_error();
    moec_ep_free(ep);
  });
  EXPECT_EQ(ends, std::vector<int>(3, 0));
}

TEST(EpPeer, DescribeSaysWhy) {
  RankBoard board(2);
  on_ranks(2, [&](int r) {
    const Seat seat(board, r);
    char text[1024];
    uint64_t need = 0;
    check(moec_ep_describe(seat.ep.get(), text, sizeof text, &need));
    EXPECT_NE(std::string(text).find("\"peer\""), std::string::npos) << text;
    for (const char* const part : {"reach each other's memory as threads of one process",
                                   R"("blocks": {"dispatch": 1, "combine": 1})"})
      EXPECT_NE(std::string(text).find(part), std::string::npos) << text;
  });
}

}  // namespace
}  // namespace moec::test
