// SPDX-License-Identifier: Apache-2.0
#include "backend/cpu/block_product.h"

#include <algorithm>
#include <cstring>

#include "backend/cpu/block_loader.h"
#include "backend/cpu/coded_product.h"
#include "backend/cpu/isa.h"
#include "core/workspace.h"

// Offsets within a block are small:
// NOLINTBEGIN(bugprone-implicit-widening-of-multiplication-result)
namespace moec::cpu {
namespace {

bool same_rows(const BlockTerm& x, const BlockTerm& y) {
  return x.a.data == y.a.data && x.a.dtype == y.a.dtype && x.a.lane_stride == y.a.lane_stride &&
         x.a.lane_gather == y.a.lane_gather && x.k == y.k;
}

class Runner {
 public:
  Runner(const BlockProduct& p, char* scratch)
      : p_(p),
        panels_(p.rows, *p.plan.kernel),
        columns_(div_up(p.cols, kPanelColumns)),
        a_(scratch),
        b_(scratch + kScratchA),
        ld_(columns_ * kPanelColumns + kLdSlack),
        few_(panels_.count() == 1) {
    c_[0] = reinterpret_cast<float*>(scratch + kScratchA + kScratchB);
    c_[1] = c_[0] + padded_rows() * ld_;
  }

  BlockResult run() {
    if (p_.num_terms > 0 && !is_direct(p_.terms[0].b) && way_of(p_.terms[0]) == Way::kPanels)
      region_of(0, 0, 0).prefetch(0, 1);
    for (int first = 0; first < p_.num_terms; first = end_of_load(first)) run_load(first);
    for (int i = 0; i < p_.outputs; ++i)
      if (!started_[i]) std::memset(c_[i], 0, size_t(padded_rows() * ld_ * 4));
    return {c_[0], p_.outputs > 1 ? c_[1] : nullptr, ld_};
  }

 private:
  int64_t blocks_of(int term) const { return div_up(p_.terms[term].k, block_k(p_.plan.compute)); }
  // Terms [first, end) read the same rows.
  int end_of_load(int first) const {
    int end = first + 1;
    while (end < p_.num_terms && same_rows(p_.terms[first], p_.terms[end])) ++end;
    return end;
  }

  void run_load(int first) {
    const int64_t blocks = blocks_of(first), span = span_blocks();
    const int end = end_of_load(first);
    for (int64_t block0 = 0; block0 < blocks; block0 += span) {
      const int now = int(std::min(span, blocks - block0));
      load_a(p_.terms[first].a, block0, now);
      for (int term = first; term < end; ++term) {
        const BlockTerm& at = p_.terms[term];
        const Way way = way_of(at);
        turn(at.a, block0, now, way == Way::kDecoded && p_.plan.tile->turn_rows);
        if (way == Way::kCodes)
          multiply_codes(coded_task(at, block0, now), arranged_);
        else if (way == Way::kDecoded)
          multiply_decoded(coded_task(at, block0, now));
        else if (way == Way::kLines)
          multiply_lines(product_with_lines(at.b), at, block0, now);
        else
          multiply({first, end, term}, block0, now);
        started_[at.output] = true;
      }
    }
  }

  int64_t padded_rows() const { return panels_.count() * panels_.per_panel; }

  // Few rows leave room for more of k, up to all of it: fewer passes over c.
  int64_t span_blocks() const {
    const int64_t fits = kScratchA / (padded_rows() * kLineBytes);
    return std::max<int64_t>(kSpanBlocks, fits / kSpanBlocks * kSpanBlocks);
  }

  void load_a(const PanelSource& source, int64_t block0, int blocks) {
    char* to = a_;
    turned_ = false;
    arranged_.count = 0;
    for (int64_t panel = 0; panel < panels_.count(); ++panel) {
      const int rows = int(panels_.padded(panel));
      load_rows(*p_.plan.tile, source, p_.plan.compute, p_.row0 + panel * panels_.per_panel, rows,
                block0, blocks, to);
      to += int64_t(rows) * blocks * kLineBytes;
    }
  }

  struct TermOfLoad {
    int first, end, term;
  };

