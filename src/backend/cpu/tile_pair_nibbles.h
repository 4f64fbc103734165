// SPDX-License-Identifier: Apache-2.0
// Runs of nibbles as pairs, 128 at a time. A look-up by 16 bits finds a value that was rounded once
// a block: vector i of the values has nibble i of each word of codes.
#pragma once

#include "backend/cpu/tile_pair_sums.h"

// Offsets within a chunk are small:
// NOLINTBEGIN(bugprone-implicit-widening-of-multiplication-result)
namespace moec::cpu {
namespace {

constexpr int kOfWord = 4;
// Words of a chunk in order -> as its nibbles come: four apart.
__attribute__((always_inline)) inline void order_as_nibbles(bool high_first,
                                                            __m512i (&v)[kOfWord]) {
  const __m512i apart = _mm512_set_epi16(31, 27, 23, 19, 15, 11, 7, 3, 30, 26, 22, 18, 14, 10, 6, 2,
                                         29, 25, 21, 17, 13, 9, 5, 1, 28, 24, 20, 16, 12, 8, 4, 0);
  for (__m512i& words : v) words = _mm512_permutexvar_epi16(apart, words);
  // Lane i of each has what vector i takes.
  const __m512i a = _mm512_shuffle_i32x4(v[0], v[1], 0x44);
  const __m512i b = _mm512_shuffle_i32x4(v[0], v[1], 0xee);
  const __m512i c = _mm512_shuffle_i32x4(v[2], v[3], 0x44);
  const __m512i d = _mm512_shuffle_i32x4(v[2], v[3], 0xee);
  const int flip = high_first;
  v[flip] = _mm512_shuffle_i32x4(a, c, 0x88);
  v[1 - flip] = _mm512_shuffle_i32x4(a, c, 0xdd);
  v[2 + flip] = _mm512_shuffle_i32x4(b, d, 0x88);
  v[3 - flip] = _mm512_shuffle_i32x4(b, d, 0xdd);
}
// Lines that are multiplied at once: their ends overlap.
template <int kRows>
constexpr int kPairLines = kRows <= 2 ? 4 : 2;

// Where word i of a chunk stands, in words; kTurned: its dwords as a matrix of 4 x 4 turned.
template <bool kTurned>
constexpr int word_place(int i) {
  return kTurned ? (i / 2 % 4 * 4 + i / 8) * 2 + i % 2 : i;
}

// Values of the blocks of a chunk: kBlocks of equal length. Bits 4 and 5 of a word that looks one
// up say to which block it belongs.
template <int kBlocks, bool kTurned>
class NibbleTable {
 public:
  struct Bits {
    __m512i low, block;
    Bits() : low(held(_mm512_set1_epi16(15))), block(held(of_words())) {}
  };
  NibbleTable() = default;
  explicit NibbleTable(const __m512 (&v)[kBlocks])
      : first_(rounded_words(v[0], v[kBlocks > 1])),
        second_(kBlocks == 4 ? rounded_words(v[2 % kBlocks], v[3 % kBlocks]) : first_) {}
  __attribute__((always_inline)) void values(__m512i codes, const Bits& bits,
                                             __m512i (&to)[kOfWord]) const {
#pragma GCC unroll 4
    for (int i = 0; i < kOfWord; ++i) {
      constexpr int kAndOr = 0xea;  // a & b | c
      __m512i at = i ? _mm512_srli_epi16(codes, unsigned(4 * i)) : codes;
      if constexpr (kBlocks > 1)  // else five bits look up, and both halves are the same
        at = _mm512_ternarylogic_epi32(at, bits.low, bits.block, kAndOr);
      to[i] = kBlocks == 4 ? _mm512_permutex2var_epi16(first_, at, second_)
                           : _mm512_permutexvar_epi16(at, first_);
    }
  }

