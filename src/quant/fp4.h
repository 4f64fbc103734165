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
    return {e8m0(byte_at(m.scales.data, entry(m, n, k)))};
  }
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
    const float scale = e4m3(byte_at(m.scales.data, entry(m, n, k))), scale2 = *m.scales2;
    return {m.flags & MOEC_QUANT_SCALES2_DIVIDES ? scale / scale2 : scale * scale2};
  }
};

}  // namespace moec::quant
