// SPDX-License-Identifier: Apache-2.0
// Columns of a B panel of fp32 from lines of codes along k, by the `Ops` of tile_kernels.h. The
// codes of 16 columns are turned as dwords, so that a vector holds one k of each column, which
// becomes a line of the panel without a stop in memory.
//
// Ops that turn codes provide for it: kTurnsCodes;
//   ColumnNumbers, column_numbers(pointer to 16)
//   number_at<bit>(Line, ColumnNumbers) -> Line of fp32 of the nibbles from that bit of each dword
//   i8_lines(Line, four Lines of fp32)      2^24 times the bytes of each dword
//   e4m3_lines(Line, four Lines of fp32)    2^-8 times the values, NaN taken for a number
//   CodesSeen, see(Line, CodesSeen); any_nan_code(CodesSeen): a byte was the e4m3 code of one
#pragma once

#include "backend/cpu/tile_runs.h"

// Offsets within a block are small:
// NOLINTBEGIN(bugprone-implicit-widening-of-multiplication-result)
namespace moec::cpu {
namespace {

template <int kCount, class Body>
__attribute__((always_inline)) inline void unrolled(const Body& body) {
  if constexpr (kCount > 0) {
    unrolled<kCount - 1>(body);
    body.template operator()<kCount - 1>();
  }
}

// What the numbers of codes are divided by, so that scales are multiplied by it.
constexpr float number_unit(LineCodes codes) {
  return codes == LineCodes::kI8 ? 0x1p-24f : codes == LineCodes::kE4m3 ? 256.0f : 1.0f;
}

typedef float Reals __attribute__((vector_size(kLineBytes)));  // a line of fp32
typedef uint32_t Words __attribute__((vector_size(kLineBytes)));
typedef int32_t Truths __attribute__((vector_size(kLineBytes)));

template <class Ops>
typename Ops::Line scale_line(const void* from, ScaleType type, int count) {
  if (type == ScaleType::kF32) return load_line<Ops, Load::kF32>(from, 0, count);
  if (type == ScaleType::kBf16) return load_line<Ops, Load::kBf16ToF32>(from, 0, count);
  if (type == ScaleType::kF16) return load_line<Ops, Load::kF16ToF32>(from, 0, count);
  alignas(kLineBytes) float values[kLanes] = {};
  uint8_t powers[kLanes] = {};
  __builtin_memcpy(powers, from, size_t(count));
  powers_to_f32(powers, values, kLanes);
  return Ops::f32(values, count);
}

// Of each block, those of all columns, times the unit. False: one makes values that are not rounded
// the quick way.
template <class Ops>
bool find_column_scales(const CodedColumns& c, bool any, float unit, Reals (&scales)[kLanes]) {
  const int blocks = 1 + int((c.count - c.first_ends + c.block - 1) / c.block);
  typename Ops::Line lines[kLanes], turned[kLanes];
  for (int i = 0; i < kLanes; ++i)
    lines[i] =
        i < c.columns ? scale_line<Ops>(c.scales[i], c.scale_type, blocks) : typename Ops::Line{};
  Ops::transpose(lines, turned);
  const auto bits = [](float f) { return __builtin_bit_cast(uint32_t, f); };
  const float least = unit < 1 ? c.least_scale / unit : c.least_scale;  // in range with the unit
  const uint32_t lowest = bits(least), range = bits(c.most_scale) - lowest;
  Truths others = {};
  for (int b = 0; b < blocks; ++b) {
    scales[b] = __builtin_bit_cast(Reals, turned[b]);
    const Words scale = __builtin_bit_cast(Words, scales[b]) & 0x7fffffffu;
    others |= (scale != 0) & (scale - lowest > range);
    scales[b] *= unit;
  }
  if (any) return true;
  int32_t found = least <= c.most_scale ? 0 : 1;
  for (int i = 0; i < kLanes; ++i) found |= others[i];
  return !found;
}

template <class Ops, LineCodes kCodes, bool kExact>
bool decode_columns_of(const CodedColumns& c) {
  constexpr int kVecs = kLineBytes / Ops::kBytes, kOf = are_nibbles(kCodes) ? 8 : 4;  // a dword
  struct Vecs {
    typename Ops::Vec vec[kVecs];
  };
  Reals scales[kLanes];
  if (!find_column_scales<Ops>(c, kExact, number_unit(kCodes), scales)) return false;
  [[maybe_unused]] typename Ops::ColumnNumbers numbers = {};
  if constexpr (are_nibbles(kCodes)) numbers = Ops::column_numbers(c.numbers);
  [[maybe_unused]] typename Ops::CodesSeen seen = {};
  int64_t begins = 0;
  int block = -1;
  Vecs scale = {};
  for (int at = 0; at < c.count; at += kOf * kSteps) {
    const int dwords = smaller(c.count - at, kOf * kSteps) / kOf;
    const uint8_t* const from = c.codes + at / (kOf / 4);
    typename Ops::Line lines[kLanes], turned[kLanes];
    if (c.columns == kLanes && dwords == kSteps) {
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; ++i)
        lines[i] = Ops::pairs(reinterpret_cast<const uint16_t*>(from + i * c.stride), 2 * kSteps);
    } else {
      for (int i = 0; i < kLanes; ++i)
        lines[i] =
            i < c.columns
                ? Ops::pairs(reinterpret_cast<const uint16_t*>(from + i * c.stride), 2 * dwords)
                : typename Ops::Line{};
    }
    Ops::transpose(lines, turned);
    for (int d = 0; d < dwords; ++d) {
      const int position = at + d * kOf;
      if (position == begins) {
        scale = __builtin_bit_cast(Vecs, scales[++block]);
        begins = block == 0 ? c.first_ends : begins + c.block;
      }
      char* const to = c.to + position / kSteps * c.block_stride + position % kSteps * kLineBytes;
      const auto put = [&](int i, const typename Ops::Line& line) {
        Vecs values = __builtin_bit_cast(Vecs, line);
        for (int v = 0; v < kVecs; ++v) {
          values.vec[v] = Ops::mul(values.vec[v], scale.vec[v]);
          if constexpr (!kExact) values.vec[v] = quick_bf16<Ops>(values.vec[v]);
        }
        Ops::put(to + i * kLineBytes, __builtin_bit_cast(typename Ops::Line, values));
      };
      if constexpr (are_nibbles(kCodes)) {
        constexpr int kFlip = kCodes == LineCodes::kHighNibble;
        unrolled<kOf>(
            [&]<int i> { put(i, Ops::template number_at<4 * (i ^ kFlip)>(turned[d], numbers)); });
      } else {
        typename Ops::Line values[kOf];
        if constexpr (kCodes == LineCodes::kE4m3) {
          Ops::see(turned[d], seen);
          Ops::e4m3_lines(turned[d], values);
        } else {
          Ops::i8_lines(turned[d], values);
        }
        unrolled<kOf>([&]<int i> { put(i, values[i]); });
      }
    }
  }
  if constexpr (kCodes == LineCodes::kE4m3) return !Ops::any_nan_code(seen);
  return true;
}

template <class Ops, LineCodes kCodes>
bool decode_columns(const CodedColumns& c) {
  if constexpr (are_nibbles(kCodes))
    if (c.exact) return decode_columns_of<Ops, kCodes, true>(c);
  return decode_columns_of<Ops, kCodes, false>(c);
}

template <class Ops>
constexpr void fill_column_decoders(TileKernels& t) {
  if constexpr (requires { Ops::kTurnsCodes; }) {
    const auto at = [&](LineCodes codes) -> DecodeColumnsFn& {
      return t.decode_columns[int(codes)];
    };
    at(LineCodes::kLowNibble) = decode_columns<Ops, LineCodes::kLowNibble>;
    at(LineCodes::kHighNibble) = decode_columns<Ops, LineCodes::kHighNibble>;
    at(LineCodes::kI8) = decode_columns<Ops, LineCodes::kI8>;
    at(LineCodes::kE4m3) = decode_columns<Ops, LineCodes::kE4m3>;
  }
}

}  // namespace
}  // namespace moec::cpu
// NOLINTEND(bugprone-implicit-widening-of-multiplication-result)
