// SPDX-License-Identifier: Apache-2.0
#include "backend/cpu/pack.h"

#include <algorithm>
#include <cstring>

#include "backend/cpu/gemm.h"
#include "backend/cpu/isa.h"
#include "core/dtype.h"

namespace moec::cpu {
namespace {

constexpr int kMaxBlockK = 32;

int64_t blocks_of(int64_t k, int64_t per_block) { return (k + per_block - 1) / per_block; }

Load load_of(moec_dtype dtype, Compute compute) {
  if (compute == Compute::kBf16) return Load::kPairs;
  return dtype == MOEC_F32 ? Load::kF32 : dtype == MOEC_BF16 ? Load::kBf16ToF32 : Load::kF16ToF32;
}

const char* line_of(const PanelSource& s, int64_t index, int64_t stride, const int32_t* gather) {
  const int64_t at = gather ? gather[index] : index;
  if (at < 0) return nullptr;
  return static_cast<const char*>(s.data) + at * stride * dtype_bytes(s.dtype);
}

// Where to put tiles of 16 lanes: tile i at to + i * tile_stride, its next block block_stride further.
struct Target {
  char* to;
  int64_t tile_stride, block_stride;
  int lanes;  // lines written in all (straight), or columns (turned)
  bool is_a;
  int lines_out(int tile) const { return is_a ? std::min(lanes - tile * kLanes, kLanes) : kSteps; }
};

class BlockLoader {
 public:
  BlockLoader(const TileKernels& tile, const PanelSource& source, Load load)
      : tile_(tile), source_(source), load_(load), per_block_(load == Load::kPairs ? 32 : 16) {}

  void run(int64_t lane0, int64_t block0, int blocks, const Target& target) const {
    const bool along_k = source_.k_stride == 1 && !source_.k_gather;
    const bool along_lanes = source_.lane_stride == 1 && !source_.lane_gather;
    for (int t = 0; t * kLanes < target.lanes; ++t) {
      const int64_t lane = lane0 + t * kLanes;
      const int wanted = std::min(target.lanes - t * kLanes, kLanes);
      const int lanes = int(std::clamp<int64_t>(source_.lanes - lane, 0, wanted));
      const void* lines[kLanes];
      if (along_k) lane_lines(lane, lanes, lines);
      for (int b = 0; b < blocks; ++b) {
        const int64_t k0 = (block0 + b) * per_block_;
        const int count = int(std::clamp<int64_t>(source_.k - k0, 0, per_block_));
        char* const to = target.to + t * target.tile_stride + b * target.block_stride;
        if (along_k)
          load_k({lines, k0, lanes, count, to, target.lines_out(t)}, target.is_a);
        else if (along_lanes)
          load_lanes(lane, lanes, k0, count, to, target.lines_out(t), target.is_a);
        else
          load_any(lane, lanes, k0, count, to, target.lines_out(t), target.is_a);
      }
    }
  }

 private:
  void lane_lines(int64_t lane, int lanes, const void** lines) const {
    for (int i = 0; i < lanes; ++i)
      lines[i] = line_of(source_, lane + i, source_.lane_stride, source_.lane_gather);
  }
  void load_k(const LoadBlock& load, bool is_a) const { tile_.along_k[int(load_)][!is_a](load); }

  void load_lanes(int64_t lane, int lanes, int64_t k0, int count, void* to, int out, bool is_a) const {
    const void* lines[kMaxBlockK];
    for (int i = 0; i < count; ++i)
      lines[i] = line_of(source_, k0 + i, source_.k_stride, source_.k_gather);
    tile_.along_lanes[int(load_)][is_a]({lines, lane, count, lanes, to, out});
  }

  // Neither direction is contiguous: collect the values first.
  void load_any(int64_t lane, int lanes, int64_t k0, int count, void* to, int out, bool is_a) const {
    alignas(kLineBytes) char values[kLanes][kMaxBlockK * 4];
    const void* lines[kLanes];
    const int64_t size = dtype_bytes(source_.dtype);
    for (int i = 0; i < lanes; ++i) {
      const char* const line =
          line_of(source_, lane + i, source_.lane_stride, source_.lane_gather);
      lines[i] = line ? values[i] : nullptr;
      for (int j = 0; line && j < count; ++j) {
        const int64_t k = source_.k_gather ? source_.k_gather[k0 + j] : k0 + j;
        if (k < 0)
          std::memset(values[i] + j * size, 0, size_t(size));
        else
          std::memcpy(values[i] + j * size, line + k * source_.k_stride * size, size_t(size));
      }
    }
    load_k({lines, 0, lanes, count, to, out}, is_a);
  }

