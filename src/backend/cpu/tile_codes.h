// SPDX-License-Identifier: Apache-2.0
// Runs of codes as values of 16 bits, and their products with a few rows, by the `Ops` of
// tile_kernels.h. A table has the 16 values that the nibbles of a block stand for, rounded: one
// look-up finds a value, and a block rounds 16 times, however long it is.
//
// Ops provides for it: mul, sub on Vec; power(Vec) -> sign and exponent of each value; perhaps
// total(Vec), halves added to each other
//   numbers(pointer to 16) -> Numbers; NibbleTable and
//   values<rounding, with a zero>(numbers, scale, zero)
//   table(values of the first 32 of 64 nibbles, of the others)
//   low_nibbles / high_nibbles (pointer to 32, table) -> Line of 16-bit values, of bytes in the
//                                               order byte_of_word(0 .. 31)
//   put_nibbles(to, first, second)              such lines of all bytes, alternating, in order
//   DotNibbles: WordNibbles, or tables of its own for dots
//   e4m3(pointer to 16) -> Line of fp32         round_bf16(Line): of fp32 without odd NaNs
//   e4m3_parts(pointer to 32, two Lines of fp32, E4m3Seen): 2^-8 times the values, NaN taken for a
//   number; any_nan(E4m3Seen): there was one
//   perhaps Exponents, exponents(mask of bits); are_normal_e4m3(pointer to 32): no exponent is 0
//   and none is NaN; scaled_e4m3(pointer to 16, Vec by the low bits of a code, Exponents) -> Line
//   put_high_words(to, two Lines)               the high halves of 32 dwords, in order
#pragma once

#include "backend/cpu/tile_columns.h"

namespace moec::cpu {
namespace {

template <class Ops, bool kHighFirst>
inline void put_chunk(uint16_t* to, const uint8_t* from, const typename Ops::NibbleTable& table) {
  const auto low = Ops::low_nibbles(from, table), high = Ops::high_nibbles(from, table);
  if constexpr (kHighFirst)
    Ops::put_nibbles(to, high, low);
  else
    Ops::put_nibbles(to, low, high);
}

template <class Ops, Rounding kRounding, bool kHighFirst>
void decode_nibbles(const CodedRun& run, uint16_t* to) {
  const CodedRun runs[] = {run};
  const auto whole = [&](int, int64_t at, const uint8_t* from, const auto& table) {
    put_chunk<Ops, kHighFirst>(to + at, from, table);
  };
  const auto last = [&](int, int64_t at, const uint8_t* from, const auto& table) {
    uint16_t values[kCodesChunk];
    put_chunk<Ops, kHighFirst>(values, from, table);
    __builtin_memcpy(to + at, values, size_t(run.count - at) * sizeof(uint16_t));
  };
  if (run.zeros)
    for_each_chunk<Ops, kRounding, true>(runs, whole, last);
  else if (kRounding == Rounding::kBf16 && are_quick(run))
    for_each_chunk<Ops, Rounding::kQuick, false>(runs, whole, last);
  else
    for_each_chunk<Ops, kRounding, false>(runs, whole, last);
}

// Lines that are multiplied at once, so that their ends overlap: two, where registers hold them.
template <class Ops, int kRows>
constexpr int kLinesAtOnce = Ops::kBytes == 64 && kRows <= 2 ? 2 : 1;

// body(first line, runs) for lines of a dot; the last one stands for those beyond it.
template <int kLines, class Body>
__attribute__((always_inline)) inline void for_lines_at_once(const CodedDot& dot,
                                                             const Body& body) {
  for (int first = 0; first < dot.lines; first += kLines) {
    CodedRun runs[kLines];
    for (int i = 0; i < kLines; ++i) {
      const int64_t line = smaller(first + i, dot.lines - 1);
      runs[i] = dot.run;
      runs[i].codes += line * dot.code_stride;
      runs[i].scales += line * dot.scale_stride;
      if (runs[i].zeros) runs[i].zeros += line * dot.scale_stride;
    }
    body(first, runs);
  }
}

// Sums of some lines and rows in kChains vectors each: their order is the same for any number of
// both.
template <class Ops, int kRows, int kLines>
class DotSums {
 public:
  DotSums(const CodedDot& dot, int first) : dot_(dot), first_(first) {
    for (auto& line : sum_)
      for (auto& row : line)
        for (auto& chain : row) chain = Ops::zero();
  }
  // Line `part` of a chunk: x of the run at position `at`, times the values.
  __attribute__((always_inline)) void add(int line, int part, int64_t at,
                                          const typename Ops::Line& line_values) {
    const auto values = __builtin_bit_cast(Vecs, line_values);
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
      const float* const x = static_cast<const float*>(dot_.x) + r * dot_.stride + at;
#pragma GCC unroll 4
      for (int v = 0; v < kVecs; ++v) {
        typename Ops::Vec& sum = sum_[line][r][(part * kVecs + v) % kChains];
        sum = Ops::fma(Ops::load(x + int64_t(v) * kColumns), values.vec[v], sum);
      }
    }
  }
  __attribute__((always_inline)) void finish() const {
#pragma GCC unroll 4
    for (int i = 0; i < kLines; ++i)
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) {
        typename Ops::Vec all = sum_[i][r][0];
        for (int c = 1; c < kChains; ++c) all = Ops::add(all, sum_[i][r][c]);
        dot_.sums[r * kDotLines + smaller(first_ + i, dot_.lines - 1)] = total(all);
      }
  }

