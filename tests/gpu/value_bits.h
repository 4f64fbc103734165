// SPDX-License-Identifier: Apache-2.0
// Experts of codes on the kernels of one path, bit for bit beside the values that they stand for.
#pragma once

#include <cmath>
#include <numeric>
#include <string>

#include "backend/cuda/sm90/row_gemm_choice.h"
#include "harness.h"
#include "support/quant_draw.h"

namespace moec::test {

// A program adds one of its own.
class OnePath : public testing::Environment {
 public:
  OnePath(const char* name, bool needs_hopper) : name_(name), needs_hopper_(needs_hopper) {}
  void SetUp() override {
    if (needs_hopper_ && !is_hopper()) {
      std::printf("skipped: no Hopper GPU\n");
      std::exit(77);
    }
    setenv("MOEC_TEST_DEVICE", "cuda", 1);
    setenv("MOEC_CUDA_KERNELS", name_, 1);
  }

 private:
  const char* const name_;
  const bool needs_hopper_;
};

// Those of kQuantCases with such names, and integers with scales of bf16.
inline std::vector<QuantCase> cases_of(std::initializer_list<const char*> names,
                                       std::initializer_list<int> blocks_of_int4) {
  std::vector<QuantCase> all;
  for (const QuantCase& c : kQuantCases)
    for (const char* name : names)
      if (name == std::string(c.name)) all.push_back(c);
  for (const int block : blocks_of_int4)
    all.push_back({.name = block == 32 ? "int4_g32_bf16" : "int4_g128_bf16",
                   .scheme = oracle::Scheme::kInt4,
                   .block_k = block,
                   .scale_type = oracle::Number::kBf16});
  return all;
}
// Of formats whose kernels differ; other programs have other ones.
inline bool runs_when_small(const QuantCase& c) {
  const std::string name = c.name;
  return name == "codebook4_64" || (!is_under("racecheck") && (name == "mxfp4" || name == "int8"));
}

inline void expect_equal(const char* name, const oracle::Vec& got, const oracle::Vec& want) {
  ASSERT_EQ(got.size(), want.size()) << name;
  size_t count = 0, first = 0;
  for (size_t i = got.size(); i-- > 0;)
    if (got[i] != want[i]) ++count, first = i;
  EXPECT_EQ(count, 0u) << name << " of " << got.size() << ", the first at " << first << ": "
                       << got[first] << " for " << want[first];
}
// Of wide tiles (row_gemm_wide.cuh) an activation has a reciprocal of its own, so its last bit may
// be another than of plain weights, and with it y and the gradients of factors.
inline bool may_have_wide_tiles(const QuantProblem& p) {
  const int64_t rows = int64_t(p.tokens) * p.top_k, experts = p.experts;
  return p.dtype == MOEC_BF16 && rows >= cuda::kWideFromOfSmall * experts &&
         rows < cuda::kWideBelowOfSmall * experts;
}
inline void expect_alike(const char* name, const oracle::Vec& got, oracle::Vec* want, int columns) {
  if (want->empty()) return;
  const RowError worst = row_error(got, *want, size_t(columns));
  size_t others = 0;
  for (size_t i = 0; i < got.size(); ++i) others += got[i] != (*want)[i];
  EXPECT_LE(worst.error, 1e-2) << name << ": row " << worst.row;
  EXPECT_LE(others, got.size() / 200) << name;
  *want = got;
}
// Every result, to the bit: tells which differs, and where. apart: codes of a layout whose columns
// alternate may be multiplied as those of gate and of up, with other sums than plain weights there.
inline void expect_values(const QuantProblem& p, bool apart = false) {
  const QuantResults got = run(p, false);
  QuantResults want = run(p, true);
  if (apart && p.gate_layout == MOEC_GATE_INTERLEAVED && got != want) {
    QuantProblem split = p;
    split.values = p.dequantised();
    split.gate_up = {};
    split.gate_up_orientation = MOEC_IN_OUT;
    split.gate_layout = MOEC_GATE_SPLIT;
    split.adapter_layout.gate_layout = MOEC_GATE_THEN_UP;
    want = run(split, true);
  }
  ASSERT_EQ(got.status, MOEC_OK) << got.message;
  if (may_have_wide_tiles(p)) {
    expect_alike("y", got.y, &want.y, p.hidden);
    for (size_t i = 0; i < want.d_adapters.size(); ++i)
      for (auto part : {&oracle::Adapter::gate, &oracle::Adapter::up, &oracle::Adapter::down})
        for (auto factor : {&oracle::Factors::a, &oracle::Factors::b}) {
          oracle::Vec& wanted = want.d_adapters[i].*part.*factor;
          expect_alike("d_factor", got.d_adapters[i].*part.*factor, &wanted, int(wanted.size()));
        }
  }
  expect_equal("y", got.y, want.y);
  expect_equal("d_x", got.d_x, want.d_x);
  expect_equal("d_routing_weights", got.d_routing_weights, want.d_routing_weights);
  EXPECT_TRUE(got == want) << "other bits than from the values";
}

// An adapter on all matrices.
inline void adapt(QuantProblem* p, int rank, Random* random) {
  const auto factors = [&](int n, int k) {
    oracle::Factors f;
    f.rank = rank;
    f.scale = 0.5;
    f.a = random->normals(size_t(p->experts * rank * k), 1 / std::sqrt(k));
    f.b = random->normals(size_t(p->experts * n * rank), 0.5 / std::sqrt(rank));
    return f;
  };
  oracle::Adapter adapter;
  adapter.gate = factors(p->inter, p->hidden);
  adapter.up = factors(p->inter, p->hidden);
  adapter.up.a = adapter.gate.a;
  adapter.down = factors(p->hidden, p->inter);
  p->adapters = {adapter};
  const uint32_t layout =
      p->gate_layout == MOEC_GATE_SPLIT ? uint32_t(MOEC_GATE_THEN_UP) : p->gate_layout;
  p->adapter_layout = {layout, true, false, FactorStorage::kCompact, p->dtype};
}

// body(problem, turn) for each layout and orientation that the format has.
template <class Body>
void for_each_form(const QuantCase& c, int tokens, Random* random, const Body& body) {
  constexpr uint32_t kLayouts[] = {MOEC_GATE_SPLIT, MOEC_GATE_THEN_UP, MOEC_UP_THEN_GATE,
                                   MOEC_GATE_INTERLEAVED};
  const int multiple = std::lcm(8, std::lcm(c.multiple_n, c.multiple_k));
  int turn = 0;
  for (const uint32_t layout : kLayouts)
    for (const bool in_out : {false, true})
      for (const bool per_expert : {false, true}) {
        if (in_out ? c.only_out_in : c.only_in_out) continue;
        if (is_small_run() && (layout != MOEC_GATE_INTERLEAVED || !per_expert)) continue;
        const QuantShape shape = {layout,
                                  in_out,
                                  in_out,
                                  per_expert,
                                  rounded_up(turn % 2 ? 72 : 136, multiple),
                                  rounded_up(turn % 2 ? 200 : 96, multiple)};
        const moec_dtype dtype = turn % 3 == 2 ? MOEC_F16 : MOEC_BF16;
        SCOPED_TRACE("layout " + std::to_string(layout) + (in_out ? " in_out" : " out_in") +
                     (per_expert ? " per expert " : " stack ") + std::to_string(shape.hidden) +
                     " x " + std::to_string(shape.inter) + ", dtype " + std::to_string(dtype));
        QuantProblem p = random_quant_problem(c, shape, dtype, tokens, random);
        p.save = turn % 2 ? MOEC_SAVE_PREACT : MOEC_SAVE_INPUT;
        body(p, turn++);
      }
}

}  // namespace moec::test
