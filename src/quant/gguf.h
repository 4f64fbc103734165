// SPDX-License-Identifier: Apache-2.0
// ggml's blocks along K, each with its scales (d, m: f16; little endian):
//   Q8_0    32 values in  34 bytes   d, q[32]                     d q
//   Q4_0    32 values in  18 bytes   d, q[16]                     d (q - 8)
//   MXFP4   32 values in  17 bytes   e8m0 d, q[16]                d e2m1(q)
//   Q4_K   256 values in 144 bytes   d, m, scales[12], q[128]     (d s) q - m z, of 32 values
//   Q6_K   256 values in 210 bytes   ql[128], qh[64], s[16], d    (d s) (q - 32), of 16 values
#pragma once

#include "quant/numbers.h"

namespace moec::quant {

constexpr FormatInfo gguf_info(uint32_t scheme, const char* name, int code_bits, int64_t values,
                               int64_t bytes) {
  return {.scheme = scheme,
          .name = name,
          .code_bits = code_bits,
          .code_dtypes = kU8Types,
          .orientations = Orientations::kOutIn,
          .unit_values = values,
          .unit_elements = bytes,
          .whole_units = true};
}

// kShare: values that have one scale.
template <int kValues, int kBytes, int kShare>
struct GgufBlocks {
  MOEC_HD static int64_t first_byte(const CodedView& m, int64_t n, int64_t k) {
    return m.rows.of(n) * m.row_stride + k / kValues * kBytes;
  }
  MOEC_HD static int64_t entry(const CodedView& m, int64_t n, int64_t k) {
    return (m.rows.of(n) * m.row_stride / kBytes * kValues + k) / kShare;
  }
};
// Value j of 32 in the low nibble of byte j, value j + 16 in its high one.
MOEC_HD uint32_t split_nibble(const void* codes, int64_t first, int64_t k) {
  return byte_at(codes, first + (k & 15)) >> (k & 16 ? 4 : 0) & 15u;
}

struct GgufQ8 : Scaled, GgufBlocks<32, 34, 32> {
  static constexpr FormatInfo kInfo = gguf_info(MOEC_SCHEME_GGUF_Q8_0, "gguf_q8_0", 8, 32, 34);
  MOEC_HD static Block block(const CodedView& m, int64_t n, int64_t k) {
    return {half_at(m.codes, first_byte(m, n, k))};
  }
  MOEC_HD static float code(const CodedView& m, int64_t n, int64_t k) {
    return static_cast<const int8_t*>(m.codes)[first_byte(m, n, k) + 2 + (k & 31)];
  }
};

struct GgufQ4 : Scaled, GgufBlocks<32, 18, 32> {
  static constexpr FormatInfo kInfo = gguf_info(MOEC_SCHEME_GGUF_Q4_0, "gguf_q4_0", 4, 32, 18);
  MOEC_HD static Block block(const CodedView& m, int64_t n, int64_t k) {
    return {half_at(m.codes, first_byte(m, n, k))};
  }
  MOEC_HD static float code(const CodedView& m, int64_t n, int64_t k) {
    return float(int32_t(split_nibble(m.codes, first_byte(m, n, k) + 2, k)) - 8);
  }
};

struct GgufMxfp4 : Scaled, GgufBlocks<32, 17, 32> {
  static constexpr FormatInfo kInfo = gguf_info(MOEC_SCHEME_GGUF_MXFP4, "gguf_mxfp4", 4, 32, 17);
  MOEC_HD static Block block(const CodedView& m, int64_t n, int64_t k) {
    return {e8m0(byte_at(m.codes, first_byte(m, n, k)))};
  }
  MOEC_HD static float code(const CodedView& m, int64_t n, int64_t k) {
    return e2m1(split_nibble(m.codes, first_byte(m, n, k) + 1, k));
  }
};

struct GgufQ4K : GgufBlocks<256, 144, 32> {
  static constexpr FormatInfo kInfo = gguf_info(MOEC_SCHEME_GGUF_Q4_K, "gguf_q4_k", 4, 256, 144);
  template <class Real>
  struct BlockOf {
    Real scale, least;
  };
  using Block = BlockOf<float>;
  MOEC_HD static Block block(const CodedView& m, int64_t n, int64_t k) {
    const int64_t at = first_byte(m, n, k), part = k / 32 & 7;
    const auto packed = [&](int64_t i) { return byte_at(m.codes, at + 4 + i); };
    uint32_t scale, least;
    if (part < 4) {
      scale = packed(part) & 63u;
      least = packed(part + 4) & 63u;
    } else {
      scale = (packed(part + 4) & 15u) | packed(part - 4) >> 6 << 4;
      least = packed(part + 4) >> 4 | packed(part) >> 6 << 4;
    }
    return {half_at(m.codes, at) * float(int32_t(scale)),
            half_at(m.codes, at + 2) * float(int32_t(least))};
  }
  MOEC_HD static float code(const CodedView& m, int64_t n, int64_t k) {
    const int64_t at = first_byte(m, n, k) + 16 + (k / 64 & 3) * 32 + (k & 31);
    return float(int32_t(byte_at(m.codes, at) >> (k & 32 ? 4 : 0) & 15u));
  }
  template <class Real>
  MOEC_HD static Real decode(const std::type_identity_t<Real>& code, const BlockOf<Real>& block) {
    return product(block.scale, code) - block.least;
  }
};

struct GgufQ6K : Scaled, GgufBlocks<256, 210, 16> {
  static constexpr FormatInfo kInfo = gguf_info(MOEC_SCHEME_GGUF_Q6_K, "gguf_q6_k", 6, 256, 210);
  MOEC_HD static Block block(const CodedView& m, int64_t n, int64_t k) {
    const int64_t at = first_byte(m, n, k);
    const int8_t scale = static_cast<const int8_t*>(m.codes)[at + 192 + (k / 16 & 15)];
    return {half_at(m.codes, at + 208) * float(scale)};
  }
  MOEC_HD static float code(const CodedView& m, int64_t n, int64_t k) {
    const int64_t at = first_byte(m, n, k), half = k / 128 & 1, quarter = k / 32 & 3;
    const uint32_t low =
        byte_at(m.codes, at + half * 64 + (quarter & 1) * 32 + (k & 31)) >> (quarter & 2 ? 4 : 0) &
        15u;
    const uint32_t high =
        byte_at(m.codes, at + 128 + half * 32 + (k & 31)) >> (2 * int(quarter)) & 3u;
    return float(int32_t(low | high << 4) - 32);
  }
};

}  // namespace moec::quant
