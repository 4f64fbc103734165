// SPDX-License-Identifier: Apache-2.0
#include "ep/communicator.h"

#include <cassert>
#include <utility>

namespace moec::ep {

using ll = long long;

const char* call_name(Call call) {
  static constexpr const char* kNames[] = {"moec_comm_sum", "a loss",    "moec_ep_create",
                                           "a dispatch",    "a combine", "a call of a layer"};
  const auto i = size_t(call);
  return i < std::size(kNames) ? kNames[i] : "an unknown call";
}

const char* reach_name(Reach reach) {
  static constexpr const char* kNames[] = {"direct", "queued", "staged"};
  return kNames[size_t(reach)];
}

uint64_t Communicator::memory_bytes(Reach reach, int32_t size) {
  if (reach == Reach::kStaged) return Staging::kBytes;
  return reach == Reach::kQueued ? 2 * sizeof(Notice) * uint64_t(size) : 0;
}

Communicator::Communicator(const moec_comm_desc& desc, const moec_comm_callbacks& callbacks,
                           Reach reach, const Backend& backend, Wait wait, void* memory)
    : rank_(desc.rank),
      size_(desc.size),
      callbacks_(callbacks),
      reach_(reach),
      backend_(backend),
      wait_(std::move(wait)),
      mailbox_(memory),
      notices_(2 * size_t(desc.size)),
      byte_counts_(4 * size_t(desc.size)) {
  if (reach == Reach::kStaged) staging_.emplace(backend, wait_, size_, memory);
}

Communicator::~Communicator() {
  if (callbacks_.release) callbacks_.release(callbacks_.user);
}

Notice& Communicator::begin_notice(Call call, std::span<const Fact> facts, int32_t to) {
  assert(facts.size() <= kMaxFacts);
  Notice& notice = notices_[size_t(to)];
  notice = {};
  notice.call = call;
  notice.rank = rank_;
  notice.size = size_;
  notice.num_facts = int64_t(facts.size());
  for (size_t i = 0; i < facts.size(); ++i) notice.facts[i] = facts[i].value;
  return notice;
}

const Notice* Communicator::meet(Call call, std::span<const Fact> facts, const Rows& rows,
                                 moec_stream stream) {
  require_well();
  for (int32_t r = 0; r < size_; ++r) begin_notice(call, facts, r).num_tokens = rows.num_tokens;
  exchange_notices(rows.counts, stream);
  const Notice* const from = notices_.data() + size_;
  ++num_meetings_;
  is_settled_ = true;
  check_notices(from, call, facts);
  is_settled_ = false;
  return from;
}

void Communicator::check_notices(const Notice* from, Call call, std::span<const Fact> facts) const {
  for (int32_t r = 0; r < size_; ++r)
    if (r != rank_ && from[r].status != MOEC_OK)
      fail_native(MOEC_E_COMM, from[r].status,
                  "rank %d left %s with status %d, and so nobody could take part; its own error "
                  "says why",
                  r, call_name(from[r].call), from[r].status);
  for (int32_t r = 0; r < size_; ++r) compare(from[r], r, call, facts);
}

void Communicator::compare(const Notice& other, int32_t rank, Call call,
                           std::span<const Fact> facts) const {
  MOEC_REQUIRE(other.rank == rank && other.size == size_, MOEC_E_MISMATCH,
               "what came from rank %d of %d says that it is rank %d of %d; the callbacks or "
               "desc.rank are wrong",
               rank, size_, other.rank, other.size);
  MOEC_REQUIRE(other.call == call, MOEC_E_MISMATCH,
               "rank %d is in %s and this rank, %d, in %s; all ranks make their calls in one order",
               rank, call_name(other.call), rank_, call_name(call));
  for (size_t i = 0; i < facts.size(); ++i)
    MOEC_REQUIRE(other.facts[i] == facts[i].value, MOEC_E_MISMATCH,
                 "rank %d has %s = %lld and this rank, %d, has %lld; expected equal", rank,
                 facts[i].name, ll(other.facts[i]), rank_, ll(facts[i].value));
  MOEC_REQUIRE(other.num_facts == int64_t(facts.size()), MOEC_E_MISMATCH,
               "rank %d makes another kind of %s than this rank, %d; expected the same", rank,
               call_name(call), rank_);
}

// Where callbacks queue the device adds its counts, so that the host waits once.
void Communicator::exchange_notices(const int32_t* counts, moec_stream stream) {
  Notice *const to = notices_.data(), *const from = to + size_;
  const auto tell = [&](Notice* notices) {
    return TellCounts{counts, size_, &notices->rows, sizeof(Notice)};
  };
  if (!queues()) {
    for (int32_t r = 0; counts && r < size_; ++r) tell(to)(r);
    return call_all_to_all(to, from, sizeof(Notice), nullptr);
  }
  const uint64_t bytes = uint64_t(size_) * sizeof(Notice);
  char* const arrived = static_cast<char*>(mailbox_) + bytes;
  backend_.copy(mailbox_, to, bytes, stream);
  if (counts) backend_.between_ranks(tell(static_cast<Notice*>(mailbox_)), stream);
  call_all_to_all(mailbox_, arrived, sizeof(Notice), stream);
  backend_.copy(from, arrived, bytes, stream);
  wait(stream);
}

void Communicator::leave(Call call, moec_status status) noexcept {
  if (broken_ != MOEC_OK) return;
  is_settled_ = true;
  for (int32_t r = 0; r < size_; ++r) begin_notice(call, {}, r).status = status;
  try {
    exchange_notices(nullptr, nullptr);
  } catch (const Error&) {  // the comm is broken; the error that led here is the one to report
  }
}

void Communicator::finish(const char* callback, int32_t result) {
  if (result == 0) return;
  require_well();  // abort() may have ended it
  const moec_status status = result == MOEC_E_TIMEOUT ? MOEC_E_TIMEOUT : MOEC_E_CALLBACK;
  char what[96];
  std::snprintf(what, sizeof what, "the callback %s returned %d%s", callback, result,
                status == MOEC_E_TIMEOUT ? ", its deadline passed" : "");
  give_up(status, what);
  fail_native(status, result, "%s; expected 0. The comm is broken now", what);
}

void Communicator::disagree(int32_t rank, const char* fact, const Disagreement& found) const {
  MOEC_FAIL(MOEC_E_MISMATCH,
            "in an earlier call rank %d had %s = %lld and this rank, %d, %lld; expected equal. "
            "The ep is broken now; make another one",
            rank, fact, ll(found.theirs), rank_, ll(found.own));
}

void Communicator::require_capturable(moec_stream stream) const {
  MOEC_REQUIRE((queues() && callbacks_.flags & MOEC_COMM_CAPTURE) || !backend_.capturing(stream),
               MOEC_E_WOULD_SYNC,
               "the stream is being captured and callbacks.flags of the comm are 0x%x; expected "
               "MOEC_COMM_DEVICE and MOEC_COMM_CAPTURE",
               callbacks_.flags);
}

void Communicator::require_waiting(moec_stream stream) {
  if (!queues() || !backend_.capturing(stream)) return;
  is_settled_ = true;
  MOEC_FAIL(MOEC_E_WOULD_SYNC,
            "the stream is being captured, and the host waits for the counts of MOEC_EP_EXACT; "
            "expected another scheme, such as MOEC_EP_ROWS");
}

void Communicator::call_all_gather(const void* send, void* recv, uint64_t bytes,
                                   moec_stream stream) {
  require_well();
  finish("all_gather", callbacks_.all_gather(callbacks_.user, send, recv, bytes, stream));
}
void Communicator::call_all_to_all(const void* send, void* recv, uint64_t bytes,
                                   moec_stream stream) {
  require_well();
  finish("all_to_all", callbacks_.all_to_all(callbacks_.user, send, recv, bytes, stream));
}
void Communicator::all_gather(const void* send, void* recv, uint64_t bytes, moec_stream stream) {
  if (!staging_) return call_all_gather(send, recv, bytes, stream);
  staging_->pass(1, send, recv, bytes, stream, [&](const void* from, void* to, uint64_t piece) {
    call_all_gather(from, to, piece, nullptr);
  });
}
void Communicator::all_to_all(const void* send, void* recv, uint64_t bytes, moec_stream stream) {
  if (!staging_) return call_all_to_all(send, recv, bytes, stream);
  staging_->pass(size_, send, recv, bytes, stream, [&](const void* from, void* to, uint64_t piece) {
    call_all_to_all(from, to, piece, nullptr);
  });
}
void Communicator::all_to_all_v(const void* send, Parts sent, void* recv, Parts received,
                                uint64_t unit, uint64_t longest, moec_stream stream) {
  const auto call = [&](const void* from, Parts out, void* to, Parts in, uint64_t step) {
    require_well();
    finish("all_to_all_v",
           callbacks_.all_to_all_v(callbacks_.user, from, out.bytes, out.at, to, in.bytes, in.at,
                                   step, queues() ? stream : nullptr));
  };
  if (!staging_) return call(send, sent, recv, received, unit);
  staging_->pass_parts(
      send, sent, recv, received, longest, stream,
      [&](const void* from, Parts out, void* to, Parts in) { call(from, out, to, in, 1); });
}

void* Communicator::alloc_window(uint64_t bytes, void** memory) const {
  require_well();
  void* window = nullptr;
  const int32_t result = callbacks_.window_alloc(callbacks_.user, bytes, &window, memory);
  if (result)
    fail_native(MOEC_E_UNSUPPORTED, result,
                "has no window of %llu bytes: the callback window_alloc returned %d",
                static_cast<unsigned long long>(bytes), result);
  return window;
}

void Communicator::open_window(void* window, std::span<void*> blocks) const {
  require_well();
  const int32_t result = callbacks_.window_open(callbacks_.user, window, blocks.data());
  if (result)
    fail_native(MOEC_E_UNSUPPORTED, result, "opens no window: the callback window_open returned %d",
                result);
}

// Abort and this exclude each other. What a close that fails has not given back nobody can.
void Communicator::close_window(void* window) const noexcept {
  const std::lock_guard lock(outside_);
  callbacks_.window_close(callbacks_.user, window);
}

void Communicator::ask() const {
  const std::unique_lock lock(outside_, std::try_to_lock);
  if (!lock || broken_ != MOEC_OK || !callbacks_.poll) return;
  char what[64];
  if (const int32_t result = callbacks_.poll(callbacks_.user)) {
    std::snprintf(what, sizeof what, "the callback poll returned %d", result);
    give_up(MOEC_E_COMM, what);
  }
}

void Communicator::require_well() const {
  const moec_status status = broken_;
  MOEC_REQUIRE(status == MOEC_OK, status,
               "%s. The comm is broken; make another one of the ranks that are left", why_);
}

void Communicator::abort() const {
  MOEC_REQUIRE(
      callbacks_.abort, MOEC_E_UNSUPPORTED,
      "callbacks.abort of the comm is NULL; what waits for a rank ends by its own deadline");
  const std::lock_guard lock(outside_);
  if (is_aborted_) return;
  is_aborted_ = true;
  give_up(MOEC_E_COMM, "moec_comm_abort was called");
  const int32_t result = callbacks_.abort(callbacks_.user);
  if (result)
    fail_native(MOEC_E_CALLBACK, result, "the callback abort returned %d; expected 0", result);
}

void Communicator::give_up(moec_status status, const char* why) const noexcept {
  if (is_given_up_.exchange(true)) return;
  std::snprintf(why_, sizeof why_, "%s", why);
  broken_ = status;
}

}  // namespace moec::ep
