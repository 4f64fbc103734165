// SPDX-License-Identifier: Apache-2.0
// Which kernels run the experts: what describe says, and what MOEC_CUDA_KERNELS pins.
#include <gtest/gtest.h>

#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

#include "step.h"

namespace moec::test {
namespace {

class Pin {  // of contexts made while it lives
 public:
  explicit Pin(const char* name) { setenv("MOEC_CUDA_KERNELS", name, 1); }
  ~Pin() { unsetenv("MOEC_CUDA_KERNELS"); }
  Pin(const Pin&) = delete;
  Pin& operator=(const Pin&) = delete;
};

moec_experts_desc experts_desc(moec_dtype dtype) {
  auto desc = sized<moec_experts_desc>();
  desc.hidden = 64;
  desc.inter = 32;
  desc.num_experts = 4;
  desc.top_k = 2;
  desc.dtype = dtype;
  desc.save = MOEC_SAVE_PREACT;
  return desc;
}

// Experts of the description above on tokens of normal values; each token's experts are 0 and 2.
struct Problem {
  moec_experts_desc desc;
  int64_t tokens;
  Weights weights;
  Experts experts;
  std::vector<std::unique_ptr<DeviceBytes>> arrays;

  Problem(const moec_context* context, moec_dtype dtype, int64_t num_tokens)
      : desc(experts_desc(dtype)), tokens(num_tokens) {
    experts = make<Experts>(moec_experts_create, context, &desc);
    auto weights_desc = sized<moec_weights_desc>();
    weights_desc.num_experts = desc.num_experts;
    weights_desc.hidden = desc.hidden;
    weights_desc.inter = desc.inter;
    weights_desc.dtype = dtype;
    weights = make<Weights>(moec_weights_create, context, &weights_desc);
    const moec_weight_set set = matrices(dtype == MOEC_F32);
    check(moec_weights_bind(weights.get(), &set));
  }
  // with values: normal fp32 values; else NaN
  moec_tensor tensor(moec_dtype dtype, std::vector<int64_t> shape, bool with_values) {
    int64_t count = 1;
    for (int64_t extent : shape) count *= extent;
    arrays.push_back(std::make_unique<DeviceBytes>(size_t(count) * (dtype >> 8 & 0xFF) / 8));
    if (with_values && count) {
      Random random(arrays.size());
      std::vector<float> values(size_t(count), 0.0f);
      for (float& v : values) v = float(random.normal());
      arrays.back()->assign(values);
    }
    moec_tensor t;
    check(moec_tensor_make(&t, arrays.back()->data(), dtype, MOEC_CUDA, 0, int32_t(shape.size()),
                           shape.data()));
    return t;
  }
  moec_weight_set matrices(bool with_values) {
    auto set = sized<moec_weight_set>();
    set.gate.data = tensor(desc.dtype, {desc.num_experts, desc.inter, desc.hidden}, with_values);
    set.up.data = tensor(desc.dtype, {desc.num_experts, desc.inter, desc.hidden}, with_values);
    set.down.data = tensor(desc.dtype, {desc.num_experts, desc.hidden, desc.inter}, with_values);
    return set;
  }
  moec_buffer buffer(const moec_size& size) {
    arrays.push_back(
        std::make_unique<DeviceBytes>(size.base + static_cast<uint64_t>(tokens) * size.per_token));
    return buffer_of(*arrays.back());
  }
};

struct Results {
  std::vector<float> y, d_down;
};
// Forward and backward in fp32.
Results run(const moec_context* context, int64_t tokens) {
  Problem p(context, MOEC_F32, tokens);
  auto sizes = sized<moec_experts_sizes>();
  check(moec_experts_query(p.experts.get(), &sizes));
  auto plan_desc = sized<moec_plan_desc>();
  plan_desc.max_tokens = tokens;
  plan_desc.num_experts = p.desc.num_experts;
  plan_desc.top_k = p.desc.top_k;
  const moec_buffer* const own = nullptr;
  const auto plan = make<PlanHandle>(moec_plan_create, context, &plan_desc, own);
  const moec_tensor ids = p.tensor(MOEC_I32, {tokens, 2}, false);
  std::vector<int32_t> both;
  for (int64_t t = 0; t < tokens; ++t) both.insert(both.end(), {0, 2});
  p.arrays.back()->assign(both);
  check(moec_plan_from_topk(plan.get(), &ids, nullptr, nullptr));
  auto args = sized<moec_experts_args>();
  args.plan = plan.get();
  args.weights = p.weights.get();
  args.x = p.tensor(MOEC_F32, {tokens, p.desc.hidden}, true);
  args.y = p.tensor(MOEC_F32, {tokens, p.desc.hidden}, false);
  const DeviceBytes& y = *p.arrays.back();
  args.saved = p.buffer(sizes.saved);
  check(moec_experts_forward(p.experts.get(), &args, nullptr));
  const moec_weight_set gradients = p.matrices(false);
  const DeviceBytes& d_down = *p.arrays.back();
  auto grad = sized<moec_experts_grad_args>();
  grad.plan = args.plan;
  grad.weights = args.weights;
  grad.x = args.x;
  grad.saved = args.saved;
  grad.d_y = p.tensor(MOEC_F32, {tokens, p.desc.hidden}, true);
  grad.d_expert_weights = &gradients;
  check(moec_experts_backward(p.experts.get(), &grad, nullptr));
  check(moec_context_sync(context, nullptr));
  return {y.host<float>(), d_down.host<float>()};
}

std::string describe(const moec_context* context, moec_dtype dtype) {
  const Problem p(context, dtype, 8);
  char text[2048];
  uint64_t need = 0;
  check(
      moec_experts_describe(p.experts.get(), p.weights.get(), p.tokens, text, sizeof text, &need));
  return text;
}
// As describe and MOEC_CUDA_KERNELS spell them.
constexpr const char *kHopper = "fast", *kPortable = "portable";

// Where describe names these kernels, or npos.
size_t place(const std::string& text, const std::string& kernels) {
  return text.find('"' + kernels + '"');
}
bool names(const std::string& text, const char* kernels) {
  return place(text, kernels) != std::string::npos;
}
bool is_hopper() {
  int major = 0;
  CHECK_CUDA(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0));
  return major == 9;
}

TEST(Paths, DescribeNamesThemInTheOrderOfTheirTrial) {
  const Context context = gpu_context();
  EXPECT_FALSE(names(describe(context.get(), MOEC_F32), kHopper));
  const std::string text = describe(context.get(), MOEC_BF16);
  EXPECT_TRUE(names(text, kPortable)) << text;
  EXPECT_EQ(names(text, kHopper), is_hopper()) << text;
  EXPECT_TRUE(!is_hopper() || place(text, kHopper) < place(text, kPortable)) << text;
}

TEST(Paths, APinLeavesOne) {
  const Pin pin(kPortable);
  const Context context = gpu_context();
  const std::string text = describe(context.get(), MOEC_BF16);
  EXPECT_TRUE(names(text, kPortable) && !names(text, kHopper)) << text;
}

TEST(Paths, APinThatCannotBeIsRefusedWithAReason) {
  if (!is_hopper()) GTEST_SKIP() << "needs a device with both";
  const Pin pin(kHopper);
  const Context context = gpu_context();
  EXPECT_TRUE(names(describe(context.get(), MOEC_BF16), kHopper));
  try {
    describe(context.get(), MOEC_F32);
    ADD_FAILURE() << "fp32 experts on wgmma";
  } catch (const Failure& failure) {
    EXPECT_EQ(failure.status, MOEC_E_UNSUPPORTED);
    EXPECT_NE(std::string(failure.what()).find("MOEC_CUDA_KERNELS"), std::string::npos)
        << failure.what();
  }
}

TEST(Paths, AnUnknownPinIsRefusedWithTheNames) {
  const Pin pin("unknown");
  try {
    gpu_context();
    ADD_FAILURE() << "a context with unknown kernels";
  } catch (const Failure& failure) {
    EXPECT_EQ(failure.status, MOEC_E_UNSUPPORTED);
    EXPECT_NE(std::string(failure.what()).find(kPortable), std::string::npos) << failure.what();
  }
}

// TF32 keeps ten bits of each factor: products are off by some 2^-11, never by nothing.
TEST(Math, Tf32IsForContextsThatAskForIt) {
  auto desc = sized<moec_context_desc>();
  desc.device_type = MOEC_CUDA;
  desc.math = MOEC_MATH_TF32;
  const auto context =
      make<Context>(moec_context_create, static_cast<const moec_context_desc*>(&desc));
  const Results exact = run(gpu_context().get(), 200), rounded = run(context.get(), 200);
  for (const auto values : {&Results::y, &Results::d_down}) {
    const std::vector<float>&want = exact.*values, &got = rounded.*values;
    const double difference = row_error(got, want, want.size()).error;
    EXPECT_GT(difference, 1e-5);
    EXPECT_LT(difference, 2e-3);
  }
}

TEST(Tokens, NoneGiveGradientsOfZero) {
  const Results results = run(gpu_context().get(), 0);
  EXPECT_TRUE(results.y.empty());
  EXPECT_EQ(results.d_down, std::vector<float>(results.d_down.size(), 0.0f));
}

}  // namespace
}  // namespace moec::test