  // Few rows read a panel once. In fp32, too, they take 16-bit values as pairs.
  bool takes_pairs(const WeightSource& weight) const {
    return few_ && p_.plan.compute == Compute::kF32 && weight.dtype() != MOEC_F32 &&
           !weight.rounds();
  }
  Compute panels_of(const WeightSource& weight) const {
    return takes_pairs(weight) ? Compute::kBf16 : p_.plan.compute;
  }
  bool is_direct(const WeightSource& weight) const {
    return cpu::is_direct(weight, panels_of(weight));
  }
  const PanelProductFn* products_by(const WeightSource& weight) const {
    if (!takes_pairs(weight)) return p_.plan.kernel->by_rows;
    return weight.dtype() == MOEC_BF16 ? p_.plan.tile->f32_by_bf16 : p_.plan.tile->f32_by_f16;
  }
  // A chunk in blocks of A, as one in blocks of B. A pair block is two of A in fp32.
  Chunk of_b(const WeightSource& weight, Chunk chunk) const {
    if (!takes_pairs(weight)) return chunk;
    return {chunk.panel, chunk.block0 / 2, chunk.panels, (chunk.blocks + 1) / 2};
  }
  Region memory_of(const WeightSource& weight, const Chunk& chunk) const {
    return chunk_region(weight, panels_of(weight), of_b(weight, chunk));
  }

  // Where the values of a column follow each other in memory, a few rows are multiplied with them
  // there: panels would be built for one use. Null: not so, rows are padded (the last of many), or
  // there is no such kernel.
  LinesProductFn product_with_lines(const WeightSource& weight) const {
    const PanelSource& source = weight.source;
    if (p_.rows > kLinesRows || padded_rows() > p_.rows || weight.packed.data ||
        source.is_coded() || source.k_stride != 1 || source.k_gather)
      return nullptr;
    return p_.plan.tile->by_lines[int(load_of(source, p_.plan.compute))][p_.rows - 1];
  }

  // All columns for one span of A, 16 of them at a time from end to end. So many streams the memory
  // follows on its own; where they are short, the next ones are asked for. Measured on a Zen 3, for
  // a KiB: 4 KiB a stream 80 ns (81 with prefetches), 14 KiB 66 (71), 1.5 KiB 150 (85), packed 65.
  // Where it pays, kernels ask for more of the streams themselves (ask_ahead).
  void multiply_lines(LinesProductFn product, const BlockTerm& term, int64_t block0, int blocks) {
    const PanelSource& source = term.b.source;
    float* const c = c_[term.output];
    constexpr int64_t kLongLine = 4096;
    const int64_t size = dtype_bytes(source.stored()), line_bytes = source.k * size;
    const bool ahead = line_bytes < kLongLine && source.lane_stride == source.k;
    for (int64_t column = 0; column < p_.cols; column += kLanes) {
      const void* lines[kLanes];
      for (int64_t i = 0, lane = p_.col0 + column; i < kLanes; ++i, ++lane)
        lines[i] = lane < source.lanes
                       ? line_of(source, lane, source.lane_stride, source.lane_gather)
                       : nullptr;
      for (int first = 0; first < blocks; first += kSpanBlocks) {
        const int64_t k = (block0 + first) * block_k(p_.plan.compute);
        const char* const next =
            static_cast<const char*>(lines[0]) + kLanes * (line_bytes + k * size);
        product({ahead && column + kLanes < p_.cols ? next : nullptr, lines, k, source.k - k,
                 a_ + first * p_.rows * kLineBytes, c + column, ld_,
                 std::min(int(kSpanBlocks), blocks - first), started_[term.output] || first > 0});
      }
    }
  }

  // What a term's rows are multiplied with.
  enum class Way { kCodes, kDecoded, kLines, kPanels };
  Way way_of(const BlockTerm& term) const {
    if (p_.plan.compute == Compute::kF32 && takes_codes(term, p_.rows)) return Way::kCodes;
    if (takes_decoded(p_.plan, term.b)) return Way::kDecoded;
    return product_with_lines(term.b) ? Way::kLines : Way::kPanels;
  }
  CodedTask coded_task(const BlockTerm& term, int64_t block0, int blocks) const {
    return {p_.plan, term,    panels_, a_,     b_,     c_[term.output],
            ld_,     p_.col0, p_.cols, block0, blocks, started_[term.output]};
  }
  // Panels of A, turned or as they were loaded.
  void turn(const PanelSource& source, int64_t block0, int blocks, bool turned) {
    if (turned == turned_) return;
    if (turned_) return load_a(source, block0, blocks);
    char* a = a_;
    for (int64_t panel = 0; panel < panels_.count(); ++panel) {
      const int64_t rows = panels_.padded(panel);
      p_.plan.tile->turn_rows(a, int(rows), blocks);
      a += rows * blocks * kLineBytes;
    }
    turned_ = true;
  }

