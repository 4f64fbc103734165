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

// Codes of a byte as they are, with the scale and the zero point of each channel beside them. A
// panel is a coded matrix of its own.
class CodedForm final : public PackedForm {
 public:
  constexpr explicit CodedForm(const quant::FormatInfo& info) : info_(info) {}

  int64_t panel_bytes(int64_t k) const override {
    return int64_t(round_up(uint64_t(zeros_at(k) + kPanelColumns * zero_bytes()), kLineBytes));
  }
  bool is_direct(const PackedMatrix&, Compute) const override { return false; }
  Region region(const PackedMatrix& m, Compute compute, const Chunk& chunk) const override {
    const int64_t values = chunk.blocks * block_k(compute), k0 = chunk.block0 * block_k(compute);
    if (!m.transposed)
      return {panel_of(m, chunk.panel) + k0 * line_bytes(), 1, 0,
              std::min(values, m.k - k0) * line_bytes()};
    return {panel_of(m, k0 / kPanelColumns) + chunk.panel * kPanelColumns * line_bytes(),
            div_up(std::min(values, m.n - k0), kPanelColumns), panel_bytes(m.k),
            std::min<int64_t>(kPanelColumns, m.k - chunk.panel * kPanelColumns) * line_bytes()};
  }
  void load(const TileKernels& tile, const PackedMatrix& m, Compute compute, const Chunk& chunk,
            char* to, const Region& next) const override {
    const Load load = load_of(m.dtype, m.dtype, compute);
    if (!m.transposed) {
      const PanelSource source = panel_source(m, chunk.panel);
      BlockLoader(tile, source, load)
          .run(0, chunk.block0, chunk.blocks, panel_target(to, 1, chunk.blocks), next);
      return;
    }
    const int64_t per_panel = kPanelColumns / block_k(compute);  // our blocks in a panel of W
    for (int b = 0; b < chunk.blocks; ++b) {
      next.prefetch(b, chunk.blocks);
      const int64_t block = chunk.block0 + b;
      PanelSource source = panel_source(m, block / per_panel);
      std::swap(source.lane_stride, source.k_stride);
      std::swap(source.lanes, source.k);
      source.transposed = true;
      BlockLoader(tile, source, load)
          .run(chunk.panel * kPanelColumns, block % per_panel, 1,
               panel_target(to + b * kBlockBytes, 1, 1));
    }
  }
  void pack(const ExpertMatrix& matrix, int64_t e, int64_t n, int64_t k, int64_t first,
            int64_t last, char* to) const override {
    const quant::CodedView from = matrix.coded(e);
    for (int64_t panel = first; panel < last; ++panel) {
      char* const out = to + panel * panel_bytes(k);
      std::memset(out, 0, size_t(panel_bytes(k)));
      const int64_t n0 = panel * kPanelColumns, columns = std::min<int64_t>(kPanelColumns, n - n0);
      for (int64_t i = 0; i < k; ++i)
        for (int64_t j = 0; j < columns; ++j)
          copy_entry(from.codes, (n0 + j) * from.row_stride + i * from.col_stride, out,
                     i * kPanelColumns + j, code_bytes());
      float* const scales = reinterpret_cast<float*>(out + scales_at(k));
      for (int64_t j = 0; j < columns; ++j) {
        const int64_t row = from.rows.of(n0 + j);
        scales[j] = load_real(from.scales.data, from.scales.dtype, from.scales.at(row, 0));
        if (from.zeros)
          copy_entry(from.zeros.data, from.zeros.at(row, 0), out + zeros_at(k), j, zero_bytes());
      }
    }
  }

 private:
  static void copy_entry(const void* from, int64_t i, void* to, int64_t j, int64_t bytes) {
    std::memcpy(static_cast<char*>(to) + j * bytes, static_cast<const char*>(from) + i * bytes,
                size_t(bytes));
  }
  int64_t code_bytes() const { return dtype_bytes(*info_.code_dtypes.begin()); }
  moec_dtype zeros_dtype() const {
    return info_.zeros_dtypes.size() ? *info_.zeros_dtypes.begin() : 0;
  }
  int64_t zero_bytes() const { return zeros_dtype() ? dtype_bytes(zeros_dtype()) : 0; }
  int64_t line_bytes() const { return kPanelColumns * code_bytes(); }  // of one k
  int64_t scales_at(int64_t k) const { return div_up(k, kMaxBlockK) * kMaxBlockK * line_bytes(); }
  int64_t zeros_at(int64_t k) const {
    return scales_at(k) + kPanelColumns * int64_t(sizeof(float));
  }
  const char* panel_of(const PackedMatrix& m, int64_t panel) const {
    return m.data + panel * panel_bytes(m.k);
  }
  // Panel `panel` as lanes of B(n, k) = W(n, k).
  PanelSource panel_source(const PackedMatrix& m, int64_t panel) const {
    const char* const data = panel_of(m, panel);
    const quant::BlockSize one, all = quant::BlockSize::all_of(m.k);
    PanelSource source;
    source.data = data;
    source.dtype = m.dtype;
    source.lane_stride = 1;
    source.k_stride = kPanelColumns;
    source.lanes = std::min<int64_t>(kPanelColumns, m.n - panel * kPanelColumns);
    source.k = m.k;
    source.coded.codes = data;
    source.coded.row_stride = 1;
    source.coded.col_stride = kPanelColumns;
    source.coded.scheme = info_.scheme;
    source.coded.scales = {data + scales_at(m.k), 1, 0, one, all, MOEC_F32};
    if (zeros_dtype()) source.coded.zeros = {data + zeros_at(m.k), 1, 0, one, all, zeros_dtype()};
    return source;
  }

  const quant::FormatInfo& info_;
};

constexpr WideForm kWide;
constexpr HalfForm kBf16(&TileKernels::expand_bf16, Load::kBf16ToF32),
    kF16(&TileKernels::expand_f16, Load::kF16ToF32);

template <class Format>
constexpr CodedForm kCoded(Format::kInfo);
template <class... Format>
constexpr std::array<const PackedForm*, sizeof...(Format)> coded_forms(
    quant::FormatList<Format...>) {
  return {&kCoded<Format>...};
}
constexpr auto kCodedForms = coded_forms(quant::ChannelFormats{});  // in the order of the list

}  // namespace

bool has_packed_form(const ExpertMatrix& matrix) {
  return !matrix.is_coded() || (quant::ChannelFormats::index(matrix.scheme) >= 0 &&
                                quant::is_channels(matrix.scales.block_n, matrix.scales.block_k));
}

const PackedForm& packed_form(const ExpertMatrix& matrix) {
  if (matrix.is_coded()) return *kCodedForms[size_t(quant::ChannelFormats::index(matrix.scheme))];
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
