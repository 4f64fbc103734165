// SPDX-License-Identifier: Apache-2.0
// The kernels of tile.h written once over `Ops`, the vector operations of one instruction set.
// Included by each tile_<isa>.cpp, whose flags it takes: hence the unnamed namespace and no std
// functions.
//
// Ops provides: kInParts; Vec, kBytes and load, store, zero, broadcast, add, fma on it; Line (16
// dwords) and
//   f32 / bf16 / f16 (pointer, n <= 16) -> Line of fp32       pairs(pointer, n <= 32) -> Line
//   i8(pointer to 16) -> Line of fp32
//   interleave(even, odd, n <= 16) -> Line of pairs           put(pointer, Line)
//   put_f32 / put_bf16 / put_f16 (pointer, Line, n <= 16)     transpose(Line[16], out Line[16])
//   even_bf16 / odd_bf16 / even_f16 / odd_f16 (pairs Line) -> Line of fp32
//   as_bf16 / as_f16 (Line of fp32) -> Line of fp32, rounded to that type
// and, to turn lines that are multiplied where they are, may provide
//   turn_quarter(Line[16], i, out Line[4])                    kAsksAhead: see ask_ahead
//   load_turned(pointers, bytes, out Line[16]): lines of fp32 are not copied
#pragma once

#include "backend/cpu/tile_codes.h"
#include "backend/cpu/tile_products.h"

// Offsets within a block are small:
// NOLINTBEGIN(bugprone-implicit-widening-of-multiplication-result)
namespace moec::cpu {
namespace {

// ---- loads
template <class Ops, bool kTurned>
void put_lines(typename Ops::Line (&lines)[kLanes], void* to, int used) {
  const auto put = [&](const auto& from) {
    for (int i = 0; i < used; ++i) Ops::put(static_cast<char*>(to) + i * kLineBytes, from[i]);
  };
  if constexpr (kTurned) {
    typename Ops::Line turned[kLanes];
    Ops::transpose(lines, turned);
    put(turned);
  } else {
    put(lines);
  }
}

// All `lines` lines are there and hold `count` values: then they are loaded without masks.
inline bool is_whole(const LoadBlock& load, int lines, int count) {
  bool whole = load.lines_used == lines && load.count == count;
  for (int i = 0; whole && i < lines; ++i) whole = load.lines[i] != nullptr;
  return whole;
}

template <class Ops, Load kLoad, bool kTurned>
void load_along_k(const LoadBlock& load) {
  constexpr int kCount = makes_pairs(kLoad) ? 2 * kSteps : kSteps;
  if constexpr (kTurned) {
    typename Ops::Line lines[kLanes];
    if (is_whole(load, kLanes, kCount)) {
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; ++i)
        lines[i] = load_line<Ops, kLoad>(load.lines[i], load.offset, kCount);
      typename Ops::Line turned[kLanes];
      Ops::transpose(lines, turned);
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; ++i)
        if (i < load.lines_out) Ops::put(static_cast<char*>(load.to) + i * kLineBytes, turned[i]);
      return;
    }
    for (int i = 0; i < kLanes; ++i)
      lines[i] = i < load.lines_used ? load_line<Ops, kLoad>(load.lines[i], load.offset, load.count)
                                     : typename Ops::Line{};
    put_lines<Ops, true>(lines, load.to, load.lines_out);
  } else {
    for (int i = 0; i < load.lines_out; ++i) {
      const void* const line = i < load.lines_used ? load.lines[i] : nullptr;
      Ops::put(static_cast<char*>(load.to) + i * kLineBytes,
               load_line<Ops, kLoad>(line, load.offset, load.count));
    }
  }
}