 private:
  static __m512i of_words() {
    alignas(kLineBytes) uint16_t bits[kWords];
    for (int i = 0; i < kWords; ++i)
      bits[i] = uint16_t(word_place<kTurned>(i) / (kWords / kBlocks) << 4);
    return _mm512_load_si512(bits);
  }
  __m512i first_, second_;
};

// Codes of some lines, and what their blocks have. The last line stands for those beyond it.
template <int kLines>
struct LinePointers {
  const uint8_t* codes[kLines];
  const float *scales[kLines], *zeros[kLines];
  template <class Runs>
  LinePointers(const Runs& dot, int first) {
    const CodedRun& run = dot.run;
#pragma GCC unroll 4
    for (int i = 0; i < kLines; ++i) {
      const int64_t line = smaller(first + i, dot.lines - 1), at = line * dot.scale_stride;
      codes[i] = run.codes + run.first / 2 + line * dot.code_stride;
      scales[i] = run.scales + at;
      zeros[i] = run.zeros ? run.zeros + at : nullptr;
    }
  }
  __attribute__((always_inline)) __m512i chunk(int i, int64_t at, int64_t count) const {
    const uint8_t* const from = codes[i] + at / 2;
    prefetch_ahead(from);
    if (count == kPairsChunk) return _mm512_loadu_si512(from);
    return _mm512_maskz_loadu_epi8(lowest_bytes((count + 1) / 2), from);
  }
};

// Values of positions from `count` on become zero.
inline void keep(int64_t count, bool high_first, __m512i (&values)[kOfWord]) {
  for (int i = 0; i < kOfWord; ++i) {
    const int64_t words = (count + kOfWord - 1 - (i ^ int(high_first))) / kOfWord;
    values[i] = _mm512_maskz_mov_epi16(kept_words(words), values[i]);
  }
}

// Values that are rounded: (number - zero) * scale.
template <int kBlocks, bool kZeros, int kLines, bool kTurned = false>
class RoundedChunks {
 public:
  template <class Runs>
  RoundedChunks(const Runs& dot, int first)
      : lines_(dot, first), numbers_(_mm512_loadu_ps(dot.run.numbers)), steps_(dot.run) {}
  __attribute__((always_inline)) void enter(int64_t at, int64_t count) {
    differ_ = block_[0] != block_[kBlocks - 1];
    for (int b = 0; b < kBlocks; ++b) {  // beyond the run the last one goes on
      const int64_t place = at + int64_t(b) * (kPairsChunk / kBlocks);
      if (place < count && steps_.begins(place)) differ_ = true;
      block_[b] = steps_.index;
    }
  }
  __attribute__((always_inline)) void values(int i, int64_t at, int64_t count,
                                             __m512i (&to)[kOfWord]) {
    if (differ_) {
      __m512 v[kBlocks];
      for (int b = 0; b < kBlocks; ++b) {
        v[b] = numbers_;
        if constexpr (kZeros)
          v[b] = _mm512_sub_ps(v[b], _mm512_set1_ps(lines_.zeros[i][block_[b]]));
        v[b] = _mm512_mul_ps(v[b], _mm512_set1_ps(lines_.scales[i][block_[b]]));
      }
      table_[i] = Table(v);
    }
    __m512i codes = lines_.chunk(i, at, count);
    if constexpr (kTurned) codes = _mm512_permutexvar_epi32(turn_, codes);
    table_[i].values(codes, bits_, to);
  }
  template <class Sums>
  __attribute__((always_inline)) void add(const CodedDot& dot, int, int64_t at,
                                          const __m512i (&values)[kOfWord], Sums& sums) const {
#pragma GCC unroll 4
    for (int v = 0; v < kOfWord; ++v) sums.add(dot, at + int64_t(v) * kWords, v % 2, values[v]);
  }

 private:
  using Table = NibbleTable<kBlocks, kTurned>;
  const LinePointers<kLines> lines_;
  const typename Table::Bits bits_;
  const __m512 numbers_;
  const __m512i turn_ = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  Table table_[kLines];
  BlockSteps steps_;
  int64_t block_[kBlocks] = {};
  bool differ_ = false;
};

// Numbers in the place of values, where those are exact and no scale takes them out of range: the
// sums of blocks of kCodesAlign are multiplied.
template <int kLines>
class NumberChunks {
 public:
  NumberChunks(const CodedDot& dot, int first)
      : lines_(dot, first), table_({_mm512_loadu_ps(dot.run.numbers)}) {}
  void enter(int64_t, int64_t) {}
  __attribute__((always_inline)) void values(int i, int64_t at, int64_t count,
                                             __m512i (&to)[kOfWord]) const {
    table_.values(lines_.chunk(i, at, count), bits_, to);
  }
  template <class Sums>
  __attribute__((always_inline)) void add(const CodedDot& dot, int i, int64_t at,
                                          const __m512i (&values)[kOfWord], Sums& sums) const {
    const __m512i order = _mm512_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3);
    const int64_t block = at / kCodesAlign;
    const auto there =
        __mmask16(lowest_bytes(smaller((dot.run.count - at + kCodesAlign - 1) / kCodesAlign, 4)));
    const __m512 scales = _mm512_maskz_loadu_ps(there, lines_.scales[i] + block);
    sums.add_scaled(dot, at, values, _mm512_permutexvar_ps(order, scales));
  }