 private:
  struct Vecs {
    typename Ops::Vec vec[kLineBytes / Ops::kBytes];
  };
  static constexpr int kVecs = kLineBytes / Ops::kBytes, kColumns = Ops::kBytes / 4, kChains = 4;

  // Halves are added to each other.
  static float total(typename Ops::Vec all) {
    if constexpr (requires { Ops::total(all); }) {
      return Ops::total(all);
    } else {
      float parts[kColumns];
      Ops::store(parts, all);
      for (int half = kColumns / 2; half > 0; half /= 2)
        for (int i = 0; i < half; ++i) parts[i] += parts[i + half];
      return parts[0];
    }
  }

  const CodedDot& dot_;
  const int first_;
  typename Ops::Vec sum_[kLines][kRows][kChains];
};

// The values of 64 nibbles as fp32, in the order nibble_order.
template <class Ops>
struct NibbleLines {
  typename Ops::Line line[kCodesChunk / kLanes];
};

// From tables of 16-bit values: even words and odd ones of the low nibbles, then of the high ones.
template <class Ops>
struct WordNibbles : Ops {
  static constexpr int position(int i) {
    const int line = i / kLanes, word = 2 * (i % kLanes) + line % 2;
    return 2 * Ops::byte_of_word(word) + line / 2;
  }
  static NibbleLines<Ops> lines(const uint8_t* from, const typename Ops::NibbleTable& table) {
    const auto low = Ops::low_nibbles(from, table), high = Ops::high_nibbles(from, table);
    return {{Ops::even_bf16(low), Ops::odd_bf16(low), Ops::even_bf16(high), Ops::odd_bf16(high)}};
  }
};

// Values beyond the end of a run become zero, whatever their codes and scales.
template <class Ops>
NibbleLines<Ops> up_to(const NibbleLines<Ops>& lines, int64_t count, bool high_first) {
  alignas(kLineBytes) float values[kCodesChunk];
  NibbleLines<Ops> kept;
  for (int64_t i = 0; i < kCodesChunk / kLanes; ++i) {
    Ops::put(values + i * kLanes, lines.line[i]);
    for (int64_t j = i * kLanes; j < (i + 1) * kLanes; ++j)
      if ((Ops::DotNibbles::position(int(j)) ^ int(high_first)) >= count) values[j] = 0;
    kept.line[i] = Ops::f32(values + i * kLanes, kLanes);
  }
  return kept;
}

template <class Ops, Rounding kRounding, bool kZeros, int kRows>
void dot_nibbles_of(const CodedDot& dot, bool high_first) {
  using Tables = typename Ops::DotNibbles;
  constexpr int kLines = kLinesAtOnce<Ops, kRows>;
  for_lines_at_once<kLines>(dot, [&](int first, const CodedRun(&runs)[kLines]) {
    DotSums<Ops, kRows, kLines> sums(dot, first);
    const auto add = [&](int line, int64_t at, const NibbleLines<Ops>& values) {
#pragma GCC unroll 4
      for (int i = 0; i < kCodesChunk / kLanes; ++i)
        sums.add(line, i, at + int64_t(i) * kLanes, values.line[i]);
    };
    for_each_chunk<Tables, kRounding, kZeros>(
        runs,
        [&](int line, int64_t at, const uint8_t* from, const auto& table) {
          add(line, at, Tables::lines(from, table));
        },
        [&](int line, int64_t at, const uint8_t* from, const auto& table) {
          add(line, at, up_to<Ops>(Tables::lines(from, table), dot.run.count - at, high_first));
        });
    sums.finish();
  });
}
template <class Ops, bool kHighFirst, int kRows>
void dot_nibbles(const CodedDot& dot) {
  if (dot.run.exact)
    dot_nibbles_of<Ops, Rounding::kExact, false, kRows>(dot, kHighFirst);
  else if (dot.run.zeros)
    dot_nibbles_of<Ops, Rounding::kBf16, true, kRows>(dot, kHighFirst);
  else if (are_quick(dot))
    dot_nibbles_of<Ops, Rounding::kQuick, false, kRows>(dot, kHighFirst);
  else
    dot_nibbles_of<Ops, Rounding::kBf16, false, kRows>(dot, kHighFirst);
}

