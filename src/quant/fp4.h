// SPDX-License-Identifier: Apache-2.0
// E2M1 codes in blocks along the contiguous axis, low nibble first.
//   MXFP4  w = q * 2^(scale - 127), of 32
//   NVFP4  w = q * (scale * scales2), or q * (scale / scales2), of 16
#pragma once

#include "quant/bytes.h"

namespace moec::quant {

struct Fp4Codes : Scaled, BlockEntries {
  MOEC_HD static int64_t place(const CodedView& m, int64_t n, int64_t k) {
    return m.rows.of(n) * m.row_stride + k * m.col_stride;
  }
  MOEC_HD static int nibble_of(int i) { return i; }
  MOEC_HD static float number(const CodedView&, uint32_t nibble) { return e2m1(nibble); }
  MOEC_HD static float code(const CodedView& m, int64_t n, int64_t k) {
    return e2m1(low_nibble_first(m.codes, place(m, n, k)));
  }
};

struct Mxfp4 : Fp4Codes {
  static constexpr FormatInfo kInfo = {.scheme = MOEC_SCHEME_MXFP4,
                                       .name = "mxfp4",
                                       .code_bits = 4,
                                       .code_dtypes = kU8Types,
                                       .unit_values = 32,
                                       .unit_elements = 16,
                                       .whole_units = true,
                                       .scale_dtypes = kPowerTypes,
                                       .block_k = 32,
                                       .along_packed = true};

  MOEC_HD static Block block(const CodedView& m, int64_t n, int64_t k) {
    return of_scale(m, byte_at(m.scales.data, entry(m, n, k)), 1);
  }
  // Of its scale's code; there is no second scale.
  MOEC_HD static Block of_scale(const CodedView&, uint32_t code, float) { return {e8m0(code)}; }
};

struct Nvfp4 : Fp4Codes {
  static constexpr FormatInfo kInfo = {.scheme = MOEC_SCHEME_NVFP4,
                                       .name = "nvfp4",
                                       .code_bits = 4,
                                       .code_dtypes = kU8Types,
                                       .unit_values = 16,
                                       .unit_elements = 8,
                                       .whole_units = true,
                                       .scale_dtypes = kE4m3Types,
                                       .block_k = 16,
                                       .along_packed = true,
                                       .extras = kScales2};

  MOEC_HD static Block block(const CodedView& m, int64_t n, int64_t k) {
    return of_scale(m, byte_at(m.scales.data, entry(m, n, k)), *m.scales2);
  }
  // Of its scale's code and of the second scale.
  MOEC_HD static Block of_scale(const CodedView& m, uint32_t code, float scale2) {
    const float scale = e4m3(code);
    return {m.flags & MOEC_QUANT_SCALES2_DIVIDES ? scale / scale2 : scale * scale2};
  }
};

}  // namespace moec::quant
