// SPDX-License-Identifier: Apache-2.0
// MOEC_EP_PEER: the memory of an ep on this rank, that of the others as this rank reaches it, and
// the steps of backend/peer_steps.h.
#pragma once

#include "backend/peer_device.h"
#include "backend/peer_steps.h"
#include "ep/communicator.h"
#include "ep/peer_memory.h"
#include "ep/routes.h"

namespace moec::ep {

struct Departure;  // exchange.h
struct Guests;
struct Homecoming;

class Peers {
 public:
  // Allocates.
  Peers(Communicator& comm, const Backend& backend, const Shape& shape);
  ~Peers();
  Peers(const Peers&) = delete;
  Peers& operator=(const Peers&) = delete;

  // Collective. Why some rank does not reach another, the same text on all; empty: all do. apart:
  // nor may two share a GPU, where kernels that wait for each other may not run at once.
  std::string connect(bool apart);
  const Shape& shape() const { return shape_; }
  uint64_t bytes() const { return bytes_; }
  void set_reports(Disagreement* reports) { map_.reports = reports; }

  Guests dispatch(const Departure& from, moec_stream stream);
  void combine(const Homecoming& to, moec_stream stream);
  int64_t num_tokens() const { return num_tokens_; }
  // Of the last dispatch.
  CapacityOfAll capacity_of_all(double factor, int32_t* to) const;
  void require_well() const;

 private:
  struct Introduction {
    Process process;
    PeerTicket memory;
    char page[64];
  };
  void lay_out();
  void open(size_t rank, const Introduction& of);
  static std::string sharing(const std::vector<Introduction>& all);  // empty: no two share a GPU
  template <class T>
  std::vector<T> gather(const T& own);

  Communicator& comm_;
  const Backend& backend_;
  const Shape shape_;
  uint64_t bytes_ = 0, zeroed_ = 0, scratch_ = 0;
  PeerMap map_ = {};
  int64_t bound_ = 0, num_tokens_ = 0;  // of the last dispatch
  Introduction own_ = {};
  std::vector<PeerMemory> blocks_;                  // [N]
  std::vector<std::unique_ptr<SharedPage>> pages_;  // [N]
  std::vector<Process> processes_;                  // [N], that may have it open
};

}  // namespace moec::ep
