// SPDX-License-Identifier: Apache-2.0
// Grouped weight gradients and the row conversions of every instruction set against double loops.
// Planted faults that were seen to fail: empty experts left as they were, the last row of an expert
// left out, accumulation that overwrites, a store past the last column (guard page).
#include <gtest/gtest.h>

#include <cmath>

#include "backend/cpu/gemm.h"
#include "core/dtype.h"
#include "support/compare.h"
#include "support/guard.h"
#include "support/random.h"
#include "unit/isas.h"

namespace moec::cpu {
namespace {

using test::GuardedBuffer;
using test::isa_names;
using test::Random;

struct Case {
  const char* name;
  moec_dtype g, x, d;
  int64_t n, k;
  bool gather, accumulate, transposed;
  int64_t spread;  // distance of neighbouring values of d
};
void PrintTo(const Case& c, std::ostream* out) {
  *out << c.name;
}

const Case kCases[] = {
    {"bf16", MOEC_BF16, MOEC_BF16, MOEC_F32, 161, 96, true, false, false, 1},
    {"bf16_wide", MOEC_BF16, MOEC_BF16, MOEC_BF16, 33, 1057, false, false, false, 1},
    {"bf16_accumulate", MOEC_BF16, MOEC_BF16, MOEC_F32, 31, 33, true, true, false, 1},
    {"bf16_in_out", MOEC_BF16, MOEC_BF16, MOEC_BF16, 300, 65, true, false, true, 1},
    {"bf16_in_out_interleaved", MOEC_BF16, MOEC_BF16, MOEC_BF16, 65, 47, true, true, true, 2},
    {"f32", MOEC_F32, MOEC_F32, MOEC_F32, 97, 65, true, false, false, 1},
    {"f32_in_out_accumulate", MOEC_F32, MOEC_F32, MOEC_F32, 33, 31, false, true, true, 1},
    {"f16", MOEC_F16, MOEC_F16, MOEC_F16, 33, 65, true, false, false, 1},
    {"f16_accumulate", MOEC_F16, MOEC_F16, MOEC_F16, 31, 289, true, true, false, 1},
    {"f32_by_bf16", MOEC_F32, MOEC_BF16, MOEC_F32, 65, 33, true, false, false, 2},
    {"bf16_by_f32", MOEC_BF16, MOEC_F32, MOEC_F32, 47, 33, false, false, false, 1},
    {"one_value", MOEC_BF16, MOEC_BF16, MOEC_F32, 1, 1, false, false, false, 1},
};

struct Values {
  GuardedBuffer memory;
  std::vector<double> values;  // [rows, width], as rounded
  GemmRows rows;
  Values(Random& random, moec_dtype dtype, int64_t count, int64_t width)
      : memory(size_t(((count - 1) * (width + 1) + width) * dtype_bytes(dtype))),
        rows{memory.data(), dtype, width + 1, nullptr} {
    for (int64_t i = 0; i < count * width; ++i) {
      const auto value = float(random.normal());
      store_real(memory.data(), dtype, i / width * (width + 1) + i % width, value);
      values.push_back(round_real(dtype, value));
    }
  }
};

struct Problem {
  Case c;
  Random random;
  std::vector<int32_t> counts{0, 1, 4, 0, 5, 31, 33, 300}, offsets{0}, gather;
  std::unique_ptr<Values> g, x;
  std::vector<double> before, expected, terms;  // [E, n, k]; terms: roots of squares of the addends

  explicit Problem(const Case& test_case) : c(test_case), random(uint64_t(c.n * 131 + c.k)) {
    for (const int32_t count : counts) offsets.push_back(offsets.back() + count + 1);
    const int64_t rows = offsets.back(), tokens = c.gather ? 40 : rows;
    for (int64_t r = 0; r < rows; ++r) gather.push_back(int32_t(random.below(tokens + 1)) - 1);
    g = std::make_unique<Values>(random, c.g, rows, c.n);
    x = std::make_unique<Values>(random, c.x, tokens, c.k);
    if (c.gather) x->rows.gather = gather.data();
    for (size_t i = 0; i < counts.size() * size_t(c.n * c.k); ++i)
      before.push_back(round_real(c.d, float(random.normal())));
    expected = before;
    for (size_t e = 0; e < counts.size(); ++e)
      for (int64_t i = 0; i < c.n * c.k; ++i) {
        double sum = 0, squares = 0;
        for (int32_t r = offsets[e]; r < offsets[e] + counts[e]; ++r) {
          const int64_t token = c.gather ? gather[size_t(r)] : r;
          if (token < 0) continue;
          const double product =
              g->values[size_t(r * c.n + i / c.k)] * x->values[size_t(token * c.k + i % c.k)];
          sum += product;
          squares += product * product;
        }
        terms.push_back(std::sqrt(squares));
        double& value = expected[e * size_t(c.n * c.k) + size_t(i)];
        value = c.accumulate ? value + sum : sum;
      }
  }