template <class Ops, Load kLoad>
typename Ops::Line line_along_lanes(const LoadBlock& load, int i, int count) {
  const auto at = [&](int k) { return k < load.lines_used ? load.lines[k] : nullptr; };
  if constexpr (kLoad == Load::kPairs) {
    const auto half = [&](int k) {
      const void* const line = at(k);
      return line ? static_cast<const uint16_t*>(line) + load.offset : nullptr;
    };
    return Ops::interleave(half(2 * i), half(2 * i + 1), count);
  } else if constexpr (kLoad == Load::kF32ToPairs) {
    alignas(kLineBytes) uint16_t rounded[2][kLanes];
    for (int odd = 0; odd < 2; ++odd)
      Ops::put_bf16(rounded[odd], load_line<Ops, Load::kF32>(at(2 * i + odd), load.offset, count),
                    kLanes);
    return Ops::interleave(rounded[0], rounded[1], kLanes);
  } else {
    return load_line<Ops, kLoad>(at(i), load.offset, count);
  }
}

template <class Ops, Load kLoad, bool kTurned>
void load_along_lanes(const LoadBlock& load) {
  typename Ops::Line lines[kSteps];
  if (load.count == kLanes) {
#pragma GCC unroll 16
    for (int i = 0; i < kSteps; ++i) lines[i] = line_along_lanes<Ops, kLoad>(load, i, kLanes);
  } else {
    for (int i = 0; i < kSteps; ++i) lines[i] = line_along_lanes<Ops, kLoad>(load, i, load.count);
  }
  put_lines<Ops, kTurned>(lines, load.to, load.lines_out);
}

template <class Ops>
void transpose_lines(const void* from, void* to) {
  typename Ops::Line lines[kLanes];
  for (int i = 0; i < kLanes; ++i)
    lines[i] = Ops::pairs(static_cast<const uint16_t*>(from) + i * kLineBytes / 2, 32);
  put_lines<Ops, true>(lines, to, kLanes);
}

// A 16-bit block holds k = 0..31: even k in the low halves. Its two fp32 blocks hold 16 of them
// each.
template <class Ops, bool kHalf>
void expand_block(const void* block, void* to) {
  for (int tile = 0; tile < 2; ++tile)
    for (int s = 0; s < kSteps; ++s) {
      const char* const from =
          static_cast<const char*>(block) + tile * (kBlockBytes / 2) + s * kLineBytes;
      const auto pairs = Ops::pairs(reinterpret_cast<const uint16_t*>(from), 32);
      char* const out = static_cast<char*>(to) + s / 8 * kBlockBytes + tile * (kBlockBytes / 2) +
                        s % 8 * 2 * kLineBytes;
      Ops::put(out, kHalf ? Ops::even_f16(pairs) : Ops::even_bf16(pairs));
      Ops::put(out + kLineBytes, kHalf ? Ops::odd_f16(pairs) : Ops::odd_bf16(pairs));
    }
}

// ---- rows of values
template <class Ops, Load kLoad>
void convert_in(const void* from, float* to, int64_t count) {
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) Ops::put(to + i, load_line<Ops, kLoad>(from, i, kLanes));
  if (const int n = int(count - i)) Ops::put_f32(to + i, load_line<Ops, kLoad>(from, i, n), n);
}

template <class Ops, Load kTo>
void put_values(void* to, typename Ops::Line line, int n) {
  if constexpr (kTo == Load::kF32) Ops::put_f32(static_cast<float*>(to), line, n);
  if constexpr (kTo == Load::kBf16ToF32) Ops::put_bf16(static_cast<uint16_t*>(to), line, n);
  if constexpr (kTo == Load::kF16ToF32) Ops::put_f16(static_cast<uint16_t*>(to), line, n);
}

template <class Ops, Load kTo>
void convert_out(const float* from, void* to, int64_t count) {
  constexpr int kBytes = kTo == Load::kF32 ? 4 : 2;
  for (int64_t i = 0; i < count; i += kLanes) {
    const int n = smaller(count - i, kLanes);
    put_values<Ops, kTo>(static_cast<char*>(to) + i * kBytes, Ops::f32(from + i, n), n);
  }
}

