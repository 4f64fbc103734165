// SPDX-License-Identifier: Apache-2.0
// Everything that moves in the weight gradient kernel, by the four warps of its first warpgroup, so
// that the warpgroups that multiply neither ask for a copy nor wait for one:
//
//   warp 0      loads the m operand, half of it for both CTAs of a pair that shares it
//   warps 1, 2  gather the n operand by token
//   warp 3      sends what the consumers have staged
#pragma once

#include "backend/cuda/element.cuh"
#include "backend/cuda/tile_mma.cuh"
#include "backend/cuda/weight_grad.h"

namespace moec::cuda {

constexpr int kGatherThreads = 64;

template <typename Element_, bool kF32_, bool kOutMContiguous_>
struct GradConfig {
  using Element = Element_;
  static constexpr bool kF32 = kF32_;  // of the gradient
  static constexpr bool kOutMContiguous = kOutMContiguous_;
  static constexpr int kStages = 4;
  static constexpr int kGroupStaging = 2 * kBlockBytes;  // a piece: 64 x 128 elements, 64 x 64 f32
  static constexpr int kPieces = kF32 ? 4 : 2;           // of a tile and a consumer group
  static constexpr int kStaging = kStages * kStageBytes<kMaxTileN>;  // offset
  static constexpr int kBarriers = kStaging + 2 * kGroupStaging;     // offset
  static constexpr int kSharedBytes = kBarriers + 2 * kStages * 8;
  // Registers of a thread: 504 for the three warpgroups together. With 40 the copies of a gather
  // wait for each other, as they take turns with the registers of one address.
  static constexpr int kCopyRegisters = 56, kConsumerRegisters = 224;
  using Stages = Ring<kStages, kMaxTileN, kClusterSize>;
};

// Rows of a tile's first k-block; all others have kTileK.
__device__ __forceinline__ int first_rows(int rows) {
  return (rows - 1) % kTileK + 1;
}

template <typename C>
class GradProducer {
 public:
  __device__ GradProducer(const WeightGradParams& p, typename C::Stages& ring)
      : p_(p), ring_(ring), rank_(int(blockIdx.x % kClusterSize)), lane_(threadIdx.x & 31) {}

  __device__ void load(GradScheduler& scheduler) {
    GradTile tile;
    while (next_with_rows(scheduler, tile)) {
      for (int row = 0, end = first_rows(tile.rows); row < tile.rows; row = end, end += kTileK) {
        ring_.wait_empty();
        if (ptx::elect_one()) load_rows(tile, tile.row_begin + row);
        ring_.advance();
      }
    }
    __syncwarp();
  }
  // The tokens of a k-block are looked up one k-block ahead, also across tiles.
  __device__ void gather(GradScheduler& scheduler) {
    GradTile tile, next;
    bool more = next_with_rows(scheduler, tile);
    if (more) find_tokens(tile, 0, first_rows(tile.rows));
    for (; more; tile = next) {
      for (int row = 0, end = first_rows(tile.rows); row < tile.rows; row = end, end += kTileK) {
        const int low = low_, high = high_;
        if (end < tile.rows) {
          find_tokens(tile, end, end + kTileK);
        } else {
          more = next_with_rows(scheduler, next);
          if (more) find_tokens(next, 0, first_rows(next.rows));
        }
        ring_.wait_empty();
        copy_rows(tile.n_tile * kMaxTileN, low, high);
        ring_.advance();
      }
    }
  }

 private:
  static __device__ bool next_with_rows(GradScheduler& scheduler, GradTile& tile) {
    while (scheduler.next(tile)) {
      if (tile.rows > 0) return true;
    }
    return false;
  }

  // What lies outside the matrix becomes zeros.
  __device__ void load_rows(const GradTile& tile, int row) const {
    ptx::barrier_arrive_expect(ring_.full(), kOperandMBytes);
    const int first = tile.paired ? 2 * rank_ : 0, last = tile.paired ? first + 2 : 4;
    for (int i = first; i < last; i += p_.whole_blocks ? 2 : 1) {
      const int block = 4 * tile.m_tile + i, part = block >= p_.m_blocks_of_part;
      const ptx::Coordinate at =
          p_.whole_blocks ? ptx::Coordinate{0, row, block}
                          : ptx::Coordinate{64 * (block - part * p_.m_blocks_of_part), part, row};
      const uint32_t to = ring_.operand_m() + i * kBlockBytes;
      if (tile.paired) {
        ptx::tensor_load_multicast(to, &p_.row_map, ring_.full(), at, 3);
      } else {
        ptx::tensor_load(to, &p_.row_map, ring_.full(), at);
      }
    }
  }

