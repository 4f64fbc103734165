// SPDX-License-Identifier: Apache-2.0
// Values of a PanelSource into the tiles of panels, by the loads of an instruction set.
#pragma once

#include <algorithm>
#include <cstring>
#include <utility>

#include "backend/cpu/coded_lines.h"
#include "backend/cpu/pack.h"
#include "core/dtype.h"

// Offsets within a block are small:
// NOLINTBEGIN(bugprone-implicit-widening-of-multiplication-result)
namespace moec::cpu {

inline constexpr int kMaxBlockK = 32;

// From `stored` to steps of values of type `dtype`: the same, or fp32 that is rounded.
inline Load load_of(moec_dtype stored, moec_dtype dtype, Compute compute) {
  const bool rounds = stored != dtype;
  if (compute == Compute::kBf16) return rounds ? Load::kF32ToPairs : Load::kPairs;
  if (!rounds) return plain_load(dtype);
  return dtype == MOEC_BF16 ? Load::kF32AsBf16 : Load::kF32AsF16;
}
// Of a source: codes are decoded to values of its type first.
inline Load load_of(const PanelSource& source, Compute compute) {
  return load_of(source.is_coded() ? source.dtype : source.stored(), source.dtype, compute);
}

inline const char* line_of(const PanelSource& s, int64_t index, int64_t stride,
                           const int32_t* gather) {
  const int64_t at = gather ? gather[index] : index;
  if (at < 0) return nullptr;
  return static_cast<const char*>(s.data) + at * stride * dtype_bytes(s.stored());
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
inline Target panel_target(void* to, int panels, int blocks) {
  return {static_cast<char*>(to), int64_t(blocks) * kBlockBytes,
          kBlockBytes / 2,        kBlockBytes,
          panels * kPanelColumns, false};
}

class BlockLoader {
 public:
  BlockLoader(const TileKernels& tile, const PanelSource& source, Load load)
      : tile_(tile), source_(source), load_(load), per_block_(makes_pairs(load) ? 32 : 16) {}

  void run(int64_t lane0, int64_t block0, int blocks, const Target& target,
           const Region& next = {}) const {
    const int tiles = (target.lanes + kLanes - 1) / kLanes;
    if (CodedLines lines; source_.is_coded() && has_lines(lines, block0)) {
      if (lines.along_k() == source_.transposed)
        lines_over_k(lines, lane0, block0, blocks, target, next);
      else if (const auto expand = target.is_a ? nullptr : expand_pairs())
        for (int t = 0; t < tiles; t += 2) {
          next.prefetch(t / 2, tiles / 2);
          if (columns_over_lanes(lines, lane0, t, block0, blocks, target)) continue;
          pairs_over_lanes(expand, lines, lane0, t, block0, blocks, target);
        }
      else
        for (int t = 0; t < tiles; ++t) {
          next.prefetch(t, tiles);
          lines_over_lanes(lines, lane0, t, block0, blocks, target);
        }
      return;
    }
    if (source_.is_coded()) {
      for (int b = 0; b < blocks; ++b) {
        next.prefetch(b, blocks);
        for (int t = 0; t < tiles; ++t) decoded(lane0, t, (block0 + b) * per_block_, b, target);
      }
      return;
    }
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

  // ---- codes in lines, whose runs become values of 16 bits
  static constexpr int kMostRun = 512;  // positions
  bool has_lines(CodedLines& lines, int64_t block0) const {
    return block0 * per_block_ % kCodesAlign == 0 && lines.find(source_.coded, source_.dtype);
  }
  void decode(const CodedLines& lines, int64_t line, int64_t first, int64_t count,
              uint16_t* to) const {
    float scales[kMostRun / kCodesAlign + 2], zeros[kMostRun / kCodesAlign + 2];
    const CodedRun run = lines.run(tile_, line, first, count, scales, zeros);
    tile_.decode_run[int(lines.codes())][source_.dtype == MOEC_F16](run, to);
  }
  // A line is a lane: 16 of them for a span of k at a time.
  void lines_over_lanes(const CodedLines& codes, int64_t lane0, int tile, int64_t block0,
                        int blocks, const Target& target) const {
    const int lanes = lanes_at(lane0, tile, target), step = kMostRun / per_block_;
    alignas(kLineBytes) uint16_t values[kLanes][kMostRun];
    const void* lines[kLanes];
    for (int i = 0; i < lanes; ++i) lines[i] = values[i];
    for (int begin = 0; begin < blocks; begin += step) {
      const int end = std::min(blocks, begin + step);
      const int64_t k0 = (block0 + begin) * per_block_;
      const int64_t count =
          std::clamp<int64_t>(source_.k - k0, 0, int64_t(end - begin) * per_block_);
      for (int i = 0; i < lanes && count > 0; ++i)
        decode(codes, lane0 + tile * kLanes + i, k0, count, values[i]);
      for (int b = begin; b < end; ++b)
        put({lines, (b - begin) * int64_t(per_block_), lanes, k_at((block0 + b) * per_block_),
             target.at(tile, b), target.lines_out(tile)},
            target, true);
    }
  }
  // Pairs of 16 bits are turned as dwords, two values at once, and then widened.
  using ExpandFn = void (*)(const void* block, void* to);
  ExpandFn expand_pairs() const {
    return load_ == Load::kBf16ToF32  ? tile_.expand_bf16
           : load_ == Load::kF16ToF32 ? tile_.expand_f16
                                      : nullptr;
  }
  // fp32 of bf16 values, where the instruction set turns codes: no values between.
  bool columns_over_lanes(const CodedLines& codes, int64_t lane0, int tile, int64_t block0,
                          int blocks, const Target& target) const {
    constexpr int kStep = kMostColumnRun / kSteps;
    if (load_ != Load::kBf16ToF32 || !tile_.decode_columns[int(codes.codes())]) return false;
    const int64_t k = std::min(source_.k - block0 * kSteps, blocks * int64_t(kSteps));
    if (!codes.are_columns(k)) return false;
    for (int t = 0; t < 2; ++t)
      for (int begin = 0; begin < blocks; begin += kStep) {
        const int64_t at = int64_t(begin) * kSteps, count = std::min(k - at, kMostColumnRun);
        if (!codes.decode_columns(tile_, lane0 + (tile + t) * kLanes,
                                  lanes_at(lane0, tile + t, target), block0 * kSteps + at, count,
                                  target.at(tile + t, begin), target.block_stride))
          return false;
      }
    return true;
  }
  void pairs_over_lanes(ExpandFn expand, const CodedLines& codes, int64_t lane0, int tile,
                        int64_t block0, int blocks, const Target& target) const {
    constexpr int kRun = 256, kStep = kRun / kSteps;
    alignas(kLineBytes) uint16_t values[kPanelColumns][kRun];
    alignas(kLineBytes) char pairs[kBlockBytes], wide[2 * kBlockBytes];
    const void* lines[kPanelColumns];
    for (int i = 0; i < kPanelColumns; ++i) lines[i] = values[i];
    const int lanes[] = {lanes_at(lane0, tile, target), lanes_at(lane0, tile + 1, target)};
    for (int begin = 0; begin < blocks; begin += kStep) {
      const int end = std::min(blocks, begin + kStep);
      const int64_t k0 = (block0 + begin) * kSteps;
      const int64_t count = std::clamp<int64_t>(source_.k - k0, 0, int64_t(end - begin) * kSteps);
      for (int i = 0; i < lanes[0] + lanes[1] && count > 0; ++i)
        decode(codes, lane0 + tile * kLanes + i, k0, count, values[i]);
      for (int b = begin; b < end; b += 2) {
        const int64_t at = (b - begin) * int64_t(kSteps);
        const int valid = int(std::clamp<int64_t>(count - at, 0, kMaxBlockK));
        for (int t = 0; t < 2; ++t)
          tile_.along_k[int(Load::kPairs)][1](
              {lines + t * kLanes, at, lanes[t], valid, pairs + t * (kBlockBytes / 2), kSteps});
        if (b + 1 < end) {
          expand(pairs, target.at(tile, b));
        } else {
          expand(pairs, wide);
          std::memcpy(target.at(tile, b), wide, kBlockBytes);
        }
      }
    }
  }
  // A line is a k: all lanes of one block at a time.
  void lines_over_k(const CodedLines& codes, int64_t lane0, int64_t block0, int blocks,
                    const Target& target, const Region& next) const {
    alignas(kLineBytes) uint16_t values[kMaxBlockK][kMostRun];
    const void* lines[kMaxBlockK];
    for (int i = 0; i < kMaxBlockK; ++i) lines[i] = values[i];
    const int64_t lanes = std::clamp<int64_t>(source_.lanes - lane0, 0, target.lanes);
    for (int b = 0; b < blocks; ++b) {
      next.prefetch(b, blocks);
      const int64_t k0 = (block0 + b) * per_block_;
      const int count = k_at(k0);
      for (int i = 0; i < count && lanes > 0; ++i) decode(codes, k0 + i, lane0, lanes, values[i]);
      for (int t = 0; t * kLanes < target.lanes; ++t)
        put({lines, t * int64_t(kLanes), count, lanes_at(lane0, t, target), target.at(t, b),
             target.lines_out(t)},
            target, false);
    }
  }

  // Codes become values first, in lines along the direction in which they are contiguous.
  void decoded(int64_t lane0, int tile, int64_t k0, int block, const Target& target) const {
    const bool over_lanes = along_lanes(source_);
    const int lanes = lanes_at(lane0, tile, target), count = k_at(k0);
    const int64_t lane = lane0 + tile * kLanes, row = over_lanes ? kLanes : kMaxBlockK;
    alignas(kLineBytes) char values[kLanes * kMaxBlockK * 4];
    DecodeLines d{&source_.coded,
                  lane,
                  k0,
                  over_lanes,
                  over_lanes ? count : lanes,
                  over_lanes ? lanes : count,
                  values,
                  row};
    if (source_.transposed) {
      std::swap(d.n, d.k);
      d.along_n = !d.along_n;
    }
    tile_.decode[quant::Formats::index(source_.coded.scheme)][int(plain_load(source_.dtype))](d);
    const void* lines[kMaxBlockK];
    for (int i = 0; i < d.lines; ++i) lines[i] = values + i * row * dtype_bytes(source_.dtype);
    put({lines, 0, d.lines, d.count, target.at(tile, block), target.lines_out(tile)}, target,
        !over_lanes);
  }

  // Neither direction is contiguous: collect the values first.
  void scattered(int64_t lane0, int64_t k0, int block, const Target& target) const {
    const auto collect = dtype_bytes(source_.stored()) == 4 ? &BlockLoader::collect<uint32_t>
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

}  // namespace moec::cpu
// NOLINTEND(bugprone-implicit-widening-of-multiplication-result)
