// SPDX-License-Identifier: Apache-2.0
// What happens to the accumulators of a row tile. They are transposed (features x rows), so every
// block of 64 features goes through a staging buffer [rows][64] to leave as full 128-byte lines.
// Rows past the tile's end are computed from zeros or from a neighbour and never stored.
#pragma once

#include "backend/cuda/element.cuh"
#include "backend/cuda/row_gemm.h"
#include "backend/cuda/tile_mma.cuh"

namespace moec::cuda {

template <int kRows>
constexpr int kBlockStaging = kRows * 128;  // bytes of one staged block of 64 features
constexpr int kGroupThreads = 128;

// The part of one consumer warpgroup.
struct GroupBase {
  int index;         // 0 or 1
  int thread;        // 0..127
  uint32_t staging;  // of this group
  bool first_warp;   // known to be uniform

  __device__ void sync() const { ptx::named_barrier(1 + index, kGroupThreads); }
  // The thread that issues bulk copies. All lanes call it.
  __device__ bool leads() const { return first_warp && ptx::elect_one(); }
};
struct Group : GroupBase {
  // Where this lane's row of the 8x8 matrices of 16-row slice `slice` lies.
  __device__ uint32_t matrix_row(uint32_t buffer, int slice) const {
    const int lane = thread & 31, warp = thread >> 5;
    return buffer + swizzled(16 * slice + (lane >> 4) * 8 + (lane & 7), 2 * warp + (lane >> 3 & 1));
  }
};

// The 8 accumulators of slice s are (rows 0..7, features 0..7), (rows 0..7, features 8..15), then
// rows 8..15: four 8x8 matrices of two registers each.
template <typename Element>
__device__ __forceinline__ void pack_slice(const float (&acc)[kMaxTileN / 2], int s,
                                           uint32_t (&packed)[4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) packed[i] = pack<Element>(acc[8 * s + 2 * i], acc[8 * s + 2 * i + 1]);
}

// Thread t's accumulators belong to features t / 4 % 8 and 8 more of its warp's 16.
template <typename Element>
__device__ __forceinline__ void add_bias(const ExpertBias& bias, int expert, int features,
                                         int feature, float (&acc)[kMaxTileN / 2]) {
  const auto load = [&](int f) {
    if (f >= features) return 0.0f;
    const int64_t at = expert * bias.expert_stride + f * bias.stride;
    return bias.f32 ? static_cast<const float*>(bias.base)[at]
                    : float(static_cast<const Element*>(bias.base)[at]);
  };
  const float low = load(feature), high = load(feature + 8);
#pragma unroll
  for (int i = 0; i < kMaxTileN / 2; ++i) acc[i] += i / 2 % 2 ? high : low;
}
template <typename Element, bool kGated>
__device__ __forceinline__ void add_biases(const RowGemmParams& p, const RowTile& tile,
                                           const Group& group, Accumulators& acc) {
  if (!p.bias[0].base) return;
  const int mine = group.index * 64 + (group.thread >> 5) * 16 + (group.thread & 31) / 4;
  const int feature = tile.feature_tile * (kGated ? kTileM / 2 : kTileM) + mine;
  add_bias<Element>(p.bias[0], tile.expert, p.features, feature, acc.first);
  add_bias<Element>(p.bias[kGated], tile.expert, p.features, feature + (kGated ? 0 : 128),
                    acc.second);
}

// A [P, parts, features] result in memory.
struct RowOutput {
  const RowMaps& maps;
  void* base;
  int64_t stride_bytes, part_bytes;
  int features;
};

// Fill a staging buffer of kRows rows; slice(s, packed) gives the 16 rows of slice s.
template <int kRows, int kFirst = 0, int kLast = kRows / 16, typename G, typename Slice>
__device__ __forceinline__ void stage(const G& group, uint32_t buffer, int rows, Slice slice) {
#pragma unroll
  for (int s = kFirst; s < kLast; ++s) {
    if (16 * s < rows) {
      uint32_t packed[4];
      slice(s, packed);
      ptx::store_matrix_transposed(group.matrix_row(buffer, s), packed[0], packed[1], packed[2],
                                   packed[3]);
    }
  }
}
// The same with kRows rows of an accumulator, from slice `first`.
template <typename Element, int kRows, typename G>
__device__ __forceinline__ void stage(const G& group, uint32_t buffer, int rows,
                                      const float (&acc)[kMaxTileN / 2], int first = 0) {
  stage<kRows>(group, buffer, rows,
               [&](int s, uint32_t (&packed)[4]) { pack_slice<Element>(acc, first + s, packed); });
}

// All earlier sends but the last kPending have read their buffers.
template <int kPending>
__device__ __forceinline__ void wait_sent(const GroupBase& group) {
  if (group.leads()) ptx::bulk_wait_read<kPending>();
  group.sync();
}
__device__ __forceinline__ void staged(const GroupBase& group) {
  ptx::fence_proxy_async();
  group.sync();
}

// Staged block -> memory. Whole units of 16 rows go by bulk copies, which are still reading the
// buffer when this returns (and queue behind the loads, so waiting for them is dear: only the next
// tile's epilogue does); the rows of a last, partial unit go by ordinary stores. All threads of the
// group call it, after staged().
__device__ __forceinline__ void send(const GroupBase& group, uint32_t buffer, const RowOutput& out,
                                     int part, int feature, const RowTile& tile) {
  const int whole = tile.rows / kRowUnit;
  if (group.leads()) {
    if (feature < out.features && whole > 0) {
      ptx::tensor_store(&out.maps.of_units[whole - 1], buffer, {feature, part, tile.row_begin});
    }
    ptx::bulk_commit();
  }
  const int chunk = group.thread & 7, row = whole * kRowUnit + (group.thread >> 3);
  if (row < tile.rows && feature + chunk * 8 < out.features) {
    char* const to = static_cast<char*>(out.base) + (tile.row_begin + row) * out.stride_bytes +
                     part * out.part_bytes + (feature + chunk * 8) * 2;
    *reinterpret_cast<uint4*>(to) = ptx::shared_load(buffer + swizzled(row, chunk));
  }
}

// ---- results that wait --------------------------------------------------------------------------
// A finished block of 64 features is packed into registers and copied out while the tensor cores
// work on the next tile: in kCopySteps steps, none of which takes longer than the products that are
// queued before it.
constexpr int kCopySteps = 3;
constexpr int kPackedBlock = kMaxTileN / 4;  // registers of a packed block
using PackedBlock = uint32_t[kPackedBlock];

template <typename Element>
__device__ __forceinline__ void pack_block(PackedBlock& packed, const float (&acc)[kMaxTileN / 2]) {
#pragma unroll
  for (int i = 0; i < kPackedBlock; ++i) packed[i] = pack<Element>(acc[2 * i], acc[2 * i + 1]);
}

template <int kRows, int kFirst = 0, int kLast = kRows / 16, typename G>
__device__ __forceinline__ void stage_packed(const G& group, uint32_t buffer, int rows,
                                             const PackedBlock& packed) {
  stage<kRows, kFirst, kLast>(group, buffer, rows, [&](int s, uint32_t (&slice)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) slice[i] = packed[4 * s + i];
  });
}

