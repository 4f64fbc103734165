// SPDX-License-Identifier: Apache-2.0
// The products of tile.h, by the `Ops` of tile_kernels.h.
#pragma once

#include "backend/cpu/tile_lines.h"

// Offsets within a block are small:
// NOLINTBEGIN(bugprone-implicit-widening-of-multiplication-result)
namespace moec::cpu {
namespace {

inline void prefetch_line(const char* line) {
  __builtin_prefetch(line, 0, 2);
}

// ---- with panels. One pass covers two vectors of columns for all rows; c stays in registers.
// Where Ops sums in parts, each product starts at zero and is added to c last, so that rounding
// errors grow with the parts' lengths; elsewhere it goes on from c.
template <class Ops, int kRows>
void panel_product(const PanelProduct& p) {
  using Vec = typename Ops::Vec;
  constexpr int kBytes = Ops::kBytes, kPasses = 2 * kLineBytes / (2 * kBytes);
  const bool chained = !Ops::kInParts && p.accumulate;
  constexpr bool kSpread = kRows >= 6;  // measured: few rows do better with prefetches in bursts
  for (int pass = 0; pass < kPasses; ++pass) {
    const auto place = [](int byte) {
      return byte / kLineBytes * (kBlockBytes / 2) + byte % kLineBytes;
    };
    const int first = pass * 2 * kBytes;
    float* const c = p.c + first / 4;
    Vec sum[kRows][2];
    for (int r = 0; r < kRows; ++r)
      for (int v = 0; v < 2; ++v)
        sum[r][v] = chained ? Ops::load(c + r * p.ld + v * (kBytes / 4)) : Ops::zero();
    const char* a = static_cast<const char*>(p.a);
    const char* b0 = static_cast<const char*>(p.b) + place(first);
    const char* b1 = static_cast<const char*>(p.b) + place(first + kBytes);
    const char* prefetch = p.prefetch;
    const int lines = pass == 0 ? p.prefetch_lines : 0;
    for (int block = 0; block < p.blocks; ++block) {
      if constexpr (!kSpread)
        for (int line = 0; line < lines; ++line) prefetch_line(prefetch + line * kLineBytes);
#pragma GCC unroll 4
      for (int s = 0; s < kSteps; ++s) {
        if constexpr (kSpread) {
          if (s < lines) prefetch_line(prefetch + s * kLineBytes);
          if (s + kSteps < lines) prefetch_line(prefetch + (s + kSteps) * kLineBytes);
        }
        const Vec left = Ops::load(b0 + s * kLineBytes), right = Ops::load(b1 + s * kLineBytes);
#pragma GCC unroll 16
        for (int r = 0; r < kRows; ++r) {
          const Vec value = Ops::broadcast(a + r * kLineBytes + s * 4);
          sum[r][0] = Ops::fma(value, left, sum[r][0]);
          sum[r][1] = Ops::fma(value, right, sum[r][1]);
        }
      }
      prefetch += lines * kLineBytes;
      a += kRows * kLineBytes;
      b0 += kBlockBytes;
      b1 += kBlockBytes;
    }
    for (int r = 0; r < kRows; ++r)
      for (int v = 0; v < 2; ++v) {
        float* const to = c + r * p.ld + v * (kBytes / 4);
        Ops::store(to, p.accumulate && !chained ? Ops::add(Ops::load(to), sum[r][v]) : sum[r][v]);
      }
  }
}

// A line of fp32 as vectors.
template <class Ops>
struct LineVecs {
  typename Ops::Vec vec[kLineBytes / Ops::kBytes];
};
template <class Ops, bool kHalf>
LineVecs<Ops> even_values(const typename Ops::Line& pairs) {
  return __builtin_bit_cast(LineVecs<Ops>, kHalf ? Ops::even_f16(pairs) : Ops::even_bf16(pairs));
}
template <class Ops, bool kHalf>
LineVecs<Ops> odd_values(const typename Ops::Line& pairs) {
  return __builtin_bit_cast(LineVecs<Ops>, kHalf ? Ops::odd_f16(pairs) : Ops::odd_bf16(pairs));
}

// The same sums from a B panel of 16-bit pairs: k even, then k odd. Few rows read it at the speed
// of memory; for many it would be widened again and again.
template <class Ops, int kRows, bool kHalf>
void pair_product(const PanelProduct& p) {
  using Vec = typename Ops::Vec;
  constexpr int kVecs = kLineBytes / Ops::kBytes, kColumns = Ops::kBytes / 4;  // of a line
  constexpr int kTiles = kRows * 2 * kVecs <= 12 || kVecs == 1 ? 2 : 1;        // of one pass
  static_assert(Ops::kInParts);
  for (int pass = 0; pass < 2 / kTiles; ++pass) {
    float* const c = p.c + pass * kLanes;
    Vec sum[kRows][kTiles][kVecs];
    for (int r = 0; r < kRows; ++r)
      for (int t = 0; t < kTiles; ++t)
        for (int v = 0; v < kVecs; ++v) sum[r][t][v] = Ops::zero();
    const char* a = static_cast<const char*>(p.a);
    const char* b = static_cast<const char*>(p.b) + pass * (kBlockBytes / 2);
    const char* prefetch = p.prefetch;
    const int lines = pass == 0 ? p.prefetch_lines : 0;
    for (int block = 0; block < p.blocks; ++block) {
      for (int line = 0; line < lines; ++line) prefetch_line(prefetch + line * kLineBytes);
#pragma GCC unroll 2
      for (int s = 0; s < kSteps; s += 2) {  // of A, two of which are one of B
        const char* const step = b + s / 2 * kLineBytes;
        LineVecs<Ops> even[kTiles], odd[kTiles];
        for (int t = 0; t < kTiles; ++t) {
          const auto* const from = reinterpret_cast<const uint16_t*>(step + t * (kBlockBytes / 2));
          const typename Ops::Line pairs = Ops::pairs(from, 2 * kSteps);
          even[t] = even_values<Ops, kHalf>(pairs);
          odd[t] = odd_values<Ops, kHalf>(pairs);
        }
#pragma GCC unroll 16
        for (int r = 0; r < kRows; ++r) {
          const Vec first = Ops::broadcast(a + r * kLineBytes + s * 4);
          const Vec second = Ops::broadcast(a + r * kLineBytes + s * 4 + 4);
          for (int t = 0; t < kTiles; ++t)
            for (int v = 0; v < kVecs; ++v) {
              sum[r][t][v] = Ops::fma(first, even[t].vec[v], sum[r][t][v]);
              sum[r][t][v] = Ops::fma(second, odd[t].vec[v], sum[r][t][v]);
            }
        }
      }
      prefetch += lines * kLineBytes;
      a += kRows * kLineBytes;
      b += block % 2 == 0 ? kSteps / 2 * kLineBytes : kBlockBytes - kSteps / 2 * kLineBytes;
    }
    for (int r = 0; r < kRows; ++r)
      for (int t = 0; t < kTiles; ++t)
        for (int v = 0; v < kVecs; ++v) {
          float* const to = c + r * p.ld + t * kLanes + v * kColumns;
          const Vec value = sum[r][t][v];
          Ops::store(to, p.accumulate ? Ops::add(Ops::load(to), value) : value);
        }
  }
}

// Ops may have another of their own.
template <class Ops, int kRows>
constexpr PanelProductFn kPanelProduct = panel_product<Ops, kRows>;

// Products in fp32 of 1, 2, ... rows.
template <class Ops, int kMaxRows>
struct ProductTable {
  PanelProductFn by_rows[kMaxRows], by_bf16[kMaxRows], by_f16[kMaxRows];
  template <int kRows = kMaxRows>
  constexpr void fill() {
    if constexpr (kRows > 0) {
      by_rows[kRows - 1] = kPanelProduct<Ops, kRows>;
      if constexpr (Ops::kInParts) {
        by_bf16[kRows - 1] = pair_product<Ops, kRows, false>;
        by_f16[kRows - 1] = pair_product<Ops, kRows, true>;
      }
      fill<kRows - 1>();
    }
  }
  constexpr ProductTable() : by_rows{}, by_bf16{}, by_f16{} { fill(); }
  constexpr ProductKernel kernel(const char* name) const { return {name, kMaxRows, 1, by_rows}; }
};

// ---- with lines of B
template <class Ops, Load kLoad>
void load_lines(const LinesProduct& p, int64_t k, int count, typename Ops::Line (&lines)[kLanes]) {
  for (int i = 0; i < kLanes; ++i)
    lines[i] = load_line<Ops, kLoad>(p.lines[i], p.offset + k, count);
}

// Whole lines whose bits are those in memory, turned as they are loaded, where Ops can.
template <class Ops>
constexpr bool kLoadsTurned =
    requires(typename Ops::Line (&turned)[kLanes]) { Ops::load_turned(nullptr, 0, turned); };
// Or lines are copied, and turned four steps at a time. Where Ops can do both, pairs are copied.
template <class Ops, Load kLine>
constexpr bool kCopies =
    (kLine == Load::kPairs || !kLoadsTurned<Ops>) &&
    requires(typename Ops::Line (&turned)[kLanes]) { Ops::turn_quarter(turned, 0, turned); };
inline bool are_all(const void* const* lines) {
  for (int i = 0; i < kLanes; ++i)
    if (!lines[i]) return false;
  return true;
}

// Where the lines start, in memory of our own: no store of sums or copies reaches it.
struct LineStarts {
  const void* at[kLanes];
  explicit LineStarts(const LinesProduct& p) { __builtin_memcpy(at, p.lines, sizeof at); }
};

inline void prefetch_given(const LinesProduct& p, int block) {  // of a line's blocks
  for (int i = 0; p.prefetch && i < kLanes; ++i)
    prefetch_line(p.prefetch + (block * kLanes + i) * kLineBytes);
}

// Asks for the 16-bit values that the next call takes, row by row: each of kBlocks blocks asks for
// its share of the 16 lines. They stand behind this call's or, where the lines end, at the start of
// the next 16 lines, if these are as far apart. Memory that is not there is only asked for.
template <int kBlocks>
__attribute__((always_inline)) inline void ask_ahead(const LinesProduct& p, const LineStarts& lines,
                                                     int block) {
  constexpr int kNow = kLanes / kBlocks, kBytes = kBlocks * kLineBytes;
  constexpr int64_t kSize = sizeof(uint16_t);
  const auto at = [&](int i) { return static_cast<const char*>(lines.at[i]); };
  for (int i = block * kNow; i < (block + 1) * kNow; ++i) {
    const char* const next = p.count >= 2 * kBytes / kSize ? at(i) + p.offset * kSize + kBytes
                                                           : at(i) + kLanes * (at(1) - at(0));
    for (int b = 0; b < kBlocks; ++b) prefetch_line(next + b * kLineBytes);
  }
}

// Columns of a product with lines.
template <class Ops, Load kLoad, int kRows>
struct LinesSums {
  using Vec = typename Ops::Vec;
  using Line = typename Ops::Line;
  static constexpr bool kHalf = kLoad == Load::kF16ToF32;
  static constexpr bool kWidens = kHalf || kLoad == Load::kBf16ToF32;
  static constexpr Load kLine = kWidens ? Load::kPairs : kLoad;
  static constexpr int kLineK = makes_pairs(kLine) ? 2 * kSteps : kSteps, kPer = kWidens ? 2 : 1;
  static constexpr int kVecs = kLineBytes / Ops::kBytes;
  Vec sum[kRows][kVecs];

