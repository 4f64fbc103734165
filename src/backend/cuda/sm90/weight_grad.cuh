// SPDX-License-Identifier: Apache-2.0
// The weight gradient kernel for sm_90a. Both operands are MN-major as they lie in memory: k is the
// row. The m operand (activations or their gradients) is contiguous per expert and comes by TMA,
// the n operand (x or d_y) is gathered by token.
//
//   k        the first k-block has the rows that are left over, all others 64. In its last k16
//            step both operands are zero past its rows. Tiles of a run walk them forth and back
//   grid     persistent, clusters of two CTAs, one CTA on an SM
//   traffic  32 KiB of the m operand a k-block and tile, of which the CTAs of a pair, whose tiles
//            have the same m, load half each for both; 16 KiB of the n operand, but for the kStages
//            k-blocks that a tile finds of the tile before it in its run
//   roles    weight_grad_copies.cuh: eight warps find, load and store; warpgroups 1 and 2 multiply
//   order    each element has one owner, and its tile one way to walk: deterministic
#pragma once

#include "backend/cuda/sm90/weight_grad_copies.cuh"

namespace moec::cuda {

template <typename C>
class GradConsumer {
 public:
  using Element = typename C::Element;
  __device__ GradConsumer(const WeightGradParams& p, typename C::Stages& ring, int index,
                          uint32_t staging, const GradQueue& queue)
      : p_(p),
        ring_(ring),
        queue_(queue),
        index_(index),
        thread_(threadIdx.x & 127),
        staging_(staging) {}

  // A finished tile is packed into registers; its two blocks are staged behind the first k-blocks
  // of the next one.
  __device__ void run() {
    GradTile tile, next;
    for (bool more = queue_.take(tile); more; tile = next) {
      Accumulators acc;
      const int k_blocks = grad_k_blocks(tile.rows);
      ring_.begin(tile);
      const int left = p_.m_blocks - 4 * tile.m_tile - C::kFirst * index_;
      const int blocks = min(2, (left + C::kApart - 1) / C::kApart);
      const bool narrow = p_.n_size - tile.n_tile * kMaxTileN <= kMaxTileN / 2;
      if (blocks == 2 && !narrow) {
        multiply_tile<2, kMaxTileN>(acc, tile, k_blocks);
      } else {
        multiply_edge(acc, tile, k_blocks, blocks, narrow);
      }
      more = queue_.take(next);
      stage_pieces();
      wait_products(acc);
      if (k_blocks > 0) ring_.release_previous(thread_ & 31);
      if constexpr (C::kF32) {
        stage_f32(acc.first, k_blocks == 0);
        stage_f32(acc.second, k_blocks == 0);
      } else {
        hold(acc, k_blocks == 0);
      }
    }
    stage_pieces();
  }

 private:
  // All k-blocks of a tile; this warpgroup's first kBlocks blocks and the first kN columns lie in
  // the matrix. The last k-block is left in flight.
  template <int kBlocks, int kN>
  __device__ __forceinline__ void multiply_tile(Accumulators& acc, const GradTile& tile,
                                                int k_blocks) {
    const int some = first_rows(tile.rows), some_at = tile.back ? k_blocks - 1 : 0;
    for (int i = 0; i < k_blocks; ++i) {
      ring_.wait_full();
      multiply_group<kBlocks, kN, 0, 1>(acc, i);
      wgmma_wait<1>();
      if (i > 0) ring_.release_previous(thread_ & 31);
      if (i != some_at) {
        multiply_group<kBlocks, kN, 1, kSteps>(acc, 1);
      } else {
        if (some > 16) multiply_group<kBlocks, kN, 1, 2>(acc, 1);
        if (some > 32) multiply_group<kBlocks, kN, 2, 3>(acc, 1);
        if (some > 48) multiply_group<kBlocks, kN, 3, 4>(acc, 1);
      }
      if (held_ > 0 && i >= due(k_blocks)) stage_piece();
      ring_.advance();
    }
  }
  // Products with what lies outside the matrix are left out.
  __device__ __forceinline__ void multiply_edge(Accumulators& acc, const GradTile& tile,
                                                int k_blocks, int blocks, bool narrow) {
    if (blocks == 2) {
      multiply_tile<2, kMaxTileN / 2>(acc, tile, k_blocks);
    } else if (blocks == 1 && !narrow) {
      multiply_tile<1, kMaxTileN>(acc, tile, k_blocks);
    } else if (blocks == 1) {
      multiply_tile<1, kMaxTileN / 2>(acc, tile, k_blocks);
    } else {
      multiply_tile<0, kMaxTileN>(acc, tile, k_blocks);
    }
  }
  // Steps kBegin to kEnd of 16 rows, as one group. keep = 0: nothing is accumulated yet.
  template <int kBlocks, int kN, int kBegin, int kEnd>
  __device__ __forceinline__ void multiply_group(Accumulators& acc, int keep) const {
    if constexpr (kBlocks > 0) {
      const uint32_t first =
          operand_descriptor(ring_.operand_m() + C::kFirst * index_ * kBlockBytes, kBlockBytes);
      const uint32_t n = operand_descriptor(ring_.operand_n(), kBlockBytes);
      constexpr Major kMN = Major::kMN;
      wgmma_fence();
      multiply_steps<Element, kN, kMN, kMN, kBegin, kEnd>(acc.first, first, n, keep);
      if constexpr (kBlocks > 1) {
        const uint32_t second = first + (C::kApart * kBlockBytes >> 4);
        multiply_steps<Element, kN, kMN, kMN, kBegin, kEnd>(acc.second, second, n, keep);
      }
      wgmma_commit();
    }
  }