// A step of: registers to the one staging buffer of the group, and from there to memory.
template <typename G>
__device__ __forceinline__ void copy_out(int step, const G& group, const PackedBlock& packed,
                                         const RowOutput& out, int part, int feature,
                                         const RowTile& tile) {
  if (step == 0) {
    wait_sent<0>(group);
    stage_packed<kMaxTileN, 0, kMaxTileN / 32>(group, group.staging, tile.rows, packed);
  } else if (step == 1) {
    stage_packed<kMaxTileN, kMaxTileN / 32>(group, group.staging, tile.rows, packed);
  } else {
    staged(group);
    send(group, group.staging, out, part, feature, tile);
  }
}

// ---- plain: down, gradient of the up projection -------------------------------------------------
template <typename Element>
class StoreRows {
 public:
  static constexpr bool kGated = false, kBiased = true;
  static constexpr bool kSkipsOutside = true;
  static constexpr int kMaxRows = kMaxTileN, kStages = 4, kPieces = 2 * kCopySteps;
  static constexpr int kStagingBytes = kBlockStaging<kMaxRows>;

  __device__ void copy_piece(const RowGemmParams& p, const Group& group, int i) const {
    const int feature = tile_.feature_tile * kTileM + group.index * 64;
    const RowOutput out{p.out_maps, p.out, p.out_stride * 2, 0, p.features};
    if (i < kCopySteps) {
      copy_out(i, group, first_, out, 0, feature, tile_);
    } else {
      copy_out(i - kCopySteps, group, second_, out, 0, feature + 128, tile_);
    }
  }
  __device__ void finish(const RowGemmParams&, const RowTile& tile, const Group&,
                         const Accumulators& acc) {
    pack_block<Element>(first_, acc.first);
    pack_block<Element>(second_, acc.second);
    tile_ = tile;
  }

