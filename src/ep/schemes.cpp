// SPDX-License-Identifier: Apache-2.0
#include "ep/schemes.h"

#include <algorithm>

#include "backend/peer_steps.h"

namespace moec::ep {
namespace {

// Every rank gets every token; a rank's partial rows of all tokens come back.
class Gather : public Scheme {
 public:
  uint32_t id() const override { return MOEC_EP_GATHER; }
  const char* name() const override { return "gather"; }
  bool sends_to_all() const override { return true; }
  Places places(const Shape&, int64_t bound) const override { return {bound, bound}; }
  int64_t most_sent(const Shape&, int32_t ranks, int64_t bound) const override {
    return ranks * bound;  // of what comes back
  }
  int64_t most_guests(const Shape&, int32_t ranks, int64_t bound) const override {
    return ranks * bound;
  }
  void go(Communicator& comm, const Routes& routes, const void* outbox, void* guests,
          uint64_t row_bytes, moec_stream stream) const override {
    comm.all_gather(outbox, guests, uint64_t(routes.bound) * row_bytes, stream);
  }
  void come_back(Communicator& comm, const Routes& routes, const void* guests, void* home,
                 uint64_t row_bytes, moec_stream stream) const override {
    comm.all_to_all(guests, home, uint64_t(routes.bound) * row_bytes, stream);
  }
};

// The same places; Peers moves the rows.
class Peer final : public Gather {
 public:
  uint32_t id() const override { return MOEC_EP_PEER; }
  const char* name() const override { return "peer"; }
};

// Equal parts: pair_rows rows of each rank for each other.
class Rows final : public Scheme {
 public:
  uint32_t id() const override { return MOEC_EP_ROWS; }
  const char* name() const override { return "rows"; }
  Places places(const Shape& shape, int64_t bound) const override {
    const int64_t most = std::min(shape.pair_rows, bound);
    return {most, most};
  }
  int64_t most_sent(const Shape& shape, int32_t ranks, int64_t bound) const override {
    return ranks * places(shape, bound).most;
  }
  int64_t most_guests(const Shape& shape, int32_t ranks, int64_t bound) const override {
    return ranks * places(shape, bound).most;
  }
  void go(Communicator& comm, const Routes& routes, const void* outbox, void* guests,
          uint64_t row_bytes, moec_stream stream) const override {
    comm.all_to_all(outbox, guests, part(comm, routes) * row_bytes, stream);
  }
  void come_back(Communicator& comm, const Routes& routes, const void* guests, void* home,
                 uint64_t row_bytes, moec_stream stream) const override {
    comm.all_to_all(guests, home, part(comm, routes) * row_bytes, stream);
  }

 private:
  static uint64_t part(const Communicator& comm, const Routes& routes) {
    return uint64_t(routes.num_guests / comm.size());
  }
};

// As many rows as there are.
class Exact final : public Scheme {
 public:
  uint32_t id() const override { return MOEC_EP_EXACT; }
  const char* name() const override { return "exact"; }
  Places places(const Shape&, int64_t bound) const override { return {0, bound}; }
  int64_t most_sent(const Shape& shape, int32_t ranks, int64_t bound) const override {
    return bound * std::min(shape.top_k, ranks);
  }
  int64_t most_guests(const Shape&, int32_t ranks, int64_t bound) const override {
    return ranks * bound;
  }
  void go(Communicator& comm, const Routes& routes, const void* outbox, void* guests,
          uint64_t row_bytes, moec_stream) const override {
    move(comm, routes.sent, routes.sent_at, outbox, routes.received, routes.received_at, guests,
         row_bytes);
  }
  void come_back(Communicator& comm, const Routes& routes, const void* guests, void* home,
                 uint64_t row_bytes, moec_stream) const override {
    move(comm, routes.received, routes.received_at, guests, routes.sent, routes.sent_at, home,
         row_bytes);
  }

 private:
  using RowCounts = std::vector<int64_t>;
  static void move(Communicator& comm, const RowCounts& sent, const RowCounts& sent_at,
                   const void* from, const RowCounts& received, const RowCounts& received_at,
                   void* to, uint64_t row_bytes) {
    uint64_t* bytes = comm.byte_counts();
    const auto in_bytes = [&](const RowCounts& rows) {
      uint64_t* const begin = bytes;
      for (const int64_t count : rows) *bytes++ = uint64_t(count) * row_bytes;
      return begin;
    };
    const Communicator::Parts out = {in_bytes(sent), in_bytes(sent_at)};
    const Communicator::Parts in = {in_bytes(received), in_bytes(received_at)};
    comm.all_to_all_v(from, out, to, in, row_bytes);
  }
};

}  // namespace

const Scheme& scheme_of(uint32_t id) {
  static const Gather gather;
  static const Peer peer;
  static const Rows rows;
  static const Exact exact;
  if (id == MOEC_EP_PEER) return peer;
  if (id == MOEC_EP_ROWS) return rows;
  if (id == MOEC_EP_EXACT) return exact;
  return gather;
}

bool may_be_peers(uint32_t wanted, const Communicator& comm) {
  const bool on_host = comm.reach() == Reach::kDirect, fits = comm.size() <= kMaxPeers;
  MOEC_REQUIRE(wanted != MOEC_EP_PEER || fits, MOEC_E_UNSUPPORTED,
               "desc.scheme is MOEC_EP_PEER for %d ranks; expected at most %d, or another scheme",
               comm.size(), kMaxPeers);
  return wanted == MOEC_EP_PEER || (wanted == MOEC_EP_AUTO && !on_host && fits);
}

Choice choose_scheme(uint32_t wanted, const Communicator& comm) {
  const bool on_host = comm.reach() == Reach::kDirect;
  MOEC_REQUIRE(
      on_host || wanted == MOEC_EP_AUTO || wanted == MOEC_EP_GATHER, MOEC_E_UNSUPPORTED,
      "desc.scheme is %u; on a GPU, whose ids no host reads, expected MOEC_EP_PEER, GATHER "
      "or AUTO",
      wanted);
  MOEC_REQUIRE(wanted != MOEC_EP_EXACT || comm.moves_counts(), MOEC_E_UNSUPPORTED,
               "desc.scheme is MOEC_EP_EXACT and the comm has no all_to_all_v; give that callback, "
               "or take GATHER or ROWS");
  if (wanted != MOEC_EP_AUTO) return {wanted, "as wanted"};
  if (!on_host) return {MOEC_EP_GATHER, "on a GPU no host reads the counts"};
  if (comm.moves_counts())
    return {MOEC_EP_EXACT, "on the CPU the host knows the counts, and the fewest bytes move"};
  if (comm.size() <= 4)
    return {MOEC_EP_GATHER, "without all_to_all_v, and for up to 4 ranks most tokens go to most"};
  return {MOEC_EP_ROWS, "without all_to_all_v, and for more than 4 ranks few tokens go to all"};
}

}  // namespace moec::ep
