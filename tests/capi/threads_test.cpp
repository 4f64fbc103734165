// SPDX-License-Identifier: Apache-2.0
// Handles that are const in the signature serve 16 threads at once, with the same bits as alone.
// Run under TSan as well. Mutation noted: without the lock of ScratchCache::acquire it aborts.
#include <gtest/gtest.h>

#include <atomic>
#include <bit>
#include <thread>

#include "problem.h"

namespace moec::test {
namespace {

constexpr int kThreads = 16, kRounds = 8;

struct Outputs {  // of one thread
  explicit Outputs(const Problem& p)
      : y(p.y.size()),
        d_x(p.d_x.size()),
        d_gate_up(p.d_gate_up.size()),
        d_down(p.d_down.size()),
        logits(p.logits.size()),
        saved(p.saved.size()),
        experts_saved(p.experts_saved.size()) {}
  bool operator==(const Outputs& o) const {
    return y == o.y && d_x == o.d_x && d_gate_up == o.d_gate_up && d_down == o.d_down &&
           logits == o.logits && saved == o.saved && experts_saved == o.experts_saved;
  }
  std::vector<float> y, d_x, d_gate_up, d_down, logits;
  std::vector<uint8_t> saved, experts_saved;
};

// Every kind of call on the shared handles of `p`; only `out` is written.
void use_all(Problem& p, const moec_layer_args& shared, Outputs& out) {
  auto args = shared;
  args.logits = args.expert_ids = args.routing_weights = {};
  args.y = p.rows(out.y);
  args.saved = p.buffer(out.saved);
  check(moec_layer_forward(p.layer.get(), &args, nullptr));
  const moec_weight_set gradients = p.weight_set(out.d_gate_up, out.d_down);
  auto grads = sized<moec_layer_grad_args>();
  grads.forward = &args;
  grads.d_y = p.rows(p.d_y);
  grads.d_x = p.rows(out.d_x);
  grads.d_expert_weights = &gradients;
  check(moec_layer_backward(p.layer.get(), &grads, nullptr));

  auto gate = sized<moec_gate_args>();
  gate.x = p.rows(p.x);
  gate.weight = shared.gate_weight;
  gate.logits = tensor_of(out.logits.data(), MOEC_F32, {p.T, Problem::kExperts});
  check(moec_gate_forward(p.router.get(), &gate, nullptr));
  auto experts = sized<moec_experts_args>();
  experts.plan = p.plan.get();
  experts.weights = p.weights.get();
  experts.x = p.rows(p.x);
  experts.y = p.rows(out.y);
  experts.saved = p.buffer(out.experts_saved);
  check(moec_experts_forward(p.experts.get(), &experts, nullptr));

  moec_tensor view = {};
  check(moec_plan_view(p.plan.get(), MOEC_PLAN_COUNTS, &view));
  int32_t totals[4] = {};
  check(moec_plan_totals_sync(p.plan.get(), totals, nullptr));
  auto stats = sized<moec_stats>();
  check(moec_context_stats(p.context, &stats));
  auto info = sized<moec_weights_info>();
  check(moec_weights_query(p.weights.get(), &info));
  uint64_t need = 0;
  check(moec_layer_describe(p.layer.get(), p.weights.get(), 3, nullptr, 0, &need));
  check(moec_context_trim(p.context));
  check(moec_context_reserve(p.context, 1000, nullptr));
  EXPECT_EQ(moec_plan_view(p.plan.get(), 99, &view), MOEC_E_INVALID_ARG);
  EXPECT_STREQ(error_info().site, "moec_plan_view");
}

TEST(Threads, const_handles_serve_many_threads) {
  Problem p;
  p.build_plan();
  const auto args = p.forward_args();
  Outputs expected(p);
  use_all(p, args, expected);
  check(moec_context_stats_reset(p.context));
  std::atomic<int> wrong{0};
  std::vector<std::thread> threads;
  for (int i = 0; i < kThreads; ++i)
    threads.emplace_back([&] {
      Outputs mine(p);
      for (int round = 0; round < kRounds; ++round) {
        use_all(p, args, mine);
        wrong += !(mine == expected);
      }
    });
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(wrong, 0);
  auto stats = sized<moec_stats>();
  check(moec_context_stats(p.context, &stats));
  EXPECT_EQ(stats.path_cpu, uint64_t(3 * kThreads * kRounds));  // none is lost
  for (const uint64_t none :
       {stats.path_portable, stats.path_sm90, stats.path_few_tokens, stats.path_few_rows,
        stats.path_fallbacks, stats.ep_gather, stats.ep_peer, stats.ep_rows, stats.ep_exact})
    EXPECT_EQ(none, 0u);
}

// Contexts, and everything made from them, come and go on many threads at once.
TEST(Threads, objects_are_made_and_freed_on_many_threads) {
  std::vector<std::thread> threads;
  for (int i = 0; i < kThreads; ++i)
    threads.emplace_back([] {
      Problem p;
      const auto args = p.forward_args();
      check(moec_layer_forward(p.layer.get(), &args, nullptr));
    });
  for (std::thread& thread : threads) thread.join();
}

// Whether the caller's threads flush subnormal numbers or not. Mutation noted: without FloatMode in
// guard() the flushed ones are 0.
TEST(Threads, the_callers_float_mode_gives_the_same_bits) {
#if defined(__x86_64__)
  constexpr int64_t kRows = 4096, kColumns = 8;
  auto desc = sized<moec_router_desc>();
  desc.num_experts = kColumns;
  desc.top_k = 2;
  std::vector<float> logits(kRows * kColumns);  // the second best is below 2^-126
  for (size_t i = 0; i < logits.size(); ++i)
    logits[i] = i % kColumns ? -88.0f - float(i % 7) : 0.0f;
  std::vector<std::vector<float>> weights;
  for (const auto& [mode, threads] :
       {std::pair(0u, 1), std::pair(0x8040u, 1), std::pair(0x8040u, 2)}) {
    auto of_threads = sized<moec_context_desc>();
    of_threads.num_threads = threads;
    const auto context =
        make<Context>(moec_context_create, static_cast<const moec_context_desc*>(&of_threads));
    const auto router = make<Router>(moec_router_create, context.get(),
                                     static_cast<const moec_router_desc*>(&desc));
    std::vector<float>& out = weights.emplace_back(kRows * 2, 1.0f);
    std::vector<int32_t> ids(kRows * 2);
    auto args = sized<moec_route_args>();
    args.logits = tensor_of(logits.data(), MOEC_F32, {kRows, kColumns});
    args.expert_ids = tensor_of(ids.data(), MOEC_I32, {kRows, 2});
    args.routing_weights = tensor_of(out.data(), MOEC_F32, {kRows, 2});
    const unsigned before = __builtin_ia32_stmxcsr();
    __builtin_ia32_ldmxcsr(before | mode);
    const moec_status status = moec_route_forward(router.get(), &args, nullptr);
    EXPECT_EQ(__builtin_ia32_stmxcsr() & mode, mode);
    __builtin_ia32_ldmxcsr(before);
    check(status);
  }
  EXPECT_EQ(weights[0], weights[1]);
  EXPECT_EQ(weights[0], weights[2]);
  EXPECT_GT(std::bit_cast<uint32_t>(weights[0][1]), 0u);
#endif
}

// A context on the caller's threads gives the same bits.
TEST(Threads, the_callers_pool_gives_the_same_bits) {
  Problem own(nullptr, MOEC_SAVE_ALL, 67);
  auto pool = sized<moec_thread_pool>();
  pool.num_threads = 4;
  pool.parallel_for = [](void*, int64_t n, void (*body)(void*, int64_t), void* arg) -> int32_t {
    std::vector<std::thread> threads;
    for (int64_t i = 0; i < n; ++i) threads.emplace_back(body, arg, i);
    for (std::thread& thread : threads) thread.join();
    return 0;
  };
  auto desc = sized<moec_context_desc>();
  desc.pool = &pool;
  const auto context =
      make<Context>(moec_context_create, static_cast<const moec_context_desc*>(&desc));
  Problem lent(context.get(), MOEC_SAVE_ALL, 67);
  const auto own_args = own.forward_args(), lent_args = lent.forward_args();
  check(moec_layer_forward(own.layer.get(), &own_args, nullptr));
  check(moec_layer_forward(lent.layer.get(), &lent_args, nullptr));
  EXPECT_EQ(own.y, lent.y);

  pool.parallel_for = [](void*, int64_t, void (*)(void*, int64_t), void*) { return int32_t(7); };
  const auto broken =
      make<Context>(moec_context_create, static_cast<const moec_context_desc*>(&desc));
  Problem refused(broken.get(), MOEC_SAVE_ALL, 67);
  const auto args = refused.forward_args();
  EXPECT_EQ(moec_layer_forward(refused.layer.get(), &args, nullptr), MOEC_E_CALLBACK);
  EXPECT_EQ(error_info().native_code, 7);
}

}  // namespace
}  // namespace moec::test
