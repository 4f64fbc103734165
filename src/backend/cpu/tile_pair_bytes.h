// SPDX-License-Identifier: Apache-2.0
// Runs of bytes as pairs, 64 at a time, from a table of all values that was rounded once a block. A
// look-up finds the low bytes of 64 values, another one the high bytes.
#pragma once

#include "backend/cpu/tile_pair_sums.h"

// Offsets within a chunk are small:
// NOLINTBEGIN(bugprone-implicit-widening-of-multiplication-result)
namespace moec::cpu {
namespace {

struct BytePlanes {  // of 128 words
  __m512i low[2], high[2];
  BytePlanes() = default;
  template <class ValuesOf>  // values_of(i) -> 16 of fp32, from 16 * i on
  explicit BytePlanes(const ValuesOf& values_of) {
    alignas(kLineBytes) uint8_t order[kLineBytes];
    for (int i = 0; i < kLineBytes; ++i) order[i] = uint8_t(2 * i);
    const __m512i even = _mm512_load_si512(order);
    const __m512i odd = _mm512_or_si512(even, _mm512_set1_epi8(1));
#pragma GCC unroll 2
    for (int i = 0; i < 2; ++i) {
      const __m512i a = rounded_words(values_of(4 * i), values_of(4 * i + 1));
      const __m512i b = rounded_words(values_of(4 * i + 2), values_of(4 * i + 3));
      low[i] = _mm512_permutex2var_epi8(a, even, b);
      high[i] = _mm512_permutex2var_epi8(a, odd, b);
    }
  }
  // By the low seven bits.
  __m512i low_of(__m512i codes) const { return _mm512_permutex2var_epi8(low[0], codes, low[1]); }
  __m512i high_of(__m512i codes) const { return _mm512_permutex2var_epi8(high[0], codes, high[1]); }
};
// The numbers of the codes from `first` on.
template <LineCodes kCodes>
struct CodeNumbers {
  alignas(kLineBytes) float at[128];
  explicit CodeNumbers(int first) {
    uint8_t codes[128];
    for (int i = 0; i < 128; ++i) codes[i] = uint8_t(first + i);
    for (int i = 0; i < 128; i += kLanes)
      if constexpr (kCodes == LineCodes::kI8)
        Avx512Ops::put(at + i, Avx512Ops::i8(reinterpret_cast<const int8_t*>(codes + i)));
      else
        Avx512Ops::put(at + i, Avx512Ops::e4m3(codes + i));
  }
  BytePlanes scaled(float scale, float zero) const {
    return BytePlanes([&](int i) {
      const __m512 numbers = _mm512_sub_ps(_mm512_load_ps(at + i * kLanes), _mm512_set1_ps(zero));
      return _mm512_mul_ps(numbers, _mm512_set1_ps(scale));
    });
  }
};

// Codes with a sign, and others.
class SignedTable {
 public:
  static constexpr LineCodes kCodes = LineCodes::kE4m3;
  struct Numbers {
    CodeNumbers<LineCodes::kE4m3> all{0};
  };
  SignedTable() = default;
  SignedTable(const Numbers& numbers, float scale, float) : all_(numbers.all.scaled(scale, 0)) {}
  __attribute__((always_inline)) void find(__m512i codes, __m512i& low, __m512i& high) const {
    constexpr int kXorAnd = 0x78;  // a ^ b & c
    low = all_.low_of(codes);
    high = _mm512_ternarylogic_epi32(all_.high_of(codes), codes, _mm512_set1_epi8(-128), kXorAnd);
  }

 private:
  BytePlanes all_;
};
class WholeTable {
 public:
  static constexpr LineCodes kCodes = LineCodes::kI8;
  struct Numbers {
    CodeNumbers<LineCodes::kI8> positive{0}, negative{128};
  };
  WholeTable() = default;
  WholeTable(const Numbers& numbers, float scale, float zero)
      : positive_(numbers.positive.scaled(scale, zero)),
        negative_(numbers.negative.scaled(scale, zero)) {}
  __attribute__((always_inline)) void find(__m512i codes, __m512i& low, __m512i& high) const {
    const __mmask64 negative = _mm512_movepi8_mask(codes);
    low = _mm512_mask_mov_epi8(positive_.low_of(codes), negative, negative_.low_of(codes));
    high = _mm512_mask_mov_epi8(positive_.high_of(codes), negative, negative_.high_of(codes));
  }

