// SPDX-License-Identifier: Apache-2.0
// Epilogues that hold nothing of a finished tile: it leaves before the next one is multiplied. For
// kernels whose registers decode, and whose stages fill meanwhile. A block leaves in two parts: the
// rows that the staging buffer holds, then the others. Groups as in epilogue_alternating.cuh.
#pragma once

#include "backend/cuda/sm90/epilogue.cuh"

namespace moec::cuda {

template <int kRows = kMaxTileN>
class AtOnce {
 public:
  static constexpr bool kSkipsOutside = true, kBiased = true;
  static constexpr int kMaxRows = kRows, kStages = 4, kPieces = 1;
  static constexpr int kBufferRows = kRows < 96 ? kRows : 96,
                       kStagingBytes = kBlockStaging<kBufferRows>;

  static __device__ bool find_rows(const RowGemmParams&, int i, RowTile& tile) {
    return find_buffered<kBufferRows>(i, tile);
  }
  template <typename G>
  __device__ void copy_piece(const RowGemmParams&, const G&, int) const {}

 protected:
  // A block of 64 features; slice(s, packed) gives 16 rows of it.
  template <int kColumns, typename G, typename Slice>
  static __device__ __forceinline__ void leave(const G& group, int rows, const Slice& slice) {
    constexpr int kSlices = kColumns / 16, kFirst = kSlices < kBuffer ? kSlices : kBuffer;
    leave_slices<kFirst>(group, rows, slice);
    if constexpr (kSlices > kFirst) {
      if (rows <= kBufferRows) return;
      leave_slices<kSlices - kFirst>(group, rows - kBufferRows, [&](int s, uint32_t (&packed)[4]) {
        slice(kFirst + s, packed);
      });
    }
  }
  template <typename Element, typename G, int kRegisters>
  static __device__ __forceinline__ void leave_block(const G& group, int rows,
                                                     const float (&acc)[kRegisters]) {
    leave<2 * kRegisters>(
        group, rows, [&](int s, uint32_t (&packed)[4]) { pack_slice<Element>(acc, s, packed); });
  }

 private:
  static constexpr int kBuffer = kBufferRows / 16;  // slices
  template <int kSlices, typename G, typename Slice>
  static __device__ __forceinline__ void leave_slices(const G& group, int rows, Slice slice) {
    PieceBarriers(group.index).wait_free();
    stage<kSlices>(group, group.staging, 0, rows, slice);
    PieceBarriers(group.index).staged();
  }
};

template <typename Element, int kRows = kMaxTileN>
class StoreRowsAtOnce : public AtOnce<kRows> {
 public:
  static constexpr bool kGated = false;
  static constexpr int kSends = 4;

  static __device__ Piece piece(const RowGemmParams& p, const RowTile& tile, int group, int i) {
    return rows_piece(p, tile, group, i);
  }
  template <typename G, int kColumns>
  __device__ void finish(const RowGemmParams&, const RowTile& tile, const G& group,
                         const TileAccumulators<kColumns>& acc) {
    this->template leave_block<Element>(group, tile.rows, acc.first);
    this->template leave_block<Element>(group, tile.rows, acc.second);
  }
};

// kKeeps: pre-activations, too, in front of the activations, where they are asked for. Groups that
// meet have a kernel without for where they are not.
template <typename Element, typename Activation, bool kKeeps, int kRows = kMaxTileN>
class StoreActivatedAtOnce : public AtOnce<kRows> {
 public:
  static constexpr bool kGated = true;
  static constexpr int kSends = kKeeps ? 6 : 2;

  static __device__ bool find_rows(const RowGemmParams& p, int i, RowTile& tile) {
    return !(is_pre(i) && !p.pre) && AtOnce<kRows>::find_rows(p, i, tile);
  }
  static __device__ Piece piece(const RowGemmParams& p, const RowTile& tile, int group, int i) {
    return is_pre(i) ? pre_piece(p, tile, group, i / 2) : activations_piece(p, tile, group);
  }
  template <typename G, int kColumns>
  __device__ void finish(const RowGemmParams& p, const RowTile& tile, const G& group,
                         TileAccumulators<kColumns>& acc) {
    const auto meet = [&](int s) { group.meet(acc.first + 8 * s, acc.second + 8 * s); };
    if (kKeeps && p.pre) {
      this->template leave<kColumns>(group, tile.rows, [&](int s, uint32_t (&packed)[4]) {
        meet(s);
        pack_slice<Element>(acc.first, s, packed);
      });
      this->template leave_block<Element>(group, tile.rows, acc.second);
    }
    this->template leave<kColumns>(group, tile.rows, [&](int s, uint32_t (&packed)[4]) {
      if constexpr (!kKeeps) meet(s);
      activate_slice<Element>(Activation{p.form}, acc.first + 8 * s, acc.second + 8 * s, packed);
    });
  }

 private:
  static __device__ constexpr bool is_pre(int i) { return kKeeps && i < 4; }
};

}  // namespace moec::cuda
