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

template <typename Element_, bool kF32_, bool kOutMContiguous_>
struct GradConfig {
  using Element = Element_;
  static constexpr bool kF32 = kF32_;  // of the gradient
  static constexpr bool kOutMContiguous = kOutMContiguous_;
  static constexpr int kStages = 4;
  static constexpr int kGroupStaging = 2 * kBlockBytes;              // 64 x 128 elements
  static constexpr int kStaging = kStages * kStageBytes<kMaxTileN>;  // offset
  static constexpr int kBarriers = kStaging + 2 * kGroupStaging;     // offset
  static constexpr int kSharedBytes = kBarriers + 2 * kStages * 8;
  using Stages = Ring<kStages, kMaxTileN, kClusterSize>;
};

template <typename C>
class GradProducer {
 public:
  __device__ GradProducer(const WeightGradParams& p, typename C::Stages& ring, bool first_warp)
      : p_(p),
        ring_(ring),
        rank_(int(ptx::cluster_rank())),
        lane_(threadIdx.x & 31),
        first_warp_(first_warp) {}

  // The tokens of a k-block are looked up one k-block ahead, also across tiles.
  __device__ void run(GradScheduler& scheduler) {
    GradTile tile, next;
    bool more = next_with_rows(scheduler, tile);
    if (more) prefetch_tokens(tile, 0);
    for (; more; tile = next) {
      const int part = tile.m_tile >= p_.m_tiles_of_part;
      const int m = (tile.m_tile - part * p_.m_tiles_of_part) * kTileM;
      for (int row = 0; row < tile.rows; row += kTileK) {
        const int low = low_, high = high_;
        if (row + kTileK < tile.rows) {
          prefetch_tokens(tile, row + kTileK);
        } else {
          more = next_with_rows(scheduler, next);
          if (more) prefetch_tokens(next, 0);
        }
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
  static __device__ bool next_with_rows(GradScheduler& scheduler, GradTile& tile) {
    while (scheduler.next(tile)) {
      if (tile.rows > 0) return true;
    }
    return false;
  }
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
                      inside && token >= 0 ? 16 : 0, keep_);
    }
    ptx::copy_async_arrive(ring_.full());
  }

  const WeightGradParams& p_;
  typename C::Stages& ring_;
  int rank_, lane_, low_, high_;
  bool first_warp_;
  uint64_t keep_ = ptx::policy_keep();
};

template <typename C>
class GradConsumer {
 public:
  using Element = typename C::Element;
  __device__ GradConsumer(const WeightGradParams& p, typename C::Stages& ring, int warp,
                          uint32_t staging)
      : p_(p),
        ring_(ring),
        index_(warp / 4 - 1),
        thread_(threadIdx.x & 127),
        staging_(staging),
        first_warp_(warp % 4 == 0) {}

  // A finished tile is packed into registers; its two blocks leave behind the first k-blocks of the
  // next one.
  __device__ void run(GradScheduler& scheduler) {
    GradTile tile, next;
    int piece = kPieces;
    for (bool more = scheduler.next(tile); more; tile = next) {
      Accumulators acc;
      const int full = tile.rows / kTileK, rest = tile.rows % kTileK;
      multiply<Element, kMaxTileN, Major::kMN, Major::kMN, true>(
          acc, ring_, index_, full, [&](int kb) {
            if (piece < kPieces && kb >= piece) copy_piece(piece++);
          });
      if (rest > 0) prepare_rest(rest);
      for (int k16 = 0; 16 * k16 < rest; ++k16) {
        wgmma_fence();
        multiply_step<Element, kMaxTileN, Major::kMN, Major::kMN>(acc, ring_, index_, k16,
                                                                  full + k16);
        wgmma_commit();
      }
      more = scheduler.next(next);
      while (piece < kPieces) copy_piece(piece++);
      wgmma_wait<0>();
      if (full > 0) ring_.release_previous(thread_ & 31);
      if (rest > 0) {
        ring_.advance();
        ring_.release_previous(thread_ & 31);
      }
      if constexpr (C::kF32) {
        locate(tile);
        if (tile.rows > 0 || !p_.accumulate) {
          send_f32(acc.first, held_.m, tile.rows == 0);
          send_f32(acc.second, held_.m + 128, tile.rows == 0);
        }
      } else {
        hold(acc, tile);
        piece = 0;
      }
    }
    while (piece < kPieces) copy_piece(piece++);
    if (leads()) ptx::bulk_wait_read<0>();
  }

