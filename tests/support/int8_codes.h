// SPDX-License-Identifier: Apache-2.0
// INT8 codes at random, for layers that the oracle knows (RunOptions::codes).
#pragma once

#include <cmath>

#include "layer_runner.h"
#include "random.h"

namespace moec::test {

// Of a matrix of each expert: values are about as large as 1 / sqrt(inputs).
inline oracle::Coded int8_codes(int experts, int rows, int inputs, bool zeros,
                                moec_dtype scale_dtype, Random* random) {
  oracle::Coded coded;
  for (int64_t i = 0; i < int64_t(experts) * rows * inputs; ++i)
    coded.codes.push_back(double(random->below(256)) - 128);
  for (int64_t n = 0; n < int64_t(experts) * rows; ++n) {
    const double scale = (0.5 + random->below(100) / 100.0) / (75 * std::sqrt(inputs));
    coded.scales.push_back(oracle::round_to(rounding_of(scale_dtype), scale));
    if (zeros) coded.zeros.push_back(double(random->below(41)) - 20);
  }
  return coded;
}

}  // namespace moec::test
