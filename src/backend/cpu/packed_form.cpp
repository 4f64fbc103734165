// SPDX-License-Identifier: Apache-2.0
#include "backend/cpu/packed_form.h"

#include <array>
#include <cstring>

#include "backend/cpu/block_loader.h"
#include "backend/cpu/gemm.h"
#include "backend/cpu/isa.h"
#include "core/workspace.h"

// Offsets within a block are small:
// NOLINTBEGIN(bugprone-implicit-widening-of-multiplication-result)
namespace moec::cpu {
namespace {

// Panels that are B panels of tile.h.
class PlainForm : public PackedForm {
 public:
  constexpr PlainForm(int64_t block_k, Load load, Load value)
      : block_k_(block_k), load_(load), value_(value) {}

  int64_t panel_bytes(int64_t k) const final { return div_up(k, block_k_) * kBlockBytes; }
  bool is_direct(const PackedMatrix& m, Compute compute) const final {
    return block_k(compute) == block_k_ && plain_load(m.dtype) == value_;
  }
  Region region(const PackedMatrix& m, Compute compute, const Chunk& chunk) const final {
    const int64_t values = chunk.blocks * block_k(compute), k0 = chunk.block0 * block_k(compute);
    if (!m.transposed)
      return {block(m, chunk.panel, k0 / block_k_), 1, 0, values / block_k_ * kBlockBytes};
    const int64_t across = kPanelColumns / block_k_;  // blocks of W as wide as our panel
    return {block(m, k0 / kPanelColumns, chunk.panel * across), values / kPanelColumns,
            panel_bytes(m.k), across * kBlockBytes};
  }
  void load(const TileKernels& tile, const PackedMatrix& m, Compute compute, const Chunk& chunk,
            char* to, const Region& next) const final {
    if (m.transposed)
      turn(tile, m, compute, chunk, to, next);
    else
      expand(tile, m, compute, chunk, to, next);
  }
  void pack(const ExpertMatrix& matrix, int64_t e, int64_t n, int64_t k, int64_t first,
            int64_t last, char* to) const final {
    const MatrixView view = matrix.expert(e);
    const PanelSource source{
        view.data, view.dtype, view.row_stride, view.col_stride, nullptr, nullptr, n, k};
    const BlockLoader loader(tile_kernels(), source, load_);
    const int blocks = int(div_up(k, block_k_));
    for (int64_t panel = first; panel < last; ++panel)
      loader.run(panel * kPanelColumns, 0, blocks,
                 panel_target(to + panel * blocks * kBlockBytes, 1, blocks));
  }
  void unpack(const char* from, int64_t n, int64_t k, const MatrixView& to) const final {
    const int64_t size = dtype_bytes(to.dtype), per_step = int64_t(sizeof(float)) / size;
    const int64_t blocks = div_up(k, block_k_);
    for (int64_t i = 0; i < n; ++i) {
      const int64_t lane = i % kPanelColumns;
      const char* const panel = from + i / kPanelColumns * blocks * kBlockBytes +
                                lane / kLanes * (kBlockBytes / 2) +
                                lane % kLanes * int64_t(sizeof(float));
      for (int64_t j = 0; j < k; ++j)
        std::memcpy(static_cast<char*>(to.data) + (i * to.row_stride + j * to.col_stride) * size,
                    panel + j / block_k_ * kBlockBytes + j % block_k_ / per_step * kLineBytes +
                        j % per_step * size,
                    size_t(size));
    }
  }

 protected:
  const char* block(const PackedMatrix& m, int64_t panel, int64_t index) const {
    return m.data + (panel * div_up(m.k, block_k_) + index) * kBlockBytes;
  }
  virtual void expand(const TileKernels& tile, const PackedMatrix& m, Compute compute,
                      const Chunk& chunk, char* to, const Region& next) const = 0;
  virtual void turn(const TileKernels& tile, const PackedMatrix& m, Compute compute,
                    const Chunk& chunk, char* to, const Region& next) const = 0;

  const int64_t block_k_;
  const Load load_, value_;  // value_: names the type of what is stored
};

class WideForm final : public PlainForm {
 public:
  constexpr WideForm() : PlainForm(16, Load::kF32, Load::kF32) {}

 private:
  static constexpr int64_t kHalf = kBlockBytes / 2;