// ---- codes
template <class Format>
constexpr bool kSignedBytes = quant::ChannelFormats::index(Format::kInfo.scheme) >= 0;

// The blocks of 16 elements of a line, each member of them as a vector.
template <class Format>
struct LineBlocks {
  using Block = typename Format::Block;
  typename Format::template BlockOf<Reals> wide = {};
  static constexpr int kMembers = sizeof(Block) / sizeof(float);
  static_assert(sizeof wide == kMembers * sizeof(Reals), "blocks are made of floats");

  void set(int lane, const Block& block) {
    for (int i = 0; i < kMembers; ++i)
      __builtin_memcpy(reinterpret_cast<char*>(&wide) + i * kLineBytes + lane * sizeof(float),
                       reinterpret_cast<const char*>(&block) + i * sizeof(float), sizeof(float));
  }
  void set_all(const Block& block) {
    float value[kMembers];
    __builtin_memcpy(value, &block, sizeof block);
    Reals all[kMembers];
    for (int i = 0; i < kMembers; ++i) all[i] = value[i] - Reals{};
    __builtin_memcpy(&wide, all, sizeof wide);
  }
  Block at(int lane) const {
    float value[kMembers];
    for (int i = 0; i < kMembers; ++i)
      __builtin_memcpy(value + i,
                       reinterpret_cast<const char*>(&wide) + i * kLineBytes + lane * sizeof(float),
                       sizeof(float));
    return __builtin_bit_cast(Block, value);
  }
};

// Up to 16 elements in a line, `n` or `k` apart by one.
struct Run {
  int64_t n, k;
  bool along_n;
  int count;
  int64_t n_of(int i) const { return n + (along_n ? i : 0); }
  int64_t k_of(int i) const { return k + (along_n ? 0 : i); }
};

// The blocks of a run, kept while the next line of the same place has the same ones.
template <class Format>
class RunBlocks {
 public:
  void find(const quant::CodedView& m, const Run& run) {
    const int64_t first = Format::entry(m, run.n, run.k);
    const int64_t last = Format::entry(m, run.n_of(run.count - 1), run.k_of(run.count - 1));
    const bool one = first == last && (run.along_n || !m.group_index);
    // Of runs along n the ends say what lies between, except in a stream.
    const bool told = one || (run.along_n && Format::kInfo.storage != quant::Storage::kStream);
    if (told && first == first_ && last == last_ && one == one_ && run.count <= count_) return;
    first_ = first;
    last_ = last;
    one_ = one;
    count_ = one ? kLanes : run.count;
    if (one)
      blocks_.set_all(Format::block(m, run.n, run.k));
    else
      for (int i = 0; i < run.count; ++i)
        blocks_.set(i, Format::block(m, run.n_of(i), run.k_of(i)));
  }
  const LineBlocks<Format>& found() const { return blocks_; }

 private:
  LineBlocks<Format> blocks_;
  int64_t first_ = -1, last_ = -1;
  bool one_ = false;
  int count_ = 0;
};

template <class Ops, class Format>
typename Ops::Line decode_run(const quant::CodedView& m, const Run& run,
                              const LineBlocks<Format>& blocks) {
  Reals codes = {};
  if constexpr (kSignedBytes<Format>) {
    const int64_t step = run.along_n ? m.row_stride : m.col_stride;
    if (step == 1 && run.count == kLanes)
      codes = __builtin_bit_cast(Reals, Ops::i8(static_cast<const int8_t*>(m.codes) +
                                                run.n * m.row_stride + run.k * m.col_stride));
    else
      for (int i = 0; i < run.count; ++i) codes[i] = Format::code(m, run.n_of(i), run.k_of(i));
  } else {
    for (int i = 0; i < run.count; ++i) codes[i] = Format::code(m, run.n_of(i), run.k_of(i));
  }
  return __builtin_bit_cast(typename Ops::Line, Format::template decode<Reals>(codes, blocks.wide));
}

