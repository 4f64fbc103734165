// SPDX-License-Identifier: Apache-2.0
// What products in pairs have in common: AVX512-BF16 and AVX512-VBMI. vdpbf16ps reads subnormal
// values as zeros, and so does the instruction that rounds them.
#pragma once

#include "backend/cpu/tile_ops_avx512.h"

// Offsets within a chunk are small:
// NOLINTBEGIN(bugprone-implicit-widening-of-multiplication-result)
namespace moec::cpu {
namespace {

constexpr int kWords = 32;  // of a vector

inline __m512i rounded_words(__m512 first, __m512 second) {
  return __m512i(_mm512_cvtne2ps_pbh(second, first));
}
// A constant that stays in its register.
__attribute__((always_inline)) inline __m512i held(__m512i v) {
  __asm__("" : "+v"(v));
  return v;
}
// The first `count` of 64, which is more than 0.
inline __mmask64 lowest_bytes(int64_t count) {
  return ~uint64_t(0) >> (kLineBytes - smaller(count, kLineBytes));
}

// The first `count` of 32, which may be 0 or less.
inline __mmask32 kept_words(int64_t count) {
  return count <= 0 ? __mmask32(0) : __mmask32(lowest_bytes(smaller(count, kWords)));
}

// Sums of some rows in two vectors each: their order is the same for any number of rows and lines.
template <int kRows>
class PairSums {
 public:
  PairSums() {
    for (auto& row : sum_)
      for (auto& chain : row) chain = _mm512_setzero_ps();
  }
  // Values times x at these positions.
  __attribute__((always_inline)) void add(const CodedDot& dot, int64_t at, int chain,
                                          __m512i values) {
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) sum_[r][chain] = product(dot, r, at, values, sum_[r][chain]);
  }
  // Those of four vectors of values, times the scale of each dword.
  __attribute__((always_inline)) void add_scaled(const CodedDot& dot, int64_t at,
                                                 const __m512i (&values)[4], __m512 scale) {
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 2
      for (int chain = 0; chain < 2; ++chain) {
        __m512 own =
            product(dot, r, at + int64_t(chain) * kWords, values[chain], _mm512_setzero_ps());
        own = product(dot, r, at + int64_t(chain + 2) * kWords, values[chain + 2], own);
        sum_[r][chain] = _mm512_fmadd_ps(own, scale, sum_[r][chain]);
      }
  }
  __attribute__((always_inline)) void finish(const CodedDot& dot, int line) const {
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r)
      dot.sums[r * kDotLines + line] = Avx512Ops::total(_mm512_add_ps(sum_[r][0], sum_[r][1]));
  }

 private:
  __attribute__((always_inline)) static __m512 product(const CodedDot& dot, int r, int64_t at,
                                                       __m512i values, __m512 sum) {
    const auto* const x = static_cast<const uint16_t*>(dot.x) + r * dot.stride + at;
    return _mm512_dpbf16_ps(sum, __m512bh(_mm512_loadu_si512(x)), __m512bh(values));
  }
  __m512 sum_[kRows][2];
};

}  // namespace
}  // namespace moec::cpu
// NOLINTEND(bugprone-implicit-widening-of-multiplication-result)
