// SPDX-License-Identifier: Apache-2.0
#include "backend/cpu/pack.h"

#include "backend/cpu/block_loader.h"
#include "backend/cpu/coded_lines.h"
#include "backend/cpu/packed_form.h"

// Offsets within a block are small:
// NOLINTBEGIN(bugprone-implicit-widening-of-multiplication-result)
namespace moec::cpu {

void load_rows(const TileKernels& tile, const PanelSource& source, Compute compute, int64_t lane0,
               int rows, int64_t block0, int blocks, void* to) {
  constexpr int64_t kTile = kLanes * kLineBytes;
  const Target target{static_cast<char*>(to), 2 * kTile, kTile, rows * kLineBytes, rows, true};
  BlockLoader(tile, source, load_of(source, compute)).run(lane0, block0, blocks, target);
}

bool is_direct(const WeightSource& w, Compute compute) {
  return w.packed.data && !w.packed.transposed && w.packed.form->is_direct(w.packed, compute);
}

bool wants_many_panels(const WeightSource& w) {
  return !w.packed.data && BlockLoader::along_lanes(w.source);
}

void Region::prefetch(int64_t part, int64_t parts) const {
  const int64_t lines = (bytes + kLineBytes - 1) / kLineBytes, all = rows * lines;
  const int64_t first = all * part / parts, last = all * (part + 1) / parts;
  if (first >= last) return;
  __asm__ volatile("");  // else gcc finds nothing that a call does, and drops those of this file
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
  if (w.packed.data) return w.packed.form->region(w.packed, compute, chunk);
  const PanelSource& s = w.source;
  const int64_t lane0 = chunk.panel * kPanelColumns, k0 = chunk.block0 * block_k(compute);
  const int64_t lanes = std::min(chunk.panels * int64_t(kPanelColumns), s.lanes - lane0);
  const int64_t values = std::min(chunk.blocks * block_k(compute), s.k - k0);
  if (s.k_gather || s.lane_gather) return {};
  if (CodedLines lines; s.is_coded() && lines.find(s.coded, s.dtype)) {
    const auto region = [&](int64_t line, int64_t count, int64_t from, int64_t positions) {
      return Region{reinterpret_cast<const char*>(lines.at(line, from)), count, lines.stride(),
                    lines.bytes(positions)};
    };
    return lines.along_k() == s.transposed ? region(k0, values, lane0, lanes)
                                           : region(lane0, lanes, k0, values);
  }
  if (s.is_coded() && !quant::is_bytes(*quant::find_format(s.coded.scheme))) return {};
  const int64_t size = dtype_bytes(s.stored());
  const char* const base =
      static_cast<const char*>(s.data) + (lane0 * s.lane_stride + k0 * s.k_stride) * size;
  if (s.k_stride == 1) return {base, lanes, s.lane_stride * size, values * size};
  return {base, values, s.k_stride * size, lanes * s.lane_stride * size};
}

const void* load_chunk(const TileKernels& tile, const WeightSource& w, Compute compute,
                       const Chunk& chunk, void* scratch, const Region& next) {
  if (is_direct(w, compute)) return w.packed.form->region(w.packed, compute, chunk).base;
  char* const to = static_cast<char*>(scratch);
  if (w.packed.data)
    w.packed.form->load(tile, w.packed, compute, chunk, to, next);
  else
    BlockLoader(tile, w.source, load_of(w.source, compute))
        .run(chunk.panel * kPanelColumns, chunk.block0, chunk.blocks,
             panel_target(to, chunk.panels, chunk.blocks), next);
  return scratch;
}

}  // namespace moec::cpu
// NOLINTEND(bugprone-implicit-widening-of-multiplication-result)
