// SPDX-License-Identifier: Apache-2.0
// Memory that other ranks reach, and the steps that use it: what a device must be able to do for
// MOEC_EP_PEER.
#pragma once

#include <moec/moec.h>

#include <functional>
#include <memory>

namespace moec {

struct PeerDispatch;  // peer_steps.h
struct PeerCombine;

struct PeerTicket {                // what a rank says of its memory, so that others can open it
  int32_t device_type, device_id;  // as its process counts devices
  int32_t is_exported;             // to other processes, by `handle`
  unsigned char unit[16];          // of the device, whoever counts; zeros: may be shared
  uint64_t address;
  unsigned char handle[64];
};

// Frees or closes memory. (std::shared_ptr needs a symbol of glibc 2.32.)
struct PeerMemoryEnd {
  void (*end)(void* memory, int32_t device) = nullptr;
  int32_t device = 0;
  void operator()(void* memory) const {
    if (end) end(memory, device);
  }
};
using PeerMemory = std::unique_ptr<void, PeerMemoryEnd>;

class PeerDevice {
 public:
  virtual ~PeerDevice() = default;
  // Memory of this device, full of NaN, that lives as long as the pointer.
  virtual PeerMemory allocate(uint64_t bytes, PeerTicket& ticket) const = 0;
  // Memory that `take` gives while this device is the current one, full of NaN then.
  virtual void* adopt(uint64_t bytes, const std::function<void*()>& take) const = 0;
  // The memory of another rank of this host as this device reaches it, until the pointer goes.
  // E_UNSUPPORTED says why it does not.
  virtual PeerMemory open(const PeerTicket& ticket, bool same_process) const = 0;
  // Waits until nothing that was queued is under way.
  virtual void finish() const = 0;
  // The blocks of a step's kernel, or the threads that do its work.
  virtual int32_t crews(const PeerDispatch& step) const = 0;
  virtual int32_t crews(const PeerCombine& step) const = 0;
  virtual void run(const PeerDispatch& step, moec_stream stream) const = 0;
  virtual void run(const PeerCombine& step, moec_stream stream) const = 0;
};

}  // namespace moec
