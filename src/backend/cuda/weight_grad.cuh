// SPDX-License-Identifier: Apache-2.0
// The weight gradient kernel for sm_90a. Both operands are MN-major as they lie in memory: k is the
// row. The m operand (activations or their gradients) is contiguous per expert and comes by TMA,
// the n operand (x or d_y) is gathered by token.
//
//   k        the first k-block of a tile has the rows that are left over, all others 64. There the
//            gathered operand is zero past its rows and the other one holds the expert's next rows.
//            Of an expert with one k-block it holds anything, and 0 * NaN is NaN: consumers clear
//            the at most 15 rows that the last k16 step reads
//   grid     persistent, clusters of two CTAs that share the m operand by multicast
//   roles    weight_grad_copies.cuh: four warps load and store; warpgroups 1 and 2 multiply
//   order    rows in one order, one owner for each element: deterministic
#pragma once

#include "backend/cuda/weight_grad_copies.cuh"

namespace moec::cuda {

template <typename C>
class GradConsumer {
 public:
  using Element = typename C::Element;
  __device__ GradConsumer(const WeightGradParams& p, typename C::Stages& ring, int index,
                          uint32_t staging)
      : p_(p),
        ring_(ring),
        index_(index),
        thread_(threadIdx.x & 127),
        staging_(staging),
        out_(index) {}

