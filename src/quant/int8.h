// SPDX-License-Identifier: Apache-2.0
// INT8 in channels, as compressed-tensors' int-quantized has it: w = (q - zero[n]) * scale[n], in
// fp32 with one rounding. Symmetric weights have no zero points.
#pragma once

#include <type_traits>

#include "quant/coded.h"

namespace moec::quant {

struct Int8 {
  static constexpr FormatInfo kInfo = {.scheme = MOEC_SCHEME_INT8,
                                       .name = "int8",
                                       .code_bits = 8,
                                       .code_dtype = MOEC_I8,
                                       .zeros_dtype = MOEC_I8,
                                       .block_n = 1,
                                       .block_k = 0};

  using Code = int8_t;
  // What the codes of a block have in common; as vectors, one block for each element. decode()
  // takes a code as a number.
  template <class Real>
  struct BlockOf {
    Real scale, zero;
  };
  using Block = BlockOf<float>;
  MOEC_HD static Block block(const CodedView& m, int64_t n, int64_t k) {
    return {load_real(m.scales.data, m.scales.dtype, m.scales.at(n, k)),
            m.zeros ? float(static_cast<const int8_t*>(m.zeros.data)[m.zeros.at(n, k)]) : 0.0f};
  }
  template <class Real>
  MOEC_HD static Real decode(const std::type_identity_t<Real>& code, const BlockOf<Real>& block) {
    return (code - block.zero) * block.scale;
  }
  MOEC_HD static float value(const CodedView& m, int64_t n, int64_t k) {
    const auto* const codes = static_cast<const Code*>(m.codes);
    return decode(float(codes[n * m.row_stride + k * m.col_stride]), block(m, n, k));
  }
};

}  // namespace moec::quant
