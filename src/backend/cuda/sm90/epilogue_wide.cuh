// SPDX-License-Identifier: Apache-2.0
// What happens to the accumulators of a tile of up to 256 rows, whose weights warps decode in their
// registers: 64 features of each group, or 32 of gate and as many of up. Nothing of a tile is held:
// it goes into staging buffers of 256 rows of 64 features, which a warp of theirs sends.
//
//   rows        a buffer for each group
//   activations two buffers that both groups fill in turn: 32 features each
#pragma once

#include "backend/cuda/sm90/epilogue.cuh"
#include "backend/cuda/sm90/weight_operand.cuh"
#include "backend/cuda/sm90/wgmma_wide.cuh"

namespace moec::cuda {

constexpr int kWideStep = 32;  // of rows
using WideAccumulators = float[kWideTileN / 2];

// Barriers of the threads that fill a buffer together: those of a group, or of both.
__device__ __forceinline__ void wide_barrier(int group) {
  ptx::named_barrier(3 + group, kGroupThreads);
}
__device__ __forceinline__ void wide_barrier() {
  ptx::named_barrier(5, 2 * kGroupThreads);
}

constexpr int kWideBuffer = kBlockStaging<kWideTileN>, kHalfWide = kWideTileN / 2;

// A staged buffer -> memory, by a warp: two groups of bulk copies.
__device__ __forceinline__ void send_wide(uint32_t buffer, const Piece& piece,
                                          const RowTile& tile) {
  RowTile half = tile;
  half.rows = min(tile.rows, kHalfWide);
  send(buffer, piece, half);
  __syncwarp();
  half.row_begin += kHalfWide;
  half.rows = max(tile.rows - kHalfWide, 0);
  send(buffer + kBlockStaging<kHalfWide>, piece, half);
  __syncwarp();
}

class WideTile {
 public:
  static constexpr bool kSkipsOutside = true, kBiased = true;
  static constexpr int kMaxRows = kWideTileN, kStages = 4, kStagingBytes = kWideBuffer;
};

template <typename Element>
class StoreWideRows : public WideTile {
 public:
  static constexpr bool kGated = false;
  static constexpr int kGroupFeatures = 64;

  static __device__ void add_biases(const RowGemmParams& p, const RowTile& tile,
                                    const GroupBase& group, WideAccumulators& acc) {
    if (!p.bias[0].base) return;
    const int mine = (group.thread >> 5) * 16 + (group.thread & 31) / 4;
    add_bias<Element>(p.bias[0], tile.expert, p.features,
                      group_feature(p, tile, group.index) + mine, 8, acc);
  }
  __device__ void finish(const RowGemmParams& p, const RowTile& tile, const Group& group,
                         const WideAccumulators& acc) const {
    leave(p, tile, group, [&] {
      stage<kWideTileN / 16>(group, group.staging, 0, tile.rows, [&](int s, uint32_t (&packed)[4]) {
        pack_slice<Element>(acc, s, packed);
      });
    });
  }
  __device__ void pass(const RowGemmParams&, const RowTile&, const Group&) const {}
  __device__ void end(const RowGemmParams&, const Group&) const {}

 protected:
  // fill() stages the rows of this thread's features.
  template <typename Fill>
  static __device__ __forceinline__ void leave(const RowGemmParams& p, const RowTile& tile,
                                               const Group& group, const Fill& fill) {
    const bool sends = group.thread < 32;
    if (sends && ptx::elect_one()) ptx::bulk_wait_read<0>();
    __syncwarp();
    wide_barrier(group.index);
    fill();
    wide_barrier(group.index);
    if (sends) send_wide(group.staging, rows_piece(p, tile, group.index, 0), tile);
  }
};

// Of gradients, where a thread has two features side by side (column_decoder.cuh).
template <typename Element, typename Weights>
class StoreWideColumns : public StoreWideRows<Element> {
 public:
  static __device__ void add_biases(const RowGemmParams&, const RowTile&, const GroupBase&,
                                    WideAccumulators&) {}
  __device__ void finish(const RowGemmParams& p, const RowTile& tile, const Group& group,
                         const WideAccumulators& acc) const {
    this->leave(p, tile, group, [&] {
      const uint32_t feature = column_feature<Weights>(group.thread), row = 2 * (group.thread & 3);
      const uint32_t chunk = feature / 8, in_chunk = 2 * (feature % 8);
      const uint32_t to[2] = {group.staging + swizzled(row, chunk) + in_chunk,
                              group.staging + swizzled(row + 1, chunk) + in_chunk};
#pragma unroll
      for (int s = 0; s < kWideTileN / 8; ++s) {
        if (8 * s >= tile.rows) continue;
#pragma unroll
        for (int i = 0; i < 2; ++i)
          ptx::shared_store(to[i] + 8 * 128 * s, std::bit_cast<float>(pack<Element>(
                                                     acc[4 * s + i], acc[4 * s + 2 + i])));
      }
    });
  }
};

// Pre-activations where they are asked for, then activations.
template <typename Element, typename Activation>
class StoreWideActivated : public WideTile {
 public:
  static constexpr bool kGated = true;
  static constexpr int kGroupFeatures = 32;

