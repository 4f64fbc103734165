// SPDX-License-Identifier: Apache-2.0
// Ops of tile_kernels.h on 64-byte vectors; shared by the AVX-512 translation units.
#pragma once

// gcc 12's own intrinsics pass "undefined" registers that its own warning then finds (gcc bug
// 105593).
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#include <immintrin.h>

#include "backend/cpu/tile_kernels.h"

namespace moec::cpu {
namespace {

struct Avx512Ops {
  using Vec = __m512;
  static constexpr int kBytes = 64;
  static constexpr bool kInParts = true;
  static Vec load(const void* from) { return _mm512_loadu_ps(from); }
  static void store(void* to, Vec v) { _mm512_storeu_ps(to, v); }
  static Vec zero() { return _mm512_setzero_ps(); }
  static Vec broadcast(const void* from) {
    return _mm512_set1_ps(*static_cast<const float*>(from));
  }
  static Vec add(Vec a, Vec b) { return _mm512_add_ps(a, b); }
  static Vec sub(Vec a, Vec b) { return _mm512_sub_ps(a, b); }
  static Vec mul(Vec a, Vec b) { return _mm512_mul_ps(a, b); }
  static Vec fma(Vec a, Vec b, Vec sum) { return _mm512_fmadd_ps(a, b, sum); }

  using Line = __m512i;
  static __mmask16 mask(int n) { return __mmask16((1u << n) - 1u); }
  static __m256i halves(const uint16_t* from, int n) {
    return _mm256_maskz_loadu_epi16(mask(n), from);
  }
  static Line f32(const float* from, int n) { return _mm512_maskz_loadu_epi32(mask(n), from); }
  static Line bf16(const uint16_t* from, int n) {
    return _mm512_slli_epi32(_mm512_cvtepu16_epi32(halves(from, n)), 16);
  }
  static Line widen(__m256i halves) { return _mm512_castps_si512(_mm512_cvtph_ps(halves)); }
  static Line f16(const uint16_t* from, int n) { return widen(halves(from, n)); }
  static Line i8(const int8_t* from) {
    const __m128i codes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
    return _mm512_castps_si512(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(codes)));
  }
  static Line pairs(const uint16_t* from, int n) {
    const __mmask32 valid = n >= 32 ? ~__mmask32(0) : (__mmask32(1) << n) - 1u;
    return _mm512_maskz_loadu_epi16(valid, from);
  }
  static Line interleave(const uint16_t* even, const uint16_t* odd, int n) {
    const Line zero = _mm512_setzero_si512();
    const Line low = even ? _mm512_cvtepu16_epi32(halves(even, n)) : zero;
    const Line high = odd ? _mm512_cvtepu16_epi32(halves(odd, n)) : zero;
    return _mm512_or_si512(low, _mm512_slli_epi32(high, 16));
  }
  static void put(void* to, Line line) { _mm512_storeu_si512(to, line); }
  static void put_f32(float* to, Line line, int n) { _mm512_mask_storeu_epi32(to, mask(n), line); }
  // The value is in the high halves.
  static Line rounded_bf16(Line line) {
    const Line one = _mm512_and_si512(_mm512_srli_epi32(line, 16), _mm512_set1_epi32(1));
    const Line bias = _mm512_add_epi32(one, _mm512_set1_epi32(0x7fff));  // ties to even
    const Line quiet = _mm512_or_si512(line, _mm512_set1_epi32(0x400000));
    const __mmask16 nan =
        _mm512_cmp_ps_mask(_mm512_castsi512_ps(line), _mm512_castsi512_ps(line), _CMP_UNORD_Q);
    return _mm512_mask_mov_epi32(_mm512_add_epi32(line, bias), nan, quiet);
  }
  static void put_bf16(uint16_t* to, Line line, int n) {
    const Line low = _mm512_srli_epi32(rounded_bf16(line), 16);
    _mm256_mask_storeu_epi16(to, mask(n), _mm512_cvtepi32_epi16(low));
  }
  static __m256i round_f16(Line line) {
    return _mm512_cvtps_ph(_mm512_castsi512_ps(line), _MM_FROUND_TO_NEAREST_INT);
  }
  static void put_f16(uint16_t* to, Line line, int n) {
    _mm256_mask_storeu_epi16(to, mask(n), round_f16(line));
  }
  static Line as_bf16(Line line) { return odd_bf16(rounded_bf16(line)); }
  static Line as_f16(Line line) { return widen(round_f16(line)); }
  static Line even_bf16(Line pairs) { return _mm512_slli_epi32(pairs, 16); }
  static Line odd_bf16(Line pairs) {
    return _mm512_and_si512(pairs, _mm512_set1_epi32(int(0xffff0000u)));
  }
  static Line even_f16(Line pairs) { return widen(_mm512_cvtepi32_epi16(pairs)); }
  static Line odd_f16(Line pairs) {
    return widen(_mm512_cvtepi32_epi16(_mm512_srli_epi32(pairs, 16)));
  }

