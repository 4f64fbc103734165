// SPDX-License-Identifier: Apache-2.0
// The K slots of one token: order of ids, and steps R7..R9 of moec.h section 4 from the scores or
// capped logits of the chosen ids to the routing weights, with their gradient.
#pragma once

#include <moec/moec.h>

#include "core/dtype.h"
#include "math/router.h"

namespace moec::math {

struct RoundTo {  // fp32 -> the type a step is kept in, as fp32
  moec_dtype dtype;
  MOEC_HD explicit RoundTo(moec_dtype type) : dtype(type) {}
  MOEC_HD RoundTo(const moec_router_desc& desc, uint32_t precision)
      : dtype(precision == MOEC_PREC_DATA && desc.data_dtype ? desc.data_dtype
                                                             : moec_dtype(MOEC_F32)) {}
  MOEC_HD float operator()(float value) const {
    return dtype == MOEC_F32 ? value : round_real(dtype, value);
  }
  MOEC_HD void row(float* values, int64_t count) const {
    if (dtype == MOEC_F32) return;
    with_real(dtype, [=]<class T>() {
      for (int64_t i = 0; i < count; ++i) values[i] = to_float(from_float<T>(values[i]));
    });
  }
};

// Whether ids are there before the scores are.
MOEC_HD bool has_given_ids(uint32_t selection) {
  return selection == MOEC_SELECT_TABLE || selection == MOEC_SELECT_GIVEN ||
         selection == MOEC_SELECT_ROUND_ROBIN;
}
MOEC_HD int32_t valid_id(int64_t id, int64_t columns) {
  return id >= 0 && id < columns ? int32_t(id) : -1;
}
MOEC_HD bool later(int32_t a, int32_t b) {
  return uint32_t(a) > uint32_t(b);
}  // by id, -1 last

MOEC_HD void sort_by_expert(int32_t* ids, int32_t count) {
  for (int32_t k = 1; k < count; ++k) {
    const int32_t id = ids[k];
    int32_t j = k;
    for (; j > 0 && later(ids[j - 1], id); --j) ids[j] = ids[j - 1];
    ids[j] = id;
  }
}

// Who runs over the slots: here one thread, in their order. A GPU has a warp do it side by side
// (backend/cuda/routing/warp_row.cuh); there slot k is always seen by the same lane, and a sum
// still adds in slot order. A slot without an expert (id < 0) has weight 0 everywhere.
struct SerialSlots {
  int32_t count;
  template <class Body>
  MOEC_HD void each(Body body) const {
    for (int32_t k = 0; k < count; ++k) body(k);
  }
  template <class Value>
  MOEC_HD float sum(Value value) const {
    float total = 0.0f;
    for (int32_t k = 0; k < count; ++k) total += value(k);
    return total;
  }
  template <class Value>
  MOEC_HD float largest(Value value) const {  // ignores NaN
    float best = -__builtin_inff();
    for (int32_t k = 0; k < count; ++k) {
      const float v = value(k);
      best = v > best ? v : best;
    }
    return best;
  }
};

// ---- R7: weight rule. w holds the score (SCORE) or the capped logit of a slot, then its weight.
template <class Slots>
MOEC_HD void weight_rule(const Slots& slots, const moec_router_desc& desc, const int32_t* ids,
                         float* w) {
  const uint32_t rule = desc.weight_rule;
  const RoundTo round(desc, desc.norm_precision);
  float largest = 0.0f, sum = 1.0f;
  if (rule == MOEC_WEIGHT_SOFTMAX_SELECTED) {
    largest = slots.largest([=](int32_t k) { return ids[k] < 0 ? -__builtin_inff() : w[k]; });
    largest = SoftmaxScore::reference(largest);  // all -inf: weights of 0, not NaN
  }
  slots.each([=](int32_t k) {
    if (ids[k] < 0)
      w[k] = 0.0f;
    else if (rule == MOEC_WEIGHT_SOFTMAX_SELECTED)
      w[k] = exp(w[k] - largest);
    else if (rule == MOEC_WEIGHT_SIGMOID_SELECTED)
      w[k] = sigmoid(w[k]);
  });
  const bool divide = rule == MOEC_WEIGHT_SOFTMAX_SELECTED;
  if (divide) sum = slots.sum([=](int32_t k) { return w[k]; });
  if (sum == 0.0f) sum = 1.0f;
  slots.each([=](int32_t k) {
    if (ids[k] >= 0) w[k] = round(divide ? w[k] / sum : w[k]);
  });
}
// d: gradient at the weights w becomes that at the scores or capped logits.
template <class Slots>
MOEC_HD void weight_rule_gradient(const Slots& slots, const moec_router_desc& desc, const float* w,
                                  float* d) {
  const uint32_t rule = desc.weight_rule;
  const float dot = slots.sum([=](int32_t k) { return d[k] * w[k]; });
  slots.each([=](int32_t k) {
    if (rule == MOEC_WEIGHT_SOFTMAX_SELECTED) d[k] = softmax_gradient(w[k], d[k], dot);
    if (rule == MOEC_WEIGHT_SIGMOID_SELECTED) d[k] *= sigmoid_slope(w[k]);
  });
}

// ---- R8: normalisation
MOEC_HD bool normalises(const moec_router_desc& desc) {
  return desc.norm != MOEC_NORM_NONE &&
         !((desc.flags & MOEC_ROUTER_NORM_IF_K_GT_1) && desc.top_k == 1);
}
struct Divisor {
  float value;         // not 0: weights that add up to nothing become 0, as do their gradients
  bool is_constant;    // CLAMP_SUM at its floor, and where there is nothing to divide by
  bool is_scale_free;  // w / value does not change when all w are multiplied by one factor
};
inline constexpr Divisor kOfNothing = {__builtin_inff(), true, false};
template <class Slots>
MOEC_HD Divisor norm_divisor(const Slots& slots, const moec_router_desc& desc, const float* w) {
  if (!normalises(desc)) return {1.0f, true, false};
  const float p = desc.norm_p, eps = desc.norm_eps;
  if (desc.norm == MOEC_NORM_P) {  // in units of the largest: no power underflows or overflows
    const float most = slots.largest([=](int32_t k) { return magnitude(w[k]); });
    const float unit = most > 0.0f && most < __builtin_inff() ? most : 1.0f;
    const float sum = slots.sum([=](int32_t k) { return power(magnitude(w[k]) / unit, p); });
    return sum == 0.0f ? kOfNothing : Divisor{unit * power(sum, 1.0f / p), false, true};
  }
  const float sum = slots.sum([=](int32_t k) { return w[k]; });
  const bool clamped = desc.norm == MOEC_NORM_CLAMP_SUM && sum < eps;
  const float value = clamped ? eps : desc.norm == MOEC_NORM_SUM ? sum + eps : sum;
  if (value == 0.0f) return kOfNothing;
  return {value, clamped, desc.norm == MOEC_NORM_SUM ? eps == 0.0f : !clamped};
}
// d: gradient at the normalised weights becomes that at w.
template <class Slots>
MOEC_HD void norm_gradient(const Slots& slots, const moec_router_desc& desc, const int32_t* ids,
                           const float* w, Divisor divisor, float* d) {
  if (!normalises(desc)) return;
  const float dot = slots.sum([=](int32_t k) { return d[k] * (w[k] / divisor.value); });
  const bool by_power = desc.norm == MOEC_NORM_P;
  const float p = desc.norm_p;
  slots.each([=](int32_t k) {
    if (ids[k] < 0) return;
    float slope = divisor.is_constant ? 0.0f : 1.0f;
    if (by_power && !divisor.is_constant)
      slope = with_sign(power(magnitude(w[k]) / divisor.value, p - 1.0f), w[k]);
    d[k] = (d[k] - dot * slope) / divisor.value;
  });
}

// ---- R7 whole. s, z: the token's scores and capped logits; w[k] is 0 where ids[k] is -1. bias: of
// the choice, or null; an expert that is chosen because of a NaN weighs NaN, whatever its score.
template <class Slots>
MOEC_HD void raw_weights(const Slots& slots, const moec_router_desc& desc, const float* s,
                         const float* z, const float* bias, const int32_t* ids, float* w) {
  const float* const source = desc.weight_rule == MOEC_WEIGHT_SCORE ? s : z;
  slots.each([=](int32_t k) {
    if (ids[k] < 0) {
      w[k] = 0.0f;
      return;
    }
    const float choice = bias ? s[ids[k]] + bias[ids[k]] : 0.0f;
    w[k] = choice != choice ? choice : source[ids[k]];
  });
  weight_rule(slots, desc, ids, w);
}

// ---- R8, R9. scale: one factor for each id, or null.
template <class Slots>
MOEC_HD void finish_weights(const Slots& slots, const moec_router_desc& desc, const void* scale,
                            moec_dtype scale_dtype, const int32_t* ids, float* w) {
  const RoundTo round_normed(desc, desc.norm_precision), round_weight(desc, desc.weight_precision);
  const float divisor = norm_divisor(slots, desc, w).value, factor = desc.scale;
  slots.each([=](int32_t k) {
    if (ids[k] < 0) return;  // weight 0
    float value = round_normed(w[k] / divisor) * factor;
    if (scale) value *= load_real(scale, scale_dtype, ids[k]);
    w[k] = round_weight(value);
  });
}

// From d_routing_weights, the gradient at the routing weights, to d_w at the weights w of R7.
// visit_scale(k, d): d is what slot k adds to the gradient of its id's scale. Returns whether the
// result does not change when all w are multiplied by one factor.
template <class Slots, class VisitScale>
MOEC_HD bool finish_gradient(const Slots& slots, const moec_router_desc& desc, const void* scale,
                             moec_dtype scale_dtype, const int32_t* ids, const float* w,
                             const float* d_routing_weights, float* d_w, VisitScale visit_scale) {
  const RoundTo round_normed(desc, desc.norm_precision);
  const Divisor divisor = norm_divisor(slots, desc, w);
  const float factor = desc.scale;
  slots.each([=](int32_t k) {
    d_w[k] = ids[k] < 0 ? 0.0f : d_routing_weights[k] * factor;
    if (ids[k] < 0 || !scale) return;
    visit_scale(k, d_w[k] * round_normed(w[k] / divisor.value));
    d_w[k] *= load_real(scale, scale_dtype, ids[k]);
  });
  norm_gradient(slots, desc, ids, w, divisor, d_w);
  return divisor.is_scale_free;
}

}  // namespace moec::math
