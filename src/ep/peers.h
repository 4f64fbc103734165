// SPDX-License-Identifier: Apache-2.0
// MOEC_EP_PEER: the memory of an ep on this rank, that of the others as this rank reaches it, and
// the steps of backend/peer_steps.h. Ranks try these ways, and take the first one that all can:
//   1. memory of the device, which threads of a process and processes of a host open (CUDA IPC)
//   2. windows of the comm: memory of its transport, which may reach other hosts. It goes back at
//      once when a rank is done with it, since others keep what they have open.
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
  const std::string& way() const { return way_; }  // that was taken
  const Shape& shape() const { return shape_; }
  uint64_t bytes() const { return bytes_; }
  void set_reports(Disagreement* reports) { map_.reports = reports; }

  Guests dispatch(const Departure& from, moec_stream stream);
  void combine(const Homecoming& to, moec_stream stream);
  int64_t num_tokens() const { return num_tokens_; }
  struct Blocks {
    int32_t dispatch, combine;
  };
  Blocks blocks() const;  // of the kernels of a call with max_tokens
  // Of the last dispatch.
  CapacityOfAll capacity_of_all(double factor, int32_t* to) const;
  void require_well() const;

 private:
  struct Introduction {
    Process process;
    PeerTicket memory;
    char page[64];
    int32_t has_windows;
  };
  void lay_out();
  void clear_words();
  void open(size_t rank, const Introduction& of);
  std::string open_all(const std::vector<Introduction>& all);
  std::string open_windows(const std::vector<Introduction>& all);
  void close_window();
  PeerDispatch dispatch_of(int64_t bound) const;
  PeerCombine combine_of(int64_t bound) const;
  static std::string sharing(const std::vector<Introduction>& all);  // empty: no two share a GPU
  template <class T>
  std::vector<T> gather(const T& own);
  template <class Body>
  std::string try_on_all(const Body& body);

  Communicator& comm_;
  const Backend& backend_;
  const Shape shape_;
  uint64_t bytes_ = 0, zeroed_ = 0;
  PeerMap map_ = {};
  int64_t bound_ = 0, num_tokens_ = 0;  // of the last dispatch
  Introduction own_ = {};
  PeerMemory mail_;  // of gather(), until all are connected
  std::string way_;
  void* window_ = nullptr;
  std::vector<PeerMemory> blocks_;                  // [N]; with windows none
  std::vector<std::unique_ptr<SharedPage>> pages_;  // [N]
  std::vector<Process> processes_;                  // [N], that may have it open
};

}  // namespace moec::ep
