// SPDX-License-Identifier: Apache-2.0
// Which kernels run the experts: what describe says, and what MOEC_CUDA_KERNELS pins. Shown once to
// fail: with a table that ignores the pin, and with one that falls back where the pin refuses.
#include <gtest/gtest.h>

#include <cstdlib>
#include <string>

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

std::string describe(const moec_context* context, moec_dtype dtype) {
  const moec_experts_desc desc = experts_desc(dtype);
  const auto experts = make<Experts>(moec_experts_create, context, &desc);
  auto weights_desc = sized<moec_weights_desc>();
  weights_desc.num_experts = desc.num_experts;
  weights_desc.hidden = desc.hidden;
  weights_desc.inter = desc.inter;
  weights_desc.dtype = dtype;
  const auto weights = make<Weights>(moec_weights_create, context, &weights_desc);
  const GpuArray memory(size_t(desc.num_experts * desc.hidden * desc.inter) * 4);
  moec_tensor tensor;
  const int64_t shape[] = {desc.num_experts, desc.inter, desc.hidden};
  const int64_t down_shape[] = {desc.num_experts, desc.hidden, desc.inter};
  auto set = sized<moec_weight_set>();
  check(moec_tensor_make(&tensor, memory.data(), dtype, MOEC_CUDA, 0, 3, shape));
  set.gate.data = set.up.data = tensor;
  check(moec_tensor_make(&set.down.data, memory.data(), dtype, MOEC_CUDA, 0, 3, down_shape));
  check(moec_weights_bind(weights.get(), &set));
  char text[2048];
  uint64_t need = 0;
  check(moec_experts_describe(experts.get(), weights.get(), 8, text, sizeof text, &need));
  return text;
}
bool has(const std::string& text, const char* part) {
  return text.find(part) != std::string::npos;
}
bool is_hopper() {
  int major = 0;
  check_cuda(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0));
  return major == 9;
}

TEST(Paths, DescribeNamesThemInTheOrderOfTheirTrial) {
  const Context context = gpu_context();
  EXPECT_FALSE(has(describe(context.get(), MOEC_F32), "\"fast\""));
  const std::string text = describe(context.get(), MOEC_BF16);
  EXPECT_TRUE(has(text, "\"portable\"")) << text;
  EXPECT_EQ(has(text, "\"fast\""), is_hopper()) << text;
  EXPECT_TRUE(!is_hopper() || text.find("\"fast\"") < text.find("\"portable\"")) << text;
}

TEST(Paths, APinLeavesOne) {
  const Pin pin("portable");
  const Context context = gpu_context();
  const std::string text = describe(context.get(), MOEC_BF16);
  EXPECT_TRUE(has(text, "\"portable\"") && !has(text, "\"fast\"")) << text;
}

TEST(Paths, APinThatCannotBeIsRefusedWithAReason) {
  if (!is_hopper()) GTEST_SKIP() << "needs a device with both";
  const Pin pin("fast");
  const Context context = gpu_context();
  EXPECT_TRUE(has(describe(context.get(), MOEC_BF16), "\"fast\""));
  try {
    describe(context.get(), MOEC_F32);
    ADD_FAILURE() << "fp32 experts on wgmma";
  } catch (const Failure& failure) {
    EXPECT_EQ(failure.status, MOEC_E_UNSUPPORTED);
    EXPECT_TRUE(has(failure.what(), "MOEC_CUDA_KERNELS")) << failure.what();
  }
}

TEST(Paths, AnUnknownPinIsRefusedWithTheNames) {
  const Pin pin("fastest");
  try {
    gpu_context();
    ADD_FAILURE() << "a context with unknown kernels";
  } catch (const Failure& failure) {
    EXPECT_EQ(failure.status, MOEC_E_UNSUPPORTED);
    EXPECT_TRUE(has(failure.what(), "portable")) << failure.what();
  }
}

}  // namespace
}  // namespace moec::test
