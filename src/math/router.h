// SPDX-License-Identifier: Apache-2.0
// Formulas of the router, one token at a time, each with its derivative beside it. Steps R0..R10 of
// moec.h section 4. Sums over the K slots run in slot order; a slot without an expert (id < 0) has
// weight 0 everywhere. `Round` rounds an fp32 value to the type a step is kept in.
#pragma once

#include <moec/moec.h>

#include "math/exp.h"

namespace moec::math {

// ---- R0: x / rms(x). `normed` is one value of it; d_mean = mean of d_normed * normed over the
// row.
MOEC_HD float inverse_rms(float sum_of_squares, int64_t hidden, float eps) {
  return 1.0f / sqrtf(sum_of_squares / float(hidden) + eps);
}
MOEC_HD float rms_gradient(float inverse, float normed, float d_normed, float d_mean) {
  return inverse * (d_normed - normed * d_mean);
}

// ---- R2: soft-cap. The slope comes from the capped value.
MOEC_HD float softcap(float z, float cap) {
  return cap * tanh(z / cap);
}
MOEC_HD float softcap_slope(float capped, float cap) {
  return tanh_slope(capped / cap);
}

// ---- R3: scores of one logit. Softmax is e / sum with e = exp(z - max) over the row.
MOEC_HD float score_value(uint32_t score, float z) {
  if (score == MOEC_SCORE_SIGMOID) return sigmoid(z);
  if (score == MOEC_SCORE_SQRT_SOFTPLUS) return sqrtf(softplus(z));
  return z;
}
MOEC_HD float score_slope(uint32_t score, float z, float value) {
  if (score == MOEC_SCORE_SIGMOID) return sigmoid_slope(value);
  if (score == MOEC_SCORE_SQRT_SOFTPLUS) return value > 0.0f ? sigmoid(z) / (2.0f * value) : 0.0f;
  return 1.0f;
}
// Softmax: gradient at a logit from that at its probability; dot = sum of d_p p over the row.
MOEC_HD float softmax_gradient(float p, float d_p, float dot) {
  return p * (d_p - dot);
}

// ---- R4..R6: order of choice scores. Keys compare as integers, larger first: descending value,
// then ascending id; -inf after every number, NaN after -inf. Both zeros are equal.
inline constexpr int64_t kNoKey = INT64_MIN;

MOEC_HD int32_t ordered(float value) {
  const uint32_t bits = bits_of(value + 0.0f);
  return value != value ? INT32_MIN : int32_t(bits ^ ((0u - (bits >> 31)) >> 1));
}
MOEC_HD int64_t rank_key(float value, int32_t id) {
  return int64_t(uint64_t(uint32_t(ordered(value))) << 32 | uint32_t(~id));
}
MOEC_HD float key_value(int64_t key) {
  const int32_t order = int32_t(key >> 32);
  return float_of(uint32_t(order) ^ (order < 0 ? 0x7fffffffu : 0u));
}
MOEC_HD int32_t key_id(int64_t key) {
  return int32_t(~uint32_t(uint64_t(key)));
}
// Order of the value alone, as an unsigned number.
MOEC_HD uint32_t choice_key(float value) {
  return uint32_t(ordered(value)) ^ 0x80000000u;
}
// Neither NaN nor -inf.
MOEC_HD bool is_selectable(float value) {
  return value > -__builtin_inff();
}
MOEC_HD bool is_selectable_key(int64_t key) {
  return is_selectable(key_value(key));
}

// Sparse mixer: whether a logit takes part in the softmax around the largest one. NaN does.
MOEC_HD bool mixer_keeps(float z, float largest, float eps) {
  const float size = magnitude(z);
  return !((largest - z) / (size > largest ? size : largest) > 2.0f * eps);
}

// ---- R7: weight rule. w holds the score (SCORE) or the capped logit of a slot, then its weight.
template <class Round>
MOEC_HD void weight_rule(const moec_router_desc& desc, const int32_t* ids, float* w, Round round) {
  float largest = -__builtin_inff(), sum = 0.0f;
  for (int32_t k = 0; k < desc.top_k; ++k)
    if (ids[k] >= 0 && w[k] > largest) largest = w[k];
  for (int32_t k = 0; k < desc.top_k; ++k) {
    if (ids[k] < 0)
      w[k] = 0.0f;
    else if (desc.weight_rule == MOEC_WEIGHT_SOFTMAX_SELECTED)
      sum += w[k] = exp(w[k] - largest);
    else if (desc.weight_rule == MOEC_WEIGHT_SIGMOID_SELECTED)
      w[k] = sigmoid(w[k]);
  }
  const bool divide = desc.weight_rule == MOEC_WEIGHT_SOFTMAX_SELECTED;
  for (int32_t k = 0; k < desc.top_k; ++k)
    if (ids[k] >= 0) w[k] = round(divide ? w[k] / sum : w[k]);
}
// d: gradient at the weights w becomes that at the scores or capped logits.
MOEC_HD void weight_rule_gradient(const moec_router_desc& desc, const float* w, float* d) {
  float dot = 0.0f;
  for (int32_t k = 0; k < desc.top_k; ++k) dot += d[k] * w[k];
  for (int32_t k = 0; k < desc.top_k; ++k) {
    if (desc.weight_rule == MOEC_WEIGHT_SOFTMAX_SELECTED) d[k] = softmax_gradient(w[k], d[k], dot);
    if (desc.weight_rule == MOEC_WEIGHT_SIGMOID_SELECTED) d[k] *= sigmoid_slope(w[k]);
  }
}

// ---- R8: normalisation
MOEC_HD bool normalises(const moec_router_desc& desc) {
  return desc.norm != MOEC_NORM_NONE &&
         !((desc.flags & MOEC_ROUTER_NORM_IF_K_GT_1) && desc.top_k == 1);
}
struct Divisor {
  float value;
  bool is_clamped;     // CLAMP_SUM: at its floor, so constant
  bool is_scale_free;  // w / value does not change when all w are multiplied by one factor
};
MOEC_HD Divisor norm_divisor(const moec_router_desc& desc, const float* w) {
  if (!normalises(desc)) return {1.0f, true, false};
  float sum = 0.0f;
  for (int32_t k = 0; k < desc.top_k; ++k)
    sum += desc.norm == MOEC_NORM_P ? power(magnitude(w[k]), desc.norm_p) : w[k];
  if (desc.norm == MOEC_NORM_P) return {power(sum, 1.0f / desc.norm_p), false, true};
  if (desc.norm == MOEC_NORM_SUM) return {sum + desc.norm_eps, false, desc.norm_eps == 0.0f};
  const bool clamped = sum < desc.norm_eps;
  return {clamped ? desc.norm_eps : sum, clamped, !clamped};
}
// d: gradient at the normalised weights becomes that at w.
MOEC_HD void norm_gradient(const moec_router_desc& desc, const int32_t* ids, const float* w,
                           Divisor divisor, float* d) {
  if (!normalises(desc)) return;
  float dot = 0.0f;
  for (int32_t k = 0; k < desc.top_k; ++k) dot += d[k] * (w[k] / divisor.value);
  for (int32_t k = 0; k < desc.top_k; ++k) {
    if (ids[k] < 0) continue;
    float slope = divisor.is_clamped ? 0.0f : 1.0f;
    if (desc.norm == MOEC_NORM_P)
      slope = with_sign(power(magnitude(w[k]) / divisor.value, desc.norm_p - 1.0f), w[k]);
    d[k] = (d[k] - dot * slope) / divisor.value;
  }
}

// ---- aux-loss-free balancing: sign(mean - count) without the division
MOEC_HD float balance_direction(int64_t total, int32_t count, int32_t num_ids) {
  const int64_t gap = total - int64_t(count) * num_ids;
  return float((gap > 0) - (gap < 0));
}

}  // namespace moec::math
