// SPDX-License-Identifier: Apache-2.0
// The kernels of few tokens against plain loops, and those of one token against them, chained as
// the layer chains them. Outputs start as NaN, guard bytes surround them, tokens that nobody
// selects and rows of every second expert are NaN in turn.
//
// Faults it has caught, planted: down without its wait for up, rows stored beyond an item's end,
// the second half of k left out of down.
#include <cmath>

#include "backend/cuda/few_tokens/one_token.h"
#include "backend/cuda/few_tokens/small_gemm.h"
#include "gpu/experts_problem.h"

namespace moec::test {
namespace {

struct SmallCase {
  ExpertsCase experts;
  bool interleaved = false, biases = false;
  uint32_t activation = MOEC_ACT_SWIGLU;
};

std::vector<SmallCase> small_cases() {
  const std::vector<int> traps = {0, 1, 2, 15, 16, 17, 0, 64, 33, 65, 0, 3, 130, 8, 9};
  const int e = int(traps.size());
  const auto nobody = [](int assignments) { return std::vector<int32_t>(assignments, -1); };
  std::vector<SmallCase> cases = {
      {{{"traps_264x200", 264, 200, e, 1}, ids_of(traps)}},
      {{{"traps_gptoss", 136, 72, e, 1}, ids_of(traps)}, true, true, MOEC_ACT_GPTOSS},
      {{{"traps_aligned_to_32", 72, 136, e, 1}, ids_of(traps), 32}, false, true},
      {{{"T1_1176x200", 1176, 200, 9, 4}, {3, -1, 8, 0}}},
      {{{"T1_gptoss_aligned_to_16", 136, 72, 9, 2}, {7, 2}, 16}, true, true, MOEC_ACT_GPTOSS},
      {{{"T1_of_nobody", 256, 128, 4, 2}, nobody(2)}},
      {{{"T3_of_nobody", 256, 128, 4, 2}, nobody(6)}},
  };
  if (is_small_run()) return cases;
  const Shape wide = {"wide", 7168, 256, 64, 8}, tall = {"tall", 512, 14336, 4, 2};
  const Shape oss = {"oss", 2880, 2880, 8, 4}, qwen = {"qwen3", 2048, 768, 128, 8};
  const auto add = [&](const char* name, Shape shape, int64_t tokens) -> SmallCase& {
    const auto ids = random_routing(shape, tokens, test_seed());
    shape.name = name;
    return cases.emplace_back(SmallCase{{shape, ids}});
  };
  add("T1_7168x256", wide, 1);
  add("T1_512x14336", tall, 1);
  add("T1_2880x2880", oss, 1);
  add("qwen3_T1", qwen, 1);
  add("qwen3_T40", qwen, 40);
  SmallCase& gptoss = add("gpt_oss_T16", oss, 16);
  gptoss.interleaved = gptoss.biases = true;
  gptoss.activation = MOEC_ACT_GPTOSS;
  add("T64_7168x256", wide, 64);
  return cases;
}

struct SmallParam {
  const SmallCase* small;
  const ExpertsCase* problem;
  std::string name() const { return problem->shape.name; }
};
std::ostream& operator<<(std::ostream& out, const SmallParam& p) {
  return out << p.name();
}
// at_most: tokens.
std::vector<SmallParam> small_params(int64_t at_most = INT64_MAX) {
  static const std::vector<SmallCase> cases = small_cases();
  std::vector<SmallParam> params;
  for (const SmallCase& c : cases)
    if (int64_t(c.experts.ids.size()) / c.experts.shape.top_k <= at_most)
      params.push_back({&c, &c.experts});
  return params;
}

class FewTokens : public ExpertsTest<SmallParam> {
 protected:
  FewTokens() : small_(*GetParam().small) {
    const uint64_t seed = test_seed();
    gate_up_bias_ = normal_array<Half>(2 * experts_ * inter_, 1.0f, seed + 4);
    down_bias_ = normal_array<float>(experts_ * hidden_, 1.0f, seed + 5);
    residual_ = normal_array<Half>(tokens_ * hidden_, 1.0f, seed + 6);
    act_ = DeviceArray<Half>(rows_ * inter_);
    pre_ = DeviceArray<Half>(rows_ * 2 * inter_);
    row_values_ = DeviceArray<Half>(rows_ * hidden_);
    y_ = DeviceArray<Half>(tokens_ * hidden_);
  }

