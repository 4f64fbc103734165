// SPDX-License-Identifier: Apache-2.0
// Ranks as threads of one process: a communicator whose callbacks copy memory between barriers that
// have a deadline.
#pragma once

#include <moec/moec.h>

#include <chrono>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "handles.h"

namespace moec::test {

class RankBoard {
 public:
  explicit RankBoard(int size, std::chrono::milliseconds deadline = std::chrono::seconds(60));
  virtual ~RankBoard() = default;
  int size() const { return static_cast<int>(seats_.size()); }
  // Of one rank; counts: with all_to_all_v.
  virtual moec_comm_callbacks callbacks(int rank, bool counts = true);
  virtual Comm make_comm(const moec_context* context, int rank, bool counts);
  // Where the calls of a rank are queued.
  virtual moec_stream stream(int /*rank*/) const { return nullptr; }
  // This thread is a rank's from now on.
  virtual void enter(int /*rank*/) const {}
  // Waits for all ranks; throws where they do not come.
  void wait_for_all();
  int released() const { return released_; }
  // Callbacks of a rank return this instead of doing anything.
  void fail(int rank, int32_t with) { seats_[static_cast<size_t>(rank)].fails_with = with; }
  void set_poll(int32_t result) { poll_ = result; }
  // What the callback abort returns, after it has ended the waits of all ranks; how often it did.
  void set_abort(int32_t result) { abort_ = result; }
  int aborted() const { return aborted_; }

 protected:
  bool meet();  // false: not all came in time, now or ever before

 private:
  struct Seat {
    RankBoard* board;
    int rank;
    int32_t fails_with = 0;
    const char* send = nullptr;
    const uint64_t *bytes = nullptr, *at = nullptr;
  };
  static int32_t all_gather(void* user, const void* send, void* recv, uint64_t bytes, moec_stream);
  static int32_t all_to_all(void* user, const void* send, void* recv, uint64_t bytes, moec_stream);
  static int32_t all_to_all_v(void* user, const void* send, const uint64_t* send_bytes,
                              const uint64_t* send_at, void* recv, const uint64_t* recv_bytes,
                              const uint64_t* recv_at, uint64_t unit, moec_stream);
  // Between two barriers, copy(from) for each rank.
  int32_t exchange(Seat& seat, const void* send, const std::function<bool(const Seat&)>& copy);

  std::vector<Seat> seats_;
  const std::chrono::milliseconds deadline_;
  std::mutex mutex_;
  std::condition_variable all_here_;
  int waiting_ = 0;
  uint64_t round_ = 0;
  bool dead_ = false;
  int released_ = 0, aborted_ = 0;
  int32_t poll_ = 0, abort_ = 0;
};

// A context of the device under test and a communicator of one rank; on the CPU, without an
// allocator, memory begins as NaN.
struct Rank {
  Rank(RankBoard& board, int rank, bool counts = true, const moec_allocator* allocator = nullptr);
  // Where kernels wait for other ranks on one GPU, no rank may take memory, for which the driver
  // waits for the GPU: all come here between taking memory and queueing.
  void wait_for_all() const { board.wait_for_all(); }
  RankBoard& board;
  int rank, size;
  moec_stream stream;
  Context context;
  Comm comm;
};

// body(rank) on a thread of its own for each rank; returns what each threw ("" for nothing).
std::vector<std::string> run_ranks(int size, const std::function<void(int)>& body);

}  // namespace moec::test