  static __device__ void add_biases(const RowGemmParams& p, const RowTile& tile,
                                    const GroupBase& group, WideAccumulators& acc) {
    if (!p.bias[0].base) return;
    const int feature = first_feature(p, tile.feature_tile) + kGroupFeatures * group.index +
                        (group.thread >> 5) * 8 + (group.thread & 31) / 4;
    const auto load = [&](const ExpertBias& bias) {
      if (feature >= p.features) return 0.0f;
      const int64_t at = tile.expert * bias.expert_stride + feature * bias.stride;
      return bias.f32 ? static_cast<const float*>(bias.base)[at]
                      : float(static_cast<const Element*>(bias.base)[at]);
    };
    const float gate = load(p.bias[0]), up = load(p.bias[1]);
#pragma unroll
    for (int i = 0; i < kWideTileN / 2; ++i) acc[i] += i / 2 % 2 ? up : gate;
  }
  __device__ void finish(const RowGemmParams& p, const RowTile& tile, const Group& group,
                         const WideAccumulators& acc) {
    const uint32_t staging = group.staging - group.index * kWideBuffer;
    const int lane = group.thread & 31, chunk = 4 * group.index + (group.thread >> 5);
    const bool sends = group.index == 0 && group.thread < 32;
    if (sends) count(p);
    const auto leave = [&](const Piece& piece, const auto& pair) {
      const uint32_t buffer = staging + piece_ * kWideBuffer + swizzled(lane, chunk);
      if (sends && ptx::elect_one()) ptx::bulk_wait_read<2>();  // those of the other buffer
      __syncwarp();
      wide_barrier();
#pragma unroll
      for (int s = 0; s < kWideTileN / 32; ++s) {
        if (32 * s >= tile.rows) continue;
        uint32_t packed[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) packed[j] = pair(acc + 16 * s + 4 * j);
        ptx::store_matrix_transposed(buffer + 32 * 128 * s, packed[0], packed[1], packed[2],
                                     packed[3]);
      }
      wide_barrier();
      if (sends) send_wide(staging + piece_ * kWideBuffer, piece, tile);
      piece_ ^= 1;
    };
    if (p.pre) {
      leave(pre_piece(p, tile, 0, 0), [](const float* v) { return pack<Element>(v[0], v[1]); });
      leave(pre_piece(p, tile, 0, 1), [](const float* v) { return pack<Element>(v[2], v[3]); });
    }
    const Activation activation{p.form};
    leave(activations_piece(p, tile, 0), [&](const float* v) {
      return pack<Element>(activation.value(v[0], v[2]), activation.value(v[1], v[3]));
    });
    expert_ = tile.expert;
    rows_ = tile.rows;
  }
  // A tile whose features this group has none of: it meets the other one.
  __device__ void pass(const RowGemmParams& p, const RowTile&, const Group&) {
    for (int i = 0; i < (p.pre ? 3 : 1); ++i, piece_ ^= 1) {
      wide_barrier();
      wide_barrier();
    }
  }
  __device__ void end(const RowGemmParams& p, const Group& group) {
    if (group.index == 0 && group.thread < 32) count(p);
  }

 private:
  // The rows of the last tile are in memory, for down.
  __device__ void count(const RowGemmParams& p) {
    if (!p.done || rows_ == 0) return;
    if (ptx::elect_one()) {
      ptx::bulk_wait();
      ptx::add_release(p.done + expert_, unsigned(rows_));
    }
    __syncwarp();
    rows_ = 0;
  }
  int piece_ = 0, expert_ = 0, rows_ = 0;
};

}  // namespace moec::cuda
