// SPDX-License-Identifier: Apache-2.0
// Everything that moves in the weight gradient kernel, by warps beside the warpgroups that
// multiply, which neither ask for a copy nor wait for one nor look for a tile:
//
//   warps 0 to 3   gather the n operand by token, 16 rows of each k-block; the first loads the m
//                  operand, too
//   warp 12        finds the tiles, and the tokens of each k-block, for all others
//   warp 13        relays: fences what has been gathered, for those that multiply
//   warps 14, 15   send what consumer group 0 and 1 have staged
#pragma once

#include "backend/cuda/device/element.cuh"
#include "backend/cuda/sm90/piece_barriers.cuh"
#include "backend/cuda/sm90/tile_mma.cuh"
#include "backend/cuda/sm90/weight_grad.h"
#include "backend/cuda/sm90/weight_grad_tiles.cuh"

namespace moec::cuda {

template <typename Element_, bool kF32_, bool kOutMContiguous_>
struct GradConfig {
  using Element = Element_;
  static constexpr bool kF32 = kF32_;  // of the gradient
  static constexpr bool kOutMContiguous = kOutMContiguous_;
  static constexpr int kStages = 4;
  using Stages = PairRing<GradRing<kStages>>;
  static constexpr int kPieceBytes = 2 * kBlockBytes;  // 64 x 128 elements, 64 x 64 f32
  static constexpr int kPieces = kF32 ? 4 : 2;         // of a tile and a consumer group
  // Consumer group g multiplies the 64-m blocks kFirst * g and kApart further of a tile.
  static constexpr int kFirst = kOutMContiguous && !kF32 ? 2 : 1, kApart = 3 - kFirst;
  static constexpr int kStaging = Stages::kBytes;                   // offset
  static constexpr int kBarriers = kStaging + 2 * kPieceBytes;      // offset
  static constexpr int kQueue = kBarriers + Stages::kBarrierBytes;  // offset
  static constexpr int kTokens = kQueue + GradQueue::kBytes;        // offset
  static constexpr int kNumbers = kTokens + TokenRing::kBytes;      // offset
  static constexpr int kSharedBytes = kNumbers + WorkNumbers::kBytes;
  // Registers of a thread: 512 for the four warpgroups together.
  static constexpr int kGatherRegisters = 48, kSideRegisters = 32, kConsumerRegisters = 216;
};

// The warp that finds tiles and, of k-blocks that are gathered, tokens. Tokens are looked up one
// k-block ahead; those of a tile are all handed on before the next tile, for which nobody has room
// while that tile waits for them.
template <typename C>
class GradFinder {
 public:
  __device__ GradFinder(const WeightGradParams& p, const GradQueue& queue, const TokenRing& tokens)
      : p_(p), queue_(queue), tokens_(tokens), lane_(threadIdx.x & 31) {}