template <class Ops, LineCodes kCodes>
bool decode_quick(const CodedRun& run, uint16_t* to) {
  const CodedRun runs[] = {run};
  return for_each_quick<Ops, kCodes>(
      runs, [&](int, int64_t at, const typename Ops::Line(&lines)[2]) {
        if (run.count - at >= kCodesAlign) return Ops::put_high_words(to + at, lines);
        uint16_t values[kCodesAlign];
        Ops::put_high_words(values, lines);
        __builtin_memcpy(to + at, values, size_t(run.count - at) * sizeof(uint16_t));
      });
}
template <class Ops, LineCodes kCodes, bool kHalf>
void decode_bytes(const CodedRun& run, uint16_t* to) {
  if (!kHalf && are_quick(run) && decode_quick<Ops, kCodes>(run, to)) return;
  for_each_line<Ops, kCodes>(run, [&](int, int64_t at, int count, const typename Ops::Line& line) {
    if constexpr (kHalf)
      Ops::put_f16(to + at, line, count);
    else
      Ops::put_bf16(to + at, line, count);
  });
}

template <class Ops, LineCodes kCodes, int kRows>
bool dot_quick(const CodedDot& dot) {
  constexpr int kLines = kLinesAtOnce<Ops, kRows>;
  bool done = true;
  for_lines_at_once<kLines>(dot, [&](int first, const CodedRun(&runs)[kLines]) {
    DotSums<Ops, kRows, kLines> sums(dot, first);
    done &= for_each_quick<Ops, kCodes>(
        runs, [&](int line, int64_t at, const typename Ops::Line(&lines)[2]) {
          sums.add(line, 0, at, lines[0]);
          sums.add(line, 1, at + kLanes, lines[1]);
        });
    sums.finish();
  });
  return done;
}
template <class Ops, LineCodes kCodes, int kRows>
void dot_bytes(const CodedDot& dot) {
  if (are_quick(dot) && dot_quick<Ops, kCodes, kRows>(dot)) return;
  for_lines_at_once<1>(dot, [&](int first, const CodedRun(&runs)[1]) {
    DotSums<Ops, kRows, 1> sums(dot, first);
    for_each_line<Ops, kCodes>(runs[0],
                               [&](int half, int64_t at, int count, typename Ops::Line line) {
                                 line = Ops::round_bf16(line);
                                 if (count < kLanes) {
                                   alignas(kLineBytes) float values[kLanes] = {};
                                   Ops::put_f32(values, line, count);
                                   line = Ops::f32(values, kLanes);
                                 }
                                 sums.add(0, half, at, line);
                               });
    sums.finish();
  });
}

template <class Ops, int kRows = kLinesRows>
constexpr void fill_dots(TileKernels& t) {
  if constexpr (kRows > 0) {
    const auto at = [&](LineCodes codes) -> DotRunFn& { return t.dot_run[int(codes)][kRows - 1]; };
    at(LineCodes::kLowNibble) = dot_nibbles<Ops, false, kRows>;
    at(LineCodes::kHighNibble) = dot_nibbles<Ops, true, kRows>;
    at(LineCodes::kI8) = dot_bytes<Ops, LineCodes::kI8, kRows>;
    at(LineCodes::kE4m3) = dot_bytes<Ops, LineCodes::kE4m3, kRows>;
    fill_dots<Ops, kRows - 1>(t);
  }
}
template <class Ops, bool kHalf>
constexpr void fill_decoders(TileKernels& t) {
  constexpr Rounding kRounding = kHalf ? Rounding::kF16 : Rounding::kBf16;
  const auto at = [&](LineCodes codes) -> DecodeRunFn& { return t.decode_run[int(codes)][kHalf]; };
  at(LineCodes::kLowNibble) = decode_nibbles<Ops, kRounding, false>;
  at(LineCodes::kHighNibble) = decode_nibbles<Ops, kRounding, true>;
  at(LineCodes::kI8) = decode_bytes<Ops, LineCodes::kI8, kHalf>;
  at(LineCodes::kE4m3) = decode_bytes<Ops, LineCodes::kE4m3, kHalf>;
}
template <class Ops>
constexpr void fill_code_kernels(TileKernels& t) {
  fill_decoders<Ops, false>(t);
  fill_decoders<Ops, true>(t);
  fill_dots<Ops>(t);
  fill_column_decoders<Ops>(t);
  t.powers_to_f32 = powers_to_f32;
  for (int i = 0; i < kCodesChunk; ++i) t.nibble_order[i] = uint8_t(Ops::DotNibbles::position(i));
}

}  // namespace
}  // namespace moec::cpu
