// SPDX-License-Identifier: Apache-2.0
// Dispatch and combine of every scheme against plain words, with ranks as threads:
//   a guest is a token with an expert here; guests come in the order (rank, token)
//   y[t] = 0 + the partial rows of token t by rank, in fp32, rounded once
// Bits are compared. Planted faults that it was seen to catch: partial rows
// added from the last rank on, ids of other ranks left in guest_ids, and peers that dispatch twice
// without a meeting.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

#include "support/draw.h"
#include "support/rank_threads.h"
#include "support/tensors.h"

namespace moec::test {
namespace {

constexpr uint32_t kSchemes[] = {MOEC_EP_GATHER, MOEC_EP_PEER, MOEC_EP_ROWS, MOEC_EP_EXACT};

struct World {  // what all ranks know
  int ranks, experts, top_k, max_tokens;
  int64_t hidden;
  uint32_t scheme;
  moec_dtype dtype, partial;
  std::vector<int32_t> begin;  // [N+1]
  int zero_experts = 0;
  bool counts = true;

  moec_ep_desc desc() const {
    auto d = sized<moec_ep_desc>();
    d.hidden = hidden;
    d.max_tokens = max_tokens;
    d.num_experts = experts;
    d.num_zero_experts = zero_experts;
    d.top_k = top_k;
    d.scheme = scheme;
    d.dtype = dtype;
    d.partial_dtype = partial;
    d.expert_begin = begin.data();
    return d;
  }
  int owner(int id) const {
    if (id < 0 || id >= experts) return -1;
    return static_cast<int>(std::upper_bound(begin.begin(), begin.end(), id) - begin.begin()) - 1;
  }
};

struct Batch {  // of one rank
  int tokens;
  std::vector<double> x, beside;
  std::vector<int> ids;
  std::vector<float> weights;
};

double round_to(moec_dtype dtype, double value) {
  return decode(encode({value}, dtype), dtype)[0];
}

Batch draw_batch(const World& w, Draw& draw, int only_rank = -1) {
  Batch b;
  b.tokens = draw.chance(0.2) ? 0 : static_cast<int>(draw.below(w.max_tokens + 1));
  const auto count = static_cast<size_t>(b.tokens);
  for (auto* values : {&b.x, &b.beside}) {
    *values = draw.normals(count * static_cast<size_t>(w.hidden));
    for (double& v : *values) v = round_to(w.dtype, v);
  }
  for (size_t t = 0; t < count; ++t) {
    std::vector<int> left;
    for (int id = 0; id < w.experts + w.zero_experts; ++id)
      if (only_rank < 0 || w.owner(id) == only_rank) left.push_back(id);
    for (int k = 0; k < w.top_k; ++k) {
      const auto at = static_cast<size_t>(draw.below(static_cast<int64_t>(left.size()) + 1));
      const bool none = at == left.size();
      b.ids.push_back(none ? -1 : left[at]);
      if (!none && !draw.chance(0.1))  // else an expert may come twice
        left.erase(left.begin() + static_cast<int64_t>(at));
      b.weights.push_back(static_cast<float>(draw.normal()));
    }
  }
  return b;
}

// What the experts of one rank make of a token in this test: from its row, ids and weights there.
std::vector<double> partial_row(const World& w, const double* x, const int* ids,
                                const float* weights, int rank) {
  std::vector<double> row(static_cast<size_t>(w.hidden), 0.0);
  for (int k = 0; k < w.top_k; ++k)
    if (w.owner(ids[k]) == rank)
      for (size_t h = 0; h < row.size(); ++h)
        row[h] += static_cast<double>(weights[k]) * (x[h] + ids[k]);
  for (double& v : row) v = round_to(w.partial ? w.partial : w.dtype, v);
  return row;
}
float d_weight(int id, float weight) {
  return static_cast<float>(id) + weight;
}

// The whole of what combine must give to one rank.
struct Expected {
  std::vector<double> y;
  std::vector<float> d_weights;
};
Expected expect_home(const World& w, const Batch& b) {
  Expected e;
  const auto H = static_cast<size_t>(w.hidden), K = static_cast<size_t>(w.top_k);
  for (size_t t = 0; t < static_cast<size_t>(b.tokens); ++t) {
    std::vector<float> sum(H, 0.0f);
    for (int rank = 0; rank < w.ranks; ++rank) {
      bool visits = false;
      for (size_t k = 0; k < K; ++k) visits = visits || w.owner(b.ids[t * K + k]) == rank;
      if (!visits) continue;
      const std::vector<double> row =
          partial_row(w, &b.x[t * H], &b.ids[t * K], &b.weights[t * K], rank);
      for (size_t h = 0; h < H; ++h) sum[h] += static_cast<float>(row[h]);
    }
    for (size_t h = 0; h < H; ++h) e.y.push_back(round_to(w.dtype, static_cast<double>(sum[h])));
    for (size_t k = 0; k < K; ++k) {
      const int id = b.ids[t * K + k];
      e.d_weights.push_back(w.owner(id) < 0 ? 0.0f : d_weight(id, b.weights[t * K + k]));
    }
  }
  return e;
}

class RankRun {
 public:
  RankRun(const World& world, RankBoard& board, int rank)
      : w_(world), rank_(board, rank, world.counts) {
    const moec_ep_desc desc = w_.desc();
    ep_ = make<Ep>(moec_ep_create, rank_.comm.get(), &desc);
  }
  moec_ep* ep() const { return ep_.get(); }
  moec_stats stats() const {
    auto stats = sized<moec_stats>();
    check(moec_context_stats(rank_.context.get(), &stats));
    return stats;
  }

