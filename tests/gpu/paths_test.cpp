// SPDX-License-Identifier: Apache-2.0
// Which kernels run the experts: what describe says is what a call queues, and MOEC_CUDA_KERNELS
// pins it.
#include <gtest/gtest.h>

#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "driver.h"
#include "step.h"
#include "support/json.h"

namespace moec::test {
namespace {

// As describe and MOEC_CUDA_KERNELS spell them.
constexpr const char *kHopper = "sm90", *kFewTokens = "few_tokens", *kFewRows = "few_rows",
                     *kPortable = "portable";

class Pin {  // of contexts made while it lives
 public:
  explicit Pin(const char* name) { setenv("MOEC_CUDA_KERNELS", name, 1); }
  ~Pin() { unsetenv("MOEC_CUDA_KERNELS"); }
  Pin(const Pin&) = delete;
  Pin& operator=(const Pin&) = delete;
};

struct Case {
  const char* name;
  const char* pin;  // MOEC_CUDA_KERNELS, or null
  moec_dtype dtype;
  int64_t tokens;
  const char *forward, *backward;  // the paths on a Hopper GPU; "": none, and the call is refused
  int64_t hidden = 64, inter = 32;
  uint32_t save = MOEC_SAVE_PREACT;
  bool f32_weights = false;  // and their gradients, beside rows of dtype
  uint32_t scheme = 0;       // INT8 or GGUF_Q8_0, frozen
  moec_dtype weights() const { return f32_weights ? moec_dtype(MOEC_F32) : dtype; }
};

std::ostream& operator<<(std::ostream& out, const Case& c) {
  return out << c.name;
}

// One call of experts forward and backward on values that are normal (fp32) or NaN; each token's
// experts are 0 and 2. All is queued on one stream.
class Call {
 public:
  Call(const moec_context* context, const Case& c) : context_(context), case_(c) {
    desc_.hidden = c.hidden;
    desc_.inter = c.inter;
    desc_.num_experts = 4;
    desc_.top_k = 2;
    desc_.dtype = c.dtype;
    desc_.save = c.save;
    experts_ = make<Experts>(moec_experts_create, context, &desc_);
    auto weights_desc = sized<moec_weights_desc>();
    weights_desc.num_experts = desc_.num_experts;
    weights_desc.hidden = c.hidden;
    weights_desc.inter = c.inter;
    weights_desc.dtype = c.weights();
    weights_desc.gate_up_scheme = weights_desc.down_scheme = c.scheme;
    weights_ = make<Weights>(moec_weights_create, context, &weights_desc);
    const moec_weight_set set = c.scheme ? codes() : matrices();
    check(moec_weights_bind(weights_.get(), &set));
    build_plan();
    auto sizes = sized<moec_experts_sizes>();
    check(moec_experts_query(experts_.get(), &sizes));
    forward_.plan = plan_.get();
    forward_.weights = weights_.get();
    forward_.x = of_tokens();
    forward_.y = of_tokens();
    y_ = arrays_.back().get();
    if (c.save != MOEC_SAVE_NONE) forward_.saved = buffer(sizes.saved);
    backward_.plan = forward_.plan;
    backward_.weights = forward_.weights;
    backward_.x = forward_.x;
    backward_.saved = forward_.saved;
    backward_.d_y = of_tokens();
    backward_.d_x = of_tokens();
    backward_.d_routing_weights = tensor(MOEC_F32, {c.tokens, desc_.top_k});
    if (c.scheme) return;
    d_weights_ = matrices();
    d_down_ = arrays_.back().get();
    backward_.d_expert_weights = &d_weights_;
  }

  void forward() const { check(moec_experts_forward(experts_.get(), &forward_, stream_)); }
  void backward() const { check(moec_experts_backward(experts_.get(), &backward_, stream_)); }
  Json describe() const {
    char text[8192];
    uint64_t need = 0;
    check(moec_experts_describe(experts_.get(), weights_.get(), case_.tokens, text, sizeof text,
                                &need));
    return parse_json(text);
  }
  const GpuStream& stream() const { return stream_; }
  std::vector<float> y() const { return values(*y_); }
  std::vector<float> d_down() const { return values(*d_down_); }

