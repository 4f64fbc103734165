// SPDX-License-Identifier: Apache-2.0
// An ep whose callbacks queue, and a rank that died: what is queued does not end, and after the
// timeout the ep says which call waits; a rank that is only slow is never called dead. The backend
// is the CPU's, and counts of what has ended are held back as those of a stream are. Time is an
// argument. It was seen to catch a clock that begins at the first call, and a count of replays that
// nobody adds up.
#include "ep/progress.h"

#include <gtest/gtest.h>

#include <array>
#include <cstring>
#include <string>
#include <vector>

#include "ep/exchange.h"

namespace moec::test {
namespace {

using namespace std::chrono_literals;
using ep::Progress;

class Board {  // counts of a device, and what a host sees of them
 public:
  Board() { progress.set_memory(counts_.data(), shown_.data()); }
  void at(std::chrono::milliseconds now) { now_ = Progress::Clock::time_point(now); }
  void queue(Progress::Step step) { progress.queue(step, false, now_); }
  void begin(Progress::Step step) { progress.begun(step, true)(0); }
  void end(Progress::Step step) { progress.ended(step)(0); }
  // Empty: nothing is late.
  std::string late() const {
    Progress::Late late;
    if (!progress.is_late(late, now_)) return {};
    return std::string(late.step == Progress::kCombine ? "combine" : "dispatch") + " after " +
           std::to_string(late.dispatches) + " and " + std::to_string(late.combines) + ", " +
           std::to_string(late.queued) + " queued";
  }
  Progress progress{true, 100};

 private:
  std::array<uint64_t, Progress::kCounts> counts_ = {};
  std::array<Progress::Shown, Progress::kSteps> shown_ = {};
  Progress::Clock::time_point now_ = {};
};

TEST(Progress, WhatIsQueuedAndDoesNotEndIsLate) {
  Board board;
  board.at(1h);
  EXPECT_EQ(board.late(), "");
  board.at(2h);  // idle for long: the clock begins with the call
  board.queue(Progress::kDispatch);
  board.at(2h + 100ms);
  EXPECT_EQ(board.late(), "");
  board.at(2h + 101ms);
  EXPECT_EQ(board.late(), "dispatch after 0 and 0, 1 queued");
  board.end(Progress::kDispatch);  // it was only slow
  EXPECT_EQ(board.late(), "");
  board.at(3h);
  EXPECT_EQ(board.late(), "");
}

TEST(Progress, TheClockBeginsAgainWhenOneEnds) {
  Board board;
  board.at(0ms);
  for (const auto step : {Progress::kDispatch, Progress::kCombine, Progress::kDispatch})
    board.queue(step);
  board.at(90ms);
  board.end(Progress::kDispatch);
  EXPECT_EQ(board.late(), "");
  board.at(190ms);
  EXPECT_EQ(board.late(), "");
  board.at(191ms);
  EXPECT_EQ(board.late(), "combine after 1 and 0, 2 queued");
  board.end(Progress::kCombine);
  EXPECT_EQ(board.late(), "");
  board.at(292ms);
  EXPECT_EQ(board.late(), "dispatch after 1 and 1, 1 queued");
}

TEST(Progress, ReplaysOfAGraphCount) {
  Board board;
  board.at(0ms);
  board.progress.queue(Progress::kDispatch, true);  // captured: nothing runs
  board.at(1h);
  EXPECT_EQ(board.late(), "");
  for (int replay = 0; replay < 3; ++replay)
    for (const auto step : {Progress::kDispatch, Progress::kCombine}) {
      board.begin(step);
      board.end(step);
    }
  board.begin(Progress::kDispatch);
  EXPECT_EQ(board.late(), "");  // seen here first
  board.at(1h + 101ms);
  EXPECT_EQ(board.late(), "dispatch after 3 and 3, 1 queued");
}

TEST(Progress, WhatWasRefusedIsNotAwaited) {
  Board board;
  board.at(0ms);
  board.queue(Progress::kDispatch);
  board.progress.take_back(Progress::kDispatch);
  board.at(1h);
  EXPECT_EQ(board.late(), "");
}

TEST(Progress, IsNotKeptWhereTheHostWaits) {
  Progress progress(false, 1);
  progress.queue(Progress::kDispatch, false);
  progress.take_back(Progress::kDispatch);
  EXPECT_EQ(progress.begun(Progress::kDispatch, true).count(), 0);
  EXPECT_EQ(progress.ended(Progress::kCombine).count(), 0);
  Progress::Late late;
  EXPECT_FALSE(progress.is_late(late));
}

// ---- a whole exchange of a rank whose other one is dead: its collectives do nothing for ever.
constexpr int64_t kTokens = 3, kHidden = 4;
constexpr int32_t kTopK = 2;

struct Outside {  // the caller's side of the comm
  bool is_dead = false;
  int aborts = 0, polls = 0, calls = 0;
  static Outside& of(void* user) { return *static_cast<Outside*>(user); }
};

class Stream {  // a backend whose steps behind a collective of a dead rank never run
 public:
  explicit Stream(uint32_t scheme, uint32_t timeout_ms) : backend_(make_cpu_backend({})) {
    shape_.hidden = kHidden;
    shape_.max_tokens = shape_.pair_rows = kTokens;
    shape_.num_experts = 2;
    shape_.top_k = kTopK;
    shape_.scheme = scheme;
    shape_.dtype = shape_.partial_dtype = MOEC_F32;
    shape_.grad_scale = 1;
    shape_.expert_begin = {0, 1, 2};
    shape_.timeout_ms = timeout_ms;
    moec_comm_desc desc = {};
    desc.size = 2;
    moec_comm_callbacks callbacks = {};
    callbacks.flags = MOEC_COMM_DEVICE;
    callbacks.user = &outside;
    callbacks.all_gather = [](void* user, const void* send, void* recv, uint64_t bytes,
                              moec_stream) {
      ++Outside::of(user).calls;
      for (int r = 0; r < 2; ++r) std::memcpy(static_cast<char*>(recv) + r * bytes, send, bytes);
      return 0;
    };
    callbacks.all_to_all = [](void* user, const void* send, void* recv, uint64_t bytes,
                              moec_stream) {
      ++Outside::of(user).calls;
      std::memcpy(recv, send, 2 * bytes);  // the other rank has what this one has
      return 0;
    };
    callbacks.poll = [](void* user) { return ++Outside::of(user).polls, 0; };
    callbacks.abort = [](void* user) { return ++Outside::of(user).aborts, 0; };
    mailbox_.resize(ep::Communicator::memory_bytes(ep::Reach::kQueued, 2));
    comm_ = std::make_unique<ep::Communicator>(
        desc, callbacks, ep::Reach::kQueued, *backend_, [](moec_stream) {}, mailbox_.data());
    exchange_ = std::make_unique<ep::Exchange>(*comm_, *backend_, shape_, nullptr, calls_of_scheme);
    memory_.resize(exchange_->bytes());
    shared_.resize(exchange_->shared_bytes());
    exchange_->set_memory(memory_.data(), shared_.data());
  }
  // This rank and the other one have the same tokens.
  void dispatch() {
    ep::Departure from = {};
    from.tokens = {kTokens, {ids_.data(), MOEC_I32}, nullptr};
    from.bound = kTokens;
    from.x = x_.data();
    exchange_->dispatch(from, nullptr);
  }
  void combine() {
    ep::Homecoming to = {};
    to.y = y_.data();
    exchange_->combine(to, nullptr);
  }
  // As if `steps` of the last ones were still on the stream.
  void hold_back(Progress::Step step, uint64_t steps) {
    Progress::Shown& shown = reinterpret_cast<Progress::Shown*>(shared_.data())[step];
    shown.ended = shown.ended - steps;
  }
  std::string error() const {
    try {
      exchange_->require_well();
    } catch (const Error& error) {
      return std::to_string(error.code) + " " + error.text;
    }
    return {};
  }
  std::string late_error() const {  // as soon as there is one
    std::string text;
    while ((text = error()).empty()) {
    }
    return text;
  }
  ep::Communicator& comm() { return *comm_; }

