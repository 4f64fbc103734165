// SPDX-License-Identifier: Apache-2.0
// The caller's transport. Every collective call begins with a notice of each rank to each other, of
// a size that nothing decides: so ranks that disagree, or that cannot take part, are found before
// bytes of other sizes move.
#pragma once

#include <moec/moec.h>

#include <atomic>
#include <span>
#include <vector>

#include "core/error.h"

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
  // dispatch: tokens and rows of the sender, rows for the receiver (pair_rows)
  int64_t num_tokens, pair_rows, rows_needed, rows_dropped;
};

class Communicator {
 public:
  // Takes over `callbacks`: release() is called at the end.
  Communicator(const moec_comm_desc& desc, const moec_comm_callbacks& callbacks);
  ~Communicator();
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  int32_t rank() const { return rank_; }
  int32_t size() const { return size_; }
  bool moves_counts() const { return callbacks_.all_to_all_v != nullptr; }

  // ---- a call: `facts` are compared with those of all ranks. E_MISMATCH and E_COMM name a rank,
  // on all ranks. fill(r, notice) adds what this rank has to say to rank r.
  template <class Fill>
  const Notice* meet(Call call, std::span<const Fact> facts, const Fill& fill) {
    for (int32_t r = 0; r < size_; ++r) fill(r, begin_notice(call, facts, r));
    return meet(call, facts);
  }
  const Notice* meet_plainly(Call call, std::span<const Fact> facts) {
    return meet(call, facts, [](int32_t, Notice&) {});
  }
  // This rank cannot take part in a call, because of `status`: the others learn of it.
  void leave(Call call, moec_status status) noexcept;

  // ---- within a call: E_TIMEOUT or E_CALLBACK, and from then on the communicator is broken.
  void all_gather(const void* send, void* recv, uint64_t bytes);
  void all_to_all(const void* send, void* recv, uint64_t bytes);
  struct Parts {
    const uint64_t *bytes, *at;
  };
  void all_to_all_v(const void* send, Parts sent, void* recv, Parts received, uint64_t unit);
  uint64_t* byte_counts() { return byte_counts_.data(); }  // [4,N] for the two Parts

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
      moec_status well = MOEC_OK;
      broken_.compare_exchange_strong(well, current_error().code);
      throw;
    }
  }

  // 0, or what broke it. Asks the caller's poll.
  moec_status poll() const;
  void require_well() const;
  int32_t number_ep() { return num_eps_++; }

 private:
  Notice& begin_notice(Call call, std::span<const Fact> facts, int32_t to);
  const Notice* meet(Call call, std::span<const Fact> facts);
  void check_notices(const Notice* from, Call call, std::span<const Fact> facts) const;
  void compare(const Notice& other, int32_t rank, Call call, std::span<const Fact> facts) const;
  void finish(const char* callback, int32_t result);

  const int32_t rank_, size_;
  const moec_comm_callbacks callbacks_;
  std::vector<Notice> notices_;  // [2,N]: to and from each rank
  std::vector<uint64_t> byte_counts_;
  uint64_t num_meetings_ = 0;
  bool is_settled_ = false;  // all ranks know that the call has failed
  int32_t num_eps_ = 0;
  mutable std::atomic<moec_status> broken_{MOEC_OK};
};

// What comes before the meeting of a call: a failure there is told to the others.
template <class Body>
decltype(auto) prepare(Communicator& comm, Call call, Body&& body) {
  try {
    return body();
  } catch (...) {
    comm.leave(call, current_error().code);
    throw;
  }
}

}  // namespace moec::ep
