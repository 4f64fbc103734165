// SPDX-License-Identifier: Apache-2.0
// Runs of codes as values of 16 bits, and their products with a few rows, by the `Ops` of
// tile_kernels.h. A table has the 16 values that the nibbles of a block stand for, rounded: one
// look-up finds a value, and a block rounds 16 times, however long it is.
//
// Ops provides for it: mul, sub on Vec; numbers(pointer to 16) -> Numbers; NibbleTable and
//   values<rounding, with a zero>(numbers, scale, zero)
//   table(values of the first 32 of 64 nibbles, of the others)
//   low_nibbles / high_nibbles (pointer to 32, table) -> Line of 16-bit values, of bytes in the
//                                               order byte_of_word(0 .. 31)
//   put_nibbles(to, first, second)              such lines of all bytes, alternating, in order
//   e4m3(pointer to 16) -> Line of fp32         round_bf16(Line): of fp32 without odd NaNs
#pragma once

#include "backend/cpu/tile_lines.h"

namespace moec::cpu {
namespace {

enum class Rounding { kExact, kBf16, kF16 };  // of a table; exact: bits beyond bf16 are zero

// The bytes of a chunk; those of the last one may end before it does.
inline const uint8_t* chunk_bytes(const uint8_t* from, int64_t bytes, int64_t chunk,
                                  uint8_t* padded) {
  if (bytes >= chunk) return from;
  __builtin_memset(padded, 0, size_t(chunk));
  __builtin_memcpy(padded, from, size_t(bytes));
  return padded;
}

// body(position, bytes, table) for each whole chunk of a run, then last(position, bytes, table) for
// what is left. The table is made again where one of its blocks is another.
template <class Ops, Rounding kRounding, bool kZeros, class Body, class Last>
__attribute__((always_inline)) inline void for_each_chunk(const CodedRun& run, const Body& body,
                                                          const Last& last) {
  const auto numbers = Ops::numbers(run.numbers);
  const quant::BlockSize block = run.block;
  const float *const scales = run.scales, *const zeros = run.zeros;
  const uint8_t* const codes = run.codes + run.first / 2;
  const int64_t first = run.first, first_block = block.of(first), count = run.count;
  const auto values = [&](int64_t i) {
    return Ops::template values<kRounding, kZeros>(numbers, scales[i], kZeros ? zeros[i] : 0.0f);
  };
  typename Ops::NibbleTable table = {};
  int64_t left = -1, right = -1;
  const auto find = [&](int64_t at, bool two) {
    const int64_t i = block.of(first + at) - first_block;
    const int64_t j = two ? block.of(first + at + kCodesAlign) - first_block : i;
    if (i == left && j == right) return;
    const auto one = values(i);
    table = i == j ? Ops::table(one, one) : Ops::table(one, values(j));
    left = i;
    right = j;
  };
  int64_t at = 0;
  for (; at + kCodesChunk <= count; at += kCodesChunk) {
    find(at, true);
    body(at, codes + at / 2, table);
  }
  if (at == count) return;
  find(at, at + kCodesAlign < count);
  uint8_t padded[kCodesChunk / 2];
  last(at, chunk_bytes(codes + at / 2, (count - at + 1) / 2, kCodesChunk / 2, padded), table);
}

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
  const auto whole = [&](int64_t at, const uint8_t* from, const auto& table) {
    put_chunk<Ops, kHighFirst>(to + at, from, table);
  };
  const auto last = [&](int64_t at, const uint8_t* from, const auto& table) {
    uint16_t values[kCodesChunk];
    put_chunk<Ops, kHighFirst>(values, from, table);
    __builtin_memcpy(to + at, values, size_t(run.count - at) * sizeof(uint16_t));
  };
  if (run.zeros)
    for_each_chunk<Ops, kRounding, true>(run, whole, last);
  else
    for_each_chunk<Ops, kRounding, false>(run, whole, last);
}

// Sums of some rows in kChains vectors each: their order is the same for any number of rows.
template <class Ops, int kRows>
class DotSums {
 public:
  explicit DotSums(const CodedDot& dot) : dot_(dot) {
    for (auto& row : sum_)
      for (auto& chain : row) chain = Ops::zero();
  }
  // Line `part` of a chunk: x of the run at position `at`, times the line.
  __attribute__((always_inline)) void add(int part, int64_t at, const typename Ops::Line& line) {
    const auto values = __builtin_bit_cast(Vecs, line);
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
      const float* const x = dot_.x + r * dot_.stride + at;
#pragma GCC unroll 4
      for (int v = 0; v < kVecs; ++v) {
        typename Ops::Vec& sum = sum_[r][(part * kVecs + v) % kChains];
        sum = Ops::fma(Ops::load(x + int64_t(v) * kColumns), values.vec[v], sum);
      }
    }
  }
  void finish() const {
    for (int r = 0; r < kRows; ++r) {
      float parts[kColumns];
      typename Ops::Vec all = sum_[r][0];
      for (int i = 1; i < kChains; ++i) all = Ops::add(all, sum_[r][i]);
      Ops::store(parts, all);
      for (int half = kColumns / 2; half > 0; half /= 2)
        for (int i = 0; i < half; ++i) parts[i] += parts[i + half];
      dot_.sums[r] = parts[0];
    }
  }

 private:
  struct Vecs {
    typename Ops::Vec vec[kLineBytes / Ops::kBytes];
  };
  static constexpr int kVecs = kLineBytes / Ops::kBytes, kColumns = Ops::kBytes / 4, kChains = 4;

