// SPDX-License-Identifier: Apache-2.0
#include "backend/cpu/pack.h"

#include <algorithm>
#include <cstring>

#include "backend/cpu/gemm.h"
#include "backend/cpu/isa.h"
#include "core/dtype.h"

// Offsets within a block are small:
// NOLINTBEGIN(bugprone-implicit-widening-of-multiplication-result)
namespace moec::cpu {
namespace {

constexpr int kMaxBlockK = 32;

int64_t blocks_of(int64_t k, int64_t per_block) {
  return (k + per_block - 1) / per_block;
}

Load load_of(moec_dtype dtype, Compute compute) {
  if (compute == Compute::kBf16) return Load::kPairs;
  return dtype == MOEC_F32 ? Load::kF32 : dtype == MOEC_BF16 ? Load::kBf16ToF32 : Load::kF16ToF32;
}

const char* line_of(const PanelSource& s, int64_t index, int64_t stride, const int32_t* gather) {
  const int64_t at = gather ? gather[index] : index;
  if (at < 0) return nullptr;
  return static_cast<const char*>(s.data) + at * stride * dtype_bytes(s.dtype);
}

// Where tiles of 16 lanes go: tile t at to + t / 2 * pair_stride + t % 2 * tile_stride, its next
// block block_stride further.
struct Target {
  char* to;
  int64_t pair_stride, tile_stride, block_stride;
  int lanes;  // in all
  bool is_a;
  char* at(int tile, int block) const {
    return to + tile / 2 * pair_stride + tile % 2 * tile_stride + block * block_stride;
  }
  int wanted(int tile) const { return std::min(lanes - tile * kLanes, kLanes); }
  int lines_out(int tile) const { return is_a ? wanted(tile) : kSteps; }
};

// `panels` B panels of `blocks` blocks each.
Target panel_target(void* to, int panels, int blocks) {
  return {static_cast<char*>(to), int64_t(blocks) * kBlockBytes,
          kBlockBytes / 2,        kBlockBytes,
          panels * kPanelColumns, false};
}

class BlockLoader {
 public:
  BlockLoader(const TileKernels& tile, const PanelSource& source, Load load)
      : tile_(tile), source_(source), load_(load), per_block_(load == Load::kPairs ? 32 : 16) {}

  void run(int64_t lane0, int64_t block0, int blocks, const Target& target,
           const Region& next = {}) const {
    const int tiles = (target.lanes + kLanes - 1) / kLanes;
    if (source_.k_stride == 1 && !source_.k_gather) {
      for (int i = 0; i < tiles * blocks; i += blocks)
        along_k(lane0, i / blocks, block0, blocks, target, next, i, tiles * blocks);
      return;
    }
    for (int b = 0; b < blocks; ++b) {
      next.prefetch(b, blocks);
      if (along_lanes(source_))
        whole_lines(lane0, (block0 + b) * per_block_, b, target);
      else
        scattered(lane0, (block0 + b) * per_block_, b, target);
    }
  }
  static bool along_lanes(const PanelSource& source) {
    return source.lane_stride == 1 && !source.lane_gather;
  }

 private:
  int lanes_at(int64_t lane0, int tile, const Target& target) const {
    return int(std::clamp<int64_t>(source_.lanes - lane0 - tile * kLanes, 0, target.wanted(tile)));
  }
  int k_at(int64_t k0) const { return int(std::clamp<int64_t>(source_.k - k0, 0, per_block_)); }
  void put(LoadBlock load, const Target& target, bool source_along_k) const {
    const auto& table = source_along_k ? tile_.along_k : tile_.along_lanes;
    table[int(load_)][source_along_k != target.is_a](load);
  }

  void along_k(int64_t lane0, int tile, int64_t block0, int blocks, const Target& target,
               const Region& next, int part, int parts) const {
    const int lanes = lanes_at(lane0, tile, target);
    const void* lines[kLanes];
    for (int i = 0; i < lanes; ++i)
      lines[i] =
          line_of(source_, lane0 + tile * kLanes + i, source_.lane_stride, source_.lane_gather);
    for (int b = 0; b < blocks; ++b) {
      const int64_t k0 = (block0 + b) * per_block_;
      next.prefetch(part + b, parts);
      put({lines, k0, lanes, k_at(k0), target.at(tile, b), target.lines_out(tile)}, target, true);
    }
  }

  // All lanes of one block, so that lines are read from end to end.
  void whole_lines(int64_t lane0, int64_t k0, int block, const Target& target) const {
    const int count = k_at(k0);
    const void* lines[kMaxBlockK];
    for (int i = 0; i < count; ++i)
      lines[i] = line_of(source_, k0 + i, source_.k_stride, source_.k_gather);
    for (int t = 0; t * kLanes < target.lanes; ++t) {
      const int64_t lane = lane0 + t * kLanes;
      put({lines, lane, count, lanes_at(lane0, t, target), target.at(t, block),
           target.lines_out(t)},
          target, false);
    }
  }

