// SPDX-License-Identifier: Apache-2.0
#include "rank_threads.h"

#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <thread>

#include "device.h"

namespace moec::test {

RankBoard::RankBoard(int size, std::chrono::milliseconds deadline) : deadline_(deadline) {
  for (int r = 0; r < size; ++r) seats_.push_back({this, r});
}

moec_comm_callbacks RankBoard::callbacks(int rank, bool counts) {
  auto callbacks = sized<moec_comm_callbacks>();
  callbacks.user = &seats_[static_cast<size_t>(rank)];
  callbacks.all_gather = all_gather;
  callbacks.all_to_all = all_to_all;
  if (counts) callbacks.all_to_all_v = all_to_all_v;
  callbacks.poll = [](void* user) { return static_cast<Seat*>(user)->board->poll_; };
  callbacks.abort = [](void* user) {
    RankBoard& board = *static_cast<Seat*>(user)->board;
    const std::lock_guard lock(board.mutex_);
    ++board.aborted_;
    board.dead_ = true;
    board.all_here_.notify_all();
    return board.abort_;
  };
  callbacks.release = [](void* user) {
    RankBoard& board = *static_cast<Seat*>(user)->board;
    const std::lock_guard lock(board.mutex_);
    ++board.released_;
  };
  return callbacks;
}

Comm RankBoard::make_comm(const moec_context* context, int rank, bool counts) {
  auto desc = sized<moec_comm_desc>();
  desc.rank = rank;
  desc.size = size();
  const moec_comm_callbacks own = callbacks(rank, counts);
  return make<Comm>(moec_comm_create, context, &desc, &own);
}

void RankBoard::wait_for_all() {
  if (!meet()) throw std::runtime_error("not all ranks came");
}

bool RankBoard::meet() {
  std::unique_lock lock(mutex_);
  if (dead_) return false;
  if (++waiting_ == size()) {
    waiting_ = 0;
    ++round_;
    all_here_.notify_all();
    return true;
  }
  const uint64_t round = round_;
  all_here_.wait_for(lock, deadline_, [&] { return round_ != round || dead_; });
  if (round_ != round) return true;  // all came, whatever one of them has done since
  dead_ = true;
  all_here_.notify_all();
  return false;
}

int32_t RankBoard::exchange(Seat& seat, const void* send,
                            const std::function<bool(const Seat&)>& copy) {
  if (seat.fails_with) return seat.fails_with;
  seat.send = static_cast<const char*>(send);
  if (!meet()) return MOEC_E_TIMEOUT;
  bool well = true;
  for (const Seat& from : seats_) well = copy(from) && well;
  if (!meet()) return MOEC_E_TIMEOUT;
  return well ? 0 : -1000;
}

int32_t RankBoard::all_gather(void* user, const void* send, void* recv, uint64_t bytes,
                              moec_stream) {
  Seat& seat = *static_cast<Seat*>(user);
  return seat.board->exchange(seat, send, [&](const Seat& from) {
    if (bytes)
      std::memcpy(static_cast<char*>(recv) + static_cast<uint64_t>(from.rank) * bytes, from.send,
                  bytes);
    return true;
  });
}

int32_t RankBoard::all_to_all(void* user, const void* send, void* recv, uint64_t bytes,
                              moec_stream) {
  Seat& seat = *static_cast<Seat*>(user);
  return seat.board->exchange(seat, send, [&](const Seat& from) {
    if (bytes)
      std::memcpy(static_cast<char*>(recv) + static_cast<uint64_t>(from.rank) * bytes,
                  from.send + static_cast<uint64_t>(seat.rank) * bytes, bytes);
    return true;
  });
}

int32_t RankBoard::all_to_all_v(void* user, const void* send, const uint64_t* send_bytes,
                                const uint64_t* send_at, void* recv, const uint64_t* recv_bytes,
                                const uint64_t* recv_at, uint64_t unit, moec_stream) {
  Seat& seat = *static_cast<Seat*>(user);
  seat.bytes = send_bytes;
  seat.at = send_at;
  return seat.board->exchange(seat, send, [&](const Seat& from) {
    const uint64_t bytes = recv_bytes[from.rank], at = recv_at[from.rank];
    if (bytes) std::memcpy(static_cast<char*>(recv) + at, from.send + from.at[seat.rank], bytes);
    return bytes == from.bytes[seat.rank] && bytes % unit == 0 && at % unit == 0 &&
           from.at[seat.rank] % unit == 0;
  });
}

namespace {

// Memory full of NaN: what a call reads before it was written shows.
const moec_allocator* poisoned() {
  static const moec_allocator allocator = [] {
    auto a = sized<moec_allocator>();
    a.alloc = [](void*, size_t bytes, size_t align, int32_t, int32_t, moec_stream) -> void* {
      const size_t whole = (bytes + align - 1) / align * align;
      void* const memory = std::aligned_alloc(align, whole);
      if (memory) std::memset(memory, 0xFF, whole);
      return memory;
    };
    a.release = [](void*, void* memory, size_t, int32_t, int32_t, moec_stream) {
      std::free(memory);
    };
    return a;
  }();
  return &allocator;
}

}  // namespace

Rank::Rank(RankBoard& ranks, int number, bool counts, const moec_allocator* allocator)
    : board(ranks), rank(number), size(ranks.size()), stream(ranks.stream(number)) {
  board.enter(number);
  const TestDevice device = test_device();
  auto context_desc = sized<moec_context_desc>();
  context_desc.device_type = device.type;
  context_desc.device_id = device.id;
  if (device.type == MOEC_CPU) {
    context_desc.num_threads = 1;
    context_desc.allocator = allocator ? allocator : poisoned();
  }
  context = make<Context>(moec_context_create, &context_desc);
  comm = board.make_comm(context.get(), rank, counts);
}

std::vector<std::string> run_ranks(int size, const std::function<void(int)>& body) {
  std::vector<std::string> errors(static_cast<size_t>(size));
  std::vector<std::thread> threads;
  for (int r = 0; r < size; ++r)
    threads.emplace_back([&, r] {
      try {
        body(r);
      } catch (const std::exception& error) {
        errors[static_cast<size_t>(r)] = error.what();
      }
    });
  for (std::thread& thread : threads) thread.join();
  return errors;
}

}  // namespace moec::test
