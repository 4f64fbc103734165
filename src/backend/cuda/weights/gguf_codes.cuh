// SPDX-License-Identifier: Apache-2.0
// Eight neighbours along k of ggml's blocks (quant/gguf.h), from a multiple of eight on, as
// numbers. Bytes of a block begin at any address.
#pragma once

#include "backend/cuda/device/line_words.h"
#include "quant/format.h"

namespace moec::cuda {

// Eight bytes from words that hold them; a word without any is not read.
__device__ __forceinline__ uint2 eight_bytes_at(const void* base, int64_t first) {
  const uint64_t address = reinterpret_cast<uint64_t>(base) + uint64_t(first);
  const uint32_t* const words = reinterpret_cast<const uint32_t*>(address & ~uint64_t(3));
  const uint32_t shift = uint32_t(address & 3) * 8;
  const uint32_t low = __ldg(words), middle = __ldg(words + 1);
  const uint32_t high = shift ? __ldg(words + 2) : 0;
  return {__funnelshift_r(low, middle, shift), __funnelshift_r(middle, high, shift)};
}
// Numbers of bytes, less `zero`.
__device__ __forceinline__ void bytes_less(uint2 bytes, float zero, float (&v)[8]) {
#pragma unroll
  for (uint32_t i = 0; i < 8; ++i) {
    const uint32_t bits = permute(i < 4 ? bytes.x : bytes.y, 0x4b000000u, 0x7440u | (i & 3));
    v[i] = __uint_as_float(bits) - (8388608.0f + zero);
  }
}
__device__ __forceinline__ uint2 masked(uint2 bytes, int shift, uint32_t mask) {
  return {bytes.x >> shift & mask, bytes.y >> shift & mask};
}
constexpr uint32_t kNibbles = 0x0f0f0f0fu;

template <class Format>
struct GgufCodes;

template <>
struct GgufCodes<quant::GgufQ8> {
  uint2 codes;
  __device__ __forceinline__ void load(const quant::CodedView& m, int64_t n, int64_t k) {
    codes = eight_bytes_at(m.codes, quant::GgufQ8::first_byte(m, n, k) + 2 + (k & 31));
  }
  __device__ __forceinline__ void numbers(float (&v)[8]) const {
    bytes_less({codes.x ^ 0x80808080u, codes.y ^ 0x80808080u}, 128, v);
  }
};

// Values 0 to 15 of 32 in low nibbles, those from 16 on in high ones.
template <class Format, int kFirst>
struct SplitNibbles {
  uint2 codes;
  __device__ __forceinline__ void load(const quant::CodedView& m, int64_t n, int64_t k) {
    const uint2 bytes = eight_bytes_at(m.codes, Format::first_byte(m, n, k) + kFirst + (k & 15));
    codes = masked(bytes, k & 16 ? 4 : 0, kNibbles);
  }
};
template <>
struct GgufCodes<quant::GgufQ4> : SplitNibbles<quant::GgufQ4, 2> {
  __device__ __forceinline__ void numbers(float (&v)[8]) const { bytes_less(codes, 8, v); }
};
template <>
struct GgufCodes<quant::GgufMxfp4> : SplitNibbles<quant::GgufMxfp4, 1> {
  // Exponent and mantissa of E2M1 as those of a number of 2^-126.
  __device__ __forceinline__ void numbers(float (&v)[8]) const {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const uint32_t code = (i < 4 ? codes.x : codes.y) >> i % 4 * 8 & 15u;
      v[i] = __uint_as_float((code & 8u) << 28 | (code & 7u) << 22) * 0x1p126f;
    }
  }
};

template <>
struct GgufCodes<quant::GgufQ4K> {
  uint2 codes;
  __device__ __forceinline__ void load(const quant::CodedView& m, int64_t n, int64_t k) {
    const int64_t first = quant::GgufQ4K::first_byte(m, n, k) + 16 + (k / 64 & 3) * 32 + (k & 31);
    codes = masked(eight_bytes_at(m.codes, first), k & 32 ? 4 : 0, kNibbles);
  }
  __device__ __forceinline__ void numbers(float (&v)[8]) const { bytes_less(codes, 0, v); }
};

template <>
struct GgufCodes<quant::GgufQ6K> {
  uint2 codes;
  __device__ __forceinline__ void load(const quant::CodedView& m, int64_t n, int64_t k) {
    const int64_t first = quant::GgufQ6K::first_byte(m, n, k), half = k / 128 & 1;
    const int quarter = int(k / 32 & 3);
    const uint2 low =
        masked(eight_bytes_at(m.codes, first + half * 64 + (quarter & 1) * 32 + (k & 31)),
               quarter & 2 ? 4 : 0, kNibbles);
    const uint2 high = masked(eight_bytes_at(m.codes, first + 128 + half * 32 + (k & 31)),
                              2 * quarter, 0x03030303u);
    codes = {low.x | high.x << 4, low.y | high.y << 4};
  }
  __device__ __forceinline__ void numbers(float (&v)[8]) const { bytes_less(codes, 32, v); }
};

}  // namespace moec::cuda
