// SPDX-License-Identifier: Apache-2.0
// What an instruction set must provide: panel products and the loads that build panels.
//
// Everything is made of 64-byte lines of 16 dwords. A step is one fp32, or a pair of 16-bit values
// (k even in the low half). A block spans 16 steps; k is padded with zeros to whole blocks.
//
//   A panel   [blocks][rows][64 B]      a line: 16 steps of one row
//   B panel   [blocks][2][16][64 B]     a block: two tiles of 16 columns; a line: one step of those
//
// Translation units of this interface are compiled for one instruction set each, so
// what they include must not define functions with external linkage: the linker could keep that
// copy for everyone.
#pragma once

#include <cstdint>

#include "quant/format.h"

namespace moec::cpu {

inline constexpr int kLanes = 16, kSteps = 16, kLineBytes = 64;
inline constexpr int kPanelColumns = 2 * kLanes, kBlockBytes = 2 * kSteps * kLineBytes;
inline constexpr int kSpanBlocks = 16;  // of A, multiplied at a time

// What a step holds while multiplying. Of B panels alone, kBf16 says that they hold pairs, also of
// f16: products in fp32 widen them on the way.
enum class Compute { kF32, kBf16 };

// Source element -> step. The first three name the types of plain values, too; the last three read
// fp32 and round it.
enum class Load { kF32, kBf16ToF32, kF16ToF32, kPairs, kF32AsBf16, kF32AsF16, kF32ToPairs };
constexpr bool makes_pairs(Load load) {
  return load == Load::kPairs || load == Load::kF32ToPairs;
}
template <Load... kMembers>
struct LoadList {
  static constexpr int kCount = sizeof...(kMembers);
  template <class Body>
  static constexpr void for_each(Body body) {  // body<load>() for each, in order
    (body.template operator()<kMembers>(), ...);
  }
};
using PlainLoads = LoadList<Load::kF32, Load::kBf16ToF32, Load::kF16ToF32>;
using Loads = LoadList<Load::kF32, Load::kBf16ToF32, Load::kF16ToF32, Load::kPairs,
                       Load::kF32AsBf16, Load::kF32AsF16, Load::kF32ToPairs>;

struct PanelProduct {  // c[rows, 32] (+)= A panel * B panel
  const void *a, *b;
  float* c;  // row stride ld
  int64_t ld;
  int blocks;
  bool accumulate;
  const char* prefetch;  // lines wanted next ...
  int prefetch_lines;    // ... this many per block
};
using PanelProductFn = void (*)(const PanelProduct& product);

// c[rows, 16] (+)= A panel * 16 columns of B whose values are read where they are: those of column
// i follow k from lines[i] + offset on (elements of the source), `count` of them; beyond are zeros,
// and a null pointer is a column of zeros. The sums are those of a PanelProduct.
struct LinesProduct {
  const char* prefetch;  // 16 cache lines of it for each block of the source; null: none
  const void* const* lines;
  int64_t offset, count;
  const void* a;
  float* c;  // row stride ld
  int64_t ld;
  int blocks;  // <= kSpanBlocks
  bool accumulate;
};
using LinesProductFn = void (*)(const LinesProduct& product);
inline constexpr int kLinesRows = 4;  // at most: more rows are worth building panels

struct ProductKernel {
  const char* name;               // null: this instruction set has none
  int max_rows, row_multiple;     // panels are padded with zero rows to row_multiple
  const PanelProductFn* by_rows;  // [max_rows / row_multiple], for 1, 2, ... times row_multiple
};

// Write the first `lines_out` of 16 lines at `to`. lines[i] + offset (elements of the source)
// starts `count` valid values for i < lines_used; a null pointer is a line of zeros; all the rest
// is zero.
//   along_k      line i of the source is lane i, its values follow k     (count <= 16, pairs: 32)
//   along_lanes  line i of the source is k = i, its values follow lanes  (count <= 16)
// Straight keeps that orientation in the result, turned transposes it: A panels need lines along k,
// B panels lines along lanes.
struct LoadBlock {
  const void* const* lines;
  int64_t offset;
  int lines_used, count;
  void* to;
  int lines_out;
};
using LoadBlockFn = void (*)(const LoadBlock& load);

// Values of codes: line i starts at element (n, k) of the matrix and i further along k where lines
// run along n, or along n where they run along k.
struct DecodeLines {
  const quant::CodedView* matrix;
  int64_t n, k;
  bool along_n;
  int lines, count;  // both <= 32
  void* to;          // line i at i * stride (elements of the type they become)
  int64_t stride;
};
using DecodeLinesFn = void (*)(const DecodeLines& decode);

// A line of codes in blocks that begin with it. Nibbles are the numbers that a table gives; the
// first of two is in the low half of a byte, or in the high one.
enum class LineCodes { kLowNibble, kHighNibble, kI8, kE4m3 };
inline constexpr int kLineCodes = 4, kCodesChunk = 64, kCodesAlign = 32;
constexpr bool are_nibbles(LineCodes codes) {
  return codes == LineCodes::kLowNibble || codes == LineCodes::kHighNibble;
}
struct CodedRun {  // (number - zero) * scale, rounded once, of positions [first, first + count)
  const uint8_t* codes;  // of position 0
  int64_t first;         // a multiple of kCodesAlign
  int64_t count;
  const float* numbers;         // [16], of nibbles
  const float *scales, *zeros;  // of blocks, from that of `first` on; no zeros: null
  quant::BlockSize block;       // all of the line, or a multiple of kCodesAlign
  bool exact;                   // values are those of bf16 before they are rounded
  // Scales of these magnitudes make values from 2^-126 up to 2^110, and zeros; without `zeros`.
  float least_scale, most_scale;
};
using DecodeRunFn = void (*)(const CodedRun& run, uint16_t* to);
// sums[r * kDotLines + i] = sum over the run of line i of its values, in bf16, times
// x[r * stride + ...], whose positions are in chunks of kCodesChunk: those of nibbles in the order
// of nibble_order, zeros beyond the run.
inline constexpr int kDotLines = 16;
struct CodedDot {
  CodedRun run;                       // of line 0
  int lines;                          // 1 .. kDotLines
  int64_t code_stride, scale_stride;  // from line to line: bytes; scales and zeros
  const void* x;                      // fp32
  int64_t stride;
  float* sums;
};
using DotRunFn = void (*)(const CodedDot& dot);
// The same sums of rows of bf16 that `arrange` of them has put in order; pairs read subnormal
// values as zeros. e4m3 has no zero points. A table of all values of bytes wants blocks that are as
// long.
constexpr int64_t least_pair_block(LineCodes codes) {
  return are_nibbles(codes) ? kCodesAlign : codes == LineCodes::kI8 ? 256 : 128;
}
inline constexpr int kPairsChunk = 128;
inline constexpr int64_t kMostPairs = 4096;  // positions of a run
struct PairRow {  // fp32 that is bf16, in lines of kLanes; whole chunks of it, zeros beyond `count`
  const float* from;
  int64_t step;  // from line to line
  int64_t count;
  LineCodes codes;
  uint16_t* to;
};
using ArrangePairsFn = void (*)(const PairRow& row);
// Lines of codes to values of bf16, whose subnormals become zeros; whole chunks of them, zeros
// beyond the run.
struct PairDecode {
  CodedRun run;  // of line 0
  int lines;
  int64_t code_stride, scale_stride;  // as of CodedDot
  uint16_t* to;
  int64_t stride;  // from line to line
};
using DecodePairsFn = void (*)(const PairDecode& decode);
// c[rows, pair_columns] (+)= an A panel of pairs, turned where turn_rows is there, * lines of bf16
// along k, whole blocks of them.
inline constexpr int kMostPairColumns = 32;
struct PairLines {
  const uint16_t* lines;
  int64_t stride;  // from line to line
  const void* a;
  int rows;
  float* c;  // row stride ld
  int64_t ld;
  int blocks;
  bool accumulate;
};
using PairLinesFn = void (*)(const PairLines& product);
// An A panel of pairs in place: steps become lines.
using TurnRowsFn = void (*)(void* a, int rows, int blocks);

// Lines of codes along k that are columns of a B panel of fp32, as values that are rounded to bf16.
enum class ScaleType { kF32, kBf16, kF16, kPower };  // the last: quant::e8m0
struct CodedColumns {
  const uint8_t* codes;       // of column 0, at the first position
  int64_t stride;             // bytes from column to column
  int columns;                // <= 16; zeros follow
  int64_t count;              // positions: a multiple of kCodesAlign, at most kMostColumnRun
  const float* numbers;       // [16], of nibbles
  const void* const* scales;  // of each column: from the block of the first position on
  ScaleType scale_type;
  int64_t first_ends, block;  // positions up to the end of the first block; of the others
  bool exact;                 // as in CodedRun, and the two below
  float least_scale, most_scale;
  char* to;  // the line of the first position
  int64_t block_stride;
};
inline constexpr int64_t kMostColumnRun = 256;
// False: some values are not made so, and what is written is not theirs.
using DecodeColumnsFn = bool (*)(const CodedColumns& columns);

struct PairKernels {
  DotRunFn dot[kLineCodes][kLinesRows];  // [LineCodes][rows - 1]
  ArrangePairsFn arrange;
  DecodePairsFn decode[kLineCodes];
};
extern const PairKernels kPairKernels;  // x86_64 only: AVX512-BF16 and AVX512-VBMI

struct TileKernels {
  const char* isa;
  ProductKernel f32;
  const PanelProductFn *f32_by_bf16, *f32_by_f16;  // the same for B panels of pairs
  ProductKernel bf16_few, bf16;  // bf16_few serves experts of up to bf16_few_rows rows
  int bf16_few_rows;
  LinesProductFn by_lines[Loads::kCount][kLinesRows];  // [Load][rows - 1]; null: none
  LoadBlockFn along_k[Loads::kCount][2], along_lanes[Loads::kCount][2];  // [Load][turned]
  DecodeLinesFn decode[quant::Formats::kCount][PlainLoads::kCount];      // to a plain type
  DecodeRunFn decode_run[kLineCodes][2];                                 // [LineCodes][to f16]
  DotRunFn dot_run[kLineCodes][kLinesRows];                              // [LineCodes][rows - 1]
  DecodeColumnsFn decode_columns[kLineCodes];                            // null: none
  uint8_t nibble_order[kCodesChunk];  // positions, of nibbles whose low one is the first
  const PairKernels* pairs;           // null: none, and none of what follows
  bool pair_dots[kLineCodes];         // its dots are faster than dot_run
  const char* pair_name;              // of pair_lines
  PairLinesFn pair_lines;
  int pair_columns;                                  // at most kMostPairColumns, which it divides
  TurnRowsFn turn_rows;                              // null: rows are as they are
  void (*transpose)(const void* from, void* to);     // 16 lines of 16 dwords
  void (*expand_bf16)(const void* block, void* to);  // packed block -> two f32 blocks
  void (*expand_f16)(const void* block, void* to);
  void (*powers_to_f32)(const uint8_t* from, float* to, int64_t count);  // quant::e8m0
  void (*to_f32[PlainLoads::kCount])(const void* from, float* to, int64_t count);
  void (*from_f32[PlainLoads::kCount])(const float* from, void* to, int64_t count);
  void (*begin)();  // once per task before products; null = nothing to do
  void (*end)();
};

extern const TileKernels kTilePortable;
extern const TileKernels kTileAvx2, kTileAvx512, kTileAvx512Bf16, kTileAmx;  // x86_64 only
extern const TileKernels kTileNeon, kTileNeonBf16;                           // aarch64 only

}  // namespace moec::cpu