  // Without rows nothing was multiplied: the accumulators hold anything.
  __device__ void hold(Accumulators& acc, bool empty) {
    if (empty) {
#pragma unroll
      for (int i = 0; i < kMaxTileN / 4; ++i) {
        // Not to become 64 choices in front of the packing of every other tile.
        asm volatile("mov.b32 %0, 0;" : "=r"(first_[i]));
        asm volatile("mov.b32 %0, 0;" : "=r"(second_[i]));
      }
    } else {
#pragma unroll
      for (int i = 0; i < kMaxTileN / 4; ++i) {
        first_[i] = pack<Element>(acc.first[2 * i], acc.first[2 * i + 1]);
        second_[i] = pack<Element>(acc.second[2 * i], acc.second[2 * i + 1]);
      }
    }
    held_ = 2;
  }
  // The k-block behind which the next block that is held is staged: the second when the first has
  // left the buffer, and where there is time the two groups' in turn.
  __device__ int due(int k_blocks) const {
    const int piece = 2 - held_;
    if (k_blocks < 4) return 2 * piece;
    return k_blocks < 8 ? 2 * piece + index_ : (2 * piece + index_) * k_blocks / 4;
  }
  __device__ __forceinline__ void stage_pieces() {
    while (held_ > 0) stage_piece();
  }
  // The next block that is held.
  __device__ __forceinline__ void stage_piece() {
    const PieceBarriers out(index_);
    out.wait_free();
    if (p_.whole_lines) {
      if (held_ == 2) stage_boxes<0, true>();
      if (held_ == 1) stage_boxes<1, true>();
    } else {
      if (held_ == 2) stage_boxes<0, false>();
      if (held_ == 1) stage_boxes<1, false>();
    }
    out.staged();
    --held_;
  }
  // A piece is two boxes: of kOutMContiguous 64 n of each of the two blocks, [64 n][64 m], else the
  // two halves of one block, [64 m][64 n].
  template <int kPiece, bool kWholeLines>
  __device__ void stage_boxes() const {
    constexpr int kColumns = kMaxTileN / 8;  // registers of 64 n
#pragma unroll
    for (int s = 0; s < 4; ++s) {
      if constexpr (C::kOutMContiguous) {
        stage<kWholeLines>(first_ + kPiece * kColumns + 4 * s, s, 0);
        stage<kWholeLines>(second_ + kPiece * kColumns + 4 * s, s, 1);
      } else {
        stage<kWholeLines>((kPiece == 0 ? first_ : second_) + 4 * s, s, 0);
        stage<kWholeLines>((kPiece == 0 ? first_ : second_) + kColumns + 4 * s, s, 1);
      }
    }
  }
  // 16 columns n of a block into a box, whose rows lie in eights.
  template <bool kWholeLines>
  __device__ void stage(const uint32_t* v, int s, int box) const {
    const int lane = thread_ & 31, warp = thread_ >> 5;
    constexpr uint32_t eights = kWholeLines ? 2048 : 1024;
    const uint32_t buffer = staging_ + box * (kWholeLines ? 1024 : kBlockBytes);
    if constexpr (C::kOutMContiguous) {
      const uint32_t to = buffer + (2 * s + (lane >> 4)) * eights;
      ptx::store_matrix_transposed(to + swizzled(lane & 7, 2 * warp + (lane >> 3 & 1)), v[0], v[1],
                                   v[2], v[3]);
    } else {
      const uint32_t to = buffer + (2 * warp + (lane >> 3 & 1)) * eights;
      ptx::store_matrix(to + swizzled(lane & 7, s * 2 + (lane >> 4)), v[0], v[1], v[2], v[3]);
    }
  }

