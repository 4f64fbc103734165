// SPDX-License-Identifier: Apache-2.0
// Which experts are decoded once, how many at a time, and where their values lie, without a GPU.
// Mutations seen to fail: turns as full as may be, with a small last one; values of columns that
// alternate as two matrices; runs of rows that begin anywhere; places without the first row; lines
// that begin anywhere; columns with scales from eight bytes on.
#include "backend/cuda/sm90/code_lines.h"
#include "backend/cuda/sm90/decoded_product.h"

#include <gtest/gtest.h>

#include <string>

namespace moec::cuda {
namespace {

constexpr int64_t kN = 32, kK = 64;
constexpr int kExperts = 10;
alignas(16) char memory[1024];
alignas(16) char scratch_memory[12 * kN * kK];  // of three experts

TEST(DecodedOnce, FromSoManyRowsOn) {
  for (const Otherwise otherwise : {Otherwise::kRowGemm, Otherwise::kPortable})
    for (const int64_t bytes : {kSmallExpert, kSmallExpert + 1}) {
      const int64_t least = once_rows(otherwise, bytes) * kExperts;
      EXPECT_EQ(experts_at_once(least, kExperts, bytes, bytes * kExperts, otherwise), kExperts);
      EXPECT_EQ(experts_at_once(least - 1, kExperts, bytes, bytes * kExperts, otherwise), 0);
    }
  EXPECT_LT(once_rows(Otherwise::kRowGemm, 1), kOnceRows[int(Otherwise::kRowGemm)]);
  EXPECT_EQ(experts_at_once(1, kExperts, 100, 1000, Otherwise::kSlowly), kExperts);
}

TEST(DecodedOnce, InTurnsThatAreAlike) {
  const auto at_once = [](int64_t bytes) {
    return experts_at_once(1, 10, 100, bytes, Otherwise::kSlowly);
  };
  EXPECT_EQ(at_once(999), 5);  // not nine and one
  EXPECT_EQ(at_once(399), 3);
  EXPECT_EQ(at_once(199), 1);
  EXPECT_EQ(at_once(99), 0);  // no room for one
}

TEST(DecodedOnce, ScratchIsNoLargerThanTheStack) {
  EXPECT_EQ(decoded_bytes(1000, 3), 3000);
  EXPECT_EQ(decoded_bytes(1000, int64_t(1) << 40), kDecodedBytes);
}

TEST(DecodedOnce, ScratchIsNotThereForPlainWeights) {
  moec_experts_desc desc = {};
  desc.hidden = 32;
  desc.inter = 8;
  desc.expert_begin = 2;
  desc.expert_end = 5;
  desc.dtype = MOEC_BF16;
  EXPECT_EQ(decoded_bytes(desc), 3 * 2 * 32 * 8 * 2);
  desc.flags = MOEC_EXPERTS_PLAIN_WEIGHTS;
  EXPECT_EQ(decoded_bytes(desc), 0);
  desc.flags = 0;
  desc.dtype = MOEC_F32;  // whose products read codes themselves
  EXPECT_EQ(decoded_bytes(desc), 0);
}

// Part of a matrix of codes as it is bound: one of two where `step` or `first` say so.
ExpertMatrix codes(uint32_t scheme, bool out_in, quant::RowMap rows = {}) {
  const bool parts = rows.step > 1 || rows.first > 0;
  const int64_t bound_rows = (parts ? 2 : 1) * kN;
  ExpertMatrix m;
  m.scheme = scheme;
  m.dtype = MOEC_BF16;
  m.values = {memory, nullptr, bound_rows * kK, 0, MOEC_U8};
  m.row_stride = out_in ? kK : 1;
  m.col_stride = out_in ? 1 : bound_rows;
  m.rows = rows;
  m.scales.block_k = quant::BlockSize(32);
  m.bias = {memory, nullptr, kN, 0, MOEC_BF16};
  return m;
}
DecodedProduct decoded(RowGemm op, const ExpertMatrix& first, const ExpertMatrix* second) {
  RowGemmProblem p = {};
  p.op = op;
  p.dtype = MOEC_BF16;
  p.num_experts = kExperts;
  p.group_offsets = reinterpret_cast<const int32_t*>(memory);
  DecodedProduct product;
  const DecodedScratch scratch = {nullptr, nullptr, scratch_memory, 3 * 2 * kN * kK * 2};
  EXPECT_EQ(set_decoded(product, p, once_rows(Otherwise::kPortable, 1) * kExperts, kN, kK, first,
                        second, scratch, "no kernel"),
            nullptr);
  return product;
}

TEST(DecodedValues, LieAsTheCodesDo) {
  const ExpertMatrix along_k[] = {codes(MOEC_SCHEME_NVFP4, true), codes(MOEC_SCHEME_NVFP4, true)};
  DecodedProduct product = decoded(RowGemm::kUp, along_k[0], along_k + 1);
  EXPECT_EQ(product.experts.at_once, 3);  // in four turns
  EXPECT_EQ(product.experts.parts, 2);
  EXPECT_TRUE(product.experts.along_k);
  EXPECT_FALSE(product.problem.weights_mn_major);
  EXPECT_EQ(product.problem.scheme, 0u);
  EXPECT_EQ(product.problem.weights[0], scratch_memory);
  EXPECT_EQ(product.problem.weights[1], scratch_memory + kN * kK * 2);
  EXPECT_EQ(product.problem.expert_stride, 2 * kN * kK);
  EXPECT_EQ(product.problem.weight_stride, kK);
  const ExpertMatrix along_n = codes(MOEC_SCHEME_AWQ, false);
  product = decoded(RowGemm::kDown, along_n, nullptr);
  EXPECT_EQ(product.experts.at_once, 5);  // in two turns
  EXPECT_FALSE(product.experts.along_k);
  EXPECT_TRUE(product.problem.weights_mn_major);
  EXPECT_EQ(product.problem.weight_stride, kN);
}

TEST(DecodedValues, AlternateWhereGateAndUpDo) {
  const uint32_t mxfp4 = MOEC_SCHEME_MXFP4;
  const ExpertMatrix gate = codes(mxfp4, false, {0, 2}), up = codes(mxfp4, false, {1, 2});
  const DecodedProduct product = decoded(RowGemm::kUp, gate, &up);
  EXPECT_TRUE(product.experts.joined && product.problem.alternating);
  EXPECT_EQ(product.experts.parts, 1);
  EXPECT_EQ(product.experts.n, 2 * kN);
  EXPECT_EQ(product.problem.weight_stride, 2 * kN);
  const ExpertMatrix both = product.experts.source(0);
  EXPECT_EQ(both.rows.first, 0);
  EXPECT_EQ(both.rows.step, 1);
  // Of other formats they are two matrices.
  const uint32_t awq = MOEC_SCHEME_AWQ;
  const ExpertMatrix gates = codes(awq, false, {0, 2}), ups = codes(awq, false, {1, 2});
  EXPECT_FALSE(decoded(RowGemm::kUp, gates, &ups).experts.joined);
}

TEST(DecodedValues, OfATurnAreThoseOfItsExperts) {
  const ExpertMatrix m[] = {codes(MOEC_SCHEME_NVFP4, true), codes(MOEC_SCHEME_NVFP4, true)};
  const DecodedProduct product = decoded(RowGemm::kUp, m[0], m + 1);
  for (const int first : {0, 3, 6, 9}) {
    const RowGemmProblem p = problem_of_turn(product, first, 3);
    EXPECT_EQ(p.weights[0], scratch_memory);
    EXPECT_EQ(p.weights[1], scratch_memory + kN * kK * 2);
    EXPECT_EQ(p.group_offsets, product.problem.group_offsets + first);
    EXPECT_EQ(p.bias[1].base, memory + first * kN * 2);
    EXPECT_EQ(p.num_experts, 3);
    EXPECT_EQ(p.factors[0], nullptr);
  }
}

TEST(CodeRunsOf, AFormatInOneTensorAndInMany) {
  const auto runs = [](const ExpertMatrix& m, bool along_k) {
    return code_runs(m, along_k, begins_in_words(m.values, 1));
  };
  CodeRuns of = runs(codes(MOEC_SCHEME_NVFP4, true), true);
  EXPECT_TRUE(of.whole && of.one_block);
  ExpertMatrix m = codes(MOEC_SCHEME_NVFP4, true);
  m.row_stride = kK + 4;
  EXPECT_FALSE(runs(m, true).whole);
  m = codes(MOEC_SCHEME_NVFP4, true);
  m.values.base = memory + 4;
  EXPECT_FALSE(runs(m, true).whole);
  m = codes(MOEC_SCHEME_INT4, true);
  int32_t groups[kK] = {};
  m.group_index = {groups, nullptr, kK, 0, MOEC_I32};
  of = runs(m, true);
  EXPECT_TRUE(of.whole && !of.one_block);
  of = runs(codes(MOEC_SCHEME_AWQ, false), false);  // each column has a scale
  EXPECT_TRUE(of.whole && !of.one_block);
  EXPECT_FALSE(runs(codes(MOEC_SCHEME_AWQ, false, {1, 2}), false).whole);
  EXPECT_TRUE(runs(codes(MOEC_SCHEME_AWQ, false, {kN, 1}), false).whole);
  of = runs(codes(MOEC_SCHEME_GPTQ, false), false);
  EXPECT_TRUE(of.whole && !of.one_block);
  of = runs(codes(MOEC_SCHEME_GGUF_Q4_0, true), true);
  EXPECT_TRUE(of.whole && of.one_block);
}

TEST(CodePlacesOf, RowsAreThoseOfTheBoundMatrix) {
  const CodePlaces rows = code_places(codes(MOEC_SCHEME_MXFP4, true, {1, 2}), true);
  EXPECT_EQ(rows.first, kK);
  EXPECT_EQ(rows.line, 2 * kK);
  const CodePlaces columns = code_places(codes(MOEC_SCHEME_MXFP4, false, {kN, 1}), false);
  EXPECT_EQ(columns.first, kN);
  EXPECT_EQ(columns.line, 2 * kN);
  const CodePlaces bytes = code_places(codes(MOEC_SCHEME_FP8, true, {1, 2}), true);
  EXPECT_EQ(bytes.first, 0);  // of bytes the matrix begins at its own first row
  EXPECT_EQ(bytes.line, kK);
}

TEST(DecodedLines, AreWholeRunsOfEight) {
  const auto in_lines = [](const ExpertMatrix& m) {
    DecodedProduct product = {};
    product.experts.from[0] = &m;
    product.experts.parts = 1;
    product.experts.along_k = m.col_stride == 1;
    product.problem.num_experts = 1;
    CodedLines lines;
    return set_decoded_lines(lines, product);
  };
  ExpertMatrix m = codes(MOEC_SCHEME_MXFP4, true);
  m.scales.col_stride = 1;
  EXPECT_TRUE(in_lines(m));
  m.values.base = memory + 4;
  EXPECT_FALSE(in_lines(m));
  m = codes(MOEC_SCHEME_INT8, true);
  m.scales.col_stride = 1;
  m.scales.block_k = quant::BlockSize::all_of(kK);
  EXPECT_TRUE(in_lines(m));
  m.zeros.array = m.values;
  EXPECT_FALSE(in_lines(m));
  EXPECT_FALSE(in_lines(codes(MOEC_SCHEME_NVFP4, true)));
}

TEST(DecodedLines, OfStreamsInTurnHaveScalesOfEachExpert) {
  ExpertMatrix m = codes(MOEC_SCHEME_CODEBOOK4, true);
  m.scales.array.expert_stride = 7;
  CodedLines lines;
  for (const int64_t of_one : {int64_t(0), kN * kK}) {  // several streams, or one of all experts
    m.expert_codes = of_one;
    ASSERT_EQ(set_lines(lines, 0, m, false), nullptr);
    EXPECT_EQ(lines.scales[0].expert_stride, of_one ? of_one / m.scales.block_k.size() : 7);
  }
}

TEST(Columns, AreReadTogetherFromSixteenBytesOn) {
  ExpertMatrix m = codes(MOEC_SCHEME_AWQ, false);
  m.scales.array = {memory, nullptr, kN * kK / 32, 0, MOEC_F16};
  m.aligned = m.scales_aligned = true;
  m.scales.row_stride = 1;
  m.scales.col_stride = kN;
  EXPECT_TRUE(has_columns(m, false));
  EXPECT_FALSE(has_columns(m, true));
  m.scales_aligned = false;
  EXPECT_FALSE(has_columns(m, false));
  m.scales_aligned = true;
  m.rows = {4, 1};
  EXPECT_FALSE(has_columns(m, false));
  m.rows = {0, 1};
  m.scales.block_k = quant::BlockSize(4);  // lines of a run in two groups
  EXPECT_FALSE(has_columns(m, false));
  m.scheme = MOEC_SCHEME_GPTQ;  // which has a word of each column
  EXPECT_TRUE(has_columns(m, false) && !has_groups_of_runs(m));
}

}  // namespace
}  // namespace moec::cuda
