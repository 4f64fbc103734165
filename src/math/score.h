// SPDX-License-Identifier: Apache-2.0
// Scores of the router (R3 of moec.h section 4): value and slope side by side, and the list of
// them. z is a capped logit.
//
//   value(z)          the score of one logit
//   slope(z, value)   d value / d z
//
// No branches, so that loops over them vectorise. NaN gives NaN. Softmax is a score over the row:
// its value is e^(z - largest), which the row's sum of these then divides; it has no slope. NaN or
// +inf makes the whole row NaN, as in PyTorch. The sum is 0 for a row of nothing but -inf, and for
// no other: nobody is chosen there.
#pragma once

#include <moec/moec.h>

#include "core/kinds.h"
#include "math/exp.h"

namespace moec::math {

struct ScoreInfo {
  uint32_t kind;
  const char* name;
  bool over_row = false;  // shares of 1, each of which depends on all logits of its row
  bool negative = false;  // may be below 0: a balance loss cannot make shares of such scores
};

// Softmax: gradient at a logit from that at its probability; dot = sum of d_p p over the row.
MOEC_HD float softmax_gradient(float p, float d_p, float dot) {
  return p * (d_p - dot);
}

struct SoftmaxScore {
  static constexpr ScoreInfo kInfo = {
      .kind = MOEC_SCORE_SOFTMAX, .name = "softmax", .over_row = true};
  MOEC_HD static float value(float z, float largest) { return exp(z - largest); }
  // What `value` takes, from the largest logit but NaN; -inf would make NaN of e^(-inf).
  MOEC_HD static float reference(float largest) {
    return largest > -__FLT_MAX__ ? largest : -__FLT_MAX__;
  }
};

struct SigmoidScore {
  static constexpr ScoreInfo kInfo = {.kind = MOEC_SCORE_SIGMOID, .name = "sigmoid"};
  MOEC_HD static float value(float z) { return sigmoid(z); }
  MOEC_HD static float slope(float, float value) { return sigmoid_slope(value); }
};

struct SqrtSoftplusScore {
  static constexpr ScoreInfo kInfo = {.kind = MOEC_SCORE_SQRT_SOFTPLUS, .name = "sqrt_softplus"};
  MOEC_HD static float value(float z) { return sqrtf(softplus(z)); }
  MOEC_HD static float slope(float z, float value) {  // sigmoid(z) = 1 - exp(-value^2)
    return value < 0x1p-6f ? 0.5f * value * fmaf(-0.5f * value, value, 1.0f)
                           : sigmoid(z) / (2.0f * value);
  }
};

struct IdentityScore {
  static constexpr ScoreInfo kInfo = {
      .kind = MOEC_SCORE_IDENTITY, .name = "identity", .negative = true};
  MOEC_HD static float value(float z) { return z; }
  MOEC_HD static float slope(float, float) { return 1.0f; }
};

using Scores = KindList<SoftmaxScore, SigmoidScore, SqrtSoftplusScore, IdentityScore>;
static_assert(Scores::in_order());

MOEC_HD bool score_is_over_row(uint32_t score) {
  bool over_row = false;
  Scores::with(score, [&]<class Kind>() { over_row = Kind::kInfo.over_row; });
  return over_row;
}
// `largest`: of the row, where the score is over it.
MOEC_HD float score_value(uint32_t score, float z, float largest) {
  float value = 0.0f;
  Scores::with(score, [&]<class Kind>() {
    if constexpr (Kind::kInfo.over_row)
      value = Kind::value(z, largest);
    else
      value = Kind::value(z);
  });
  return value;
}
// Slope of a score that is not over a row.
MOEC_HD float score_slope(uint32_t score, float z, float value) {
  float slope = 0.0f;
  Scores::with(score, [&]<class Kind>() {
    if constexpr (!Kind::kInfo.over_row) slope = Kind::slope(z, value);
  });
  return slope;
}

}  // namespace moec::math