  // Neither direction is contiguous: collect the values first.
  void scattered(int64_t lane0, int64_t k0, int block, const Target& target) const {
    const auto collect = dtype_bytes(source_.dtype) == 4 ? &BlockLoader::collect<uint32_t>
                                                         : &BlockLoader::collect<uint16_t>;
    alignas(kLineBytes) char values[kLanes * kMaxBlockK * 4];
    const void* lines[kLanes];
    for (int t = 0; t * kLanes < target.lanes; ++t) {
      const int lanes = lanes_at(lane0, t, target), count = k_at(k0);
      (this->*collect)(lane0 + t * kLanes, lanes, k0, count, values, lines);
      put({lines, 0, lanes, count, target.at(t, block), target.lines_out(t)}, target, true);
    }
  }
  template <class T>
  void collect(int64_t lane0, int lanes, int64_t k0, int count, void* values,
               const void** lines) const {
    for (int i = 0; i < lanes; ++i) {
      const void* const line =
          line_of(source_, lane0 + i, source_.lane_stride, source_.lane_gather);
      T* const to = static_cast<T*>(values) + i * kMaxBlockK;
      lines[i] = line ? to : nullptr;
      for (int j = 0; line && j < count; ++j) {
        const int64_t k = source_.k_gather ? source_.k_gather[k0 + j] : k0 + j;
        to[j] = k < 0 ? T(0) : static_cast<const T*>(line)[k * source_.k_stride];
      }
    }
  }

