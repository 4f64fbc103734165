// SPDX-License-Identifier: Apache-2.0
// Eps of one comm: steps that lie inside each other, that are never combined, and that come in
// another order on another rank, for each scheme. It was seen to catch combines that do not say
// whose they are.
#include <cstring>

#include "ep_ranks.h"

namespace moec::test {
namespace {

constexpr uint32_t kSchemes[] = {MOEC_EP_GATHER, MOEC_EP_PEER, MOEC_EP_ROWS, MOEC_EP_EXACT};
constexpr uint32_t kThatMeet[] = {MOEC_EP_GATHER, MOEC_EP_ROWS, MOEC_EP_EXACT};

Ep make_ep(const Rank& rank, uint32_t scheme) {
  moec_ep_desc desc = ep_desc();
  desc.scheme = scheme;
  return make<Ep>(moec_ep_create, rank.comm.get(), &desc);
}

// Tokens times `scale`, whose partial rows are the rows themselves.
class Step {
 public:
  Step(const Ep& ep, float scale) : ep_(ep) {
    for (float& value : tokens_.x) value *= scale;
  }
  moec_status dispatch() {
    const moec_status status = moec_ep_dispatch(ep_.get(), &tokens_.args, nullptr);
    if (status != MOEC_OK) return status;
    const moec_tensor &from = tokens_.args.guests, &to = tokens_.args.partial;
    std::memcpy(to.data, from.data, static_cast<size_t>(moec_tensor_bytes(&from)));
    return status;
  }
  moec_status combine() { return moec_ep_combine(ep_.get(), &tokens_.args, nullptr); }
  // Token 0 has the experts 0 and 5, token 1 has 2 and 3.
  void expect_sums(int ranks) const {
    const float times[] = {2, ranks == 2 ? 2.0f : 1.0f};
    for (int64_t i = 0; i < Tokens::kCount * kHidden; ++i)
      EXPECT_EQ(tokens_.y[i], times[i / kHidden] * tokens_.x[i]) << i;
  }

 private:
  const Ep& ep_;
  Tokens tokens_;
};

void on_ranks(int ranks, const std::function<void(const Rank&)>& body) {
  RankBoard board(ranks);
  for (const std::string& error : run_ranks(ranks, [&](int r) { body(Rank(board, r)); }))
    EXPECT_EQ(error, "");
}

TEST(EpOrder, StepsOfTwoEpsLieInsideEachOther) {
  for (const uint32_t scheme : kSchemes)
    for (const int ranks : {2, 3})
      on_ranks(ranks, [&](const Rank& rank) {
        const Ep first = make_ep(rank, scheme), second = make_ep(rank, scheme);
        Step outer(first, float(rank.rank + 1)), inner(second, -3);
        for (int time = 0; time < 2; ++time) {
          check(outer.dispatch());
          check(inner.dispatch());
          check(time ? outer.combine() : inner.combine());
          check(time ? inner.combine() : outer.combine());
          outer.expect_sums(ranks);
          inner.expect_sums(ranks);
        }
      });
}

// The comm lives as long as its eps.
TEST(EpOrder, AnEpIsFreedBetweenDispatchAndCombine) {
  for (const uint32_t scheme : kSchemes)
    on_ranks(3, [&](const Rank& rank) {
      Ep left = make_ep(rank, scheme);
      const Ep other = make_ep(rank, scheme);
      check(Step(left, 7).dispatch());
      left.reset();
      Step step(other, 2);
      check(step.dispatch());
      check(step.combine());
      step.expect_sums(3);
    });
  RankBoard board(2);
  for (const std::string& error : run_ranks(2, [&](int r) {
         Rank rank(board, r);
         const Ep ep = make_ep(rank, MOEC_EP_EXACT);
         Step step(ep, 2);
         check(step.dispatch());
         rank.comm.reset();
         rank.context.reset();
         check(step.combine());
         step.expect_sums(2);
       }))
    EXPECT_EQ(error, "");
  EXPECT_EQ(board.released(), 2);
}

// All are told a rank that is in another call, and go on with the same ep.
void expect_named(const std::function<moec_status(const Rank&, Step&, Step&)>& call,
                  const std::string& part) {
  for (const uint32_t scheme : kThatMeet)
    on_ranks(3, [&](const Rank& rank) {
      const Ep first = make_ep(rank, scheme), second = make_ep(rank, scheme);
      Step one(first, 1), other(second, 1);
      EXPECT_EQ(call(rank, one, other), MOEC_E_MISMATCH);
      const std::string message = last_error(), odd = rank.rank == 1 ? ": rank 0 " : ": rank 1 ";
      EXPECT_NE(message.find(part), std::string::npos) << message;
      EXPECT_NE(message.find(odd), std::string::npos) << message;
      check(one.dispatch());
      check(one.combine());
      one.expect_sums(3);
    });
}

TEST(EpOrder, ACombineAmongDispatchesIsNamed) {
  expect_named(
      [](const Rank& rank, Step& one, Step&) {
        check(one.dispatch());
        return rank.rank == 1 ? one.combine() : one.dispatch();
      },
      "all ranks make their calls in one order");
}
TEST(EpOrder, ADispatchOfAnotherEpIsNamed) {
  expect_named([](const Rank& rank, Step& one,
                  Step& other) { return rank.rank == 1 ? other.dispatch() : one.dispatch(); },
               "ep (of those made with the comm)");
}
TEST(EpOrder, ACombineOfAnotherEpIsNamed) {
  expect_named(
      [](const Rank& rank, Step& one, Step& other) {
        check(one.dispatch());
        check(other.dispatch());
        return rank.rank == 1 ? other.combine() : one.combine();
      },
      "ep (of those made with the comm)");
}
TEST(EpOrder, ASumAmongDispatchesIsNamed) {
  expect_named(
      [](const Rank& rank, Step& one, Step&) {
        float value = 1;
        const moec_tensor tensor = view(&value, MOEC_F32, 1, 1);
        return rank.rank == 1 ? moec_comm_sum(rank.comm.get(), &tensor, nullptr) : one.dispatch();
      },
      "all ranks make their calls in one order");
}

}  // namespace
}  // namespace moec::test
