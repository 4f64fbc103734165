// SPDX-License-Identifier: Apache-2.0
// Every CUDA kernel against plain loops: here the row GEMMs, in weight_grad_check.cpp the weight
// gradients, in plan_check.cpp plans and combine. Errors are per row; outputs start as NaN, guard
// bytes surround them, and where rows of several experts lie side by side the neighbours are filled
// with NaN in turn.
//
// Faults it has caught: a wgmma descriptor with the cluster's address bit in its leading offset
// (every weight gradient of the second CTA), parts of the routing weight gradient written past the
// last tile, copies wholly outside a tensor whose map begins in front of it (fenced_memory.h).
// Shown to fail: windows of rows off by one (12 checks of row GEMMs, 48 of weight gradients), a
// combine that does not wait for its copies, a gradient of up that is gate's, two rows that share
// the reciprocal of an activation (the rows that feel their neighbours: 12 checks of two seeds).
#include <cmath>

#include "backend/cuda/sm90/row_gemm.h"
#include "backend/cuda/sm90/work_counters.h"
#include "gpu/fenced_memory.h"
#include "gpu/kernel_cases.h"

namespace moec::test {

const std::vector<KernelCase>& kernel_cases() {
  static const std::vector<KernelCase> all = [] {
    std::vector<KernelCase> cases;
    unsigned number = 0;
    const auto add = [&](const ExpertsCase& c) { cases.push_back({c, number++}); };
    const std::vector<int> traps = {0, 1, 15, 16, 17, 0, 127, 128, 129, 257, 0, 3, 300, 64};
    const int e = int(traps.size());
    for (const bool transposed : {false, true}) {
      number = 0;
      const auto trap = [&](const char* name, int hidden, int inter, int align = 1) {
        add({{name, hidden, inter, e, 1}, ids_of(traps), align, 1, transposed});
      };
      trap("traps_264x200", 264, 200);
      if (transposed) trap("traps_192x128", 192, 128);
      if (is_small_run()) continue;
      trap("traps_512x384", 512, 384);
      trap("traps_136x72_aligned_to_32", 136, 72, 32);
      if (transposed) {
        const Shape oss = {"gpt_oss_of_8_experts_T700", 2880, 2880, 8, 4};
        add({oss, random_routing(oss, 700, test_seed()), 1, 61, true});
      } else {
        std::vector<int> counts(40, 0);
        counts[37] = 3000;
        add({{"one_expert_of_40", 256, 320, 40, 1}, ids_of(counts), 1, 7, false});
        const Shape qwen = {"qwen3_30b_T1000", 2048, 768, 128, 8};
        add({qwen, random_routing(qwen, 1000, test_seed()), 1, 61, false});
      }
    }
    return cases;
  }();
  return all;
}

namespace {

// Not under a sanitizer, which sees by itself who strays.
class Fences : public testing::Environment {
  void SetUp() override {
    if (!is_small_run()) device_memory = {FencedMemory::take, FencedMemory::give};
  }
};
testing::Environment* const fences = testing::AddGlobalTestEnvironment(new Fences);

// What a row GEMM reads and writes.
struct Product {
  cuda::RowGemm op;
  int64_t features, k_size;
  PlainMatrix matrix;            // gate, where there are two
  const Half* second = nullptr;  // up
  int parts = 1;
  const Half *gathered = nullptr, *rows = nullptr;  // of [T, hidden], or [P, parts, k_size]
  uint32_t activation = MOEC_ACT_SWIGLU;
  bool alternating = false;
  cuda::ExpertBias bias[2] = {};
  Half *out = nullptr, *pre = nullptr, *d_pre = nullptr;
  float* d_weight_parts = nullptr;
};

struct ProductCase {
  const KernelCase* kernel;
  const ExpertsCase* problem;
  uint32_t activation;
  bool alternating;
  std::string name() const {
    return std::string(problem->shape.name) + (problem->transposed ? "_in_out_" : "_") +
           activation_name(activation) + (alternating ? "_alternating" : "");
  }
};
std::ostream& operator<<(std::ostream& out, const ProductCase& c) {
  return out << c.name();
}

std::vector<ProductCase> product_cases(std::initializer_list<std::pair<uint32_t, bool>> kinds,
                                       bool alternating_of_all_orientations = false) {
  std::vector<ProductCase> cases;
  for (const KernelCase& c : kernel_cases())
    for (const auto& [activation, alternating] : kinds)
      if (!alternating || c.experts.transposed || alternating_of_all_orientations)
        cases.push_back({&c, &c.experts, activation, alternating});
  return cases;
}

class RowGemm : public ExpertsTest<ProductCase> {
 protected:
  // The only place that fills the arguments of the kernel. launch, launches: see Way.
  void run(const Product& p, unsigned launch, unsigned launches) {
    cuda::RowGemmProblem a = plan_.row_gemm(p.op, p.features, p.k_size);
    a.parts = p.parts;
    a.weights[0] = p.matrix.values;
    a.weights[1] = p.second;
    a.weights_mn_major = p.matrix.features_are_contiguous();
    a.weight_stride = p.matrix.far_step();
    a.expert_stride = p.matrix.expert;
    a.rows = p.rows;
    a.x = p.gathered;
    a.x_stride = hidden_;
    a.activation = activation_of(p.activation);
    a.alternating = p.alternating;
    a.bias[0] = p.bias[0];
    a.bias[1] = p.bias[1];
    a.out = p.out;
    a.out_stride = p.features;
    a.pre = p.pre;
    a.d_pre = p.d_pre;
    a.d_weight_parts = p.d_weight_parts;
    const Way way(*GetParam().kernel, launch, launches);
    CHECK_CUDA(cudaMemset(counters_.data(), 0, counters_.bytes()));
    a.work_counter = way.counts() ? &counters_.data()->work : nullptr;
    a.steps = &counters_.data()->steps;
    cuda::RowGemmChoice choice = cuda::choose(a, {multiprocessors()});
    choice.tiles.shares = way.shares();
    choice.in_pace = way.paces();
    must_take(cuda::row_gemm_refuses(a));
    CHECK_CUDA(cuda::launch_row_gemm(a, choice, nullptr));
    CHECK_CUDA(cudaDeviceSynchronize());
  }

