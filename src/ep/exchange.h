// SPDX-License-Identifier: Apache-2.0
// Tokens to the ranks of their experts, and sums of partial rows back: what stands behind moec_ep.
//
//   dispatch   routes of the own tokens -> rows and ids into the outbox -> all ranks meet -> guests
//   combine    all ranks meet -> partial rows come home -> their sum in rank order
//
// Where callbacks queue, ranks do not meet but to exchange counts of rows: headers in front of the
// ids are compared on the device.
#pragma once

#include "backend/backend.h"
#include "backend/rank_steps.h"
#include "core/workspace.h"
#include "ep/peers.h"
#include "ep/progress.h"
#include "ep/schemes.h"

namespace moec::ep {

struct Guests {  // views of the exchange's memory
  int64_t count = 0;
  int64_t total_tokens = 0;                 // -1: the host does not know it
  void *rows = nullptr, *beside = nullptr;  // [G,H]
  int32_t* ids = nullptr;                   // [G,K], -1: no expert of this rank
  float* weights = nullptr;                 // [G,K]
  int32_t* adapter_ids = nullptr;           // [G] where tokens have them; -1: no token
  void* partial = nullptr;                  // [G,H] partial_dtype
};

struct Departure {
  Tokens tokens;
  int64_t bound;
  const void *x, *beside;  // [T,H]
  bool has_beside;
  float beside_scale = 1;                // of rows beside
  const int32_t* adapter_ids = nullptr;  // [T], with has_adapter_ids
  bool has_adapter_ids = false;
};
struct Homecoming {
  bool has_weights;
  const float* d_guest_weights;  // [G,K], with has_weights
  void* y;                       // out [T,H] or null
  bool add;                      // to what y holds
  float scale = 1;               // of sums and of d_routing_weights
  float* d_routing_weights;      // out [T,K], with has_weights; or null
};

class Exchange {
 public:
  // peers: connected, of PEER; else null. calls_of_scheme: counts with those of other eps.
  Exchange(Communicator& comm, const Backend& backend, const Shape& shape,
           std::unique_ptr<Peers> peers, std::atomic<uint64_t>& calls_of_scheme);

  // ---- memory, given once: `bytes` of the device, and shared bytes that the device reports to
  uint64_t bytes() const;
  uint64_t shared_bytes() const;
  void set_memory(void* memory, void* shared);

  const Shape& shape() const { return shape_; }
  const Scheme& scheme() const { return scheme_; }
  Communicator& comm() const { return comm_; }
  int64_t most_guests() const;
  int32_t expert_begin() const { return shape_.expert_begin[size_t(comm_.rank())]; }
  int32_t expert_end() const { return shape_.expert_begin[size_t(comm_.rank()) + 1]; }

  // As those of the communicator, for this ep: attend() is of a dispatch and a combine.
  template <class Body>
  decltype(auto) prepare(Call call, Body&& body) const {
    return ep::prepare(comm_, call, meets(call), body);
  }
  template <class Body>
  void attend(Call call, Body&& body) const {
    comm_.attend(call, uint64_t(meets(Call::kDispatch)) + meets(Call::kCombine), body);
  }

  // What broke the comm or the ep, as an error.
  void require_well() const;

  // Both are collective. Arguments are checked.
  Guests dispatch(const Departure& from, moec_stream stream);
  void combine(const Homecoming& to, moec_stream stream);
  bool has_guests() const { return guests_.rows != nullptr; }
  const Guests& guests() const { return guests_; }
  const Peers* peers() const { return peers_.get(); }  // null: another scheme than PEER
  // Of the last dispatch, where the host does not know how many tokens there are.
  CapacityOfAll capacity_of_all(double factor, int32_t* to) const;
  int64_t num_tokens() const { return peers_ ? peers_->num_tokens() : routes_.num_tokens; }

  struct Counters {
    std::atomic<uint64_t> calls{0}, bytes_sent{0}, bytes_received{0};
  };
  const Counters& counters() const { return counters_; }
  struct RowCounts {
    int64_t needed, dropped;
  };
  RowCounts row_counts() const;  // of all calls whose work is done
  void set_number(int32_t number) { number_ = number; }

