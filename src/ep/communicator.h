// SPDX-License-Identifier: Apache-2.0
// The caller's transport. Where callbacks wait, every collective call begins with a notice of each
// rank to each other, of a size that nothing decides: so ranks that disagree, or that cannot take
// part, are found before bytes of other sizes move. Callbacks that queue are not waited for once an
// ep is made, but where the host counts rows: there a header travels with the ids (rank_steps.h).
#pragma once

#include <moec/moec.h>

#include <atomic>
#include <mutex>
#include <optional>
#include <span>
#include <vector>

#include "backend/rank_steps.h"
#include "core/error.h"
#include "ep/staging.h"

namespace moec::ep {

enum class Call : int32_t { kSum, kLoss, kCreate, kDispatch, kCombine, kLayer };
const char* call_name(Call call);

struct Fact {  // what must be equal on all ranks
  const char* name;
  int64_t value;
};
inline constexpr size_t kMaxFacts = 16;

struct Notice {
  Call call;
  moec_status status;  // not 0: the rank leaves this call
  int32_t rank, size;
  int64_t num_facts;
  int64_t facts[kMaxFacts];
  int64_t num_tokens;  // dispatch: of the sender
  PairRows rows;       // dispatch whose rows hosts count
};

// Between callbacks and arrays of the device.
enum class Reach {
  kDirect,  // the device is the host
  kQueued,  // callbacks take memory of the device and queue
  kStaged   // callbacks take memory of the host: rows pass through it, and the host waits
};
const char* reach_name(Reach reach);

class Communicator {
 public:
  // Bytes that a communicator works with: of the device (kQueued), or shared (kStaged).
  static uint64_t memory_bytes(Reach reach, int32_t size);
  // Takes over `callbacks`: release() is called at the end. `wait` waits for a stream.
  Communicator(const moec_comm_desc& desc, const moec_comm_callbacks& callbacks, Reach reach,
               const Backend& backend, Wait wait, void* memory);
  ~Communicator();
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  int32_t rank() const { return rank_; }
  int32_t size() const { return size_; }
  bool moves_counts() const { return callbacks_.all_to_all_v != nullptr; }
  Reach reach() const { return reach_; }
  bool queues() const { return reach_ == Reach::kQueued; }
  // What waited for another rank may have been freed by abort().
  void wait(moec_stream stream) const {
    wait_(stream);
    require_well();
  }
  // E_WOULD_SYNC where `stream` is captured and that cannot be.
  void require_capturable(moec_stream stream) const;
  // E_WOULD_SYNC where `stream` is captured and callbacks queue. Nobody is told: that waits, too.
  void require_waiting(moec_stream stream);

  // ---- a call: `facts` are compared with those of all ranks. E_MISMATCH and E_COMM name a rank,
  // on all ranks.
  struct Rows {  // of a dispatch
    int64_t num_tokens = 0;
    // [N] for each rank, where hosts count; memory that host and device reach. It is written when
    // `stream` comes here, and where callbacks take memory of the host, now.
    const int32_t* counts = nullptr;
  };
  const Notice* meet(Call call, std::span<const Fact> facts, const Rows& rows, moec_stream stream);
  void meet(Call call, std::span<const Fact> facts) { meet(call, facts, {}, nullptr); }
  // This rank cannot take part in a call, because of `status`: the others learn of it.
  void leave(Call call, moec_status status) noexcept;

  // ---- within a call, between arrays of the device: E_TIMEOUT or E_CALLBACK, and from then on the
  // communicator is broken.
  void all_gather(const void* send, void* recv, uint64_t bytes, moec_stream stream);
  void all_to_all(const void* send, void* recv, uint64_t bytes, moec_stream stream);
  // longest: bytes that no rank sends more of to another, equal on all ranks.
  void all_to_all_v(const void* send, Parts sent, void* recv, Parts received, uint64_t unit,
                    uint64_t longest, moec_stream stream);
  uint64_t* byte_counts() { return byte_counts_.data(); }  // [4,N] for two Parts

  // body() has so many meetings. A failure of this rank alone is told to the others, if they wait
  // for it at one of them.
  template <class Body>
  void attend(Call call, uint64_t meetings, Body&& body) {
    const uint64_t last = num_meetings_ + meetings;
    is_settled_ = false;
    try {
      body();
    } catch (...) {
      if (!is_settled_ && num_meetings_ < last) leave(call, current_error().code);
      throw;
    }
  }

  // Work between the meeting and the last transfer: whatever fails there breaks the communicator.
  template <class Body>
  void in_step(Body&& body) {
    try {
      body();
    } catch (...) {
      const Error error = current_error();
      give_up(error.code, error.text);
      throw;
    }
  }

  // ---- windows: memory that the caller's transport makes reachable. Where that fails, the
  // communicator stays as it is.
  bool has_windows() const { return callbacks_.window_alloc != nullptr; }
  void* alloc_window(uint64_t bytes, void** memory) const;
  void open_window(void* window, std::span<void*> blocks) const;  // collective
  void close_window(void* window) const noexcept;

  // Asks the caller's poll. Never waits.
  void ask() const;
  void require_well() const;
  // Whatever waits for another rank ends, on streams and in callbacks, and the communicator is
  // broken. From any thread.
  void abort() const;
  // It is broken from now on, if it was not before.
  void give_up(moec_status status, const char* why) const noexcept;
  // E_MISMATCH of what a device found: `fact` differs on a rank.
  [[noreturn]] void disagree(int32_t rank, const char* fact, const Disagreement& found) const;
  int32_t number_ep() { return num_eps_++; }

 private:
  Notice& begin_notice(Call call, std::span<const Fact> facts, int32_t to);
  void check_notices(const Notice* from, Call call, std::span<const Fact> facts) const;
  void compare(const Notice& other, int32_t rank, Call call, std::span<const Fact> facts) const;
  void exchange_notices(const int32_t* counts, moec_stream stream);
  void call_all_gather(const void* send, void* recv, uint64_t bytes, moec_stream stream);
  void call_all_to_all(const void* send, void* recv, uint64_t bytes, moec_stream stream);
  void finish(const char* callback, int32_t result);

  const int32_t rank_, size_;
  const moec_comm_callbacks callbacks_;
  const Reach reach_;
  const Backend& backend_;
  const Wait wait_;
  void* const mailbox_;  // kQueued: [2,N] notices
  std::optional<Staging> staging_;
  std::vector<Notice> notices_;  // [2,N]: to and from each rank
  std::vector<uint64_t> byte_counts_;
  uint64_t num_meetings_ = 0;
  bool is_settled_ = false;  // all ranks know that the call has failed
  int32_t num_eps_ = 0;
  mutable std::mutex outside_;       // held while the caller's poll or abort is called
  mutable bool is_aborted_ = false;  // under outside_
  mutable std::atomic<bool> is_given_up_{false};
  mutable char why_[192] = {};  // of broken_, written before it
  mutable std::atomic<moec_status> broken_{MOEC_OK};
};

// What comes before the meeting of a call, if it has one: a failure there is told to the others.
template <class Body>
decltype(auto) prepare(Communicator& comm, Call call, bool meets, Body&& body) {
  try {
    return body();
  } catch (...) {
    if (meets) comm.leave(call, current_error().code);
    throw;
  }
}
template <class Body>
decltype(auto) prepare(Communicator& comm, Call call, Body&& body) {
  return prepare(comm, call, call == Call::kCreate || !comm.queues(), static_cast<Body&&>(body));
}

}  // namespace moec::ep
