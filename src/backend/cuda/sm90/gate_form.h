// SPDX-License-Identifier: Apache-2.0
// Activations as the epilogues of the row GEMMs evaluate them: math::SigmoidForm with its factors
// for powers of 2.
#pragma once

#include <moec/moec.h>

namespace moec::cuda {

struct GateForm {
  static constexpr float kLog2E = 1.4426950408889634f;
  static constexpr float kMostExponent = 60;  // of 2 in the sigmoid's 1 / (1 + 2^x): beyond, its
  float lowest;                               // value counts as 2^-60, and g' as this one
  float limit, offset;
  float exponent[2];  // x = g' (exponent[0] + exponent[1] g'^2)
  float slope[2];     // alpha (1 + 3 cubic g'^2) = slope[0] + slope[1] g'^2
};

// Whether the epilogues have this activation: it has a sigmoid form whose sigmoid rises with g.
bool has_gate_form(const moec_activation& activation);
// All 0 for an activation without one.
GateForm gate_form(const moec_activation& activation);

}  // namespace moec::cuda
