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
  static float total(Vec v) {
    const __m256 a = _mm256_add_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps(v, 1));
    const __m128 b = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    const __m128 c = _mm_add_ps(b, _mm_movehl_ps(b, b));
    return _mm_cvtss_f32(_mm_add_ss(c, _mm_movehdup_ps(c)));
  }

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
  static Vec power(Vec v) {
    return _mm512_and_ps(v, _mm512_castsi512_ps(_mm512_set1_epi32(int(0xff800000u))));
  }
  using E4m3Seen = __m512i;
  static void e4m3_parts(const uint8_t* from, Line (&lines)[2], E4m3Seen& seen) {
    const __m256i codes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
    const Line moved = _mm512_slli_epi16(_mm512_cvtepi8_epi16(codes), 7);
    const Line halves = _mm512_and_si512(moved, _mm512_set1_epi16(-0x4001));
    seen = _mm512_max_epu16(seen, _mm512_and_si512(halves, _mm512_set1_epi16(0x3fff)));
    lines[0] = widen(_mm512_castsi512_si256(halves));
    lines[1] = widen(_mm512_extracti64x4_epi64(halves, 1));
  }
  static bool any_nan(E4m3Seen seen) {
    return _mm512_cmpge_epu16_mask(seen, _mm512_set1_epi16(0x3f80)) != 0;
  }
  static bool are_normal_e4m3(const uint8_t* from) {
    const __m256i codes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
    const __m256i doubled = _mm256_add_epi8(codes, codes);  // NaN becomes 0 below
    const __m256i moved = _mm256_add_epi8(doubled, _mm256_set1_epi8(2));
    return _mm256_cmple_epu8_mask(moved, _mm256_set1_epi8(16)) == 0;
  }
  using Exponents = Line;
  static Exponents exponents(uint32_t mask) { return _mm512_set1_epi32(int(mask)); }
  static Line scaled_e4m3(const uint8_t* from, Vec significands, Exponents exponents) {
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
    const Line codes = _mm512_cvtepi8_epi32(bytes);
    const Line found = _mm512_castps_si512(_mm512_permutexvar_ps(codes, significands));
    const Line powers = _mm512_and_si512(_mm512_slli_epi32(codes, 20), exponents);
    return _mm512_add_epi32(found, powers);
  }
  template <Rounding kRounding>
  static Line rounded(Vec value) {  // to bf16, in the high halves
    if constexpr (kRounding == Rounding::kQuick)
      return _mm512_castps_si512(quick_bf16<Avx512Ops>(value));
    const Line bits = _mm512_castps_si512(value);
    return kRounding == Rounding::kBf16 ? to_nearest(bits) : bits;
  }
  using Numbers = __m512;
  static Numbers numbers(const float* from) { return _mm512_loadu_ps(from); }
  using Values = __m256i;
  using NibbleTable = __m512i;  // 16 values of the first half of the codes, 16 of the second
  template <Rounding kRounding, bool kZeros>
  static __m256i values(Numbers numbers, float scale, float zero) {
    const __m512 moved = kZeros ? sub(numbers, _mm512_set1_ps(zero)) : numbers;
    const __m512 value = mul(moved, _mm512_set1_ps(scale));
    if constexpr (kRounding == Rounding::kF16)
      return _mm512_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT);
    const Line bits = rounded<kRounding>(value);
    return _mm512_cvtepi32_epi16(_mm512_srli_epi32(bits, 16));
  }
  static NibbleTable table(__m256i first, __m256i second) {
    return _mm512_inserti64x4(_mm512_castsi256_si512(first), second, 1);
  }
  // Bytes in words, those of 16 .. 31 in every second qword, so that unpacking them puts all in
  // order. Bit 4 says to which half they belong.
  static Line code_words(const uint8_t* from) {
    const __m256i codes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
    const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    return _mm512_cvtepu8_epi16(_mm256_permutevar8x32_epi32(codes, order));
  }
  static Line look_up(Line words, NibbleTable table) {
    const Line halves = _mm512_set4_epi32(0x00100010, 0x00100010, 0, 0);
    const Line at = _mm512_or_si512(_mm512_and_si512(words, _mm512_set1_epi16(15)), halves);
    return _mm512_permutexvar_epi16(at, table);
  }
  static Line low_nibbles(const uint8_t* from, NibbleTable table) {
    return look_up(code_words(from), table);
  }
  static Line high_nibbles(const uint8_t* from, NibbleTable table) {
    return look_up(_mm512_srli_epi16(code_words(from), 4), table);
  }
  static void put_nibbles(uint16_t* to, Line first, Line second) {
    put(to, _mm512_unpacklo_epi16(first, second));
    put(to + 32, _mm512_unpackhi_epi16(first, second));
  }
  static void put_high_words(uint16_t* to, const Line (&lines)[2]) {
    const Line low = _mm512_srli_epi32(lines[0], 16);
    const Line words = _mm512_or_si512(low, odd_bf16(lines[1]));  // 0, 16, 1, 17 ...
    const Line order = _mm512_set_epi16(31, 29, 27, 25, 23, 21, 19, 17, 15, 13, 11, 9, 7, 5, 3, 1,
                                        30, 28, 26, 24, 22, 20, 18, 16, 14, 12, 10, 8, 6, 4, 2, 0);
    put(to, _mm512_permutexvar_epi16(order, words));
  }

  // A look-up finds 16 values of fp32.
  struct DotNibbles {
    static Numbers numbers(const float* from) { return Avx512Ops::numbers(from); }
    using Values = Vec;
    struct NibbleTable {
      Vec half[2];
    };
    template <Rounding kRounding, bool kZeros>
    static Vec values(Numbers numbers, float scale, float zero) {
      const Vec moved = kZeros ? sub(numbers, _mm512_set1_ps(zero)) : numbers;
      const Vec value = mul(moved, _mm512_set1_ps(scale));
      if constexpr (kRounding == Rounding::kBf16)
        return _mm512_castsi512_ps(odd_bf16(rounded<kRounding>(value)));
      return _mm512_castsi512_ps(rounded<kRounding>(value));
    }
    static NibbleTable table(Vec first, Vec second) { return {{first, second}}; }
    static constexpr int position(int i) {
      const int line = i / kLanes, lane = i % kLanes;
      return line / 2 * 2 * kLanes + 2 * lane + line % 2;
    }
    static NibbleLines<Avx512Ops> lines(const uint8_t* from, const NibbleTable& table) {
      NibbleLines<Avx512Ops> found;
#pragma GCC unroll 2
      for (ptrdiff_t i = 0; i < 2; ++i) {
        const auto* const bytes = reinterpret_cast<const __m128i*>(from) + i;
        const Line codes = _mm512_cvtepu8_epi32(_mm_loadu_si128(bytes));
        found.line[2 * i] = look_up_f32(codes, table.half[i]);
        found.line[2 * i + 1] = look_up_f32(_mm512_srli_epi32(codes, 4), table.half[i]);
      }
      return found;
    }
    static Line look_up_f32(Line codes, Vec table) {  // by the low four bits
      return _mm512_castps_si512(_mm512_permutexvar_ps(codes, table));
    }
  };

  // ---- codes of 16 columns, a dword of each
  static constexpr bool kTurnsCodes = true;
  using ColumnNumbers = __m512;
  static ColumnNumbers column_numbers(const float* from) { return numbers(from); }
  template <int kBit>
  static Line number_at(Line codes, ColumnNumbers numbers) {
    const Line moved = kBit ? _mm512_srli_epi32(codes, kBit) : codes;
    return _mm512_castps_si512(_mm512_permutexvar_ps(moved, numbers));
  }
  template <int kByte>
  static Line top_byte(Line codes) {  // byte kByte moves to the top of its dword, zeros below
    constexpr int kNone = 0x00808080, kAt = kByte << 24 | kNone;
    const __m128i order = _mm_setr_epi32(kAt, kAt + (4 << 24), kAt + (8 << 24), kAt + (12 << 24));
    return _mm512_shuffle_epi8(codes, _mm512_broadcast_i32x4(order));
  }
  template <int kByte>
  static Line i8_at(Line codes) {
    return _mm512_castps_si512(_mm512_cvtepi32_ps(top_byte<kByte>(codes)));
  }
  static void i8_lines(Line codes, Line (&to)[4]) {
    to[0] = i8_at<0>(codes);
    to[1] = i8_at<1>(codes);
    to[2] = i8_at<2>(codes);
    to[3] = i8_at<3>(codes);
  }
  // High bytes of words as f16; those of even words become one line, those of odd ones another.
  static void e4m3_words(Line words, Line& even, Line& odd) {
    const Line halves = _mm512_and_si512(_mm512_srai_epi16(words, 1), _mm512_set1_epi16(-0x4080));
    const Line order = _mm512_set_epi16(31, 29, 27, 25, 23, 21, 19, 17, 15, 13, 11, 9, 7, 5, 3, 1,
                                        30, 28, 26, 24, 22, 20, 18, 16, 14, 12, 10, 8, 6, 4, 2, 0);
    const Line apart = _mm512_permutexvar_epi16(order, halves);
    even = widen(_mm512_castsi512_si256(apart));
    odd = widen(_mm512_extracti64x4_epi64(apart, 1));
  }
  static void e4m3_lines(Line codes, Line (&to)[4]) {
    e4m3_words(_mm512_slli_epi16(codes, 8), to[0], to[2]);
    e4m3_words(codes, to[1], to[3]);
  }
  using CodesSeen = __m512i;
  static void see(Line codes, CodesSeen& seen) {
    seen = _mm512_max_epu8(seen, _mm512_and_si512(codes, _mm512_set1_epi8(0x7f)));
  }
  static bool any_nan_code(CodesSeen seen) {
    return _mm512_cmpeq_epu8_mask(seen, _mm512_set1_epi8(0x7f)) != 0;
  }

  // 4 x 4 dwords inside each 128-bit lane.
  static void turn_lanes(const Line* m, Line* turned) {
    const Line a = _mm512_unpacklo_epi32(m[0], m[1]), b = _mm512_unpackhi_epi32(m[0], m[1]);
    const Line c = _mm512_unpacklo_epi32(m[2], m[3]), d = _mm512_unpackhi_epi32(m[2], m[3]);
    turned[0] = _mm512_unpacklo_epi64(a, c);
    turned[1] = _mm512_unpackhi_epi64(a, c);
    turned[2] = _mm512_unpacklo_epi64(b, d);
    turned[3] = _mm512_unpackhi_epi64(b, d);
  }
  // 16 x 16 dwords: 4 x 4 inside 128-bit lanes, then the lanes themselves.
  static void transpose(const Line (&m)[kLanes], Line (&turned)[kLanes]) {
    Line t[kLanes];
#pragma GCC unroll 4
    for (int i = 0; i < kLanes; i += 4) turn_lanes(m + i, t + i);
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

  // Four of 16 steps of lines in memory: chunk(row) points to 16 bytes. Loads put rows 4 i of them
  // side by side, so that half of the shuffles remain.
  template <class Chunk>
  static void turn_chunks(const Chunk& chunk, Line* turned) {
    Line m[4];
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
      m[j] = _mm512_castsi128_si512(_mm_loadu_si128(chunk(j)));
      m[j] = _mm512_mask_broadcast_i32x4(m[j], 0x00f0, _mm_loadu_si128(chunk(4 + j)));
      m[j] = _mm512_mask_broadcast_i32x4(m[j], 0x0f00, _mm_loadu_si128(chunk(8 + j)));
      m[j] = _mm512_mask_broadcast_i32x4(m[j], 0xf000, _mm_loadu_si128(chunk(12 + j)));
    }
    turn_lanes(m, turned);
  }
  static constexpr bool kAsksAhead = true;
  static void turn_quarter(const Line (&lines)[kLanes], int64_t at, Line* turned) {
    turn_chunks([&](int row) { return reinterpret_cast<const __m128i*>(&lines[row]) + at; },
                turned);
  }
  static void load_turned(const void* const* lines, int64_t bytes, Line (&turned)[kLanes]) {
#pragma GCC unroll 4
    for (int64_t i = 0; i < 4; ++i) {
      const auto chunk = [&](int row) {
        const char* const line = static_cast<const char*>(lines[row]) + bytes;
        return reinterpret_cast<const __m128i*>(line) + i;
      };
      turn_chunks(chunk, turned + 4 * i);
    }
  }
};

}  // namespace
}  // namespace moec::cpu