  static bool is_chained(const LinesProduct& p) { return !Ops::kInParts && p.accumulate; }
  explicit LinesSums(const LinesProduct& p) {
    for (int r = 0; r < kRows; ++r)
      for (int v = 0; v < kVecs; ++v)
        sum[r][v] = is_chained(p) ? Ops::load(p.c + r * p.ld + v * (Ops::kBytes / 4)) : Ops::zero();
  }
  void add(const Line& turned, int at, const char* a) {  // line `at` of the block at a
    LineVecs<Ops> values[kPer];
    if constexpr (kWidens) {
      values[0] = even_values<Ops, kHalf>(turned);
      values[1] = odd_values<Ops, kHalf>(turned);
    } else {
      values[0] = __builtin_bit_cast(LineVecs<Ops>, turned);
    }
    const int step = at * kPer;  // of A
    for (int r = 0; r < kRows; ++r) {
      const char* const from =
          a + (step / kSteps * kRows + r) * kLineBytes + step % kSteps * int(sizeof(float));
      for (int i = 0; i < kPer; ++i) {
        const Vec value = Ops::broadcast(from + i * int(sizeof(float)));
        for (int v = 0; v < kVecs; ++v) sum[r][v] = Ops::fma(value, values[i].vec[v], sum[r][v]);
      }
    }
  }
  void store(const LinesProduct& p) const {
    for (int r = 0; r < kRows; ++r)
      for (int v = 0; v < kVecs; ++v) {
        float* const to = p.c + r * p.ld + v * (Ops::kBytes / 4);
        Ops::store(to,
                   p.accumulate && !is_chained(p) ? Ops::add(Ops::load(to), sum[r][v]) : sum[r][v]);
      }
  }
};

// Lines are copied a block before they are turned, four for each quarter that is multiplied: they
// are waited for beside the products. Of 16 lines that are 4 KiB apart, a set of the cache keeps
// fewer: each is read at once.
template <class Ops, Load kLoad, int kRows>
struct CopiedLines {
  using Sums = LinesSums<Ops, kLoad, kRows>;
  using Line = typename Ops::Line;
  static constexpr int kPer = Sums::kPer, kLineK = Sums::kLineK, kQuarter = kSteps / 4;
  const LinesProduct& p;

