// SPDX-License-Identifier: Apache-2.0
// Adapters merged into the matrices of experts and taken out again, and what is refused of sets of
// adapters. Shown once to fail: the sign of unmerge.
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <limits>
#include <string>

#include "support/adapter_set.h"
#include "support/compare.h"
#include "support/handles.h"
#include "support/layer_runner.h"
#include "support/random.h"
#include "support/skip.h"

namespace moec::test {
namespace {

using oracle::Adapter;
using oracle::Factors;
using oracle::Vec;

constexpr int kExperts = 3, kHidden = 40, kInter = 24;

Vec values(Random* random, int64_t count, double scale) {
  Vec v = random->normals(size_t(count), scale);
  for (double& x : v) x = oracle::round_to(oracle::Rounding::kBf16, x);
  return v;
}
Factors factors(Random* random, int rank, int n, int k, double scale) {
  return {rank, scale, values(random, kExperts * rank * k, 0.2),
          values(random, kExperts * n * rank, 0.2)};
}
Adapter adapter(Random* random, int rank, double scale) {
  Adapter a;
  a.gate = factors(random, rank, kInter, kHidden, scale);
  a.up = factors(random, rank, kInter, kHidden, scale);
  a.down = factors(random, rank, kHidden, kInter, scale);
  return a;
}
void add(const Factors& f, int n, int k, Vec* w) {
  for (int e = 0; e < kExperts; ++e)
    for (int i = 0; i < n; ++i)
      for (int c = 0; c < k; ++c)
        for (int j = 0; j < f.rank; ++j)
          (*w)[size_t((e * n + i) * k + c)] += f.scale * f.b[size_t((e * n + i) * f.rank + j)] *
                                               f.a[size_t((e * f.rank + j) * k + c)];
}

struct Bound {
  AdapterSet set;
  Adapters handle;
  Bound(const std::vector<Adapter>& all, const AdapterLayout& layout)
      : set(all, kExperts, kHidden, kInter, layout) {
    const moec_adapters_desc desc = set.desc();
    handle = make<Adapters>(moec_adapters_create, test_context(), &desc);
    check(moec_adapters_bind(handle.get(), set.list().data(), int32_t(set.list().size())));
  }
};

TEST(Merge, AddsAndTakesAway) {
  SCOPED_TRACE(seed_note());
  Random random(3);
  const struct {
    uint32_t gate_layout, orientation;
    moec_dtype dtype;
    bool per_expert;
    double tolerance;
  } cases[] = {{MOEC_GATE_SPLIT, MOEC_OUT_IN, MOEC_F32, false, 2e-6},
               {MOEC_GATE_INTERLEAVED, MOEC_IN_OUT, MOEC_F32, true, 2e-6},
               {MOEC_GATE_THEN_UP, MOEC_OUT_IN, MOEC_BF16, false, 4e-3},
               {MOEC_UP_THEN_GATE, MOEC_IN_OUT, MOEC_F16, false, 6e-4}};
  for (const auto& c : cases) {
    SCOPED_TRACE(testing::Message() << c.gate_layout << " " << c.dtype);
    const Bound adapters({adapter(&random, 5, 2), adapter(&random, 8, -0.5)},
                         {MOEC_GATE_SPLIT, false, false, FactorStorage::kPeft, MOEC_BF16});
    oracle::MlpWeights w;
    w.gate = values(&random, kExperts * kInter * kHidden, 1);
    w.up = values(&random, kExperts * kInter * kHidden, 1);
    w.down = values(&random, kExperts * kHidden * kInter, 1);
    WeightLayout layout;
    layout.gate_layout = c.gate_layout;
    layout.gate_up_orientation = layout.down_orientation = c.orientation;
    layout.per_expert = c.per_expert;
    layout.dtype = c.dtype;
    const WeightSet set(w, kExperts, kHidden, kInter, layout, false);
    const moec_weights_desc desc = set.desc(false);
    const Weights weights = make<Weights>(moec_weights_create, test_context(), &desc);
    check(moec_weights_bind(weights.get(), set.set()));
    const auto expect = [&](const oracle::MlpWeights& want) {
      check(moec_context_sync(test_context(), nullptr));
      const oracle::MlpWeights got = set.read();
      EXPECT_LE(row_error(got.gate, want.gate, kHidden).error, c.tolerance);
      EXPECT_LE(row_error(got.up, want.up, kHidden).error, c.tolerance);
      EXPECT_LE(row_error(got.down, want.down, kInter).error, c.tolerance);
      EXPECT_TRUE(set.neighbours_untouched());
    };
    oracle::MlpWeights merged = w;
    for (const Adapter& a : adapters.set.read()) {
      add(a.gate, kInter, kHidden, &merged.gate);
      add(a.up, kInter, kHidden, &merged.up);
      add(a.down, kHidden, kInter, &merged.down);
    }
    EXPECT_GT(row_error(w.up, merged.up, kHidden).error, 0.05) << "the case itself is broken";
    check(moec_adapters_merge(adapters.handle.get(), weights.get(), nullptr));
    expect(merged);
    check(moec_adapters_unmerge(adapters.handle.get(), weights.get(), nullptr));
    expect(w);
  }
}

TEST(Merge, RefusesWhatItCannotWrite) {
  Random random(4);
  const Bound adapters({adapter(&random, 5, 2)}, {});
  auto desc = sized<moec_weights_desc>();
  desc.num_experts = kExperts;
  desc.hidden = kHidden;
  desc.inter = kInter;
  desc.dtype = MOEC_BF16;
  Weights weights = make<Weights>(moec_weights_create, test_context(), &desc);
  EXPECT_EQ(moec_adapters_merge(adapters.handle.get(), weights.get(), nullptr),
            MOEC_E_INVALID_STATE);
  Tensors tensors;
  const Vec zeros(size_t(kExperts * kInter * kHidden), 0);
  const Vec scales(size_t(kExperts * kHidden), 1);
  auto set = sized<moec_weight_set>();
  set.gate.data = set.up.data = tensors.input(zeros, MOEC_BF16, {kExperts, kInter, kHidden});
  set.up.data = tensors.input(zeros, MOEC_BF16, {kExperts, kInter, kHidden});
  set.down.data = tensors.input(zeros, MOEC_I8, {kExperts, kHidden, kInter});
  auto quant = sized<moec_quant>();
  quant.scales = tensors.input(scales, MOEC_F32, {kExperts, kHidden, 1});
  set.down.quant = &quant;
  desc.down_scheme = MOEC_SCHEME_INT8;
  weights = make<Weights>(moec_weights_create, test_context(), &desc);
  check(moec_weights_bind(weights.get(), &set));
  EXPECT_EQ(moec_adapters_merge(adapters.handle.get(), weights.get(), nullptr), MOEC_E_UNSUPPORTED);
  EXPECT_NE(last_error().find("down of the weights is quantised"), std::string::npos)
      << last_error();
  EXPECT_EQ(decode(tensors.read_bytes(set.up.data), MOEC_BF16), zeros) << "it wrote all the same";
  desc.down_scheme = MOEC_SCHEME_NONE;
  desc.num_experts = kExperts + 1;
  const Vec more(size_t((kExperts + 1) * kInter * kHidden), 0);
  set.gate.data = tensors.input(more, MOEC_BF16, {kExperts + 1, kInter, kHidden});
  set.up.data = tensors.input(more, MOEC_BF16, {kExperts + 1, kInter, kHidden});
  set.down = {};
  set.down.data = tensors.input(more, MOEC_BF16, {kExperts + 1, kHidden, kInter});
  weights = make<Weights>(moec_weights_create, test_context(), &desc);
  check(moec_weights_bind(weights.get(), &set));
  EXPECT_EQ(moec_adapters_merge(adapters.handle.get(), weights.get(), nullptr), MOEC_E_MISMATCH);
}

// ---- what is refused of a set
TEST(AdaptersErrors, NameWhatIsWrong) {
  const struct {
    const char* name;
    moec_status status;
    std::function<void(moec_adapter*)> change;
    const char* text;
  } cases[] = {
      {"rank 0", MOEC_E_SHAPE, [](moec_adapter* a) { a->down.a.shape[1] = 0; },
       "list[0].down.a has rank 0"},
      {"rank 513", MOEC_E_SHAPE, [](moec_adapter* a) { a->up.a.shape[1] = 513; },
       "expected 1 to 512"},
      {"ranks differ", MOEC_E_SHAPE, [](moec_adapter* a) { a->up.b.shape[2] = 4; }, "list[0].up.b"},
      {"experts", MOEC_E_SHAPE, [](moec_adapter* a) { a->up.a.shape[0] = 2; }, "list[0].up.a"},
      {"inputs", MOEC_E_SHAPE, [](moec_adapter* a) { a->gate.a.shape[2] = kInter; },
       "list[0].gate.a"},
      {"dimensions", MOEC_E_SHAPE, [](moec_adapter* a) { a->gate.a.ndim = 2; }, "2 dimensions"},
      {"type", MOEC_E_DTYPE, [](moec_adapter* a) { a->gate.b.dtype = MOEC_I8; }, "list[0].gate.b"},
      {"scale 0", MOEC_E_INVALID_ARG, [](moec_adapter* a) { a->down.scale = 0; },
       "list[0].down.scale is 0"},
      {"scale NaN", MOEC_E_INVALID_ARG,
       [](moec_adapter* a) { a->down.scale = std::numeric_limits<float>::quiet_NaN(); }, "scale"},
      {"no b", MOEC_E_INVALID_ARG, [](moec_adapter* a) { a->down.b = {}; },
       "list[0].down.b is absent"},
      {"no a", MOEC_E_INVALID_ARG, [](moec_adapter* a) { a->down.a = {}; },
       "list[0].down.a is absent"},
      {"reserved", MOEC_E_INVALID_ARG, [](moec_adapter* a) { a->down.reserved = 1; }, "reserved"},
      {"stride", MOEC_E_LAYOUT, [](moec_adapter* a) { a->down.a.strides[1] = -1; },
       "list[0].down.a.strides[1] is -1"},
      {"gate_up of split", MOEC_E_INVALID_ARG, [](moec_adapter* a) { a->gate_up = a->gate; },
       "gate_layout 0 has no such matrix"},
  };
  Random random(5);
  const AdapterSet set({adapter(&random, 5, 2)}, kExperts, kHidden, kInter, {});
  const moec_adapters_desc desc = set.desc();
  const Adapters handle = make<Adapters>(moec_adapters_create, test_context(), &desc);
  for (const auto& c : cases) {
    moec_adapter list = set.list()[0];
    c.change(&list);
    EXPECT_EQ(moec_adapters_bind(handle.get(), &list, 1), c.status) << c.name << last_error();
    EXPECT_NE(last_error().find(c.text), std::string::npos) << c.name << ": " << last_error();
  }
  for (const int32_t count : {0, -1, 257})
    EXPECT_EQ(moec_adapters_bind(handle.get(), set.list().data(), count), MOEC_E_INVALID_ARG);
  EXPECT_EQ(moec_adapters_bind(handle.get(), nullptr, 1), MOEC_E_INVALID_ARG);
  moec_adapters_desc wrong = desc;
  wrong.num_experts = 0;
  moec_adapters* none = nullptr;
  EXPECT_EQ(moec_adapters_create(test_context(), &wrong, &none), MOEC_E_INVALID_ARG);
  wrong = desc;
  wrong.gate_layout = 5;
  EXPECT_EQ(moec_adapters_create(test_context(), &wrong, &none), MOEC_E_INVALID_ARG);
}

TEST(AdaptersErrors, MustFitTheExperts) {
  Random random(6);
  const Bound bound({adapter(&random, 5, 2)}, {});
  auto desc = sized<moec_experts_desc>();
  desc.num_experts = kExperts;
  desc.top_k = 1;
  desc.hidden = kHidden;
  desc.inter = kInter;
  desc.dtype = MOEC_BF16;
  desc.save = MOEC_SAVE_PREACT;
  auto plain = sized<moec_experts_sizes>(), with = sized<moec_experts_sizes>();
  const Experts fitting = make<Experts>(moec_experts_create, test_context(), &desc);
  check(moec_experts_query(fitting.get(), &plain));
  check(moec_experts_query_adapters(fitting.get(), bound.handle.get(), &with));
  EXPECT_GT(with.forward_workspace.base, plain.forward_workspace.base);
  EXPECT_GT(with.backward_workspace.per_token, plain.backward_workspace.per_token);
  EXPECT_EQ(with.saved.base, plain.saved.base);
  desc.num_experts = kExperts + 1;
  const Experts more = make<Experts>(moec_experts_create, test_context(), &desc);
  EXPECT_EQ(moec_experts_query_adapters(more.get(), bound.handle.get(), &with), MOEC_E_MISMATCH);
  const moec_adapters_desc empty = bound.set.desc();
  const Adapters unbound = make<Adapters>(moec_adapters_create, test_context(), &empty);
  EXPECT_EQ(moec_experts_query_adapters(fitting.get(), unbound.get(), &with), MOEC_E_INVALID_STATE);
}

}  // namespace
}  // namespace moec::test
