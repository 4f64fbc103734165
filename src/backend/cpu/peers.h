// SPDX-License-Identifier: Apache-2.0
// Threads of one process reach each other's memory as it is, and processes reach windows.
// A step is the work of the thread that calls it.
#pragma once

#include "backend/peer_device.h"

namespace moec::cpu {

class CpuPeers final : public PeerDevice {
 public:
  PeerMemory allocate(uint64_t bytes, PeerTicket& ticket) const override;
  void* adopt(uint64_t bytes, const std::function<void*()>& take) const override;
  PeerMemory open(const PeerTicket& ticket, bool same_process) const override;
  void finish() const override {}
  int32_t crews(const PeerDispatch&) const override { return 1; }
  int32_t crews(const PeerCombine&) const override { return 1; }
  void run(const PeerDispatch& step, moec_stream) const override;
  void run(const PeerCombine& step, moec_stream) const override;
};

}  // namespace moec::cpu
