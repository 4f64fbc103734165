// SPDX-License-Identifier: Apache-2.0
#include "backend/cpu/coded_product.h"

#include "backend/cpu/coded_lines.h"

namespace moec::cpu {
namespace {

bool has_code_lines(const WeightSource& weight, CodedLines& lines) {
  const PanelSource& source = weight.source;
  return !weight.packed.data && source.is_coded() && source.dtype == MOEC_BF16 &&
         lines.find(source.coded, source.dtype) && lines.along_k() != source.transposed;
}

// Lines of a row of A of fp32, from a multiple of their length on; `rows` lines apart.
const float* row_of(const CodedTask& task, int64_t r, int64_t first) {
  const int64_t rows = task.panels.rows;
  return reinterpret_cast<const float*>(task.a + (first / kSteps * rows + r) * kLineBytes);
}

// Row r of A from `first` on, whole chunks of it: zeros follow the `count` values.
void arrange(const CodedTask& task, LineCodes codes, int64_t r, int64_t first, int64_t count,
             float* to) {
  const int flip = codes == LineCodes::kHighNibble;
  int64_t position[kCodesChunk], place[kCodesChunk];  // in a chunk, and in that of A in floats
  for (int i = 0; i < kCodesChunk; ++i) {
    position[i] = are_nibbles(codes) ? task.plan.tile->nibble_order[i] ^ flip : i;
    place[i] = position[i] / kSteps * task.panels.rows * kSteps + position[i] % kSteps;
  }
  for (int64_t at = 0; at < count; at += kCodesChunk) {
    const float* const chunk = row_of(task, r, first + at);
    if (count - at >= kCodesChunk)
      for (int i = 0; i < kCodesChunk; ++i) to[at + i] = chunk[place[i]];
    else
      for (int i = 0; i < kCodesChunk; ++i)
        to[at + i] = position[i] < count - at ? chunk[place[i]] : 0.0f;
  }
}

// Rows of bf16 are multiplied in pairs, where the instruction set has that and gains by it.
bool in_pairs(const CodedTask& task, const CodedLines& lines) {
  const TileKernels& tile = *task.plan.tile;
  return task.term.a.dtype == MOEC_BF16 && lines.have_pairs(tile) &&
         tile.pair_dots[int(lines.codes())];
}

}  // namespace

bool takes_codes(const BlockTerm& term, int64_t rows) {
  CodedLines lines;
  return rows <= kLinesRows && has_code_lines(term.b, lines);
}

bool takes_decoded(const ProductPlan& plan, const WeightSource& weight) {
  CodedLines lines;
  return plan.compute == Compute::kBf16 && has_code_lines(weight, lines) &&
         lines.have_pairs(*plan.tile);
}

// All columns for one span of A, each from end to end.
void multiply_codes(const CodedTask& task, ArrangedRows& arranged) {
  constexpr int64_t kBlocks = kMostPairs / kCodesAlign + 2;
  static_assert(kLinesRows * kMostPairs * int64_t(sizeof(float)) <= kScratchB);
  const TileKernels& tile = *task.plan.tile;
  const PanelSource& source = task.term.b.source;
  CodedLines lines;
  lines.find(source.coded, source.dtype);
  const bool pairs = in_pairs(task, lines);
  float scales[kDotLines * kBlocks], zeros[kDotLines * kBlocks], sums[kLinesRows * kDotLines];
  const int64_t rows = task.panels.rows, k0 = task.block0 * kSteps;
  const int64_t k = std::min(task.blocks * int64_t(kSteps), source.k - k0);
  const DotRunFn dot = (pairs ? tile.pairs->dot : tile.dot_run)[int(lines.codes())][rows - 1];
  for (int64_t first = 0; first < k; first += kMostPairs) {
    const int64_t count = std::min(kMostPairs, k - first);
    if (const ArrangedRows wanted{lines.codes(), pairs, first, count}; wanted != arranged) {
      for (int64_t r = 0; r < rows; ++r)
        if (pairs)
          tile.pairs->arrange({row_of(task, r, first), rows * kSteps, count, lines.codes(),
                               reinterpret_cast<uint16_t*>(task.b) + r * kMostPairs});
        else
          arrange(task, lines.codes(), r, first, count,
                  reinterpret_cast<float*>(task.b) + r * kMostPairs);
      arranged = wanted;
    }
    for (int64_t column = 0; column < task.cols; column += kDotLines) {
      const int columns = int(std::min<int64_t>(kDotLines, task.cols - column));
      int64_t apart;
      const CodedRun run =
          lines.runs(tile, task.col0 + column, columns, k0 + first, count, scales, zeros, apart);
      dot({run, columns, lines.stride(), apart, task.b, kMostPairs, sums});
      for (int64_t r = 0; r < rows; ++r)
        for (int64_t i = 0; i < columns; ++i) {
          float &to = task.c[r * task.ld + column + i], sum = sums[r * kDotLines + i];
          to = task.accumulate || first > 0 ? to + sum : sum;
        }
    }
  }
}

// Some columns from end to end: their values stay near while all rows pass.
void multiply_decoded(const CodedTask& task) {
  constexpr int64_t kRun = 2048, kBlockK = 2 * kSteps, kBlocks = kRun / kCodesAlign + 2;
  constexpr int64_t kStride = kRun + kBlockK;  // keeps lines off one cache set
  static_assert(kMostPairColumns * kStride * int64_t(sizeof(uint16_t)) <= kScratchB);
  const TileKernels& tile = *task.plan.tile;
  const PanelSource& source = task.term.b.source;
  CodedLines lines;
  lines.find(source.coded, source.dtype);
  const DecodePairsFn decode = tile.pairs->decode[int(lines.codes())];
  float scales[kMostPairColumns * kBlocks], zeros[kMostPairColumns * kBlocks];
  const int64_t k0 = task.block0 * kBlockK, k = std::min(task.blocks * kBlockK, source.k - k0);
  auto* const values = reinterpret_cast<uint16_t*>(task.b);
  for (int64_t column = 0; column < task.cols; column += tile.pair_columns) {
    const int columns = int(std::min<int64_t>(tile.pair_columns, task.cols - column));
    for (int64_t first = 0; first < k; first += kRun) {
      const int64_t count = std::min(kRun, k - first);
      int64_t apart;
      const CodedRun run =
          lines.runs(tile, task.col0 + column, columns, k0 + first, count, scales, zeros, apart);
      decode({run, columns, lines.stride(), apart, values, kStride});
      const char* a = task.a;
      for (int64_t panel = 0; panel < task.panels.count(); ++panel) {
        const int64_t rows = task.panels.padded(panel);
        float* const c = task.c + panel * task.panels.per_panel * task.ld + column;
        tile.pair_lines({values, kStride, a + first / kBlockK * rows * kLineBytes, int(rows), c,
                         task.ld, int(div_up(count, kBlockK)), task.accumulate || first > 0});
        a += rows * task.blocks * kLineBytes;
      }
    }
  }
}

}  // namespace moec::cpu
