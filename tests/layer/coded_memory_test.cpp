// SPDX-License-Identifier: Apache-2.0
// Memory of quantised experts in every format, by what the context asks its allocator for: packing,
// a forward and a backward take nothing of the size of a dequantised stack, and packed weights are
// as large as what is bound. On the CPU the same of host memory. Shown once to fail, planted in the
// library: a packed copy of 3 % more, a pack with scratch for two experts, a forward that acquires
// scratch for the values of all experts, and one that keeps them in a vector.
#include <gtest/gtest.h>

#include <algorithm>
#include <map>

#include "capi/counted_malloc.h"
#include "support/handles.h"
#include "support/quant_draw.h"

namespace moec::test {
namespace {

// Experts decoded once have 64 MiB of scratch on a GPU, which the stack must exceed.
struct Sizes {
  int experts, hidden, inter;
};
Sizes sizes_here() {
  return test_device().type == MOEC_CPU ? Sizes{16, 256, 256} : Sizes{8, 2048, 1024};
}
constexpr int kTokens = 40;

// The caller's allocator.
struct Hook {
  std::map<void*, DeviceBuffer> blocks;
  uint64_t live = 0, peak = 0, largest = 0;

  void watch() {
    peak = live;
    largest = 0;
    watch_largest();
  }
  static void* alloc(void* self, size_t bytes, size_t align, int32_t, int32_t, moec_stream) {
    Hook& hook = *static_cast<Hook*>(self);
    DeviceBuffer buffer((bytes + align - 1) / align * align);
    void* const block = buffer.pointer();
    hook.blocks.emplace(block, std::move(buffer));
    hook.live += bytes;
    hook.peak = std::max(hook.peak, hook.live);
    hook.largest = std::max<uint64_t>(hook.largest, bytes);
    return block;
  }
  static void release(void* self, void* block, size_t bytes, int32_t, int32_t, moec_stream) {
    Hook& hook = *static_cast<Hook*>(self);
    hook.live -= bytes;
    hook.blocks.erase(block);
  }
};

Context context_of(Hook* hook) {
  auto allocator = sized<moec_allocator>();
  allocator.user = hook;
  allocator.alloc = Hook::alloc;
  allocator.release = Hook::release;
  auto desc = sized<moec_context_desc>();
  desc.device_type = test_device().type;
  desc.device_id = test_device().id;
  desc.allocator = &allocator;
  return make<Context>(moec_context_create, static_cast<const moec_context_desc*>(&desc));
}

// Quantised matrices of gate and up, and of down.
struct Matrices {
  Tensors tensors;
  QuantBinder binder{tensors};
  moec_weights_desc desc = sized<moec_weights_desc>();
  moec_weight_set set = sized<moec_weight_set>();
  uint64_t bytes = 0;   // of all tensors
  uint64_t matrix = 0;  // of the codes and scales of one expert's larger matrix

  Matrices(const QuantCase& c, bool per_expert, moec_dtype dtype) {
    const auto [experts, hidden, inter] = sizes_here();
    Random random(71);
    const bool in_out = c.only_in_out;
    const QuantShape shape = {MOEC_GATE_THEN_UP, in_out, in_out, per_expert, hidden, inter};
    const auto one = [&](int N, int K, int parts) {
      return binder.matrix(random_quant_matrix(c, shape, N, K, in_out, parts, experts, &random),
                           c.whole_shape);
    };
    set.gate_up = one(2 * inter, hidden, 2);
    const uint64_t up_bytes = count();
    set.down = one(hidden, inter, 1);
    bytes = count();
    matrix = up_bytes / uint64_t(experts);
    desc.flags = MOEC_WEIGHTS_FROZEN;
    desc.num_experts = experts;
    desc.gate_layout = MOEC_GATE_THEN_UP;
    desc.hidden = hidden;
    desc.inter = inter;
    desc.gate_up_orientation = desc.down_orientation = in_out ? MOEC_IN_OUT : MOEC_OUT_IN;
    desc.dtype = dtype;
    desc.gate_up_scheme = desc.down_scheme = uint32_t(c.scheme);
  }
  uint64_t count() const {
    uint64_t all = 0;
    for (const moec_tensor& t : tensors_of(set)) all += tensor_bytes(t);
    return all;
  }
};

// A forward and a backward in memory of the context.
class Step {
 public:
  Step(const moec_context* context, moec_dtype dtype, const moec_weights* weights)
      : context_(context) {
    const auto [experts, hidden, inter] = sizes_here();
    auto desc = sized<moec_experts_desc>();
    desc.num_experts = experts;
    desc.top_k = 1;
    desc.hidden = hidden;
    desc.inter = inter;
    desc.dtype = dtype;
    desc.save = MOEC_SAVE_PREACT;
    experts_ =
        make<Experts>(moec_experts_create, context, static_cast<const moec_experts_desc*>(&desc));
    auto plan_desc = sized<moec_plan_desc>();
    plan_desc.max_tokens = kTokens;
    plan_desc.num_experts = experts;
    plan_desc.top_k = 1;
    plan_ =
        make<PlanHandle>(moec_plan_create, context, static_cast<const moec_plan_desc*>(&plan_desc),
                         static_cast<const moec_buffer*>(nullptr));
    std::vector<int> ids;  // one expert has most rows, the others one each or none
    for (int t = 0; t < kTokens; ++t) ids.push_back(std::max(0, std::min(experts, t - 32) - 1));
    const std::vector<double> halves(size_t(kTokens) * size_t(hidden), 0.5);
    const std::vector<double> ones(size_t(kTokens), 1);
    const moec_tensor given = tensors_.input_ids(ids, MOEC_I32, {kTokens, 1}),
                      routing = tensors_.input(ones, MOEC_F32, {kTokens, 1});
    check(moec_plan_from_topk(plan_.get(), &given, &routing, nullptr));
    auto sizes = sized<moec_experts_sizes>();
    check(moec_experts_query(experts_.get(), &sizes));
    const auto bytes = [](const moec_size& s) { return s.base + kTokens * s.per_token; };
    constexpr uint64_t kPage = 4096;  // scratch of the context is in pages
    const uint64_t most = std::max(bytes(sizes.forward_workspace), bytes(sizes.backward_workspace));
    workspace_ = (most + kPage - 1) / kPage * kPage;
    args_.plan = grad_.plan = plan_.get();
    args_.weights = grad_.weights = weights;
    args_.x = grad_.x = tensors_.input(halves, dtype, {kTokens, hidden});
    args_.y = tensors_.output(dtype, {kTokens, hidden});
    args_.saved = grad_.saved = tensors_.buffer(bytes(sizes.saved));
    grad_.d_y = tensors_.input(halves, dtype, {kTokens, hidden});
    grad_.d_x = tensors_.output(dtype, {kTokens, hidden});
    grad_.d_routing_weights = tensors_.output(MOEC_F32, {kTokens, 1});
  }
  uint64_t workspace() const { return workspace_; }
  void run() const {
    check(moec_experts_forward(experts_.get(), &args_, nullptr));
    check(moec_experts_backward(experts_.get(), &grad_, nullptr));
    check(moec_context_sync(context_, nullptr));
  }

