// SPDX-License-Identifier: Apache-2.0
// Device memory that callers own, here on the CPU: allocated, filled, copied, freed. What GPUs add
// is in tests/gpu/buffer_test.cpp.
// Mutations noted: a free that forgets to erase its row frees twice; one that compares no bytes
// accepts "of_other_bytes"; without ~Buffers "what_is_left" stays.
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <numeric>
#include <thread>

#include "mistakes.h"

namespace moec::test {
namespace {

moec_buffer allocated(const moec_context* context, uint64_t bytes) {
  moec_buffer out = {};
  check(moec_buffer_alloc(context, bytes, &out));
  return out;
}

moec_stats stats_of(const moec_context* context) {
  auto stats = sized<moec_stats>();
  check(moec_context_stats(context, &stats));
  return stats;
}

// An allocator of the caller that knows what is out.
struct Hook {
  std::map<void*, size_t> out;
  bool refuses = false;
  moec_allocator allocator = sized<moec_allocator>();

  Hook() {
    allocator.user = this;
    allocator.alloc = [](void* user, size_t bytes, size_t align, int32_t type, int32_t,
                         moec_stream stream) -> void* {
      Hook& hook = *static_cast<Hook*>(user);
      EXPECT_EQ(type, MOEC_CPU);
      EXPECT_EQ(stream, nullptr);
      if (hook.refuses) return nullptr;
      void* const block = std::aligned_alloc(align, (bytes + align - 1) / align * align);
      hook.out[block] = bytes;
      return block;
    };
    allocator.release = [](void* user, void* pointer, size_t bytes, int32_t, int32_t, moec_stream) {
      Hook& hook = *static_cast<Hook*>(user);
      EXPECT_EQ(hook.out.at(pointer), bytes);
      hook.out.erase(pointer);
      std::free(pointer);
    };
  }
  Context context() const {
    auto desc = sized<moec_context_desc>();
    desc.allocator = &allocator;
    return make<Context>(moec_context_create, static_cast<const moec_context_desc*>(&desc));
  }
};

TEST(Buffer, holds_what_is_copied_in) {
  const Problem p;
  moec_buffer buffer = allocated(p.context, 10 * 4);
  ASSERT_EQ(buffer.bytes, 40u);
  EXPECT_EQ(reinterpret_cast<uintptr_t>(buffer.ptr) % 64, 0u);
  std::vector<float> in(10), out(10), part(4);
  std::iota(in.begin(), in.end(), 1.0f);
  const moec_tensor source = tensor_of(in.data(), MOEC_F32, {2, 5}),
                    inside = tensor_of(buffer.ptr, MOEC_F32, {2, 5}),
                    target = tensor_of(out.data(), MOEC_F32, {2, 5});
  check(moec_tensor_copy(p.context, &source, &inside, nullptr));
  check(moec_tensor_copy(p.context, &inside, &target, nullptr));
  EXPECT_EQ(out, in);

  moec_tensor middle = tensor_of(buffer.ptr, MOEC_F32, {4});  // a part, by byte_offset
  middle.byte_offset = 3 * 4;
  const moec_tensor four = tensor_of(part.data(), MOEC_F32, {4});
  check(moec_tensor_copy(p.context, &middle, &four, nullptr));
  EXPECT_EQ(part, (std::vector<float>{4, 5, 6, 7}));
  check(moec_tensor_zero(p.context, &middle, nullptr));
  check(moec_tensor_copy(p.context, &inside, &target, nullptr));
  EXPECT_EQ(out, (std::vector<float>{1, 2, 3, 0, 0, 0, 0, 8, 9, 10}));
  check(moec_buffer_free(p.context, &buffer));
  EXPECT_EQ(buffer.ptr, nullptr);
  EXPECT_EQ(buffer.bytes, 0u);
}

TEST(Buffer, of_no_bytes_is_absent_and_may_be_freed) {
  const Problem p;
  moec_buffer buffer = {&buffer, 7};
  check(moec_buffer_alloc(p.context, 0, &buffer));
  EXPECT_EQ(buffer.ptr, nullptr);
  EXPECT_EQ(buffer.bytes, 0u);
  check(moec_buffer_free(p.context, &buffer));
  check(moec_buffer_free(p.context, nullptr));
  std::vector<float> none;
  const moec_tensor empty = tensor_of(none.data(), MOEC_F32, {0, 3});
  check(moec_tensor_copy(p.context, &empty, &empty, nullptr));
  check(moec_tensor_zero(p.context, &empty, nullptr));
}

TEST(Buffer, counts_as_an_allocation_and_not_as_scratch) {
  auto desc = sized<moec_context_desc>();
  desc.flags = MOEC_CONTEXT_NO_ALLOC;
  desc.workspace_limit = 64;
  const auto context =
      make<Context>(moec_context_create, static_cast<const moec_context_desc*>(&desc));
  const moec_stats before = stats_of(context.get());
  moec_buffer buffer = allocated(context.get(), 1 << 20);
  const moec_stats after = stats_of(context.get());
  EXPECT_EQ(after.allocs, before.allocs + 1);
  EXPECT_EQ(after.workspace_bytes, before.workspace_bytes);
  EXPECT_EQ(after.workspace_peak, before.workspace_peak);
  EXPECT_EQ(after.host_syncs, before.host_syncs);
  check(moec_buffer_free(context.get(), &buffer));
}

TEST(Buffer, comes_from_the_allocator_and_what_is_left_goes_back_with_the_context) {
  Hook hook;
  Problem p(nullptr);
  {
    const Context context = hook.context();
    moec_buffer buffer = allocated(context.get(), 100);
    EXPECT_EQ(hook.out, (std::map<void*, size_t>{{buffer.ptr, 100}}));
    check(moec_buffer_free(context.get(), &buffer));
    EXPECT_TRUE(hook.out.empty());
    hook.refuses = true;
    moec_buffer untouched = {&hook, 5};
    EXPECT_EQ(moec_buffer_alloc(context.get(), 100, &untouched), MOEC_E_OUT_OF_MEMORY);
    EXPECT_EQ(untouched.ptr, &hook);
    hook.refuses = false;
    allocated(context.get(), 200);
    const auto router = make<Router>(moec_router_create, context.get(), &p.router_desc);
    allocated(context.get(), 300);
    EXPECT_EQ(hook.out.size(), 2u);
  }
  EXPECT_TRUE(hook.out.empty());
}

TEST(Buffer, too_large_is_out_of_memory) {
  const Problem p;
  for (const uint64_t bytes : {uint64_t(1) << 62, ~uint64_t(0)}) {
    moec_buffer buffer = {};
    EXPECT_EQ(moec_buffer_alloc(p.context, bytes, &buffer), MOEC_E_OUT_OF_MEMORY) << bytes;
    EXPECT_EQ(buffer.ptr, nullptr);
  }
}

TEST(Buffer, many_threads_share_a_context) {
  const Problem p;
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i)
    threads.emplace_back([&, i] {
      for (int round = 0; round < 50; ++round) {
        moec_buffer buffer = allocated(p.context, uint64_t(64 * (i + 1)));
        std::vector<uint8_t> bytes(size_t(buffer.bytes), uint8_t(i)), back(bytes.size());
        const int64_t count = int64_t(bytes.size());
        const moec_tensor in = tensor_of(bytes.data(), MOEC_U8, {count}),
                          on = tensor_of(buffer.ptr, MOEC_U8, {count}),
                          out = tensor_of(back.data(), MOEC_U8, {count});
        check(moec_tensor_copy(p.context, &in, &on, nullptr));
        check(moec_tensor_copy(p.context, &on, &out, nullptr));
        EXPECT_EQ(back, bytes);
        check(moec_buffer_free(p.context, &buffer));
      }
    });
  for (std::thread& thread : threads) thread.join();
}

// A copy of x to y, one of them spoilt.
moec_status copy_with(Problem& p, void (*spoil)(Problem&, moec_tensor&, moec_tensor&)) {
  moec_tensor source = p.rows(p.x), target = p.rows(p.y);
  spoil(p, source, target);
  return moec_tensor_copy(p.context, &source, &target, nullptr);
}
moec_status free_twice(Problem& p, void (*spoil)(moec_buffer&)) {
  moec_buffer buffer = allocated(p.context, 64), spoilt = buffer;
  spoil(spoilt);
  const moec_status status = moec_buffer_free(p.context, &spoilt);
  check(moec_buffer_free(p.context, &buffer));
  return status ? status : moec_buffer_free(p.context, &spoilt);
}

const Mistake kMistakes[] = {
    {"null_out", MOEC_E_INVALID_ARG, "out is NULL",
     [](Problem& p) { return moec_buffer_alloc(p.context, 8, nullptr); }},
    {"null_context", MOEC_E_INVALID_ARG, "context is NULL",
     [](Problem&) {
       moec_buffer buffer = {};
       return moec_buffer_alloc(nullptr, 8, &buffer);
     }},
    {"freed_twice", MOEC_E_INVALID_ARG, "expected a buffer of moec_buffer_alloc on this context",
     [](Problem& p) {
       moec_buffer buffer = allocated(p.context, 64), again = buffer;
       check(moec_buffer_free(p.context, &buffer));
       return moec_buffer_free(p.context, &again);
     }},
    {"of_another_context", MOEC_E_INVALID_ARG, "on this context",
     [](Problem& p) {
       const Problem other;
       moec_buffer buffer = allocated(other.context, 64);
       return moec_buffer_free(p.context, &buffer);
     }},
    {"of_other_bytes", MOEC_E_INVALID_ARG, "buffer.bytes is 63; 64 were allocated",
     [](Problem& p) { return free_twice(p, [](moec_buffer& b) { b.bytes = 63; }); }},
    {"not_its_start", MOEC_E_INVALID_ARG, "buffer.ptr is",
     [](Problem& p) {
       return free_twice(p, [](moec_buffer& b) { b.ptr = static_cast<char*>(b.ptr) + 8; });
     }},
    {"copy_of_nothing", MOEC_E_INVALID_ARG, "source is absent",
     [](Problem& p) { return copy_with(p, [](auto&, auto& source, auto&) { source = {}; }); }},
    {"copy_to_null", MOEC_E_INVALID_ARG, "target is NULL",
     [](Problem& p) {
       const moec_tensor source = p.rows(p.x);
       return moec_tensor_copy(p.context, &source, nullptr, nullptr);
     }},
    {"copy_to_another_type", MOEC_E_DTYPE, "target has dtype i32; source has f32",
     [](Problem& p) {
       return copy_with(p, [](auto&, auto&, auto& target) { target.dtype = MOEC_I32; });
     }},
    {"copy_to_another_shape", MOEC_E_SHAPE, "target has shape [5,8]; source has [5,16]",
     [](Problem& p) {
       return copy_with(p, [](auto& q, auto&, auto& target) {
         target = tensor_of(q.y.data(), MOEC_F32, {q.T, 8});
       });
     }},
    {"copy_onto_itself", MOEC_E_ALIAS, "target [",
     [](Problem& p) {
       return copy_with(p, [](auto&, auto& source, auto& target) { target.data = source.data; });
     }},
    {"copy_from_another_device", MOEC_E_DEVICE, "source is on cuda:0; expected cpu",
     [](Problem& p) {
       return copy_with(p, [](auto&, auto& source, auto&) { source.device_type = MOEC_CUDA; });
     }},
    {"zero_on_another_device", MOEC_E_DEVICE, "tensor is on cuda:0; expected cpu",
     [](Problem& p) {
       moec_tensor tensor = p.rows(p.y);
       tensor.device_type = MOEC_CUDA;
       return moec_tensor_zero(p.context, &tensor, nullptr);
     }},
};
MOEC_TEST_MISTAKES(kMistakes);

}  // namespace
}  // namespace moec::test
