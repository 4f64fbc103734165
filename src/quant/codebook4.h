// SPDX-License-Identifier: Apache-2.0
// bitsandbytes' 4-bit formats: w = codebook[q] * scale. The codes of a tensor are one stream in the
// order of its memory, the first of two in the high nibble; a block is a run of the stream. Nested
// scales: scale_book[u8] * scales2 + scale_offset, rounded twice.
#pragma once

#include "quant/numbers.h"

namespace moec::quant {

struct Codebook4 : Scaled {
  static constexpr FormatInfo kInfo = {.scheme = MOEC_SCHEME_CODEBOOK4,
                                       .name = "codebook4",
                                       .code_bits = 4,
                                       .code_dtypes = kAnyBytes,
                                       .storage = Storage::kStream,
                                       .scale_dtypes = kRealOrBookTypes,
                                       .block_k = 64,
                                       .along_packed = true,
                                       .any_block = true,
                                       .extras = kCodebook | kNested};
  static constexpr int64_t kLeastBlock = 32, kMostBlock = 4096, kScaleBlock = 256;

  MOEC_HD static int64_t place(const CodedView& m, int64_t n, int64_t k) {
    return m.first + m.rows.of(n) * m.row_stride + k * m.col_stride;
  }
  MOEC_HD static int64_t entry(const CodedView& m, int64_t n, int64_t k) {
    return m.scales.block_k.of(place(m, n, k));
  }
  MOEC_HD static Block block(const CodedView& m, int64_t n, int64_t k) {
    const int64_t at = entry(m, n, k);
    if (!m.scale_book) return {load_real(m.scales.data, m.scales.dtype, at)};
    const float scale = m.scale_book[byte_at(m.scales.data, at)];
    return {product(scale, m.scales2[m.scale_block.of(at)]) + *m.scale_offset};
  }
  MOEC_HD static float code(const CodedView& m, int64_t n, int64_t k) {
    return m.codebook[high_nibble_first(m.codes, place(m, n, k))];
  }
};

}  // namespace moec::quant
