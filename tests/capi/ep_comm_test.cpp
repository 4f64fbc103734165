// SPDX-License-Identifier: Apache-2.0
// Communicators: what is refused, sums in rank order; and ROWS with too few rows. It was seen to
// catch sums from the last rank on, and cuts by weight that kept the lightest.
#include <moec/nccl.h>

#include <cstring>
#include <thread>

#include "ep_ranks.h"

namespace moec::test {
namespace {

// ---- comm
TEST(Comm, RefusesWhatItCannotBe) {
  RankBoard board(2);
  auto context_desc = sized<moec_context_desc>();
  const Context context = make<Context>(moec_context_create, &context_desc);
  const auto create = [&](int rank, int size, const std::function<void(moec_comm_callbacks&)>& f) {
    auto desc = sized<moec_comm_desc>();
    desc.rank = rank;
    desc.size = size;
    moec_comm_callbacks callbacks = board.callbacks(0);
    f(callbacks);
    moec_comm* comm = nullptr;
    const moec_status status = moec_comm_create(context.get(), &desc, &callbacks, &comm);
    EXPECT_EQ(comm, nullptr);
    return status;
  };
  const auto nothing = [](moec_comm_callbacks&) {};
  EXPECT_EQ(create(2, 2, nothing), MOEC_E_INVALID_ARG);
  EXPECT_EQ(create(-1, 2, nothing), MOEC_E_INVALID_ARG);
  EXPECT_EQ(create(0, 0, nothing), MOEC_E_INVALID_ARG);
  EXPECT_EQ(create(0, 2, [](auto& c) { c.all_gather = nullptr; }), MOEC_E_INVALID_ARG);
  EXPECT_EQ(create(0, 2, [](auto& c) { c.all_to_all = nullptr; }), MOEC_E_INVALID_ARG);
  EXPECT_EQ(create(0, 2, [](auto& c) { c.flags = MOEC_COMM_DEVICE; }), MOEC_E_UNSUPPORTED);
  EXPECT_EQ(create(0, 2, [](auto& c) { c.window_close = [](void*, void*) { return 0; }; }),
            MOEC_E_INVALID_ARG);
  EXPECT_EQ(create(0, 2, [](auto& c) { c.struct_size = 8; }), MOEC_E_ABI);
  EXPECT_EQ(board.released(), 0);  // callbacks of a comm that was not made are the caller's
}

TEST(Comm, OfNcclWantsNcclAndItsGpu) {
  auto context_desc = sized<moec_context_desc>();
  const Context context = make<Context>(moec_context_create, &context_desc);
  int nccl = 0;
  moec_comm* comm = nullptr;
  EXPECT_EQ(moec_comm_from_nccl(context.get(), &nccl, nullptr, &comm), MOEC_E_UNSUPPORTED);
  EXPECT_EQ(moec_comm_from_nccl(context.get(), nullptr, nullptr, &comm), MOEC_E_INVALID_ARG);
  moec_nccl_api api = {};
  api.count = [](const void*, int* ranks) { return (*ranks = 2, 0); };
  api.user_rank = [](const void*, int* rank) { return *rank = 0; };
  api.cu_device = [](const void*, int* device) { return *device = 0; };
  EXPECT_EQ(moec_comm_from_nccl(context.get(), &nccl, &api, &comm), MOEC_E_DEVICE);
  api.count = [](const void*, int*) { return 4; };
  EXPECT_EQ(moec_comm_from_nccl(context.get(), &nccl, &api, &comm), MOEC_E_COMM);
  EXPECT_EQ(comm, nullptr);
}

TEST(Comm, OfNcclFindsEachFunctionByItsName) {
  void* const library = dlopen(FAKE_NCCL, RTLD_NOW | RTLD_LOCAL);
  ASSERT_NE(library, nullptr) << dlerror();
  moec_nccl nccl = {};
  ASSERT_EQ(moec_nccl_find(&nccl.api), 0);
  const moec_nccl_api& api = nccl.api;
  EXPECT_EQ(api.count(nullptr, nullptr), 101);
  EXPECT_EQ(api.user_rank(nullptr, nullptr), 102);
  EXPECT_EQ(api.cu_device(nullptr, nullptr), 103);
  EXPECT_EQ(api.all_gather(nullptr, nullptr, 0, 0, nullptr, nullptr), 104);
  EXPECT_EQ(api.send(nullptr, 0, 0, 0, nullptr, nullptr), 105);
  EXPECT_EQ(api.recv(nullptr, 0, 0, 0, nullptr, nullptr), 106);
  EXPECT_EQ(api.group_start(), 107);
  EXPECT_EQ(api.group_end(), 108);
  EXPECT_EQ(api.get_async_error(nullptr, nullptr), 109);
  EXPECT_EQ(api.abort(nullptr), 110);
  EXPECT_EQ(api.mem_alloc(nullptr, 0), 111);
  EXPECT_EQ(api.mem_free(nullptr), 112);
  EXPECT_EQ(api.window_register(nullptr, nullptr, 0, nullptr, 0), 113);
  EXPECT_EQ(api.window_deregister(nullptr, nullptr), 114);
  EXPECT_EQ(api.peer_pointer(nullptr, 0, 0, nullptr), 115);
  EXPECT_EQ(moec_nccl_abort(&nccl), 110);
  dlclose(library);
}

TEST(Comm, OfAnOlderNcclHasNoWindows) {
  void* const library = dlopen(OLD_NCCL, RTLD_NOW | RTLD_LOCAL);
  ASSERT_NE(library, nullptr) << dlerror();
  moec_nccl nccl = {};
  ASSERT_EQ(moec_nccl_find(&nccl.api), 0);
  EXPECT_EQ(nccl.api.abort(nullptr), 110);
  EXPECT_EQ(nccl.api.mem_alloc, nullptr);
  EXPECT_EQ(nccl.api.peer_pointer, nullptr);
  moec_comm_callbacks callbacks;
  moec_nccl_fill(&nccl, &callbacks);
  EXPECT_EQ(callbacks.window_alloc, nullptr);
  dlclose(library);
}

TEST(Comm, AbortEndsWhatWaitsForADeadRank) {
  RankBoard board(2);  // the other one never comes
  Rank rank(board, 0);
  float value = 1;
  const moec_tensor tensor = view(&value, MOEC_F32, 1, 1);
  moec_status status = MOEC_OK;
  std::string message;
  std::thread waits([&] {
    status = moec_comm_sum(rank.comm.get(), &tensor, nullptr);
    message = last_error();
  });
  check(moec_comm_abort(rank.comm.get()));  // before that waits, or while it does
  waits.join();
  EXPECT_EQ(status, MOEC_E_COMM);
  EXPECT_NE(message.find("moec_comm_abort was called"), std::string::npos) << message;
  const moec_ep_desc desc = ep_desc();
  moec_ep* ep = nullptr;
  EXPECT_EQ(moec_ep_create(rank.comm.get(), &desc, &ep), MOEC_E_COMM);
  check(moec_comm_abort(rank.comm.get()));
  EXPECT_EQ(board.aborted(), 1);
}

TEST(Comm, AnEpSaysWhatBrokeIt) {
  RankBoard board(2);
  for (const std::string& error : run_ranks(2, [&](int r) {
         Rank rank(board, r);
         const moec_ep_desc desc = ep_desc();
         const Ep ep = make<Ep>(moec_ep_create, rank.comm.get(), &desc);
         const auto poll = [&] {
           auto state = sized<moec_ep_state>();
           check(moec_ep_poll(ep.get(), &state));
           return state;
         };
         EXPECT_EQ(poll().status, MOEC_OK);
         EXPECT_STREQ(poll().message, "");
         rank.wait_for_all();
         if (r == 1) return;
         board.set_poll(5);
         EXPECT_EQ(poll().status, MOEC_E_COMM);
         EXPECT_NE(std::string(poll().message).find("poll returned 5"), std::string::npos);
         check(moec_comm_abort(rank.comm.get()));  // the first cause stays
         EXPECT_NE(std::string(poll().message).find("poll returned 5"), std::string::npos);
         Tokens tokens;
         EXPECT_EQ(moec_ep_dispatch(ep.get(), &tokens.args, nullptr), MOEC_E_COMM);
       }))
    EXPECT_EQ(error, "");
}

TEST(Comm, AbortThatIsNotThereOrFails) {
  RankBoard board(1);
  auto desc = sized<moec_comm_desc>();
  desc.size = 1;
  auto context_desc = sized<moec_context_desc>();
  const Context context = make<Context>(moec_context_create, &context_desc);
  moec_comm_callbacks callbacks = board.callbacks(0);
  callbacks.abort = nullptr;
  const Comm plain = make<Comm>(moec_comm_create, context.get(), &desc, &callbacks);
  EXPECT_EQ(moec_comm_abort(plain.get()), MOEC_E_UNSUPPORTED);
  float value = 1;
  const moec_tensor tensor = view(&value, MOEC_F32, 1, 1);
  check(moec_comm_sum(plain.get(), &tensor, nullptr));  // as before
  const Comm comm = board.make_comm(context.get(), 0, true);
  board.set_abort(3);
  EXPECT_EQ(moec_comm_abort(comm.get()), MOEC_E_CALLBACK);
  auto info = sized<moec_error_info>();
  check(moec_last_error(&info));
  EXPECT_EQ(info.native_code, 3);
  EXPECT_EQ(moec_comm_abort(nullptr), MOEC_E_INVALID_ARG);
}

TEST(Comm, WrongRanksAreNamed) {
  RankBoard board(2);
  const std::vector<Outcome> all = outcomes(2, [&](int r) {
    Rank rank(board, r);
    auto desc = sized<moec_comm_desc>();
    desc.rank = 1 - r;  // not the seat whose callbacks it has
    desc.size = 2;
    const moec_comm_callbacks callbacks = board.callbacks(r);
    const Comm comm = make<Comm>(moec_comm_create, rank.context.get(), &desc, &callbacks);
    const moec_ep_desc ep = ep_desc();
    moec_ep* out = nullptr;
    return moec_ep_create(comm.get(), &ep, &out);
  });
  expect_all(all, MOEC_E_MISMATCH, "says that it is rank");
}

TEST(Comm, SumsInRankOrder) {
  RankBoard board(3);
  const float parts[3] = {1.0f, 1e8f, -1e8f};  // from the last rank on it is 1
  for (const std::string& error : run_ranks(3, [&](int r) {
         Rank rank(board, r);
         float value[2] = {parts[r], float(r)};
         int32_t counts[2] = {INT32_MAX - 1, r};
         int64_t wide[2] = {int64_t{INT32_MAX}, -r};
         const moec_tensor tensors[] = {view(value, MOEC_F32, 1, 2), view(counts, MOEC_I32, 1, 2),
                                        view(wide, MOEC_I64, 1, 2)};
         for (const moec_tensor& tensor : tensors)
           check(moec_comm_sum(rank.comm.get(), &tensor, nullptr));
         EXPECT_EQ(value[0], 0.0f);
         EXPECT_EQ(value[1], 3.0f);
         EXPECT_EQ(counts[0], INT32_MAX);
         EXPECT_EQ(counts[1], 3);
         EXPECT_EQ(wide[0], 3 * int64_t{INT32_MAX});
         EXPECT_EQ(wide[1], -3);
         const moec_tensor other = view(value, MOEC_F32, r == 2 ? 1 : 2, 1);
         EXPECT_EQ(moec_comm_sum(rank.comm.get(), &other, nullptr), MOEC_E_MISMATCH);
         moec_tensor half = view(value, MOEC_F32, 1, 2);
         if (r == 0) half.dtype = MOEC_BF16;
         EXPECT_EQ(moec_comm_sum(rank.comm.get(), &half, nullptr),
                   r == 0 ? MOEC_E_DTYPE : MOEC_E_COMM);
       }))
    EXPECT_EQ(error, "");
}

// ---- ROWS with too few rows
struct Drops {
  std::vector<float> y;
  moec_ep_state state;
};
Drops drop(uint32_t overflow, int64_t pair_rows) {
  Drops drops;
  RankBoard board(2);
  for (const std::string& error : run_ranks(2, [&](int r) {
         Rank rank(board, r);
         moec_ep_desc desc = ep_desc();
         desc.scheme = MOEC_EP_ROWS;
         desc.pair_rows = pair_rows;
         desc.overflow = overflow;
         const Ep ep = make<Ep>(moec_ep_create, rank.comm.get(), &desc);
         // Rank 0: four tokens, all with an expert of rank 1 (3..5), of weights 1 3 2 3.
         const int64_t tokens = r == 0 ? 4 : 0;
         float x[4 * kHidden];
         for (int i = 0; i < 4 * kHidden; ++i) x[i] = float(1 + i / kHidden);
         int32_t ids[] = {3, -1, -1, 4, 5, -1, 3, -1};
         float weights[] = {1, 0, 0, 3, 2, 0, 3, 0};
         std::vector<float> y(4 * kHidden, -1.0f);
         auto args = sized<moec_ep_args>();
         args.x = view(x, MOEC_F32, tokens, kHidden);
         args.expert_ids = view(ids, MOEC_I32, tokens, kTopK);
         args.routing_weights = view(weights, MOEC_F32, tokens, kTopK);
         check(moec_ep_dispatch(ep.get(), &args, nullptr));
         EXPECT_EQ(args.guests.shape[0], 2 * pair_rows);
         std::memcpy(args.partial.data, args.guests.data, size_t(moec_tensor_bytes(&args.guests)));
         args.y = view(y.data(), MOEC_F32, tokens, kHidden);
         check(moec_ep_combine(ep.get(), &args, nullptr));
         auto state = sized<moec_ep_state>();
         check(moec_ep_poll(ep.get(), &state));
         EXPECT_EQ(state.rows_needed, 4);  // both ranks know
         EXPECT_EQ(state.rows_dropped, 4 - pair_rows);
         EXPECT_GT(state.bytes_sent, 0u);
         if (r == 0) drops = {y, state};
       }))
    EXPECT_EQ(error, "");
  return drops;
}
std::vector<float> firsts(const std::vector<float>& y) {
  return {y[0], y[kHidden], y[2 * kHidden], y[3 * kHidden]};
}
TEST(EpRows, ReportKeepsTheFirst) {
  EXPECT_EQ(firsts(drop(MOEC_EP_REPORT, 2).y), (std::vector<float>{1, 2, 0, 0}));
  EXPECT_EQ(firsts(drop(MOEC_EP_REPORT, 4).y), (std::vector<float>{1, 2, 3, 4}));
}
TEST(EpRows, DropByWeightKeepsTheHeaviest) {
  EXPECT_EQ(firsts(drop(MOEC_EP_DROP_BY_WEIGHT, 1).y), (std::vector<float>{0, 2, 0, 0}));
  EXPECT_EQ(firsts(drop(MOEC_EP_DROP_BY_WEIGHT, 2).y), (std::vector<float>{0, 2, 0, 4}));
  EXPECT_EQ(firsts(drop(MOEC_EP_DROP_BY_WEIGHT, 3).y), (std::vector<float>{0, 2, 3, 4}));
}

}  // namespace
}  // namespace moec::test
