// SPDX-License-Identifier: Apache-2.0
// What happens to the accumulators of a row tile. They are transposed (features x rows), so every
// block of 64 features goes through a staging buffer [rows][64] to leave as full 128-byte lines.
// Rows past the tile's end are computed from zeros or from what the stage held, and never stored.
#pragma once

#include "backend/cuda/device/element.cuh"
#include "backend/cuda/sm90/piece_barriers.cuh"
#include "backend/cuda/sm90/row_gemm.h"
#include "backend/cuda/sm90/tile_mma.cuh"

namespace moec::cuda {

template <int kRows>
constexpr int kBlockStaging = kRows * 128;  // bytes of one staged block of 64 features

// Where the features of a tile begin, those of a consumer group's first block, and where the tile
// or the matrix ends.
__device__ __forceinline__ int first_feature(const RowGemmParams& p, int feature_tile) {
  return kBlockFeatures * (feature_tile * p.tile_blocks + min(feature_tile, p.wider_tiles));
}
__device__ __forceinline__ int group_feature(const RowGemmParams& p, const RowTile& tile,
                                             int group) {
  return first_feature(p, tile.feature_tile) + kBlockFeatures * group;
}
__device__ __forceinline__ int feature_end(const RowGemmParams& p, const RowTile& tile) {
  return min(p.features, first_feature(p, tile.feature_tile + 1));
}

// The part of one consumer warpgroup.
struct GroupBase {
  int index;         // 0 or 1
  int thread;        // 0..127
  uint32_t staging;  // of this group
};
// What the accumulators of a thread are of: features t / 4 % 8 and 8 more of its warp's 16, of two
// blocks: of gate and up where the result is gated.
struct Group : GroupBase {
  static constexpr int kNextFeature = 8;
  // Whose bias, and how far behind the group's first feature.
  template <bool kGated>
  __device__ int2 bias_of(int block) const {
    const int mine = (thread >> 5) * 16 + (thread & 31) / 4;
    return {kGated * block, mine + !kGated * block * 128};
  }
  __device__ void meet(float*, float*) const {}
  __device__ void sort(uint32_t (&)[4]) const {}
  // Where this lane's row of the 8x8 matrices of 16-row slice `slice` lies.
  __device__ uint32_t matrix_row(uint32_t buffer, int slice) const {
    const int lane = thread & 31, warp = thread >> 5;
    return buffer + swizzled(16 * slice + (lane >> 4) * 8 + (lane & 7), 2 * warp + (lane >> 3 & 1));
  }
};

// The 8 accumulators of slice s are (rows 0..7, features 0..7), (rows 0..7, features 8..15), then
// rows 8..15: four 8x8 matrices of two registers each.
template <typename Element, int kRegisters>
__device__ __forceinline__ void pack_slice(const float (&acc)[kRegisters], int s,
                                           uint32_t (&packed)[4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) packed[i] = pack<Element>(acc[8 * s + 2 * i], acc[8 * s + 2 * i + 1]);
}

// acc: of a feature and of the one `next` behind it.
template <typename Element, int kRegisters>
__device__ __forceinline__ void add_bias(const ExpertBias& bias, int expert, int features,
                                         int feature, int next, float (&acc)[kRegisters]) {
  const auto load = [&](int f) {
    if (f >= features) return 0.0f;
    const int64_t at = expert * bias.expert_stride + f * bias.stride;
    return bias.f32 ? static_cast<const float*>(bias.base)[at]
                    : float(static_cast<const Element*>(bias.base)[at]);
  };
  const float low = load(feature), high = load(feature + next);
#pragma unroll
  for (int i = 0; i < kRegisters; ++i) acc[i] += i / 2 % 2 ? high : low;
}
template <typename Element, bool kGated, typename G, int kColumns>
__device__ __forceinline__ void add_biases(const RowGemmParams& p, const RowTile& tile,
                                           const G& group, TileAccumulators<kColumns>& acc) {
  if (!p.bias[0].base) return;
  const int begin = group_feature(p, tile, group.index);
  const int2 first = group.template bias_of<kGated>(0), second = group.template bias_of<kGated>(1);
  add_bias<Element>(p.bias[first.x], tile.expert, p.features, begin + first.y, G::kNextFeature,
                    acc.first);
  add_bias<Element>(p.bias[second.x], tile.expert, p.features, begin + second.y, G::kNextFeature,
                    acc.second);
}

// Sums of features outside of the matrix are 0 of plain weights, any number of codes. They are
// never stored, but two features share a reciprocal (activation.cuh).
template <typename G, int kColumns>
__device__ __forceinline__ void clear_outside(const RowGemmParams& p, const RowTile& tile,
                                              const G& group, TileAccumulators<kColumns>& acc) {
  const int begin = group_feature(p, tile, group.index);
  if (begin + kBlockFeatures <= p.features) return;
  const auto clear = [&](int block, auto& values) {
    const int feature = begin + group.template bias_of<true>(block).y;
#pragma unroll
    for (int i = 0; i < kColumns / 2; ++i)
      if (feature + i / 2 % 2 * G::kNextFeature >= p.features) values[i] = 0;
  };
  clear(0, acc.first);
  clear(1, acc.second);
}

// A [P, parts, features] result in memory.
struct RowOutput {
  const RowMaps& maps;
  void* base;
  int64_t stride_bytes, part_bytes;
  int features;
};

// kSlices slices of 16 rows -> a staging buffer of `rows` rows, at slice `begin` and behind it;
// slice(s, packed) gives the s-th of them.
template <int kSlices, typename G, typename Slice>
__device__ __forceinline__ void stage(const G& group, uint32_t buffer, int begin, int rows,
                                      Slice slice) {
#pragma unroll
  for (int s = 0; s < kSlices; ++s) {
    if (16 * (begin + s) < rows) {
      uint32_t packed[4];
      slice(s, packed);
      group.sort(packed);
      ptx::store_matrix_transposed(group.matrix_row(buffer, begin + s), packed[0], packed[1],
                                   packed[2], packed[3]);
    }
  }
}

// Where a piece goes: 64 features of one part of a result.
struct Piece {
  RowOutput out;
  int part, feature;
};

// The rows of what is sent i-th: of each block first kBufferRows, then those left, if any.
template <int kBufferRows>
__device__ __forceinline__ bool find_buffered(int i, RowTile& tile) {
  if (i % 2 == 0) {
    tile.rows = min(tile.rows, kBufferRows);
  } else {
    tile.row_begin += kBufferRows;
    tile.rows -= kBufferRows;
  }
  return tile.rows > 0;
}

// Staged rows of a piece -> memory, by one warp. Whole units of 16 rows go by bulk copies, which
// are still reading the buffer when this returns; the rows of a last, partial unit go by ordinary
// stores.
__device__ __forceinline__ void send(uint32_t buffer, const Piece& piece, const RowTile& tile) {
  const RowOutput& out = piece.out;
  const int whole = tile.rows / kRowUnit, lane = threadIdx.x & 31;
  ptx::fence_proxy_async();
  if (ptx::elect_one()) {
    if (piece.feature < out.features && whole > 0) {
      ptx::tensor_store(&out.maps.of_units[whole - 1], buffer,
                        {piece.feature, piece.part, tile.row_begin});
    }
    ptx::bulk_commit();
  }
  const int chunk = lane & 7, feature = piece.feature + chunk * 8;
  if (feature >= out.features) return;
  char* const to = static_cast<char*>(out.base) + tile.row_begin * out.stride_bytes +
                   piece.part * out.part_bytes + feature * 2;
#pragma unroll 1
  for (int row = whole * kRowUnit + lane / 8; row < tile.rows; row += 4) {
    ptx::global_store(to + row * out.stride_bytes, ptx::shared_load(buffer + swizzled(row, chunk)));
  }
}

// All pieces of both groups, in the order in which the groups stage them. A buffer is given back as
// soon as it has been read: to wait for the other group's next piece would be a deadlock, as that
// group may need k-blocks for which this one is waited for.
template <typename Epilogue>
__device__ __forceinline__ void send_pieces(const RowGemmParams& p, TileQueue& queue,
                                            uint32_t staging) {
  for (int group = 0; group < 2; ++group) PieceBarriers(group).free();
  RowTile tile;
  while (queue.take(tile)) {
#pragma unroll 1
    for (int i = 0; i < 2 * Epilogue::kSends; ++i) {
      const int group = i & 1;
      if (Epilogue::kSkipsOutside && group_feature(p, tile, group) >= feature_end(p, tile))
        continue;
      RowTile staged = tile;
      if (!Epilogue::find_rows(p, i / 2, staged)) continue;
      PieceBarriers(group).wait_staged();
      send(staging + group * Epilogue::kStagingBytes, Epilogue::piece(p, tile, group, i / 2),
           staged);
      if (ptx::elect_one()) ptx::bulk_wait_read<0>();
      __syncwarp();
      PieceBarriers(group).free();
    }
    if (Epilogue::kGated && p.done && tile.feature_tile < p.feature_tiles) {
      if (ptx::elect_one()) ptx::bulk_wait();
      __syncwarp();
      if (ptx::elect_one()) ptx::add_release(p.done + tile.expert, unsigned(tile.rows));
    }
  }
}

// ---- results that wait --------------------------------------------------------------------------
// A finished block of 64 features is packed into registers and copied out while the tensor cores
// work on the next tile: in kCopySteps steps, none of which takes longer than the products that are
// queued before it. A warp of its own sends it.
constexpr int kCopySteps = 2;
constexpr int kPackedBlock = kMaxTileN / 4;  // registers of a packed block
using PackedBlock = uint32_t[kPackedBlock];

template <typename Element>
__device__ __forceinline__ void pack_block(PackedBlock& packed, const float (&acc)[kMaxTileN / 2]) {
#pragma unroll
  for (int i = 0; i < kPackedBlock; ++i) packed[i] = pack<Element>(acc[2 * i], acc[2 * i + 1]);
}

// A step of: registers to the one staging buffer of the group; slice(s, packed) gives 16 rows.
template <typename G, typename Slice>
__device__ __forceinline__ void copy_slices(int step, const G& group, int rows, Slice slice) {
  constexpr int kSlices = kMaxTileN / 16 / kCopySteps;
  const auto copy = [&](int begin) {
    stage<kSlices>(group, group.staging, begin, rows,
                   [&](int s, uint32_t (&packed)[4]) { slice(begin + s, packed); });
  };
  if (step == 0) {
    PieceBarriers(group.index).wait_free();
    copy(0);
  } else {
    copy(kSlices);
    PieceBarriers(group.index).staged();
  }
}
template <typename G>
__device__ __forceinline__ void copy_out(int step, const G& group, int rows,
                                         const PackedBlock& block) {
  copy_slices(step, group, rows, [&](int s, uint32_t (&packed)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) packed[i] = block[4 * s + i];
  });
}