 private:
  PackedBlock first_, second_;
  RowTile tile_;
};

// ---- gated: up ----------------------------------------------------------------------------------
// What is held of a tile of activations and, to keep, of pre-activations: of those gate leaves at
// once, while the activations are computed.
template <bool kKeepsPre>
class HeldActivations {
 public:
  static constexpr bool kGated = true, kSkipsOutside = true;
  static constexpr int kMaxRows = kMaxTileN, kStages = 4,
                       kPieces = (kKeepsPre ? 2 : 1) * kCopySteps;
  static constexpr int kStagingBytes = kBlockStaging<kMaxRows>;

  template <typename G>
  __device__ void copy_piece(const RowGemmParams& p, const G& group, int i) const {
    const RowOutput out{p.out_maps, p.out, p.out_stride * 2, 0, p.features};
    if (kKeepsPre && i < kCopySteps) {
      copy_out(i, group, up_, pre(p), 1, feature(tile_, group), tile_);
    } else {
      copy_out(i % kCopySteps, group, value_, out, 0, feature(tile_, group), tile_);
    }
  }

 protected:
  static __device__ RowOutput pre(const RowGemmParams& p) {
    return {p.pre_maps, p.pre, p.features * 4LL, p.features * 2LL, p.features};
  }
  static __device__ int feature(const RowTile& tile, const GroupBase& group) {
    return tile.feature_tile * (kTileM / 2) + group.index * 64;
  }

  PackedBlock up_, value_;
  RowTile tile_;
};

template <typename Element, typename Activation, bool kKeepsPre>
class StoreActivated : public HeldActivations<kKeepsPre> {
  using Held = HeldActivations<kKeepsPre>;
  using Held::feature, Held::pre, Held::tile_, Held::up_, Held::value_;

 public:
  static constexpr bool kBiased = true;

  __device__ void finish(const RowGemmParams& p, const RowTile& tile, const Group& group,
                         const Accumulators& acc) {
    if constexpr (kKeepsPre) {
      wait_sent<0>(group);
      stage<Element, kMaxTileN>(group, group.staging, tile.rows, acc.first);
      staged(group);
      send(group, group.staging, pre(p), 0, feature(tile, group), tile);
      pack_block<Element>(up_, acc.second);
    }
    const Activation activation{p.activation};
#pragma unroll
    for (int i = 0; i < kPackedBlock; i += 2) {  // two features of one row, then of the next
      const auto of_row = [&](int at) {
        return activation.values({acc.first[at], acc.first[at + 2]},
                                 {acc.second[at], acc.second[at + 2]});
      };
      const float2 even = of_row(2 * i), odd = of_row(2 * i + 1);
      value_[i] = pack<Element>(even.x, odd.x);
      value_[i + 1] = pack<Element>(even.y, odd.y);
    }
    tile_ = tile;
  }
};

}  // namespace moec::cuda
