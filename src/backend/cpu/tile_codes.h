// SPDX-License-Identifier: Apache-2.0
// Runs of codes as values of 16 bits, and their products with a few rows, by the `Ops` of
// tile_kernels.h. A table has the 16 values that the nibbles of a block stand for, rounded: one
// look-up finds a value, and a block rounds 16 times, however long it is.
//
// Ops provides for it: mul, sub on Vec; numbers(pointer to 16) -> Numbers; NibbleTable and
//   values<rounding>(numbers, scale, zero), table(values of the first 32 of 64 nibbles, of the others)
//   low_nibbles / high_nibbles (pointer to 32, table) -> Line of 16-bit values, of bytes in the
//                                               order byte_of_word(0 .. 31)
//   put_nibbles(to, first, second)              such lines of all bytes, alternating, in order
//   e4m3(pointer to 16) -> Line of fp32         round_bf16(Line): of fp32 without odd NaNs
#pragma once

#include "backend/cpu/tile_lines.h"

namespace moec::cpu {
namespace {

enum class Rounding { kExact, kBf16, kF16 };  // of a table; exact: bits beyond bf16 are zero

template <class Ops, Rounding kRounding>
class NibbleTables {
 public:
  explicit NibbleTables(const CodedRun& run)
      : run_(run), numbers_(Ops::numbers(run.numbers)), first_block_(run.block.of(run.first)) {}

  // Of a chunk `at` positions into the run.
  const typename Ops::NibbleTable& of_chunk(int64_t at) {
    const int64_t left = block(at);
    const int64_t right = at + kCodesAlign < run_.count ? block(at + kCodesAlign) : left;
    if (left != left_ || right != right_) {
      const auto zero = [&](int64_t i) { return run_.zeros ? run_.zeros[i] : 0.0f; };
      const auto first = Ops::template values<kRounding>(numbers_, run_.scales[left], zero(left));
      table_ = left == right ? Ops::table(first, first)
                             : Ops::table(first, Ops::template values<kRounding>(
                                                     numbers_, run_.scales[right], zero(right)));
      left_ = left;
      right_ = right;
    }
    return table_;
  }

 private:
  int64_t block(int64_t at) const { return run_.block.of(run_.first + at) - first_block_; }

  const CodedRun& run_;
  const typename Ops::Numbers numbers_;
  const int64_t first_block_;
  typename Ops::NibbleTable table_ = {};
  int64_t left_ = -1, right_ = -1;
};

// The bytes of a chunk; those of the last one may end before it does.
inline const uint8_t* chunk_bytes(const uint8_t* from, int64_t bytes, int64_t chunk,
                                  uint8_t* padded) {
  if (bytes >= chunk) return from;
  __builtin_memset(padded, 0, size_t(chunk));
  __builtin_memcpy(padded, from, size_t(bytes));
  return padded;
}

template <class Ops, Rounding kRounding, bool kHighFirst>
void decode_nibbles(const CodedRun& run, uint16_t* to) {
  NibbleTables<Ops, kRounding> tables(run);
  const uint8_t* const codes = run.codes + run.first / 2;
  for (int64_t at = 0; at < run.count; at += kCodesChunk) {
    const int64_t left = run.count - at;
    uint8_t padded[kCodesChunk / 2];
    const uint8_t* const from =
        chunk_bytes(codes + at / 2, (left + 1) / 2, kCodesChunk / 2, padded);
    const auto& table = tables.of_chunk(at);
    const auto low = Ops::low_nibbles(from, table), high = Ops::high_nibbles(from, table);
    uint16_t last[kCodesChunk];
    uint16_t* const out = left < kCodesChunk ? last : to + at;
    if constexpr (kHighFirst)
      Ops::put_nibbles(out, high, low);
    else
      Ops::put_nibbles(out, low, high);
    if (left < kCodesChunk) __builtin_memcpy(to + at, last, size_t(left) * sizeof(uint16_t));
  }
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
        sum = Ops::fma(Ops::load(x + v * kColumns), values.vec[v], sum);
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

template <class Ops, Rounding kRounding, bool kHighFirst, int kRows>
void dot_nibbles_of(const CodedDot& dot) {
  const CodedRun& run = dot.run;
  NibbleTables<Ops, kRounding> tables(run);
  DotSums<Ops, kRows> sums(dot);
  const uint8_t* const codes = run.codes + run.first / 2;
  for (int64_t at = 0; at < run.count; at += kCodesChunk) {
    const int64_t left = run.count - at;
    uint8_t padded[kCodesChunk / 2];
    const uint8_t* const from =
        chunk_bytes(codes + at / 2, (left + 1) / 2, kCodesChunk / 2, padded);
    const auto& table = tables.of_chunk(at);
    auto low = Ops::low_nibbles(from, table), high = Ops::high_nibbles(from, table);
    if (left < kCodesChunk) {
      low = up_to<Ops>(low, left, false, kHighFirst);
      high = up_to<Ops>(high, left, true, kHighFirst);
    }
    sums.add(0, at, Ops::even_bf16(low));
    sums.add(1, at + kLanes, Ops::odd_bf16(low));
    sums.add(2, at + 2 * kLanes, Ops::even_bf16(high));
    sums.add(3, at + 3 * kLanes, Ops::odd_bf16(high));
  }
  sums.finish();
}
template <class Ops, bool kHighFirst, int kRows>
void dot_nibbles(const CodedDot& dot) {
  if (dot.run.exact)
    dot_nibbles_of<Ops, Rounding::kExact, kHighFirst, kRows>(dot);
  else
    dot_nibbles_of<Ops, Rounding::kBf16, kHighFirst, kRows>(dot);
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
      const int64_t at = part + half * kLanes;
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
