// SPDX-License-Identifier: Apache-2.0
// Ranks that are threads of one process reach each other's memory as it is. A step is the work of
// the thread that calls it.
#pragma once

#include "backend/peer_device.h"

namespace moec::cpu {

class CpuPeers final : public PeerDevice {
 public:
  PeerMemory allocate(uint64_t bytes, PeerTicket& ticket) const override;
  PeerMemory open(const PeerTicket& ticket, bool same_process) const override;
  void finish() const override {}
  void run(const PeerDispatch& step, moec_stream) const override;
  void run(const PeerCombine& step, moec_stream) const override;
};

}  // namespace moec::cpu
