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
          uint64_t row_bytes, moec_stream stream) const override {
    uint64_t* const bytes = comm.byte_counts();
    comm.all_to_all_v(outbox, sent(routes, row_bytes, bytes), guests,
                      received(routes, row_bytes, bytes), row_bytes,
                      uint64_t(routes.longest) * row_bytes, stream);
  }
  void come_back(Communicator& comm, const Routes& routes, const void* guests, void* home,
                 uint64_t row_bytes, moec_stream stream) const override {
    uint64_t* const bytes = comm.byte_counts();
    comm.all_to_all_v(guests, received(routes, row_bytes, bytes), home,
                      sent(routes, row_bytes, bytes), row_bytes,
                      uint64_t(routes.longest) * row_bytes, stream);
  }

 private:
  // In bytes: sent ones in the first half of `bytes`, received ones in the second.
  static Parts sent(const Routes& routes, uint64_t row_bytes, uint64_t* bytes) {
    return in_bytes(routes.sent, routes.sent_at, row_bytes, bytes);
  }
  static Parts received(const Routes& routes, uint64_t row_bytes, uint64_t* bytes) {
    return in_bytes(routes.received, routes.received_at, row_bytes,
                    bytes + 2 * routes.received.size());
  }
  static Parts in_bytes(const std::vector<int64_t>& rows, const std::vector<int64_t>& at,
                        uint64_t row_bytes, uint64_t* bytes) {
    for (size_t r = 0; r < rows.size(); ++r) {
      bytes[r] = uint64_t(rows[r]) * row_bytes;
      bytes[rows.size() + r] = uint64_t(at[r]) * row_bytes;
    }
    return {bytes, bytes + rows.size()};
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
  MOEC_REQUIRE(wanted != MOEC_EP_EXACT || comm.moves_counts(), MOEC_E_UNSUPPORTED,
               "desc.scheme is MOEC_EP_EXACT and the comm has no all_to_all_v; give that callback, "
               "or take GATHER or ROWS");
  if (wanted != MOEC_EP_AUTO) return {wanted, "as wanted"};
  if (!on_host) return {MOEC_EP_GATHER, "on a GPU the host does not wait for counts"};
  if (comm.moves_counts())
    return {MOEC_EP_EXACT, "on the CPU the host knows the counts, and the fewest bytes move"};
  if (comm.size() <= 4)
    return {MOEC_EP_GATHER, "without all_to_all_v, and for up to 4 ranks most tokens go to most"};
  return {MOEC_EP_ROWS, "without all_to_all_v, and for more than 4 ranks few tokens go to all"};
}

}  // namespace moec::ep
