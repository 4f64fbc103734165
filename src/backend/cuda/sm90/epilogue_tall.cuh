// SPDX-License-Identifier: Apache-2.0
// Tiles of up to 144 rows, where nothing leaves at once. Two accumulators of so many take 144
// registers of a thread, which leaves room to hold a finished tile of one block of 64 features, or
// of two where rows are not gathered, while the next one is multiplied. A block leaves in thirds of
// 48 rows: two of them fill the staging buffer, the last one goes by itself.
#pragma once

#include "backend/cuda/sm90/epilogue.cuh"

namespace moec::cuda {

class TallTile {
 public:
  static constexpr bool kSkipsOutside = true, kBiased = true;
  static constexpr int kMaxRows = kTallTileN, kStages = 4;
  static constexpr int kBufferRows = 96, kStagingBytes = kBlockStaging<kBufferRows>;

  static __device__ bool find_rows(const RowGemmParams&, int i, RowTile& tile) {
    return find_buffered<kBufferRows>(i, tile);
  }

 protected:
  static constexpr int kThirds = 3, kSlices = 3;  // of a block; of 16 rows, in a third
  static constexpr int kBlockSlices = kThirds * kSlices;

  // slice(s, packed) gives slice s of the third.
  template <typename Slice>
  __device__ __forceinline__ void copy_third(int third, const Group& group, Slice slice) const {
    const int begin = third == 1 ? kSlices : 0;  // in the buffer
    const int rows = rows_ - (third == 2 ? kBufferRows : 0);
    if (third == 2 && rows <= 0) return;
    if (begin == 0) PieceBarriers(group.index).wait_free();
    stage<kSlices>(group, group.staging, begin, rows, slice);
    if (third > 0) PieceBarriers(group.index).staged();
  }

  int rows_;
};

// ---- plain: down, gradient of the up projection -------------------------------------------------
template <typename Element>
class StoreRows : public TallTile {
 public:
  static constexpr bool kGated = false;
  static constexpr int kPieces = 2 * kThirds, kSends = 4;

  static __device__ Piece piece(const RowGemmParams& p, const RowTile& tile, int group, int i) {
    return rows_piece(p, tile, group, i);
  }
  __device__ void copy_piece(const RowGemmParams&, const Group& group, int i) const {
#pragma unroll
    for (int piece = 0; piece < kPieces; ++piece) {
      if (piece != i) continue;
      copy_third(piece % kThirds, group, [&](int s, uint32_t (&packed)[4]) {
#pragma unroll
        for (int j = 0; j < 4; ++j) packed[j] = held_[kSlices * piece + s][j];
      });
    }
  }
  __device__ void finish(const RowGemmParams&, const RowTile& tile, const Group&,
                         const TileAccumulators<kMaxRows>& acc) {
#pragma unroll
    for (int s = 0; s < kBlockSlices; ++s) {
      pack_slice<Element>(acc.first, s, held_[s]);
      pack_slice<Element>(acc.second, s, held_[kBlockSlices + s]);
    }
    rows_ = tile.rows;
  }

 private:
  uint32_t held_[2 * kBlockSlices][4];
};

// ---- gated: up, without pre-activations ---------------------------------------------------------
// There are registers left to hold the first slice as accumulators, which is activated behind the
// next tile.
template <typename Element, typename Activation>
class StoreActivated : public TallTile {
 public:
  static constexpr bool kGated = true;
  static constexpr int kPieces = kThirds, kSends = 2;

  static __device__ Piece piece(const RowGemmParams& p, const RowTile& tile, int group, int) {
    return activations_piece(p, tile, group);
  }
  __device__ void copy_piece(const RowGemmParams& p, const Group& group, int i) const {
#pragma unroll
    for (int piece = 0; piece < kPieces; ++piece) {
      if (piece != i) continue;
      copy_third(piece, group, [&](int s, uint32_t (&packed)[4]) {
        if (piece == 0 && s == 0) return activate_first(p, packed);
#pragma unroll
        for (int j = 0; j < 4; ++j) packed[j] = held_[kSlices * piece + s - 1][j];
      });
    }
  }
  __device__ void finish(const RowGemmParams& p, const RowTile& tile, const Group&,
                         const TileAccumulators<kMaxRows>& acc) {
    const Activation activation{p.form};
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      gate_[j] = acc.first[j];
      up_[j] = acc.second[j];
    }
#pragma unroll
    for (int s = 1; s < kBlockSlices; ++s) {
      if (s % kSlices == 0 && 16 * s >= tile.rows) break;  // each slice would cost more branches
      activate_slice<Element>(activation, acc.first + 8 * s, acc.second + 8 * s, held_[s - 1]);
    }
    rows_ = tile.rows;
  }

 private:
  __device__ void activate_first(const RowGemmParams& p, uint32_t (&packed)[4]) const {
    float gate[8], up[8];
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      gate[j] = gate_[j];
      up[j] = up_[j];
      // Or parts of the activation are computed early and held as well.
      asm volatile("" : "+f"(gate[j]), "+f"(up[j]));
    }
    activate_slice<Element>(Activation{p.form}, gate, up, packed);
  }

  float gate_[8], up_[8];
  uint32_t held_[kBlockSlices - 1][4];
};

}  // namespace moec::cuda