  // All columns times all rows for one span of A, in chunks of B that stay near.
  void multiply(const TermOfLoad& at, int64_t block0, int blocks) {
    const WeightSource& weight = p_.terms[at.term].b;
    arranged_.count = 0;  // panels take its place
    const int output = p_.terms[at.term].output;
    const bool accumulate = started_[output];
    const bool direct = is_direct(weight);
    const bool whole = direct && few_ && p_.plan.compute == Compute::kBf16;  // f32 sums in parts
    const PanelProductFn* const products = products_by(weight);
    const int group = group_of(weight), step = whole ? blocks : kSpanBlocks;
    for (int64_t column = 0; column < columns_; column += group)
      for (int first = 0; first < blocks; first += step) {
        const Chunk chunk = chunk_at(column, block0 + first, block0 + blocks, group, step);
        const Region next = direct && few_
                                ? close_ahead(weight, chunk)
                                : region_after(at, column, chunk, block0, block0 + blocks);
        // The products of few rows end before their prefetches could arrive: those go with the
        // load.
        const bool early = few_ && !direct;
        const Chunk loaded = of_b(weight, chunk);
        const void* const b = load_chunk(*p_.plan.tile, weight, panels_of(weight), loaded, b_,
                                         early ? next : Region{});
        for (int i = 0; i < group; ++i)
          multiply_panel(products, static_cast<const char*>(b) + i * loaded.blocks * kBlockBytes,
                         {first, blocks, chunk.blocks}, early ? Region{} : next, i, group,
                         c_[output] + (column + i) * kPanelColumns, accumulate || first > 0);
      }
  }

  // Few rows stream packed panels, which follow each other in memory, at the speed of the memory.
  Region close_ahead(const WeightSource& weight, const Chunk& chunk) const {
    constexpr int kAhead = 4;  // blocks, 8 KiB
    Region region = memory_of(weight, chunk);
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
    return memory_of(weight, chunk_at(column, block, end, group_of(weight), kSpanBlocks));
  }
  Region region_of(int term, int64_t column, int64_t block) const {
    return region_of(p_.terms[term].b, column, block, blocks_of(term));
  }

  // What load_chunk will read after this chunk.
  Region region_after(const TermOfLoad& at, int64_t column, const Chunk& chunk, int64_t block0,
                      int64_t span_end) const {
    const WeightSource& weight = p_.terms[at.term].b;
    const int64_t block = chunk.block0 + chunk.blocks;
    if (block < span_end) return region_of(weight, column, block, span_end);
    if (column + chunk.panels < columns_)
      return region_of(weight, column + chunk.panels, block0, span_end);
    if (at.term + 1 < at.end) return region_of(p_.terms[at.term + 1].b, 0, block0, span_end);
    if (span_end < blocks_of(at.first)) return region_of(at.first, 0, span_end);
    if (at.end < p_.num_terms) return region_of(at.end, 0, 0);
    return {};
  }

  struct Part {
    int64_t first, span;  // its first block in the blocks of A in scratch
    int blocks;
  };

  // One panel of B times all rows. `next` is prefetched by the kernel where it is one run of
  // memory, else between the products; this panel's share is part of parts.
  void multiply_panel(const PanelProductFn* products, const void* b, const Part& part,
                      const Region& next, int share, int shares, float* c, bool accumulate) {
    const ProductKernel& kernel = *p_.plan.kernel;
    const int64_t panels = panels_.count(), next_lines = next.bytes / kLineBytes;
    const bool one_run = next.rows == 1;
    const int lines = one_run ? int(div_up(next_lines, panels * part.blocks)) : 0;
    const char *a = a_, *ahead = next.base;
    for (int64_t panel = 0; panel < panels; ++panel) {
      const int64_t rows = panels_.padded(panel);
      if (!one_run) next.prefetch(share * panels + panel, shares * panels);
      products[rows / kernel.row_multiple - 1]({a + part.first * rows * kLineBytes, b,
                                                c + panel * panels_.per_panel * ld_, ld_,
                                                part.blocks, accumulate, ahead, lines});
      a += rows * part.span * kLineBytes;
      ahead += int64_t(lines) * kLineBytes * part.blocks;
    }
  }

  const BlockProduct& p_;
  const RowPanels panels_;
  const int64_t columns_;
  char *const a_, *const b_;
  const int64_t ld_;
  const bool few_;         // rows: one panel
  ArrangedRows arranged_;  // in b_
  bool turned_ = false;
  float* c_[BlockProduct::kMostOutputs];
  bool started_[BlockProduct::kMostOutputs] = {};  // c holds a sum
};

}  // namespace

ProductPlan plan_f32() {
  const TileKernels& tile = tile_kernels();
  return {&tile, &tile.f32, Compute::kF32};
}

ProductPlan plan_product(moec_dtype a, moec_dtype b, int64_t rows) {
  const TileKernels& tile = tile_kernels();
  if (a != MOEC_BF16 || b != MOEC_BF16 || !tile.bf16.name) return plan_f32();
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
