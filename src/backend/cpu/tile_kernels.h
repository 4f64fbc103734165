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
#pragma once

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
  for (int64_t i = 0; i < count; i += kLanes) {
    const int n = smaller(count - i, kLanes);
    Ops::put_f32(to + i, load_line<Ops, kLoad>(from, i, n), n);
  }
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
typedef float Reals __attribute__((vector_size(kLineBytes)));  // a line of fp32

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

template <class Ops, class Format>
typename Ops::Line decode_run(const typename Format::Code* codes, int64_t step, int count,
                              const LineBlocks<Format>& blocks) {
  if (step == 1 && count == kLanes)
    return __builtin_bit_cast(
        typename Ops::Line,
        Format::template decode<Reals>(__builtin_bit_cast(Reals, Ops::i8(codes)), blocks.wide));
  float values[kLanes] = {};
  for (int i = 0; i < count; ++i) values[i] = Format::decode(float(codes[i * step]), blocks.at(i));
  return Ops::f32(values, kLanes);
}

// Flat: what formats define inline gets no copy of its own here.
template <class Ops, class Format, Load kTo>
__attribute__((flatten)) void decode_lines(const DecodeLines& d) {
  using Code = typename Format::Code;
  constexpr int kBytes = kTo == Load::kF32 ? 4 : 2;
  constexpr int64_t kBlockK = Format::kInfo.block_k;
  static_assert(kBlockK % kLanes == 0, "a run of 16 along k is of one block");
  const quant::CodedView& m = *d.matrix;
  const Code* line = static_cast<const Code*>(m.codes) + d.n * m.row_stride + d.k * m.col_stride;
  const int64_t step = d.along_n ? m.row_stride : m.col_stride;
  const int64_t next_line = d.along_n ? m.col_stride : m.row_stride;
  LineBlocks<Format> blocks[2];  // along k: the first, of one run
  for (int i = 0; i < d.lines; ++i, line += next_line) {
    if (d.along_n && (i == 0 || (kBlockK && (d.k + i) % kBlockK == 0)))
      for (int j = 0; j < d.count; ++j)
        blocks[j / kLanes].set(j % kLanes, Format::block(m, d.n + j, d.k + i));
    for (int j = 0; j < d.count; j += kLanes) {
      if (!d.along_n && (j == 0 || kBlockK)) blocks[0].set_all(Format::block(m, d.n + i, d.k + j));
      const int count = smaller(d.count - j, kLanes);
      const auto values =
          decode_run<Ops, Format>(line + j * step, step, count, blocks[d.along_n ? j / kLanes : 0]);
      put_values<Ops, kTo>(static_cast<char*>(d.to) + (i * d.stride + j) * kBytes, values, count);
    }
  }
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
      t.decode[quant::format_index(Format::kInfo.scheme)][int(kLoad)] =
          decode_lines<Ops, Format, kLoad>;
    });
  });
  t.transpose = transpose_lines<Ops>;
  t.expand_bf16 = expand_block<Ops, false>;
  t.expand_f16 = expand_block<Ops, true>;
  return t;
}

}  // namespace
}  // namespace moec::cpu
// NOLINTEND(bugprone-implicit-widening-of-multiplication-result)