  // The two places that fill the arguments of the kernels.
  cuda::SmallArgs up_args() const {
    const PlainMatrix gate = gate_up(0, small_.interleaved);
    cuda::SmallArgs a = args_of(gate, inter_, hidden_);
    a.weights[1] = gate_up(1, small_.interleaved).values;
    a.operand = x_.data();
    a.row_token = plan_.plan.row_token;
    a.out = act_.data();
    a.pre = pre_.data();
    a.activation = activation_of(small_.activation);
    for (int part = 0; part < 2 && small_.biases; ++part) {
      a.bias[part] = {gate_up_bias_.data() + bias_at(part, 0), 2 * inter_,
                      small_.interleaved ? 2 : 1, false};
    }
    return a;
  }
  cuda::SmallArgs down_args() const {
    cuda::SmallArgs a = args_of(down(), hidden_, inter_);
    a.operand = act_.data();
    a.out = row_values_.data();
    if (small_.biases) a.bias[0] = {down_bias_.data(), hidden_, 1, true};
    a.combine = plan_.combine(hidden_, row_values_.data(), y_.data());
    a.combine.residual = residual_.data();
    return a;
  }

  void run_up() const { run(up_args(), cuda::launch_small_up); }
  void run_down() const { run(down_args(), cuda::launch_small_down); }
  // As the layer does it; waits.
  void run_chain() const {
    for (const auto* const array : {&act_, &pre_, &row_values_, &y_}) array->poison();
    plan_.build();
    run_up();
    run_down();
    CHECK_CUDA(cudaDeviceSynchronize());
  }

  // Where feature f of gate (part 0) or up lies in the biases of an expert.
  int64_t bias_at(int part, int64_t f) const {
    return small_.interleaved ? 2 * f + part : part * inter_ + f;
  }
  // Rows of experts of this parity are NaN, y of tokens with such a row too; -1: none.
  void expect_down(int parity) const {
    auto want = plain({act_.data(), inter_}, down(), hidden_, inter_);
    const auto bias = down_bias_.host();
    for (size_t i = 0; i < want.size() && small_.biases; ++i)
      want[i] += bias[sample_expert_[i / hidden_] * hidden_ + i % hidden_];
    expect_rows("rows of down", want, row_values_, hidden_, parity, false);
    EXPECT_EQ(first_difference(floats(y_.host()), combined()), -1) << "bits of combine";
    expect_guards(row_values_, "down");
    expect_guards(y_, "down");
  }
  // y of the rows that are there.
  std::vector<float> combined() const {
    const int top_k = c_.shape.top_k;
    const auto rows = floats(row_values_.host()), residual = floats(residual_.host());
    const auto weights = plan_.routing_weights();
    const auto row_of = download(plan_.plan.assignment_row, tokens_ * top_k);
    std::vector<float> y(tokens_ * hidden_);
    for (int64_t i = 0; i < tokens_ * hidden_; ++i) {
      const int64_t first = i / hidden_ * top_k;
      float sum = 0;
      for (int64_t k = first; k < first + top_k; ++k)
        if (row_of[k] >= 0)
          sum = std::fma(weights[k], rows[row_of[k] * hidden_ + i % hidden_], sum);
      y[i] = bf16(sum + residual[i]);
    }
    return y;
  }

  const SmallCase& small_;
  DeviceArray<Half> gate_up_bias_, residual_, act_, pre_, row_values_, y_;
  DeviceArray<float> down_bias_;

