// SPDX-License-Identifier: Apache-2.0
// Pieces that the oracle's router shares between its forward and backward files.
#pragma once

#include <array>
#include <cstddef>

#include "moe_oracle.h"

namespace moec::oracle {

// PhiMoE's two-step rule on one row of logits: per step the chosen id (-1 = nobody), its weight,
// and the thresholded softmax [C] that the weight was taken from.
struct Mixer {
  std::array<int, 2> id = {-1, -1};
  std::array<double, 2> weight = {0, 0};
  std::array<Vec, 2> probs;
};
Mixer sparse_mixer(const RouterConfig& router, const Vec& logits, Fault fault);

Vec score_row(const RouterConfig& router, const Vec& capped_logits);
bool normalises(const RouterConfig& router);
// What the K raw weights are divided by; 0: their normalised weights and gradients are 0.
double norm_divisor(const RouterConfig& router, const Vec& raw);
template <typename V>
V row_of(const V& all, size_t row, size_t width) {
  const auto first = all.begin() + static_cast<std::ptrdiff_t>(row * width);
  return V(first, first + static_cast<std::ptrdiff_t>(width));
}
// 1 / sqrt(mean(x^2) + eps)
double inverse_rms(const double* row, int hidden, double eps);

}  // namespace moec::oracle