  const TileKernels& tile_;
  const PanelSource& source_;
  const Load load_;
  const int per_block_;
};

Target panel_target(void* to) {
  return {static_cast<char*>(to), kBlockBytes / 2, kBlockBytes, kPanelColumns, false};
}

// 16-bit packed weights of one panel -> fp32 blocks.
void expand(const TileKernels& tile, const WeightSource& w, int64_t panel, int64_t block0,
            int blocks, char* to) {
  const auto expand_one = w.packed_dtype == MOEC_BF16 ? tile.expand_bf16 : tile.expand_f16;
  for (int b = 0; b < blocks; b += 2)
    expand_one(packed_block(w, panel, (block0 + b) / 2), to + b * kBlockBytes);
}

// B(n, k) = W(k, n) with fp32 W: its blocks hold 16 k (our columns) of 32 n (our k).
void turn_f32(const TileKernels& tile, const WeightSource& w, int64_t panel, int64_t block0,
              int blocks, char* to) {
  const int64_t last = blocks_of(w.packed_k, packed_block_k(MOEC_F32));
  for (int b = 0; b < blocks; ++b)
    for (int t = 0; t < 2; ++t) {
      const int64_t k = block0 + b, from = 2 * panel + t;
      char* const out = to + b * kBlockBytes + t * (kBlockBytes / 2);
      if (from < last)
        tile.transpose(packed_block(w, k / 2, from) + k % 2 * (kBlockBytes / 2), out);
      else
        std::memset(out, 0, kBlockBytes / 2);
    }
}

// The same with 16-bit W: a block is 32 k (our columns) of 32 n (our k), first put back into rows.
void turn_16(const TileKernels& tile, const WeightSource& w, Compute compute, int64_t panel,
             int64_t block0, int blocks, char* to) {
  alignas(kLineBytes) uint16_t rows[kPanelColumns][kMaxBlockK];
  PanelSource source{rows, w.packed_dtype, 1, kMaxBlockK, nullptr, nullptr, kPanelColumns,
                     kPanelColumns};
  const int step = compute == Compute::kBf16 ? 1 : 2;
  const BlockLoader loader(tile, source, load_of(w.packed_dtype, compute));
  for (int b = 0; b < blocks; b += step) {
    const char* const block = packed_block(w, (block0 + b) / step, panel);
    for (int t = 0; t < 2; ++t) tile.transpose(block + t * (kBlockBytes / 2), rows[t * kLanes]);
    loader.run(0, 0, step, panel_target(to + b * kBlockBytes));
  }
}

}  // namespace

const char* packed_block(const WeightSource& w, int64_t panel, int64_t block) {
  const int64_t blocks = blocks_of(w.packed_k, packed_block_k(w.packed_dtype));
  return static_cast<const char*>(w.packed) + (panel * blocks + block) * kBlockBytes;
}

int64_t block_k(Compute compute) { return compute == Compute::kBf16 ? 32 : 16; }
int64_t packed_block_k(moec_dtype dtype) { return dtype == MOEC_F32 ? 16 : 32; }

void load_rows(const TileKernels& tile, const PanelSource& source, Compute compute, int64_t lane0,
               int rows, int64_t block0, int blocks, void* to) {
  const Target target{static_cast<char*>(to), kLanes * kLineBytes, rows * kLineBytes, rows, true};
  BlockLoader(tile, source, load_of(source.dtype, compute)).run(lane0, block0, blocks, target);
}

bool is_direct(const WeightSource& w, Compute compute) {
  return w.packed && !w.transposed && packed_block_k(w.packed_dtype) == block_k(compute);
}

const void* weight_panel(const TileKernels& tile, const WeightSource& w, Compute compute,
                         int64_t panel, int64_t block0, int blocks, void* scratch) {
  if (is_direct(w, compute)) return packed_block(w, panel, block0);
  char* const to = static_cast<char*>(scratch);
  if (!w.packed)
    BlockLoader(tile, w.source, load_of(w.source.dtype, compute))
        .run(panel * kPanelColumns, block0, blocks, panel_target(to));
  else if (!w.transposed)
    expand(tile, w, panel, block0, blocks, to);
  else if (w.packed_dtype == MOEC_F32)
    turn_f32(tile, w, panel, block0, blocks, to);
  else
    turn_16(tile, w, compute, panel, block0, blocks, to);
  return scratch;
}

int64_t packed_matrix_bytes(moec_dtype dtype, int64_t n, int64_t k) {
  return blocks_of(n, kPanelColumns) * blocks_of(k, packed_block_k(dtype)) * kBlockBytes;
}

void pack_matrix(const MatrixView& matrix, int64_t n, int64_t k, void* to) {
  const int64_t blocks = blocks_of(k, packed_block_k(matrix.dtype));
  const PanelSource source{matrix.data, matrix.dtype, matrix.row_stride, matrix.col_stride,
                           nullptr,     nullptr,      n,                 k};
  const Load load = matrix.dtype == MOEC_F32 ? Load::kF32 : Load::kPairs;
  const BlockLoader loader(tile_kernels(), source, load);
  for (int64_t panel = 0; panel * kPanelColumns < n; ++panel)
    loader.run(panel * kPanelColumns, 0, int(blocks),
               panel_target(static_cast<char*>(to) + panel * blocks * kBlockBytes));
}

void pack_experts(const ThreadPool& pool, const ExpertMatrix& matrix, int64_t first, int64_t count,
                  int64_t n, int64_t k, void* to, int64_t stride) {
  pool.parallel_for(count, [&](int32_t, int64_t e) {
    pack_matrix(matrix.expert(first + e), n, k, static_cast<char*>(to) + e * stride);
  });
}

}  // namespace moec::cpu