// ---- plain: down, gradient of the up projection -------------------------------------------------
// Each of two blocks is sent in two parts.
__device__ __forceinline__ Piece rows_piece(const RowGemmParams& p, const RowTile& tile, int group,
                                            int i) {
  return {{p.out_maps, p.out, p.out_stride * 2, 0, feature_end(p, tile)},
          0,
          group_feature(p, tile, group) + 128 * (i / 2)};
}

// ---- gated: up ----------------------------------------------------------------------------------
__device__ __forceinline__ Piece activations_piece(const RowGemmParams& p, const RowTile& tile,
                                                   int group) {
  return {{p.out_maps, p.out, p.out_stride * 2, 0, p.features}, 0, group_feature(p, tile, group)};
}

// Of gate, then of up.
__device__ __forceinline__ Piece pre_piece(const RowGemmParams& p, const RowTile& tile, int group,
                                           int part) {
  return {{p.pre_maps, p.pre, p.features * 4LL, p.features * 2LL, p.features},
          part,
          group_feature(p, tile, group)};
}

// A slice of 16 rows: 8 accumulators of gate and of up.
template <typename Element, typename Activation>
__device__ __forceinline__ void activate_slice(const Activation& activation, const float* gate,
                                               const float* up, uint32_t* packed) {
#pragma unroll
  for (int i = 0; i < 4; i += 2) {  // two features of one row, then of the next
    const auto of_row = [&](int at) {
      return activation.values({gate[at], gate[at + 2]}, {up[at], up[at + 2]});
    };
    const float2 even = of_row(2 * i), odd = of_row(2 * i + 1);
    packed[i] = pack<Element>(even.x, odd.x);
    packed[i + 1] = pack<Element>(even.y, odd.y);
  }
}

