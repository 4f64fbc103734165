// SPDX-License-Identifier: Apache-2.0
#include "backend/cuda/sm90/gate_form.h"

#include "math/activation.h"

namespace moec::cuda {
namespace {

// -g where the exponent reaches kMostExponent; with a cubic term, the first half behind it.
float lowest_gate(float rate, float cubic) {
  if (cubic == 0) return -GateForm::kMostExponent / rate;
  float g = 0.5f;
  while (rate * (g + cubic * g * g * g) < GateForm::kMostExponent) g += 0.5f;
  return -g;
}

}  // namespace

bool has_gate_form(const moec_activation& activation) {
  const auto form = math::sigmoid_form(activation);
  return form && form->alpha >= 0;
}

GateForm gate_form(const moec_activation& activation) {
  const auto form = math::sigmoid_form(activation);
  if (!form) return {};
  const float alpha = form->alpha, cubic = form->cubic, rate = alpha * GateForm::kLog2E;
  return {.lowest = lowest_gate(rate, cubic),
          .limit = form->limit,
          .offset = form->offset,
          .exponent = {-rate, -rate * cubic},
          .slope = {alpha, 3 * alpha * cubic}};
}

}  // namespace moec::cuda