 private:
  cuda::SmallArgs args_of(const PlainMatrix& w, int64_t features, int64_t k_size) const {
    cuda::SmallArgs a = {};
    a.dtype = MOEC_BF16;
    a.group_offsets = plan_.plan.group_offsets;
    a.num_experts = int(experts_);
    a.features = features;
    a.k_size = a.operand_stride = k_size;
    a.weights[0] = w.values;
    a.weight_stride = w.feature;
    a.expert_stride = w.expert;
    return a;
  }
  template <typename Launch>
  void run(const cuda::SmallArgs& a, Launch launch) const {
    must_take(cuda::small_refuses(a));
    CHECK_CUDA(launch(a, multiprocessors(), nullptr));
  }
};
INSTANTIATE_TEST_SUITE_P(Kernel, FewTokens, testing::ValuesIn(small_params()), name_of<SmallParam>);

TEST_P(FewTokens, up_agrees_with_plain_loops) {
  run_chain();
  auto gate = plain(gathered(x_, hidden_), gate_up(0, small_.interleaved), inter_, hidden_);
  auto up = plain(gathered(x_, hidden_), gate_up(1, small_.interleaved), inter_, hidden_);
  const auto act = act_.host(), pre = pre_.host();
  const auto bias = floats(gate_up_bias_.host());
  RowPairs of_act(inter_), of_pre(inter_);
  std::vector<float> value(inter_);
  for (size_t i = 0; i < sample_.size(); ++i) {
    const int64_t r = sample_[i], first_bias = 2 * sample_expert_[i] * inter_;
    if (row_token_[r] < 0) continue;
    float *const g = &gate[i * inter_], *const u = &up[i * inter_];
    for (int64_t f = 0; f < inter_; ++f) {
      if (small_.biases) g[f] += bias[first_bias + bias_at(0, f)];
      if (small_.biases) u[f] += bias[first_bias + bias_at(1, f)];
      value[f] = float(plain_activation(small_.activation, g[f], u[f]).value);
    }
    of_act.add(value.data(), &act[r * inter_]);
    of_pre.add(g, &pre[r * 2 * inter_]);
    of_pre.add(u, &pre[(r * 2 + 1) * inter_]);
  }
  of_act.expect("activations", 1e-2);
  of_pre.expect("pre-activations", 5e-3);
  expect_guards(act_, "up");
  expect_guards(pre_, "up");
}

TEST_P(FewTokens, down_agrees_with_plain_loops) {
  run_chain();
  expect_down(-1);
}

TEST_P(FewTokens, down_agrees_beside_rows_of_nan) {
  run_chain();
  for (int parity = 0; parity < 2; ++parity) {
    act_ = normal_array<Half>(rows_ * inter_, 1.0f, test_seed() + 7);
    poison_rows(act_, inter_, parity);
    row_values_.poison();
    run_down();
    expect_down(parity);
  }
}

TEST_P(FewTokens, twenty_runs_have_the_same_bits) {
  run_chain();
  const auto first = y_.host<uint16_t>();
  for (int i = 1; i < 20; ++i) {
    run_chain();
    ASSERT_EQ(first_difference(y_.host<uint16_t>(), first), -1) << "run " << i;
  }
}

class OneToken : public FewTokens {};
INSTANTIATE_TEST_SUITE_P(Kernel, OneToken, testing::ValuesIn(small_params(1)), name_of<SmallParam>);

// y of the kernels of few tokens is the reference. Experts that are not hit are NaN.
TEST_P(OneToken, agrees_with_few_tokens_in_twenty_runs_of_the_same_bits) {
  run_chain();
  const auto want = floats(y_.host());
  const int64_t matrix = inter_ * hidden_;
  for (int e = 0; e < experts_; ++e) {
    if (rows_of(e) > 0) continue;
    CHECK_CUDA(cudaMemset(gate_up_.data() + 2 * e * matrix, 0xff, 2 * matrix * sizeof(Half)));
    CHECK_CUDA(cudaMemset(down_.data() + e * matrix, 0xff, matrix * sizeof(Half)));
  }
  cuda::SmallArgs up = up_args();
  up.pre = nullptr;
  must_take(cuda::one_token_refuses(up, down_args()));
  std::vector<uint16_t> first;
  for (int i = 0; i < 20; ++i) {
    act_.poison();
    y_.poison();
    plan_.build();
    CHECK_CUDA(cuda::launch_one_token(up, down_args(), multiprocessors(), nullptr));
    const auto bits = y_.host<uint16_t>();
    if (i == 0) first = bits;
    ASSERT_EQ(first_difference(bits, first), -1) << "run " << i;
  }
  RowPairs pairs(hidden_);
  pairs.add(want.data(), y_.host().data());
  pairs.expect("y of one token", 1e-2);
  expect_guards(act_, "one token");
  expect_guards(y_, "one token");
}

}  // namespace
}  // namespace moec::test
