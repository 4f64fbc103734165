// SPDX-License-Identifier: Apache-2.0
// How rows get to the ranks and back. All schemes give the same bits: what they send differs.
#pragma once

#include "ep/communicator.h"
#include "ep/routes.h"

namespace moec::ep {

class Scheme {
 public:
  virtual ~Scheme() = default;
  virtual uint32_t id() const = 0;
  virtual const char* name() const = 0;
  // Every token goes to every rank, and no host looks at its ids.
  virtual bool sends_to_all() const { return false; }
  virtual Places places(const Shape& shape, int64_t bound) const = 0;
  // Rows that a call of this bound has in the outbox, and among the guests, at most.
  virtual int64_t most_sent(const Shape& shape, int32_t ranks, int64_t bound) const = 0;
  virtual int64_t most_guests(const Shape& shape, int32_t ranks, int64_t bound) const = 0;
  // Outbox to guests, and partial rows of guests to the places that the outbox names.
  virtual void go(Communicator& comm, const Routes& routes, const void* outbox, void* guests,
                  uint64_t row_bytes, moec_stream stream) const = 0;
  virtual void come_back(Communicator& comm, const Routes& routes, const void* guests, void* home,
                         uint64_t row_bytes, moec_stream stream) const = 0;
};

const Scheme& scheme_of(uint32_t id);  // GATHER, ROWS, EXACT

// Whether PEER is to be tried: it is wanted, or AUTO would take it.
bool may_be_peers(uint32_t wanted, const Communicator& comm);

struct Choice {
  uint32_t scheme;
  std::string why;
};
// What AUTO takes but PEER, from what all ranks share; E_UNSUPPORTED where the wanted one cannot be
// had.
Choice choose_scheme(uint32_t wanted, const Communicator& comm);

}  // namespace moec::ep
