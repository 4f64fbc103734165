// SPDX-License-Identifier: Apache-2.0
// Auxiliary losses over the router's logits: what one token contributes, and its gradient.
//
//   balance   L = c * sum_e n_e * sum_t p[t,e],  n_e = how often e is among the top K of p[t,:];
//             n_e counts as a constant.  N = number of counted tokens.
//     Mixtral    c = coefficient * E / N^2           (Hugging Face load_balancing_loss_func)
//     Switch     c = coefficient * E / (K N^2)       (Megatron aux_loss)
//     sequence   Switch of each sequence, averaged over the sequences
//   z         L = coefficient / N * sum_t logsumexp(z[t,:])^2
#pragma once

#include <moec/moec.h>

#include "core/portable.h"

namespace moec::math {

// c of one stretch of tokens: all of them, or one of `sequences`.
MOEC_HD double balance_factor(uint32_t kind, double coefficient, int32_t experts, int32_t top_k,
                              int64_t tokens, int64_t sequences) {
  if (tokens == 0) return 0.0;
  const double scale = coefficient * experts / (double(tokens) * double(tokens));
  return kind == MOEC_LOSS_BALANCE_MIXTRAL ? scale : scale / top_k / double(sequences);
}
// p = s / sum of s, for scores that do not sum to 1 by themselves. dot = sum of d_p p over the row.
MOEC_HD float share_divisor(float sum) {
  return sum + 1e-20f;
}
MOEC_HD float share_gradient(float d_p, float dot, float divisor) {
  return (d_p - dot) / divisor;
}

// d(logsumexp^2 * factor) / d z = slope * softmax(z)
MOEC_HD float z_loss_slope(float logsumexp, float factor) {
  return 2.0f * logsumexp * factor;
}

}  // namespace moec::math
