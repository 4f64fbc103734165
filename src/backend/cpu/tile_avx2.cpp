// SPDX-License-Identifier: Apache-2.0
// AVX2, FMA, F16C: fp32 products of 6 rows; 16-bit values are widened to fp32 first.
#include <immintrin.h>

#include "backend/cpu/tile_kernels.h"

namespace moec::cpu {
namespace {

struct Avx2Ops {
  using Vec = __m256;
  static constexpr int kBytes = 32;
  static constexpr bool kInParts = true;
  static Vec load(const void* from) { return _mm256_loadu_ps(static_cast<const float*>(from)); }
  static void store(void* to, Vec v) { _mm256_storeu_ps(static_cast<float*>(to), v); }
  static Vec zero() { return _mm256_setzero_ps(); }
  static Vec broadcast(const void* from) {
    return _mm256_broadcast_ss(static_cast<const float*>(from));
  }
  static Vec add(Vec a, Vec b) { return _mm256_add_ps(a, b); }
  static Vec sub(Vec a, Vec b) { return _mm256_sub_ps(a, b); }
  static Vec mul(Vec a, Vec b) { return _mm256_mul_ps(a, b); }
  static Vec fma(Vec a, Vec b, Vec sum) { return _mm256_fmadd_ps(a, b, sum); }
  static float total(Vec v) {
    const __m128 b = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    const __m128 c = _mm_add_ps(b, _mm_movehl_ps(b, b));
    return _mm_cvtss_f32(_mm_add_ss(c, _mm_movehdup_ps(c)));
  }

  struct Line {
    __m256i half[2];  // dwords 0..7 and 8..15
  };
  // `bytes` valid bytes of a 32-byte vector, through memory of our own when it is not whole.
  static __m256i partial(const void* from, int bytes) {
    if (bytes >= 32) return _mm256_loadu_si256(static_cast<const __m256i*>(from));
    alignas(32) char copy[32] = {};
    if (bytes > 0) __builtin_memcpy(copy, from, unsigned(bytes));
    return _mm256_load_si256(reinterpret_cast<const __m256i*>(copy));
  }
  static void put_partial(void* to, __m256i v, int bytes) {
    if (bytes >= 32) return _mm256_storeu_si256(static_cast<__m256i*>(to), v);
    alignas(32) char copy[32];
    _mm256_store_si256(reinterpret_cast<__m256i*>(copy), v);
    if (bytes > 0) __builtin_memcpy(to, copy, unsigned(bytes));
  }
  static const char* after(const void* from, int bytes) {
    return static_cast<const char*>(from) + bytes;
  }
  static __m128i low(__m256i v) { return _mm256_castsi256_si128(v); }
  static __m128i high(__m256i v) { return _mm256_extracti128_si256(v, 1); }