  // ---- codes
  // An e4m3 code is the f16 of 2^-8 times its value, but for NaN.
  static Line e4m3(const uint8_t* from) {
    const __m128i codes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
    const __m256i high = _mm256_slli_epi16(_mm256_cvtepu8_epi16(codes), 8);
    const __m256i half = _mm256_and_si256(_mm256_srai_epi16(high, 1), _mm256_set1_epi16(-0x4001));
    const __m256i rest = _mm256_and_si256(half, _mm256_set1_epi16(0x3f80));
    const __mmask16 nan = _mm256_cmpeq_epi16_mask(rest, _mm256_set1_epi16(0x3f80));
    const __m256i bits = _mm256_mask_mov_epi16(half, nan, _mm256_set1_epi16(0x7e00));
    return _mm512_castps_si512(_mm512_mul_ps(_mm512_cvtph_ps(bits), _mm512_set1_ps(256.0f)));
  }
  static Line to_nearest(Line v) {  // the value is in the high halves
    const Line one = _mm512_and_si512(_mm512_srli_epi32(v, 16), _mm512_set1_epi32(1));
    return _mm512_add_epi32(_mm512_add_epi32(v, _mm512_set1_epi32(0x7fff)), one);
  }
  static Line round_bf16(Line line) { return odd_bf16(to_nearest(line)); }
  using Numbers = __m512;
  static Numbers numbers(const float* from) { return _mm512_loadu_ps(from); }
  using NibbleTable = __m512i;  // 16 values of the first half of the codes, 16 of the second
  template <Rounding kRounding, bool kZeros>
  static __m256i values(Numbers numbers, float scale, float zero) {
    const __m512 moved = kZeros ? sub(numbers, _mm512_set1_ps(zero)) : numbers;
    const __m512 value = mul(moved, _mm512_set1_ps(scale));
    if constexpr (kRounding == Rounding::kF16)
      return _mm512_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT);
    Line bits = _mm512_castps_si512(value);
    if constexpr (kRounding == Rounding::kBf16) bits = to_nearest(bits);
    return _mm512_cvtepi32_epi16(_mm512_srli_epi32(bits, 16));
  }
  static NibbleTable table(__m256i first, __m256i second) {
    return _mm512_inserti64x4(_mm512_castsi256_si512(first), second, 1);
  }
  static constexpr int byte_of_word(int i) { return i; }
  // Bytes in words; bit 4 says to which half they belong.
  static Line look_up(Line words, NibbleTable table) {
    const Line halves = _mm512_inserti64x4(_mm512_setzero_si512(), _mm256_set1_epi16(16), 1);
    const Line at = _mm512_or_si512(_mm512_and_si512(words, _mm512_set1_epi16(15)), halves);
    return _mm512_permutexvar_epi16(at, table);
  }
  static Line code_words(const uint8_t* from) {
    return _mm512_cvtepu8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
  }
  static Line low_nibbles(const uint8_t* from, NibbleTable table) {
    return look_up(code_words(from), table);
  }
  static Line high_nibbles(const uint8_t* from, NibbleTable table) {
    return look_up(_mm512_srli_epi16(code_words(from), 4), table);
  }
  static Line first_words(Line line) { return _mm512_cvtepu16_epi32(_mm512_castsi512_si256(line)); }
  static Line last_words(Line line) {
    return _mm512_cvtepu16_epi32(_mm512_extracti64x4_epi64(line, 1));
  }
  static void put_nibbles(uint16_t* to, Line first, Line second) {
    put(to, _mm512_or_si512(first_words(first), _mm512_slli_epi32(first_words(second), 16)));
    put(to + 32, _mm512_or_si512(last_words(first), _mm512_slli_epi32(last_words(second), 16)));
  }

  // 16 x 16 dwords: 4 x 4 inside 128-bit lanes, then the lanes themselves.
  static void transpose(const Line (&m)[kLanes], Line (&turned)[kLanes]) {
    Line t[kLanes];
#pragma GCC unroll 4
    for (int i = 0; i < kLanes; i += 4) {
      const Line a = _mm512_unpacklo_epi32(m[i], m[i + 1]),
                 b = _mm512_unpackhi_epi32(m[i], m[i + 1]);
      const Line c = _mm512_unpacklo_epi32(m[i + 2], m[i + 3]);
      const Line d = _mm512_unpackhi_epi32(m[i + 2], m[i + 3]);
      t[i] = _mm512_unpacklo_epi64(a, c);
      t[i + 1] = _mm512_unpackhi_epi64(a, c);
      t[i + 2] = _mm512_unpacklo_epi64(b, d);
      t[i + 3] = _mm512_unpackhi_epi64(b, d);
    }
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {  // lane q of t[4i + j] is column 4q + j of rows 4i .. 4i + 3
      const Line a = _mm512_shuffle_i32x4(t[j], t[4 + j], 0x88);  // lanes 0 2 | 0 2
      const Line b = _mm512_shuffle_i32x4(t[j], t[4 + j], 0xdd);  // lanes 1 3 | 1 3
      const Line c = _mm512_shuffle_i32x4(t[8 + j], t[12 + j], 0x88);
      const Line d = _mm512_shuffle_i32x4(t[8 + j], t[12 + j], 0xdd);
      turned[j] = _mm512_shuffle_i32x4(a, c, 0x88);
      turned[4 + j] = _mm512_shuffle_i32x4(b, d, 0x88);
      turned[8 + j] = _mm512_shuffle_i32x4(a, c, 0xdd);
      turned[12 + j] = _mm512_shuffle_i32x4(b, d, 0xdd);
    }
  }
};

}  // namespace
}  // namespace moec::cpu
