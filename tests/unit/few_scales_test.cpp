// SPDX-License-Identifier: Apache-2.0
// The kernel of few rows of codes is chosen by the scales of both parts, without a GPU. Mutation
// seen to fail: the scales of the first part alone.
#include "backend/cuda/sm80/few_scales.h"

#include <gtest/gtest.h>

namespace moec::cuda {
namespace {

ExpertQuant quant_of(moec_dtype dtype, const void* zeros = nullptr) {
  ExpertQuant quant = {};
  quant.scales.array.dtype = dtype;
  quant.zeros.array.base = const_cast<void*>(zeros);
  return quant;
}

TEST(CommonScales, OfBothParts) {
  const ExpertQuant f32 = quant_of(MOEC_F32), bf16 = quant_of(MOEC_BF16);
  EXPECT_EQ(common_scales(f32, f32).dtype, MOEC_F32);
  EXPECT_EQ(common_scales(bf16, bf16).dtype, MOEC_BF16);
  EXPECT_EQ(common_scales(f32, bf16).dtype, moec_dtype(0));
  EXPECT_EQ(common_scales(bf16, f32).dtype, moec_dtype(0));
}

TEST(CommonScales, ZeroPointsOfEither) {
  const int zero = 0;
  const ExpertQuant with = quant_of(MOEC_F32, &zero), without = quant_of(MOEC_F32);
  EXPECT_TRUE(common_scales(with, without).zeros);
  EXPECT_TRUE(common_scales(without, with).zeros);
  EXPECT_TRUE(common_scales(with, with).zeros);
  EXPECT_FALSE(common_scales(without, without).zeros);
}

}  // namespace
}  // namespace moec::cuda
