// SPDX-License-Identifier: Apache-2.0
// The weight gradient kernel for sm_90a. Both operands are MN-major as they lie in memory: k is the
// row. The m operand (activations or their gradients) is contiguous per expert and comes by TMA,
// the n operand (x or d_y) is gathered by token.
//
//   k tail   the gathered operand is zero past the expert's rows. The other one then holds the next
//            expert's rows, or anything at all past the last, and 0 * NaN is NaN: consumers clear
//            the at most 15 rows that the last k16 step reads.
//   grid     persistent, clusters of two CTAs that share the m operand by multicast
//   order    rows in plan order, one owner for each element: deterministic
#pragma once

#include "backend/cuda/element.cuh"
#include "backend/cuda/tile_mma.cuh"
#include "backend/cuda/weight_grad.h"

namespace moec::cuda {

constexpr int kGradStages = 4;
constexpr int kGradStaging = 2 * kBlockBytes;  // of one warpgroup: two buffers of 64 x 64 elements
constexpr int kGradBarriers = kGradStages * kStageBytes + 2 * kGradStaging;
constexpr int kGradSharedBytes = kGradBarriers + 2 * kGradStages * 8;

template <typename Element>
class GradProducer {
 public:
  __device__ GradProducer(const WeightGradParams& p, Ring<kGradStages>& ring, bool first_warp)
      : p_(p),
        ring_(ring),
        rank_(int(ptx::cluster_rank())),
        lane_(threadIdx.x & 31),
        first_warp_(first_warp) {}

  __device__ void run(GradScheduler& scheduler) {
    GradTile tile;
    while (scheduler.next(tile)) {
      const int part = tile.m_tile >= p_.m_tiles_of_part;
      const int m = (tile.m_tile - part * p_.m_tiles_of_part) * kTileM;
      prefetch_tokens(tile, 0);
      for (int row = 0; row < tile.rows; row += kTileK) {
        const int low = low_, high = high_;
        prefetch_tokens(tile, row + kTileK);
        ring_.wait_empty();
        if (first_warp_ && ptx::elect_one()) {
          ptx::barrier_arrive_expect(ring_.full(), kOperandMBytes);
          load_rows(m, part, tile.row_begin + row);
        }
        gather(tile.n_tile * kMaxTileN, low, high);
        ring_.advance();
      }
    }
    __syncwarp();
  }

 private:
  // Lane l holds the tokens of rows l and 32 + l of a k-block.
  __device__ void prefetch_tokens(const GradTile& tile, int row) {
    low_ = token(tile, row + lane_);
    high_ = token(tile, row + 32 + lane_);
  }
  __device__ int token(const GradTile& tile, int row) const {
    return row < tile.rows ? __ldg(p_.row_token + tile.row_begin + row) : -1;
  }
  __device__ void load_rows(int m, int part, int row) const {
    for (int block = 2 * rank_; block < 2 * rank_ + 2; ++block) {
      ptx::tensor_load_multicast(ring_.operand_m() + block * kBlockBytes, &p_.row_map, ring_.full(),
                                 {m + 64 * block, part, row}, 3);
    }
  }
  // Thread t copies chunk t % 16 of rows t / 16 + 8 i.
  __device__ void gather(int n, int low, int high) {
    const int chunk = threadIdx.x & 15, row0 = int(threadIdx.x) / 16;
    const bool inside = n + chunk * 8 < p_.n_size;
    const char* const x = static_cast<const char*>(p_.x) + (inside ? n + chunk * 8 : 0) * 2;
    const uint32_t stride = uint32_t(p_.x_stride * 2);
    const uint32_t to = ring_.operand_n() + chunk / 8 * kBlockBytes + swizzled(row0, chunk & 7);
#pragma unroll
    for (int i = 0; i < kTileK / 8; ++i) {
      const int token = __shfl_sync(~0u, i < 4 ? low : high, (row0 + 8 * i) & 31);
      ptx::copy_async(to + i * 8 * 128, x + uint64_t(uint32_t(max(token, 0))) * stride,
                      inside && token >= 0 ? 16 : 0);
    }
    ptx::copy_async_arrive(ring_.full());
  }

  const WeightGradParams& p_;
  Ring<kGradStages>& ring_;
  int rank_, lane_, low_, high_;
  bool first_warp_;
};

template <typename Element, bool kOutMContiguous>
class GradConsumer {
 public:
  __device__ GradConsumer(const WeightGradParams& p, Ring<kGradStages>& ring, int warp,
                          uint32_t staging)
      : p_(p),
        ring_(ring),
        index_(warp / 4 - 1),
        thread_(threadIdx.x & 127),
        staging_(staging),
        first_warp_(warp % 4 == 0) {}

  __device__ void run(GradScheduler& scheduler) {
    GradTile tile, next;
    for (bool more = scheduler.next(tile); more; tile = next) {
      Accumulators acc;
      const int full = tile.rows / kTileK, rest = tile.rows % kTileK;
      multiply<Element, kMaxTileN, Major::kMN, Major::kMN, true>(acc, ring_, index_, full);
      if (rest > 0) prepare_rest(rest);
      for (int k16 = 0; 16 * k16 < rest; ++k16) {
        wgmma_fence();
        multiply_step<Element, kMaxTileN, Major::kMN, Major::kMN>(acc, ring_, index_, k16,
                                                                  full + k16);
        wgmma_commit();
      }
      more = scheduler.next(next);
      wgmma_wait<0>();
      if (full > 0) ring_.release_previous(thread_ & 31);
      if (rest > 0) {
        ring_.advance();
        ring_.release_previous(thread_ & 31);
      }
      const bool empty = tile.rows == 0;  // nothing was multiplied: the accumulators hold anything
      send(acc.first, tile, 0, empty);
      send(acc.second, tile, 1, empty);
    }
    if (leads()) ptx::bulk_wait_read<0>();
  }

