// SPDX-License-Identifier: Apache-2.0
// Memory that other ranks have open must not be freed. Each rank of MOEC_EP_PEER has a page of the
// host that the others map, where they say that they have closed its memory. Who is done with its
// own leaves it to a list of the process, which frees what all have closed whenever an ep with
// peers comes or goes. What a process that has ended had open counts as closed.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "backend/peer_device.h"

namespace moec::ep {

class SharedPage {
 public:
  SharedPage();                                  // of this rank. E_UNSUPPORTED: there is none
  explicit SharedPage(const std::string& name);  // of another one
  ~SharedPage();
  SharedPage(const SharedPage&) = delete;
  SharedPage& operator=(const SharedPage&) = delete;
  const std::string& name() const { return name_; }
  void forget_name();  // nobody maps it from now on
  std::atomic<int32_t>& is_closed_by(int rank) const { return words_[rank]; }

 private:
  void map(int file);
  std::string name_;
  bool is_named_ = false;
  std::atomic<int32_t>* words_ = nullptr;
};

struct Process {
  uint64_t host, space, number;  // hashes of the host's boot and of its processes' numbering
  bool operator==(const Process&) const = default;
};
Process this_process();

struct LeftMemory {
  PeerMemory block;
  std::unique_ptr<SharedPage> page;
  std::vector<Process> ranks;  // that had it open
};
void leave(LeftMemory memory);
void free_closed_memory();

}  // namespace moec::ep
