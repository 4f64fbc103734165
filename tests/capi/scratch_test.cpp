// SPDX-License-Identifier: Apache-2.0
// Scratch that cannot be had is missed before a call writes anything, and a limit counts what is in
// use, not what lies idle. Each test failed with the code before it.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "problem.h"

namespace moec::test {
namespace {

Context context_of(uint32_t flags, uint64_t limit) {
  auto desc = sized<moec_context_desc>();
  desc.flags = flags;
  desc.workspace_limit = limit;
  desc.num_threads = 2;
  return make<Context>(moec_context_create, static_cast<const moec_context_desc*>(&desc));
}

uint64_t held(const moec_context* context) {
  auto stats = sized<moec_stats>();
  check(moec_context_stats(context, &stats));
  return stats.workspace_bytes;
}

TEST(Scratch, a_plan_from_logits_misses_its_scratch_before_it_routes) {
  const Context context = context_of(MOEC_CONTEXT_NO_ALLOC, 0);
  Problem p(context.get());
  p.fill_outputs();
  std::vector<int32_t> counts(Problem::kExperts, 7);
  std::vector<float> logits(size_t(p.T * Problem::kExperts));
  for (size_t i = 0; i < logits.size(); ++i) logits[i] = float(i * 7 % 5);
  auto args = sized<moec_route_args>();
  args.logits = tensor_of(logits.data(), MOEC_F32, {p.T, Problem::kExperts});
  args.expert_ids = tensor_of(p.ids.data(), MOEC_I32, {p.T, Problem::kTopK});
  args.routing_weights = tensor_of(p.routing.data(), MOEC_F32, {p.T, Problem::kTopK});
  args.counts = tensor_of(counts.data(), MOEC_I32, {Problem::kExperts});
  const auto build = [&] {
    return moec_plan_from_logits(p.plan.get(), p.router.get(), &args, nullptr);
  };
  ASSERT_EQ(build(), MOEC_E_WOULD_ALLOC);
  EXPECT_TRUE(p.outputs_untouched());
  EXPECT_EQ(counts, std::vector<int32_t>(Problem::kExperts, 7));
  check(moec_context_reserve(context.get(), 1 << 22, nullptr));
  ASSERT_EQ(build(), MOEC_OK) << error_info().message;
  EXPECT_EQ(counts[0] + counts[1] + counts[2] + counts[3],
            int32_t(7 * Problem::kExperts + p.T * Problem::kTopK));
}

// A layer whose router reads a wide tensor of its own: the layer's sizes know the width of x alone,
// so that a call takes scratch of the context besides its workspace.
struct WideRouter {
  explicit WideRouter(const moec_context* context) : p(context) {
    p.router_desc.input = MOEC_INPUT_RMS_SCALED;
    const moec_layer_desc desc = p.layer_desc();
    p.layer = make<LayerHandle>(moec_layer_create, p.context, &desc);
    check(moec_layer_query(p.layer.get(), &p.layer_sizes));
    p.saved.resize(p.bytes(p.layer_sizes.saved));
    forward = p.forward_args();
    forward.router_x = tensor_of(router_x.data(), MOEC_F32, {p.T, kWidth});
    forward.gate_weight = tensor_of(gate.data(), MOEC_F32, {Problem::kExperts, kWidth});
    forward.input_scale = tensor_of(scale.data(), MOEC_F32, {kWidth});
    backward = p.backward_args(&forward);
    backward.d_router_x = tensor_of(d_router_x.data(), MOEC_F32, {p.T, kWidth});
    backward.d_gate_weight = tensor_of(d_gate.data(), MOEC_F32, {Problem::kExperts, kWidth});
  }
  moec_status run_forward() { return moec_layer_forward(p.layer.get(), &forward, nullptr); }
  moec_status run_backward() { return moec_layer_backward(p.layer.get(), &backward, nullptr); }

