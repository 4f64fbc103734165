// SPDX-License-Identifier: Apache-2.0
// How Hopper's row GEMMs are cut and dealt, and what they read of a matrix, without a GPU.
// Mutations seen to fail: tiles of the whole width in turn, without wider ones; sharing by the k of
// both parts; kernels of few rows for lines along the features.
#include <gtest/gtest.h>

#include <string>

#include "row_gemm_case.h"

namespace moec::cuda {
namespace {

constexpr RowGemm kAll[] = {RowGemm::kUp, RowGemm::kDown, RowGemm::kGradUp, RowGemm::kGradDown};

TEST(RowGemmChoice, NineTilesOfFourBlocksAndThreeOfThree) {
  const RowGemmTiles tiles = choose(problem(RowGemm::kDown, 1000, 45 * 64, 64), kDevice).tiles;
  EXPECT_EQ(tiles.feature_tiles, 12);
  EXPECT_EQ(tiles.tile_blocks, 3);
  EXPECT_EQ(tiles.wider_tiles, 9);
}

TEST(RowGemmChoice, TilesHoldEachBlockOnce) {
  for (const RowGemm op : kAll)
    for (int64_t features = 8; features < 5000; features += 8) {
      const RowGemmTiles tiles = choose(problem(op, 10, features, features), kDevice).tiles;
      const int64_t blocks = (features + 63) / 64;
      ASSERT_EQ(int64_t(tiles.feature_tiles) * tiles.tile_blocks + tiles.wider_tiles, blocks);
      ASSERT_LT(tiles.wider_tiles, tiles.feature_tiles);
      ASSERT_LE(tiles.tile_blocks + (tiles.wider_tiles > 0), op == RowGemm::kUp ? 2 : 4);
      ASSERT_GE(tiles.tile_blocks, 1);
    }
}

TEST(RowGemmChoice, BlocksOfKBeginAnewInEachPart) {
  const RowGemmTiles tiles = choose(problem(RowGemm::kGradUp, 10, 256, 200), kDevice).tiles;
  EXPECT_EQ(tiles.k_blocks_of_part, 4);
  EXPECT_EQ(tiles.k_blocks, 8);
}

TEST(RowGemmChoice, NarrowRowsAreBlocksOfKBehindTheOthers) {
  for (const RowGemm op : kAll) {
    RowGemmProblem p = problem(op, 10, 200, 136);
    const RowGemmChoice without = choose(p, kDevice);
    EXPECT_EQ(without.tiles.narrow_from, without.tiles.k_blocks);
    for (const int64_t rank : {8, 16, 64, 72, 128}) {
      p.rank = rank;
      const RowGemmChoice with = choose(p, kDevice);
      EXPECT_EQ(with.tiles.narrow_from, without.tiles.k_blocks);
      EXPECT_EQ(with.tiles.k_blocks, without.tiles.k_blocks + (rank > 64 ? 2 : 1));
      EXPECT_EQ(with.tiles.feature_tiles, without.tiles.feature_tiles);
      EXPECT_EQ(with.in_pace, without.in_pace);
    }
  }
}

TEST(RowGemmChoice, DownWaitsForTheTilesOfUp) {
  for (const int64_t inter : {8, 64, 128, 136, 768, 2880}) {
    const int up = choose(problem(RowGemm::kUp, 10, 512, inter), kDevice).tiles.feature_tiles;
    EXPECT_EQ(choose(problem(RowGemm::kDown, 10, 512, inter), kDevice).tiles.done_tiles, up);
  }
}

TEST(RowGemmChoice, AllOperationsOfAnMlpShareFromTheSameRowsOn) {
  const int64_t hidden = 2048, inter = 1024, least = int64_t(kSharedProducts / (2048 * 1024)) + 1;
  for (const RowGemm op : kAll) {
    EXPECT_TRUE(choose(problem(op, least, hidden, inter), kDevice).tiles.shares);
    EXPECT_FALSE(choose(problem(op, least - 1, hidden, inter), kDevice).tiles.shares);
  }
  RowGemmProblem alternating = problem(RowGemm::kGradUp, least - 1, hidden, 2 * inter);
  alternating.parts = 1;
  EXPECT_FALSE(choose(alternating, kDevice).tiles.shares);
}

TEST(RowGemmChoice, LongTilesKeepPace) {
  EXPECT_FALSE(choose(problem(RowGemm::kDown, 10, 64, kLongTile - 64), kDevice).in_pace);
  EXPECT_TRUE(choose(problem(RowGemm::kDown, 10, 64, kLongTile), kDevice).in_pace);
  EXPECT_TRUE(choose(problem(RowGemm::kGradUp, 10, 64, kLongTile / 2), kDevice).in_pace);
}

TEST(RowGemmChoice, BandsHoldSixteenMebibytesOfRowsOrEightTwos) {
  EXPECT_EQ(choose(problem(RowGemm::kDown, 10, 64, 1024), kDevice).tiles.band_length, 32);
  EXPECT_EQ(choose(problem(RowGemm::kDown, 10, 64, 16384), kDevice).tiles.band_length, 8);
}

TEST(RowGemmChoice, PairsOfCtas) {
  const RowGemmProblem p = problem(RowGemm::kUp, 10, 64, 64);
  EXPECT_EQ(choose(p, {132}).ctas, 132);
  EXPECT_EQ(choose(p, {131}).ctas, 130);
  EXPECT_EQ(choose(p, {1}).ctas, 2);
}

// Codes of 128 experts.
RowGemmProblem few(RowGemm op, int64_t rows) {
  RowGemmProblem p = problem(op, rows, 2048, 768);
  p.dtype = MOEC_BF16;
  p.scheme = MOEC_SCHEME_MXFP4;
  p.num_experts = 128;
  return p;
}

TEST(RowGemmChoice, FewRowsOfCodesHaveKernelsOfTwoCtas) {
  const int64_t most = kFewOnAverage * 128;
  for (const RowGemm op : kAll) {
    EXPECT_EQ(choose(few(op, most), kDevice).few_rows, !is_gradient(op));
    EXPECT_EQ(choose(few(op, most), kDevice).ctas, is_gradient(op) ? 132 : 264);
    EXPECT_FALSE(choose(few(op, most + 1), kDevice).few_rows);
  }
}

TEST(RowGemmChoice, FewRowsOfOtherFormsHaveTheKernelsOfMany) {
  const auto taken = [](auto change) {
    RowGemmProblem p = few(RowGemm::kUp, 10);
    change(p);
    return choose(p, kDevice).few_rows;
  };
  EXPECT_TRUE(taken([](auto& p) { p.scheme = MOEC_SCHEME_INT8; }));
  EXPECT_TRUE(taken([](auto& p) { p.dtype = MOEC_F16; }));
  EXPECT_TRUE(taken([](auto& p) { p.pre = &p; }));
  EXPECT_FALSE(taken([](auto& p) { p.weights_mn_major = true; }));
  EXPECT_FALSE(taken([](auto& p) { p.rank = 16; }));
}

// ---- what the matrices say ----------------------------------------------------------------------

constexpr int64_t kInter = 32, kHidden = 64;
alignas(16) char memory[4 * kInter * kHidden * 2];

ExpertMatrix matrix(int64_t row_stride, int64_t col_stride, int64_t first = 0) {
  ExpertMatrix m;
  m.dtype = m.values.dtype = MOEC_BF16;
  m.values.base = memory + first * 2;
  m.values.expert_stride = 2 * kInter * kHidden;
  m.row_stride = row_stride;
  m.col_stride = col_stride;
  return m;
}
ExpertMatrix coded(ExpertMatrix m, int64_t scale_stride, int64_t first) {
  m.scheme = MOEC_SCHEME_INT8;
  m.values.dtype = MOEC_I8;
  m.values.base = memory + first;
  m.scales.array.base = memory + 2 * first;
  m.scales.array.dtype = MOEC_BF16;
  m.scales.array.expert_stride = 2 * kInter;
  m.scales.row_stride = scale_stride;
  m.scales.block_k = quant::BlockSize::all_of(kHidden);
  return m;
}
RowGemmProblem empty(RowGemm op) {
  RowGemmProblem p = {};
  p.op = op;
  p.dtype = MOEC_BF16;
  return p;
}

TEST(RowGemmMatrices, GateAndUpInFrontOfEachOther) {
  const ExpertMatrix gate = matrix(kHidden, 1), up = matrix(kHidden, 1, kInter * kHidden);
  RowGemmProblem p = empty(RowGemm::kUp);
  ASSERT_EQ(set_matrices(p, kInter, kHidden, gate, &up), nullptr);
  EXPECT_EQ(p.features, kInter);
  EXPECT_EQ(p.k_size, kHidden);
  EXPECT_FALSE(p.weights_mn_major || p.alternating);
  EXPECT_EQ(p.weight_stride, kHidden);
  EXPECT_EQ(p.weights[1], memory + 2 * kInter * kHidden);
  p = empty(RowGemm::kGradUp);
  ASSERT_EQ(set_matrices(p, kInter, kHidden, gate, &up), nullptr);
  EXPECT_EQ(p.features, kHidden);
  EXPECT_EQ(p.k_size, kInter);
  EXPECT_EQ(p.parts, 2);
  EXPECT_TRUE(p.weights_mn_major);
}

TEST(RowGemmMatrices, ColumnsOfGateAndUpInTurn) {
  const ExpertMatrix gate = coded(matrix(2, 2 * kInter), 2, 0);
  const ExpertMatrix up = coded(matrix(2, 2 * kInter), 2, 1);
  RowGemmProblem p = empty(RowGemm::kUp);
  ASSERT_EQ(set_matrices(p, kInter, kHidden, gate, &up), nullptr);
  EXPECT_TRUE(p.alternating && p.weights_mn_major);
  EXPECT_EQ(p.lines.decode, LineDecode::kSigned);
  EXPECT_EQ(p.channels[0].scales.stride, 1);
  p = empty(RowGemm::kGradUp);
  ASSERT_EQ(set_matrices(p, kInter, kHidden, gate, &up), nullptr);
  EXPECT_EQ(p.parts, 1);
  EXPECT_EQ(p.k_size, 2 * kInter);
  ExpertMatrix apart = up;
  apart.scales.array.base = memory + 512;
  EXPECT_NE(set_matrices(p, kInter, kHidden, gate, &apart), nullptr);
}

// Part of a gate_up of nibbles as it is bound: everything but `rows` is that of the whole matrix.
ExpertMatrix nibbles(uint32_t scheme, bool out_in, quant::RowMap rows, int64_t block) {
  const int64_t bound_rows = 2 * kInter;
  ExpertMatrix m;
  m.dtype = MOEC_BF16;
  m.scheme = scheme;
  m.values = {memory, nullptr, bound_rows * kHidden / 2, 0, MOEC_U8};
  m.row_stride = out_in ? kHidden : 1;
  m.col_stride = out_in ? 1 : bound_rows;
  m.rows = rows;
  const bool stream = scheme == MOEC_SCHEME_CODEBOOK4;
  m.scales.array = {memory, nullptr, bound_rows * kHidden / block, 0, MOEC_F8_E8M0};
  m.scales.row_stride = out_in ? kHidden / block : 1;
  m.scales.col_stride = out_in ? 1 : bound_rows / block;
  (out_in || stream ? m.scales.block_k : m.scales.block_n) = quant::BlockSize(block);
  if (stream) {
    m.scales.array.dtype = MOEC_F32;
    m.expert_codes = bound_rows * kHidden;
    m.codebook = reinterpret_cast<const float*>(memory);
  }
  return m;
}

TEST(RowGemmMatrices, NibblesOfRowsThatAlternate) {
  const ExpertMatrix gate = nibbles(MOEC_SCHEME_MXFP4, true, {0, 2}, 32);
  const ExpertMatrix up = nibbles(MOEC_SCHEME_MXFP4, true, {1, 2}, 32);
  RowGemmProblem p = empty(RowGemm::kUp);
  ASSERT_EQ(set_matrices(p, kInter, kHidden, gate, &up), nullptr);
  EXPECT_FALSE(p.alternating || p.weights_mn_major);
  EXPECT_EQ(p.weights[1], memory + kHidden / 2);
  EXPECT_EQ(p.weight_stride, 2 * kHidden);  // codes
  EXPECT_EQ(p.expert_stride, 2 * kInter * kHidden);
  EXPECT_EQ(p.lines.decode, LineDecode::kPowers);
  EXPECT_FALSE(p.lines.high_first);
  const ExpertScales& scales = p.lines.scales[1];
  EXPECT_EQ(scales.first_line, 1);
  EXPECT_EQ(scales.line_step, 2);
  EXPECT_EQ(scales.line_shift, 0);
  EXPECT_EQ(scales.line_stride, kHidden / 32);
  EXPECT_EQ(scales.shift, 5);
  p.dtype = MOEC_F16;
  ExpertMatrix of_half[] = {gate, up};
  for (ExpertMatrix& m : of_half) m.dtype = MOEC_F16;
  ASSERT_EQ(set_matrices(p, kInter, kHidden, of_half[0], of_half + 1), nullptr);
  EXPECT_EQ(p.lines.decode, LineDecode::kTable);
  EXPECT_EQ(p.lines.numbers[15], -6.0f);
}

TEST(RowGemmMatrices, NibblesOfColumns) {
  const uint32_t nf4 = MOEC_SCHEME_CODEBOOK4;
  RowGemmProblem p = empty(RowGemm::kGradUp);
  const ExpertMatrix in_turn[] = {nibbles(nf4, false, {0, 2}, 64), nibbles(nf4, false, {1, 2}, 64)};
  ASSERT_EQ(set_matrices(p, kInter, kHidden, in_turn[0], in_turn + 1), nullptr);
  EXPECT_TRUE(p.alternating);
  EXPECT_EQ(p.k_size, 2 * kInter);
  EXPECT_EQ(p.weight_stride, 2 * kInter);
  EXPECT_TRUE(p.lines.high_first);
  EXPECT_EQ(p.lines.scales[0].line_stride, 1);
  EXPECT_EQ(p.lines.scales[0].first, 0);
  const ExpertMatrix behind[] = {nibbles(nf4, false, {0, 1}, 64),
                                 nibbles(nf4, false, {kInter, 1}, 64)};
  ASSERT_EQ(set_matrices(p, kInter, kHidden, behind[0], behind + 1), nullptr);
  EXPECT_FALSE(p.alternating);
  EXPECT_EQ(p.weights[1], memory + kInter / 2);
  EXPECT_EQ(p.lines.scales[1].first, kInter);
  EXPECT_EQ(p.lines.scales[1].expert_stride, 2 * kInter * kHidden / 64);
}

TEST(RowGemmMatrices, LinesThatHaveNoKernel) {
  const auto refusal = [](const ExpertMatrix& m) {
    RowGemmProblem p = empty(RowGemm::kDown);
    const char* const why = set_matrices(p, kInter, kHidden, m, nullptr);
    return std::string(why ? why : "");
  };
  const ExpertMatrix nf4 = nibbles(MOEC_SCHEME_CODEBOOK4, true, {}, 64);
  const ExpertMatrix int4 = nibbles(MOEC_SCHEME_INT4, true, {}, 32);
  EXPECT_EQ(refusal(nf4), "");
  EXPECT_EQ(refusal(int4), "");
  const float book[1] = {};
  ExpertMatrix other = nf4;
  other.scale_book = book;
  other.scale_block = quant::BlockSize(256);
  EXPECT_EQ(refusal(other), "");
  other.scale_block = quant::BlockSize(192);
  EXPECT_EQ(refusal(other), "nested scales in blocks that are no power of two");
  other.scale_block = quant::BlockSize(256);
  other.expert_codes = 0;
  other.scales2.expert_stride = 1;
  EXPECT_EQ(refusal(other), "nested scales that experts do not share");
  other = nf4;
  other.scales.block_k = quant::BlockSize(128);
  EXPECT_EQ(refusal(other), "blocks that do not end with rows");
  other = nibbles(MOEC_SCHEME_CODEBOOK4, false, {16, 1}, 64);
  EXPECT_EQ(refusal(other), "blocks that are not whole runs of 32");
  other = int4;
  other.zeros.array.base = memory;
  EXPECT_EQ(refusal(other), "zero points");
  other = int4;
  other.group_index.base = memory;
  EXPECT_EQ(refusal(other), "a group index");
  other = int4;
  other.scales.block_k = quant::BlockSize(96);
  EXPECT_EQ(refusal(other), "blocks that are not whole runs of 32");
  other.scales.block_k = quant::BlockSize(16);
  EXPECT_EQ(refusal(other), "blocks that are not whole runs of 32");
  other = int4;
  other.scales.block_n = quant::BlockSize(3);
  EXPECT_EQ(refusal(other), "blocks whose extent is no power of two");
  other = int4;
  other.scheme = MOEC_SCHEME_FP8;
  other.values.dtype = MOEC_F8_E5M2;
  EXPECT_EQ(refusal(other), "codes of e5m2");
  other = int4;
  other.scheme = MOEC_SCHEME_NVFP4;
  EXPECT_EQ(refusal(other), "quantised weights of this format");
}

// Of rank 8: b [inter, 8] of gate and up, a [8, hidden].
struct SomeFactors {
  ExpertMatrix a = matrix(kHidden, 1), gate = matrix(8, 1), up = matrix(8, 1, 8 * kInter);
};
std::string refusal_of_factors(RowGemmProblem& p, const ExpertMatrix& first,
                               const ExpertMatrix* second = nullptr) {
  const char* const why = set_factors(p, 8, memory, first, second);
  return why ? why : "";
}

TEST(RowGemmFactors, LieAsTheWeightsDo) {
  const ExpertMatrix gate = matrix(kHidden, 1), up = matrix(kHidden, 1, kInter * kHidden);
  const SomeFactors f;
  RowGemmProblem p = empty(RowGemm::kUp);
  ASSERT_EQ(set_matrices(p, kInter, kHidden, gate, &up), nullptr);
  ASSERT_EQ(refusal_of_factors(p, f.gate, &f.up), "");
  EXPECT_EQ(p.rank, 8);
  EXPECT_EQ(p.narrow, memory);
  EXPECT_EQ(p.factors[1], memory + 2 * 8 * kInter);
  EXPECT_EQ(p.factor_stride, 8);
  const ExpertMatrix turned[] = {matrix(1, kInter), matrix(1, kInter, 8 * kInter)};
  EXPECT_EQ(refusal_of_factors(p, turned[0], turned + 1), "factors that lie across the weights");
  EXPECT_EQ(refusal_of_factors(p, f.gate, turned + 1), "gate and up of different layouts");
  const ExpertMatrix none;
  EXPECT_EQ(refusal_of_factors(p, f.gate, &none), "an adapter of only one of gate and up");
  ExpertMatrix half = f.gate;
  half.dtype = half.values.dtype = MOEC_F16;
  EXPECT_EQ(refusal_of_factors(p, half, &f.up), "factors of another type than x");
  p = empty(RowGemm::kGradUp);
  ASSERT_EQ(set_matrices(p, kInter, kHidden, gate, &up), nullptr);
  ASSERT_EQ(refusal_of_factors(p, f.a), "");
  EXPECT_EQ(p.factor_stride, kHidden);
  EXPECT_EQ(refusal_of_factors(p, matrix(1, 8)), "factors that lie across the weights");
}

TEST(RowGemmFactors, AlternateAsTheWeightsDo) {
  const ExpertMatrix gate = matrix(2, 2 * kInter), up = matrix(2, 2 * kInter, 1);
  const ExpertMatrix factors[] = {matrix(2, 2 * kInter), matrix(2, 2 * kInter, 1)};
  const SomeFactors f;
  RowGemmProblem p = empty(RowGemm::kUp);
  ASSERT_EQ(set_matrices(p, kInter, kHidden, gate, &up), nullptr);
  ASSERT_EQ(refusal_of_factors(p, factors[0], factors + 1), "");
  EXPECT_EQ(p.factor_stride, 2 * kInter);
  EXPECT_EQ(refusal_of_factors(p, f.gate, &f.up),
            "factors that do not alternate as the columns of gate and up do");
  p = empty(RowGemm::kGradUp);
  ASSERT_EQ(set_matrices(p, kInter, kHidden, gate, &up), nullptr);
  EXPECT_EQ(refusal_of_factors(p, matrix(1, 8)), "");
  EXPECT_EQ(refusal_of_factors(p, f.a), "factors that lie across the weights");
}

TEST(RowGemmMatrices, WhatHasNoKernelIsRefusedWithAReason) {
  const auto refusal = [](RowGemm op, const ExpertMatrix& first, const ExpertMatrix* second) {
    RowGemmProblem p = empty(op);
    const char* const why = set_matrices(p, kInter, kHidden, first, second);
    return std::string(why ? why : "");
  };
  const ExpertMatrix plain = matrix(kHidden, 1), codes = coded(plain, 1, 0);
  void* const pointers[] = {memory};
  ExpertMatrix other = plain;
  other.values.pointers = pointers;
  EXPECT_EQ(refusal(RowGemm::kDown, other, nullptr), "experts that are separate tensors");
  other = codes;
  other.scales.array.pointers = pointers;
  EXPECT_EQ(refusal(RowGemm::kDown, other, nullptr), "scales that are separate tensors");
  EXPECT_EQ(refusal(RowGemm::kUp, plain, &codes), "gate and up of different formats");
  other = codes;
  other.dtype = MOEC_F32;
  EXPECT_EQ(refusal(RowGemm::kDown, other, nullptr), "weights of another type than x");
  other = plain;
  other.bias = {memory, nullptr, kInter, 0, MOEC_F16};
  EXPECT_EQ(refusal(RowGemm::kDown, other, nullptr), "biases of this type");
  EXPECT_EQ(refusal(RowGemm::kGradDown, other, nullptr), "biases of this type");
  other.bias.dtype = MOEC_BF16;
  EXPECT_EQ(refusal(RowGemm::kUp, plain, &other), "a bias of only one of gate and up");
  EXPECT_EQ(refusal(RowGemm::kDown, matrix(3, kInter), nullptr), "columns that are not contiguous");
}

}  // namespace
}  // namespace moec::cuda