// With pre-activations, of which those of gate leave at once, while the activations are computed.
template <typename Element, typename Activation>
class StoreActivatedAndPre {
 public:
  static constexpr bool kGated = true, kSkipsOutside = true, kBiased = true;
  static constexpr int kMaxRows = kMaxTileN, kStages = 4, kSends = 3, kPieces = 2 * kCopySteps;
  static constexpr int kStagingBytes = kBlockStaging<kMaxRows>;

  static __device__ Piece piece(const RowGemmParams& p, const RowTile& tile, int group, int i) {
    return i < 2 ? pre_piece(p, tile, group, i) : activations_piece(p, tile, group);
  }
  static __device__ bool find_rows(const RowGemmParams&, int, RowTile&) { return true; }
  template <typename G>
  __device__ void copy_piece(const RowGemmParams&, const G& group, int i) const {
    if (i < kCopySteps) {
      copy_out(i, group, rows_, up_);
    } else {
      copy_out(i % kCopySteps, group, rows_, value_);
    }
  }
  template <typename G>
  __device__ void finish(const RowGemmParams& p, const RowTile& tile, const G& group,
                         Accumulators& acc) {
    PieceBarriers(group.index).wait_free();
    stage<kMaxTileN / 16>(group, group.staging, 0, tile.rows, [&](int s, uint32_t (&packed)[4]) {
      group.meet(acc.first + 8 * s, acc.second + 8 * s);
      pack_slice<Element>(acc.first, s, packed);
    });
    PieceBarriers(group.index).staged();
    pack_block<Element>(up_, acc.second);
    const Activation activation{p.form};
#pragma unroll
    for (int s = 0; s < kMaxTileN / 16; ++s) {
      activate_slice<Element>(activation, acc.first + 8 * s, acc.second + 8 * s, value_ + 4 * s);
    }
    rows_ = tile.rows;
  }

 private:
  PackedBlock up_, value_;
  int rows_;
};

}  // namespace moec::cuda
