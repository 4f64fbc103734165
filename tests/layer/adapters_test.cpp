// SPDX-License-Identifier: Apache-2.0
// Layers with adapters against the oracle: outputs and every gradient, over layouts, storages,
// types, ranks and what else a description has; the oracle's own gradients against finite
// differences. Shown once to fail: the scale left out of d_A, narrow rows of the
// wrong adapter, gate's and up's B exchanged.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdlib>
#include <string>

#include "cases/adapter_cases.h"
#include "cases/feature_cases.h"
#include "support/adapter_check.h"
#include "support/layer_check.h"
#include "support/random.h"
#include "support/skip.h"

namespace moec::test {
namespace {

using oracle::Adapter;
using oracle::Factors;
using oracle::Vec;

constexpr int kExperts = 5;
constexpr double kTolerances[] = {2e-5, 1.2e-2, 3e-3};  // of kTypes, for gradients of factors

Vec values(const std::string& seed, int64_t count, double scale) {
  Vec v = oracle::random_values(seed, static_cast<size_t>(count), scale);
  oracle::round_to_all(&v);
  return v;
}

struct Problem {
  oracle::Config config;
  oracle::Inputs in;
  Vec d_y;

  explicit Problem(const AdapterCase& c) {
    Random random(11);
    const int E = kExperts, H = c.hidden, I = c.inter, T = c.tokens, Is = 19;
    config.router.num_experts = E;
    config.router.num_zero_experts = c.zero_experts;
    config.router.top_k = 2;
    config.router.norm = oracle::Norm::kSum;
    config.router.select = oracle::Select::kGiven;
    oracle::ExpertsConfig& e = config.experts;
    e.hidden = H;
    e.inter = I;
    e.activation.kind = e.shared_activation.kind = c.activation;
    e.weight_position = c.position;
    e.output_scale = 1.5;
    e.terms_apart = !c.on_hopper;
    in.tokens = T;
    for (int t = 0; t < T; ++t) {  // expert 3 has no rows, expert 4 few
      const int first = static_cast<int>(random.below(3));
      const int other = t % 7 == 6 && c.zero_experts ? E + 1 : (first + 1) % 3;
      in.given_ids.insert(in.given_ids.end(), {first, t < 3 ? 4 : other});
      if (c.ids) in.adapter_ids.push_back(static_cast<int>(random.below(5)) - 1);
    }
    in.x = values("x", T * H, 1);
    d_y = values("d_y", T * H, 1);
    in.gate_weight = values("router", config.router.columns() * H, 1 / std::sqrt(H));
    const auto fill = [&](const std::string& of, int experts, int inter, oracle::MlpWeights* w) {
      const bool gated = oracle::is_gated(c.activation);
      if (gated) w->gate = values(of + "gate", experts * inter * H, 1 / std::sqrt(H));
      w->up = values(of + "up", experts * inter * H, 1 / std::sqrt(H));
      w->down = values(of + "down", experts * H * inter, 1 / std::sqrt(inter));
      if (!c.biases) return;
      if (gated) w->gate_bias = values(of + "gate_bias", experts * inter, 0.5);
      w->up_bias = values(of + "up_bias", experts * inter, 0.5);
      w->down_bias = values(of + "down_bias", experts * H, 0.5);
    };
    fill("", E, I, &in.experts);
    e.shared = c.shared;
    if (c.shared != oracle::Shared::kNone) {
      e.shared_inter = Is;
      fill("shared", 1, Is, &in.shared);
      const int gates = c.shared == oracle::Shared::kSoftmax2 ? 2 : 1;
      in.shared_gate = values("shared_gate", gates * H, 1 / std::sqrt(H));
    }
    for (size_t i = 0; i < c.ranks.size(); ++i) add_adapter(c, static_cast<int>(i));
  }