  Outside outside;
  std::atomic<uint64_t> calls_of_scheme{0};

 private:
  std::unique_ptr<Backend> backend_;
  ep::Shape shape_ = {};
  std::vector<char> mailbox_, memory_, shared_;
  std::unique_ptr<ep::Communicator> comm_;
  std::unique_ptr<ep::Exchange> exchange_;
  std::vector<int32_t> ids_ = {0, 1, 1, -1, 0, 1};
  std::vector<float> x_ = std::vector<float>(kTokens * kHidden, 1.0f);
  std::vector<float> y_ = std::vector<float>(kTokens * kHidden);
};

class Schemes : public testing::TestWithParam<uint32_t> {};

TEST_P(Schemes, CallsThatEndAreNeverLate) {
  Stream stream(GetParam(), 1);
  for (int call = 0; call < 3; ++call) {
    stream.dispatch();
    stream.combine();
  }
  EXPECT_EQ(stream.error(), "");
  EXPECT_EQ(stream.calls_of_scheme, 6u);
}

TEST_P(Schemes, ASurvivorNamesTheCallThatWaits) {
  Stream stream(GetParam(), 1);
  for (int call = 0; call < 2; ++call) {
    stream.dispatch();
    stream.combine();
  }
  stream.hold_back(Progress::kCombine, 1);
  const std::string text = stream.late_error();
  EXPECT_EQ(text.rfind(std::to_string(MOEC_E_TIMEOUT) + " a combine of rank 0 waits", 0), 0u)
      << text;
  EXPECT_NE(text.find("2 dispatches and 1 combines have ended"), std::string::npos) << text;
  EXPECT_LT(text.size(), 256u) << text;
  EXPECT_THROW(stream.dispatch(), Error);  // nothing more is queued
  EXPECT_THROW(stream.combine(), Error);
  EXPECT_EQ(stream.outside.aborts, 0);  // only on request
  stream.comm().abort();
  stream.comm().abort();
  EXPECT_EQ(stream.outside.aborts, 1);
  EXPECT_EQ(stream.error(), text);  // the first cause stays
}

TEST_P(Schemes, NoCallbackIsCalledAfterAbort) {
  Stream stream(GetParam(), 600000);
  stream.dispatch();
  stream.comm().ask();
  stream.comm().abort();
  const int calls = stream.outside.calls, polls = stream.outside.polls;
  stream.comm().ask();
  EXPECT_THROW(stream.combine(), Error);
  EXPECT_THROW(stream.dispatch(), Error);
  EXPECT_EQ(stream.outside.calls, calls);
  EXPECT_EQ(stream.outside.polls, polls);
  EXPECT_EQ(stream.error().rfind(std::to_string(MOEC_E_COMM) + " moec_comm_abort was called", 0),
            0u)
      << stream.error();
}

INSTANTIATE_TEST_SUITE_P(Queued, Schemes, testing::Values(MOEC_EP_GATHER, MOEC_EP_ROWS),
                         [](const auto& one) {
                           return one.param == MOEC_EP_GATHER ? "gather" : "rows";
                         });

}  // namespace
}  // namespace moec::test
