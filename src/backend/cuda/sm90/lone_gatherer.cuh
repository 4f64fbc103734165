// SPDX-License-Identifier: Apache-2.0
// One warp that gathers all rows of a tile, where the other warps have their hands full with codes.
// It has no registers for as many addresses: they lie in shared memory, in units of 16 bytes from
// x, so that a lane reads those of its next four rows at once.
//
//   rows     [group of 16 rows][row % 4][row / 4 % 4]: 4 bytes each; kAbsent: a row of zeros. One
//            group more may be read
//   arrival  of each lane, when its copies have landed
#pragma once

#include "backend/cuda/sm90/row_producer.cuh"

namespace moec::cuda {

template <typename C>
class LoneGatherer {
 public:
  using Params = typename C::Params;
  static constexpr int kRowBytes = 4;

  // Eight lanes copy a row, a chunk each: this one from row row0 on.
  __device__ LoneGatherer(const Params& p, typename C::Stages& ring, uint32_t rows)
      : p_(p), ring_(ring), rows_(rows), to_(swizzled(row0(), chunk())) {}

  __device__ void run(TileQueue& queue) {
    for (RowTile tile; queue.take(tile);) {
      find_rows(tile);
      const char* from = static_cast<const char*>(p_.x) + 16 * chunk();
      int left = p_.k_size - 8 * chunk();
      for (int kb = 0; kb < p_.k_blocks; ++kb, ring_.advance()) {
        ring_.wait_empty();
        if (kb < p_.narrow_from)
          gather(tile, from, left > 0);
        else
          copy_narrow(tile, kb);
        ptx::copy_async_arrive(ring_.full());
        from += 2 * kTileK;
        left -= kTileK;
      }
    }
  }

 private:
  static constexpr uint32_t kAbsent = ~0u;
  static constexpr int kRowsAtOnce = 4, kCopies = 4, kGroupRows = kRowsAtOnce * kCopies;

  static __device__ int lane() { return int(threadIdx.x) & 31; }
  static __device__ int chunk() { return lane() & 7; }
  static __device__ int row0() { return lane() / 8; }

  // Behind the copied rows, and for padding ones, are zeros.
  __device__ void find_rows(const RowTile& tile) const {
    __syncwarp();
#pragma unroll
    for (int i = 0; i < C::kMaxRows / 32; ++i) {
      const int row = lane() + 32 * i;
      const int from = tile.row_begin + min(row, tile.rows - 1);
      const int token = row < copied_rows(tile) ? __ldg(p_.row_token + from) : -1;
      const uint32_t at = token < 0 ? kAbsent : uint32_t(token) * uint32_t(p_.x_stride / 8);
      const int place = row / kGroupRows * kGroupRows + row % 4 * 4 + row / 4 % 4;
      ptx::shared_store(rows_ + kRowBytes * place, std::bit_cast<float>(at));
    }
    __syncwarp();
  }
  // Where the chunk of row row0 + 4 i of a group goes.
  static __device__ __forceinline__ uint32_t place(uint32_t to, int i) {
    return (to ^ (i & 1) << 6) + i * (kRowsAtOnce * 128);
  }
  __device__ __forceinline__ void gather(const RowTile& tile, const char* from, bool inside) const {
    uint32_t to = ring_.operand_n() + to_, rows = rows_ + kRowBytes * 4 * row0();
    uint4 next = ptx::shared_load(rows);
#pragma unroll 1
    for (int left = tile.rows; left > 0; left -= kGroupRows, to += kGroupRows * 128) {
      const uint32_t at[kCopies] = {next.x, next.y, next.z, next.w};
      rows += kRowBytes * kGroupRows;
      next = ptx::shared_load(rows);
#pragma unroll
      for (int i = 0; i < kCopies; ++i)
        ptx::copy_async(place(to, i), from + uint64_t(at[i]) * 16,
                        at[i] != kAbsent && inside ? 16 : 0, keep_);
    }
  }
  // Narrow rows lie in the order of the tile's.
  __device__ void copy_narrow(const RowTile& tile, int kb) const {
    const int k = (kb - p_.narrow_from) * kTileK + chunk() * 8;
    const char* const rows = static_cast<const char*>(p_.narrow) + 2 * k;
    const uint32_t bytes = k < p_.rank ? 16 : 0;
    uint32_t to = ring_.operand_n() + to_;
#pragma unroll 1
    for (int first = row0(); first < tile.rows; first += kGroupRows, to += kGroupRows * 128)
#pragma unroll
      for (int i = 0; i < kCopies; ++i) {
        const int from = tile.row_begin + min(first + i * kRowsAtOnce, tile.rows - 1);
        ptx::copy_async(place(to, i), rows + uint64_t(uint32_t(from)) * uint32_t(2 * p_.rank),
                        bytes, keep_);
      }
  }

  const Params& p_;
  typename C::Stages& ring_;
  const uint32_t rows_, to_;
  const uint64_t keep_ = ptx::policy_keep();
};

}  // namespace moec::cuda