  // A term of about the size of what it is added to.
  void add_adapter(const AdapterCase& c, int index) {
    const int rank = c.ranks[size_t(index)];
    const std::string seed = "adapter" + std::to_string(index);
    const auto factors = [&](const std::string& of, int N, int K) {
      Factors f;
      f.rank = rank;
      f.scale = 0.75 + index;
      f.a = values(seed + of + "a", kExperts * rank * K, 1 / std::sqrt(K));
      if (c.adapters.one_for_all)
        for (size_t i = size_t(rank * K); i < f.a.size(); ++i) f.a[i] = f.a[i - size_t(rank * K)];
      f.b = values(seed + of + "b", kExperts * N * rank, 0.5 / std::sqrt(rank));
      return f;
    };
    Adapter adapter;
    if (oracle::is_gated(c.activation)) adapter.gate = factors("gate", c.inter, c.hidden);
    adapter.up = factors("up", c.inter, c.hidden);
    adapter.down = factors("down", c.hidden, c.inter);
    if (c.adapters.fused) adapter.up.a = adapter.gate.a;
    if (c.some_absent && index == 0) adapter.gate = adapter.down = {};
    if (c.some_absent && index == 1) adapter.up = {};
    in.adapters.push_back(adapter);
  }
};

// The gradients of A as they are bound: of all experts in one, and of gate and up in one.
void join(const AdapterCase& c, int hidden, int inter, std::vector<Adapter>* adapters) {
  for (Adapter& adapter : *adapters) {
    if (c.adapters.fused)
      for (size_t i = 0; i < adapter.gate.a.size(); ++i) {
        adapter.gate.a[i] += adapter.up.a[i];
        adapter.up.a[i] = 0;
      }
    if (!c.adapters.one_for_all) continue;
    const auto sum = [](Factors* f, int in) {
      const size_t each = size_t(f->rank * in);
      for (size_t i = each; i < f->a.size(); ++i) f->a[i % each] += f->a[i];
      f->a.resize(each);
    };
    sum(&adapter.gate, hidden);
    sum(&adapter.down, inter);
    sum(&adapter.up, hidden);
    if (c.adapters.fused) adapter.up.a.assign(adapter.gate.a.size(), 0.0);
  }
}

RunOptions options_of(const AdapterCase& c, moec_dtype dtype) {
  RunOptions options;
  options.dtype = dtype;
  options.layout.gate_layout = c.gate_layout;
  options.layout.gate_up_orientation = options.layout.down_orientation = c.orientation;
  options.adapters = c.adapters;
  options.save = c.save;
  options.accumulate = c.accumulate;
  options.frozen = c.frozen;
  return options;
}

class AdaptersOf : public testing::TestWithParam<AdapterCase> {};
const auto name_of = [](const testing::TestParamInfo<AdapterCase>& one) {
  return std::string(one.param.name);
};
INSTANTIATE_TEST_SUITE_P(Layer, AdaptersOf, testing::ValuesIn(kCases), name_of);
INSTANTIATE_TEST_SUITE_P(Hopper, AdaptersOf, testing::ValuesIn(kHopperCases), name_of);

// Hopper's kernels, which have no f32, are the only ones that may run.
bool only_hoppers() {
  const char* const kernels = std::getenv("MOEC_CUDA_KERNELS");
  return kernels && std::string(kernels) == "sm90";
}

TEST_P(AdaptersOf, MatchTheOracle) {
  SCOPED_TRACE(seed_note());
  const AdapterCase& c = GetParam();
  const Problem p(c);
  for (int i = 0; i < 3; ++i) {
    const Type& type = kTypes[i];
    if (type.dtype == MOEC_F32 && only_hoppers()) continue;
    SCOPED_TRACE(type.name);
    LayerRun run = run_layer(p.config, p.in, p.d_y, {}, options_of(c, type.dtype));
    OracleRun expected = run_oracle(as_rounded(p.config, run.rounding), p.in, p.d_y, {});
    // A narrow row whose sum lies between two 16-bit values is now one, now the other: where a
    // slope is nearly 0 that is much of a small gradient.
    const bool is_f32 = type.dtype == MOEC_F32;
    expect_matches(run, expected, p.config, p.in, type.tolerance, is_f32 ? kRowFloor : kTypicalRow);
    if (run.grads.x.empty()) continue;
    join(c, c.hidden, c.inter, &expected.grads.adapters);
    expect_adapters(run.grads.adapters, expected.grads.adapters, c.hidden, c.inter, kTolerances[i]);
    // Experts without rows: exactly nothing.
    const Factors& down = run.grads.adapters[0].down;
    const int64_t each = int64_t(c.hidden) * down.rank;
    for (int64_t j = 3 * each; j < 4 * each; ++j) ASSERT_EQ(down.b[size_t(j)], 0);
  }
}

TEST_P(AdaptersOf, HaveTheSameBitsForEveryNumberOfThreads) {
  const AdapterCase& c = GetParam();
  const Problem p(c);
  RunOptions options = options_of(c, MOEC_BF16);
  options.only_bytes = true;
  options.num_threads = 1;
  const LayerRun one = run_layer(p.config, p.in, p.d_y, {}, options);
  ASSERT_EQ(one.status, MOEC_OK) << one.message;
  options.num_threads = 3;
  EXPECT_EQ(run_layer(p.config, p.in, p.d_y, {}, options).bytes, one.bytes);
}

// The oracle's gradients are the slopes of its forward.
TEST_P(AdaptersOf, GradientsOfTheOracleMatchFiniteDifferences) {
  const AdapterCase& c = GetParam();
  if (c.tokens > 100 || c.save == MOEC_SAVE_NONE) return;
  Problem p(c);
  const auto loss = [&] {
    const Vec y = oracle::forward(p.config, p.in).y;
    double sum = 0;
    for (size_t i = 0; i < y.size(); ++i) sum += y[i] * p.d_y[i];
    return sum;
  };
  const oracle::Gradients grads = run_oracle(p.config, p.in, p.d_y, {}).grads;
  Random random(5);
  const auto check = [&](const std::string& name, Vec* value, const Vec& gradient) {
    const Vec direction = random.normals(value->size()), start = *value;
    double expected = 0, size = 0;
    for (size_t i = 0; i < start.size(); ++i) {
      expected += gradient[i] * direction[i];
      size += gradient[i] * gradient[i];
    }
    const double allowed = 2e-6 * std::max(std::sqrt(size * double(start.size())), 1e-2);
    double slope = 0;
    for (const double step : {1e-5, 1e-7}) {  // the second where the first crosses a kink
      const auto at = [&](double to) {
        for (size_t i = 0; i < start.size(); ++i) (*value)[i] = start[i] + to * direction[i];
        return loss();
      };
      slope = (at(step) - at(-step)) / (2 * step);
      if (std::abs(slope - expected) <= allowed) break;
    }
    *value = start;
    EXPECT_NEAR(slope, expected, allowed) << name;
  };
  check("x", &p.in.x, grads.x);
  check("router", &p.in.gate_weight, grads.gate_weight);
  for (size_t i = 0; i < p.in.adapters.size(); ++i) {
    const auto both = [&](const char* name, Factors* f, const Factors& d) {
      if (!f->rank) return;
      check(std::string(name) + ".a", &f->a, d.a);
      check(std::string(name) + ".b", &f->b, d.b);
    };
    both("gate", &p.in.adapters[i].gate, grads.adapters[i].gate);
    both("up", &p.in.adapters[i].up, grads.adapters[i].up);
    both("down", &p.in.adapters[i].down, grads.adapters[i].down);
  }
}

}  // namespace
}  // namespace moec::test