  void dispatch(const Batch& b, int64_t bound) {
    const int64_t T = b.tokens, H = w_.hidden, K = w_.top_k;
    args_ = sized<moec_ep_args>();
    args_.bound = bound;
    args_.x = filled(b.x, w_.dtype, {T, H});
    args_.x_beside = filled(b.beside, w_.dtype, {T, H});
    args_.expert_ids = filled({b.ids.begin(), b.ids.end()}, MOEC_I64, {T, K});
    args_.routing_weights = filled({b.weights.begin(), b.weights.end()}, MOEC_F32, {T, K});
    check(moec_ep_dispatch(ep_.get(), &args_, nullptr));
  }
  // Guests that have an id, as they should be; writes their partial rows and d_guest_weights.
  void visit(const std::vector<Batch>& all) {
    const auto H = static_cast<size_t>(w_.hidden), K = static_cast<size_t>(w_.top_k);
    const auto guests = static_cast<size_t>(args_.guests.shape[0]);
    const std::vector<double> rows = values_of(args_.guests),
                              beside = values_of(args_.guests_beside);
    const auto* ids = static_cast<const int32_t*>(args_.guest_ids.data);
    const auto* weights = static_cast<const float*>(args_.guest_weights.data);
    const size_t bytes = element_bytes(args_.partial.dtype);
    auto* partial = static_cast<uint8_t*>(args_.partial.data);
    std::memset(partial, 0xFF, guests * H * bytes);
    std::vector<double> d_weights(guests * K, 7.0);
    size_t g = 0;
    for (const Batch& from : all)
      for (size_t t = 0; t < static_cast<size_t>(from.tokens); ++t) {
        std::vector<int> here;
        for (size_t k = 0; k < K; ++k) {
          const int id = from.ids[t * K + k];
          here.push_back(w_.owner(id) == rank_.rank ? id : -1);
        }
        if (here == std::vector<int>(K, -1)) continue;
        while (g < guests && !has_id(ids + g * K)) ++g;
        ASSERT_LT(g, guests);
        EXPECT_EQ(std::vector<int>(ids + g * K, ids + (g + 1) * K), here);
        for (size_t k = 0; k < K; ++k) {
          EXPECT_EQ(weights[g * K + k], here[k] < 0 ? 0.0f : from.weights[t * K + k]);
          if (here[k] >= 0)
            d_weights[g * K + k] = static_cast<double>(d_weight(here[k], from.weights[t * K + k]));
        }
        for (size_t h = 0; h < H; ++h) {
          EXPECT_EQ(rows[g * H + h], from.x[t * H + h]);
          EXPECT_EQ(beside[g * H + h], from.beside[t * H + h]);
        }
        const std::vector<uint8_t> row =
            encode(partial_row(w_, &from.x[t * H], here.data(), &from.weights[t * K], rank_.rank),
                   args_.partial.dtype);
        std::memcpy(partial + g * H * bytes, row.data(), row.size());
        ++g;
      }
    while (g < guests && !has_id(ids + g * K)) ++g;
    EXPECT_EQ(g, guests) << "more guests than expected";
    int64_t total = 0;
    for (const Batch& from : all) total += from.tokens;
    EXPECT_EQ(args_.total_tokens, w_.scheme == MOEC_EP_PEER ? -1 : total);
    args_.d_guest_weights = filled(d_weights, MOEC_F32, {args_.guests.shape[0], w_.top_k});
  }
  void combine(const Batch& b) {
    const Expected e = expect_home(w_, b);
    args_.y = tensors_.output(w_.dtype, {b.tokens, w_.hidden});
    args_.d_routing_weights = tensors_.output(MOEC_F32, {b.tokens, w_.top_k});
    check(moec_ep_combine(ep_.get(), &args_, nullptr));
    if (b.tokens == 0) return;
    EXPECT_EQ(tensors_.read_bytes(args_.y), encode(e.y, w_.dtype));
    EXPECT_EQ(tensors_.read_bytes(args_.d_routing_weights),
              encode({e.d_weights.begin(), e.d_weights.end()}, MOEC_F32));
    EXPECT_TRUE(tensors_.neighbours_untouched());
  }