 private:
  const moec_context* context_;
  Tensors tensors_;
  Experts experts_;
  PlanHandle plan_;
  uint64_t workspace_ = 0;
  moec_experts_args args_ = sized<moec_experts_args>();
  moec_experts_grad_args grad_ = sized<moec_experts_grad_args>();
};

class Formats : public testing::TestWithParam<QuantCase> {};
INSTANTIATE_TEST_SUITE_P(Schemes, Formats, testing::ValuesIn(kQuantCases),
                         [](const auto& one) { return std::string(one.param.name); });

void expect_no_stack(const QuantCase& c, bool per_expert, moec_dtype dtype) {
  const auto [experts, hidden, inter] = sizes_here();
  const uint64_t stack = 3 * uint64_t(experts) * uint64_t(hidden) * uint64_t(inter) * 2;
  const bool on_cpu = test_device().type == MOEC_CPU;
  Hook hook;
  const Context context = context_of(&hook);
  const Matrices m(c, per_expert, dtype);
  const auto expect_host = [&](const char* what, uint64_t most) {
    const auto largest = uint64_t(malloc_counts().largest);
    EXPECT_TRUE(!on_cpu || largest <= most) << what << ": " << largest << " > " << most;
  };
  const auto weights = make<Weights>(moec_weights_create, context.get(), &m.desc);
  hook.watch();
  check(moec_weights_bind(weights.get(), &m.set));
  EXPECT_EQ(hook.largest, 0u) << "bind";
  expect_host("bind", m.matrix);
  auto info = sized<moec_weights_info>();
  check(moec_weights_query(weights.get(), &info));
  for (const bool packed : {false, true}) {
    SCOPED_TRACE(packed ? "packed" : "as bound");
    if (packed && !info.packed_bytes) continue;
    const Step step(context.get(), dtype, weights.get());
    ASSERT_LT(step.workspace(), stack) << "which would not be seen";
    if (packed) {
      EXPECT_LE(double(info.packed_bytes), 1.02 * double(m.bytes)) << "resident";
      hook.watch();
      const uint64_t before = hook.live;
      check(moec_weights_pack(weights.get(), nullptr, nullptr));
      EXPECT_LE(hook.largest, info.packed_bytes) << "pack";
      EXPECT_LE(hook.peak - before, info.packed_bytes + m.matrix) << "pack, together";
      expect_host("pack", m.matrix);
    }
    hook.watch();
    const uint64_t before = hook.live;
    step.run();
    EXPECT_LE(hook.largest, step.workspace()) << "step";
    EXPECT_LE(hook.peak - before, step.workspace()) << "step, together";
    expect_host("step", m.matrix);
  }
}

TEST_P(Formats, TakeNoMemoryOfTheSizeOfAStack) {
  for (const bool per_expert : {false, true})
    for (const moec_dtype dtype : {moec_dtype(MOEC_F32), moec_dtype(MOEC_BF16)}) {
      SCOPED_TRACE(std::string(per_expert ? "per expert " : "stacked ") +
                   (dtype == MOEC_F32 ? "f32" : "bf16"));
      expect_no_stack(GetParam(), per_expert, dtype);
    }
}

}  // namespace
}  // namespace moec::test
