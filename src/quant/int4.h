// SPDX-License-Identifier: Apache-2.0
// Integers of 4 bits, eight in an i32 from its lowest bits on: w = (q - zero) * scale.
//   compressed-tensors   eight neighbours along the contiguous axis; q and zero are both 8 too many
//   AWQ gemm             eight columns n of a row k, in the order 0 2 4 6 1 3 5 7
//   GPTQ                 eight k of a column n; version 1 stores zero points less 1
// Zero points lie eight along N, in the order of AWQ, or as they come.
#pragma once

#include "quant/numbers.h"

namespace moec::quant {

struct Int4Codes : Shifted {
  static constexpr float kZero = 8;  // without zero points
  MOEC_HD static float number(const CodedView&, uint32_t nibble) { return float(int32_t(nibble)); }
  // The block along k: of the group index, unless that names none.
  MOEC_HD static int64_t block_along_k(const CodedView& m, int64_t k) {
    const int64_t group = m.group_index ? m.group_index[k] : -1;
    return group >= 0 && group < m.blocks_along_k ? group : m.scales.block_k.of(k);
  }
  MOEC_HD static int64_t entry(const CodedView& m, int64_t n, int64_t k) {
    return m.scales.block_n.of(m.rows.of(n)) * m.scales.row_stride +
           block_along_k(m, k) * m.scales.col_stride;
  }
  // Order::nibble_of(i): where code i of eight is.
  template <class Order>
  MOEC_HD static Block block_with(const CodedView& m, int64_t n, int64_t k, float added) {
    const int64_t along_n = m.scales.block_n.of(m.rows.of(n)), along_k = block_along_k(m, k);
    Block block = {load_real(m.scales.data, m.scales.dtype,
                             along_n * m.scales.row_stride + along_k * m.scales.col_stride),
                   kZero};
    if (m.zeros) {
      const int64_t word = (along_n >> 3) * m.zeros.row_stride + along_k * m.zeros.col_stride;
      const int64_t at = word * 8 + Order::nibble_of(int(along_n & 7));
      block.zero = number(m, low_nibble_first(m.zeros.data, at)) + added;
    }
    return block;
  }
};

constexpr FormatInfo int4_info(uint32_t scheme, const char* name, Storage storage,
                               Orientations orientations, bool zeros_needed, uint32_t extras) {
  return {.scheme = scheme,
          .name = name,
          .code_bits = 4,
          .code_dtypes = kI32Types,
          .storage = storage,
          .orientations = orientations,
          .unit_values = 8,
          .whole_units = orientations == Orientations::kInOut,
          .scale_dtypes = kRealTypes,
          .zeros_dtypes = kI32Types,
          .zeros_values = 8,
          .zeros_needed = zeros_needed,
          .any_block = true,
          .extras = extras};
}

struct Int4 : Int4Codes {
  static constexpr FormatInfo kInfo =
      int4_info(MOEC_SCHEME_INT4, "int4", Storage::kRows, Orientations::kBoth, false, kGroupIndex);
  MOEC_HD static Block block(const CodedView& m, int64_t n, int64_t k) {
    return block_with<Int4>(m, n, k, 0);
  }
  MOEC_HD static int nibble_of(int i) { return i; }
  MOEC_HD static int64_t place(const CodedView& m, int64_t n, int64_t k) {
    return m.rows.of(n) * m.row_stride + k * m.col_stride;
  }
  MOEC_HD static float code(const CodedView& m, int64_t n, int64_t k) {
    return number(m, low_nibble_first(m.codes, place(m, n, k)));
  }
};

struct Awq : Int4Codes {
  static constexpr FormatInfo kInfo =
      int4_info(MOEC_SCHEME_AWQ, "awq", Storage::kRows, Orientations::kInOut, true, kNoExtras);
  MOEC_HD static int nibble_of(int i) { return (i & 1) * 4 + (i >> 1); }
  MOEC_HD static Block block(const CodedView& m, int64_t n, int64_t k) {
    return block_with<Awq>(m, n, k, 0);
  }
  MOEC_HD static int64_t place(const CodedView& m, int64_t n, int64_t k) {
    const int64_t row = m.rows.of(n);
    return k * m.col_stride + (row & ~int64_t(7)) + nibble_of(int(row & 7));
  }
  MOEC_HD static float code(const CodedView& m, int64_t n, int64_t k) {
    return number(m, low_nibble_first(m.codes, place(m, n, k)));
  }
};

template <int kVersion>
struct Gptq : Int4Codes {
  static constexpr FormatInfo kInfo = int4_info(
      kVersion == 1 ? MOEC_SCHEME_GPTQ : MOEC_SCHEME_GPTQ_V2, kVersion == 1 ? "gptq" : "gptq_v2",
      Storage::kAlongK, Orientations::kInOut, true, kGroupIndex);
  MOEC_HD static Block block(const CodedView& m, int64_t n, int64_t k) {
    return block_with<Int4>(m, n, k, kVersion == 1 ? 1.0f : 0.0f);
  }
  MOEC_HD static float code(const CodedView& m, int64_t n, int64_t k) {
    const int64_t word = (k >> 3) * m.col_stride + m.rows.of(n);
    return number(m, low_nibble_first(m.codes, word * 8 + (k & 7)));
  }
};

}  // namespace moec::quant
