// SPDX-License-Identifier: Apache-2.0
#include "gpu/ep_board.h"

#include <moec/nccl.h>

#include <tuple>

namespace moec::test {

DeviceBoard::DeviceBoard(int size) : RankBoard(size), seats_(static_cast<size_t>(size)) {
  for (int r = 0; r < size; ++r) {
    Seat& seat = seats_[static_cast<size_t>(r)];
    enter(r);
    seat.board = this;
    seat.rank = r;
    CHECK_CUDA(cudaStreamCreateWithFlags(&seat.stream, cudaStreamNonBlocking));
    for (cudaEvent_t* event : {&seat.ready, &seat.done})
      CHECK_CUDA(cudaEventCreateWithFlags(event, cudaEventDisableTiming));
  }
  use_gpu(0);
}

DeviceBoard::~DeviceBoard() {
  for (const Seat& seat : seats_) {
    cudaEventDestroy(seat.ready);
    cudaEventDestroy(seat.done);
    cudaStreamDestroy(seat.stream);
  }
}

moec_comm_callbacks DeviceBoard::callbacks(int rank, bool counts) {
  auto callbacks = sized<moec_comm_callbacks>();
  callbacks.flags = MOEC_COMM_DEVICE | MOEC_COMM_CAPTURE;
  callbacks.user = &seats_[static_cast<size_t>(rank)];
  callbacks.all_gather = all_gather;
  callbacks.all_to_all = all_to_all;
  if (counts) callbacks.all_to_all_v = all_to_all_v;
  return callbacks;
}

std::vector<std::string> DeviceBoard::in_turns(const std::function<void(int)>& body) {
  return run_ranks(size(), [&](int rank) {
    Seat& seat = seats_[static_cast<size_t>(rank)];
    enter(rank);
    seat.turn = std::unique_lock(turns_);
    try {
      body(rank);
    } catch (...) {
      seat.turn = {};
      throw;
    }
    seat.turn = {};
  });
}

bool DeviceBoard::meet_others(Seat& seat) {
  if (!seat.turn.owns_lock()) return meet();
  seat.turn.unlock();
  const bool met = meet();
  seat.turn.lock();
  return met;
}

int32_t DeviceBoard::all_to_all_v(void* user, const void* send, const uint64_t* send_bytes,
                                  const uint64_t* send_at, void* recv, const uint64_t* recv_bytes,
                                  const uint64_t* recv_at, uint64_t, moec_stream moec_stream) {
  Seat& seat = *static_cast<Seat*>(user);
  DeviceBoard& board = *seat.board;
  const auto stream = static_cast<cudaStream_t>(moec_stream);
  cudaError_t worst = cudaEventRecord(seat.ready, stream);
  const auto note = [&](cudaError_t result) {
    if (worst == cudaSuccess) worst = result;
  };
  seat.send = static_cast<const char*>(send);
  seat.bytes = send_bytes;
  seat.at = send_at;
  if (!board.meet_others(seat)) return MOEC_E_TIMEOUT;
  const auto own = static_cast<size_t>(seat.rank);
  for (const Seat& from : board.seats_) {
    const auto r = static_cast<size_t>(from.rank);
    if (from.bytes && recv_bytes[r] != from.bytes[own]) note(cudaErrorInvalidValue);
    note(cudaStreamWaitEvent(stream, from.ready, 0));
    if (recv_bytes[r] && worst == cudaSuccess)
      note(cudaMemcpyAsync(static_cast<char*>(recv) + recv_at[r], from.send + from.at[own],
                           recv_bytes[r], cudaMemcpyDefault, stream));
  }
  note(cudaEventRecord(seat.done, stream));
  if (!board.meet_others(seat)) return MOEC_E_TIMEOUT;
  for (const Seat& reader : board.seats_) note(cudaStreamWaitEvent(stream, reader.done, 0));
  return worst;
}

int32_t DeviceBoard::all_gather(void* user, const void* send, void* recv, uint64_t bytes,
                                moec_stream stream) {
  return exchange(user, send, 0, recv, bytes, stream);
}

int32_t DeviceBoard::all_to_all(void* user, const void* send, void* recv, uint64_t bytes,
                                moec_stream stream) {
  return exchange(user, send, bytes, recv, bytes, stream);
}

// What ranks that disagree want is there: memory of an ep is of its largest call.
int32_t DeviceBoard::exchange(void* user, const void* send, uint64_t step, void* recv,
                              uint64_t bytes, moec_stream stream) {
  const auto ranks = static_cast<size_t>(static_cast<Seat*>(user)->board->size());
  std::vector<uint64_t> sizes(ranks, bytes), from(ranks), to(ranks);
  for (size_t r = 0; r < ranks; ++r) from[r] = r * step, to[r] = r * bytes;
  return all_to_all_v(user, send, nullptr, from.data(), recv, sizes.data(), to.data(), 1, stream);
}

namespace {

// What a thread has said between ncclGroupStart and ncclGroupEnd: sends to ranks, and receives from
// them, in their order and at most one of each. A rank that is left out has no bytes.
struct Group {
  struct Parts {
    std::vector<uint64_t> bytes, at;  // addresses
  };
  bool is_open = false;
  Parts sent, received;
  void *seat = nullptr, *stream = nullptr;

