// SPDX-License-Identifier: Apache-2.0
// What the scales of gate and of up have in common, which are bound each for itself.
#pragma once

#include "backend/weights.h"

namespace moec::cuda {

struct CommonScales {
  moec_dtype dtype;  // 0: they differ
  bool zeros;        // whether one of them has zero points
};
// Of one matrix: twice the same.
inline CommonScales common_scales(const ExpertQuant& first, const ExpertQuant& second) {
  const moec_dtype dtype = first.scales.array.dtype;
  return {second.scales.array.dtype == dtype ? dtype : moec_dtype(0),
          first.zeros.array.present() || second.zeros.array.present()};
}

}  // namespace moec::cuda