 private:
  moec_tensor tensor(moec_dtype dtype, std::vector<int64_t> shape) {
    int64_t count = 1;
    for (const int64_t extent : shape) count *= extent;
    arrays_.push_back(std::make_unique<DeviceBytes>(size_t(count) * (dtype >> 8 & 0xFF) / 8));
    if (dtype == MOEC_F32) {
      Random random(arrays_.size());
      const auto normals = random.normals(size_t(count));
      arrays_.back()->assign(std::vector<float>(normals.begin(), normals.end()));
    }
    moec_tensor t;
    check(moec_tensor_make(&t, arrays_.back()->data(), dtype, MOEC_CUDA, 0, int32_t(shape.size()),
                           shape.data()));
    return t;
  }
  moec_tensor of_tokens() { return tensor(desc_.dtype, {case_.tokens, desc_.hidden}); }
  moec_weight_set matrices() {
    auto set = sized<moec_weight_set>();
    set.gate.data = tensor(case_.weights(), {desc_.num_experts, desc_.inter, desc_.hidden});
    set.up.data = tensor(case_.weights(), {desc_.num_experts, desc_.inter, desc_.hidden});
    set.down.data = tensor(case_.weights(), {desc_.num_experts, desc_.hidden, desc_.inter});
    return set;
  }
  moec_weight_set codes() {
    auto set = sized<moec_weight_set>();
    const auto add = [&](moec_matrix& matrix, moec_quant& quant, int64_t n, int64_t k) {
      if (case_.scheme == MOEC_SCHEME_GGUF_Q8_0) {
        matrix.data = tensor(MOEC_U8, {desc_.num_experts, n, k / 32 * 34});
        return;
      }
      matrix.data = tensor(MOEC_I8, {desc_.num_experts, n, k});
      quant = sized<moec_quant>();
      quant.scales = tensor(MOEC_F32, {desc_.num_experts, n, 1});
      matrix.quant = &quant;
    };
    add(set.gate, quants_[0], desc_.inter, desc_.hidden);
    add(set.up, quants_[1], desc_.inter, desc_.hidden);
    add(set.down, quants_[2], desc_.hidden, desc_.inter);
    return set;
  }
  moec_buffer buffer(const moec_size& size) {
    arrays_.push_back(
        std::make_unique<DeviceBytes>(size.base + uint64_t(case_.tokens) * size.per_token));
    return buffer_of(*arrays_.back());
  }
  void build_plan() {
    auto plan_desc = sized<moec_plan_desc>();
    plan_desc.max_tokens = case_.tokens;
    plan_desc.num_experts = desc_.num_experts;
    plan_desc.top_k = desc_.top_k;
    const moec_buffer* const own = nullptr;
    plan_ = make<PlanHandle>(moec_plan_create, context_, &plan_desc, own);
    const moec_tensor ids = tensor(MOEC_I32, {case_.tokens, desc_.top_k});
    std::vector<int32_t> both;
    for (int64_t t = 0; t < case_.tokens; ++t) both.insert(both.end(), {0, 2});
    arrays_.back()->assign(both);
    check(moec_plan_from_topk(plan_.get(), &ids, nullptr, stream_));
  }
  std::vector<float> values(const DeviceBytes& array) const {
    check(moec_context_sync(context_, stream_));
    return array.host<float>();
  }

