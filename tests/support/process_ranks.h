// SPDX-License-Identifier: Apache-2.0
// Ranks that are processes: forked from one that has touched no device, with a communicator whose
// callbacks copy memory of the host through memory that all have.
#pragma once

#include <gtest/gtest.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <functional>
#include <vector>

#include "handles.h"

namespace moec::test {

struct ProcessBoard {
  static constexpr int kMostRanks = 8;
  static constexpr size_t kMostBytes = 1 << 16;
  struct Seat {
    ProcessBoard* board;
    int rank;
    Comm make_comm(const moec_context* context);
    bool meet() const { return board->meet(); }
  };

  // False: not all came within half a minute.
  bool meet() {
    const int before = round;
    if (++arrived == ranks) {
      arrived = 0;
      ++round;
      return true;
    }
    const auto begin = std::chrono::steady_clock::now();
    while (round == before) {
      if (std::chrono::steady_clock::now() - begin > std::chrono::seconds(30)) return false;
      sched_yield();
    }
    return true;
  }
  int32_t exchange(int rank, const void* send, void* recv, uint64_t bytes, bool to_all) {
    const auto own = static_cast<size_t>(rank);
    const uint64_t all = to_all ? bytes : static_cast<uint64_t>(ranks) * bytes;
    if (all > kMostBytes) return -1;
    std::memcpy(sent[own], send, all);
    if (!meet()) return MOEC_E_TIMEOUT;
    for (size_t r = 0; r < static_cast<size_t>(ranks); ++r)
      std::memcpy(static_cast<char*>(recv) + r * bytes, sent[r] + (to_all ? 0 : own * bytes),
                  bytes);
    return meet() ? 0 : MOEC_E_TIMEOUT;
  }

  int ranks = 0;
  std::atomic<int> arrived{0}, round{0};
  unsigned char sent[kMostRanks][kMostBytes];
};

inline Comm ProcessBoard::Seat::make_comm(const moec_context* context) {
  auto desc = sized<moec_comm_desc>();
  desc.rank = rank;
  desc.size = board->ranks;
  auto callbacks = sized<moec_comm_callbacks>();
  callbacks.user = this;
  callbacks.all_gather = [](void* user, const void* send, void* recv, uint64_t bytes, moec_stream) {
    const Seat& seat = *static_cast<Seat*>(user);
    return seat.board->exchange(seat.rank, send, recv, bytes, true);
  };
  callbacks.all_to_all = [](void* user, const void* send, void* recv, uint64_t bytes, moec_stream) {
    const Seat& seat = *static_cast<Seat*>(user);
    return seat.board->exchange(seat.rank, send, recv, bytes, false);
  };
  return make<Comm>(moec_comm_create, context, &desc, &callbacks);
}

// body(seat) in a process for each rank, which ends with 0, with 1 where something failed in it, or
// after 100 s; what each ended with, 128 + signal if it died of one.
inline std::vector<int> run_processes(int ranks,
                                      const std::function<void(ProcessBoard::Seat&)>& body) {
  void* const memory = mmap(nullptr, sizeof(ProcessBoard), PROT_READ | PROT_WRITE,
                            MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) throw std::runtime_error("no memory for all processes");
  auto* const board = new (memory) ProcessBoard;
  board->ranks = ranks;
  std::vector<pid_t> pids;
  std::fflush(nullptr);
  for (int r = 0; r < ranks; ++r) {
    const pid_t pid = fork();
    if (pid != 0) {
      pids.push_back(pid);
      continue;
    }
    alarm(100);
    int result = 1;
    try {
      ProcessBoard::Seat seat = {board, r};
      body(seat);
      result = testing::Test::HasFailure();
    } catch (const std::exception& error) {
      std::printf("rank %d: %s\n", r, error.what());
    }
    std::fflush(nullptr);
    _exit(result);
  }
  std::vector<int> results;
  for (const pid_t pid : pids) {
    int status = 0;
    waitpid(pid, &status, 0);
    results.push_back(WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status));
  }
  munmap(memory, sizeof(ProcessBoard));
  return results;
}

}  // namespace moec::test
