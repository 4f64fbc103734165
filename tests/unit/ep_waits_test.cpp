// SPDX-License-Identifier: Apache-2.0
// How often the host waits for the device in a dispatch and a combine of three ranks, by scheme and
// by what callbacks take. Callbacks that queue have the memory of the host here. It was seen to
// catch a dispatch of EXACT that waits for its own counts, and then for those of the others.
#include <gtest/gtest.h>

#include <atomic>

#include "ep/exchange.h"
#include "support/rank_threads.h"

namespace moec::test {
namespace {

constexpr int32_t kRanks = 3, kTopK = 2;
constexpr int64_t kHidden = 4, kBound = 4;

struct Waits {
  int dispatch, combine;
};

// One rank, with T tokens: each of its partial rows is the row itself.
class OneRank {
 public:
  OneRank(RankBoard& board, int rank, ep::Reach reach, uint32_t scheme, uint32_t overflow)
      : backend_(make_cpu_backend({})), memory_of_comm_(ep::Communicator::memory_bytes(reach, 3)) {
    auto desc = sized<moec_comm_desc>();
    desc.rank = rank;
    desc.size = kRanks;
    const ep::Wait wait = [this](moec_stream) { ++waits_; };
    comm_ = std::make_unique<ep::Communicator>(desc, board.callbacks(rank), reach, *backend_, wait,
                                               memory_of_comm_.data());
    ep::Shape shape = {};
    shape.hidden = kHidden;
    shape.max_tokens = shape.pair_rows = kBound;
    shape.num_experts = 6;
    shape.top_k = kTopK;
    shape.scheme = scheme;
    shape.overflow = overflow;
    shape.dtype = shape.partial_dtype = MOEC_F32;
    shape.grad_scale = 1;
    shape.expert_begin = {0, 1, 5, 6};
    shape.timeout_ms = 60000;
    exchange_ = std::make_unique<ep::Exchange>(*comm_, *backend_, shape, nullptr, calls_);
    memory_.resize(exchange_->bytes(), 0xFF);
    shared_.resize(exchange_->shared_bytes());
    exchange_->set_memory(memory_.data(), shared_.data());
  }

  // Sums are the token times the number of its ranks.
  Waits step(int64_t T, const std::vector<int32_t>& ids, const std::vector<float>& times) {
    std::vector<float> x(size_t(T * kHidden)), y(x.size(), -7.0f);
    for (size_t i = 0; i < x.size(); ++i) x[i] = float(i + 1);
    ep::Departure from = {};
    from.tokens = {T, {const_cast<int32_t*>(ids.data()), MOEC_I32}, nullptr};
    from.bound = kBound;
    from.x = x.data();
    waits_ = 0;
    const ep::Guests guests = exchange_->dispatch(from, nullptr);
    Waits waits = {waits_.exchange(0), 0};
    std::memcpy(guests.partial, guests.rows, size_t(guests.count * kHidden) * sizeof(float));
    ep::Homecoming to = {};
    to.y = y.data();
    exchange_->combine(to, nullptr);
    waits.combine = waits_;
    for (size_t i = 0; i < x.size(); ++i)
      EXPECT_EQ(y[i], times[i / size_t(kHidden)] * x[i]) << "element " << i;
    return waits;
  }

 private:
  std::atomic<int> waits_{0};
  std::atomic<uint64_t> calls_{0};
  const std::unique_ptr<Backend> backend_;
  // As the device has it, aligned.
  struct alignas(64) Line {
    uint8_t bytes[64];
  };
  struct Bytes {
    std::vector<Line> lines;
    Bytes() = default;
    explicit Bytes(uint64_t bytes) { resize(bytes); }
    void resize(uint64_t bytes, int value = 0) {
      lines.resize(size_t(bytes / 64 + 1));
      std::memset(static_cast<void*>(lines.data()), value, lines.size() * 64);
    }
    void* data() { return lines.data(); }
  };
  Bytes memory_of_comm_, memory_, shared_;
  std::unique_ptr<ep::Communicator> comm_;
  std::unique_ptr<ep::Exchange> exchange_;
};

void expect_waits(ep::Reach reach, uint32_t scheme, Waits want, uint32_t overflow = 0) {
  SCOPED_TRACE(std::string(ep::reach_name(reach)) + ", " + ep::scheme_of(scheme).name());
  RankBoard board(kRanks);
  const std::vector<int32_t> ids[kRanks] = {{0, 5, 1, 4, -1, 2}, {}, {3, 0, -1, -1, 5, 0, 2, 3}};
  const std::vector<float> times[kRanks] = {{2, 1, 1}, {}, {2, 0, 2, 1}};
  for (const std::string& error : run_ranks(kRanks, [&](int rank) {
         OneRank one(board, rank, reach, scheme, overflow);
         for (int step = 0; step < 2; ++step) {
           const std::vector<int32_t>& own = ids[rank];
           const Waits waits = one.step(int64_t(own.size()) / kTopK, own, times[rank]);
           EXPECT_EQ(waits.dispatch, want.dispatch);
           EXPECT_EQ(waits.combine, want.combine);
         }
       }))
    EXPECT_EQ(error, "");
}

TEST(EpWaits, NeverWhereTheDeviceIsTheHost) {
  for (const uint32_t scheme : {MOEC_EP_GATHER, MOEC_EP_ROWS, MOEC_EP_EXACT})
    expect_waits(ep::Reach::kDirect, scheme, {0, 0});
}

TEST(EpWaits, OnceForTheCountsOfExactWhereCallbacksQueue) {
  for (const uint32_t scheme : {MOEC_EP_GATHER, MOEC_EP_ROWS})
    expect_waits(ep::Reach::kQueued, scheme, {0, 0});
  expect_waits(ep::Reach::kQueued, MOEC_EP_ROWS, {0, 0}, MOEC_EP_DROP_BY_WEIGHT);
  expect_waits(ep::Reach::kQueued, MOEC_EP_EXACT, {1, 0});
}

// Before and after what passes: ids and rows in one piece, of EXACT each; partial rows.
TEST(EpWaits, OnceForTheCountsOfExactWhereRowsPassThroughTheHost) {
  for (const uint32_t scheme : {MOEC_EP_GATHER, MOEC_EP_ROWS})
    expect_waits(ep::Reach::kStaged, scheme, {2, 2});
  expect_waits(ep::Reach::kStaged, MOEC_EP_EXACT, {5, 2});
}

}  // namespace
}  // namespace moec::test
