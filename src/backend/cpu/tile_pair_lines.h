// SPDX-License-Identifier: Apache-2.0
// Rows of pairs times lines of values that have been decoded.
#pragma once

#include "backend/cpu/tile_pair_sums.h"

// Offsets within a chunk are small:
// NOLINTBEGIN(bugprone-implicit-widening-of-multiplication-result)
namespace moec::cpu {
namespace {

constexpr int kColumns = 4;
// Sums of four vectors each, to four neighbours.
__attribute__((always_inline)) inline __m128 totals(const __m512 (&v)[kColumns]) {
  const auto add = [](__m512 a, __m512 b) {
    return _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
  };
  const __m512d low = _mm512_castps_pd(add(v[0], v[2])), high = _mm512_castps_pd(add(v[1], v[3]));
  const __m512 all =
      _mm512_add_ps(_mm512_unpacklo_ps(_mm512_castpd_ps(low), _mm512_castpd_ps(high)),
                    _mm512_unpackhi_ps(_mm512_castpd_ps(low), _mm512_castpd_ps(high)));
  const __m256 half = _mm256_add_ps(_mm512_castps512_ps256(all), _mm512_extractf32x8_ps(all, 1));
  return _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
}

constexpr int kPairRows = 6;
template <int kRows>
void multiply_pair_lines(const PairLines& p, int first) {
  __m512 sum[kRows][kColumns];
  for (auto& row : sum)
    for (auto& column : row) column = _mm512_setzero_ps();
  const char* a = static_cast<const char*>(p.a) + int64_t(first) * kLineBytes;
  const uint16_t* b = p.lines;
  for (int block = 0; block < p.blocks; ++block) {
    __m512i values[kColumns];
#pragma GCC unroll 4
    for (int j = 0; j < kColumns; ++j) values[j] = _mm512_loadu_si512(b + j * p.stride);
#pragma GCC unroll 6
    for (int i = 0; i < kRows; ++i) {
      const auto x = __m512bh(_mm512_loadu_si512(a + i * kLineBytes));
#pragma GCC unroll 4
      for (int j = 0; j < kColumns; ++j)
        sum[i][j] = _mm512_dpbf16_ps(sum[i][j], x, __m512bh(values[j]));
    }
    a += int64_t(p.rows) * kLineBytes;
    b += kWords;
  }
#pragma GCC unroll 6
  for (int i = 0; i < kRows; ++i) {
    float* const c = p.c + (first + i) * p.ld;
    const __m128 all = totals(sum[i]);
    _mm_storeu_ps(c, p.accumulate ? _mm_add_ps(_mm_loadu_ps(c), all) : all);
  }
}
inline void pair_lines(const PairLines& p) {
  int first = 0;
  for (; first + kPairRows <= p.rows; first += kPairRows) multiply_pair_lines<kPairRows>(p, first);
  switch (p.rows - first) {
    case 5:
      return multiply_pair_lines<5>(p, first);
    case 4:
      return multiply_pair_lines<4>(p, first);
    case 3:
      return multiply_pair_lines<3>(p, first);
    case 2:
      return multiply_pair_lines<2>(p, first);
    case 1:
      return multiply_pair_lines<1>(p, first);
  }
}

}  // namespace
}  // namespace moec::cpu
// NOLINTEND(bugprone-implicit-widening-of-multiplication-result)