  // f32: two pieces of 64 x 64 values, each two boxes [64 m][32 n] or [64 n][32 m]. There are no
  // registers to hold them in, so the tensor cores wait.
  __device__ void stage_f32(const float (&acc)[kMaxTileN / 2], bool empty) {
    const int lane = thread_ & 31, warp = thread_ >> 5;
#pragma unroll
    for (int round = 0; round < 2; ++round) {
      const PieceBarriers out(index_);
      out.wait_free();
#pragma unroll
      for (int i = 32 * round; i < 32 * round + 32; i += 2) {
        const float2 v = empty ? float2{} : float2{acc[i], acc[i + 1]};
        const int row = 16 * warp + lane / 4 + i / 2 % 2 * 8;          // m
        const int column = 8 * (i / 4) + 2 * (lane & 3) - 64 * round;  // n
        if constexpr (C::kOutMContiguous) {
          const uint32_t to = staging_ + warp / 2 * kBlockBytes + (row & 3) * 4;
          ptx::shared_store(to + swizzled(column, (row & 31) / 4), v.x);
          ptx::shared_store(to + swizzled(column + 1, (row & 31) / 4), v.y);
        } else {
          const uint32_t to = staging_ + column / 32 * kBlockBytes + (column & 3) * 4;
          ptx::shared_store(to + swizzled(row, (column & 31) / 4), v);
        }
      }
      out.staged();
    }
  }

  const WeightGradParams& p_;
  typename C::Stages& ring_;
  GradQueue queue_;
  int index_, thread_;
  uint32_t staging_;
  uint32_t first_[kMaxTileN / 4], second_[kMaxTileN / 4];
  int held_ = 0;  // blocks: both, or the second
};

template <typename C>
__global__ __launch_bounds__(kGradThreads, 1) void weight_grad_kernel(
    const __grid_constant__ WeightGradParams p) {
  extern __shared__ __align__(1024) unsigned char shared[];
  const uint32_t memory = ptx::shared_address(shared);
  const int warp = __shfl_sync(~0u, int(threadIdx.x) / 32, 0);
  typename C::Stages ring(memory, memory + C::kBarriers);
  const GradQueue queue(memory + C::kQueue);
  const TokenRing tokens(memory + C::kTokens);
  const WorkNumbers numbers(memory + C::kNumbers, p.work_counter);
  if (threadIdx.x == 0) {
    ring.init(2, 32 * kGatherWarps);
    queue.init(kTileReaders);
    tokens.init();
    numbers.init();
    ptx::fence_barrier_init();
  }
  ptx::cluster_sync();
  if (p.early == Early::kNothing) ptx::grid_dependency_wait();
  ptx::grid_dependency_launch();

  const uint32_t staging = memory + C::kStaging;
  if (warp < kGatherWarps) {
    ptx::registers_release<C::kGatherRegisters>();
    GradProducer<C>(p, ring, queue).gather(tokens, warp == 0);
  } else if (warp < 12) {
    ptx::registers_acquire<C::kConsumerRegisters>();
    const int index = warp / 4 - 1;
    GradConsumer<C>(p, ring, index, staging + index * C::kPieceBytes, queue).run();
  } else {
    ptx::registers_release<C::kSideRegisters>();
    if (warp == 12) {
      GradFinder<C>(p, queue, tokens).run(GradScheduler(p, numbers));
    } else if (warp == 13) {
      GradProducer<C>(p, ring, queue).relay();
    } else {
      GradSender<C>(p, staging).run(queue, warp - 14);
    }
    __syncwarp();
  }
  ptx::grid_dependency_wait();
  ptx::cluster_sync();  // no CTA may leave while the other signals it
}

}  // namespace moec::cuda
