// SPDX-License-Identifier: Apache-2.0
// Walks over runs of codes, by the `Ops` of tile_codes.h: nibbles in chunks with the table of their
// blocks, bytes in lines of values.
#pragma once

#include <type_traits>

#include "backend/cpu/tile_lines.h"

namespace moec::cpu {
namespace {

// Of a table. Exact: bits beyond bf16 are zero. Quick: to bf16, of runs that are_quick.
enum class Rounding { kExact, kQuick, kBf16, kF16 };

// To bf16, ties to even, of values from 2^-126 up to 2^110; zeros lose their sign. What is added
// leaves a sum whose last bit is that of bf16.
template <class Ops>
__attribute__((always_inline)) inline typename Ops::Vec quick_bf16(typename Ops::Vec v) {
  constexpr float kUp = 98304, kDown = -98304;  // 1.5 * 2^16
  const auto power = Ops::power(v);
  return Ops::fma(power, Ops::broadcast(&kDown), Ops::fma(power, Ops::broadcast(&kUp), v));
}

inline int64_t blocks_of(const CodedRun& run) {
  return run.block.of(run.first + run.count - 1) - run.block.of(run.first) + 1;
}
// quick_bf16 rounds the values of every one of these scales.
inline bool are_quick(const CodedRun& run, const float* scales, int64_t count) {
  if (run.zeros || !(run.least_scale <= run.most_scale)) return false;
  const auto bits = [](float f) { return __builtin_bit_cast(uint32_t, f); };
  const uint32_t least = bits(run.least_scale), range = bits(run.most_scale) - least;
  uint32_t others = 0;
  for (int64_t i = 0; i < count; ++i) {
    const uint32_t scale = bits(scales[i]) & 0x7fffffffu;
    others |= uint32_t(scale != 0) & uint32_t(scale - least > range);
  }
  return !others;
}
inline bool are_quick(const CodedRun& run) {
  return are_quick(run, run.scales, blocks_of(run));
}
// Of all lines.
inline bool are_quick(const CodedDot& dot) {
  const int64_t blocks = blocks_of(dot.run);
  if (dot.scale_stride == blocks) return are_quick(dot.run, dot.run.scales, dot.lines * blocks);
  const int differ = dot.scale_stride ? dot.lines : 1;
  bool quick = true;
  for (int64_t i = 0; quick && i < differ; ++i)
    quick = are_quick(dot.run, dot.run.scales + i * dot.scale_stride, blocks);
  return quick;
}

// A NaN that no rounding carries over to a number.
inline float quiet(float scale) {
  return scale == scale ? scale : __builtin_nanf("");
}

// As quant::e8m0, many at a time.
inline void powers_to_f32(const uint8_t* from, float* to, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    const uint32_t code = from[i], bits = code == 255 ? 0x7fc00000u : code << 23;
    to[i] = __builtin_bit_cast(float, code ? bits : 0x00400000u);
  }
}

// The bytes of a chunk; those of the last one may end before it does.
inline const uint8_t* chunk_bytes(const uint8_t* from, int64_t bytes, int64_t chunk,
                                  uint8_t* padded) {
  if (bytes >= chunk) return from;
  __builtin_memset(padded, 0, size_t(chunk));
  __builtin_memcpy(padded, from, size_t(bytes));
  return padded;
}

// The lines of a matrix follow each other, so what comes soon is asked for early.
inline void prefetch_ahead(const uint8_t* codes) {
  constexpr int kAhead = 8192;
  __builtin_prefetch(codes + kAhead, 0, 2);
}

// The blocks of a run, one after the other.
class BlockSteps {
 public:
  explicit BlockSteps(const CodedRun& run)
      : size_(run.block.is_all() ? int64_t(1) << 62 : run.block.size()),
        end_(run.block.is_all() ? 0 : run.block.of(run.first) * size_ - run.first) {}
  bool begins(int64_t at) {  // a block does, of which `index` is the number; at 0, too
    if (at < end_) return false;
    end_ += size_;
    ++index;
    return true;
  }
  int64_t index = -1;