  const TileKernels& tile_;
  const PanelSource& source_;
  const Load load_;
  const int per_block_;
};

// 16-bit packed weights of one panel -> fp32 blocks.
const char* packed_block(const WeightSource& w, int64_t panel, int64_t block) {
  const int64_t blocks = blocks_of(w.packed_k, packed_block_k(w.packed_dtype));
  return static_cast<const char*>(w.packed) + (panel * blocks + block) * kBlockBytes;
}

void expand(const TileKernels& tile, const WeightSource& w, const Chunk& chunk, char* to,
            const Region& next) {
  const auto expand_one = w.packed_dtype == MOEC_BF16 ? tile.expand_bf16 : tile.expand_f16;
  for (int b = 0; b < chunk.blocks; b += 2) {
    next.prefetch(b, chunk.blocks + 1);
    next.prefetch(b + 1, chunk.blocks + 1);
    expand_one(packed_block(w, chunk.panel, (chunk.block0 + b) / 2), to + b * kBlockBytes);
  }
}

// B(n, k) = W(k, n) with fp32 W: its blocks hold 16 k (our columns) of 32 n (our k).
void turn_f32(const TileKernels& tile, const WeightSource& w, const Chunk& chunk, char* to,
              const Region& next) {
  const int64_t last = blocks_of(w.packed_k, packed_block_k(MOEC_F32));
  for (int b = 0; b < chunk.blocks; ++b) {
    next.prefetch(b, chunk.blocks);
    for (int t = 0; t < 2; ++t) {
      const int64_t k = chunk.block0 + b, from = 2 * chunk.panel + t;
      char* const out = to + b * kBlockBytes + t * (kBlockBytes / 2);
      if (from < last)
        tile.transpose(packed_block(w, k / 2, from) + k % 2 * (kBlockBytes / 2), out);
      else
        std::memset(out, 0, kBlockBytes / 2);
    }
  }
}

// The same with 16-bit W: a block is 32 k (our columns) of 32 n (our k), first put back into rows.
void turn_16(const TileKernels& tile, const WeightSource& w, Compute compute, const Chunk& chunk,
             char* to, const Region& next) {
  alignas(kLineBytes) uint16_t rows[kPanelColumns][kMaxBlockK];
  const PanelSource source{rows,          w.packed_dtype, 1, kMaxBlockK, nullptr, nullptr,
                           kPanelColumns, kPanelColumns};
  const int step = compute == Compute::kBf16 ? 1 : 2;
  const BlockLoader loader(tile, source, load_of(w.packed_dtype, compute));
  for (int b = 0; b < chunk.blocks; b += step) {
    next.prefetch(b / step, (chunk.blocks + step - 1) / step);
    const char* const block = packed_block(w, (chunk.block0 + b) / step, chunk.panel);
    for (int t = 0; t < 2; ++t) tile.transpose(block + t * (kBlockBytes / 2), rows[t * kLanes]);
    loader.run(0, 0, step, panel_target(to + b * kBlockBytes, 1, step));
  }
}

}  // namespace

int64_t block_k(Compute compute) {
  return compute == Compute::kBf16 ? 32 : 16;
}
int64_t packed_block_k(moec_dtype dtype) {
  return dtype == MOEC_F32 ? 16 : 32;
}

void load_rows(const TileKernels& tile, const PanelSource& source, Compute compute, int64_t lane0,
               int rows, int64_t block0, int blocks, void* to) {
  constexpr int64_t kTile = kLanes * kLineBytes;
  const Target target{static_cast<char*>(to), 2 * kTile, kTile, rows * kLineBytes, rows, true};
  BlockLoader(tile, source, load_of(source.dtype, compute)).run(lane0, block0, blocks, target);
}

bool is_direct(const WeightSource& w, Compute compute) {
  return w.packed && !w.transposed && packed_block_k(w.packed_dtype) == block_k(compute);
}

bool wants_many_panels(const WeightSource& w) {
  return !w.packed && BlockLoader::along_lanes(w.source);
}

void Region::prefetch(int64_t part, int64_t parts) const {
  const int64_t lines = (bytes + kLineBytes - 1) / kLineBytes, all = rows * lines;
  const int64_t first = all * part / parts, last = all * (part + 1) / parts;
  if (first >= last) return;
  const char* row = base + first / lines * stride;
  int64_t line = first % lines;
  for (int64_t i = first; i < last; ++i) {
    __builtin_prefetch(row + line * kLineBytes, 0, 2);
    if (++line == lines) {
      line = 0;
      row += stride;
    }
  }
}

Region chunk_region(const WeightSource& w, Compute compute, const Chunk& chunk) {
  const int64_t values = chunk.blocks * block_k(compute);  // along k
  if (w.packed) {
    const int64_t per_block = packed_block_k(w.packed_dtype);
    if (!w.transposed)
      return {packed_block(w, chunk.panel, chunk.block0 * block_k(compute) / per_block), 1, 0,
              values / per_block * kBlockBytes};
    const int64_t across = kPanelColumns / per_block;  // blocks of W as wide as our panel
    const char* const base =
        packed_block(w, chunk.block0 * block_k(compute) / kPanelColumns, chunk.panel * across);
    return {base, values / kPanelColumns, blocks_of(w.packed_k, per_block) * kBlockBytes,
            across * kBlockBytes};
  }
  const PanelSource& s = w.source;
  const int64_t size = dtype_bytes(s.dtype), lane0 = chunk.panel * kPanelColumns;
  const int64_t k0 = chunk.block0 * block_k(compute);
  const int64_t lanes = std::min(chunk.panels * int64_t(kPanelColumns), s.lanes - lane0);
  if (s.k_gather || s.lane_gather) return {};
  const char* const base =
      static_cast<const char*>(s.data) + (lane0 * s.lane_stride + k0 * s.k_stride) * size;
  if (s.k_stride == 1)
    return {base, lanes, s.lane_stride * size, std::min(values, s.k - k0) * size};
  return {base, std::min(values, s.k - k0), s.k_stride * size, lanes * s.lane_stride * size};
}

const void* load_chunk(const TileKernels& tile, const WeightSource& w, Compute compute,
                       const Chunk& chunk, void* scratch, const Region& next) {
  if (is_direct(w, compute)) return packed_block(w, chunk.panel, chunk.block0);
  char* const to = static_cast<char*>(scratch);
  if (!w.packed)
    BlockLoader(tile, w.source, load_of(w.source.dtype, compute))
        .run(chunk.panel * kPanelColumns, chunk.block0, chunk.blocks,
             panel_target(to, chunk.panels, chunk.blocks), next);
  else if (!w.transposed)
    expand(tile, w, chunk, to, next);
  else if (w.packed_dtype == MOEC_F32)
    turn_f32(tile, w, chunk, to, next);
  else
    turn_16(tile, w, compute, chunk, to, next);
  return scratch;
}

int64_t packed_matrix_bytes(moec_dtype dtype, int64_t n, int64_t k) {
  return blocks_of(n, kPanelColumns) * blocks_of(k, packed_block_k(dtype)) * kBlockBytes;
}

// Panels [first, last) of one matrix, to where they lie in its packed form.
static void pack_panels(const MatrixView& matrix, int64_t n, int64_t k, int64_t first, int64_t last,
                        void* to) {
  const int64_t blocks = blocks_of(k, packed_block_k(matrix.dtype));
  const PanelSource source{
      matrix.data, matrix.dtype, matrix.row_stride, matrix.col_stride, nullptr, nullptr, n, k};
  const Load load = matrix.dtype == MOEC_F32 ? Load::kF32 : Load::kPairs;
  const BlockLoader loader(tile_kernels(), source, load);
  for (int64_t panel = first; panel < last; ++panel)
    loader.run(panel * kPanelColumns, 0, int(blocks),
               panel_target(static_cast<char*>(to) + panel * blocks * kBlockBytes, 1, int(blocks)));
}

void pack_matrix(const MatrixView& matrix, int64_t n, int64_t k, void* to) {
  pack_panels(matrix, n, k, 0, blocks_of(n, kPanelColumns), to);
}

void pack_experts(const ThreadPool& pool, const ExpertMatrix& matrix, int64_t first, int64_t count,
                  int64_t n, int64_t k, void* to, int64_t stride) {
  constexpr int64_t kPanels = 8;  // of one task, so that few experts, too, keep all threads busy
  const int64_t panels = blocks_of(n, kPanelColumns), tasks = blocks_of(panels, kPanels);
  pool.parallel_for(count * tasks, [&](int32_t, int64_t i) {
    const int64_t e = i / tasks, panel = i % tasks * kPanels;
    pack_panels(matrix.expert(first + e), n, k, panel, std::min(panels, panel + kPanels),
                static_cast<char*>(to) + e * stride);
  });
}

}  // namespace moec::cpu
// NOLINTEND(bugprone-implicit-widening-of-multiplication-result)