  // Lane l holds the tokens of rows l and 32 + l of a k-block.
  __device__ void find_tokens(const GradTile& tile, int row, int end) {
    low_ = token(tile, row + lane_, end);
    high_ = token(tile, row + 32 + lane_, end);
  }
  __device__ int token(const GradTile& tile, int row, int end) const {
    return row < end ? __ldg(p_.row_token + tile.row_begin + row) : -1;
  }
  // Thread t copies chunk t % 16 of rows t / 16 + 4 i, zeros for padding rows and past the last
  // one.
  __device__ void copy_rows(int n, int low, int high) {
    constexpr int kBatch = 8;
    const int chunk = threadIdx.x & 15, row0 = int(threadIdx.x & (kGatherThreads - 1)) / 16;
    const bool inside = n + chunk * 8 < p_.n_size;
    const char* const x = static_cast<const char*>(p_.x) + (inside ? n + chunk * 8 : 0) * 2;
    const uint32_t stride = uint32_t(p_.x_stride * 2);
    const uint32_t panel = ring_.operand_n() + chunk / 8 * kBlockBytes;
    const uint32_t even = panel + swizzled(row0, chunk & 7);
    const uint32_t odd = panel + swizzled(row0 + 4, chunk & 7);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      int token[kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        token[i] = __shfl_sync(~0u, half ? high : low, row0 + 4 * i);
      }
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        ptx::copy_async((i % 2 ? odd : even) + (4 * half + i / 2) * 8 * 128,
                        x + uint64_t(uint32_t(max(token[i], 0))) * stride,
                        inside && token[i] >= 0 ? 16 : 0, keep_);
      }
    }
    ptx::copy_async_arrive(ring_.full());
  }

  const WeightGradParams& p_;
  typename C::Stages& ring_;
  int rank_, lane_, low_, high_;
  uint64_t keep_ = ptx::policy_keep();
};

// ---- the way out --------------------------------------------------------------------------------
// The pieces of both consumer groups leave in turn. Each group has one buffer and two barriers:
//   free     the sender arrives when a store has read the buffer, the group waits
//   staged   the group arrives, the sender waits
class PieceBarriers {
 public:
  __device__ explicit PieceBarriers(int group) : group_(group) {}
  __device__ void wait_free() const { ptx::named_barrier(kFree + group_, kHandOverThreads); }
  __device__ void free() const { ptx::named_barrier_arrive(kFree + group_, kHandOverThreads); }
  __device__ void wait_staged() const { ptx::named_barrier(kStaged + group_, kHandOverThreads); }
  __device__ void staged() const { ptx::named_barrier_arrive(kStaged + group_, kHandOverThreads); }

 private:
  static constexpr int kFree = 3, kStaged = 5, kHandOverThreads = 128 + 32;
  int group_;
};

template <typename C>
class GradSender {
 public:
  __device__ GradSender(const WeightGradParams& p, uint32_t staging) : p_(p), staging_(staging) {}

  // The store before the last one is the other group's: its buffer has been read when at most one
  // store is still reading.
  __device__ void run(GradScheduler& scheduler) const {
    for (int group = 0; group < 2; ++group) PieceBarriers(group).free();
    GradTile tile;
    for (bool first = true; scheduler.next(tile); first = false) {
#pragma unroll 1
      for (int i = 0; i < 2 * C::kPieces; ++i) {
        const int group = i % 2;
        PieceBarriers(group).wait_staged();
        ptx::fence_proxy_async();
        if (ptx::elect_one()) {
          send(staging_ + group * C::kGroupStaging, tile, group, i / 2);
          ptx::bulk_commit();
          ptx::bulk_wait_read<1>();
        }
        __syncwarp();
        if (!first || i > 0) PieceBarriers(1 - group).free();
      }
    }
    if (ptx::elect_one()) ptx::bulk_wait_read<0>();
    __syncwarp();
  }

 private:
  // A piece as two boxes with rows of 128 bytes: 64 x 128 elements, or 64 x 64 of f32. What lies
  // outside the matrix is clipped.
  __device__ void send(uint32_t buffer, const GradTile& tile, int group, int piece) const {
    const int block = 4 * tile.m_tile + group + 2 * (2 * piece / C::kPieces);
    if (block >= p_.m_blocks) return;
    const int part = block >= p_.m_blocks_of_part;
    const int m0 = 64 * (block - part * p_.m_blocks_of_part);
    const int n0 = tile.n_tile * kMaxTileN + (C::kF32 ? piece % 2 * 64 : 0);
    constexpr bool kAlongM = C::kF32 && C::kOutMContiguous;
#pragma unroll 1
    for (int half = 0; half < 2; ++half) {
      const int m = m0 + (kAlongM ? 32 * half : 0);
      const int n = n0 + (kAlongM ? 0 : (C::kF32 ? 32 : 64) * half);
      if (m >= p_.m_size || n >= p_.n_size) break;
      const ptx::Coordinate at = C::kOutMContiguous ? ptx::Coordinate{m, n, tile.expert}
                                                    : ptx::Coordinate{n, m, tile.expert};
      if (p_.accumulate) {
        ptx::tensor_add(&p_.out_maps[part], buffer + half * kBlockBytes, at);
      } else {
        ptx::tensor_store(&p_.out_maps[part], buffer + half * kBlockBytes, at);
      }
    }
  }

  const WeightGradParams& p_;
  uint32_t staging_;
};

}  // namespace moec::cuda