  const CodedDot& dot_;
  typename Ops::Vec sum_[kRows][kChains];
};

// Values beyond the end of a run become zero, whatever their codes and scales.
template <class Ops>
typename Ops::Line up_to(const typename Ops::Line& line, int64_t count, bool high,
                         bool high_first) {
  alignas(kLineBytes) uint16_t words[2 * kLanes];
  Ops::put(words, line);
  for (int i = 0; i < 2 * kLanes; ++i)
    if (2 * Ops::byte_of_word(i) + (high != high_first) >= count) words[i] = 0;
  return Ops::pairs(words, 2 * kLanes);
}

template <class Ops, Rounding kRounding, bool kZeros, bool kHighFirst, int kRows>
void dot_nibbles_of(const CodedDot& dot) {
  DotSums<Ops, kRows> sums(dot);
  const auto add = [&](int64_t at, const auto& low, const auto& high) {
    sums.add(0, at, Ops::even_bf16(low));
    sums.add(1, at + kLanes, Ops::odd_bf16(low));
    sums.add(2, at + 2 * kLanes, Ops::even_bf16(high));
    sums.add(3, at + 3 * kLanes, Ops::odd_bf16(high));
  };
  for_each_chunk<Ops, kRounding, kZeros>(
      dot.run,
      [&](int64_t at, const uint8_t* from, const auto& table) {
        add(at, Ops::low_nibbles(from, table), Ops::high_nibbles(from, table));
      },
      [&](int64_t at, const uint8_t* from, const auto& table) {
        const int64_t left = dot.run.count - at;
        add(at, up_to<Ops>(Ops::low_nibbles(from, table), left, false, kHighFirst),
            up_to<Ops>(Ops::high_nibbles(from, table), left, true, kHighFirst));
      });
  sums.finish();
}
template <class Ops, bool kHighFirst, int kRows>
void dot_nibbles(const CodedDot& dot) {
  if (dot.run.exact)
    dot_nibbles_of<Ops, Rounding::kExact, false, kHighFirst, kRows>(dot);
  else if (dot.run.zeros)
    dot_nibbles_of<Ops, Rounding::kBf16, true, kHighFirst, kRows>(dot);
  else
    dot_nibbles_of<Ops, Rounding::kBf16, false, kHighFirst, kRows>(dot);
}

// body(0 or 1, position, count, Line of fp32) for each 16 values of a run of bytes.
template <class Ops, LineCodes kCodes, class Body>
__attribute__((always_inline)) inline void for_each_line(const CodedRun& run, const Body& body) {
  constexpr int kVecs = kLineBytes / Ops::kBytes;
  struct Vecs {
    typename Ops::Vec vec[kVecs];
  };
  const int64_t first_block = run.block.of(run.first);
  const uint8_t* const codes = run.codes + run.first;
  for (int64_t part = 0; part < run.count; part += kCodesAlign) {
    const int64_t block = run.block.of(run.first + part) - first_block;
    const auto scale = Ops::broadcast(run.scales + block);
    const auto zero = run.zeros ? Ops::broadcast(run.zeros + block) : Ops::zero();
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half) {
      const int64_t at = part + int64_t(half) * kLanes;
      if (at >= run.count) break;
      uint8_t padded[kLanes];
      const uint8_t* const from = chunk_bytes(codes + at, run.count - at, kLanes, padded);
      typename Ops::Line line;
      if constexpr (kCodes == LineCodes::kI8)
        line = Ops::i8(reinterpret_cast<const int8_t*>(from));
      else
        line = Ops::e4m3(from);
      Vecs values = __builtin_bit_cast(Vecs, line);
      for (int v = 0; v < kVecs; ++v)
        values.vec[v] = Ops::mul(run.zeros ? Ops::sub(values.vec[v], zero) : values.vec[v], scale);
      body(half, at, smaller(run.count - at, kLanes),
           __builtin_bit_cast(typename Ops::Line, values));
    }
  }
}
template <class Ops, LineCodes kCodes, bool kHalf>
void decode_bytes(const CodedRun& run, uint16_t* to) {
  for_each_line<Ops, kCodes>(run, [&](int, int64_t at, int count, const typename Ops::Line& line) {
    if constexpr (kHalf)
      Ops::put_f16(to + at, line, count);
    else
      Ops::put_bf16(to + at, line, count);
  });
}
template <class Ops, LineCodes kCodes, int kRows>
void dot_bytes(const CodedDot& dot) {
  DotSums<Ops, kRows> sums(dot);
  for_each_line<Ops, kCodes>(dot.run,
                             [&](int half, int64_t at, int count, typename Ops::Line line) {
                               line = Ops::round_bf16(line);
                               if (count < kLanes) {
                                 alignas(kLineBytes) float values[kLanes] = {};
                                 Ops::put_f32(values, line, count);
                                 line = Ops::f32(values, kLanes);
                               }
                               sums.add(half, at, line);
                             });
  sums.finish();
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
  // Two lines of low nibbles, even words and odd ones, then two of high nibbles.
  for (int i = 0; i < kCodesChunk; ++i) {
    const int line = i / kLanes, word = 2 * (i % kLanes) + line % 2;
    t.nibble_order[i] = uint8_t(2 * Ops::byte_of_word(word) + line / 2);
  }
}

}  // namespace
}  // namespace moec::cpu
