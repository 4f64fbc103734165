// SPDX-License-Identifier: Apache-2.0
// Peers that are processes: CUDA IPC over a comm whose callbacks take memory of the host, on one
// GPU or one each. They give what plain words say, in any order of freeing; who is killed is a
// timeout to the other, whose context still works. This process never touches CUDA.
#include <gtest/gtest.h>
#include <sched.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <functional>

#include "support/device.h"
#include "support/handles.h"
#include "support/tensors.h"

namespace moec::test {
namespace {

constexpr int kRanks = 2, kNoGpu = 77;
constexpr int64_t kHidden = 64, kTokens = 24, kTopK = 2;
constexpr int32_t kExperts = 4;

// Memory that both processes have, with a barrier that has a deadline.
struct Board {
  std::atomic<int> arrived, round;
  unsigned char sent[kRanks][1 << 16];

  bool meet() {
    const int before = round;
    if (++arrived == kRanks) {
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
};

struct Seat {
  Board* board;
  int rank;
};

int32_t exchange(void* user, const void* send, void* recv, uint64_t bytes, bool to_all) {
  const Seat& seat = *static_cast<Seat*>(user);
  Board& board = *seat.board;
  const uint64_t all = to_all ? bytes : kRanks * bytes;
  if (all > sizeof board.sent[0]) return -1;
  std::memcpy(board.sent[seat.rank], send, all);
  if (!board.meet()) return MOEC_E_TIMEOUT;
  for (uint64_t r = 0; r < kRanks; ++r)
    std::memcpy(static_cast<char*>(recv) + r * bytes,
                board.sent[r] + (to_all ? 0 : uint64_t(seat.rank) * bytes), bytes);
  return board.meet() ? 0 : MOEC_E_TIMEOUT;
}

class Process {
 public:
  Process(Board& board, int rank) : seat_{&board, rank} {
    use_gpu(rank % num_gpus());
    const TestDevice device = test_device();
    auto context_desc = sized<moec_context_desc>();
    context_desc.device_type = device.type;
    context_desc.device_id = device.id;
    context = make<Context>(moec_context_create, &context_desc);
    auto desc = sized<moec_comm_desc>();
    desc.rank = rank;
    desc.size = kRanks;
    auto callbacks = sized<moec_comm_callbacks>();
    callbacks.user = &seat_;
    callbacks.all_gather = [](void* user, const void* send, void* recv, uint64_t bytes,
                              moec_stream) { return exchange(user, send, recv, bytes, true); };
    callbacks.all_to_all = [](void* user, const void* send, void* recv, uint64_t bytes,
                              moec_stream) { return exchange(user, send, recv, bytes, false); };
    comm = make<Comm>(moec_comm_create, context.get(), &desc, &callbacks);
  }
  Ep make_ep(uint32_t timeout_ms) {
    auto desc = sized<moec_ep_desc>();
    desc.hidden = kHidden;
    desc.max_tokens = kTokens;
    desc.num_experts = kExperts;
    desc.top_k = kTopK;
    desc.dtype = MOEC_F32;
    desc.timeout_ms = timeout_ms;
    if (rounds_++ == 0) {  // AUTO leaves a GPU that ranks share alone
      const Ep any = make<Ep>(moec_ep_create, comm.get(), &desc);
      char text[1024];
      uint64_t need = 0;
      check(moec_ep_describe(any.get(), text, sizeof text, &need));
      const char* const part = num_gpus() >= kRanks ? "\"scheme\": \"peer\"" : "share a GPU";
      EXPECT_NE(std::string(text).find(part), std::string::npos) << text;
    }
    desc.scheme = MOEC_EP_PEER;
    return make<Ep>(moec_ep_create, comm.get(), &desc);
  }
  // Partial rows are the guests plus the rank's number: y = sum of x + rank over the ranks of ids.
  void trip(const Ep& ep, int call) {
    Tensors m;
    std::vector<double> x, ids;
    for (int64_t t = 0; t < kTokens; ++t) {
      for (int64_t h = 0; h < kHidden; ++h)
        x.push_back(double(1000 * call + 100 * seat_.rank + 3 * t + h % 7));
      ids.push_back(double((t + call) % kExperts));
      ids.push_back(t % 3 == 0 ? -1 : double((t * 3 + call) % kExperts));
    }
    auto args = sized<moec_ep_args>();
    args.x = m.input(x, MOEC_F32, {kTokens, kHidden});
    args.expert_ids = m.input(ids, MOEC_I32, {kTokens, kTopK});
    args.y = m.output(MOEC_F32, {kTokens, kHidden});
    check(moec_ep_dispatch(ep.get(), &args, nullptr));
    check(moec_context_sync(context.get(), nullptr));
    const DeviceCopy rows(args.guests);
    std::vector<float> partial = rows.values;
    for (float& v : partial) v += float(seat_.rank);
    rows.write(args.partial, partial);
    const moec_status combined = moec_ep_combine(ep.get(), &args, nullptr);
    if (is_broken) {
      EXPECT_EQ(combined, MOEC_E_TIMEOUT);
      return;
    }
    check(combined);
    check(moec_context_sync(context.get(), nullptr));
    const std::vector<double> y = m.read(args.y);
    for (int64_t t = 0; t < kTokens; ++t)
      for (int64_t h = 0; h < kHidden; ++h) {
        double want = 0;
        for (int rank = 0; rank < kRanks; ++rank)
          if (owner(ids[size_t(2 * t)]) == rank || owner(ids[size_t(2 * t + 1)]) == rank)
            want += x[size_t(t * kHidden + h)] + rank;
        ASSERT_EQ(y[size_t(t * kHidden + h)], want) << "token " << t << " of rank " << seat_.rank;
      }
  }
  moec_status poll(const Ep& ep) const {
    auto state = sized<moec_ep_state>();
    check(moec_ep_poll(ep.get(), &state));
    return state.status;
  }
  bool meet() const { return seat_.board->meet(); }

  Context context;
  Comm comm;
  bool is_broken = false;

 private:
  struct DeviceCopy {  // of a view
    explicit DeviceCopy(const moec_tensor& view) : values(size_t(moec_tensor_numel(&view))) {
      DeviceBuffer::copy_out(values.data(), view.data, values.size() * sizeof(float));
    }
    void write(const moec_tensor& to, const std::vector<float>& from) const {
      DeviceBuffer::copy_in(to.data, from.data(), from.size() * sizeof(float));
    }
    std::vector<float> values;
  };
  static int owner(double id) { return id < 0 ? -1 : int(id) / (kExperts / kRanks); }

  Seat seat_;
  int rounds_ = 0;
};

// body in a process for each rank; what each ended with.
std::vector<int> in_processes(const std::function<void(Process&, int)>& body) {
  auto* const board =
      new (mmap(nullptr, sizeof(Board), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0))
          Board{};
  std::vector<pid_t> pids;
  std::fflush(nullptr);
  for (int r = 0; r < kRanks; ++r) {
    const pid_t pid = fork();
    if (pid != 0) {
      pids.push_back(pid);
      continue;
    }
    alarm(100);
    setenv("MOEC_TEST_DEVICE", "cuda", 1);
    int result = 1;
    try {
      if (num_gpus() == 0) _exit(kNoGpu);
    } catch (const std::exception&) {
      _exit(kNoGpu);
    }
    try {
      Process process(*board, r);
      body(process, r);
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
  munmap(board, sizeof(Board));
  return results;
}

TEST(EpProcesses, ReachEachOthersMemory) {
  const std::vector<int> ends = in_processes([](Process& process, int rank) {
    for (int round = 0; round < 3; ++round) {
      const Ep ep = process.make_ep(20000);
      const Ep second = process.make_ep(20000);
      for (int call = 0; call < 20; ++call) process.trip(call % 3 == 2 ? second : ep, call);
      if (rank == round % 2) usleep(200000);  // the other has freed its memory before
    }
  });
  if (ends[0] == kNoGpu) std::exit(kNoGpu);
  EXPECT_EQ(ends, std::vector<int>(kRanks, 0));
}

TEST(EpProcesses, WhoIsKilledIsATimeoutToTheOther) {
  const std::vector<int> ends = in_processes([](Process& process, int rank) {
    const Ep ep = process.make_ep(500);
    process.trip(ep, 1);
    ASSERT_TRUE(process.meet());
    if (rank == 1) kill(getpid(), SIGKILL);
    process.is_broken = true;
    process.trip(ep, 2);
    EXPECT_EQ(process.poll(ep), MOEC_E_TIMEOUT);
    EXPECT_EQ(moec_context_sync(process.context.get(), nullptr), MOEC_OK);
    Tensors m;  // the context still works
    EXPECT_EQ(m.read(m.input({1, 2, 3}, MOEC_F32, {3})), (std::vector<double>{1, 2, 3}));
  });
  if (ends[0] == kNoGpu) std::exit(kNoGpu);
  EXPECT_EQ(ends, (std::vector<int>{0, 128 + SIGKILL}));
}

}  // namespace
}  // namespace moec::test