  const GpuStream stream_;
  const moec_context* const context_;
  const Case case_;
  moec_experts_desc desc_ = sized<moec_experts_desc>();
  Weights weights_;
  Experts experts_;
  PlanHandle plan_;
  moec_experts_args forward_ = sized<moec_experts_args>();
  moec_experts_grad_args backward_ = sized<moec_experts_grad_args>();
  moec_quant quants_[3];
  moec_weight_set d_weights_;
  DeviceBytes *y_, *d_down_ = nullptr;
  std::vector<std::unique_ptr<DeviceBytes>> arrays_;
};

// Mangled names of the kernels that a call queues. It has run once before, so that it only queues.
std::vector<std::string> queued(const Call& call, void (Call::*direction)() const) {
  (call.*direction)();
  call.stream().wait();
  CHECK_CUDA(cudaStreamBeginCapture(call.stream(), cudaStreamCaptureModeGlobal));
  (call.*direction)();
  cudaGraph_t graph = nullptr;
  CHECK_CUDA(cudaStreamEndCapture(call.stream(), &graph));
  size_t count = 0;
  CHECK_CUDA(cudaGraphGetNodes(graph, nullptr, &count));
  std::vector<cudaGraphNode_t> nodes(count);
  CHECK_CUDA(cudaGraphGetNodes(graph, nodes.data(), &count));
  std::vector<std::string> names;
  for (const cudaGraphNode_t node : nodes) {
    cudaGraphNodeType type;
    CHECK_CUDA(cudaGraphNodeGetType(node, &type));
    if (type != cudaGraphNodeTypeKernel) continue;
    CUDA_KERNEL_NODE_PARAMS kernel = {};
    const char* name = nullptr;
    EXPECT_EQ(MOEC_DRIVER(cuGraphKernelNodeGetParams)(node, &kernel), CUDA_SUCCESS);
    EXPECT_EQ(kernel.func ? MOEC_DRIVER(cuFuncGetName)(&name, kernel.func)
                          : MOEC_DRIVER(cuKernelGetName)(&name, kernel.kern),
              CUDA_SUCCESS);
    names.push_back(name ? name : "");
  }
  CHECK_CUDA(cudaGraphDestroy(graph));
  return names;
}

// The kernels of products as describe spells them, their functions, and whether describe has one
// entry for each launch: the products of the portable path are of several kernels.
constexpr struct Kernel {
  const char *described, *function;
  bool entry_of_each;
} kKernels[] = {{"one_token", "one_token_kernel", true},
                {"few_tokens", "small_kernel", true},
                {"sm90 row_gemm", "row_gemm_kernel", true},
                {"sm90 weight_grad", "weight_grad_kernel", true},
                {"decode_experts", "decode_experts_kernel", true},
                {"portable mma", "portable_mma_kernel", false},
                {"portable few rows", "few_rows_kernel", true},
                {"one token", "one_token_codes_kernel", true},
                {"portable plain", "portable_plain_kernel", false}};

Context context_of(const Case& c) {
  if (!c.pin) return gpu_context();
  const Pin pin(c.pin);
  return gpu_context();
}

// path: the one that is expected, on a Hopper GPU.
void expect_truth(const Json& described, const char* path,
                  const std::vector<std::string>& functions) {
  EXPECT_EQ(described.at("path").string, is_hopper() ? path : kPortable);
  for (const Kernel& kernel : kKernels) {
    // A name is mangled as its length and itself.
    const std::string function = std::to_string(std::strlen(kernel.function)) + kernel.function;
    int64_t told = 0, ran = 0;
    for (const Json& entry : described.at("kernels").array)
      told += entry.at("kernel").string == kernel.described;
    for (const std::string& name : functions) ran += name.find(function) != std::string::npos;
    if (kernel.entry_of_each)
      EXPECT_EQ(told, ran) << kernel.described;
    else
      EXPECT_EQ(told > 0, ran > 0) << kernel.described;
  }
}

constexpr Case coded_case(const char* name, const char* pin, moec_dtype dtype, int64_t tokens,
                          const char* forward, const char* backward,
                          uint32_t save = MOEC_SAVE_PREACT, uint32_t scheme = MOEC_SCHEME_INT8) {
  return {name, pin, dtype, tokens, forward, backward, 128, 64, save, false, scheme};
}

class Described : public testing::TestWithParam<Case> {};
INSTANTIATE_TEST_SUITE_P(
    Paths, Described,
    testing::Values(
        Case{"bf16_T1", nullptr, MOEC_BF16, 1, kFewTokens, kHopper},
        Case{"bf16_T4", nullptr, MOEC_BF16, 4, kFewTokens, kHopper},
        Case{"bf16_T5", nullptr, MOEC_BF16, 5, kHopper, kHopper},
        Case{"f16_T200", nullptr, MOEC_F16, 200, kHopper, kHopper},
        Case{"bf16_T1_unsaved", nullptr, MOEC_BF16, 1, kFewTokens, "", 64, 32, MOEC_SAVE_NONE},
        Case{"bf16_T8_unaligned", nullptr, MOEC_BF16, 8, kPortable, kPortable, 60, 36},
        Case{"f32_T1", nullptr, MOEC_F32, 1, kPortable, kPortable},
        Case{"f32_by_bf16_T1", nullptr, MOEC_BF16, 1, kPortable, kPortable, 64, 32,
             MOEC_SAVE_PREACT, true},
        Case{"f32_by_f16_T200", nullptr, MOEC_F16, 200, kPortable, kPortable, 64, 32,
             MOEC_SAVE_PREACT, true},
        Case{"bf16_T4_sm90", kHopper, MOEC_BF16, 4, kHopper, kHopper},
        Case{"bf16_T4_portable", kPortable, MOEC_BF16, 4, kPortable, kPortable},
        coded_case("coded_T1", nullptr, MOEC_BF16, 1, kFewRows, kFewRows),
        coded_case("coded_T1_unsaved", nullptr, MOEC_BF16, 1, kFewRows, "", MOEC_SAVE_NONE),
        coded_case("coded_T4_input", nullptr, MOEC_BF16, 4, kFewRows, kFewRows, MOEC_SAVE_INPUT),
        coded_case("coded_T200", nullptr, MOEC_BF16, 200, kHopper, kHopper),
        coded_case("coded_f16_T1", nullptr, MOEC_F16, 1, kHopper, kHopper),
        coded_case("coded_T32_few_rows", kFewRows, MOEC_BF16, 32, kFewRows, kFewRows),
        coded_case("coded_T1_sm90", kHopper, MOEC_BF16, 1, kHopper, kHopper),
        coded_case("coded_T1_portable", kPortable, MOEC_BF16, 1, kPortable, kPortable),
        coded_case("coded_T200_portable", kPortable, MOEC_BF16, 200, kPortable, kPortable),
        coded_case("q8_0_T1", nullptr, MOEC_BF16, 1, kHopper, kHopper, MOEC_SAVE_PREACT,
                   MOEC_SCHEME_GGUF_Q8_0),
        coded_case("q8_0_T200", nullptr, MOEC_F16, 200, kHopper, kHopper, MOEC_SAVE_PREACT,
                   MOEC_SCHEME_GGUF_Q8_0),
        coded_case("q8_0_T1_portable", kPortable, MOEC_BF16, 1, kPortable, kPortable,
                   MOEC_SAVE_PREACT, MOEC_SCHEME_GGUF_Q8_0),
        coded_case("q8_0_T200_portable", kPortable, MOEC_F16, 200, kPortable, kPortable,
                   MOEC_SAVE_INPUT, MOEC_SCHEME_GGUF_Q8_0)),
    [](const auto& param) { return std::string(param.param.name); });

TEST_P(Described, path_and_kernels_are_those_that_a_call_queues) {
  const Case& c = GetParam();
  if (c.pin && c.pin != kPortable && !is_hopper()) GTEST_SKIP() << "needs a Hopper GPU";
  const Context context = context_of(c);
  const Call call(context.get(), c);
  const Json described = call.describe();
  expect_truth(described.at("forward"), c.forward, queued(call, &Call::forward));
  EXPECT_EQ(described.find("backward") != nullptr, c.save != MOEC_SAVE_NONE);
  if (c.save != MOEC_SAVE_NONE)
    expect_truth(described.at("backward"), c.backward, queued(call, &Call::backward));
}

void expect_refused(const std::function<void()>& call, const char* text) {
  try {
    call();
    ADD_FAILURE() << "not refused";
  } catch (const Failure& failure) {
    EXPECT_EQ(failure.status, MOEC_E_UNSUPPORTED);
    EXPECT_NE(std::string(failure.what()).find(text), std::string::npos) << failure.what();
  }
}

TEST(Pin, that_takes_no_such_experts_is_refused_with_a_reason) {
  if (!is_hopper()) GTEST_SKIP() << "needs a device with both";
  const Case f32 = {"", kHopper, MOEC_F32, 8, "", ""};
  const Context context = context_of(f32);
  expect_refused([&] { const Call call(context.get(), f32); }, "MOEC_CUDA_KERNELS");
}

TEST(Pin, that_takes_no_such_call_is_refused_with_a_reason_and_describes_none) {
  if (!is_hopper()) GTEST_SKIP() << "needs a device with both";
  for (const Case& c : {Case{"", kFewTokens, MOEC_BF16, 200, "", ""},
                        coded_case("", kFewRows, MOEC_BF16, 200, "", ""),
                        Case{"", kFewRows, MOEC_BF16, 1, "", ""}}) {
    const Context context = context_of(c);
    const Call call(context.get(), c);
    EXPECT_EQ(call.describe().at("forward").find("path"), nullptr);
    expect_refused([&] { call.forward(); }, "MOEC_CUDA_KERNELS");
  }
}

// Forwards and backwards are counted by the path that describe names.
TEST(Stats, count_the_path_of_few_rows) {
  if (!is_hopper()) GTEST_SKIP() << "needs a Hopper GPU";
  const Context context = gpu_context();
  const Call call(context.get(), coded_case("", nullptr, MOEC_BF16, 1, kFewRows, kFewRows));
  call.forward();
  call.backward();
  auto stats = sized<moec_stats>();
  check(moec_context_stats(context.get(), &stats));
  EXPECT_EQ(stats.path_few_rows, 2u);
  EXPECT_EQ(stats.path_sm90 + stats.path_few_tokens + stats.path_portable, 0u);
}

TEST(Pin, of_an_unknown_name_is_refused_with_the_names) {
  const Pin pin("unknown");
  expect_refused([] { gpu_context(); }, kPortable);
}

// TF32 keeps ten bits of each factor: products are off by some 2^-11, never by nothing.
TEST(Math, tf32_is_for_contexts_that_ask_for_it) {
  auto desc = sized<moec_context_desc>();
  desc.device_type = MOEC_CUDA;
  desc.math = MOEC_MATH_TF32;
  const Context contexts[] = {
      gpu_context(),
      make<Context>(moec_context_create, static_cast<const moec_context_desc*>(&desc))};
  const Case c = {"", nullptr, MOEC_F32, 200, kPortable, kPortable};
  const Call exact(contexts[0].get(), c), rounded(contexts[1].get(), c);
  for (const Call* const call : {&exact, &rounded}) {
    call->forward();
    call->backward();
  }
  for (const auto values : {&Call::y, &Call::d_down}) {
    const std::vector<float> want = (exact.*values)(), got = (rounded.*values)();
    const double difference = row_error(got, want, want.size()).error;
    EXPECT_GT(difference, 1e-5);
    EXPECT_LT(difference, 2e-3);
  }
}

TEST(Tokens, none_give_gradients_of_zero) {
  const Context context = gpu_context();
  const Call call(context.get(), {"", nullptr, MOEC_F32, 0, kPortable, kPortable});
  call.forward();
  call.backward();
  EXPECT_TRUE(call.y().empty());
  EXPECT_EQ(call.d_down(), std::vector<float>(call.d_down().size(), 0.0f));
}

}  // namespace
}  // namespace moec::test