  static void product(const LinesProduct& p) { CopiedLines{p}.run(); }
  int64_t left(int block) const { return p.count - block / kPer * int64_t(kLineK); }
  template <bool kWhole>
  void copy(const LineStarts& lines, int block, int quarter, Line* to) const {
    const int64_t at = p.offset + block / kPer * int64_t(kLineK);
    for (int i = quarter * kQuarter; i < (quarter + 1) * kQuarter; ++i)
      to[i] = kWhole ? load_values<Ops, Sums::kLine>(lines.at[i], at, kLineK)
                     : load_line<Ops, Sums::kLine>(lines.at[i], at, smaller(left(block), kLineK));
  }
  static void multiply(const Line (&lines)[kLanes], int quarter, const char* a, Sums& sums) {
    Line turned[kQuarter];
    Ops::turn_quarter(lines, quarter, turned);
#pragma GCC unroll 4
    for (int s = 0; s < kQuarter; ++s) sums.add(turned[s], quarter * kQuarter + s, a);
  }
  void run() const {
    Sums sums(p);  // no member, so that they stay in registers
    const LineStarts lines(p);
    Line copies[2][kLanes];
    const bool all = are_all(p.lines);
    for (int quarter = 0; quarter < 4; ++quarter) copy<false>(lines, 0, quarter, copies[0]);
    const char* a = static_cast<const char*>(p.a);
    for (int block = 0; block < p.blocks; block += kPer, a += kPer * kRows * kLineBytes) {
      if constexpr (requires { Ops::kAsksAhead; })
        if (all && !p.prefetch) ask_ahead<kSpanBlocks / kPer>(p, lines, block / kPer);
      prefetch_given(p, block / kPer);
      const int then = block + kPer;
      const Line(&now)[kLanes] = copies[block / kPer % 2];
      Line* const next = copies[then / kPer % 2];
      if (then < p.blocks && all && left(then) >= kLineK) {
#pragma GCC unroll 4
        for (int quarter = 0; quarter < 4; ++quarter) {
          copy<true>(lines, then, quarter, next);
          multiply(now, quarter, a, sums);
        }
        continue;
      }
      for (int quarter = 0; then < p.blocks && quarter < 4; ++quarter)
        copy<false>(lines, then, quarter, next);
      const int quarters = then <= p.blocks ? 4 : 2;
      for (int quarter = 0; quarter < quarters; ++quarter) multiply(now, quarter, a, sums);
    }
    sums.store(p);
  }
};

template <class Ops, Load kLoad, int kRows>
void lines_product(const LinesProduct& p) {
  using Sums = LinesSums<Ops, kLoad, kRows>;
  constexpr Load kLine = Sums::kLine;
  constexpr int kPer = Sums::kPer, kLineK = Sums::kLineK;
  Sums sums(p);
  const char* a = static_cast<const char*>(p.a);
  const bool all = are_all(p.lines);
  for (int block = 0; block < p.blocks; block += kPer) {
    const int64_t k = block / kPer * int64_t(kLineK);
    prefetch_given(p, block / kPer);
    typename Ops::Line turned[kLanes];
    const bool whole = p.count - k >= kLineK;
    bool done = false;
    if constexpr (kLoad == Load::kF32 && kLoadsTurned<Ops>) {
      if ((done = whole && all))
        Ops::load_turned(p.lines, (p.offset + k) * int64_t(sizeof(float)), turned);
    }
    if (!done) {
      typename Ops::Line lines[kLanes];
      if (whole)
        load_lines<Ops, kLine>(p, k, kLineK, lines);
      else
        load_lines<Ops, kLine>(p, k, smaller(p.count - k, kLineK), lines);
      Ops::transpose(lines, turned);
    }
    const int steps = block + kPer <= p.blocks ? kSteps : kSteps / 2;
#pragma GCC unroll 8
    for (int s = 0; s < steps; ++s) sums.add(turned[s], s, a);
    a += kPer * kRows * kLineBytes;
  }
  sums.store(p);
}

template <class Ops, Load kLoad, int kRows = kLinesRows>
constexpr void fill_lines_products(TileKernels& t) {
  if constexpr (kRows > 0) {
    if constexpr (kCopies<Ops, LinesSums<Ops, kLoad, kRows>::kLine>)
      t.by_lines[int(kLoad)][kRows - 1] = CopiedLines<Ops, kLoad, kRows>::product;
    else
      t.by_lines[int(kLoad)][kRows - 1] = lines_product<Ops, kLoad, kRows>;
    fill_lines_products<Ops, kLoad, kRows - 1>(t);
  }
}

}  // namespace
}  // namespace moec::cpu
// NOLINTEND(bugprone-implicit-widening-of-multiplication-result)