  std::vector<float> run(int threads) const {
    ExpertMatrix d;
    d.row_stride = c.spread * (c.transposed ? 1 : c.k);
    d.col_stride = c.spread * (c.transposed ? c.n : 1);
    d.values.expert_stride = c.spread * c.n * c.k;
    d.dtype = d.values.dtype = c.d;
    const auto experts = int64_t(counts.size());
    const int64_t last = (c.n - 1) * d.row_stride + (c.k - 1) * d.col_stride;
    const GuardedBuffer memory(
        size_t(((experts - 1) * d.values.expert_stride + last + 1) * dtype_bytes(c.d)));
    d.values.base = memory.data();
    const auto each = [&](auto&& visit) {
      for (int64_t e = 0; e < experts; ++e)
        for (int64_t i = 0; i < c.n * c.k; ++i)
          visit(e * d.values.expert_stride + i / c.k * d.row_stride + i % c.k * d.col_stride,
                size_t(e * c.n * c.k + i));
    };
    if (c.accumulate)
      each([&](int64_t at, size_t i) { store_real(d.values.base, c.d, at, float(before[i])); });

    GroupedWgrad w;
    w.num_experts = int32_t(experts);
    w.group_offsets = offsets.data();
    w.counts = counts.data();
    w.n = c.n;
    w.k = c.k;
    w.g = g->rows;
    w.x = x->rows;
    w.d = &d;
    w.accumulate = c.accumulate;
    const ThreadPool pool(threads);
    const GuardedBuffer scratch(size_t(gemm_scratch_bytes(pool.size())));
    grouped_wgrad(pool, w, scratch.data());
    std::vector<float> result(expected.size());
    each([&](int64_t at, size_t i) { result[i] = load_real(d.values.base, c.d, at); });
    if (c.spread == 2) {  // what lies between belongs to somebody else
      for (int64_t i = 0; i < experts * c.n * c.k - 1; ++i)
        EXPECT_TRUE(std::isnan(load_real(d.values.base, c.d, 2 * i + 1))) << i;
    }
    return result;
  }
};

class Wgrad : public testing::TestWithParam<Case> {
 protected:
  void TearDown() override { select_isa(nullptr); }
};

TEST_P(Wgrad, matches_double_loops_with_the_same_bits_for_every_thread_count) {
  SCOPED_TRACE(test::seed_note());
  const Case& c = GetParam();
  const Problem problem(c);
  const double rounding = c.d == MOEC_F32 ? 5e-6 : c.d == MOEC_BF16 ? 4e-3 : 5e-4;
  for (const std::string& isa : isa_names()) {
    SCOPED_TRACE(isa);
    select_isa(isa.c_str());
    const std::vector<float> one = problem.run(1);
    EXPECT_LE(
        test::row_error(one, problem.expected, size_t(c.k), test::kRowFloor, problem.terms).error,
        rounding);
    const size_t matrix = size_t(c.n * c.k);
    for (const size_t empty : {size_t(0), size_t(3)})  // exactly zero, or exactly as before
      for (size_t i = empty * matrix; i < (empty + 1) * matrix; ++i)
        ASSERT_EQ(one[i], float(problem.expected[i]));
    for (const int threads : {2, 5}) EXPECT_EQ(problem.run(threads), one) << threads;
  }
}

std::string case_name(const testing::TestParamInfo<Case>& info) {
  return info.param.name;
}
INSTANTIATE_TEST_SUITE_P(, Wgrad, testing::ValuesIn(kCases), case_name);

TEST(Convert, rounds_every_value_as_the_scalar_conversions_do) {
  Random random;
  std::vector<float> values;
  for (uint32_t bits = 0; bits < 65536; ++bits)  // each 16-bit value, its neighbours and its ties
    for (const uint32_t low : {0u, 1u, 0x7fffu, 0x8000u, 0x8001u, 0xffffu})
      values.push_back(std::bit_cast<float>(bits << 16 | low));
  for (int i = 0; i < 100000; ++i)
    values.push_back(float(random.normal() * std::exp2(double(random.below(45) - 30))));
  for (const std::string& isa : isa_names()) {
    SCOPED_TRACE(isa);
    select_isa(isa.c_str());
    for (const moec_dtype dtype : {MOEC_F32, MOEC_BF16, MOEC_F16}) {
      const auto count = int64_t(values.size());
      const GuardedBuffer narrow(size_t(count * dtype_bytes(dtype))), wide(size_t(count) * 4);
      convert_from_f32(values.data(), dtype, narrow.data(), count);
      convert_to_f32(narrow.data(), dtype, wide.data<float>(), count);
      for (int64_t i = 0; i < count; ++i) {
        const float expected = round_real(dtype, values[size_t(i)]), got = wide.data<float>()[i];
        if (std::isnan(expected)) {
          ASSERT_TRUE(std::isnan(got)) << i;
        } else {
          ASSERT_EQ(std::bit_cast<uint32_t>(got), std::bit_cast<uint32_t>(expected)) << i;
        }
      }
      for (int64_t n = 0; n <= 40; ++n) {  // tails, at the end of the page
        const int64_t size = dtype_bytes(dtype);
        convert_from_f32(values.data(), dtype, narrow.data<char>() + (count - n) * size, n);
        convert_to_f32(narrow.data<char>() + (count - n) * size, dtype,
                       wide.data<float>() + count - n, n);
      }
    }
  }
  select_isa(nullptr);
}

}  // namespace
}  // namespace moec::cpu
