// SPDX-License-Identifier: Apache-2.0
// Grouped products of every instruction set that this machine has against plain double loops.
// Inputs end at pages without access and are surrounded by NaN. Planted faults that were seen to
// fail: a load mask one value too wide (guard page), the last value of k left out, the last row
// panel skipped, gather indices changed, gate and up swapped. Of codes: zero points left out, the
// scale of the row before. Of fp32 that is rounded: read as it is, cut off in place of rounded.
#include <gtest/gtest.h>

#include <cstring>

#include "backend/cpu/packed_form.h"
#include "core/error.h"
#include "support/compare.h"
#include "unit/gemm_operands.h"
#include "unit/isas.h"

namespace moec::cpu {
namespace {

using test::isa_names;

struct Term {
  int a, output;  // its rows, of 3; its matrix is of its own
};
struct Terms {
  int outputs;
  std::vector<Term> terms;
};
const Terms kSingle{1, {{0, 0}}}, kPair{2, {{0, 0}, {0, 1}}}, kSum{1, {{0, 0}, {1, 0}}},
    kFour{2, {{0, 0}, {0, 1}, {1, 0}, {2, 1}}}, kLate{2, {{0, 1}, {1, 1}}};
constexpr int kMostRows = 3;

struct Case {
  const char* name;
  moec_dtype a, b;
  const Terms& kind;
  Layout layout;
  int64_t n, k;
  bool gather, transposed;
  Stored stored = {};      // b
  int32_t group_rows = 0;  // not 0: of one group alone
  int64_t k_of(int rows) const { return rows == 0 ? k : rows == 1 ? 19 : k / 2 + 1; }
};
void PrintTo(const Case& c, std::ostream* out) {
  *out << c.name;
}

constexpr Stored kRounded{true}, kByF32{false, MOEC_F32}, kByBf16{false, MOEC_BF16},
    kByF16{false, MOEC_F16};

const Case kCases[] = {
    {"bf16", MOEC_BF16, MOEC_BF16, kSingle, Layout::kOutIn, 96, 1057, false, false},
    {"bf16_odd", MOEC_BF16, MOEC_BF16, kSingle, Layout::kOutIn, 33, 31, true, false},
    {"bf16_pair", MOEC_BF16, MOEC_BF16, kPair, Layout::kOutIn, 161, 96, true, false},
    {"bf16_pair_interleaved", MOEC_BF16, MOEC_BF16, kPair, Layout::kOutInInterleaved, 33, 65, true,
     false},
    {"bf16_in_out", MOEC_BF16, MOEC_BF16, kPair, Layout::kInOut, 31, 1057, false, false},
    {"bf16_in_out_interleaved", MOEC_BF16, MOEC_BF16, kPair, Layout::kInOutInterleaved, 33, 96,
     true, false},
    {"bf16_sum_transposed", MOEC_BF16, MOEC_BF16, kSum, Layout::kOutIn, 1057, 33, false, true},
    {"bf16_four", MOEC_BF16, MOEC_BF16, kFour, Layout::kOutIn, 161, 1057, true, false},
    {"bf16_four_transposed", MOEC_BF16, MOEC_BF16, kFour, Layout::kOutIn, 95, 65, false, true},
    {"bf16_one_output_empty", MOEC_BF16, MOEC_BF16, kLate, Layout::kOutIn, 33, 65, false, false},
    {"bf16_transposed_in_out", MOEC_BF16, MOEC_BF16, kSingle, Layout::kInOut, 95, 609, false, true},
    {"f32", MOEC_F32, MOEC_F32, kSingle, Layout::kOutIn, 33, 1057, true, false},
    {"f32_pair", MOEC_F32, MOEC_F32, kPair, Layout::kOutInInterleaved, 161, 31, true, false},
    {"f32_in_out", MOEC_F32, MOEC_F32, kSingle, Layout::kInOut, 31, 33, false, false},
    {"f32_sum_transposed", MOEC_F32, MOEC_F32, kSum, Layout::kOutIn, 65, 289, false, true},
    {"f32_transposed_in_out", MOEC_F32, MOEC_F32, kSingle, Layout::kInOutInterleaved, 33, 47, true,
     true},
    {"f32_four", MOEC_F32, MOEC_F32, kFour, Layout::kInOut, 65, 609, false, false},
    {"f16", MOEC_F16, MOEC_F16, kPair, Layout::kOutIn, 33, 545, true, false},
    {"f16_in_out", MOEC_F16, MOEC_F16, kSingle, Layout::kInOut, 96, 31, false, false},
    {"f16_sum_transposed", MOEC_F16, MOEC_F16, kSum, Layout::kOutIn, 31, 161, false, true},
    {"f32_by_bf16", MOEC_F32, MOEC_BF16, kSingle, Layout::kOutIn, 65, 97, true, false},
    {"f32_by_bf16_transposed", MOEC_F32, MOEC_BF16, kSingle, Layout::kOutIn, 97, 65, false, true},
    {"bf16_by_f32", MOEC_BF16, MOEC_F32, kSingle, Layout::kInOut, 65, 97, true, false},
    {"one_value", MOEC_BF16, MOEC_BF16, kSingle, Layout::kOutIn, 1, 1, false, false},
    {"int8_bf16", MOEC_BF16, MOEC_BF16, kPair, Layout::kOutIn, 161, 1057, true, false, kByBf16},
    {"int8_bf16_interleaved", MOEC_BF16, MOEC_BF16, kPair, Layout::kOutInInterleaved, 33, 65, false,
     false, kByF32},
    {"int8_bf16_in_out", MOEC_BF16, MOEC_BF16, kFour, Layout::kInOut, 300, 545, true, false,
     kByF32},
    {"int8_bf16_in_out_interleaved", MOEC_BF16, MOEC_BF16, kSingle, Layout::kInOutInterleaved, 47,
     95, false, false, kByBf16},
    {"int8_bf16_transposed", MOEC_BF16, MOEC_BF16, kSum, Layout::kOutIn, 289, 161, false, true,
     kByBf16},
    {"int8_bf16_transposed_in_out", MOEC_BF16, MOEC_BF16, kSum, Layout::kInOut, 65, 609, true, true,
     kByF32},
    {"int8_f32", MOEC_F32, MOEC_F32, kPair, Layout::kOutIn, 65, 289, true, false, kByF32},
    {"int8_f32_transposed", MOEC_F32, MOEC_F32, kSum, Layout::kOutIn, 289, 65, false, true, kByF16},
    {"int8_f16_in_out", MOEC_F16, MOEC_F16, kSingle, Layout::kInOut, 97, 33, false, false, kByF16},
    {"int8_f16_transposed_interleaved", MOEC_F16, MOEC_F16, kSum, Layout::kOutInInterleaved, 33, 47,
     true, true, kByF32},
    {"rounded_bf16", MOEC_BF16, MOEC_BF16, kPair, Layout::kOutIn, 161, 1057, true, false, kRounded},
    {"rounded_bf16_interleaved", MOEC_BF16, MOEC_BF16, kPair, Layout::kOutInInterleaved, 33, 65,
     false, false, kRounded},
    {"rounded_bf16_in_out", MOEC_BF16, MOEC_BF16, kFour, Layout::kInOut, 300, 545, true, false,
     kRounded},
    {"rounded_bf16_in_out_interleaved", MOEC_BF16, MOEC_BF16, kSingle, Layout::kInOutInterleaved,
     47, 79, false, false, kRounded},
    {"rounded_bf16_transposed", MOEC_BF16, MOEC_BF16, kSum, Layout::kOutIn, 289, 161, false, true,
     kRounded},
    {"rounded_bf16_transposed_in_out", MOEC_BF16, MOEC_BF16, kSum, Layout::kInOut, 65, 609, true,
     true, kRounded},
    {"rounded_f16", MOEC_F16, MOEC_F16, kPair, Layout::kOutIn, 97, 289, true, false, kRounded},
    {"rounded_f16_in_out", MOEC_F16, MOEC_F16, kSingle, Layout::kInOut, 97, 33, false, false,
     kRounded},
    {"rounded_f16_transposed", MOEC_F16, MOEC_F16, kSum, Layout::kOutInInterleaved, 33, 47, true,
     true, kRounded},
    {"rounded_one_value", MOEC_BF16, MOEC_BF16, kSingle, Layout::kOutIn, 1, 1, false, false,
     kRounded},
    // Beside eight blocks of 288 rows, one of a single row.
    {"bf16_last_row", MOEC_BF16, MOEC_BF16, kPair, Layout::kOutIn, 33, 65, false, false, {}, 2305},
    {"int8_one_value", MOEC_BF16, MOEC_BF16, kSingle, Layout::kOutIn, 1, 1, false, false, kByF32},
};

// Groups of 0, 1, 4, ... rows, or one of `rows`; two unused rows follow each.
struct Groups {
  std::vector<int32_t> offsets{0}, counts{0, 1, 4, 5, 31, 33, 300, 0, 287};
  explicit Groups(int32_t rows) {
    if (rows) counts = {rows};
    for (const int32_t count : counts) offsets.push_back(offsets.back() + count + 2);
  }
  int64_t experts() const { return int64_t(counts.size()); }
  int64_t rows() const { return offsets.back(); }
};

struct Result {
  std::vector<float> c[2];
  std::vector<int> writes;
};

struct Sink {
  Result* result;
  int64_t n;
};

void collect(void* context, const FinishedTile& tile) {
  const Sink& sink = *static_cast<Sink*>(context);
  for (int64_t i = 0; i < tile.rows; ++i)
    for (int64_t j = 0; j < tile.cols; ++j) {
      const auto at = size_t((tile.row0 + i) * sink.n + tile.col0 + j);
      sink.result->c[0][at] = tile.c0[i * tile.ld + j];
      if (tile.c1) sink.result->c[1][at] = tile.c1[i * tile.ld + j];
      ++sink.result->writes[at];
    }
}

struct Problem {
  const Case& c;
  Groups groups;
  Random random;
  std::vector<int32_t> gather;
  std::unique_ptr<Rows> a[kMostRows];
  std::vector<std::unique_ptr<Weights>> b;
  std::vector<ExpertMatrix> types;
  std::vector<std::vector<char>> packed;
  GroupedGemm gemm;

