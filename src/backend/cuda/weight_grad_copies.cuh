// SPDX-License-Identifier: Apache-2.0
// Everything that moves in the weight gradient kernel, by warps beside the warpgroups that
// multiply, which neither ask for a copy nor wait for one nor look for a tile:
//
//   warps 0 to 3   gather the n operand by token, 16 rows of each k-block
//   warp 12        finds the tiles, and the tokens of each k-block, for all others
//   warp 13        loads the m operand
//   warps 14, 15   send what consumer group 0 and 1 have staged
#pragma once

#include "backend/cuda/element.cuh"
#include "backend/cuda/piece_barriers.cuh"
#include "backend/cuda/tile_mma.cuh"
#include "backend/cuda/weight_grad.h"

namespace moec::cuda {

constexpr int kGradThreads = 512;  // gatherers, two consumer warpgroups, the rest
constexpr int kGatherWarps = 4;
constexpr int kGatherRows = kTileK / kGatherWarps;
// Of the tile queue: all warps but the one that finds.
constexpr int kTileReaders = kGradThreads / 32 - 1;
constexpr int kFullArrivals = 1 + 32 * kGatherWarps;

// The tokens of k-blocks, -1 for padding rows and past a tile's rows, from the warp that finds them
// to those that gather.
class TokenRing {
 public:
  using Slots = SlotRing<4, 4 * kTileK>;
  static constexpr int kBytes = Slots::kBytes;

  __device__ explicit TokenRing(uint32_t memory) : ring_(memory) {}

  // Each lane of the finder writes. One lane in each half of a gathering warp reads, and says so:
  // racecheck takes no account of what a warp does in step.
  __device__ void init() const { ring_.init(32, 2 * kGatherWarps); }
  // Lane l has those of rows l and 32 + l.
  __device__ void put(int low, int high) {
    const int lane = threadIdx.x & 31;
    ring_.wait_empty();
    ptx::shared_store(ring_.slot() + 4 * lane, __int_as_float(low));
    ptx::shared_store(ring_.slot() + 4 * (32 + lane), __int_as_float(high));
    ring_.arrive_full();
    __syncwarp();
    ring_.advance();
  }
  // Those of kCount rows from `row`, a multiple of 4, for half a warp.
  template <int kCount>
  __device__ void take(int row, int (&token)[kCount]) {
    const bool reads = (threadIdx.x & 15) == 0;
    uint4 words[kCount / 4] = {};
    ring_.wait_full();
    if (reads) {
#pragma unroll
      for (int i = 0; i < kCount / 4; ++i) {
        words[i] = ptx::shared_load(ring_.slot() + 4 * (row + 4 * i));
      }
      ring_.arrive_empty();
    }
    ring_.advance();
    __syncwarp();
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const uint4 v = words[i / 4];
      const uint32_t word = i % 4 == 0 ? v.x : i % 4 == 1 ? v.y : i % 4 == 2 ? v.z : v.w;
      token[i] = int(__shfl_sync(~0u, word, 0, 16));
    }
  }

 private:
  Slots ring_;
};

// kBuffers: of a consumer group, for results on their way out. A second one takes the place of a
// stage: with few rows, tiles are finished as fast as they can be stored.
template <typename Element_, bool kF32_, bool kOutMContiguous_, int kBuffers_>
struct GradConfig {
  using Element = Element_;
  static constexpr bool kF32 = kF32_;  // of the gradient
  static constexpr bool kOutMContiguous = kOutMContiguous_;
  static constexpr int kBuffers = kBuffers_;
  static constexpr int kStages = 5 - kBuffers;
  static constexpr int kPieceBytes = 2 * kBlockBytes;  // 64 x 128 elements, 64 x 64 f32
  static constexpr int kGroupStaging = kBuffers * kPieceBytes;
  static constexpr int kPieces = kF32 ? 4 : 2;  // of a tile and a consumer group
  static constexpr int kStaging = kStages * kStageBytes<kMaxTileN>;  // offset
  static constexpr int kBarriers = kStaging + 2 * kGroupStaging;     // offset
  static constexpr int kQueue = kBarriers + 2 * kStages * 8;         // offset
  static constexpr int kTokens = kQueue + GradQueue::kBytes;         // offset
  static constexpr int kSharedBytes = kTokens + TokenRing::kBytes;
  // Registers of a thread: 512 for the four warpgroups together.
  static constexpr int kGatherRegisters = 56, kSideRegisters = 24, kConsumerRegisters = 216;
  using Stages = Ring<kStages, kMaxTileN>;
};

// Rows of a tile's first k-block; all others have kTileK.
__device__ __forceinline__ int first_rows(int rows) {
  return (rows - 1) % kTileK + 1;
}

// The warp that finds tiles and tokens. Tokens are looked up one k-block ahead; those of a tile are
// all handed on before the next tile, for which nobody has room while that tile waits for them.
class GradFinder {
 public:
  __device__ GradFinder(const WeightGradParams& p, const GradQueue& queue, const TokenRing& tokens)
      : p_(p), queue_(queue), tokens_(tokens), lane_(threadIdx.x & 31) {}

