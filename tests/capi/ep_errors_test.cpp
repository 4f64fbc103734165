// SPDX-License-Identifier: Apache-2.0
// Expert parallelism that goes wrong: ranks that disagree, refuse, stop or run out of memory. Each
// ends in a named error on every rank, and nobody hangs. It was seen to catch meetings
// that compared nothing, and a rank that refused without telling.
#include "ep_ranks.h"

namespace moec::test {
namespace {

// ---- create
using Change = std::function<void(moec_ep_desc&)>;
std::vector<Outcome> create_with(int odd_rank, const Change& change, int ranks = 3) {
  RankBoard board(ranks);
  return outcomes(ranks, [&](int r) {
    Rank rank(board, r);
    moec_ep_desc desc = ep_desc();
    if (r == odd_rank || odd_rank < 0) change(desc);
    moec_ep* ep = nullptr;
    const moec_status status = moec_ep_create(rank.comm.get(), &desc, &ep);
    EXPECT_EQ(status == MOEC_OK, ep != nullptr);
    moec_ep_free(ep);
    return status;
  });
}

TEST(EpCreate, RanksThatDisagreeAreNamed) {
  static const int32_t kOther[] = {0, 1, 2, 6};
  const struct {
    const char* name;
    Change change;
  } rows[] = {
      {"desc.hidden", [](auto& d) { d.hidden = 5; }},
      {"desc.max_tokens", [](auto& d) { d.max_tokens = 9; }},
      {"desc.num_experts", [](auto& d) { d.num_experts = 7; }},
      {"desc.num_zero_experts", [](auto& d) { d.num_zero_experts = 1; }},
      {"desc.top_k", [](auto& d) { d.top_k = 1; }},
      {"the scheme", [](auto& d) { d.scheme = MOEC_EP_GATHER; }},
      {"desc.dtype", [](auto& d) { d.dtype = MOEC_BF16; }},
      {"desc.partial_dtype",
       [](auto& d) {
         d.dtype = MOEC_F32;
         d.partial_dtype = MOEC_F32;
         d.flags = MOEC_EP_FORWARD_ONLY;
       }},
      {"desc.expert_begin", [](auto& d) { d.expert_begin = kOther; }},
      {"desc.grad_scale", [](auto& d) { d.grad_scale = 0.5f; }},
      {"desc.timeout_ms", [](auto& d) { d.timeout_ms = 5; }},
      {"desc.max_blocks", [](auto& d) { d.max_blocks = 5; }},
  };
  for (const auto& row : rows) {
    const std::vector<Outcome> all = create_with(1, row.change);
    const std::string name =
        std::string(row.name) == "desc.partial_dtype" ? "desc.flags" : row.name;
    expect_all(all, MOEC_E_MISMATCH, name);
    EXPECT_NE(all[0].message.find("rank 1"), std::string::npos) << all[0].message;
    EXPECT_NE(all[2].message.find("rank 1"), std::string::npos) << all[2].message;
  }
}

TEST(EpCreate, ARefusedDescriptionIsTold) {
  const struct {
    moec_status status;
    Change change;
  } rows[] = {
      {MOEC_E_INVALID_ARG, [](auto& d) { d.hidden = 0; }},
      {MOEC_E_INVALID_ARG, [](auto& d) { d.num_experts = 2; }},
      {MOEC_E_INVALID_ARG, [](auto& d) { d.flags = 64; }},
      {MOEC_E_INVALID_ARG, [](auto& d) { d.grad_scale = -1; }},
      {MOEC_E_INVALID_ARG, [](auto& d) { d.pair_rows = 1; }},  // of EXACT
      {MOEC_E_DTYPE, [](auto& d) { d.dtype = MOEC_I32; }},
      {MOEC_E_DTYPE, [](auto& d) { d.partial_dtype = MOEC_BF16; }},
      {MOEC_E_INVALID_ARG, [](auto& d) { d.max_blocks = 129; }},
      {MOEC_E_ABI, [](auto& d) { d.struct_size = 3; }},
  };
  for (const auto& row : rows) {
    const std::vector<Outcome> all = create_with(2, row.change);
    EXPECT_EQ(all[2].status, row.status) << all[2].message;
    for (const int other : {0, 1}) {
      const Outcome& told = all[static_cast<size_t>(other)];
      EXPECT_EQ(told.status, MOEC_E_COMM) << told.message;
      EXPECT_NE(told.message.find("rank 2 left moec_ep_create"), std::string::npos) << told.message;
    }
  }
}

TEST(EpCreate, ExactNeedsItsCallback) {
  RankBoard board(2);
  expect_all(outcomes(2,
                      [&](int r) {
                        Rank rank(board, r, false);
                        moec_ep_desc desc = ep_desc();
                        desc.scheme = MOEC_EP_EXACT;
                        moec_ep* ep = nullptr;
                        return moec_ep_create(rank.comm.get(), &desc, &ep);
                      }),
             MOEC_E_UNSUPPORTED, "all_to_all_v");
}

TEST(EpCreate, AutoIsDecidedByWhatAllShare) {
  const struct {
    int ranks;
    bool counts;
    const char* scheme;
  } rows[] = {{3, true, "\"exact\""}, {3, false, "\"gather\""}, {6, false, "\"rows\""}};
  for (const auto& row : rows) {
    RankBoard board(row.ranks);
    for (const std::string& error : run_ranks(row.ranks, [&](int r) {
           Rank rank(board, r, row.counts);
           const moec_ep_desc desc = ep_desc();
           const Ep ep = make<Ep>(moec_ep_create, rank.comm.get(), &desc);
           char text[1024];
           uint64_t need = 0;
           check(moec_ep_describe(ep.get(), text, sizeof text, &need));
           EXPECT_NE(std::string(text).find(row.scheme), std::string::npos) << text;
           auto info = sized<moec_ep_info>();
           check(moec_ep_query(ep.get(), &info));
           EXPECT_EQ(info.expert_begin, 6 * r / row.ranks);
           EXPECT_EQ(info.max_guests, 8 * row.ranks);
           EXPECT_EQ(moec_ep_describe(ep.get(), text, 4, &need), MOEC_E_WORKSPACE);
         }))
      EXPECT_EQ(error, "");
  }
}

TEST(EpCreate, AnAllocatorThatFailsIsTold) {
  auto allocator = sized<moec_allocator>();
  allocator.alloc = [](void*, size_t, size_t, int32_t, int32_t, moec_stream) -> void* {
    return nullptr;
  };
  allocator.release = [](void*, void*, size_t, int32_t, int32_t, moec_stream) {};
  RankBoard board(3);
  const std::vector<Outcome> all = outcomes(3, [&](int r) {
    Rank rank(board, r, true, r == 1 ? &allocator : nullptr);
    const moec_ep_desc desc = ep_desc();
    moec_ep* ep = nullptr;
    const moec_status status = moec_ep_create(rank.comm.get(), &desc, &ep);
    moec_ep_free(ep);
    return status;
  });
  EXPECT_EQ(all[1].status, MOEC_E_OUT_OF_MEMORY);
  EXPECT_EQ(all[0].status, MOEC_E_COMM);
  EXPECT_EQ(all[2].status, MOEC_E_COMM);
  EXPECT_NE(all[0].message.find("rank 1"), std::string::npos) << all[0].message;
}

// ---- calls
struct Seat {
  Seat(RankBoard& board, int r) : rank(board, r) {
    const moec_ep_desc desc = ep_desc();
    ep = make<Ep>(moec_ep_create, rank.comm.get(), &desc);
  }
  moec_status dispatch() { return moec_ep_dispatch(ep.get(), &tokens.args, nullptr); }
  moec_status combine() { return moec_ep_combine(ep.get(), &tokens.args, nullptr); }
  Rank rank;
  Ep ep;
  Tokens tokens;
};

// The odd rank does `wrong`; afterwards all of them do a dispatch that is well.
void expect_recovers(const std::function<void(Seat&)>& wrong, moec_status own, moec_status others,
                     const std::string& part) {
  RankBoard board(3);
  std::vector<Outcome> after(3);
  const std::vector<Outcome> all = outcomes(3, [&](int r) {
    Seat seat(board, r);
    if (r == 1) wrong(seat);
    const moec_status status = seat.dispatch();
    const std::string message = status ? last_error() : "";
    EXPECT_EQ(status, r == 1 ? own : others) << message;
    if (r != 1) {
      EXPECT_NE(message.find(part), std::string::npos) << message;
      EXPECT_NE(message.find("rank 1"), std::string::npos) << message;
    }
    seat.tokens = Tokens();
    seat.tokens.args.x = view(seat.tokens.x, MOEC_F32, 2, kHidden);
    seat.tokens.args.expert_ids = view(seat.tokens.ids, MOEC_I32, 2, kTopK);
    return seat.dispatch();
  });
  for (const Outcome& one : all) EXPECT_EQ(one.status, MOEC_OK) << one.message;
}

TEST(EpCalls, OtherBoundsAreNamedNotNaN) {
  expect_recovers([](Seat& s) { s.tokens.args.bound = 4; }, MOEC_E_MISMATCH, MOEC_E_MISMATCH,
                  "bound");
}
TEST(EpCalls, XBesideOfOneRankIsNamed) {
  expect_recovers([](Seat& s) { s.tokens.args.x_beside = s.tokens.args.x; }, MOEC_E_MISMATCH,
                  MOEC_E_MISMATCH, "x_beside");
}
TEST(EpCalls, ARefusedShapeIsTold) {
  expect_recovers([](Seat& s) { s.tokens.args.x = view(s.tokens.x, MOEC_F32, 2, 3); }, MOEC_E_SHAPE,
                  MOEC_E_COMM, "left a dispatch");
}
TEST(EpCalls, MoreTokensThanTheBoundAreTold) {
  expect_recovers([](Seat& s) { s.tokens.args.bound = 1; }, MOEC_E_SHAPE, MOEC_E_COMM,
                  "left a dispatch");
}
TEST(EpCalls, AStructOfNoKnownSizeIsTold) {
  expect_recovers([](Seat& s) { s.tokens.args.struct_size = 12; }, MOEC_E_ABI, MOEC_E_COMM,
                  "left a dispatch");
}
TEST(EpCalls, ADtypeIsTold) {
  expect_recovers([](Seat& s) { s.tokens.args.x.dtype = MOEC_I32; }, MOEC_E_DTYPE, MOEC_E_COMM,
                  "left a dispatch");
}

TEST(EpCalls, AnotherOrderOfCallsIsNamed) {
  RankBoard board(3);
  expect_all(outcomes(3,
                      [&](int r) {
                        Seat seat(board, r);
                        check(seat.dispatch());
                        return r == 2 ? seat.dispatch() : seat.combine();
                      }),
             MOEC_E_MISMATCH, "a dispatch");
}

TEST(EpCalls, AnotherEpOfTheCommIsNamed) {
  RankBoard board(2);
  expect_all(outcomes(2,
                      [&](int r) {
                        Seat seat(board, r);
                        const moec_ep_desc desc = ep_desc();
                        const Ep second = make<Ep>(moec_ep_create, seat.rank.comm.get(), &desc);
                        return moec_ep_dispatch(r ? second.get() : seat.ep.get(), &seat.tokens.args,
                                                nullptr);
                      }),
             MOEC_E_MISMATCH, "ep (of those made with the comm)");
}

TEST(EpCalls, CombineWithoutDispatch) {
  RankBoard board(2);
  for (const Outcome& one : outcomes(2, [&](int r) {
         Seat seat(board, r);
         return seat.combine();
       }))
    EXPECT_EQ(one.status, MOEC_E_INVALID_STATE) << one.message;
}

TEST(EpCalls, ARankThatStopsIsATimeout) {
  RankBoard board(3, std::chrono::milliseconds(100));
  const std::vector<Outcome> all = outcomes(3, [&](int r) -> moec_status {
    Seat seat(board, r);
    check(seat.dispatch());
    if (r == 0) return MOEC_OK;  // and never comes again
    const moec_status status = seat.combine();
    EXPECT_EQ(status, MOEC_E_TIMEOUT);
    auto state = sized<moec_ep_state>();
    check(moec_ep_poll(seat.ep.get(), &state));
    EXPECT_EQ(state.status, MOEC_E_TIMEOUT);
    return seat.dispatch();  // at once: the comm is broken
  });
  EXPECT_EQ(all[1].status, MOEC_E_TIMEOUT);
  EXPECT_NE(all[1].message.find("broken"), std::string::npos) << all[1].message;
  // The ranks that are left go on with a new comm.
  RankBoard left(2);
  for (const Outcome& one : outcomes(2, [&](int r) {
         Seat seat(left, r);
         check(seat.dispatch());
         return seat.combine();
       }))
    EXPECT_EQ(one.status, MOEC_OK) << one.message;
}

TEST(EpCalls, ACallbackThatFailsBreaksTheComm) {
  RankBoard board(2, std::chrono::milliseconds(100));
  const std::vector<Outcome> all = outcomes(2, [&](int r) {
    Seat seat(board, r);
    if (r == 1) board.fail(1, 77);
    return seat.dispatch();
  });
  EXPECT_EQ(all[1].status, MOEC_E_CALLBACK);
  EXPECT_NE(all[1].message.find("77"), std::string::npos) << all[1].message;
  EXPECT_EQ(all[0].status, MOEC_E_TIMEOUT);
}

TEST(EpCalls, PollReportsTheCallersPoll) {
  RankBoard board(1);
  Seat seat(board, 0);
  auto state = sized<moec_ep_state>();
  check(moec_ep_poll(seat.ep.get(), &state));
  EXPECT_EQ(state.status, MOEC_OK);
  board.set_poll(-5);
  check(moec_ep_poll(seat.ep.get(), &state));
  EXPECT_EQ(state.status, MOEC_E_COMM);
  EXPECT_EQ(seat.dispatch(), MOEC_E_COMM);
}

}  // namespace
}  // namespace moec::test