  explicit Problem(const Case& test_case)
      : c(test_case), groups(c.group_rows), random(uint64_t(c.n * 131 + c.k)) {
    const int64_t tokens = c.gather ? 40 : groups.rows();
    for (int64_t r = 0; r < groups.rows(); ++r)
      gather.push_back(int32_t(random.below(tokens + 1)) - 1);
    gemm.num_experts = int32_t(groups.experts());
    gemm.group_offsets = groups.offsets.data();
    gemm.counts = groups.counts.data();
    gemm.n = c.n;
    gemm.outputs = c.kind.outputs;
    for (const Term& term : c.kind.terms) {
      const int64_t k = c.k_of(term.a);
      std::unique_ptr<Rows>& rows = a[term.a];
      if (!rows) rows = std::make_unique<Rows>(random, c.a, tokens, k, k + 3);
      b.push_back(std::make_unique<Weights>(random, c.b, c.layout, groups.experts(),
                                            c.transposed ? k : c.n, c.transposed ? c.n : k,
                                            c.stored));
      GemmRows of = rows->rows;
      if (c.gather) of.gather = gather.data();
      gemm.add({of, {&b.back()->matrix, nullptr, 0, c.transposed}, k, term.output});
    }
  }
  void use_packed() {
    if (b[0]->matrix.is_coded()) return;  // codes are packed as they lie
    types.reserve(b.size());
    for (size_t i = 0; i < b.size(); ++i) {
      packed.push_back(b[i]->pack(groups.experts()));
      types.push_back(b[i]->type());
      GemmWeight& weight = gemm.terms[i].b;
      weight.matrix = &types.back();
      weight.packed = Weights::aligned(packed.back());
      weight.packed_stride = packed_matrix_bytes(types.back(), b[i]->n, b[i]->k);
    }
  }
  double product(size_t term, int64_t e, int64_t r, int64_t j) const {
    const int source = c.kind.terms[term].a;
    const int64_t row = c.gather ? gather[size_t(r)] : r, inputs = c.k_of(source);
    double sum = 0;
    for (int64_t k = 0; row >= 0 && k < inputs; ++k) {
      const int64_t at = c.transposed ? k * c.n + j : j * inputs + k;
      sum += a[source]->values[size_t(row * inputs + k)] *
             b[term]->values[size_t(e * c.n * inputs + at)];
    }
    return sum;
  }
  std::vector<double> reference(int output) const {
    std::vector<double> result(size_t(groups.rows() * c.n), 0.0);
    for (int64_t e = 0; e < groups.experts(); ++e)
      for (int64_t i = 0; i < groups.counts[size_t(e)]; ++i)
        for (int64_t j = 0; j < c.n; ++j) {
          const int64_t r = groups.offsets[size_t(e)] + i;
          for (size_t term = 0; term < b.size(); ++term)
            if (c.kind.terms[term].output == output)
              result[size_t(r * c.n + j)] += product(term, e, r, j);
        }
    return result;
  }
  Result run(int threads) {
    const ThreadPool pool(threads);
    GuardedBuffer scratch(size_t(gemm_scratch_bytes(pool.size())));
    Result result;
    for (auto& values : result.c) values.assign(size_t(groups.rows() * c.n), 0.0f);
    result.writes.assign(size_t(groups.rows() * c.n), 0);
    Sink sink{&result, c.n};
    gemm.epilogue = collect;
    gemm.context = &sink;
    grouped_gemm(pool, gemm, scratch.data());
    return result;
  }
};

class Gemm : public testing::TestWithParam<Case> {
 protected:
  void TearDown() override { select_isa(nullptr); }
};

TEST_P(Gemm, matches_double_loops_with_the_same_bits_however_it_is_run) {
  SCOPED_TRACE(test::seed_note());
  Problem problem(GetParam()), packed(GetParam());
  packed.use_packed();
  const int outputs = GetParam().kind.outputs;
  std::vector<double> expected[2] = {problem.reference(0), {}};
  if (outputs == 2) expected[1] = problem.reference(1);
  for (const std::string& isa : isa_names()) {
    SCOPED_TRACE(isa);
    select_isa(isa.c_str());
    const Result one = problem.run(1);
    for (int i = 0; i < outputs; ++i)
      EXPECT_LE(test::row_error(one.c[i], expected[i], size_t(GetParam().n)).error, 5e-6) << i;
    for (int64_t e = 0; e < problem.groups.experts(); ++e)
      for (int64_t r = problem.groups.offsets[size_t(e)]; r < problem.groups.offsets[size_t(e) + 1];
           ++r)
        for (int64_t j = 0; j < GetParam().n; ++j)
          ASSERT_EQ(one.writes[size_t(r * GetParam().n + j)],
                    r - problem.groups.offsets[size_t(e)] < problem.groups.counts[size_t(e)])
              << r << " " << j;
    for (const int threads : {2, 5}) EXPECT_EQ(problem.run(threads).c[0], one.c[0]) << threads;
    for (const int threads : {1, 3}) {
      const Result result = packed.run(threads);
      for (int i = 0; i < 2; ++i) EXPECT_EQ(result.c[i], one.c[i]) << "packed " << threads;
    }
  }
}

std::string case_name(const testing::TestParamInfo<Case>& info) {
  return info.param.name;
}
INSTANTIATE_TEST_SUITE_P(, Gemm, testing::ValuesIn(kCases), case_name);

TEST(Pack, writes_every_byte_and_zero_tails) {
  Random random;
  const ThreadPool pool(1);
  for (const moec_dtype dtype : {MOEC_F32, MOEC_BF16, MOEC_F16}) {
    const Weights w(random, dtype, Layout::kInOut, 1, 33, 47);
    const int64_t size = dtype_bytes(dtype), block = size == 4 ? 16 : 32, per = 4 / size;
    const int64_t bytes = packed_matrix_bytes(w.matrix, 33, 47), blocks = (47 + block - 1) / block;
    EXPECT_EQ(bytes, 2 * blocks * 2048);
    const GuardedBuffer packed{size_t(bytes)};
    pack_experts(pool, w.matrix, 0, 1, 33, 47, packed.data(), bytes);
    const Weights back(random, dtype, Layout::kInOut, 1, 33, 47);
    packed_form(w.matrix).unpack(packed.data<char>(), 33, 47, back.matrix.expert(0));
    EXPECT_EQ(std::memcmp(back.matrix.values.base, w.matrix.values.base, size_t(33 * 47 * size)),
              0);
    for (int64_t n = 0; n < 64; ++n)
      for (int64_t k = 0; k < blocks * block; ++k) {
        const int64_t at = (n / 32 * blocks + k / block) * 2048 + n % 32 / 16 * 1024 +
                           k % block / per * 64 + n % 16 * 4 + k % per * size;
        const double expected = n < 33 && k < 47 ? w.values[size_t(n * 47 + k)] : 0.0;
        ASSERT_EQ(load_real(packed.data(), dtype, at / size), expected) << n << " " << k;
      }
  }
}

TEST(Isa, refuses_what_is_not_here_and_says_what_is) {
  for (const char* name : {"avx1024", "AVX2", "sse2"}) {
    try {
      select_isa(name);
      ADD_FAILURE() << name;
    } catch (const Error& error) {
      EXPECT_EQ(error.code, MOEC_E_UNSUPPORTED);
      EXPECT_NE(std::string(error.text).find(available_isas()), std::string::npos) << error.text;
      EXPECT_NE(std::string(error.text).find(name), std::string::npos) << error.text;
    }
  }
  EXPECT_EQ(isa_names().front(), "portable");
}

}  // namespace
}  // namespace moec::cpu