 private:
  static constexpr int kPieces = 2;

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

  __device__ void hold(const Accumulators& acc, const GradTile& tile) {
    const bool empty = tile.rows == 0;  // nothing was multiplied: the accumulators hold anything
#pragma unroll
    for (int i = 0; i < kMaxTileN / 4; ++i) {
      first_[i] = empty ? 0 : pack<Element>(acc.first[2 * i], acc.first[2 * i + 1]);
      second_[i] = empty ? 0 : pack<Element>(acc.second[2 * i], acc.second[2 * i + 1]);
    }
    locate(tile);
  }
  __device__ void locate(const GradTile& tile) {
    const int part = tile.m_tile >= p_.m_tiles_of_part;
    held_ = {(tile.m_tile - part * p_.m_tiles_of_part) * kTileM + index_ * 64,
             tile.n_tile * kMaxTileN, tile.expert, part};
  }
  __device__ void copy_piece(int i) const {
    if (i == 0) copy_out(first_, held_.m);
    if (i == 1) copy_out(second_, held_.m + 128);
  }

  // 64 x 128 values as two boxes of 64 x 64. What lies outside the matrix is clipped.
  __device__ void copy_out(const uint32_t (&packed)[kMaxTileN / 4], int m) const {
    if (leads()) ptx::bulk_wait_read<0>();
    sync();
#pragma unroll
    for (int s = 0; s < 8; ++s) stage(packed + 4 * s, s & 3, staging_ + s / 4 * kBlockBytes);
    ptx::fence_proxy_async();
    sync();
    if (!leads()) return;
    for (int half = 0; half < 2; ++half) {
      const int n = held_.n + half * 64;
      write(staging_ + half * kBlockBytes, m, n);
    }
    ptx::bulk_commit();
  }

  // A staged box, from element (m, n) of the matrix. By one thread.
  __device__ void write(uint32_t buffer, int m, int n) const {
    if (m >= p_.m_size || n >= p_.n_size) return;
    const ptx::Coordinate at = C::kOutMContiguous ? ptx::Coordinate{m, n, held_.expert}
                                                  : ptx::Coordinate{n, m, held_.expert};
    const CUtensorMap* const map = &p_.out_maps[held_.part];
    if (p_.accumulate) {
      ptx::tensor_add(map, buffer, at);
    } else {
      ptx::tensor_store(map, buffer, at);
    }
  }

  // f32: four boxes of 64 x 32 values in two rounds, [64 m][32 n] or [64 n][32 m]. There are no
  // registers to hold them in, so the tensor cores wait.
  __device__ void send_f32(const float (&acc)[kMaxTileN / 2], int m, bool empty) const {
    const int lane = thread_ & 31, warp = thread_ >> 5;
#pragma unroll
    for (int round = 0; round < 2; ++round) {
      if (leads()) ptx::bulk_wait_read<0>();
      sync();
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
      ptx::fence_proxy_async();
      sync();
      if (!leads()) continue;
      for (int half = 0; half < 2; ++half) {
        const int n = held_.n + 64 * round;
        write(staging_ + half * kBlockBytes, m + (C::kOutMContiguous ? 32 * half : 0),
              n + (C::kOutMContiguous ? 0 : 32 * half));
      }
      ptx::bulk_commit();
    }
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

  const WeightGradParams& p_;
  typename C::Stages& ring_;
  int index_, thread_;
  uint32_t staging_;
  bool first_warp_;
  uint32_t first_[kMaxTileN / 4], second_[kMaxTileN / 4];
  struct {
    int m, n, expert, part;
  } held_;
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
    ring.init(1 + kProducers);
    ptx::fence_barrier_init();
  }
  ptx::cluster_sync();
  if (p.early == Early::kNothing) ptx::grid_dependency_wait();
  ptx::grid_dependency_launch();
  GradScheduler scheduler(p.group_offsets, p.num_experts, p.m_tiles, p.n_tiles);

  if (warp < kProducers / 32) {
    ptx::registers_release<40>();
    GradProducer<C>(p, ring, warp == 0).run(scheduler);
  } else {
    ptx::registers_acquire<232>();
    const int index = warp / 4 - 1;
    GradConsumer<C>(p, ring, warp, memory + C::kStaging + index * C::kGroupStaging).run(scheduler);
  }
  ptx::grid_dependency_wait();
  ptx::cluster_sync();  // no CTA may leave while its neighbour still signals it
}

}  // namespace moec::cuda