 private:
  static constexpr size_t kFacts = 4;
  // A copy of so many bytes takes less than a collective of its own.
  static constexpr uint64_t kFewOfDevice = 4 << 20, kFewOfHost = 32 << 10;
  struct Memory {
    void *outbox, *guests, *beside, *partial;
    // Blocks of ranks: rows of meta_columns_ (ids, weights, the adapter's id), and few_rows().
    int32_t *outbox_ids, *guest_ids;
    int32_t *ids, *adapter_ids;
    float* weights;
    int32_t *sum_index, *slot_row, *token;  // of Routes
    int32_t *wanted, *counts;               // of PlanRoutes
    void* keys;
    int32_t *expert_begin, *owners, *broken;  // [N+1], [E], [1]
    uint64_t* progress;
  };
  Memory lay_out(Arena& arena) const;
  // Whether all ranks wait for each other, so that the others are told of one that fails before.
  bool meets(Call call) const {
    return !peers_ && (!comm_.queues() || (call == Call::kDispatch && counts_rows()));
  }
  // The host counts rows, and waits for that.
  bool counts_rows() const { return scheme_.places(shape_, 1).stride == 0; }
  bool drops_by_weight() const { return shape_.overflow == MOEC_EP_DROP_BY_WEIGHT; }
  Places places() const { return scheme_.places(shape_, routes_.bound); }  // of the last dispatch
  // Rows of few bytes lie behind the ids of their rank and go with them: one collective, and a copy
  // of what came. All ranks have the same answer.
  bool few_rows() const { return !counts_rows() && bytes_of_guests(routes_.bound) <= most_few(); }
  uint64_t most_few() const { return comm_.queues() ? kFewOfDevice : kFewOfHost; }
  uint64_t bytes_of_guests(int64_t bound) const {
    return uint64_t(scheme_.most_guests(shape_, comm_.size(), bound)) * row_bytes();
  }
  // Rows of a token each that fill the places of all.
  bool lies_as_it_goes() const {
    return scheme_.sends_to_all() && routes_.num_tokens == routes_.bound;
  }
  int64_t words_of_ids() const { return header_block(places().stride, meta_columns_); }
  int64_t words_of_block() const;
  RowBlocks rows_in(int32_t* blocks) const;
  void require_progress() const;
  void route(const Departure& from, const RankHeader& header, CountUp begun, moec_stream stream);
  void plan(const Tokens& tokens, moec_stream stream);
  void pack_ids(const Departure& from, const RankHeader& header, CountUp begun, moec_stream stream);
  void learn(const Notice* notices);
  void send_ids(moec_stream stream);
  void send_rows(const void* rows, void* to, moec_stream stream);
  PickRows own_rows(const Departure& from) const;
  const void* pack(const void* rows, float scale, moec_stream stream);
  template <class Last>
  void finish(Last last, Progress::Step step, moec_stream stream);
  void unpack_ids(const RankHeader& header, moec_stream stream);
  void count_bytes(uint64_t row_bytes, bool homewards);
  void count_call() {
    ++counters_.calls;
    calls_of_scheme_.fetch_add(1, std::memory_order_relaxed);
  }
  uint64_t row_bytes() const { return uint64_t(shape_.hidden * dtype_bytes(shape_.dtype)); }

  Communicator& comm_;
  const Backend& backend_;
  const Shape shape_;
  const Scheme& scheme_;
  const std::unique_ptr<Peers> peers_;
  int32_t number_ = 0;
  int32_t meta_columns_ = 0;  // of the last dispatch: 2K, or 2K + 1 with adapter ids
  Routes routes_;
  Memory memory_ = {};
  Disagreement* disagreements_ = nullptr;  // [N], shared, as the next ones are
  Overflow* overflows_ = nullptr;          // [N]
  int32_t* counted_ = nullptr;             // [N] rows for each rank, where the host counts them
  Guests guests_;
  Progress progress_;
  Counters counters_;
  std::atomic<uint64_t>& calls_of_scheme_;  // of all eps of the context
};

}  // namespace moec::ep