 private:
  const int64_t size_;
  int64_t end_;
};

// Runs of the same positions of some lines: body(line, position, bytes, table) for each whole
// chunk, then last(line, position, bytes, table) for what is left. The table is made again where
// one of its blocks is another.
template <class Tables, Rounding kRounding, bool kZeros, int kLines, class Body, class Last>
__attribute__((always_inline)) inline void for_each_chunk(const CodedRun (&runs)[kLines],
                                                          const Body& body, const Last& last) {
  constexpr bool kNeverRounds = kRounding == Rounding::kQuick || kRounding == Rounding::kExact;
  const auto numbers = Tables::numbers(runs[0].numbers);
  const float *scales[kLines], *zeros[kLines];
  const uint8_t* codes[kLines];
  for (int i = 0; i < kLines; ++i) {
    scales[i] = runs[i].scales;
    zeros[i] = runs[i].zeros;
    codes[i] = runs[i].codes + runs[i].first / 2;
  }
  const int64_t count = runs[0].count;
  BlockSteps steps(runs[0]);
  typename Tables::Values now[kLines] = {};
  typename Tables::NibbleTable table[kLines] = {};
  const auto find_values = [&] {
#pragma GCC unroll 4
    for (int i = 0; i < kLines; ++i) {
      const float scale = scales[i][steps.index], zero = kZeros ? zeros[i][steps.index] : 0.0f;
      now[i] = Tables::template values<kRounding, kZeros>(
          numbers, kNeverRounds ? scale : quiet(scale), zero);
    }
  };
  bool differ = false;  // the halves of the table
  const auto find = [&](int64_t at, bool two) {
    const bool first_begins = steps.begins(at);
    if (first_begins) find_values();
    typename Tables::Values first[kLines];
#pragma GCC unroll 4
    for (int i = 0; i < kLines; ++i) first[i] = now[i];
    const bool second_begins = two && steps.begins(at + kCodesAlign);
    if (second_begins) find_values();
    if (first_begins || second_begins || differ)
#pragma GCC unroll 4
      for (int i = 0; i < kLines; ++i) table[i] = Tables::table(first[i], now[i]);
    differ = second_begins;
  };
  int64_t at = 0;
  for (; at + kCodesChunk <= count; at += kCodesChunk) {
    find(at, true);
#pragma GCC unroll 4
    for (int i = 0; i < kLines; ++i) {
      prefetch_ahead(codes[i] + at / 2);
      body(i, at, codes[i] + at / 2, table[i]);
    }
  }
  if (at == count) return;
  find(at, at + kCodesAlign < count);
  for (int i = 0; i < kLines; ++i) {
    uint8_t padded[kCodesChunk / 2];
    last(i, at, chunk_bytes(codes[i] + at / 2, (count - at + 1) / 2, kCodesChunk / 2, padded),
         table[i]);
  }
}

// body(0 or 1, position, count, Line of fp32) for each 16 values of a run of bytes.
template <class Ops, LineCodes kCodes, class Body>
__attribute__((always_inline)) inline void for_each_line(const CodedRun& run, const Body& body) {
  constexpr int kVecs = kLineBytes / Ops::kBytes;
  struct Vecs {
    typename Ops::Vec vec[kVecs];
  };
  const uint8_t* const codes = run.codes + run.first;
  BlockSteps steps(run);
  typename Ops::Vec scale = Ops::zero(), zero = Ops::zero();
  for (int64_t part = 0; part < run.count; part += kCodesAlign) {
    if (steps.begins(part)) {
      const float own = quiet(run.scales[steps.index]);
      scale = Ops::broadcast(&own);
      if (run.zeros) zero = Ops::broadcast(run.zeros + steps.index);
    }
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

// Normal e4m3 codes times a scale, rounded to bf16: a power of two commutes with the rounding, so
// the eight significands are rounded once a block. Adding bits gives a code's sign and exponent.
template <class Ops>
class ScaledSignificands {
 public:
  ScaledSignificands() : found_(Ops::zero()), exponents_(Ops::exponents(0)) {}
  // Of 256 times a scale of runs that are_quick. A scale of 0 has no exponent to add to.
  explicit ScaledSignificands(float scale256)
      : exponents_(Ops::exponents(scale256 == 0 ? 0 : 0x87800000u)) {
    // With exponent 0, over 256; twice, as a vector of 16 is indexed by four bits.
    alignas(kLineBytes) static constexpr float kLeast[] = {
        0x8p-18f, 0x9p-18f, 0xap-18f, 0xbp-18f, 0xcp-18f, 0xdp-18f, 0xep-18f, 0xfp-18f,
        0x8p-18f, 0x9p-18f, 0xap-18f, 0xbp-18f, 0xcp-18f, 0xdp-18f, 0xep-18f, 0xfp-18f};
    found_ = quick_bf16<Ops>(Ops::mul(Ops::load(kLeast), Ops::broadcast(&scale256)));
  }
  void lines(const uint8_t* from, typename Ops::Line (&to)[2]) const {
    to[0] = Ops::scaled_e4m3(from, found_, exponents_);
    to[1] = Ops::scaled_e4m3(from + kLanes, found_, exponents_);
  }

 private:
  typename Ops::Vec found_;
  typename Ops::Exponents exponents_;
};
struct NoSignificands {};

// Runs of the same positions of some lines, that are quick: body(line, position, two Lines of
// fp32) for each 32 values, rounded to bf16; those beyond the end are of zero codes. False: a NaN
// is among the codes, and values are wrong.
template <class Ops, LineCodes kCodes, int kLines, class Body>
__attribute__((always_inline)) inline bool for_each_quick(const CodedRun (&runs)[kLines],
                                                          const Body& body) {
  constexpr bool kE4m3 = kCodes == LineCodes::kE4m3;
  constexpr int kVecs = kLineBytes / Ops::kBytes;
  struct Vecs {
    typename Ops::Vec vec[kVecs];
  };
  const float* scales[kLines];
  const uint8_t* codes[kLines];
  for (int i = 0; i < kLines; ++i) {
    scales[i] = runs[i].scales;
    codes[i] = runs[i].codes + runs[i].first;
  }
  const int64_t count = runs[0].count;
  typename Ops::E4m3Seen seen = {};
  BlockSteps steps(runs[0]);
  typename Ops::Vec scale[kLines];
  for (auto& own : scale) own = Ops::zero();
  constexpr bool kLooksUp = kE4m3 && requires { typename Ops::Exponents; };
  using Significands = std::conditional_t<kLooksUp, ScaledSignificands<Ops>, NoSignificands>;
  [[maybe_unused]] Significands significands[kLines];
  const auto find_scales = [&](int64_t at) {
    if (!steps.begins(at)) return;
#pragma GCC unroll 4
    for (int i = 0; i < kLines; ++i) {
      const float own = scales[i][steps.index] * (kE4m3 ? 256.0f : 1.0f);
      scale[i] = Ops::broadcast(&own);
      if constexpr (kLooksUp) significands[i] = Significands(own);
    }
  };
  const auto part = [&](int line, int64_t at, const uint8_t* from) {
    typename Ops::Line lines[2];
    if constexpr (kLooksUp)
      if (Ops::are_normal_e4m3(from)) {
        significands[line].lines(from, lines);
        return body(line, at, lines);
      }
    if constexpr (kE4m3) {
      Ops::e4m3_parts(from, lines, seen);
    } else {
      lines[0] = Ops::i8(reinterpret_cast<const int8_t*>(from));
      lines[1] = Ops::i8(reinterpret_cast<const int8_t*>(from + kLanes));
    }
    for (auto& found : lines) {
      Vecs values = __builtin_bit_cast(Vecs, found);
      for (auto& vec : values.vec) vec = quick_bf16<Ops>(Ops::mul(vec, scale[line]));
      found = __builtin_bit_cast(typename Ops::Line, values);
    }
    body(line, at, lines);
  };
  int64_t at = 0;
  for (; at + kCodesAlign <= count; at += kCodesAlign) {
    find_scales(at);
#pragma GCC unroll 4
    for (int i = 0; i < kLines; ++i) {
      if (at % kCodesChunk == 0) prefetch_ahead(codes[i] + at);
      part(i, at, codes[i] + at);
    }
  }
  if (at < count) {
    find_scales(at);
    for (int i = 0; i < kLines; ++i) {
      uint8_t padded[kCodesAlign];
      part(i, at, chunk_bytes(codes[i] + at, count - at, kCodesAlign, padded));
    }
  }
  return !(kE4m3 && Ops::any_nan(seen));
}

}  // namespace
}  // namespace moec::cpu