  bool add(Parts* parts, int peer, const void* at, size_t count, int type, void* comm, void* on) {
    const auto ranks = static_cast<size_t>(peer) + 1;
    const bool well = is_open && type == 1 && count > 0 && parts->bytes.size() < ranks &&
                      (!seat || (seat == comm && stream == on));
    seat = comm;
    stream = on;
    grow(parts, ranks);
    parts->bytes.back() = count;
    parts->at.back() = reinterpret_cast<uint64_t>(at);
    return well;
  }
  static void grow(Parts* parts, size_t ranks) {
    parts->bytes.resize(ranks);
    parts->at.resize(ranks);
  }
};
thread_local Group group;
thread_local std::pair<void*, void*> last;  // seat and stream of the last one

}  // namespace

Comm NcclBoard::make_comm(const moec_context* context, int rank, bool) {
  constexpr int kInvalidUsage = 5;
  moec_nccl_api api = {};
  api.count = [](const void* comm, int* ranks) {
    *ranks = static_cast<const Seat*>(comm)->board->size();
    return 0;
  };
  api.user_rank = [](const void* comm, int* own) {
    *own = static_cast<const Seat*>(comm)->rank;
    return 0;
  };
  api.cu_device = [](const void*, int* device) { return static_cast<int>(cudaGetDevice(device)); };
  api.all_gather = [](const void* send, void* recv, size_t count, int type, void* comm,
                      void* on) -> int {
    if (group.is_open || type != 1) return kInvalidUsage;
    return all_gather(comm, send, recv, count, on);
  };
  api.send = [](const void* send, size_t count, int type, int peer, void* comm, void* on) {
    return group.add(&group.sent, peer, send, count, type, comm, on) ? 0 : kInvalidUsage;
  };
  api.recv = [](void* recv, size_t count, int type, int peer, void* comm, void* on) {
    return group.add(&group.received, peer, recv, count, type, comm, on) ? 0 : kInvalidUsage;
  };
  api.group_start = [] {
    group = {};
    group.is_open = true;
    return 0;
  };
  api.group_end = []() -> int {
    Group all = std::exchange(group, {});
    if (!all.is_open) return kInvalidUsage;
    if (all.seat)
      last = {all.seat, all.stream};
    else
      std::tie(all.seat, all.stream) = last;  // NCCL lets go who has nothing; others wait here
    if (!all.seat) return kInvalidUsage;
    const auto ranks = static_cast<size_t>(static_cast<Seat*>(all.seat)->board->size());
    Group::grow(&all.sent, ranks);
    Group::grow(&all.received, ranks);
    return all_to_all_v(all.seat, nullptr, all.sent.bytes.data(), all.sent.at.data(), nullptr,
                        all.received.bytes.data(), all.received.at.data(), 1, all.stream);
  };
  api.get_async_error = [](void*, int* error) {
    *error = 7;  // in progress
    return 0;
  };
  moec_comm* comm = nullptr;
  check(moec_comm_from_nccl(context, seat_of(rank), &api, &comm));
  return Comm(comm);
}

}  // namespace moec::test
