// SPDX-License-Identifier: Apache-2.0
#include "backend/cpu/block_product.h"

#include <algorithm>
#include <cstring>

#include "backend/cpu/isa.h"
#include "core/workspace.h"

// Offsets within a block are small:
// NOLINTBEGIN(bugprone-implicit-widening-of-multiplication-result)
namespace moec::cpu {
namespace {

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
    if (blocks_ > 0 && !is_direct(p_.b[0], p_.plan.compute))
      region_of(p_.b[0], 0, 0, blocks_).prefetch(0, 1);
    for (int s = 0; s <= int(sum); ++s)
      for (int64_t block0 = 0; block0 < blocks_; block0 += span) {
        const int blocks = int(std::min(span, blocks_ - block0));
        load_a(p_.a[s], block0, blocks);
        for (int j = 0; j <= int(pair); ++j)
          multiply(sum ? s : j, block0, blocks, c_[j], s + block0 > 0);
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

  // All columns times all rows for one span of A, in chunks of B that stay near.
  void multiply(int matrix, int64_t block0, int blocks, float* c, bool accumulate) {
    const WeightSource& weight = p_.b[matrix];
    const bool direct = is_direct(weight, p_.plan.compute), few = panels_.count() == 1;
    const bool whole = direct && few && p_.plan.compute == Compute::kBf16;  // f32 sums in parts
    const int group = group_of(weight), step = whole ? blocks : kSpanBlocks;
    for (int64_t column = 0; column < columns_; column += group)
      for (int first = 0; first < blocks; first += step) {
        const Chunk chunk = chunk_at(column, block0 + first, block0 + blocks, group, step);
        const Region next = direct && few
                                ? close_ahead(weight, chunk)
                                : region_after(matrix, column, chunk, block0, block0 + blocks);
        // The products of few rows end before their prefetches could arrive: those go with the
        // load.
        const bool early = few && !direct;
        const void* const b =
            load_chunk(*p_.plan.tile, weight, p_.plan.compute, chunk, b_, early ? next : Region{});
        for (int i = 0; i < group; ++i)
          multiply_panel(static_cast<const char*>(b) + i * chunk.blocks * kBlockBytes,
                         {first, blocks, chunk.blocks}, early ? Region{} : next, i, group,
                         c + (column + i) * kPanelColumns, accumulate || first > 0);
      }
  }

  // Few rows stream packed panels, which follow each other in memory, at the speed of the memory.
  Region close_ahead(const WeightSource& weight, const Chunk& chunk) const {
    constexpr int kAhead = 4;  // blocks, 8 KiB
    Region region = chunk_region(weight, p_.plan.compute, chunk);
    region.base += kAhead * kBlockBytes;
    return region;
  }

  int group_of(const WeightSource& weight) const {
    return wants_many_panels(weight) ? int(columns_) : 1;
  }
  Chunk chunk_at(int64_t column, int64_t block, int64_t span_end, int group, int step) const {
    return {p_.col0 / kPanelColumns + column, block, group,
            int(std::min<int64_t>(step, span_end - block))};
  }
  Region region_of(const WeightSource& weight, int64_t column, int64_t block, int64_t end) const {
    return chunk_region(weight, p_.plan.compute,
                        chunk_at(column, block, end, group_of(weight), kSpanBlocks));
  }

  // What load_chunk will read after this chunk.
  Region region_after(int matrix, int64_t column, const Chunk& chunk, int64_t block0,
                      int64_t span_end) const {
    const WeightSource& weight = p_.b[matrix];
    const int64_t block = chunk.block0 + chunk.blocks;
    if (block < span_end) return region_of(weight, column, block, span_end);
    if (column + chunk.panels < columns_)
      return region_of(weight, column + chunk.panels, block0, span_end);
    if (p_.kind == GemmKind::kPair && matrix == 0) return region_of(p_.b[1], 0, block0, span_end);
    if (span_end < blocks_)
      return region_of(p_.b[matrix ^ (p_.kind == GemmKind::kPair)], 0, span_end, blocks_);
    if (p_.kind == GemmKind::kSum && matrix == 0) return region_of(p_.b[1], 0, 0, blocks_);
    return {};
  }

  struct Part {
    int64_t first, span;  // its first block in the blocks of A in scratch
    int blocks;
  };

  // One panel of B times all rows. `next` is prefetched by the kernel where it is one run of
  // memory, else between the products; this panel's share is part of parts.
  void multiply_panel(const void* b, const Part& part, const Region& next, int share, int shares,
                      float* c, bool accumulate) {
    const ProductKernel& kernel = *p_.plan.kernel;
    const int64_t panels = panels_.count(), next_lines = next.bytes / kLineBytes;
    const bool one_run = next.rows == 1;
    const int lines = one_run ? int(div_up(next_lines, panels * part.blocks)) : 0;
    const char *a = a_, *ahead = next.base;
    for (int64_t panel = 0; panel < panels; ++panel) {
      const int64_t rows = panels_.padded(panel);
      if (!one_run) next.prefetch(share * panels + panel, shares * panels);
      kernel.by_rows[rows / kernel.row_multiple - 1]({a + part.first * rows * kLineBytes, b,
                                                      c + panel * panels_.per_panel * ld_, ld_,
                                                      part.blocks, accumulate, ahead, lines});
      a += rows * part.span * kLineBytes;
      ahead += int64_t(lines) * kLineBytes * part.blocks;
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