 private:
  const LinePointers<kLines> lines_;
  const NibbleTable<1, false>::Bits bits_;
  const NibbleTable<1, false> table_;
};

template <int kRows, class Chunks>
void dot_chunks(const CodedDot& dot, bool high_first) {
  constexpr int kLines = kPairLines<kRows>;
  const int64_t count = dot.run.count;
  for (int first = 0; first < dot.lines; first += kLines) {
    Chunks chunks(dot, first);
    PairSums<kRows> sums[kLines];
    int64_t at = 0;
    for (; at + kPairsChunk <= count; at += kPairsChunk) {
      chunks.enter(at, count);
#pragma GCC unroll 4
      for (int i = 0; i < kLines; ++i) {
        __m512i values[kOfWord];
        chunks.values(i, at, kPairsChunk, values);
        chunks.add(dot, i, at, values, sums[i]);
      }
    }
    if (at < count) {
      chunks.enter(at, count);
#pragma GCC unroll 4
      for (int i = 0; i < kLines; ++i) {
        __m512i values[kOfWord];
        chunks.values(i, at, count - at, values);
        keep(count - at, high_first, values);
        chunks.add(dot, i, at, values, sums[i]);
      }
    }
#pragma GCC unroll 4
    for (int i = 0; i < kLines; ++i) sums[i].finish(dot, smaller(first + i, dot.lines - 1));
  }
}

// In order.
template <int kBlocks, bool kZeros, bool kHighFirst>
void decode_chunks(const PairDecode& d) {
  const int64_t count = d.run.count;
  for (int line = 0; line < d.lines; ++line) {
    RoundedChunks<kBlocks, kZeros, 1, true> chunks(d, line);
    uint16_t* const to = d.to + line * d.stride;
    const auto put = [&](int64_t at, int64_t left) __attribute__((always_inline)) {
      __m512i v[kOfWord];
      chunks.enter(at, count);
      chunks.values(0, at, left, v);
      constexpr int kFlip = kHighFirst;
      const __m512i a = _mm512_unpacklo_epi16(v[kFlip], v[1 - kFlip]);
      const __m512i b = _mm512_unpackhi_epi16(v[kFlip], v[1 - kFlip]);
      const __m512i c = _mm512_unpacklo_epi16(v[2 + kFlip], v[3 - kFlip]);
      const __m512i e = _mm512_unpackhi_epi16(v[2 + kFlip], v[3 - kFlip]);
      const __m512i words[] = {_mm512_unpacklo_epi32(a, c), _mm512_unpackhi_epi32(a, c),
                               _mm512_unpacklo_epi32(b, e), _mm512_unpackhi_epi32(b, e)};
#pragma GCC unroll 4
      for (int i = 0; i < kOfWord; ++i)
        _mm512_storeu_si512(to + at + int64_t(i) * kWords,
                            _mm512_maskz_mov_epi16(kept_words(left - i * kWords), words[i]));
    };
    int64_t at = 0;
    for (; at + kPairsChunk <= count; at += kPairsChunk) put(at, kPairsChunk);
    if (at < count) put(at, count - at);
  }
}
template <int kBlocks, bool kHighFirst>
void decode_rounded(const PairDecode& d) {
  if (d.run.zeros)
    decode_chunks<kBlocks, true, kHighFirst>(d);
  else
    decode_chunks<kBlocks, false, kHighFirst>(d);
}
// Blocks of a run begin at multiples of it.
inline bool are_of(const CodedRun& run, int64_t size) {
  return run.block.is_all() || (run.block.size() % size == 0 && run.first % size == 0);
}
template <bool kHighFirst>
void decode_nibble_pairs(const PairDecode& d) {
  if (are_of(d.run, kPairsChunk))
    decode_rounded<1, kHighFirst>(d);
  else if (are_of(d.run, kPairsChunk / 2))
    decode_rounded<2, kHighFirst>(d);
  else
    decode_rounded<4, kHighFirst>(d);
}

template <int kBlocks, int kRows>
void dot_rounded(const CodedDot& dot, bool high_first) {
  if (dot.run.zeros)
    dot_chunks<kRows, RoundedChunks<kBlocks, true, kPairLines<kRows>>>(dot, high_first);
  else
    dot_chunks<kRows, RoundedChunks<kBlocks, false, kPairLines<kRows>>>(dot, high_first);
}
template <bool kHighFirst, int kRows>
void dot_nibble_pairs(const CodedDot& dot) {
  const CodedRun& run = dot.run;
  if (are_of(run, kPairsChunk))
    dot_rounded<1, kRows>(dot, kHighFirst);
  else if (are_of(run, kPairsChunk / 2))
    dot_rounded<2, kRows>(dot, kHighFirst);
  else if (run.exact && run.block.size() == kCodesAlign && are_quick(dot))
    dot_chunks<kRows, NumberChunks<kPairLines<kRows>>>(dot, kHighFirst);
  else
    dot_rounded<4, kRows>(dot, kHighFirst);
}

}  // namespace
}  // namespace moec::cpu
// NOLINTEND(bugprone-implicit-widening-of-multiplication-result)
