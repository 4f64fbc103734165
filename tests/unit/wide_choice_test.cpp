// SPDX-License-Identifier: Apache-2.0
// Which of Hopper's row GEMMs have wide tiles, and how these are cut, without a GPU. Mutations seen
// to fail: tiles of whole width; a down that waits for tiles of another up; codes of f16; lines
// across those of a forward, or along k in a backward.
#include <gtest/gtest.h>

#include <tuple>

#include "row_gemm_case.h"

namespace moec::cuda {
namespace {

TEST(WideChoice, TilesHaveHalfAsManyFeatures) {
  for (const int64_t inter : {8, 64, 72, 128, 136, 768, 2880}) {
    RowGemmProblem up = problem(RowGemm::kUp, 10, 512, inter);
    RowGemmProblem down = problem(RowGemm::kDown, 10, 512, inter);
    up.wide = down.wide = down.after_wide = true;
    EXPECT_EQ(choose(up, kDevice).tiles.feature_tiles, (inter + 63) / 64);
    EXPECT_EQ(choose(down, kDevice).tiles.feature_tiles, 4);
    EXPECT_EQ(choose(down, kDevice).tiles.done_tiles, choose(up, kDevice).tiles.feature_tiles);
    down.after_wide = false;
    up.wide = false;
    EXPECT_EQ(choose(down, kDevice).tiles.done_tiles, choose(up, kDevice).tiles.feature_tiles);
  }
}

TEST(WideChoice, IsOfForwardsOfCodesAlongK) {
  const auto takes = [](RowGemm op, int64_t size, int64_t rows, bool mn_major = false,
                        moec_dtype dtype = MOEC_BF16, LineDecode decode = LineDecode::kTable) {
    RowGemmProblem p = problem(op, 8 * rows, size, size);
    p.num_experts = 8;
    p.dtype = dtype;
    p.scheme = MOEC_SCHEME_CODEBOOK4;
    p.weights_mn_major = mn_major;
    p.lines.decode = decode;
    p.lines.scales[0].dtype = MOEC_BF16;
    return takes_wide_tiles(p, 8 * rows);
  };
  for (const RowGemm op : {RowGemm::kUp, RowGemm::kDown}) {
    EXPECT_TRUE(takes(op, 4096, kWideFrom));
    EXPECT_FALSE(takes(op, 4096, kWideFrom - 1));
    EXPECT_TRUE(takes(op, 1024, kWideFromOfSmall));
    EXPECT_FALSE(takes(op, 1024, kWideFromOfSmall - 1));
    for (const auto& [size, decode, below] :
         {std::tuple(4096, LineDecode::kIntegers, kWideBelow),
          std::tuple(4096, LineDecode::kTable, kWideBelowOfSmall),
          std::tuple(1024, LineDecode::kIntegers, kWideBelowOfSmall)}) {
      EXPECT_TRUE(takes(op, size, below - 1, false, MOEC_BF16, decode));
      EXPECT_FALSE(takes(op, size, below, false, MOEC_BF16, decode));
    }
    EXPECT_FALSE(takes(op, 4096, 512, true));
    EXPECT_FALSE(takes(op, 4096, 512, false, MOEC_F16));
    EXPECT_FALSE(
        takes(op, 4096, 512, false, MOEC_BF16, LineDecode::kBytes));  // without fp32 scales
  }
}

TEST(WideChoice, IsOfGradientsOfTheSameCodes) {
  const auto takes = [](RowGemm op, int64_t size, int64_t rows, LineDecode decode,
                        moec_dtype scales = MOEC_F32, bool mn_major = true) {
    RowGemmProblem p = problem(op, 8 * rows, size, size);
    p.num_experts = 8;
    p.dtype = MOEC_BF16;
    p.scheme = decode == LineDecode::kSigned ? MOEC_SCHEME_INT8 : MOEC_SCHEME_CODEBOOK4;
    p.weights_mn_major = mn_major;
    p.lines.decode = decode;
    p.lines.scales[0].dtype = p.channels[0].scales.dtype = scales;
    return takes_wide_tiles(p, 8 * rows);
  };
  for (const RowGemm op : {RowGemm::kGradUp, RowGemm::kGradDown}) {
    for (const LineDecode decode :
         {LineDecode::kPowers, LineDecode::kIntegers, LineDecode::kBytes, LineDecode::kSigned}) {
      EXPECT_TRUE(takes(op, 4096, kWideFrom, decode));
      EXPECT_FALSE(takes(op, 4096, kWideFrom - 1, decode));
      EXPECT_TRUE(takes(op, 1024, kWideFrom, decode));
      EXPECT_TRUE(takes(op, 4096, kWideBelow - 1, decode));
      EXPECT_FALSE(takes(op, 4096, kWideBelow, decode));
      EXPECT_FALSE(takes(op, 1024, kWideBelowOfSmall, decode));
      EXPECT_FALSE(takes(op, 4096, 512, decode, MOEC_F32, false));
    }
    EXPECT_TRUE(takes(op, 4096, kWideFrom, LineDecode::kTable, MOEC_BF16));
    EXPECT_FALSE(takes(op, 4096, kWideBelowOfSmall, LineDecode::kTable));
    EXPECT_FALSE(takes(op, 1024, 512, LineDecode::kTable));
    EXPECT_FALSE(takes(op, 4096, 512, LineDecode::kBytes, MOEC_BF16));
    EXPECT_FALSE(takes(op, 4096, 512, LineDecode::kSigned, MOEC_BF16));
  }
}

}  // namespace
}  // namespace moec::cuda