  __device__ void run(GradScheduler scheduler) {
    GradTile tile;
    int low = -1, high = -1;
    bool held = false;
    while (scheduler.next(tile)) {
      GradWalk rows(tile);
      int there = tile.turns ? C::kStages : 0;
      bool begins = true;
      do {
        const bool wanted = rows.more() && there-- <= 0;
        const int end = wanted ? rows.end() : 0, begin = max(end - kTileK, 0);
        const int next_low = token(tile, begin + lane_, end);
        const int next_high = token(tile, begin + 32 + lane_, end);
        if (held) tokens_.put(low, high);
        if (begins) queue_.put(tile);
        begins = false;
        low = next_low;
        high = next_high;
        held = wanted;
        rows.advance();
      } while (rows.more());
    }
    if (held) tokens_.put(low, high);
    queue_.put({-1});
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

  __device__ void relay() {
    for (GradTile tile; queue_.take(tile);) {
      for (int kb = grad_k_blocks(tile.rows); kb > 0; --kb) ring_.relay();
    }
  }
  // loads: this warp loads the m operand, too.
  __device__ void gather(TokenRing tokens, bool loads) {
    GradTile tile;
    while (queue_.take(tile)) {
      ring_.begin(tile);
      const int n = tile.n_tile * kMaxTileN + (threadIdx.x & 15) * 8;
      const bool inside = n < p_.n_size;
      const char* x = static_cast<const char*>(p_.x) + (inside ? n : 0) * 2;
      // Whole: else the compiler adds its parts for each row anew.
      asm volatile("" : "+l"(x));
      const auto load = [&](const GradWalk& rows) {
        ring_.wait_empty();
        if (loads && ptx::elect_one()) load_rows(tile, rows);
        if (loads) __syncwarp();
      };
      GradWalk rows(tile);
      // Two loops: one with a choice in it would ask for the m operand later.
      for (; ring_.holds_n() && rows.more(); rows.advance()) {
        load(rows);
        ptx::barrier_arrive(ring_.landed());
        ring_.advance();
      }
      for (; rows.more(); rows.advance()) {
        int token[TokenRing::kEach];
        tokens.take(token);
        load(rows);
        copy_rows(x, inside, token);
        ring_.advance();
      }
    }
  }

 private:
  // A k-block of the m operand; behind its rows are zeros. Blocks outside the matrix hold the last
  // one, or zeros: nothing of them is stored. Two blocks are one copy where that is possible,
  // without a loop: what stands in front of it delays this warp's rows, too.
  __device__ void load_rows(const GradTile& tile, const GradWalk& rows) const {
    ptx::barrier_arrive_expect(ring_.full(), kOperandMBytes);
    const bool shared = tile.together;
    const int first = shared ? 2 * pair_rank() : 0;
    const int end = tile.row_begin + rows.end(), in_window = rows.outside();
    const auto load = [&](int i, ptx::Coordinate4 at) {
      load_block(ring_.operand_m() + i * kBlockBytes, &p_.row_map, ring_.full(), at, shared);
    };
    const auto block = [&](int i) {  // none wholly outside
      return min(4 * tile.m_tile + i, p_.m_blocks - 1);
    };
    if (p_.whole_blocks) {
      load(first, {0, in_window, end, block(first)});
      if (!shared) load(2, {0, in_window, end, block(2)});
      return;
    }
#pragma unroll 1
    for (int i = first, last = shared ? first + 2 : 4; i < last; ++i) {
      const int part = block(i) >= p_.m_blocks_of_part;
      load(i, {64 * (block(i) - part * p_.m_blocks_of_part), part, in_window, end});
    }
  }

  // Thread t copies chunk t % 16 of rows t / 16, t / 16 + 8, .., zeros for padding rows and past
  // the last one.
  __device__ void copy_rows(const char* x, bool inside, const int (&token)[TokenRing::kEach]) {
    const int chunk = threadIdx.x & 15, row = threadIdx.x / 16;
    const uint32_t stride = uint32_t(p_.x_stride * 2);
    int signs = 0;
#pragma unroll
    for (const int t : token) signs |= t;
    const uint32_t to = ring_.operand_n() + chunk / 8 * kBlockBytes + swizzled(row, chunk & 7);
    const auto from = [&](int token) { return x + uint64_t(uint32_t(token)) * stride; };
    if (inside && signs >= 0) {
#pragma unroll
      for (int i = 0; i < TokenRing::kEach; ++i) {
        ptx::copy_async(to + i * 1024, from(token[i]), 16, keep_);
      }
    } else {
#pragma unroll
      for (int i = 0; i < TokenRing::kEach; ++i) {
        ptx::copy_async(to + i * 1024, from(max(token[i], 0)), inside && token[i] >= 0 ? 16 : 0,
                        keep_);
      }
    }
    ptx::copy_async_arrive(ring_.landed());
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
    const PieceBarriers out(group);
    out.free();
    GradTile tile;
    while (queue.take(tile)) {
#pragma unroll 1
      for (int piece = 0; piece < C::kPieces; ++piece) {
        out.wait_staged();
        ptx::fence_proxy_async();
        if (ptx::elect_one()) {
          send(staging_ + group * C::kPieceBytes, tile, group, piece);
          ptx::bulk_commit();
          ptx::bulk_wait_read<0>();
        }
        __syncwarp();
        out.free();
      }
    }
  }

 private:
  // A piece, two boxes with rows of 128 bytes: of 64 x 64 elements, or 64 x 32 of f32. What lies
  // outside the matrix is clipped.
  __device__ void send(uint32_t buffer, const GradTile& tile, int group, int piece) const {
    constexpr int kWidth = C::kF32 ? 32 : 64;  // of a box
    // The boxes are two blocks, or two parts of one block along m or n.
    constexpr bool kBlocks = C::kApart == 1, kAlongM = C::kF32 && C::kOutMContiguous;
    const int half = kBlocks || C::kF32 ? piece % 2 * 64 : 0;
    const int first =
        4 * tile.m_tile + C::kFirst * group + (kBlocks ? 0 : C::kApart * (2 * piece / C::kPieces));
#pragma unroll 1
    for (int box = 0; box < 2; ++box) {
      const int block = first + (kBlocks ? box : 0);
      if (block >= p_.m_blocks) return;
      const int part = block >= p_.m_blocks_of_part;
      const int m = 64 * (block - part * p_.m_blocks_of_part) + (kAlongM ? kWidth * box : 0);
      const int n = tile.n_tile * kMaxTileN + half + (kBlocks || kAlongM ? 0 : kWidth * box);
      if (m >= p_.m_size || n >= p_.n_size) return;
      const CUtensorMap* const map = &p_.out_maps[part];
      const int x = C::kOutMContiguous ? m : n, y = C::kOutMContiguous ? n : m;
      if (p_.whole_lines) return put_lines(map, buffer, {x / 64, y / 8, tile.expert});
      put(map, buffer + box * kBlockBytes, {x, y, tile.expert});
    }
  }
  __device__ void put(const CUtensorMap* map, uint32_t from, ptx::Coordinate at) const {
    if (p_.accumulate) {
      ptx::tensor_add(map, from, at);
    } else {
      ptx::tensor_store(map, from, at, once_);
    }
  }
  __device__ void put_lines(const CUtensorMap* map, uint32_t from, ptx::Coordinate at) const {
    if (p_.accumulate) {
      ptx::tensor_add_wide(map, from, at);
    } else {
      ptx::tensor_store_wide(map, from, at, once_);
    }
  }

  const WeightGradParams& p_;
  uint32_t staging_;
  uint64_t once_ = ptx::policy_once();
};

}  // namespace moec::cuda
