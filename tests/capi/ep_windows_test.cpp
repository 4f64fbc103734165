// SPDX-License-Identifier: Apache-2.0
// Peers that are processes on the CPU, and reach each other by windows alone: those of moec/nccl.h
// over functions as NCCL 2.29 has them, whose memory all processes share. It was seen to catch a
// window that was freed before it was deregistered, and one that stayed where another rank failed.
#include <moec/nccl.h>

#include <functional>

#include "ep_ranks.h"
#include "support/process_ranks.h"

namespace moec::test {
namespace {

constexpr int kRanks = 3;
constexpr size_t kMostOfRank = 1 << 16;

// What NCCL is on this rank, and what it was asked to do.
struct FakeNccl {
  ProcessBoard::Seat* seat = nullptr;
  char* memory = nullptr;  // [N][kMostOfRank], at one address in all processes
  int alloc_result = 0, register_result = 0;
  bool blocks = true, has_symmetric_memory = true;
  int unreached = -1;
  std::string calls;
  void** opens = nullptr;  // a window that get_async_error completes

  char* of(int rank) const { return memory + static_cast<size_t>(rank) * kMostOfRank; }
};
FakeNccl nccl;  // of this process

moec_nccl_api fake_api() {
  moec_nccl_api api = {};
  api.user_rank = [](const void*, int* rank) {
    *rank = nccl.seat->rank;
    return 0;
  };
  api.all_gather = [](const void* send, void* recv, size_t bytes, int, void*, void*) -> int {
    return nccl.seat->board->exchange(nccl.seat->rank, send, recv, bytes, true);
  };
  api.get_async_error = [](void*, int* error) {
    *error = nccl.register_result;
    if (nccl.opens) *nccl.opens = nccl.of(nccl.seat->rank);
    return 0;
  };
  api.abort = [](void*) {
    nccl.calls += "abort ";
    return 0;
  };
  api.mem_alloc = [](void** memory, size_t bytes) {
    nccl.calls += "alloc ";
    EXPECT_LE(bytes, kMostOfRank);
    *memory = nccl.of(nccl.seat->rank);
    return nccl.alloc_result;
  };
  api.mem_free = [](void* memory) {
    nccl.calls += "free ";
    EXPECT_EQ(memory, nccl.of(nccl.seat->rank));
    return 0;
  };
  api.window_register = [](void* comm, void* memory, size_t, void** window, int) -> int {
    nccl.calls += "register ";
    EXPECT_EQ(comm, nccl.seat);
    EXPECT_EQ(memory, nccl.of(nccl.seat->rank));
    if (!nccl.seat->meet()) return 1;
    if (nccl.register_result || !nccl.has_symmetric_memory) return nccl.register_result;
    if (nccl.blocks)
      *window = memory;
    else
      nccl.opens = window;
    return nccl.blocks ? 0 : MOEC_NCCL_IN_PROGRESS;
  };
  api.window_deregister = [](void* comm, void* window) {
    nccl.calls += "deregister ";
    EXPECT_EQ(comm, nccl.seat);
    EXPECT_EQ(window, nccl.of(nccl.seat->rank));
    return 0;
  };
  api.peer_pointer = [](void* window, size_t offset, int peer, void** pointer) {
    EXPECT_EQ(window, nccl.of(nccl.seat->rank));
    *pointer = peer == nccl.unreached ? nullptr : nccl.of(peer) + offset;
    return 0;
  };
  return api;
}

struct Peer {
  Peer() {
    held.api = fake_api();
    auto context_desc = sized<moec_context_desc>();
    context_desc.num_threads = 1;
    context = make<Context>(moec_context_create, &context_desc);
  }
  // Its callbacks take memory of the host, and wait.
  void make_comm() {
    held.comm = nccl.seat;
    held.size = nccl.seat->board->ranks;
    moec_comm_callbacks callbacks;
    moec_nccl_fill(&held, &callbacks);
    callbacks.flags = 0;
    callbacks.all_to_all = [](void*, const void* send, void* recv, uint64_t bytes, moec_stream) {
      return nccl.seat->board->exchange(nccl.seat->rank, send, recv, bytes, false);
    };
    callbacks.all_to_all_v = nullptr;
    callbacks.poll = nullptr;
    callbacks.release = nullptr;
    auto desc = sized<moec_comm_desc>();
    desc.rank = nccl.seat->rank;
    desc.size = held.size;
    comm = make<Comm>(moec_comm_create, context.get(), &desc, &callbacks);
  }
  moec_status make_ep() {
    moec_ep_desc desc = ep_desc();
    desc.scheme = MOEC_EP_PEER;
    moec_ep* made = nullptr;
    const moec_status status = moec_ep_create(comm.get(), &desc, &made);
    ep = Ep(made);
    return status;
  }
  void expect_works() {
    Tokens tokens;
    for (int call = 0; call < 20; ++call) {
      check(moec_ep_dispatch(ep.get(), &tokens.args, nullptr));
      for (int64_t i = 0; i < moec_tensor_numel(&tokens.args.partial); ++i)
        static_cast<float*>(tokens.args.partial.data)[i] = static_cast<float>(1 + call);
      check(moec_ep_combine(ep.get(), &tokens.args, nullptr));
      EXPECT_EQ(tokens.y[0], 2.0f * static_cast<float>(1 + call));  // ids 0 and 5 are of two ranks
    }
  }
  moec_nccl held = {};
  Context context;
  Comm comm;
  Ep ep;
};

// body(peer) in a process for each rank.
void on_ranks(const std::function<void(Peer&)>& body) {
  void* const memory = mmap(nullptr, kRanks * kMostOfRank, PROT_READ | PROT_WRITE,
                            MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  ASSERT_NE(memory, MAP_FAILED);
  const std::vector<int> ends = run_processes(kRanks, [&](ProcessBoard::Seat& seat) {
    nccl = {};
    nccl.seat = &seat;
    nccl.memory = static_cast<char*>(memory);
    Peer peer;
    body(peer);
  });
  EXPECT_EQ(ends, std::vector<int>(kRanks, 0));
  munmap(memory, kRanks * kMostOfRank);
}

// PEER cannot be had, and every rank says why; what windows took is given back, and the comm is
// well.
void expect_refused(Peer& peer, const std::string& why, const std::string& calls) {
  peer.make_comm();
  EXPECT_EQ(peer.make_ep(), MOEC_E_UNSUPPORTED);
  EXPECT_NE(last_error().find("does not reach the memory of rank"), std::string::npos)
      << last_error();
  EXPECT_NE(last_error().find("windows: " + why), std::string::npos) << last_error();
  EXPECT_EQ(nccl.calls, calls);
  moec_ep_desc desc = ep_desc();
  desc.scheme = MOEC_EP_GATHER;
  moec_ep* other = nullptr;
  EXPECT_EQ(moec_ep_create(peer.comm.get(), &desc, &other), MOEC_OK) << last_error();
  moec_ep_free(other);
}

TEST(EpWindows, AreTakenWhereMemoryIsNotReachedOtherwise) {
  on_ranks([](Peer& peer) {
    nccl.blocks = nccl.seat->rank != 1;
    peer.make_comm();
    for (int round = 0; round < 2; ++round) {
      nccl.calls.clear();
      ASSERT_EQ(peer.make_ep(), MOEC_OK) << last_error();
      char text[1024];
      uint64_t need = 0;
      check(moec_ep_describe(peer.ep.get(), text, sizeof text, &need));
      EXPECT_NE(std::string(text).find("by windows of the comm, because rank 0 does not reach the "
                                       "memory of rank 1: "),
                std::string::npos)
          << text;
      peer.expect_works();
      EXPECT_EQ(nccl.calls, "alloc register ");
      peer.ep.reset();
      EXPECT_EQ(nccl.calls, "alloc register deregister free ");
      EXPECT_TRUE(nccl.seat->meet());
    }
  });
}

TEST(EpWindows, OneRankHasAnOlderNccl) {
  on_ranks([](Peer& peer) {
    if (nccl.seat->rank == 1) peer.held.api.peer_pointer = nullptr;
    expect_refused(peer, "the comm of rank 1 has none", "");
  });
}

TEST(EpWindows, OneRankHasNoMemory) {
  on_ranks([](Peer& peer) {
    const bool fails = nccl.seat->rank == 2;
    nccl.alloc_result = fails ? 1 : 0;
    expect_refused(peer, "rank 2 has no window of", fails ? "alloc " : "alloc free ");
  });
}

TEST(EpWindows, OneRankIsNotRegistered) {
  on_ranks([](Peer& peer) {
    const bool fails = nccl.seat->rank == 0;
    nccl.register_result = fails ? 3 : 0;
    expect_refused(peer, "rank 0 opens no window: the callback window_open returned 3",
                   fails ? "alloc register free " : "alloc register deregister free ");
  });
}

TEST(EpWindows, GpusHaveNoSymmetricMemory) {
  on_ranks([](Peer& peer) {
    nccl.has_symmetric_memory = false;
    expect_refused(peer, "rank 0 opens no window: the callback window_open returned -1",
                   "alloc register free ");
  });
}

TEST(EpWindows, ARankIsOfAnotherDomain) {
  on_ranks([](Peer& peer) {
    nccl.unreached = nccl.seat->rank == 1 ? 2 : -1;
    expect_refused(peer, "rank 1 does not reach that of rank 2", "alloc register deregister free ");
  });
}

// ncclCommAbort has ended the communicator and its windows.
TEST(EpWindows, AnAbortedCommHasNoneToDeregister) {
  on_ranks([](Peer& peer) {
    peer.make_comm();
    ASSERT_EQ(peer.make_ep(), MOEC_OK) << last_error();
    peer.expect_works();
    EXPECT_TRUE(nccl.seat->meet());
    check(moec_comm_abort(peer.comm.get()));
    peer.ep.reset();
    EXPECT_EQ(nccl.calls, "alloc register abort free ");
  });
}

}  // namespace
}  // namespace moec::test
