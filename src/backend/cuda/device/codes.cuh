// SPDX-License-Identifier: Apache-2.0
// Codes of quantised weights as numbers.
#pragma once

#include <cstdint>
#include <type_traits>

#include "quant/format.h"

namespace moec::cuda {

// Eight signed bytes plus 2^23 + 128: a byte in the lowest bits of 2^23 adds its value, and with
// the sign bit turned it is 128 more than the code. The instructions that convert integers are far
// slower.
__device__ __forceinline__ void widen_biased(uint2 codes, float (&values)[8]) {
  const uint32_t words[2] = {codes.x ^ 0x80808080u, codes.y ^ 0x80808080u};
#pragma unroll
  for (int i = 0; i < 8; ++i)
    values[i] = __uint_as_float(__byte_perm(words[i / 4], 0x4b000000u, 0x7440 | (i % 4)));
}
__device__ __forceinline__ void widen(uint2 codes, float (&values)[8]) {
  widen_biased(codes, values);
#pragma unroll
  for (float& value : values) value -= 8388608.0f + 128.0f;
}

template <class Format>
constexpr bool kSignedBytes = quant::ChannelFormats::index(Format::kInfo.scheme) >= 0;

// Eight neighbours along the contiguous axis, from a multiple of eight on.
template <class Format>
struct CodeChunk;

template <class Format>
  requires(quant::is_bytes(Format::kInfo))
struct CodeChunk<Format> {
  uint2 codes;
  __device__ void load(const quant::CodedView& m, int64_t n, int64_t k) {
    const char* const first = static_cast<const char*>(m.codes);
    codes = *reinterpret_cast<const uint2*>(first + n * m.row_stride + k * m.col_stride);
  }
  __device__ void numbers(const quant::CodedView& m, float (&values)[8]) const {
    if constexpr (kSignedBytes<Format>) {
      widen(codes, values);
    } else {
#pragma unroll
      for (int i = 0; i < 8; ++i)
        values[i] = Format::number(m, (i < 4 ? codes.x : codes.y) >> i % 4 * 8 & 0xffu);
    }
  }
};

template <class Format>
constexpr bool kHasNibbles = requires { Format::nibble_of(0); };
template <class Format>
  requires(kHasNibbles<Format>)
struct CodeChunk<Format> {
  uint32_t codes;
  __device__ void load(const quant::CodedView& m, int64_t n, int64_t k) {
    codes = static_cast<const uint32_t*>(m.codes)[Format::place(m, n, k) / 8];
  }
  __device__ void numbers(const quant::CodedView& m, float (&values)[8]) const {
#pragma unroll
    for (int i = 0; i < 8; ++i)
      values[i] = Format::number(m, codes >> Format::nibble_of(i) * 4 & 15u);
  }
};

// Whether codes of a format lie in such chunks. AWQ's have blocks of their own: they are decoded by
// columns (weights/decode_columns.cu).
template <class Format>
constexpr bool kHasChunks =
    quant::is_bytes(Format::kInfo) || (kHasNibbles<Format> && !std::is_same_v<Format, quant::Awq>);

}  // namespace moec::cuda
