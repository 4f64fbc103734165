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

// R7. s, z: the token's scores and capped logits; w[k] is 0 where ids[k] is -1.
MOEC_HD void raw_weights(const moec_router_desc& desc, const float* s, const float* z,
                         const int32_t* ids, float* w) {
  const float* const source = desc.weight_rule == MOEC_WEIGHT_SCORE ? s : z;
  for (int32_t k = 0; k < desc.top_k; ++k) w[k] = ids[k] < 0 ? 0.0f : source[ids[k]];
  weight_rule(desc, ids, w, RoundTo(desc, desc.norm_precision));
}

// R8, R9. scale: one factor for each id, or null.
MOEC_HD void finish_weights(const moec_router_desc& desc, const void* scale, moec_dtype scale_dtype,
                            const int32_t* ids, float* w) {
  const RoundTo round_normed(desc, desc.norm_precision), round_weight(desc, desc.weight_precision);
  const float divisor = norm_divisor(desc, w).value;
  for (int32_t k = 0; k < desc.top_k; ++k) {
    if (ids[k] < 0) continue;  // weight 0
    w[k] = round_normed(w[k] / divisor) * desc.scale;
    if (scale) w[k] *= load_real(scale, scale_dtype, ids[k]);
    w[k] = round_weight(w[k]);
  }
}

// From d_weights, the gradient at the routing weights, to d_w at the weights w of R7.
// visit_scale(k, d): d is what slot k adds to the gradient of its id's scale. Returns whether the
// result does not change when all w are multiplied by one factor.
template <class VisitScale>
MOEC_HD bool finish_gradient(const moec_router_desc& desc, const void* scale,
                             moec_dtype scale_dtype, const int32_t* ids, const float* w,
                             const float* d_weights, float* d_w, VisitScale visit_scale) {
  const RoundTo round_normed(desc, desc.norm_precision);
  const Divisor divisor = norm_divisor(desc, w);
  for (int32_t k = 0; k < desc.top_k; ++k) {
    d_w[k] = ids[k] < 0 ? 0.0f : d_weights[k] * desc.scale;
    if (ids[k] < 0 || !scale) continue;
    visit_scale(k, d_w[k] * round_normed(w[k] / divisor.value));
    d_w[k] *= load_real(scale, scale_dtype, ids[k]);
  }
  norm_gradient(desc, ids, w, divisor, d_w);
  return divisor.is_scale_free;
}

}  // namespace moec::math