  static Line f32(const float* from, int n) {
    return {{partial(from, n * 4), n > 8 ? partial(from + 8, n * 4 - 32) : _mm256_setzero_si256()}};
  }
  static __m256i widen_i8(__m128i codes) {  // the first 8
    return _mm256_castps_si256(_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(codes)));
  }
  static Line i8(const int8_t* from) {
    const __m128i codes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
    return {{widen_i8(codes), widen_i8(_mm_srli_si128(codes, 8))}};
  }
  static Line pairs(const uint16_t* from, int n) {
    return {
        {partial(from, n * 2), n > 16 ? partial(from + 16, n * 2 - 32) : _mm256_setzero_si256()}};
  }
  static Line zero_extend(__m256i v) {
    return {{_mm256_cvtepu16_epi32(low(v)), _mm256_cvtepu16_epi32(high(v))}};
  }
  static Line even_bf16(Line p) {
    return {{_mm256_slli_epi32(p.half[0], 16), _mm256_slli_epi32(p.half[1], 16)}};
  }
  static Line odd_bf16(Line p) {
    const __m256i keep = _mm256_set1_epi32(int(0xffff0000u));
    return {{_mm256_and_si256(p.half[0], keep), _mm256_and_si256(p.half[1], keep)}};
  }
  static Line bf16(const uint16_t* from, int n) {
    return even_bf16(zero_extend(partial(from, n * 2)));
  }
  static Line widen(__m128i first, __m128i second) {
    return {{_mm256_castps_si256(_mm256_cvtph_ps(first)),
             _mm256_castps_si256(_mm256_cvtph_ps(second))}};
  }
  static Line f16(const uint16_t* from, int n) {
    const __m256i v = partial(from, n * 2);
    return widen(low(v), high(v));
  }
  // Low halves of 8 dwords.
  static __m128i low_halves(__m256i v) {
    const __m256i kept = _mm256_and_si256(v, _mm256_set1_epi32(0xffff));
    return low(_mm256_permute4x64_epi64(_mm256_packus_epi32(kept, kept), 0x08));
  }
  static Line even_f16(Line p) { return widen(low_halves(p.half[0]), low_halves(p.half[1])); }
  static Line odd_f16(Line p) {
    return even_f16({{_mm256_srli_epi32(p.half[0], 16), _mm256_srli_epi32(p.half[1], 16)}});
  }
  static Line interleave(const uint16_t* even, const uint16_t* odd, int n) {
    const Line a = zero_extend(partial(even, even ? n * 2 : 0));
    const Line b = even_bf16(zero_extend(partial(odd, odd ? n * 2 : 0)));
    return {{_mm256_or_si256(a.half[0], b.half[0]), _mm256_or_si256(a.half[1], b.half[1])}};
  }
  static void put(void* to, Line line) {
    _mm256_storeu_si256(static_cast<__m256i*>(to), line.half[0]);
    _mm256_storeu_si256(static_cast<__m256i*>(to) + 1, line.half[1]);
  }
  static void put_f32(float* to, Line line, int n) {
    put_partial(to, line.half[0], n * 4);
    if (n > 8) put_partial(to + 8, line.half[1], n * 4 - 32);
  }
  static void put_halves(uint16_t* to, __m128i first, __m128i second, int n) {
    put_partial(to, _mm256_set_m128i(second, first), n * 2);
  }
  // The value is in the high halves.
  static __m256i rounded_bf16(__m256i v) {
    const __m256i one = _mm256_and_si256(_mm256_srli_epi32(v, 16), _mm256_set1_epi32(1));
    const __m256i bias = _mm256_add_epi32(one, _mm256_set1_epi32(0x7fff));  // ties to even
    const __m256 value = _mm256_castsi256_ps(v);
    const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(value, value, _CMP_UNORD_Q));
    const __m256i quiet = _mm256_or_si256(v, _mm256_set1_epi32(0x400000));
    return _mm256_blendv_epi8(_mm256_add_epi32(v, bias), quiet, nan);
  }
  static __m128i round_bf16(__m256i v) {
    return low_halves(_mm256_srli_epi32(rounded_bf16(v), 16));
  }
  static void put_bf16(uint16_t* to, Line line, int n) {
    put_halves(to, round_bf16(line.half[0]), round_bf16(line.half[1]), n);
  }
  static __m128i round_f16(__m256i v) {
    return _mm256_cvtps_ph(_mm256_castsi256_ps(v), _MM_FROUND_TO_NEAREST_INT);
  }
  static void put_f16(uint16_t* to, Line line, int n) {
    put_halves(to, round_f16(line.half[0]), round_f16(line.half[1]), n);
  }
  static Line as_bf16(Line line) {
    return odd_bf16({{rounded_bf16(line.half[0]), rounded_bf16(line.half[1])}});
  }
  static Line as_f16(Line line) { return widen(round_f16(line.half[0]), round_f16(line.half[1])); }

