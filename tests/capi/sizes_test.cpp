// SPDX-License-Identifier: Apache-2.0
// Size queries: the stated bytes work, one less is refused, nothing past them is touched (guard
// pages on both sides), `saved` is written in full, and results do not depend on where a buffer
// lies. Mutation noted: a forward workspace query a quarter as large dies at the guard page;
// a saved buffer whose tail is not zeroed fails `written in full`; under ASan a byte read behind a
// sized struct on the stack is reported.
#include <gtest/gtest.h>

#include <bit>

#include "problem.h"
#include "support/guard.h"

namespace moec::test {
namespace {

using Side = GuardedBuffer::Side;

struct SizeCase {
  const char* name;
  uint32_t save;
  int64_t tokens;
};
void PrintTo(const SizeCase& c, std::ostream* out) {
  *out << c.name << " T=" << c.tokens;
}

const SizeCase kCases[] = {
    {"none", MOEC_SAVE_NONE, 5},     {"input", MOEC_SAVE_INPUT, 5},
    {"preact", MOEC_SAVE_PREACT, 5}, {"all", MOEC_SAVE_ALL, 5},
    {"none", MOEC_SAVE_NONE, 0},     {"all", MOEC_SAVE_ALL, 0},
    {"input", MOEC_SAVE_INPUT, 1},   {"preact", MOEC_SAVE_PREACT, 67},
    {"all", MOEC_SAVE_ALL, 67},
};

class Sizes : public testing::TestWithParam<SizeCase> {};

moec_buffer buffer_of(const GuardedBuffer& memory) {
  return {memory.data(), memory.size()};
}

// Forward and backward with every buffer of exactly the stated size against a guard page.
std::vector<float> run(Problem& p, Side side) {
  const bool saves = p.experts_desc.save != MOEC_SAVE_NONE;
  const GuardedBuffer forward(p.bytes(p.layer_sizes.forward_workspace), side);
  const GuardedBuffer backward(p.bytes(p.layer_sizes.backward_workspace), side);
  const GuardedBuffer saved(p.bytes(p.layer_sizes.saved), side);
  auto args = p.forward_args();
  args.workspace = buffer_of(forward);
  args.saved = saves ? buffer_of(saved) : moec_buffer{};
  check(moec_layer_forward(p.layer.get(), &args, nullptr));
  std::vector<float> result = p.y;
  if (saves) {
    auto grads = p.backward_args(&args);
    grads.workspace = buffer_of(backward);
    check(moec_layer_backward(p.layer.get(), &grads, nullptr));
    for (const auto* values : {&p.d_x, &p.d_gate_weight, &p.d_gate_up, &p.d_down})
      result.insert(result.end(), values->begin(), values->end());
  }
  EXPECT_TRUE(forward.slack_is_untouched());
  EXPECT_TRUE(backward.slack_is_untouched());
  EXPECT_TRUE(saved.slack_is_untouched());
  return result;
}

TEST_P(Sizes, exact_bytes_at_either_guard_page_give_the_same_result) {
  Problem p(nullptr, GetParam().save, GetParam().tokens);
  const std::vector<float> at_end = run(p, Side::kEnd), at_start = run(p, Side::kStart);
  ASSERT_EQ(at_end.size(), at_start.size());
  for (size_t i = 0; i < at_end.size(); ++i)
    ASSERT_EQ(std::bit_cast<uint32_t>(at_end[i]), std::bit_cast<uint32_t>(at_start[i])) << i;
}

TEST_P(Sizes, one_byte_less_is_refused) {
  Problem p(nullptr, GetParam().save, GetParam().tokens);
  std::vector<uint8_t> memory(p.bytes(p.layer_sizes.forward_workspace));
  auto args = p.forward_args();
  args.workspace = {memory.data(), memory.size() - 1};
  EXPECT_EQ(moec_layer_forward(p.layer.get(), &args, nullptr), MOEC_E_WORKSPACE);
  args.workspace = {};
  if (GetParam().save == MOEC_SAVE_NONE) return;
  args.saved.bytes -= 1;
  EXPECT_EQ(moec_layer_forward(p.layer.get(), &args, nullptr), MOEC_E_WORKSPACE);
  args.saved.bytes += 1;
  check(moec_layer_forward(p.layer.get(), &args, nullptr));
  auto grads = p.backward_args(&args);
  memory.resize(p.bytes(p.layer_sizes.backward_workspace));
  grads.workspace = {memory.data(), memory.size() - 1};
  EXPECT_EQ(moec_layer_backward(p.layer.get(), &grads, nullptr), MOEC_E_WORKSPACE);
}

// Two runs over different fillings leave the same bytes: every one was written.
TEST_P(Sizes, saved_is_written_in_full) {
  Problem p(nullptr, GetParam().save, GetParam().tokens);
  if (GetParam().save == MOEC_SAVE_NONE) {
    EXPECT_EQ(p.bytes(p.layer_sizes.saved) + p.bytes(p.layer_sizes.backward_workspace), 0u);
    return;
  }
  p.build_plan();
  for (const bool whole_layer : {true, false}) {
    std::vector<uint8_t> fillings[2];
    for (int i = 0; i < 2; ++i) {
      const moec_size& size = whole_layer ? p.layer_sizes.saved : p.experts_sizes.saved;
      fillings[i].assign(p.bytes(size), i ? 0x00 : 0xff);
      auto layer = p.forward_args();
      auto experts = p.experts_args();
      layer.saved = experts.saved = p.buffer(fillings[i]);
      check(whole_layer ? moec_layer_forward(p.layer.get(), &layer, nullptr)
                        : moec_experts_forward(p.experts.get(), &experts, nullptr));
    }
    const auto first = std::mismatch(fillings[0].begin(), fillings[0].end(), fillings[1].begin());
    EXPECT_EQ(first.first, fillings[0].end())
        << "byte " << first.first - fillings[0].begin() << " of " << fillings[0].size();
  }
}
INSTANTIATE_TEST_SUITE_P(All, Sizes, testing::ValuesIn(kCases), [](const auto& row) {
  return std::string(row.param.name) + "_T" + std::to_string(row.param.tokens);
});

// Memory that starts `shift` bytes behind a cache line.
struct Shifted {
  Shifted(uint64_t bytes, size_t shift) : memory(bytes + shift + 64) {
    const auto address = reinterpret_cast<uintptr_t>(memory.data());
    buffer = {memory.data() + (64 - address % 64) % 64 + shift, bytes};
  }
  std::vector<uint8_t> memory;
  moec_buffer buffer;
};

// Tensors may start at any multiple of their element, buffers at any byte; results are the same.
// A saved state may even move between forward and backward. Mutation noted: reading the caller's
// saved memory in place is seen by UBSan in the first odd shift.
TEST(Sizes, element_aligned_pointers_are_accepted) {
  Problem p;
  const std::vector<float> expected = run(p, Side::kStart);
  for (const size_t shift : {4u, 8u, 12u, 20u, 36u, 60u, 1u, 2u, 3u, 7u, 33u, 63u}) {
    const Shifted forward(p.bytes(p.layer_sizes.forward_workspace), shift);
    const Shifted backward(p.bytes(p.layer_sizes.backward_workspace), shift);
    const Shifted saved(p.bytes(p.layer_sizes.saved), shift);
    const Shifted moved(p.bytes(p.layer_sizes.saved), 64 - shift);
    std::vector<float> x(p.x.size() + shift), y(p.y.size() + shift);
    const size_t element = shift / 4;
    std::copy(p.x.begin(), p.x.end(), x.begin() + std::ptrdiff_t(element));
    auto args = p.forward_args();
    args.x.data = x.data() + element;
    args.y.data = y.data() + element;
    args.workspace = forward.buffer;
    args.saved = saved.buffer;
    check(moec_layer_forward(p.layer.get(), &args, nullptr));
    std::vector<float> got(y.begin() + std::ptrdiff_t(element),
                           y.begin() + std::ptrdiff_t(element + p.y.size()));
    std::memcpy(moved.buffer.ptr, saved.buffer.ptr, saved.buffer.bytes);
    args.saved = moved.buffer;
    auto grads = p.backward_args(&args);
    grads.workspace = backward.buffer;
    check(moec_layer_backward(p.layer.get(), &grads, nullptr));
    for (const auto* values : {&p.d_x, &p.d_gate_weight, &p.d_gate_up, &p.d_down})
      got.insert(got.end(), values->begin(), values->end());
    EXPECT_EQ(std::memcmp(got.data(), expected.data(), got.size() * sizeof(float)), 0) << shift;
  }
}

// Likewise what a plan is built in, saved to and restored from, the saved state of experts alone,
// and packed weights.
TEST(Sizes, buffers_may_start_at_any_byte) {
  std::vector<float> expected;
  for (const size_t shift : {0u, 1u, 2u, 3u, 61u}) {
    Problem p;
    p.build_plan();
    auto info = sized<moec_weights_info>();
    check(moec_weights_query(p.weights.get(), &info));
    uint64_t plan_bytes = 0, need = 0;
    int64_t max_rows = 0;
    check(moec_plan_size(&p.plan_desc, &plan_bytes, &max_rows));
    check(moec_plan_save_sync(p.plan.get(), nullptr, 0, &need, nullptr));
    const Shifted memory(plan_bytes, shift), file(need, shift), packed(info.packed_bytes, shift);
    const Shifted saved(p.bytes(p.experts_sizes.saved), shift);
    check(moec_plan_save_sync(p.plan.get(), file.buffer.ptr, need, &need, nullptr));
    const moec_plan_desc* const desc = &p.plan_desc;
    const auto plan = make<PlanHandle>(moec_plan_create, p.context, desc, &memory.buffer);
    check(moec_plan_restore_sync(plan.get(), file.buffer.ptr, need, nullptr));
    check(moec_weights_pack(p.weights.get(), &packed.buffer, nullptr));
    auto args = p.experts_args();
    args.plan = plan.get();
    args.saved = saved.buffer;
    check(moec_experts_forward(p.experts.get(), &args, nullptr));
    auto grads = p.experts_grad_args();
    grads.plan = plan.get();
    grads.saved = saved.buffer;
    check(moec_experts_backward(p.experts.get(), &grads, nullptr));
    std::vector<float> got = p.y;
    for (const auto* values : {&p.d_x, &p.d_gate_up, &p.d_down})
      got.insert(got.end(), values->begin(), values->end());
    if (shift == 0) expected = got;
    EXPECT_EQ(std::memcmp(got.data(), expected.data(), got.size() * sizeof(float)), 0) << shift;
    p.weights.reset();  // before the memory that it reads
  }
}

TEST(Sizes, plan_memory_is_exact) {
  Problem p;
  for (const int32_t align : {1, 8}) {
    auto desc = p.plan_desc;
    desc.align = align;
    uint64_t bytes = 0;
    int64_t rows = 0;
    check(moec_plan_size(&desc, &bytes, &rows));
    EXPECT_GE(rows, desc.max_tokens * desc.top_k);
    for (const Side side : {Side::kEnd, Side::kStart}) {
      const GuardedBuffer memory(bytes, side);
      const moec_buffer buffer = buffer_of(memory);
      const auto plan = make<PlanHandle>(moec_plan_create, p.context,
                                         static_cast<const moec_plan_desc*>(&desc), &buffer);
      std::vector<int32_t> ids(size_t(desc.max_tokens * desc.top_k), 1);
      const moec_tensor tensor = tensor_of(ids.data(), MOEC_I32, {desc.max_tokens, Problem::kTopK});
      check(moec_plan_from_topk(plan.get(), &tensor, nullptr, nullptr));
      EXPECT_TRUE(memory.slack_is_untouched());
    }
  }
}

// A factor that is a number of fp32 is rounded up like any other, however many rows there are; one
// that is not, such as 1.1, forgives what it misses.
TEST(Sizes, a_capacity_is_rounded_up) {
  auto desc = sized<moec_plan_desc>();
  desc.num_experts = 4;
  desc.top_k = 1;
  desc.expert_end = 1;
  desc.drop = MOEC_DROP_BY_POSITION;
  const struct {
    int64_t tokens;
    float factor;
    int64_t rows;
  } cases[] = {{11184814, 1.5f, 4194306},
               {13421774, 1.5f, 5033166},
               {13421773, 1.25f, 4194305},
               {40, 1.1f, 11},
               {16777216, 1.0f, 4194304}};
  for (const auto& c : cases) {
    desc.max_tokens = c.tokens;
    desc.capacity_factor = c.factor;
    uint64_t bytes = 0;
    int64_t rows = 0;
    check(moec_plan_size(&desc, &bytes, &rows));
    EXPECT_EQ(rows, c.rows) << c.tokens << " tokens, factor " << c.factor;
  }
}

TEST(Sizes, packed_memory_is_exact) {
  Problem p;
  auto info = sized<moec_weights_info>();
  const auto unbound = make<Weights>(moec_weights_create, p.context,
                                     static_cast<const moec_weights_desc*>(&p.weights_desc));
  check(moec_weights_query(unbound.get(), &info));
  const uint64_t before = info.packed_bytes;
  check(moec_weights_query(p.weights.get(), &info));
  ASSERT_GT(info.packed_bytes, 0u);
  EXPECT_EQ(before, info.packed_bytes);
  const GuardedBuffer memory(info.packed_bytes);
  moec_buffer buffer = {memory.data(), memory.size() - 1};
  EXPECT_EQ(moec_weights_pack(p.weights.get(), &buffer, nullptr), MOEC_E_WORKSPACE);
  buffer.bytes += 1;
  EXPECT_EQ(moec_weights_pack(p.weights.get(), &buffer, nullptr), MOEC_OK);
  EXPECT_TRUE(memory.slack_is_untouched());
  const auto args = p.forward_args();
  EXPECT_EQ(moec_layer_forward(p.layer.get(), &args, nullptr), MOEC_OK);
  p.weights.reset();  // before the memory that it reads
}

// A context that may not allocate works from one reservation of the stated size.
TEST(Sizes, reserve_then_no_allocation) {
  auto desc = sized<moec_context_desc>();
  desc.flags = MOEC_CONTEXT_NO_ALLOC;
  desc.num_threads = 2;
  const auto context =
      make<Context>(moec_context_create, static_cast<const moec_context_desc*>(&desc));
  Problem p(context.get());
  const auto args = p.forward_args();
  EXPECT_EQ(moec_layer_forward(p.layer.get(), &args, nullptr), MOEC_E_WOULD_ALLOC);
  check(moec_context_reserve(context.get(), p.bytes(p.layer_sizes.forward_workspace), nullptr));
  EXPECT_EQ(moec_layer_forward(p.layer.get(), &args, nullptr), MOEC_OK) << error_info().message;
  check(moec_context_trim(context.get()));
  EXPECT_EQ(moec_layer_forward(p.layer.get(), &args, nullptr), MOEC_E_WOULD_ALLOC);
  std::vector<uint8_t> memory(p.bytes(p.layer_sizes.forward_workspace));
  auto lent = args;
  lent.workspace = p.buffer(memory);
  EXPECT_EQ(moec_layer_forward(p.layer.get(), &lent, nullptr), MOEC_OK) << error_info().message;
}

TEST(Sizes, rows_of_a_router_beyond_the_address_space) {
  Problem p;
  auto router = p.router_desc;
  router.num_experts = router.top_k = 1;
  router.input = MOEC_INPUT_RMS_SCALED;
  auto experts = p.experts_desc;
  experts.hidden = int64_t(1) << 56;
  experts.inter = experts.num_experts = experts.top_k = 1;
  auto desc = sized<moec_layer_desc>();
  desc.router = &router;
  desc.experts = &experts;
  moec_layer* layer = nullptr;
  EXPECT_EQ(moec_layer_create(p.context, &desc, &layer), MOEC_E_OVERFLOW);
}

TEST(Sizes, workspace_limit) {
  auto desc = sized<moec_context_desc>();
  desc.workspace_limit = 4096;
  const auto context =
      make<Context>(moec_context_create, static_cast<const moec_context_desc*>(&desc));
  Problem p(context.get(), MOEC_SAVE_NONE, 300);
  auto args = p.forward_args();
  EXPECT_EQ(moec_layer_forward(p.layer.get(), &args, nullptr), MOEC_E_OUT_OF_MEMORY);
  EXPECT_NE(std::string(error_info().message).find("workspace_limit of 4096"), std::string::npos);
}

}  // namespace
}  // namespace moec::test
