// SPDX-License-Identifier: Apache-2.0
#include "backend/cpu/block_product.h"

#include <algorithm>
#include <cstring>

#include "backend/cpu/isa.h"

// Offsets within a block are small:
// NOLINTBEGIN(bugprone-implicit-widening-of-multiplication-result)
namespace moec::cpu {
namespace {

int64_t div_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

// A single row panel prefetches this far ahead of itself (16 KiB), several the next chunk of B.
constexpr int kPrefetchBlocks = 8;

// Rows cut into A panels of almost equal size.
struct RowPanels {
  int64_t rows, per_panel, multiple;
  RowPanels(int64_t rows_, const ProductKernel& kernel)
      : rows(rows_),
        per_panel(div_up(div_up(rows_, div_up(rows_, kernel.max_rows)), kernel.row_multiple) *
                  kernel.row_multiple),
        multiple(kernel.row_multiple) {}
  int64_t count() const { return div_up(rows, per_panel); }
  int64_t padded(int64_t panel) const {
    return div_up(std::min(per_panel, rows - panel * per_panel), multiple) * multiple;
  }
};

class Runner {
 public:
  Runner(const BlockProduct& p, char* scratch)
      : p_(p),
        panels_(p.rows, *p.plan.kernel),
        blocks_(div_up(p.k, block_k(p.plan.compute))),
        columns_(div_up(p.cols, kPanelColumns)),
        a_(scratch),
        b_(scratch + kScratchA),
        ld_(columns_ * kPanelColumns + kLdSlack) {
    c_[0] = reinterpret_cast<float*>(scratch + kScratchA + kScratchB);
    c_[1] = c_[0] + padded_rows() * ld_;
  }

  BlockResult run() {
    const bool pair = p_.kind == GemmKind::kPair, sum = p_.kind == GemmKind::kSum;
    if (blocks_ == 0) std::memset(c_[0], 0, size_t((1 + pair) * padded_rows() * ld_ * 4));
    const int64_t span = span_blocks();
    prefetch_panel(p_.b[0], p_.col0 / kPanelColumns);
    for (int s = 0; s <= int(sum); ++s)
      for (int64_t block0 = 0; block0 < blocks_; block0 += span) {
        const int blocks = int(std::min(span, blocks_ - block0));
        load_a(p_.a[s], block0, blocks);
        for (int j = 0; j <= int(pair); ++j)
          multiply(p_.b[sum ? s : j], block0, blocks, c_[j], s + block0 > 0);
      }
    return {c_[0], pair ? c_[1] : nullptr, ld_};
  }

 private:
  int64_t padded_rows() const { return panels_.count() * panels_.per_panel; }

  // Few rows leave room for more of k, up to all of it: fewer passes over c.
  int64_t span_blocks() const {
    const int64_t fits = kScratchA / (padded_rows() * kLineBytes);
    return std::max<int64_t>(kSpanBlocks, fits / kSpanBlocks * kSpanBlocks);
  }

  void load_a(const PanelSource& source, int64_t block0, int blocks) {
    char* to = a_;
    for (int64_t panel = 0; panel < panels_.count(); ++panel) {
      const int rows = int(panels_.padded(panel));
      load_rows(*p_.plan.tile, source, p_.plan.compute, p_.row0 + panel * panels_.per_panel, rows,
                block0, blocks, to);
      to += int64_t(rows) * blocks * kLineBytes;
    }
  }

  // Where the panel chunk after this one lies, for packed memory read in place; null: nowhere.
  const char* next_chunk(const WeightSource& weight, int64_t column, int64_t block0, int64_t after,
                         int64_t span_end) const {
    if (!is_direct(weight, p_.plan.compute)) return nullptr;
    const int64_t panel = p_.col0 / kPanelColumns;
    if (after < span_end) return packed_block(weight, panel + column, after);
    if (column + 1 < columns_) return packed_block(weight, panel + column + 1, block0);
    return span_end < blocks_ ? packed_block(weight, panel, span_end) : nullptr;
  }

  // All columns times all rows for one span of A, in chunks of B that stay in the L1 cache.
  void multiply(const WeightSource& weight, int64_t block0, int blocks, float* c, bool accumulate) {
    if (wants_many_panels(weight)) {
      for (int first = 0; first < blocks; first += kSpanBlocks) {
        const int chunk = std::min(kSpanBlocks, blocks - first);
        load_panels(*p_.plan.tile, weight, p_.plan.compute, p_.col0 / kPanelColumns, int(columns_),
                    block0 + first, chunk, b_);
        for (int64_t column = 0; column < columns_; ++column)
          multiply_chunk(b_ + column * chunk * kBlockBytes, {first, blocks, chunk}, nullptr,
                         c + column * kPanelColumns, accumulate || first > 0);
      }
      return;
    }
    for (int64_t column = 0; column < columns_; ++column) {
      for (int first = 0; first < blocks; first += kSpanBlocks) {
        const int chunk = std::min(kSpanBlocks, blocks - first);
        const void* const b =
            weight_panel(*p_.plan.tile, weight, p_.plan.compute, p_.col0 / kPanelColumns + column,
                         block0 + first, chunk, b_);
        const int ahead = panels_.count() == 1 ? std::min(chunk, kPrefetchBlocks) : chunk;
        multiply_chunk(b, {first, blocks, chunk},
                       next_chunk(weight, column, block0, block0 + first + ahead, block0 + blocks),
                       c + column * kPanelColumns, accumulate || first > 0);
      }
    }
  }

  struct Chunk {
    int64_t first, span;  // its first block, and the blocks of A in scratch
    int blocks;
  };

  void multiply_chunk(const void* b, const Chunk& chunk, const char* next, float* c,
                      bool accumulate) {
    const ProductKernel& kernel = *p_.plan.kernel;
    const int64_t panels = panels_.count();
    const int lines = next ? int(div_up(kBlockBytes / kLineBytes, panels)) : 0;
    const char* a = a_;
    for (int64_t panel = 0; panel < panels; ++panel) {
      const int64_t rows = panels_.padded(panel);
      kernel.by_rows[rows / kernel.row_multiple - 1](
          {a + chunk.first * rows * kLineBytes, b, c + panel * panels_.per_panel * ld_, ld_,
           chunk.blocks, accumulate, next, lines});
      a += rows * chunk.span * kLineBytes;
      next += int64_t(lines) * kLineBytes * chunk.blocks;
    }
  }

  const BlockProduct& p_;
  const RowPanels panels_;
  const int64_t blocks_, columns_;
  char *const a_, *const b_;
  const int64_t ld_;
  float* c_[2];
};

}  // namespace

ProductPlan plan_product(moec_dtype a, moec_dtype b, int64_t rows) {
  const TileKernels& tile = tile_kernels();
  if (a != MOEC_BF16 || b != MOEC_BF16 || !tile.bf16.name) return {&tile, &tile.f32, Compute::kF32};
  const bool few = rows <= tile.bf16_few_rows;
  return {&tile, few ? &tile.bf16_few : &tile.bf16, Compute::kBf16};
}

BlockResult run_block(const BlockProduct& product, char* scratch) {
  const TileKernels& tile = *product.plan.tile;
  if (tile.begin) tile.begin();
  const BlockResult result = Runner(product, scratch).run();
  if (tile.end) tile.end();
  return result;
}

}  // namespace moec::cpu
// NOLINTEND(bugprone-implicit-widening-of-multiplication-result)
