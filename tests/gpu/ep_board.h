// SPDX-License-Identifier: Apache-2.0
// Ranks as threads that share one GPU or more, each with a stream of its own: callbacks that take
// memory of the device and queue. A copy waits for what it reads by events, never on the host.
// Threads meet to tell each other their addresses.
#pragma once

#include <cuda_runtime.h>

#include <deque>
#include <mutex>

#include "gpu/step.h"
#include "support/device.h"
#include "support/rank_threads.h"

namespace moec::test {

class DeviceBoard : public RankBoard {
 public:
  explicit DeviceBoard(int size);  // ranks take turns on the GPUs that there are
  ~DeviceBoard() override;
  moec_comm_callbacks callbacks(int rank, bool counts = true) override;
  moec_stream stream(int rank) const override { return seat(rank).stream; }
  void enter(int rank) const override { use_gpu(rank % num_gpus()); }
  // body(rank) on a thread for each, of which one runs until it has to wait for another: what all
  // of them queue may be captured in one graph. What each threw.
  std::vector<std::string> in_turns(const std::function<void(int)>& body);

 protected:
  struct Seat {
    DeviceBoard* board = nullptr;
    int rank = 0;
    const char* send = nullptr;
    const uint64_t *bytes = nullptr, *at = nullptr;  // [N] of what it sends
    cudaStream_t stream = nullptr;
    cudaEvent_t ready = nullptr, done = nullptr;
    std::unique_lock<std::mutex> turn;
  };
  const Seat& seat(int rank) const { return seats_[static_cast<size_t>(rank)]; }
  Seat* seat_of(int rank) { return &seats_[static_cast<size_t>(rank)]; }
  static int32_t all_gather(void* user, const void* send, void* recv, uint64_t bytes,
                            moec_stream stream);
  static int32_t all_to_all(void* user, const void* send, void* recv, uint64_t bytes,
                            moec_stream stream);
  static int32_t all_to_all_v(void* user, const void* send, const uint64_t* send_bytes,
                              const uint64_t* send_at, void* recv, const uint64_t* recv_bytes,
                              const uint64_t* recv_at, uint64_t unit, moec_stream stream);

 private:
  // recv[r] = `bytes` at byte rank * step of what rank r sends.
  static int32_t exchange(void* user, const void* send, uint64_t step, void* recv, uint64_t bytes,
                          moec_stream stream);
  bool meet_others(Seat& seat);

  std::deque<Seat> seats_;
  std::mutex turns_;
};

// The same behind functions as NCCL has them, with moec/nccl.h around these.
class NcclBoard final : public DeviceBoard {
 public:
  using DeviceBoard::DeviceBoard;
  Comm make_comm(const moec_context* context, int rank, bool counts) override;
};

}  // namespace moec::test
