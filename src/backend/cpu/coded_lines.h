// SPDX-License-Identifier: Apache-2.0
// Coded matrices whose codes lie in lines, along k or along n, with blocks that begin with the
// lines: those that decode_run and dot_run of tile.h read. Others take the slower `decode`.
#pragma once

#include "backend/cpu/tile.h"

namespace moec::cpu {

class CodedLines {
 public:
  CodedLines() = default;
  // Of values of type `dtype`. False: there are no such lines.
  bool find(const quant::CodedView& matrix, moec_dtype dtype);

  bool along_k() const { return along_k_; }
  LineCodes codes() const { return codes_; }
  const quant::BlockSize& block() const { return block_; }
  // Where the code of a position lies, which is even, and the bytes of some and from line to line.
  const uint8_t* at(int64_t line, int64_t position) const {
    return first_ + line * stride_ + bytes(position);
  }
  int64_t bytes(int64_t positions) const { return are_nibbles(codes_) ? positions / 2 : positions; }
  int64_t stride() const { return stride_; }
  // Kernels of pairs serve them.
  bool have_pairs(const TileKernels& tile) const {
    return tile.pairs && (block_.is_all() || block_.size() >= least_pair_block(codes_));
  }
  // Scales and zero points that a run of `count` positions may need.
  int64_t most_blocks(int64_t count) const {
    return block_.is_all() ? 1 : count / block_.size() + 2;
  }
  // Positions [first, first + count) of a line; its scales and zero points go to `scales` and
  // `zeros`, which hold most_blocks().
  CodedRun run(const TileKernels& tile, int64_t line, int64_t first, int64_t count, float* scales,
               float* zeros) const;
  // The same of lines [line, line + lines), which have room for most_blocks() each. The scales and
  // zero points of a line follow those of the one before by `apart`.
  CodedRun runs(const TileKernels& tile, int64_t line, int lines, int64_t first, int64_t count,
                float* scales, float* zeros, int64_t& apart) const;

  // Lines that decode_columns takes, where it takes such a count of positions.
  bool are_columns(int64_t count) const {
    return along_k_ && !has_zeros_ && count % kCodesAlign == 0 && count > 0;
  }
  // Lines [line, line + columns), which are_columns, to `to`. False: as decode_columns says.
  bool decode_columns(const TileKernels& tile, int64_t line, int columns, int64_t first,
                      int64_t count, char* to, int64_t block_stride) const;

 private:
  struct Scales {
    const void* from;  // null: they are not in memory one after the other
    ScaleType type;
  };
  Scales scales_in_place(int64_t line, int64_t block) const;
  bool are_apart_evenly(int64_t line, int lines) const;  // entries of scales, from line to line
  int64_t blocks_of(int64_t first, int64_t count) const {
    return block_.of(first + count - 1) - block_.of(first) + 1;
  }
  void fill(int64_t line, int64_t block0, int64_t blocks, float* scales, float* zeros) const;
  void find_scales(float least, float most);  // of numbers of these magnitudes
  int64_t n_of(int64_t line, int64_t at) const { return along_k_ ? line : at; }
  int64_t k_of(int64_t line, int64_t at) const { return along_k_ ? at : line; }

  const quant::CodedView* m_ = nullptr;
  bool along_k_ = true, exact_ = false, has_zeros_ = false, plain_scales_ = false;
  LineCodes codes_ = LineCodes::kI8;
  const uint8_t* first_ = nullptr;  // of line 0
  int64_t stride_ = 0;              // bytes
  const float* numbers_ = nullptr;
  float least_scale_ = 1, most_scale_ = 1;
  quant::BlockSize block_;
};

}  // namespace moec::cpu