  __device__ void run(GradScheduler& scheduler) {
    GradTile tile;
    int low = -1, high = -1;
    bool held = false;
    while (scheduler.next(tile)) {
      int row = 0, end = first_rows(tile.rows);
      do {
        const int next_low = token(tile, row + lane_, end);
        const int next_high = token(tile, row + 32 + lane_, end);
        if (held) tokens_.put(low, high);
        if (row == 0) queue_.put(tile);
        low = next_low;
        high = next_high;
        held = tile.rows > 0;
        row = end;
        end += kTileK;
      } while (row < tile.rows);
    }
    if (held) tokens_.put(low, high);
    queue_.put({-1, 0, 0, 0, 0});
  }

 private:
  __device__ int token(const GradTile& tile, int row, int end) const {
    return row < end ? __ldg(p_.row_token + tile.row_begin + row) : -1;
  }

  const WeightGradParams& p_;
  GradQueue queue_;
  TokenRing tokens_;
  int lane_;
};

template <typename C>
class GradProducer {
 public:
  __device__ GradProducer(const WeightGradParams& p, typename C::Stages& ring,
                          const GradQueue& queue)
      : p_(p), ring_(ring), queue_(queue) {}

  __device__ void load() {
    GradTile tile;
    while (queue_.take(tile)) {
      for (int row = 0, end = first_rows(tile.rows); row < tile.rows; row = end, end += kTileK) {
        ring_.wait_empty();
        if (ptx::elect_one()) load_rows(tile, tile.row_begin + row);
        __syncwarp();
        ring_.advance();
      }
    }
  }
  __device__ void gather(TokenRing tokens) {
    GradTile tile;
    while (queue_.take(tile)) {
      for (int row = 0, end = first_rows(tile.rows); row < tile.rows; row = end, end += kTileK) {
        copy_rows(tile.n_tile * kMaxTileN, tokens);
        ring_.advance();
      }
    }
  }

 private:
  // What lies outside the matrix becomes zeros.
  __device__ void load_rows(const GradTile& tile, int row) const {
    ptx::barrier_arrive_expect(ring_.full(), kOperandMBytes);
    for (int i = 0; i < 4; i += p_.whole_blocks ? 2 : 1) {
      const int block = 4 * tile.m_tile + i, part = block >= p_.m_blocks_of_part;
      const ptx::Coordinate at =
          p_.whole_blocks ? ptx::Coordinate{0, row, block}
                          : ptx::Coordinate{64 * (block - part * p_.m_blocks_of_part), part, row};
      ptx::tensor_load(ring_.operand_m() + i * kBlockBytes, &p_.row_map, ring_.full(), at);
    }
  }

  // Lane l copies chunk l % 16 of half of this warp's rows, those from kEach * (l / 16), zeros for
  // padding rows and past the last one. Row i of eight has its chunks in the order c ^ i.
  __device__ void copy_rows(int n, TokenRing& tokens) {
    constexpr int kEach = kGatherRows / 2;
    const int chunk = threadIdx.x & 15;
    const int row0 = int(threadIdx.x) / 16 * kEach;
    int token[kEach];
    tokens.take(row0, token);
    const bool inside = n + chunk * 8 < p_.n_size;
    const char* const x = static_cast<const char*>(p_.x) + (inside ? n + chunk * 8 : 0) * 2;
    const uint32_t stride = uint32_t(p_.x_stride * 2);
    const uint32_t to = ring_.operand_n() + chunk / 8 * kBlockBytes + row0 * 128 + (chunk & 7) * 16;
    ring_.wait_empty();
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      ptx::copy_async((to ^ (i & 7) * 16) + i * 128,
                      x + uint64_t(uint32_t(max(token[i], 0))) * stride,
                      inside && token[i] >= 0 ? 16 : 0, keep_);
    }
    ptx::copy_async_arrive(ring_.full());
  }

  const WeightGradParams& p_;
  typename C::Stages& ring_;
  GradQueue queue_;
  uint64_t keep_ = ptx::policy_keep();
};

// ---- the way out --------------------------------------------------------------------------------
template <typename C>
class GradSender {
 public:
  __device__ GradSender(const WeightGradParams& p, uint32_t staging) : p_(p), staging_(staging) {}

  __device__ void run(GradQueue queue, int group) {
    for (int b = 0; b < C::kBuffers; ++b) PieceBarriers(group, b).free();
    GradTile tile;
    int buffer = 0;
    bool first = true;
    while (queue.take(tile)) {
#pragma unroll 1
      for (int piece = 0; piece < C::kPieces; ++piece) {
        PieceBarriers(group, buffer).wait_staged();
        ptx::fence_proxy_async();
        if (ptx::elect_one()) {
          send(staging_ + group * C::kGroupStaging + buffer * C::kPieceBytes, tile, group, piece);
          ptx::bulk_commit();
          ptx::bulk_wait_read<C::kBuffers - 1>();  // the next buffer has been read
        }
        __syncwarp();
        buffer = (buffer + 1) % C::kBuffers;
        if (C::kBuffers == 1 || !first) PieceBarriers(group, buffer).free();
        first = false;
      }
    }
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
        ptx::tensor_store(&p_.out_maps[part], buffer + half * kBlockBytes, at, once_);
      }
    }
  }

  const WeightGradParams& p_;
  uint32_t staging_;
  uint64_t once_ = ptx::policy_once();
};

}  // namespace moec::cuda