  static constexpr int64_t kWidth = 1 << 12;
  Problem p;
  std::vector<float> router_x = std::vector<float>(size_t(p.T * kWidth), 0.5f),
                     gate = std::vector<float>(size_t(Problem::kExperts * kWidth), 0.25f),
                     scale = std::vector<float>(kWidth, 1.0f), d_router_x = router_x, d_gate = gate;
  moec_layer_args forward;
  moec_layer_grad_args backward;
};

TEST(Scratch, a_wide_router_misses_its_scratch_before_anything_is_written) {
  const Context context = context_of(MOEC_CONTEXT_NO_ALLOC, 0);
  WideRouter wide(context.get());
  Problem& p = wide.p;
  std::vector<uint8_t> forward(p.bytes(p.layer_sizes.forward_workspace)),
      backward(p.bytes(p.layer_sizes.backward_workspace));
  wide.forward.workspace = p.buffer(forward);
  wide.backward.workspace = p.buffer(backward);
  p.fill_outputs();
  EXPECT_EQ(wide.run_forward(), MOEC_E_WOULD_ALLOC);
  EXPECT_TRUE(p.outputs_untouched());
  check(moec_context_reserve(context.get(), 1 << 24, nullptr));
  EXPECT_EQ(wide.run_forward(), MOEC_OK) << error_info().message;
  check(moec_context_trim(context.get()));
  const std::vector<float> before = p.d_down;
  EXPECT_EQ(wide.run_backward(), MOEC_E_WOULD_ALLOC);
  EXPECT_EQ(std::memcmp(p.d_down.data(), before.data(), before.size() * sizeof(float)), 0);
  check(moec_context_reserve(context.get(), 1 << 24, nullptr));
  EXPECT_EQ(wide.run_backward(), MOEC_OK) << error_info().message;
}

// Its workspace, what a wide router takes, and a copy of `saved`, which lies where nothing is
// aligned.
TEST(Scratch, one_reservation_serves_all_parts_of_a_call) {
  const Context context = context_of(MOEC_CONTEXT_NO_ALLOC, 0);
  WideRouter wide(context.get());
  const uint64_t bytes = wide.p.saved.size();
  wide.p.saved.resize(bytes + 1);
  wide.forward.saved = {wide.p.saved.data() + 1, bytes};
  check(moec_context_reserve(context.get(), 1 << 24, nullptr));
  EXPECT_EQ(wide.run_forward(), MOEC_OK) << error_info().message;
  EXPECT_EQ(wide.run_backward(), MOEC_OK) << error_info().message;
}

TEST(Scratch, all_of_a_limit_may_be_used) {
  const Context context = context_of(0, 10000);
  EXPECT_EQ(moec_context_reserve(context.get(), 10000, nullptr), MOEC_OK) << error_info().message;
  EXPECT_EQ(held(context.get()), 10000u);
  EXPECT_EQ(moec_context_reserve(context.get(), 10001, nullptr), MOEC_E_OUT_OF_MEMORY);
}

// Two gradients of a router that are sums over all tokens, by thread and then together.
TEST(Scratch, a_backward_of_two_sums_stays_within_its_workspace) {
  const Context context = context_of(MOEC_CONTEXT_NO_ALLOC, 0);
  Problem p(context.get(), MOEC_SAVE_ALL, 4096);
  p.router_desc.flags = MOEC_ROUTER_LOGIT_BIAS | MOEC_ROUTER_PER_EXPERT_SCALE;
  const moec_layer_desc desc = p.layer_desc();
  p.layer = make<LayerHandle>(moec_layer_create, p.context, &desc);
  check(moec_layer_query(p.layer.get(), &p.layer_sizes));
  p.saved.resize(p.bytes(p.layer_sizes.saved));
  std::vector<uint8_t> forward_memory(p.bytes(p.layer_sizes.forward_workspace)),
      backward_memory(p.bytes(p.layer_sizes.backward_workspace));
  std::vector<float> bias(Problem::kExperts, 0.1f), scale(Problem::kExperts, 1.5f), d_bias = bias,
                                                                                    d_scale = scale;
  const auto of_experts = [](std::vector<float>& values) {
    return tensor_of(values.data(), MOEC_F32, {Problem::kExperts});
  };
  moec_layer_args forward = p.forward_args();
  forward.gate_bias = of_experts(bias);
  forward.per_expert_scale = of_experts(scale);
  forward.workspace = p.buffer(forward_memory);
  ASSERT_EQ(moec_layer_forward(p.layer.get(), &forward, nullptr), MOEC_OK) << error_info().message;
  moec_layer_grad_args backward = p.backward_args(&forward);
  backward.d_gate_bias = of_experts(d_bias);
  backward.d_per_expert_scale = of_experts(d_scale);
  backward.workspace = p.buffer(backward_memory);
  EXPECT_EQ(moec_layer_backward(p.layer.get(), &backward, nullptr), MOEC_OK)
      << error_info().message;
}

TEST(Scratch, a_plan_routes_by_its_own_contexts_threads) {
  constexpr int64_t kTokens = 64, kExperts = 16384, kTopK = 2;
  auto desc = sized<moec_context_desc>();
  desc.num_threads = 1;
  const auto of_router =
      make<Context>(moec_context_create, static_cast<const moec_context_desc*>(&desc));
  desc.num_threads = 48;
  desc.flags = MOEC_CONTEXT_NO_ALLOC;
  const auto of_plan =
      make<Context>(moec_context_create, static_cast<const moec_context_desc*>(&desc));
  auto router_desc = sized<moec_router_desc>();
  router_desc.num_experts = kExperts;
  router_desc.top_k = kTopK;
  const auto router = make<Router>(moec_router_create, of_router.get(),
                                   static_cast<const moec_router_desc*>(&router_desc));
  auto plan_desc = sized<moec_plan_desc>();
  plan_desc.max_tokens = kTokens;
  plan_desc.num_experts = kExperts;
  plan_desc.top_k = kTopK;
  uint64_t bytes = 0;
  int64_t rows = 0;
  check(moec_plan_size(&plan_desc, &bytes, &rows));
  std::vector<uint8_t> memory(bytes);
  const moec_buffer buffer = {memory.data(), memory.size()};
  const auto plan = make<PlanHandle>(moec_plan_create, of_plan.get(),
                                     static_cast<const moec_plan_desc*>(&plan_desc), &buffer);
  check(moec_context_reserve(of_plan.get(), 96 << 20, nullptr));
  std::vector<float> logits(size_t(kTokens * kExperts), 0.5f);
  auto args = sized<moec_route_args>();
  args.logits = tensor_of(logits.data(), MOEC_F32, {kTokens, kExperts});
  EXPECT_EQ(moec_plan_from_logits(plan.get(), router.get(), &args, nullptr), MOEC_OK)
      << error_info().message;
}

TEST(Scratch, a_loss_takes_one_block) {
  const Context context = context_of(MOEC_CONTEXT_NO_ALLOC, 0);
  constexpr int64_t kTokens = 64, kExperts = 8;
  std::vector<float> logits(size_t(kTokens * kExperts), 1.0f), d_logits(logits.size());
  float loss = 0;
  const moec_tensor in = tensor_of(logits.data(), MOEC_F32, {kTokens, kExperts}),
                    gradient = tensor_of(d_logits.data(), MOEC_F32, {kTokens, kExperts});
  auto args = sized<moec_loss_args>();
  args.kind = MOEC_LOSS_BALANCE_SWITCH;
  args.top_k = 2;
  args.logits = &in;
  args.d_logits = &gradient;
  args.count = 1;
  args.loss = tensor_of(&loss, MOEC_F32, {1});
  EXPECT_EQ(moec_loss_forward(context.get(), &args, nullptr), MOEC_E_WOULD_ALLOC);
  check(moec_context_reserve(context.get(), 1 << 20, nullptr));
  EXPECT_EQ(moec_loss_forward(context.get(), &args, nullptr), MOEC_OK) << error_info().message;
  EXPECT_EQ(moec_loss_backward(context.get(), &args, nullptr), MOEC_OK) << error_info().message;
}

TEST(Scratch, a_refused_reservation_keeps_the_one_before) {
  const Context context = context_of(MOEC_CONTEXT_NO_ALLOC, 1 << 20);
  check(moec_context_reserve(context.get(), 1 << 19, nullptr));
  EXPECT_EQ(held(context.get()), uint64_t(1) << 19);
  EXPECT_EQ(moec_context_reserve(context.get(), 1 << 22, nullptr), MOEC_E_OUT_OF_MEMORY);
  EXPECT_NE(std::string(error_info().message).find(": 0 bytes of scratch in use"),
            std::string::npos)
      << error_info().message;
  EXPECT_EQ(held(context.get()), uint64_t(1) << 19);
}

// A call that finds idle blocks, each too small, gives back as many of them as it must.
TEST(Scratch, idle_blocks_make_room_for_one_that_fits) {
  constexpr uint64_t kLimit = 16 << 20;
  const Context context = context_of(0, kLimit);
  WideRouter wide(context.get());
  ASSERT_EQ(wide.run_forward(), MOEC_OK) << error_info().message;  // leaves a block
  EXPECT_GT(held(context.get()), 0u);
  EXPECT_EQ(moec_context_reserve(context.get(), kLimit, nullptr), MOEC_OK) << error_info().message;
  EXPECT_EQ(held(context.get()), kLimit);
}

}  // namespace
}  // namespace moec::test