  // A finished tile is packed into registers; its two blocks are staged behind the first k-blocks
  // of the next one.
  __device__ void run(GradScheduler& scheduler) {
    GradTile tile, next;
    for (bool more = scheduler.next(tile); more; tile = next) {
      Accumulators acc;
      const int k_blocks = (tile.rows + kTileK - 1) / kTileK;
      const int blocks = min(2, (p_.m_blocks - 4 * tile.m_tile - index_ + 1) / 2);
      const bool narrow = p_.n_size - tile.n_tile * kMaxTileN <= kMaxTileN / 2;
      if (blocks == 2 && !narrow) {
        multiply_tile<2, kMaxTileN>(acc, tile.rows, k_blocks, [&] { stage_piece(); });
      } else {
        multiply_edge(acc, tile.rows, k_blocks, blocks, narrow);
      }
      more = scheduler.next(next);
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
  // the matrix. behind() runs while a k-block is multiplied. The last one is left in flight.
  template <int kBlocks, int kN, typename Behind>
  __device__ __forceinline__ void multiply_tile(Accumulators& acc, int rows, int k_blocks,
                                                Behind behind) {
    if (k_blocks == 0) return;
    const int some = first_rows(rows);
    ring_.wait_full();
    if (k_blocks == 1) clear_rows(some);
    ptx::fence_proxy_async();
    if (k_blocks == 1) ptx::named_barrier(1 + index_, 128);
#pragma unroll 1
    for (int k16 = 0; kBlocks > 0 && 16 * k16 < some; ++k16) {
      multiply<kBlocks, kN, 1>(acc, k16, k16);
    }
    behind();
    ring_.advance();
    for (int kb = 1; kb < k_blocks; ++kb) {
      ring_.wait_full();
      ptx::fence_proxy_async();  // rows were gathered by cp.async, that is by ordinary stores
      multiply<kBlocks, kN, kTileK / 16>(acc, 0, 1);
      wgmma_wait<1>();
      ring_.release_previous(thread_ & 31);
      behind();
      ring_.advance();
    }
  }
  // Products with what lies outside the matrix are left out.
  __device__ __forceinline__ void multiply_edge(Accumulators& acc, int rows, int k_blocks,
                                                int blocks, bool narrow) {
    stage_pieces();
    const auto nothing = [] {};
    if (blocks == 2) {
      multiply_tile<2, kMaxTileN / 2>(acc, rows, k_blocks, nothing);
    } else if (blocks == 1 && !narrow) {
      multiply_tile<1, kMaxTileN>(acc, rows, k_blocks, nothing);
    } else if (blocks == 1) {
      multiply_tile<1, kMaxTileN / 2>(acc, rows, k_blocks, nothing);
    } else {
      multiply_tile<0, kMaxTileN>(acc, rows, k_blocks, nothing);
    }
  }
  // kSteps k16 steps from k16, as one group. ptxas keeps groups in flight only where their length
  // is known.
  template <int kBlocks, int kN, int kSteps>
  __device__ __forceinline__ void multiply(Accumulators& acc, int k16, int keep) const {
    if constexpr (kBlocks > 0) {
      constexpr uint32_t kStep = kStepK16<Major::kMN>;
      const uint32_t first =
          operand_descriptor(ring_.operand_m() + index_ * kBlockBytes, kBlockBytes) + k16 * kStep;
      const uint32_t second = first + (2 * kBlockBytes >> 4);
      const uint32_t n = operand_descriptor(ring_.operand_n(), kBlockBytes) + k16 * kStep;
      wgmma_fence();
#pragma unroll
      for (uint32_t i = 0; i < kSteps * kStep; i += kStep) {
        wgmma<Element, kN, Major::kMN, Major::kMN>(acc.first, first + i, n + i, keep);
        if constexpr (kBlocks > 1) {
          wgmma<Element, kN, Major::kMN, Major::kMN>(acc.second, second + i, n + i, keep);
        }
      }
      wgmma_commit();
    }
  }

  // Rows [rows, next multiple of 16) of this warpgroup's two blocks of the m operand.
  __device__ void clear_rows(int rows) const {
    const int chunks = (-rows & 15) * 8;
    for (int i = thread_; i < 2 * chunks; i += 128) {
      const int second = i >= chunks, at = i - second * chunks;
      ptx::shared_store(
          ring_.operand_m() + (index_ + 2 * second) * kBlockBytes + rows * 128 + at * 16, uint4{});
    }
  }

  // Without rows nothing was multiplied: the accumulators hold anything.
  __device__ void hold(Accumulators& acc, bool empty) {
    if (empty) {
#pragma unroll
      for (int i = 0; i < kMaxTileN / 4; ++i) first_[i] = second_[i] = 0;
    } else {
#pragma unroll
      for (int i = 0; i < kMaxTileN / 4; ++i) {
        first_[i] = pack<Element>(acc.first[2 * i], acc.first[2 * i + 1]);
        second_[i] = pack<Element>(acc.second[2 * i], acc.second[2 * i + 1]);
      }
    }
    held_ = 2;
  }
  __device__ __forceinline__ void stage_pieces() {
    while (held_ > 0) stage_piece();
  }
  // The next block that is held, if any.
  __device__ __forceinline__ void stage_piece() {
    if (held_ == 0) return;
    out_.wait_free();
    if (held_ == 2) stage_block(first_);
    if (held_ == 1) stage_block(second_);
    out_.staged();
    --held_;
  }
  __device__ void stage_block(const uint32_t (&packed)[kMaxTileN / 4]) const {
#pragma unroll
    for (int s = 0; s < 8; ++s) stage(packed + 4 * s, s & 3, staging_ + s / 4 * kBlockBytes);
  }
  // 16 columns n of a block, into [64 n][64 m] or [64 m][64 n].
  __device__ void stage(const uint32_t* v, int s, uint32_t buffer) const {
    const int lane = thread_ & 31, warp = thread_ >> 5;
    if constexpr (C::kOutMContiguous) {
      const int row = 16 * s + (lane >> 4) * 8 + (lane & 7);
      ptx::store_matrix_transposed(buffer + swizzled(row, 2 * warp + (lane >> 3 & 1)), v[0], v[1],
                                   v[2], v[3]);
    } else {
      const int row = 16 * warp + (lane & 15);
      ptx::store_matrix(buffer + swizzled(row, s * 2 + (lane >> 4)), v[0], v[1], v[2], v[3]);
    }
  }

  // f32: two pieces of 64 x 64 values, each two boxes [64 m][32 n] or [64 n][32 m]. There are no
  // registers to hold them in, so the tensor cores wait.
  __device__ void stage_f32(const float (&acc)[kMaxTileN / 2], bool empty) const {
    const int lane = thread_ & 31, warp = thread_ >> 5;
#pragma unroll
    for (int round = 0; round < 2; ++round) {
      out_.wait_free();
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
      out_.staged();
    }
  }

  const WeightGradParams& p_;
  typename C::Stages& ring_;
  int index_, thread_;
  uint32_t staging_;
  PieceBarriers out_;
  uint32_t first_[kMaxTileN / 4], second_[kMaxTileN / 4];
  int held_ = 0;  // blocks: both, or the second
};

template <typename C>
__global__ __cluster_dims__(kClusterSize, 1, 1)
    __launch_bounds__(kThreads,
                      1) void weight_grad_kernel(const __grid_constant__ WeightGradParams p) {
  extern __shared__ __align__(1024) unsigned char shared[];
  const uint32_t memory = ptx::shared_address(shared);
  const int warp = __shfl_sync(~0u, int(threadIdx.x) / 32, 0);
  typename C::Stages ring(memory, memory + C::kBarriers);
  if (threadIdx.x == 0) {
    ring.init(1 + kGatherThreads);
    ptx::fence_barrier_init();
  }
  ptx::cluster_sync();
  if (p.early == Early::kNothing) ptx::grid_dependency_wait();
  ptx::grid_dependency_launch();
  GradScheduler scheduler(p.group_offsets, p.num_experts, p.m_tiles, p.n_tiles);

  const uint32_t staging = memory + C::kStaging;
  if (warp < kProducers / 32) {
    ptx::registers_release<C::kCopyRegisters>();
    GradProducer<C> producer(p, ring);
    if (warp == 0) {
      producer.load(scheduler);
    } else if (warp < 3) {
      producer.gather(scheduler);
    } else {
      GradSender<C>(p, staging).run(scheduler);
    }
  } else {
    ptx::registers_acquire<C::kConsumerRegisters>();
    const int index = warp / 4 - 1;
    GradConsumer<C>(p, ring, index, staging + index * C::kGroupStaging).run(scheduler);
  }
  ptx::grid_dependency_wait();
  ptx::cluster_sync();  // no CTA may leave while its neighbour still signals it
}

}  // namespace moec::cuda