 private:
  // The thread that issues bulk copies. All lanes call it.
  __device__ bool leads() const { return first_warp_ && ptx::elect_one(); }
  __device__ void sync() const { ptx::named_barrier(1 + index_, 128); }

  // The last k-block has `rows` < 64 real rows.
  __device__ void prepare_rest(int rows) {
    ring_.wait_full();
    clear_rows(rows);
  }

  // Rows [rows, next multiple of 16) of this warpgroup's two blocks of the m operand.
  __device__ void clear_rows(int rows) const {
    const int chunks = (-rows & 15) * 8;
    for (int i = thread_; i < 2 * chunks; i += 128) {
      const int second = i >= chunks, at = i - second * chunks;
      ptx::shared_store(
          ring_.operand_m() + (index_ + 2 * second) * kBlockBytes + rows * 128 + at * 16, uint4{});
    }
    ptx::fence_proxy_async();
    sync();
  }

  // One 64 x 128 accumulator, in two halves of 64 x 64 that take the staging buffers in turn; bulk
  // copies read one while the other is filled. What lies outside the matrix is clipped.
  __device__ void send(const float (&acc)[kMaxTileN / 2], const GradTile& tile, int block,
                       bool empty) {
    const int part = tile.m_tile >= p_.m_tiles_of_part;
    const int m = (tile.m_tile - part * p_.m_tiles_of_part) * kTileM + index_ * 64 + block * 128;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint32_t buffer = staging_ + half * kBlockBytes;
      const int n = tile.n_tile * kMaxTileN + half * 64;
      if (leads()) ptx::bulk_wait_read<1>();
      sync();
#pragma unroll
      for (int s = 0; s < 4; ++s) stage(acc, half * 4 + s, buffer, empty);
      ptx::fence_proxy_async();
      sync();
      if (leads()) {
        if (m < p_.m_size && n < p_.n_size) {
          ptx::tensor_store(&p_.out_maps[part], buffer,
                            kOutMContiguous ? ptx::Coordinate{m, n, tile.expert}
                                            : ptx::Coordinate{n, m, tile.expert});
        }
        ptx::bulk_commit();
      }
    }
  }

  // 16 columns n of the accumulator, into [64 n][64 m] or [64 m][64 n].
  __device__ void stage(const float (&acc)[kMaxTileN / 2], int s, uint32_t buffer,
                        bool empty) const {
    const int lane = thread_ & 31, warp = thread_ >> 5;
    uint32_t v[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      v[i] = empty ? 0 : pack<Element>(acc[8 * s + 2 * i], acc[8 * s + 2 * i + 1]);
    }
    if constexpr (kOutMContiguous) {
      const int row = 16 * (s & 3) + (lane >> 4) * 8 + (lane & 7);
      ptx::store_matrix_transposed(buffer + swizzled(row, 2 * warp + (lane >> 3 & 1)), v[0], v[1],
                                   v[2], v[3]);
    } else {
      const int row = 16 * warp + (lane & 15);
      ptx::store_matrix(buffer + swizzled(row, (s & 3) * 2 + (lane >> 4)), v[0], v[1], v[2], v[3]);
    }
  }

  const WeightGradParams& p_;
  Ring<kGradStages>& ring_;
  int index_, thread_;
  uint32_t staging_;
  bool first_warp_;
};

template <typename Element, bool kOutMContiguous>
__global__ __cluster_dims__(kClusterSize, 1, 1)
    __launch_bounds__(kThreads,
                      1) void weight_grad_kernel(const __grid_constant__ WeightGradParams p) {
  extern __shared__ __align__(1024) unsigned char shared[];
  const uint32_t memory = ptx::shared_address(shared);
  const int warp = __shfl_sync(~0u, int(threadIdx.x) / 32, 0);
  Ring<kGradStages> ring(memory, memory + kGradBarriers);
  if (threadIdx.x == 0) {
    ring.init(1 + kProducers);
    ptx::fence_barrier_init();
  }
  ptx::cluster_sync();
  ptx::grid_dependency_wait();
  ptx::grid_dependency_launch();
  GradScheduler scheduler(p.group_offsets, p.num_experts, p.m_tiles, p.n_tiles);

  if (warp < kProducers / 32) {
    ptx::registers_release<40>();
    GradProducer<Element>(p, ring, warp == 0).run(scheduler);
  } else {
    ptx::registers_acquire<232>();
    const int index = warp / 4 - 1;
    GradConsumer<Element, kOutMContiguous>(
        p, ring, warp, memory + kGradStages * kStageBytes + index * kGradStaging)
        .run(scheduler);
  }
  ptx::cluster_sync();  // no CTA may leave while its neighbour still signals it
}

}  // namespace moec::cuda