  // ---- codes
  // An e4m3 code is the f16 of 2^-8 times its value, but for NaN.
  static Line e4m3(const uint8_t* from) {
    const __m128i codes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
    const __m256i high = _mm256_slli_epi16(_mm256_cvtepu8_epi16(codes), 8);
    const __m256i half = _mm256_and_si256(_mm256_srai_epi16(high, 1), _mm256_set1_epi16(-0x4001));
    const __m256i nan = _mm256_cmpeq_epi16(_mm256_and_si256(half, _mm256_set1_epi16(0x3f80)),
                                           _mm256_set1_epi16(0x3f80));
    const __m256i bits = _mm256_or_si256(half, _mm256_and_si256(nan, _mm256_set1_epi16(0x7e00)));
    const __m256 up = _mm256_set1_ps(256.0f);
    return {{_mm256_castps_si256(_mm256_mul_ps(_mm256_cvtph_ps(low(bits)), up)),
             _mm256_castps_si256(_mm256_mul_ps(_mm256_cvtph_ps(Avx2Ops::high(bits)), up))}};
  }
  static __m256i to_nearest(__m256i v) {  // the value is in the high halves
    const __m256i one = _mm256_and_si256(_mm256_srli_epi32(v, 16), _mm256_set1_epi32(1));
    return _mm256_add_epi32(_mm256_add_epi32(v, _mm256_set1_epi32(0x7fff)), one);
  }
  static Line round_bf16(Line line) {
    return odd_bf16({{to_nearest(line.half[0]), to_nearest(line.half[1])}});
  }
  static Vec power(Vec v) {
    return _mm256_and_ps(v, _mm256_castsi256_ps(_mm256_set1_epi32(int(0xff800000u))));
  }
  struct E4m3Seen {
    __m256i largest;
  };
  static void e4m3_parts(const uint8_t* from, Line (&lines)[2], E4m3Seen& seen) {
    for (int i = 0; i < 2; ++i) {
      const __m128i codes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from) + i);
      const __m256i moved = _mm256_slli_epi16(_mm256_cvtepi8_epi16(codes), 7);
      const __m256i halves = _mm256_and_si256(moved, _mm256_set1_epi16(-0x4001));
      const __m256i magnitudes = _mm256_and_si256(halves, _mm256_set1_epi16(0x3fff));
      seen.largest = _mm256_max_epu16(seen.largest, magnitudes);
      lines[i] = widen(low(halves), high(halves));
    }
  }
  static bool any_nan(const E4m3Seen& seen) {
    const __m256i least = _mm256_set1_epi16(0x3f7f);  // the largest of a number is 0x3f00
    return _mm256_movemask_epi8(_mm256_cmpgt_epi16(seen.largest, least)) != 0;
  }
  static bool are_normal_e4m3(const uint8_t* from) {
    const __m256i codes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
    const __m256i doubled = _mm256_add_epi8(codes, codes);  // NaN becomes 0 below
    const __m256i moved = _mm256_add_epi8(doubled, _mm256_set1_epi8(2));
    const __m256i least = _mm256_min_epu8(moved, _mm256_set1_epi8(16));
    return _mm256_movemask_epi8(_mm256_cmpeq_epi8(least, moved)) == 0;
  }
  using Exponents = __m256i;
  static Exponents exponents(uint32_t mask) { return _mm256_set1_epi32(int(mask)); }
  static Line scaled_e4m3(const uint8_t* from, Vec significands, Exponents exponents) {
    Line line;
    for (ptrdiff_t i = 0; i < 2; ++i) {
      const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(from + 8 * i));
      const __m256i codes = _mm256_cvtepi8_epi32(bytes);
      const __m256i found = _mm256_castps_si256(_mm256_permutevar8x32_ps(significands, codes));
      const __m256i powers = _mm256_and_si256(_mm256_slli_epi32(codes, 20), exponents);
      line.half[i] = _mm256_add_epi32(found, powers);
    }
    return line;
  }
  static void put_high_words(uint16_t* to, const Line (&lines)[2]) {
    for (int i = 0; i < 2; ++i) {
      const __m256i words = _mm256_packus_epi32(_mm256_srli_epi32(lines[i].half[0], 16),
                                                _mm256_srli_epi32(lines[i].half[1], 16));
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(to) + i,
                          _mm256_permute4x64_epi64(words, 0xd8));
    }
  }
  struct Numbers {
    __m256 part[2];  // 0 .. 3 and 8 .. 11, 4 .. 7 and 12 .. 15: packing words puts them in order
  };
  static Numbers numbers(const float* from) {
    return {{_mm256_set_m128(_mm_loadu_ps(from + 8), _mm_loadu_ps(from)),
             _mm256_set_m128(_mm_loadu_ps(from + 12), _mm_loadu_ps(from + 4))}};
  }
  using Values = __m256i;
  struct NibbleTable {
    __m256i low, high;  // bytes of the values, those of each half of the codes in its lane
  };
  template <Rounding kRounding>
  static __m256i rounded(Vec value) {  // to bf16, in the high halves
    if constexpr (kRounding == Rounding::kQuick)
      return _mm256_castps_si256(quick_bf16<Avx2Ops>(value));
    const __m256i bits = _mm256_castps_si256(value);
    return kRounding == Rounding::kBf16 ? to_nearest(bits) : bits;
  }
  // Low bytes of the 16 values, then their high bytes.
  template <Rounding kRounding, bool kZeros>
  static __m256i values(const Numbers& numbers, float scale, float zero) {
    const __m256 s = _mm256_set1_ps(scale), z = _mm256_set1_ps(zero);
    const __m256 first = kZeros ? sub(numbers.part[0], z) : numbers.part[0];
    const __m256 second = kZeros ? sub(numbers.part[1], z) : numbers.part[1];
    const __m256 a = mul(first, s), b = mul(second, s);
    __m256i words;
    if constexpr (kRounding == Rounding::kF16) {
      const __m128i x = _mm256_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT);
      const __m128i y = _mm256_cvtps_ph(b, _MM_FROUND_TO_NEAREST_INT);
      words = _mm256_set_m128i(_mm_unpackhi_epi64(x, y), _mm_unpacklo_epi64(x, y));
    } else {
      const __m256i left = rounded<kRounding>(a), right = rounded<kRounding>(b);
      words = _mm256_packus_epi32(_mm256_srli_epi32(left, 16), _mm256_srli_epi32(right, 16));
    }
    const __m256i apart = _mm256_broadcastsi128_si256(
        _mm_set_epi8(15, 13, 11, 9, 7, 5, 3, 1, 14, 12, 10, 8, 6, 4, 2, 0));
    return _mm256_permute4x64_epi64(_mm256_shuffle_epi8(words, apart), 0xd8);
  }
  static NibbleTable table(__m256i first, __m256i second) {
    return {_mm256_permute2x128_si256(first, second, 0x20),
            _mm256_permute2x128_si256(first, second, 0x31)};
  }
  static constexpr int byte_of_word(int i) { return i / 16 * 8 + i % 16 / 8 * 16 + i % 8; }
  static Line look_up(__m256i nibbles, const NibbleTable& table) {
    const __m256i low = _mm256_shuffle_epi8(table.low, nibbles);
    const __m256i high = _mm256_shuffle_epi8(table.high, nibbles);
    return {{_mm256_unpacklo_epi8(low, high), _mm256_unpackhi_epi8(low, high)}};
  }
  using DotNibbles = WordNibbles<Avx2Ops>;
  static __m256i code_bytes(const uint8_t* from) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
  }
  static Line low_nibbles(const uint8_t* from, const NibbleTable& table) {
    return look_up(_mm256_and_si256(code_bytes(from), _mm256_set1_epi8(15)), table);
  }
  static Line high_nibbles(const uint8_t* from, const NibbleTable& table) {
    const __m256i moved = _mm256_srli_epi16(code_bytes(from), 4);
    return look_up(_mm256_and_si256(moved, _mm256_set1_epi8(15)), table);
  }
  static void put_nibbles(uint16_t* to, Line first, Line second) {
    auto* const out = reinterpret_cast<__m256i*>(to);
    for (int i = 0; i < 2; ++i) {  // bytes 8 i .. 8 i + 7 and 16 more
      const __m256i a = _mm256_unpacklo_epi16(first.half[i], second.half[i]);
      const __m256i b = _mm256_unpackhi_epi16(first.half[i], second.half[i]);
      _mm256_storeu_si256(out + i, _mm256_permute2x128_si256(a, b, 0x20));
      _mm256_storeu_si256(out + i + 2, _mm256_permute2x128_si256(a, b, 0x31));
    }
  }

  // ---- codes of 16 columns, a dword of each
  static constexpr bool kTurnsCodes = true;
  struct ColumnNumbers {
    __m256 low, high;  // 0 .. 7, 8 .. 15
  };
  static ColumnNumbers column_numbers(const float* from) { return {load(from), load(from + 8)}; }
  template <int kBit>
  static Line number_at(const Line& codes, const ColumnNumbers& numbers) {
    Line found;
    for (int i = 0; i < 2; ++i) {
      const __m256i at = _mm256_srli_epi32(codes.half[i], kBit);
      const __m256 low = _mm256_permutevar8x32_ps(numbers.low, at);
      const __m256 high = _mm256_permutevar8x32_ps(numbers.high, at);
      const __m256 is_high = _mm256_castsi256_ps(_mm256_slli_epi32(codes.half[i], 28 - kBit));
      found.half[i] = _mm256_castps_si256(_mm256_blendv_ps(low, high, is_high));
    }
    return found;
  }
  template <int kByte>
  static Line i8_at(const Line& codes) {  // the byte moves to the top of its dword, zeros below
    constexpr int kNone = 0x00808080, kAt = kByte << 24 | kNone;
    const __m256i order = _mm256_broadcastsi128_si256(
        _mm_setr_epi32(kAt, kAt + (4 << 24), kAt + (8 << 24), kAt + (12 << 24)));
    Line found;
    for (int i = 0; i < 2; ++i)
      found.half[i] =
          _mm256_castps_si256(_mm256_cvtepi32_ps(_mm256_shuffle_epi8(codes.half[i], order)));
    return found;
  }
  static void i8_lines(const Line& codes, Line (&to)[4]) {
    to[0] = i8_at<0>(codes);
    to[1] = i8_at<1>(codes);
    to[2] = i8_at<2>(codes);
    to[3] = i8_at<3>(codes);
  }
  // High bytes of words as f16; those of even words become one line, those of odd ones another.
  static void e4m3_words(const Line& words, Line& even, Line& odd) {
    const __m256i apart = _mm256_broadcastsi128_si256(
        _mm_setr_epi8(0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15));
    for (int i = 0; i < 2; ++i) {
      const __m256i moved = _mm256_srai_epi16(words.half[i], 1);
      const __m256i halves = _mm256_and_si256(moved, _mm256_set1_epi16(-0x4080));
      const __m256i found = _mm256_permute4x64_epi64(_mm256_shuffle_epi8(halves, apart), 0xd8);
      even.half[i] = _mm256_castps_si256(_mm256_cvtph_ps(low(found)));
      odd.half[i] = _mm256_castps_si256(_mm256_cvtph_ps(high(found)));
    }
  }
  static void e4m3_lines(const Line& codes, Line (&to)[4]) {
    const Line moved = {{_mm256_slli_epi16(codes.half[0], 8), _mm256_slli_epi16(codes.half[1], 8)}};
    e4m3_words(moved, to[0], to[2]);
    e4m3_words(codes, to[1], to[3]);
  }
  struct CodesSeen {
    __m256i largest;
  };
  static void see(const Line& codes, CodesSeen& seen) {
    for (const __m256i half : codes.half)
      seen.largest = _mm256_max_epu8(seen.largest, _mm256_and_si256(half, _mm256_set1_epi8(0x7f)));
  }
  static bool any_nan_code(const CodesSeen& seen) {
    const __m256i nan = _mm256_set1_epi8(0x7f);
    return _mm256_movemask_epi8(_mm256_cmpeq_epi8(seen.largest, nan)) != 0;
  }

  // Four of 16 steps. A vector is a quarter of one line beside that of the line four below, both
  // from memory, so that 4 x 4 in each 128-bit lane are all that is to be turned.
  static void turn_quarter(const Line (&lines)[kLanes], int at, Line* turned) {
    const auto quarter = [at](const Line& line) {
      return _mm_loadu_si128(reinterpret_cast<const __m128i*>(&line) + at);
    };
    for (int half = 0; half < 2; ++half) {
      __m256i m[4];
      for (int r = 0; r < 4; ++r) {
        const Line* const line = lines + ptrdiff_t{8} * half + r;
        m[r] =
            _mm256_inserti128_si256(_mm256_castsi128_si256(quarter(line[0])), quarter(line[4]), 1);
      }
      const __m256i a = _mm256_unpacklo_epi32(m[0], m[1]), b = _mm256_unpackhi_epi32(m[0], m[1]);
      const __m256i c = _mm256_unpacklo_epi32(m[2], m[3]), d = _mm256_unpackhi_epi32(m[2], m[3]);
      turned[0].half[half] = _mm256_unpacklo_epi64(a, c);
      turned[1].half[half] = _mm256_unpackhi_epi64(a, c);
      turned[2].half[half] = _mm256_unpacklo_epi64(b, d);
      turned[3].half[half] = _mm256_unpackhi_epi64(b, d);
    }
  }
  static void transpose(const Line (&lines)[kLanes], Line (&turned)[kLanes]) {
    for (int at = 0; at < 4; ++at) turn_quarter(lines, at, turned + ptrdiff_t{4} * at);
  }
};

constexpr ProductTable<Avx2Ops, 6> kProducts;

}  // namespace

constinit const TileKernels kTileAvx2 =
    make_tile_kernels<Avx2Ops>("avx2", "avx2 f32 6x32", kProducts);

}  // namespace moec::cpu