// Flat: what formats define inline gets no copy of its own here.
template <class Ops, class Format, class Put>
__attribute__((always_inline)) inline void decode_each(const DecodeLines& d, const Put& put) {
  RunBlocks<Format> blocks[2];
  const bool channels = d.along_n && d.matrix->scales.block_k.is_all();  // all lines have the same
  for (int i = 0; i < d.lines; ++i)
    for (int j = 0; j < d.count; j += kLanes) {
      const Run run = {d.n + (d.along_n ? j : i), d.k + (d.along_n ? i : j), d.along_n,
                       smaller(d.count - j, kLanes)};
      RunBlocks<Format>& own = blocks[d.along_n ? j / kLanes : 0];
      if (i == 0 || !channels) own.find(*d.matrix, run);
      put(i * d.stride + j, run.count, decode_run<Ops, Format>(*d.matrix, run, own.found()));
    }
}
template <class Ops, class Format, Load kTo>
__attribute__((flatten)) void decode_lines(const DecodeLines& d) {
  constexpr int kBytes = kTo == Load::kF32 ? 4 : 2;
  decode_each<Ops, Format>(d, [&](int64_t at, int count, typename Ops::Line line) {
    put_values<Ops, kTo>(static_cast<char*>(d.to) + at * kBytes, line, count);
  });
}
// One body for all types: that of fp32, whose lines are then rounded.
template <class Ops, class Format, Load kTo>
void decode_and_round(const DecodeLines& d) {
  constexpr int kBytes = kTo == Load::kF32 ? 4 : 2, kMost = 32;
  alignas(kLineBytes) float values[kMost * kMost];
  DecodeLines wide = d;
  wide.to = values;
  wide.stride = kMost;
  decode_lines<Ops, Format, Load::kF32>(wide);
  for (int i = 0; i < d.lines; ++i)
    convert_out<Ops, kTo>(values + i * kMost, static_cast<char*>(d.to) + i * d.stride * kBytes,
                          d.count);
}
template <class Ops, class Format, Load kTo>
constexpr DecodeLinesFn decoder() {
  if constexpr (kTo == Load::kF32 || kSignedBytes<Format>)
    return decode_lines<Ops, Format, kTo>;
  else
    return decode_and_round<Ops, Format, kTo>;
}

// Everything that needs no product kernel of its own.
template <class Ops, class Products>
constexpr TileKernels make_tile_kernels(const char* isa, const char* f32,
                                        const Products& products) {
  TileKernels t = {};
  t.isa = isa;
  t.f32 = products.kernel(f32);
  t.f32_by_bf16 = products.by_bf16;
  t.f32_by_f16 = products.by_f16;
  Loads::for_each([&]<Load kLoad>() {
    t.along_k[int(kLoad)][0] = load_along_k<Ops, kLoad, false>;
    t.along_k[int(kLoad)][1] = load_along_k<Ops, kLoad, true>;
    t.along_lanes[int(kLoad)][0] = load_along_lanes<Ops, kLoad, false>;
    t.along_lanes[int(kLoad)][1] = load_along_lanes<Ops, kLoad, true>;
    if constexpr (!makes_pairs(kLoad)) fill_lines_products<Ops, kLoad>(t);
  });
  PlainLoads::for_each([&]<Load kLoad>() {
    t.to_f32[int(kLoad)] = convert_in<Ops, kLoad>;
    t.from_f32[int(kLoad)] = convert_out<Ops, kLoad>;
    quant::Formats::for_each([&]<class Format>() {
      t.decode[quant::Formats::index(Format::kInfo.scheme)][int(kLoad)] =
          decoder<Ops, Format, kLoad>();
    });
  });
  fill_code_kernels<Ops>(t);
  t.transpose = transpose_lines<Ops>;
  t.expand_bf16 = expand_block<Ops, false>;
  t.expand_f16 = expand_block<Ops, true>;
  return t;
}

}  // namespace
}  // namespace moec::cpu
// NOLINTEND(bugprone-implicit-widening-of-multiplication-result)