 private:
  BytePlanes positive_, negative_;
};

// line(i, walk) for each line; walk(body) gives body(position, positions left in its block, words
// in order) for each chunk of it.
template <class Table, class Runs, class Line>
__attribute__((always_inline)) inline void for_byte_lines(const Runs& runs, const Line& line) {
  constexpr int64_t kMostBlocks = kMostPairs / least_pair_block(Table::kCodes) + 2;
  const CodedRun& run = runs.run;
  const typename Table::Numbers numbers;
  const auto table_of = [&](int64_t at) {
    return Table(numbers, run.scales[at], run.zeros ? run.zeros[at] : 0.0f);
  };
  const int64_t blocks = blocks_of(run);
  Table shared[kMostBlocks];
  for (int64_t block = 0; block < blocks && !runs.scale_stride; ++block)
    shared[block] = table_of(block);
  const __m512i order = held(_mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7));
  const int64_t first_ends =
      run.block.is_all() ? run.count : (run.block.of(run.first) + 1) * run.block.size() - run.first;
  for (int i = 0; i < runs.lines; ++i) {
    const uint8_t* const codes = run.codes + i * runs.code_stride + run.first;
    line(i, [&](const auto& body) __attribute__((always_inline)) {
      int64_t at = 0, ends = first_ends;
      for (int64_t block = 0; block < blocks; ++block, ends += run.block.size()) {
        const Table table =
            runs.scale_stride ? table_of(i * runs.scale_stride + block) : shared[block];
        const int64_t end = ends < run.count ? ends : run.count;
        const auto chunk = [&](__m512i found) __attribute__((always_inline)) {
          __m512i low, high;
          table.find(_mm512_permutexvar_epi64(order, found), low, high);
          const __m512i words[] = {_mm512_unpacklo_epi8(low, high),
                                   _mm512_unpackhi_epi8(low, high)};
          body(at, end - at, words);
        };
        for (; at + kLineBytes <= end; at += kLineBytes) {
          prefetch_ahead(codes + at);
          chunk(_mm512_loadu_si512(codes + at));
        }
        if (at < end) chunk(_mm512_maskz_loadu_epi8(lowest_bytes(end - at), codes + at));
        at = end;
      }
    });
  }
}

template <class Table, int kRows>
void dot_byte_pairs(const CodedDot& dot) {
  for_byte_lines<Table>(dot, [&](int i, const auto& walk) __attribute__((always_inline)) {
    PairSums<kRows> sums;
    walk([&](int64_t at, int64_t left, const __m512i(&words)[2]) __attribute__((always_inline)) {
      sums.add(dot, at, 0, words[0]);
      if (left > kWords) sums.add(dot, at + kWords, 1, words[1]);
    });
    sums.finish(dot, i);
  });
}
template <class Table>
void decode_byte_pairs(const PairDecode& d) {
  for_byte_lines<Table>(d, [&](int i, const auto& walk) __attribute__((always_inline)) {
    uint16_t* const to = d.to + i * d.stride;
    walk([&](int64_t at, int64_t left, const __m512i(&words)[2]) __attribute__((always_inline)) {
#pragma GCC unroll 2
      for (int v = 0; v < 2; ++v)
        _mm512_mask_storeu_epi16(to + at + v * kWords, kept_words(left - v * kWords), words[v]);
    });
    for (int64_t at = d.run.count; at % kPairsChunk; ++at) to[at] = 0;
  });
}

}  // namespace
}  // namespace moec::cpu
// NOLINTEND(bugprone-implicit-widening-of-multiplication-result)
