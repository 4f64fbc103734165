// SPDX-License-Identifier: Apache-2.0
// Host memory: nothing is allocated in steady state, and wherever an allocation fails the call that
// needed it reports it and nothing is lost. Not run under sanitizers, which have a malloc of their
// own. Mutations noted: a std::vector in Layer::forward fails steady_state, one in CodedLines::find
// coded_weights; a Context that leaks its backend fails `every failing allocation`.
#include <gtest/gtest.h>

#include <functional>

#include "counted_malloc.h"
#include "problem.h"

namespace moec::test {
namespace {

TEST(Memory, steady_state_allocates_nothing) {
  for (const uint32_t save : {MOEC_SAVE_NONE, MOEC_SAVE_INPUT, MOEC_SAVE_ALL}) {
    Problem p(nullptr, save, 67);
    const auto args = p.forward_args();
    const auto grads = p.backward_args(&args);
    const auto step = [&] {
      check(moec_layer_forward(p.layer.get(), &args, nullptr));
      if (save != MOEC_SAVE_NONE) check(moec_layer_backward(p.layer.get(), &grads, nullptr));
    };
    step();
    auto before = sized<moec_stats>();
    check(moec_context_stats(p.context, &before));
    const int64_t allocations = malloc_counts().allocations;
    for (int i = 0; i < 10; ++i) step();
    EXPECT_EQ(malloc_counts().allocations, allocations) << "save " << save;
    auto after = sized<moec_stats>();
    check(moec_context_stats(p.context, &after));
    EXPECT_EQ(after.allocs, before.allocs);
    EXPECT_EQ(after.host_syncs, before.host_syncs);
    EXPECT_EQ(after.workspace_bytes, before.workspace_bytes);
    EXPECT_GT(after.calls, before.calls);
    EXPECT_GT(after.flops, before.flops);
  }
}

// Gate and up of NF4, down of INT8, as bound and packed.
TEST(Memory, coded_weights_allocate_nothing_in_steady_state) {
  constexpr int64_t E = Problem::kExperts, H = Problem::kHidden, I = Problem::kInter;
  constexpr int64_t kUp = E * 2 * I * H;
  Problem p(nullptr, MOEC_SAVE_PREACT, 67);
  std::vector<uint8_t> nibbles(kUp / 2, 0x5a);
  std::vector<int8_t> bytes(E * H * I, 7);
  std::vector<float> scales(E * H, 0.1f), codebook(16, 0.5f);  // kUp / 64 of NF4
  auto nf4 = sized<moec_quant>(), int8 = sized<moec_quant>();
  nf4.scales = tensor_of(scales.data(), MOEC_F32, {kUp / 64});
  nf4.codebook = tensor_of(codebook.data(), MOEC_F32, {16});
  int8.scales = tensor_of(scales.data(), MOEC_F32, {E, H, 1});
  auto set = sized<moec_weight_set>();
  set.gate_up.data = tensor_of(nibbles.data(), MOEC_U8, {kUp / 2});
  set.gate_up.quant = &nf4;
  set.down.data = tensor_of(bytes.data(), MOEC_I8, {E, H, I});
  set.down.quant = &int8;
  moec_weights_desc desc = p.weights_desc;
  desc.gate_up_scheme = MOEC_SCHEME_CODEBOOK4;
  desc.down_scheme = MOEC_SCHEME_INT8;
  const auto weights = make<Weights>(moec_weights_create, p.context, &desc);
  check(moec_weights_bind(weights.get(), &set));
  auto args = p.forward_args();
  args.weights = weights.get();
  auto grads = p.backward_args(&args);
  grads.d_expert_weights = nullptr;
  const auto step = [&] {
    check(moec_layer_forward(p.layer.get(), &args, nullptr));
    check(moec_layer_backward(p.layer.get(), &grads, nullptr));
  };
  for (const bool packed : {false, true}) {
    if (packed) check(moec_weights_pack(weights.get(), nullptr, nullptr));
    step();
    const int64_t allocations = malloc_counts().allocations;
    for (int i = 0; i < 10; ++i) step();
    EXPECT_EQ(malloc_counts().allocations, allocations) << (packed ? "packed" : "as bound");
  }
}

TEST(Memory, separate_calls_allocate_nothing_in_steady_state) {
  Problem p;
  auto gate = sized<moec_gate_args>();
  gate.x = p.rows(p.x);
  gate.weight = tensor_of(p.gate_weight.data(), MOEC_F32, {Problem::kExperts, Problem::kHidden});
  gate.logits = tensor_of(p.logits.data(), MOEC_F32, {p.T, Problem::kExperts});
  auto route = sized<moec_route_args>();
  route.logits = gate.logits;
  const auto experts = p.experts_args();
  const auto grads = p.experts_grad_args();
  const auto step = [&] {
    check(moec_gate_forward(p.router.get(), &gate, nullptr));
    check(moec_plan_from_logits(p.plan.get(), p.router.get(), &route, nullptr));
    check(moec_experts_forward(p.experts.get(), &experts, nullptr));
    check(moec_experts_backward(p.experts.get(), &grads, nullptr));
  };
  step();
  const int64_t allocations = malloc_counts().allocations;
  for (int i = 0; i < 10; ++i) step();
  EXPECT_EQ(malloc_counts().allocations, allocations);
}

// ---- failing allocations: a life of every object, which stops at the first error

struct Hook {  // an allocator of the caller whose n-th call fails
  int64_t until_failure = 0, live = 0;
  static void* alloc(void* self, size_t bytes, size_t align, int32_t, int32_t, moec_stream) {
    Hook& hook = *static_cast<Hook*>(self);
    if (hook.until_failure && --hook.until_failure == 0) return nullptr;
    ++hook.live;
    return std::aligned_alloc(align, (bytes + align - 1) / align * align);
  }
  static void release(void* self, void* block, size_t, int32_t, int32_t, moec_stream) {
    --static_cast<Hook*>(self)->live;
    std::free(block);
  }
};

struct Memory {  // what the scenario works on; allocated before anything may fail
  Problem p;
  moec_layer_args args = p.forward_args();
  moec_layer_grad_args grads = p.backward_args(&args);
  moec_weight_set set = p.weight_set(p.gate_up, p.down);
  moec_tensor ids = tensor_of(p.given_ids.data(), MOEC_I32, {p.T, Problem::kTopK});
  std::vector<uint8_t> plan_bytes = std::vector<uint8_t>(1 << 14);
};

moec_status life(Memory& m, const moec_allocator* allocator) {
  moec_context* context = nullptr;
  moec_router* router = nullptr;
  moec_plan* plan = nullptr;
  moec_weights* weights = nullptr;
  moec_experts* experts = nullptr;
  moec_layer* layer = nullptr;
  auto desc = sized<moec_context_desc>();
  desc.num_threads = 3;
  desc.allocator = allocator;
  uint64_t need = 0;
  const moec_layer_desc layer_desc = m.p.layer_desc();
  moec_layer_args args = m.args;
  moec_layer_grad_args grads = m.grads;
  grads.forward = &args;
  moec_status status = moec_context_create(&desc, &context);
  if (!status) status = moec_router_create(context, &m.p.router_desc, &router);
  if (!status) status = moec_plan_create(context, &m.p.plan_desc, nullptr, &plan);
  if (!status) status = moec_plan_from_topk(plan, &m.ids, nullptr, nullptr);
  if (!status)
    status = moec_plan_save_sync(plan, m.plan_bytes.data(), m.plan_bytes.size(), &need, nullptr);
  if (!status) status = moec_plan_restore_sync(plan, m.plan_bytes.data(), need, nullptr);
  if (!status) status = moec_weights_create(context, &m.p.weights_desc, &weights);
  if (!status) status = moec_weights_bind(weights, &m.set);
  if (!status) status = moec_weights_pack(weights, nullptr, nullptr);
  if (!status) status = moec_experts_create(context, &m.p.experts_desc, &experts);
  if (!status) status = moec_experts_describe(experts, weights, 5, nullptr, 0, &need);
  if (!status) status = moec_layer_create(context, &layer_desc, &layer);
  args.weights = weights;
  if (!status) status = moec_layer_forward(layer, &args, nullptr);
  if (!status) status = moec_layer_backward(layer, &grads, nullptr);
  moec_context_free(context);
  moec_layer_free(layer);
  moec_experts_free(experts);
  moec_weights_free(weights);
  moec_plan_free(plan);
  moec_router_free(router);
  return status;
}

TEST(Memory, every_failing_allocation_is_reported_and_nothing_leaks) {
  Memory m;
  ASSERT_EQ(life(m, nullptr), MOEC_OK);  // once, for what is allocated once per process
  int64_t reported = 0, n = 1;
  for (bool failed = true; failed; ++n) {
    const int64_t live = malloc_counts().live;
    fail_allocation(n);
    const moec_status status = life(m, nullptr);
    failed = fail_allocation(0);
    EXPECT_EQ(malloc_counts().live, live) << "allocation " << n;
    // A thread that cannot be started is done without, so that not every failure is an error.
    EXPECT_TRUE(status == MOEC_OK || status == MOEC_E_OUT_OF_MEMORY)
        << moec_status_name(status) << " for allocation " << n << ": " << error_info().message;
    EXPECT_TRUE(failed || status == MOEC_OK);
    reported += status != MOEC_OK;
    ASSERT_LT(n, 1000);
  }
  EXPECT_GT(reported, 15);
}

TEST(Memory, every_failing_call_of_the_allocator_is_reported_and_nothing_leaks) {
  Memory m;
  Hook hook;
  auto allocator = sized<moec_allocator>();
  allocator.user = &hook;
  allocator.alloc = Hook::alloc;
  allocator.release = Hook::release;
  ASSERT_EQ(life(m, &allocator), MOEC_OK);
  EXPECT_EQ(hook.live, 0);
  int64_t n = 1;
  for (;; ++n) {
    hook.until_failure = n;
    const moec_status status = life(m, &allocator);
    EXPECT_EQ(hook.live, 0) << "allocation " << n;
    if (hook.until_failure > 0) break;  // there were fewer
    EXPECT_EQ(status, MOEC_E_OUT_OF_MEMORY) << "allocation " << n;
  }
  EXPECT_GE(n, 4);
}

TEST(Memory, an_unaligned_allocator_is_refused) {
  auto allocator = sized<moec_allocator>();
  allocator.alloc = [](void*, size_t bytes, size_t, int32_t, int32_t, moec_stream) -> void* {
    return static_cast<char*>(std::malloc(bytes + 32)) + 20;
  };
  allocator.release = [](void*, void* block, size_t, int32_t, int32_t, moec_stream) {
    std::free(static_cast<char*>(block) - 20);
  };
  auto desc = sized<moec_context_desc>();
  desc.allocator = &allocator;
  const auto context =
      make<Context>(moec_context_create, static_cast<const moec_context_desc*>(&desc));
  EXPECT_EQ(moec_context_reserve(context.get(), 100, nullptr), MOEC_E_CALLBACK);
}

}  // namespace
}  // namespace moec::test
