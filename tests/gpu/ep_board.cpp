// SPDX-License-Identifier: Apache-2.0
#include "gpu/ep_board.h"

#include <moec/nccl.h>

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

moec_comm_callbacks DeviceBoard::callbacks(int rank, bool) {
  auto callbacks = sized<moec_comm_callbacks>();
  callbacks.flags = MOEC_COMM_DEVICE | MOEC_COMM_CAPTURE;
  callbacks.user = &seats_[static_cast<size_t>(rank)];
  callbacks.all_gather = all_gather;
  callbacks.all_to_all = all_to_all;
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

int32_t DeviceBoard::exchange(Seat& seat, const void* send, void* recv, uint64_t bytes, uint64_t at,
                              moec_stream moec_stream) {
  const auto stream = static_cast<cudaStream_t>(moec_stream);
  cudaError_t worst = cudaEventRecord(seat.ready, stream);
  const auto note = [&](cudaError_t result) {
    if (worst == cudaSuccess) worst = result;
  };
  seat.send = static_cast<const char*>(send);
  if (!meet_others(seat)) return MOEC_E_TIMEOUT;
  for (const Seat& from : seats_) {
    note(cudaStreamWaitEvent(stream, from.ready, 0));
    note(cudaMemcpyAsync(static_cast<char*>(recv) + static_cast<uint64_t>(from.rank) * bytes,
                         from.send + at, bytes, cudaMemcpyDefault, stream));
  }
  note(cudaEventRecord(seat.done, stream));
  if (!meet_others(seat)) return MOEC_E_TIMEOUT;
  for (const Seat& reader : seats_) note(cudaStreamWaitEvent(stream, reader.done, 0));
  return worst;
}

int32_t DeviceBoard::all_gather(void* user, const void* send, void* recv, uint64_t bytes,
                                moec_stream stream) {
  Seat& seat = *static_cast<Seat*>(user);
  return seat.board->exchange(seat, send, recv, bytes, 0, stream);
}

int32_t DeviceBoard::all_to_all(void* user, const void* send, void* recv, uint64_t bytes,
                                moec_stream stream) {
  Seat& seat = *static_cast<Seat*>(user);
  return seat.board->exchange(seat, send, recv, bytes, static_cast<uint64_t>(seat.rank) * bytes,
                              stream);
}

namespace {

// What a thread has said between ncclGroupStart and ncclGroupEnd: as many sends as receives, to and
// from all ranks in their order, of parts that follow each other.
struct Group {
  bool is_open = false;
  int sent = 0, received = 0;
  const void* send = nullptr;
  void *recv = nullptr, *seat = nullptr, *stream = nullptr;
  size_t bytes = 0;

  bool add(int peer, int* next, size_t count, int type, const void* base, const void* at,
           void* comm, void* on) {
    const auto place = static_cast<const char*>(base) + static_cast<size_t>(peer) * count;
    const bool well = is_open && type == 1 && peer == (*next)++ && at == place &&
                      (!seat || (seat == comm && stream == on && bytes == count));
    seat = comm;
    stream = on;
    bytes = count;
    return well;
  }
};
thread_local Group group;

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
    if (peer == 0) group.send = send;
    return group.add(peer, &group.sent, count, type, group.send, send, comm, on) ? 0
                                                                                 : kInvalidUsage;
  };
  api.recv = [](void* recv, size_t count, int type, int peer, void* comm, void* on) {
    if (peer == 0) group.recv = recv;
    return group.add(peer, &group.received, count, type, group.recv, recv, comm, on)
               ? 0
               : kInvalidUsage;
  };
  api.group_start = [] {
    group = {};
    group.is_open = true;
    return 0;
  };
  api.group_end = []() -> int {
    const Group all = std::exchange(group, {});
    if (!all.is_open || !all.seat) return kInvalidUsage;
    const int ranks = static_cast<Seat*>(all.seat)->board->size();
    if (all.sent != ranks || all.received != ranks) return kInvalidUsage;
    return all_to_all(all.seat, all.send, all.recv, all.bytes, all.stream);
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
