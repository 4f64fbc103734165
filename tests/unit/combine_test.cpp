// SPDX-License-Identifier: Apache-2.0
// The three ways to sum a token's experts, told apart by their bits; what a weight of zero hides.
// Mutations seen to fail: slot order for each mode; no rounding between two adds; zero weights
// multiplied instead of left out; the identity expert unweighted.
#include "backend/cpu/combine.h"

#include <gtest/gtest.h>

#include <cmath>

#include "unit/cpu_device.h"

namespace moec::test {
namespace {

// One token, hidden size 1, experts 0..2 whose rows are their ids.
class Token {
 public:
  Token(std::vector<int32_t> ids, std::vector<float> weights, std::vector<float> rows)
      : ids_(std::move(ids)), weights_(std::move(weights)), rows_(std::move(rows)) {
    for (const int32_t id : ids_) assignment_.push_back(id >= 0 && id < 3 ? id : -1);
    plan_.num_tokens = 1;
    plan_.num_experts = plan_.num_local = 3;
    plan_.num_zero = 1;
    plan_.top_k = int32_t(ids_.size());
    plan_.assignment_row = assignment_.data();
    plan_.expert_ids = ids_.data();
    plan_.routing_weights = weights_.data();
  }
  float sum(uint32_t combine, moec_dtype dtype, float x = 0) {
    moec_experts_desc desc = {};
    desc.hidden = 1;
    desc.dtype = dtype;
    desc.combine = combine;
    desc.output_scale = 1;
    Stored token(dtype, std::vector<double>{double(x)}), y(dtype, size_t(1));
    Combine sum = {};
    sum.desc = &desc;
    sum.plan = &plan_;
    sum.rows = {rows_.data(), MOEC_F32};
    sum.x = token.array();
    sum.y = y.array();
    cpu::combine_columns(sum, 0, 0, 1, nullptr);
    return float(y.values()[0]);
  }

 private:
  std::vector<int32_t> ids_, assignment_;
  std::vector<float> weights_, rows_;
  PlanView plan_;
};

TEST(Combine, OrdersDiffer) {
  // Slots 2, 0, 1: (1e8 - 1e8) + 1 = 1 in slot order, (-1e8 + 1) + 1e8 = 0 by expert.
  Token token({2, 0, 1}, {1, 1, 1}, {-1e8f, 1, 1e8f});
  EXPECT_EQ(token.sum(MOEC_COMBINE_FP32_SLOT, MOEC_F32), 1.0f);
  EXPECT_EQ(token.sum(MOEC_COMBINE_FP32_EXPERT, MOEC_F32), 0.0f);
  EXPECT_EQ(token.sum(MOEC_COMBINE_DATA_EXPERT, MOEC_F32), 0.0f);
}

TEST(Combine, DataTypeRoundsAfterEachAdd) {
  // bf16 has 8 bits: 256 + 1 stays 256 twice, while 256 + 1 + 1 in fp32 is 258.
  Token token({0, 1, 2}, {1, 1, 1}, {256, 1, 1});
  EXPECT_EQ(token.sum(MOEC_COMBINE_FP32_EXPERT, MOEC_BF16), 258.0f);
  EXPECT_EQ(token.sum(MOEC_COMBINE_DATA_EXPERT, MOEC_BF16), 256.0f);
}

TEST(Combine, DataTypeRoundsOutputAndProduct) {
  // 257 is stored as 256.
  Token output({0}, {1}, {257});
  EXPECT_EQ(output.sum(MOEC_COMBINE_DATA_EXPERT, MOEC_BF16), 256.0f);
  Token product({0, 1}, {0.75f, 1}, {1.0078125f, 64});
  const float weighted = to_float(from_float<bf16>(0.75f * 1.0078125f));
  EXPECT_EQ(product.sum(MOEC_COMBINE_DATA_EXPERT, MOEC_BF16),
            to_float(from_float<bf16>(weighted + 64)));
}

TEST(Combine, ZeroWeightIsNoExpert) {
  Token token({0, 1, 3}, {0, 2, 0}, {INFINITY, 3, 0});
  for (uint32_t combine = 0; combine <= MOEC_COMBINE_DATA_EXPERT; ++combine)
    EXPECT_EQ(token.sum(combine, MOEC_F32, INFINITY), 6.0f);
}

TEST(Combine, IdentityExpertsAndNone) {
  Token token({3, -1, 1}, {0.5f, 9, 2}, {NAN, 3, NAN});
  for (uint32_t combine = 0; combine <= MOEC_COMBINE_DATA_EXPERT; ++combine)
    EXPECT_EQ(token.sum(combine, MOEC_F32, 10), 11.0f);
}

}  // namespace
}  // namespace moec::test
