// SPDX-License-Identifier: Apache-2.0
// Values of quantised matrices.
#include <cstddef>

#include "moe_oracle.h"

namespace moec::oracle {

Vec dequantise_int8(const Coded& matrix, Rounding rounding) {
  const size_t channels = matrix.scales.size(), inputs = matrix.codes.size() / channels;
  Vec values;
  values.reserve(matrix.codes.size());
  for (size_t n = 0; n < channels; ++n) {
    const double zero = matrix.zeros.empty() ? 0 : matrix.zeros[n];
    for (size_t k = 0; k < inputs; ++k) {
      const double exact = (matrix.codes[n * inputs + k] - zero) * matrix.scales[n];
      values.push_back(round_to(rounding, round_to(Rounding::kFp32, exact)));
    }
  }
  return values;
}

}  // namespace moec::oracle