 private:
  // Of no values: an empty tensor that is there.
  moec_tensor filled(const std::vector<double>& values, moec_dtype dtype,
                     const std::vector<int64_t>& shape) {
    return values.empty() ? tensors_.output(dtype, shape) : tensors_.input(values, dtype, shape);
  }
  bool has_id(const int32_t* ids) const {
    for (int k = 0; k < w_.top_k; ++k)
      if (ids[k] >= 0) return true;
    return false;
  }
  std::vector<double> values_of(const moec_tensor& view) const {
    const auto* const data = static_cast<const uint8_t*>(view.data);
    const auto bytes = static_cast<size_t>(moec_tensor_bytes(&view));
    return decode({data, data + bytes}, view.dtype);
  }

  const World& w_;
  Rank rank_;
  Ep ep_;
  Tensors tensors_;
  moec_ep_args args_ = {};
};

void run_world(const World& w, Draw& draw, int calls, int only_rank = -1) {
  std::vector<std::vector<Batch>> batches(static_cast<size_t>(calls));
  std::vector<int64_t> bounds;
  std::vector<bool> twice;  // a dispatch that is not combined comes first
  for (auto& call : batches) {
    int64_t most = 1;
    for (int r = 0; r < w.ranks; ++r) {
      call.push_back(draw_batch(w, draw, only_rank));
      most = std::max<int64_t>(most, call.back().tokens);
    }
    bounds.push_back(draw.one_of({int64_t{0}, most}));
    twice.push_back(draw.chance(0.3));
  }
  RankBoard board(w.ranks);
  const std::vector<std::string> errors = run_ranks(w.ranks, [&](int rank) {
    RankRun run(w, board, rank);
    const uint64_t allocs = run.stats().allocs;
    for (size_t c = 0; c < batches.size(); ++c) {
      const Batch& own = batches[c][static_cast<size_t>(rank)];
      if (twice[c]) {
        run.dispatch(batches[0][static_cast<size_t>(rank)], bounds[0]);
        run.visit(batches[0]);
      }
      run.dispatch(own, bounds[c]);
      run.visit(batches[c]);
      run.combine(own);
    }
    auto state = sized<moec_ep_state>();
    check(moec_ep_poll(run.ep(), &state));
    EXPECT_EQ(state.calls,
              2 * batches.size() + size_t(std::count(twice.begin(), twice.end(), true)));
    EXPECT_EQ(state.rows_dropped, 0);
    EXPECT_EQ(state.status, MOEC_OK);
    EXPECT_EQ(run.stats().allocs, allocs);  // all that it needs came with the ep
    EXPECT_EQ(run.stats().host_syncs, 0u);
    const moec_stats stats = run.stats();
    const uint64_t by_scheme[] = {0, stats.ep_gather, stats.ep_peer, stats.ep_rows, stats.ep_exact};
    auto info = sized<moec_ep_info>();
    check(moec_ep_query(run.ep(), &info));
    for (uint32_t scheme = MOEC_EP_GATHER; scheme <= MOEC_EP_EXACT; ++scheme)
      EXPECT_EQ(by_scheme[scheme], scheme == info.scheme ? state.calls : 0u) << scheme;
  });
  for (const std::string& error : errors) EXPECT_EQ(error, "");
  EXPECT_EQ(board.released(), w.ranks);
}

std::vector<int32_t> draw_ranges(int ranks, int experts, Draw& draw) {
  std::vector<int32_t> begin = {0};
  for (int r = 1; r < ranks; ++r) {
    const int left = experts - begin.back() - (ranks - r);
    begin.push_back(begin.back() + 1 + static_cast<int>(draw.below(left)));
  }
  begin.push_back(experts);
  return begin;
}

World draw_world(int ranks, uint32_t scheme, Draw& draw) {
  World w;
  w.ranks = ranks;
  w.scheme = scheme;
  w.experts = ranks + static_cast<int>(draw.below(12));
  w.zero_experts = draw.one_of({0, 0, 2});
  w.top_k = 1 + static_cast<int>(draw.below(std::min(w.experts, 6)));
  w.max_tokens = 1 + static_cast<int>(draw.below(20));
  w.hidden = 1 + draw.below(draw.chance(0.3) ? 300 : 40);  // few rows go with their ids
  w.dtype = draw.one_of<moec_dtype>({MOEC_F32, MOEC_F16, MOEC_BF16});
  w.partial = draw.one_of<moec_dtype>({0, MOEC_F32});
  w.begin = draw_ranges(ranks, w.experts, draw);
  return w;
}

std::string name_of(uint32_t scheme) {
  constexpr const char* kNames[] = {"auto", "gather", "peer", "rows", "exact"};
  return kNames[scheme];
}

class EpTest : public testing::TestWithParam<std::tuple<int, uint32_t>> {};

TEST_P(EpTest, TokensReachTheirRanksAndSumsComeHome) {
  const auto [ranks, scheme] = GetParam();
  SCOPED_TRACE(seed_note());
  Draw draw(static_cast<uint64_t>(ranks) * 16 + scheme);
  for (int round = 0; round < 4; ++round) run_world(draw_world(ranks, scheme, draw), draw, 3);
}

TEST_P(EpTest, AllTokensGoToOneRank) {
  const auto [ranks, scheme] = GetParam();
  SCOPED_TRACE(seed_note());
  Draw draw(1000 + static_cast<uint64_t>(ranks) * 16 + scheme);
  for (const int only : {0, ranks - 1}) {
    World w = draw_world(ranks, scheme, draw);
    w.zero_experts = 0;
    run_world(w, draw, 2, only);
  }
}

INSTANTIATE_TEST_SUITE_P(
    , EpTest, testing::Combine(testing::Values(1, 2, 3, 4, 8), testing::ValuesIn(kSchemes)),
    [](const auto& param) {
      return name_of(std::get<1>(param.param)) + "_" + std::to_string(std::get<0>(param.param));
    });

// One token or none on each of up to 1,024 ranks.
class EpManyRanks : public testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(, EpManyRanks, testing::Values(64, 1024),
                         testing::PrintToStringParamName());
TEST_P(EpManyRanks, OfOneTokenOrNone) {
  SCOPED_TRACE(seed_note());
  Draw draw(7);
  World w = draw_world(4, MOEC_EP_EXACT, draw);
  w.ranks = GetParam();
  w.experts = 2 * w.ranks;
  w.zero_experts = 0;
  w.top_k = 3;
  w.max_tokens = 1;
  w.hidden = 8;
  w.begin.clear();
  for (int r = 0; r <= w.ranks; ++r) w.begin.push_back(2 * r);
  run_world(w, draw, 1);
}

}  // namespace
}  // namespace moec::test
