// SPDX-License-Identifier: Apache-2.0
// Peers that are processes: CUDA IPC over a comm whose callbacks take memory of the host, two on
// one GPU or one for each GPU. They give what plain words say, in any order of freeing; who is
// killed is a timeout to the others, whose contexts still work. This process never touches CUDA.
#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <functional>

#include "support/device.h"
#include "support/process_ranks.h"
#include "support/tensors.h"

namespace moec::test {
namespace {

constexpr int kNoGpu = 77;
constexpr int64_t kHidden = 64, kTokens = 24, kTopK = 2;
constexpr int32_t kOfRank = 2;  // experts

class Process {
 public:
  explicit Process(const ProcessBoard::Seat& seat) : seat_(seat) {
    use_gpu(seat_.rank % num_gpus());
    const TestDevice device = test_device();
    auto context_desc = sized<moec_context_desc>();
    context_desc.device_type = device.type;
    context_desc.device_id = device.id;
    context = make<Context>(moec_context_create, &context_desc);
    comm = seat_.make_comm(context.get());
  }
  Ep make_ep(uint32_t timeout_ms) {
    auto desc = sized<moec_ep_desc>();
    desc.hidden = kHidden;
    desc.max_tokens = kTokens;
    desc.num_experts = num_experts();
    desc.top_k = kTopK;
    desc.dtype = MOEC_F32;
    desc.timeout_ms = timeout_ms;
    if (rounds_++ == 0) {  // AUTO leaves a GPU that ranks share alone
      const Ep any = make<Ep>(moec_ep_create, comm.get(), &desc);
      char text[1024];
      uint64_t need = 0;
      check(moec_ep_describe(any.get(), text, sizeof text, &need));
      const char* const part = num_gpus() >= ranks() ? "\"scheme\": \"peer\"" : "share a GPU";
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
      ids.push_back(double((t + call) % num_experts()));
      ids.push_back(t % 3 == 0 ? -1 : double((t * 3 + call) % num_experts()));
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
        for (int rank = 0; rank < ranks(); ++rank)
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
  int ranks() const { return seat_.board->ranks; }
  int32_t num_experts() const { return kOfRank * ranks(); }

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
  static int owner(double id) { return id < 0 ? -1 : int(id) / kOfRank; }

  ProcessBoard::Seat seat_;
  int rounds_ = 0;
};

// Processes of the largest run, two at least. Ends the program where there is no GPU.
int num_ranks() {
  static const int most = run_processes(1, [](const ProcessBoard::Seat&) {
    setenv("MOEC_TEST_DEVICE", "cuda", 1);
    try {
      _exit(num_gpus() ? most_ranks() : 0);
    } catch (const std::exception&) {
      _exit(0);
    }
  })[0];
  if (most == 0) std::exit(kNoGpu);
  return std::clamp(most, 2, ProcessBoard::kMostRanks);
}

// body in a process for each rank; what each ended with.
std::vector<int> in_processes(const std::function<void(Process&, int)>& body) {
  return run_processes(num_ranks(), [&](const ProcessBoard::Seat& seat) {
    setenv("MOEC_TEST_DEVICE", "cuda", 1);
    Process process(seat);
    body(process, seat.rank);
  });
}

TEST(EpProcesses, ReachEachOthersMemory) {
  const std::vector<int> ends = in_processes([](Process& process, int rank) {
    for (int round = 0; round < 3; ++round) {
      const Ep ep = process.make_ep(20000);
      const Ep second = process.make_ep(20000);
      for (int call = 0; call < 20; ++call) process.trip(call % 3 == 2 ? second : ep, call);
      if (rank == round % 2) usleep(200000);  // others have freed their memory before
    }
  });
  EXPECT_EQ(ends, std::vector<int>(size_t(num_ranks()), 0));
}

TEST(EpProcesses, WhoIsKilledIsATimeoutToTheOthers) {
  const std::vector<int> ends = in_processes([](Process& process, int rank) {
    const Ep ep = process.make_ep(3000);
    process.trip(ep, 1);
    ASSERT_TRUE(process.meet());
    if (rank == process.ranks() - 1) kill(getpid(), SIGKILL);
    process.is_broken = true;
    process.trip(ep, 2);
    EXPECT_EQ(process.poll(ep), MOEC_E_TIMEOUT);
    EXPECT_EQ(moec_context_sync(process.context.get(), nullptr), MOEC_OK);
    Tensors m;  // the context still works
    EXPECT_EQ(m.read(m.input({1, 2, 3}, MOEC_F32, {3})), (std::vector<double>{1, 2, 3}));
  });
  std::vector<int> want(size_t(num_ranks()), 0);
  want.back() = 128 + SIGKILL;
  EXPECT_EQ(ends, want);
}

}  // namespace
}  // namespace moec::test