  // Only values that are rounded: others are direct. A line of the copy is 16 lanes of one k.
  void expand(const TileKernels& tile, const PackedMatrix& m, Compute compute, const Chunk& chunk,
              char* to, const Region& next) const override {
    const int per = int(block_k(compute) / block_k_);  // blocks of W in one of ours
    const LoadBlockFn put = tile.along_lanes[int(load_of(MOEC_F32, m.dtype, compute))][0];
    const int64_t last = div_up(m.k, block_k_);
    for (int b = 0; b < chunk.blocks; ++b) {
      next.prefetch(b, chunk.blocks);
      const int64_t first = (chunk.block0 + b) * per;
      const int lines = int(std::min<int64_t>(per, last - first) * block_k_);
      for (int t = 0; t < 2; ++t) {
        const void* from[kMaxBlockK];
        for (int i = 0; i < lines; ++i)
          from[i] = block(m, chunk.panel, first + i / kSteps) + t * kHalf + i % kSteps * kLineBytes;
        put({from, 0, lines, kLanes, to + b * kBlockBytes + t * kHalf, kSteps});
      }
    }
  }
  // B(n, k) = W(k, n): blocks of W hold 16 k (our columns) of 32 n (our k), in lines of 16.
  void turn(const TileKernels& tile, const PackedMatrix& m, Compute compute, const Chunk& chunk,
            char* to, const Region& next) const override {
    const int per = int(block_k(compute) / kLanes);  // lines of W in one of our lanes
    const LoadBlockFn put = tile.along_k[int(load_of(MOEC_F32, m.dtype, compute))][1];
    const int64_t last = div_up(m.k, block_k_);
    for (int b = 0; b < chunk.blocks; ++b) {
      next.prefetch(b, chunk.blocks);
      for (int t = 0; t < 2; ++t) {
        const int64_t k = (chunk.block0 + b) * per, from = 2 * chunk.panel + t;
        const auto line = [&](int64_t of_k, int i) {
          return block(m, of_k / 2, from) + of_k % 2 * kHalf + i * kLineBytes;
        };
        alignas(kLineBytes) float rows[kLanes][kMaxBlockK];
        const void* lines[kLanes];
        for (int i = 0; from < last && i < kLanes; ++i) {
          lines[i] = per == 1 ? static_cast<const void*>(line(k, i)) : rows[i];
          for (int j = 0; per > 1 && j < per; ++j)
            std::memcpy(rows[i] + j * kLanes, line(k + j, i), kLineBytes);
        }
        put({lines, 0, from < last ? kLanes : 0, per * kLanes, to + b * kBlockBytes + t * kHalf,
             kLanes});
      }
    }
  }
};

class HalfForm final : public PlainForm {
 public:
  using Expand = void (*TileKernels::*)(const void* block, void* to);
  constexpr HalfForm(Expand expand, Load value)
      : PlainForm(32, Load::kPairs, value), expand_(expand) {}

 private:
  void expand(const TileKernels& tile, const PackedMatrix& m, Compute, const Chunk& chunk, char* to,
              const Region& next) const override {
    for (int b = 0; b < chunk.blocks; b += 2) {
      next.prefetch(b, chunk.blocks + 1);
      next.prefetch(b + 1, chunk.blocks + 1);
      (tile.*expand_)(block(m, chunk.panel, (chunk.block0 + b) / 2), to + b * kBlockBytes);
    }
  }
  // A block of W is 32 k (our columns) of 32 n (our k), first put back into rows.
  void turn(const TileKernels& tile, const PackedMatrix& m, Compute compute, const Chunk& chunk,
            char* to, const Region& next) const override {
    alignas(kLineBytes) uint16_t rows[kPanelColumns][kMaxBlockK];
    const PanelSource source{rows,          m.dtype,      1, kMaxBlockK, nullptr, nullptr,
                             kPanelColumns, kPanelColumns};
    const int step = compute == Compute::kBf16 ? 1 : 2;
    const BlockLoader loader(tile, source, load_of(source, compute));
    for (int b = 0; b < chunk.blocks; b += step) {
      next.prefetch(b / step, (chunk.blocks + step - 1) / step);
      const char* const from = block(m, (chunk.block0 + b) / step, chunk.panel);
      for (int t = 0; t < 2; ++t) tile.transpose(from + t * (kBlockBytes / 2), rows[t * kLanes]);
      loader.run(0, 0, step, panel_target(to + b * kBlockBytes, 1, step));
    }
  }

  const Expand expand_;
};

constexpr WideForm kWide;
constexpr HalfForm kBf16(&TileKernels::expand_bf16, Load::kBf16ToF32),
    kF16(&TileKernels::expand_f16, Load::kF16ToF32);

}  // namespace

const PackedForm& packed_form(const ExpertMatrix& matrix) {
  const PackedForm* const plain[] = {&kWide, &kBf16, &kF16};
  return *plain[int(plain_load(matrix.values.dtype))];
}

int64_t packed_matrix_bytes(const ExpertMatrix& matrix, int64_t n, int64_t k) {
  return div_up(n, kPanelColumns) * packed_form(matrix).panel_bytes(k);
}

void pack_experts(const ThreadPool& pool, const ExpertMatrix& matrix, int64_t first, int64_t count,
                  int64_t n, int64_t k, void* to, int64_t stride) {
  constexpr int64_t kPanels = 8;  // of one task, so that few experts, too, keep all threads busy
  const PackedForm& form = packed_form(matrix);
  const int64_t panels = div_up(n, kPanelColumns), tasks = div_up(panels, kPanels);
  pool.parallel_for(count * tasks, [&](int32_t, int64_t i) {
    const int64_t e = i / tasks, panel = i % tasks * kPanels;
    form.pack(matrix, first + e, n, k, panel, std::min(panels, panel + kPanels),
              static_cast<char*>(to) + e * stride);
  });
}

}  // namespace moec::cpu
// NOLINTEND(bugprone-implicit-widening-of-multiplication-result)
