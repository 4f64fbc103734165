// SPDX-License-Identifier: Apache-2.0
// GPUs that reach each other's memory: by peer access in one process, by CUDA IPC from another of
// this host; or memory that the transport of the ranks makes reachable. A step is one kernel.
#pragma once

#include "backend/cuda/device/op.h"
#include "backend/peer_device.h"

namespace moec::cuda {

class CudaBackend;

class CudaPeers final : public PeerDevice {
 public:
  CudaPeers(const CudaBackend& backend, int device) : backend_(backend), device_(device) {}
  PeerMemory allocate(uint64_t bytes, PeerTicket& ticket) const override;
  void* adopt(uint64_t bytes, const std::function<void*()>& take) const override;
  PeerMemory open(const PeerTicket& ticket, bool same_process) const override;
  void finish() const override;
  int32_t crews(const PeerDispatch& step) const override;
  int32_t crews(const PeerCombine& step) const override;
  void run(const PeerDispatch& step, moec_stream stream) const override;
  void run(const PeerCombine& step, moec_stream stream) const override;

 private:
  const CudaBackend& backend_;
  const int device_;
};

// Of peer_steps.cu.
int32_t num_blocks(const PeerDispatch& step);
int32_t num_blocks(const PeerCombine& step);
void queue(const Op& op, const PeerDispatch& step);
void queue(const Op& op, const PeerCombine& step);

}  // namespace moec::cuda
