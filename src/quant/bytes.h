// SPDX-License-Identifier: Apache-2.0
// Codes of a byte each: INT8 as compressed-tensors' int-quantized has it, w = (q - zero) * scale,
// and FP8, w = q * scale, both with a scale for each block of any size.
#pragma once

#include "quant/numbers.h"

namespace moec::quant {

// The entry of a block's scale.
struct BlockEntries {
  MOEC_HD static int64_t entry(const CodedView& m, int64_t n, int64_t k) {
    return m.scales.at(m.rows.of(n), k);
  }
};

struct Int8 : Shifted, BlockEntries {
  static constexpr float kZero = 0;  // without zero points
  static constexpr FormatInfo kInfo = {.scheme = MOEC_SCHEME_INT8,
                                       .name = "int8",
                                       .code_bits = 8,
                                       .code_dtypes = kI8Types,
                                       .scale_dtypes = kRealTypes,
                                       .zeros_dtypes = kI8Types,
                                       .any_block = true};

  MOEC_HD static Block block(const CodedView& m, int64_t n, int64_t k) {
    const int64_t row = m.rows.of(n);
    return {load_real(m.scales.data, m.scales.dtype, m.scales.at(row, k)),
            m.zeros ? float(static_cast<const int8_t*>(m.zeros.data)[m.zeros.at(row, k)]) : kZero};
  }
  MOEC_HD static float code(const CodedView& m, int64_t n, int64_t k) {
    return static_cast<const int8_t*>(m.codes)[n * m.row_stride + k * m.col_stride];
  }
};

struct Fp8 : Scaled, BlockEntries {
  static constexpr FormatInfo kInfo = {.scheme = MOEC_SCHEME_FP8,
                                       .name = "fp8",
                                       .code_bits = 8,
                                       .code_dtypes = kFp8Types,
                                       .scale_dtypes = kRealOrPowerTypes,
                                       .any_block = true,
                                       .spare_row = true};

  MOEC_HD static Block block(const CodedView& m, int64_t n, int64_t k) {
    return {load_scale(m.scales, entry(m, n, k))};
  }
  MOEC_HD static float number(const CodedView& m, uint32_t byte) {
    return m.code_dtype == MOEC_F8_E5M2 ? e5m2(byte) : e4m3(byte);
  }
  MOEC_HD static float code(const CodedView& m, int64_t n, int64_t k) {
    return number(m, byte_at(m.codes, n * m.row_stride + k * m.col_stride));
  }
};

}  // namespace moec::quant
