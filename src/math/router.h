// SPDX-License-Identifier: Apache-2.0
// Formulas of the router, one token at a time, each with its derivative beside it: steps R0..R6 of
// moec.h section 4 but R3, whose list is in score.h; R7 and later, over the K slots of a token, are
// in slots.h.
#pragma once

#include <moec/moec.h>

#include "math/exp.h"
#include "math/score.h"

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

// ---- R4..R6: order of choice scores. Keys compare as integers, larger first: NaN of either sign,
// then descending value, then ascending id. Both zeros are equal. No key is INT64_MAX or kNoKey.
inline constexpr int64_t kNoKey = INT64_MIN;

MOEC_HD int32_t ordered(float value) {
  constexpr int32_t kNan = 0x7fc00000;  // above +inf; key_value makes NaN of it
  const uint32_t bits = bits_of(value + 0.0f);
  return value != value ? kNan : int32_t(bits ^ ((0u - (bits >> 31)) >> 1));
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
// All but -inf, and, as a key, kNoKey.
MOEC_HD bool is_selectable(float value) {
  return value != -__builtin_inff();
}
MOEC_HD bool is_selectable_key(int64_t key) {
  return int32_t(key >> 32) > ordered(-__builtin_inff());
}

// Sparse mixer: whether a logit takes part in the softmax around the largest one. NaN does.
MOEC_HD bool mixer_keeps(float z, float largest, float eps) {
  const float size = magnitude(z);
  return !((largest - z) / (size > largest ? size : largest) > 2.0f * eps);
}

// ---- aux-loss-free balancing: sign(mean - count) without the division
MOEC_HD float balance_direction(int64_t total, int64_t count, int32_t num_ids) {
  const int64_t gap = total - count * num_ids;
  return float((gap > 0) - (gap < 0));
}

}  // namespace moec::math