 private:
  DeviceArray<cuda::WorkCounters::Gemm> counters_{1};
};

// ---- up -----------------------------------------------------------------------------------------
class Up : public RowGemm {};
INSTANTIATE_TEST_SUITE_P(Kernel, Up,
                         testing::ValuesIn(product_cases({{MOEC_ACT_SWIGLU, false},
                                                          {MOEC_ACT_GPTOSS, false},
                                                          {MOEC_ACT_GEGLU_TANH, false},
                                                          {MOEC_ACT_SWIGLU, true},
                                                          {MOEC_ACT_GPTOSS, true}})),
                         name_of<ProductCase>);

// All but SwiGLU go with biases: gate's in f32, up's in bf16. With and without pre-activations, and
// once more with other values in all odd tokens.
TEST_P(Up, agrees_with_plain_loops) {
  const auto [kernel, problem, kind, alternating] = GetParam();
  const bool biased = kind != MOEC_ACT_SWIGLU;
  const auto gate_bias = normal_array<float>(experts_ * inter_, 0.5f, test_seed() + 11);
  const auto up_bias = normal_array<Half>(experts_ * inter_, 0.5f, test_seed() + 12);
  const DeviceArray<Half> act(rows_ * inter_), bare(rows_ * inter_), pre(rows_ * 2 * inter_);
  Product p = {cuda::RowGemm::kUp, inter_, hidden_, gate_up(0, alternating)};
  if (!alternating) p.second = gate_up(1).values;
  p.gathered = x_.data();
  p.activation = kind;
  p.alternating = alternating;
  if (biased) {
    p.bias[0] = {gate_bias.data(), inter_, 1, true};
    p.bias[1] = {up_bias.data(), inter_, 1, false};
  }
  p.out = act.data();
  p.pre = pre.data();
  run(p, 0, 1);
  p.out = bare.data();
  p.pre = nullptr;
  run(p, 0, 2);
  auto changed = x_.host();
  for (size_t i = 0; i < changed.size(); ++i)
    if (i / hidden_ % 2 == 1) changed[i] = __float2bfloat16(-3.0f * float(changed[i]));
  const DeviceArray<Half> changed_x(changed), beside(rows_ * inter_);
  p.gathered = changed_x.data();
  p.out = beside.data();
  run(p, 1, 2);

  auto gate = plain(gathered(x_, hidden_), gate_up(0, alternating), inter_, hidden_);
  auto up = plain(gathered(x_, hidden_), gate_up(1, alternating), inter_, hidden_);
  const auto gate_bias_of = gate_bias.host();
  const auto up_bias_of = floats(up_bias.host());
  const auto got = act.host(), got_pre = pre.host();
  RowPairs of_act(inter_), of_pre(inter_);
  std::vector<float> value(inter_);
  for (size_t i = 0; i < sample_.size(); ++i) {
    const int64_t r = sample_[i], first_bias = sample_expert_[i] * inter_;
    if (row_token_[r] < 0) continue;
    float *const g = &gate[i * inter_], *const u = &up[i * inter_];
    for (int f = 0; f < inter_; ++f) {
      if (biased) g[f] += gate_bias_of[first_bias + f];
      if (biased) u[f] += up_bias_of[first_bias + f];
      value[f] = float(plain_activation(kind, g[f], u[f]).value);
    }
    of_act.add(value.data(), &got[r * inter_]);
    of_pre.add(g, &got_pre[r * 2 * inter_]);
    of_pre.add(u, &got_pre[(r * 2 + 1) * inter_]);
  }
  of_act.expect("activations", 1e-2);
  of_pre.expect("pre-activations", 5e-3);
  const auto bits = act.host<uint16_t>(), bits_beside = beside.host<uint16_t>();
  EXPECT_EQ(first_difference(bits, bare.host<uint16_t>()), -1) << "without pre-activations";
  int64_t moved = 0;
  for (int64_t r = 0; r < rows_; ++r) {
    if (row_token_[r] < 0 || row_token_[r] % 2 == 1) continue;
    const auto row = bits.begin() + r * inter_;
    moved += !std::equal(row, row + inter_, bits_beside.begin() + r * inter_);
  }
  EXPECT_EQ(moved, 0) << "rows that feel their neighbours";
  expect_guards(act, "activations");
  expect_guards(pre, "pre-activations");
}

// ---- down, gradient of up: products of rows, among them NaN ------------------------------------
class Rows : public RowGemm {};
INSTANTIATE_TEST_SUITE_P(Kernel, Rows, testing::ValuesIn(product_cases({{MOEC_ACT_SWIGLU, false}})),
                         [](const auto& param) {
                           return std::string(param.param.problem->shape.name) +
                                  (param.param.problem->transposed ? "_in_out" : "");
                         });

TEST_P(Rows, down_agrees_with_plain_loops) {
  for (int parity = 0; parity < 2; ++parity) {
    const auto act = normal_array<Half>(rows_ * inter_, 1.0f, test_seed() + 4);
    poison_rows(act, inter_, parity);
    const auto bias = normal_array<Half>(experts_ * hidden_, 0.5f, test_seed() + 13);
    const bool biased = parity == 1;
    const DeviceArray<Half> y(rows_ * hidden_);
    Product p = {cuda::RowGemm::kDown, hidden_, inter_, down()};
    p.rows = act.data();
    if (biased) p.bias[0] = {bias.data(), hidden_, 1, false};
    p.out = y.data();
    run(p, parity, 2);
    auto want = plain({act.data(), inter_}, down(), hidden_, inter_);
    const auto bias_of = floats(bias.host());
    for (size_t i = 0; i < want.size() && biased; ++i)
      want[i] += bias_of[sample_expert_[i / hidden_] * hidden_ + i % hidden_];
    expect_rows(biased ? "down with bias" : "down", want, y, hidden_, parity, true);
    expect_guards(y, "down");
  }
}

TEST_P(Rows, grad_up_agrees_with_plain_loops) {
  for (int parity = 0; parity < 2; ++parity) {
    const auto d_pre = normal_array<Half>(rows_ * 2 * inter_, 1.0f, test_seed() + 5);
    poison_rows(d_pre, 2 * inter_, parity);
    const DeviceArray<Half> d_x(rows_ * hidden_);
    Product p = {cuda::RowGemm::kGradUp, hidden_, inter_, gate_up(0).transposed()};
    p.second = gate_up(1).values;
    p.parts = 2;
    p.rows = d_pre.data();
    p.out = d_x.data();
    run(p, parity, 2);
    const auto want =
        plain({d_pre.data(), 2 * inter_}, gate_up(0).transposed(), hidden_, 2 * inter_);
    expect_rows("gradient of the rows of x", want, d_x, hidden_, parity, true);
    expect_guards(d_x, "grad up");
  }
}

// ---- gradient of down ---------------------------------------------------------------------------
class GradDown : public RowGemm {};
INSTANTIATE_TEST_SUITE_P(Kernel, GradDown,
                         testing::ValuesIn(product_cases({{MOEC_ACT_SWIGLU, false},
                                                          {MOEC_ACT_GPTOSS, false},
                                                          {MOEC_ACT_GEGLU_TANH, false},
                                                          {MOEC_ACT_SWIGLU, true}},
                                                         true)),
                         name_of<ProductCase>);

// alternating: d_pre is [P, I, 2].
TEST_P(GradDown, agrees_with_plain_loops) {
  const auto [kernel, problem, kind, alternating] = GetParam();
  const auto pre = normal_array<Half>(rows_ * 2 * inter_, 1.5f, test_seed() + 6);
  const int parts = cuda::grad_down_dot_parts(inter_);
  const DeviceArray<Half> d_pre(rows_ * 2 * inter_), scaled(rows_ * inter_);
  const DeviceArray<float> d_weight(parts * rows_);
  Product p = {cuda::RowGemm::kGradDown, inter_, hidden_, down().transposed()};
  p.gathered = x_.data();  // stands for d_y
  p.activation = kind;
  p.alternating = alternating;
  p.pre = pre.data();
  p.d_pre = d_pre.data();
  p.out = scaled.data();
  p.d_weight_parts = d_weight.data();
  run(p, 0, 1);
  const auto d_act = plain(gathered(x_, hidden_), down().transposed(), inter_, hidden_);
  const auto got_pre = d_pre.host(), got = scaled.host();
  const auto saved = floats(pre.host());
  const auto got_weight = d_weight.host();
  const auto row_weight = download(plan_.plan.row_weight, rows_);
  RowPairs of_pre(inter_), of_act(inter_);
  RowError of_weight;
  std::vector<float> value(inter_), d_gate(inter_), d_up(inter_);
  for (size_t i = 0; i < sample_.size(); ++i) {
    const int64_t r = sample_[i], up = alternating ? 1 : inter_;
    if (row_token_[r] < 0) continue;
    double weight = 0, size = 0, sum = 0;
    for (int f = 0; f < inter_; ++f) {
      const double d = d_act[i * inter_ + f], w = row_weight[r];
      const Activated v =
          plain_activation(kind, saved[r * 2 * inter_ + f], saved[(r * 2 + 1) * inter_ + f]);
      value[f] = float(w * v.value);
      d_gate[f] = float(w * d * v.d_gate);
      d_up[f] = float(w * d * v.d_up);
      weight += d * v.value;
      size += std::fabs(d * v.value);
    }
    of_act.add(value.data(), &got[r * inter_]);
    of_pre.add(d_gate.data(), &got_pre[r * 2 * inter_], alternating ? 2 : 1);
    of_pre.add(d_up.data(), &got_pre[r * 2 * inter_ + up], alternating ? 2 : 1);
    for (int part = 0; part < parts; ++part) sum += got_weight[part * rows_ + r];
    const double error = std::fabs(sum - weight) / size;
    if (!(error <= of_weight.error)) of_weight = {error, r};  // NaN stays
  }
  // d_act is rounded once before it is used: half an ulp of bf16 is at most 2^-8 of each term.
  of_pre.expect("gradients of the pre-activations", 8e-3);
  of_act.expect("weighted activations", 5e-3);
  expect_within("routing weight gradients", of_weight, 4e-3);
  expect_guards(d_pre, "grad down");
  expect_guards(scaled, "grad down");
  expect_guards(d_weight, "grad down");
}

}  // namespace
}  // namespace moec::test
