// SPDX-License-Identifier: Apache-2.0
// Adapters merged into copies of the matrices of experts, which stay as they are: values, and codes
// of every kind that moec_quantise writes. Shown once to fail: up's factors added to the rows of
// gate, and codes of values without the adapters.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <string>

#include "golden/golden_case.h"
#include "support/adapter_set.h"
#include "support/compare.h"
#include "support/handles.h"
#include "support/quant_draw.h"
#include "support/quantise_case.h"
#include "support/skip.h"

namespace moec::test {
namespace {

using oracle::Adapter;
using oracle::Vec;

oracle::Factors factors(Random* random, int experts, int rank, int n, int k, double scale) {
  const auto draw = [&](int64_t count) {
    Vec v = random->normals(size_t(count), 0.2);
    for (double& x : v) x = oracle::round_to(oracle::Rounding::kBf16, x);
    return v;
  };
  const Vec a = draw(int64_t(experts) * rank * k);
  return {rank, scale, a, draw(int64_t(experts) * n * rank)};
}
// w [E,n,k] += scale B A
void add(const oracle::Factors& f, int n, int k, Vec* w) {
  if (!f.rank) return;
  for (size_t row = 0; row < w->size() / size_t(k); ++row)
    for (int j = 0; j < f.rank; ++j)
      for (int c = 0; c < k; ++c)
        (*w)[row * size_t(k) + size_t(c)] +=
            f.scale * f.b[row * size_t(f.rank) + size_t(j)] *
            f.a[(row / size_t(n) * size_t(f.rank) + size_t(j)) * size_t(k) + size_t(c)];
}

struct Bound {
  AdapterSet set;
  Adapters handle;
  Bound(const std::vector<Adapter>& all, int experts, int hidden, int inter,
        const AdapterLayout& layout)
      : set(all, experts, hidden, inter, layout) {
    const moec_adapters_desc desc = set.desc();
    handle = make<Adapters>(moec_adapters_create, test_context(), &desc);
    check(moec_adapters_bind(handle.get(), set.list().data(), int32_t(set.list().size())));
  }
};

// ---- values of every format
class Formats : public testing::TestWithParam<QuantCase> {};
INSTANTIATE_TEST_SUITE_P(Copy, Formats, testing::ValuesIn(kQuantCases),
                         [](const auto& one) { return std::string(one.param.name); });

TEST_P(Formats, ValuesHaveTheAdapters) {
  SCOPED_TRACE(seed_note());
  const QuantCase& c = GetParam();
  Random random(7);
  constexpr uint32_t kLayouts[] = {MOEC_GATE_SPLIT, MOEC_GATE_THEN_UP, MOEC_UP_THEN_GATE,
                                   MOEC_GATE_INTERLEAVED};
  for (const uint32_t gate_layout : kLayouts) {
    const bool turned = !c.only_out_in && (c.only_in_out || random.below(2));
    const int multiple = std::max(c.multiple_n, c.multiple_k);
    const QuantShape shape = {
        gate_layout, turned, turned, false, rounded_up(40, multiple), rounded_up(24, multiple)};
    const int H = shape.hidden, I = shape.inter;
    const QuantProblem p = random_quant_problem(c, shape, MOEC_F32, 1, &random);
    const int E = p.experts;
    Tensors tensors;
    QuantBinder binder(tensors);
    auto desc = sized<moec_weights_desc>();
    desc.num_experts = E;
    desc.gate_layout = gate_layout;
    desc.hidden = H;
    desc.inter = I;
    desc.gate_up_orientation = desc.down_orientation = turned ? MOEC_IN_OUT : MOEC_OUT_IN;
    desc.dtype = MOEC_F32;
    desc.gate_up_scheme = desc.down_scheme = uint32_t(c.scheme);
    auto set = sized<moec_weight_set>();
    const bool joined = gate_layout != MOEC_GATE_SPLIT;
    if (joined) set.gate_up = binder.matrix(p.gate_up, c.whole_shape);
    if (!joined) set.gate = binder.matrix(p.gate, c.whole_shape);
    if (!joined) set.up = binder.matrix(p.up, c.whole_shape);
    set.down = binder.matrix(p.down, c.whole_shape);
    const Weights weights = make<Weights>(moec_weights_create, test_context(), &desc);
    check(moec_weights_bind(weights.get(), &set));

    std::vector<Adapter> two(2);  // the second one has none of gate
    two[0].gate = factors(&random, E, 5, I, H, 2);
    for (Adapter& a : two) {
      a.up = factors(&random, E, 3, I, H, -0.5);
      a.down = factors(&random, E, 8, H, I, 1.5);
    }
    const Bound adapters(two, E, H, I,
                         {MOEC_GATE_SPLIT, false, false, FactorStorage::kPeft, MOEC_BF16});
    const oracle::MlpWeights before = p.dequantised();
    oracle::MlpWeights merged = before;
    for (const Adapter& a : two) {
      add(a.gate, I, H, &merged.gate);
      add(a.up, I, H, &merged.up);
      add(a.down, H, I, &merged.down);
    }
    const Vec both = golden::join_gate_up(
        {E, 2 * I, H, false}, static_cast<golden::GateLayout>(gate_layout), merged.gate, merged.up);
    const struct {
      uint32_t matrix;
      int n, k;
      const Vec& want;
    } rows[] = {{MOEC_MATRIX_GATE_UP, 2 * I, H, both},
                {MOEC_MATRIX_GATE, I, H, merged.gate},
                {MOEC_MATRIX_UP, I, H, merged.up},
                {MOEC_MATRIX_DOWN, H, I, merged.down}};
    for (const auto& row : rows)
      for (const moec_dtype type : {MOEC_F32, MOEC_BF16}) {
        if (row.matrix == MOEC_MATRIX_GATE_UP && !joined) continue;
        SCOPED_TRACE(testing::Message() << gate_layout << " " << row.matrix << " " << type);
        const moec_tensor to =
            tensors.output(type, {E, turned ? row.k : row.n, turned ? row.n : row.k});
        check(moec_adapters_merge_copy(adapters.handle.get(), weights.get(), row.matrix, &to,
                                       nullptr, nullptr));
        check(moec_context_sync(test_context(), nullptr));
        const Vec got = golden::to_out_in({E, row.n, row.k, turned}, tensors.read(to));
        const RowError error = row_error(got, row.want, size_t(row.k));
        EXPECT_LE(error.error, type == MOEC_F32 ? 2e-6 : 8e-3) << error;
      }
    EXPECT_TRUE(tensors.neighbours_untouched());
    EXPECT_GT(row_error(before.up, merged.up, size_t(H)).error, 0.05) << "the case is broken";
  }
}

// ---- codes of every kind
std::vector<QuantiseCase> kinds() {
  std::vector<QuantiseCase> cases;
  for (uint32_t which = 0; which < 8; ++which)
    for (const uint32_t flags :
         {0u, uint32_t(MOEC_QUANTISE_ASYMMETRIC), uint32_t(MOEC_QUANTISE_NESTED),
          uint32_t(MOEC_QUANTISE_SCALES2_DIVIDES)})
      for (const uint32_t orientation : {MOEC_OUT_IN, MOEC_IN_OUT}) {
        QuantiseCase c;
        c.kind = which;
        c.flags = flags;
        c.orientation = orientation;
        c.block_k = which == MOEC_QUANTISE_INT4 ? 32 : 0;
        c.num_experts = 2;
        c.out_features = 6;
        c.in_features = 96;
        const moec_quantise_desc desc = c.desc();
        auto info = sized<moec_quantise_info>();
        auto quant = sized<moec_quant>();
        if (moec_quantise_query(test_context(), &desc, &info, &quant) == MOEC_OK)
          cases.push_back(c);
      }
  return cases;
}

// Codes that a call writes, and their bytes.
struct Codes {
  Tensors tensors;
  moec_quantise_desc desc;
  moec_quantise_info info = sized<moec_quantise_info>();
  moec_quant quant = sized<moec_quant>();
  moec_quantise_args args = sized<moec_quantise_args>();
  explicit Codes(const QuantiseCase& c) : desc(c.desc()) {
    check(moec_quantise_query(test_context(), &desc, &info, &quant));
    const auto give = [&](moec_tensor* tensor) {
      *tensor = tensors.output(tensor->dtype, {tensor->shape, tensor->shape + tensor->ndim});
    };
    args.desc = &desc;
    args.codes = info.codes;
    args.quant = &quant;
    give(&args.codes);
    for (const auto& [name, tensor] : tensors_of(&quant)) give(tensor);
  }
  QuantisedBytes bytes() {
    check(moec_context_sync(test_context(), nullptr));
    QuantisedBytes found;
    found.codes = tensors.read_bytes(args.codes);
    for (const auto& [name, tensor] : tensors_of(&quant))
      found.of(name) = tensors.read_bytes(*tensor);
    EXPECT_TRUE(tensors.neighbours_untouched());
    return found;
  }
};

// Down of plain experts in codes of a case, whose other matrix is zeros.
struct CodedDown {
  Codes codes;
  moec_weights_desc desc = sized<moec_weights_desc>();
  moec_weight_set set = sized<moec_weight_set>();
  Weights weights;
  CodedDown(const QuantiseCase& c, const Vec& source) : codes(c) {
    const int64_t E = c.num_experts, N = c.out_features, K = c.in_features;
    moec_quantise_args args = codes.args;
    args.source = codes.tensors.input(source, c.dtype, c.source_shape());
    check(moec_quantise(test_context(), &args, nullptr));
    desc.num_experts = int32_t(E);
    desc.gate_layout = MOEC_GATE_NONE;
    desc.hidden = N;
    desc.inter = K;
    desc.dtype = MOEC_F32;
    desc.down_scheme = codes.info.scheme;
    desc.down_orientation = c.is_stream() ? c.orientation : uint32_t(MOEC_OUT_IN);
    set.up.data = codes.tensors.input(Vec(size_t(E * N * K), 0), MOEC_F32, {E, K, N});
    set.down.data = codes.args.codes;
    set.down.quant = &codes.quant;
    weights = make<Weights>(moec_weights_create, test_context(), &desc);
    check(moec_weights_bind(weights.get(), &set));
  }
};

Vec element_values(const QuantiseCase& c, const QuantisedBytes& bytes) {  // [E,N,K]
  Vec values;
  for (int64_t e = 0; e < c.num_experts; ++e)
    for (int64_t n = 0; n < c.out_features; ++n)
      for (int64_t k = 0; k < c.in_features; ++k)
        values.push_back(coded_element(c, bytes, e, n, k).value);
  return values;
}
double distance(const Vec& a, const Vec& b) {
  double square = 0;
  for (size_t i = 0; i < a.size(); ++i) square += (a[i] - b[i]) * (a[i] - b[i]);
  return std::sqrt(square);
}

TEST(Copy, CodesAreThoseOfTheMergedValues) {
  Random random(12);
  for (QuantiseCase base : kinds()) {
    const bool stored_turned = base.is_stream() && base.orientation == MOEC_IN_OUT;
    if (!base.is_stream()) base.orientation = MOEC_OUT_IN;
    CodedDown down(base, random.normals(base.count(), 0.1));
    const QuantisedBytes held = down.codes.bytes();
    const int E = int(base.num_experts), N = int(base.out_features), K = int(base.in_features);
    std::vector<Adapter> one(1);
    one[0].down = factors(&random, E, 4, N, K, 1);
    const Bound adapters(one, E, N, K, {MOEC_GATE_NONE});
    const Vec before = element_values(base, held);
    Vec merged = before;
    add(one[0].down, N, K, &merged);
    QuantisedBytes in_place;
    for (QuantiseCase to : kinds()) {
      if ((to.orientation == MOEC_IN_OUT) != stored_turned) continue;  // as the weights
      SCOPED_TRACE(base.text() + " -> " + to.text() + ", " + seed_note());
      Codes made(to);
      const moec_tensor values = made.tensors.output(to.dtype, to.source_shape());
      check(moec_adapters_merge_copy(adapters.handle.get(), down.weights.get(), MOEC_MATRIX_DOWN,
                                     &values, &made.args, nullptr));
      const QuantisedBytes bytes = made.bytes();
      ASSERT_TRUE(bytes == quantise(test_context(), to, made.tensors.read(values)));
      const Vec got = element_values(to, bytes);
      ASSERT_LT(distance(got, merged), 0.3 * distance(before, merged)) << "nothing was merged";
      ASSERT_TRUE(held == down.codes.bytes()) << "the weights changed";
      if (to.text() == base.text()) in_place = bytes;
    }
    const moec_tensor values = down.codes.tensors.output(base.dtype, base.source_shape());
    check(moec_adapters_merge_copy(adapters.handle.get(), down.weights.get(), MOEC_MATRIX_DOWN,
                                   &values, &down.codes.args, nullptr));
    ASSERT_TRUE(in_place == down.codes.bytes()) << base.text() << " in the place of the weights";
  }
}

// ---- what is refused
TEST(Copy, RefusesWithoutWriting) {
  Random random(3);
  QuantiseCase c;
  c.kind = MOEC_QUANTISE_NF4;
  c.num_experts = 2;
  c.out_features = c.in_features = 64;
  CodedDown down(c, random.normals(c.count(), 0.1));
  std::vector<Adapter> one(1);
  one[0].down = factors(&random, 2, 4, 64, 64, 1);
  const Bound adapters(one, 2, 64, 64, {MOEC_GATE_NONE});
  const Bound others(one, 2, 64, 64, {MOEC_GATE_SPLIT});
  Codes made(c);
  const moec_tensor values = made.tensors.output(MOEC_F32, c.source_shape());
  const std::vector<uint8_t> poison = made.tensors.read_bytes(values);
  struct Call {
    const moec_adapters* adapters;
    const moec_weights* weights;
    uint32_t matrix;
    moec_tensor values;
    moec_quantise_args args;
    moec_quantise_desc desc;
    moec_quant quant;
  };
  const auto unbound = make<Weights>(moec_weights_create, test_context(), &down.desc);
  const moec_adapters_desc of_set = adapters.set.desc();
  const auto empty = make<Adapters>(moec_adapters_create, test_context(), &of_set);
  const struct {
    const char* name;
    moec_status status;
    std::function<void(Call*)> change;
    const char* text;
  } cases[] = {
      {"no factors", MOEC_E_INVALID_ARG, [](Call* d) { d->matrix = MOEC_MATRIX_UP; },
       "no bound adapter has factors of it"},
      {"no matrix", MOEC_E_INVALID_ARG, [](Call* d) { d->matrix = MOEC_MATRIX_GATE_UP; },
       "gate_layout 4 has none"},
      {"matrix 9", MOEC_E_INVALID_ARG, [](Call* d) { d->matrix = 9; }, "matrix is 9"},
      {"unbound weights", MOEC_E_INVALID_STATE, [&](Call* d) { d->weights = unbound.get(); },
       "not bound"},
      {"unbound adapters", MOEC_E_INVALID_STATE, [&](Call* d) { d->adapters = empty.get(); },
       "not bound"},
      {"gated adapters", MOEC_E_MISMATCH, [&](Call* d) { d->adapters = others.handle.get(); },
       "gated experts"},
      {"no weights", MOEC_E_INVALID_ARG, [](Call* d) { d->weights = nullptr; }, "weights is NULL"},
      {"shape", MOEC_E_SHAPE, [](Call* d) { d->values.shape[0] = 1; }, "values"},
      {"type", MOEC_E_DTYPE, [](Call* d) { d->values.dtype = MOEC_I8; }, "values"},
      {"alias", MOEC_E_ALIAS, [&](Call* d) { d->values.data = adapters.set.list()[0].down.b.data; },
       "values"},
      {"source", MOEC_E_INVALID_ARG, [](Call* d) { d->args.source = d->values; },
       "quantised.source is given"},
      {"orientation", MOEC_E_MISMATCH,
       [](Call* d) {
         d->desc.orientation = MOEC_IN_OUT;
         std::swap(d->quant.block_n, d->quant.block_k);
       },
       "quantised.desc.orientation is 1"},
      {"kind", MOEC_E_INVALID_ARG, [](Call* d) { d->desc.kind = 8; }, "desc.kind is 8"},
      {"type of the source", MOEC_E_DTYPE, [](Call* d) { d->desc.dtype = MOEC_BF16; }, "source"},
      {"blocks", MOEC_E_INVALID_ARG, [](Call* d) { d->quant.block_k = 32; }, "quant.block_k is 32"},
      {"codes", MOEC_E_ALIAS, [](Call* d) { d->args.codes.data = d->values.data; }, "codes"},
      {"no desc", MOEC_E_INVALID_ARG, [](Call* d) { d->args.desc = nullptr; }, "quantised.desc"},
  };
  for (const auto& one_case : cases) {
    Call call = {adapters.handle.get(),
                 down.weights.get(),
                 MOEC_MATRIX_DOWN,
                 values,
                 made.args,
                 made.desc,
                 made.quant};
    call.args.desc = &call.desc;
    call.args.quant = &call.quant;
    one_case.change(&call);
    EXPECT_EQ(moec_adapters_merge_copy(call.adapters, call.weights, call.matrix, &call.values,
                                       &call.args, nullptr),
              one_case.status)
        << one_case.name << ": " << last_error();
    EXPECT_NE(last_error().find(one_case.text), std::string::npos)
        << one_case.name << ": " << last_error();
    EXPECT_EQ(made.tensors.read_bytes(values), poison) << one_case.name;
  }
  EXPECT_EQ(moec_adapters_merge_copy(adapters.handle.get(), down.weights.get(), MOEC_MATRIX_DOWN,
                                     nullptr, nullptr, nullptr),
            MOEC_E_INVALID_ARG);
}

}  // namespace
}  // namespace moec::test
