// SPDX-License-Identifier: Apache-2.0
// The warps that bring codes and rows of tiles of many rows: each has one of both alone, since a
// warp takes as long for a hundred instructions as the tensor cores for a k-block.
#pragma once

#include "backend/cuda/sm90/row_gemm_config.cuh"

namespace moec::cuda {

// All codes of a tile, by the warp that has found it.
template <typename C>
__device__ __forceinline__ void load_wide_codes(const typename C::Params& p,
                                                typename C::CodeRing& codes, const RowTile& tile) {
  using Weights = typename C::Weights;
  constexpr bool kPair = C::kBlocks == Blocks::kPair;
  const CUtensorMap* const first = p.weight_maps;
  const CUtensorMap* const second = p.weight_maps + kPair;
  const int feature = first_feature(p, tile.feature_tile);
  const int feature_of_second = feature + (kPair ? 0 : kBlockFeatures);
  constexpr int kStep = Weights::kLineBytes;  // of a k-block, in the map's bytes
  for (int kb = 0, k = 0; kb < p.k_blocks; ++kb, k += kStep, codes.advance()) {
    codes.wait_empty();
    if (ptx::elect_one()) {
      ptx::barrier_arrive_expect(codes.full(), 2 * Weights::kBlockStride);
      ptx::tensor_load(codes.stage(), first, codes.full(),
                       ptx::Coordinate{k, feature, tile.expert});
      ptx::tensor_load(codes.stage() + Weights::kBlockStride, second, codes.full(),
                       ptx::Coordinate{k, feature_of_second, tile.expert});
    }
    __syncwarp();
  }
}

// Rows that are not gathered. Behind a tile's are zeros up to a unit.
template <typename C>
class WideRowLoader {
 public:
  __device__ WideRowLoader(const typename C::Params& p, typename C::Stages& ring)
      : p_(p), ring_(ring) {}

  __device__ void run(TileQueue& queue) {
    RowTile tile;
    bool more = queue.take(tile);
    if (p_.early == Early::kWeights) {
      if (!p_.done) ptx::grid_dependency_wait();
      if (p_.done && more) wait_done<C>(p_, tile);
    }
    for (; more; more = queue.take(tile)) load(tile);
  }

 private:
  static __device__ int units(int rows) { return (rows + kRowUnit - 1) / kRowUnit; }
  __device__ void load(const RowTile& tile) {
    const int rows = min(tile.rows, kHalfWide), others = tile.rows - rows;
    const CUtensorMap* const map = &p_.rows.of_units[units(rows) - 1];
    const CUtensorMap* const other = &p_.rows.of_units[max(units(others) - 1, 0)];
    const int end = tile.row_begin + rows, bytes = units(tile.rows) * kRowUnit * 128;
    for (int kb = 0, k = 0; kb < p_.k_blocks; ++kb, k += kTileK, ring_.advance()) {
      ring_.wait_empty();
      if (ptx::elect_one()) {
        ptx::barrier_arrive_expect(ring_.full(), bytes);
        ptx::tensor_load(ring_.operand_n(), map, ring_.full(),
                         ptx::Coordinate4{k, 0, kWindowRows - rows, end});
        if (others > 0)
          ptx::tensor_load(ring_.operand_n() + kHalfWide * 128, other, ring_.full(),
                           ptx::Coordinate4{k, 0, kWindowRows - others, end + others});
      }
      __syncwarp();
    }
  }
  const typename C::Params& p_;
  typename C::Stages& ring_;
};

// Rows that are gathered: eight lanes copy a row, a chunk each. A lane keeps where its rows are, in
// units of 16 bytes from x.
template <typename C>
class WideGatherer {
 public:
  using Params = typename C::Params;
  __device__ WideGatherer(const Params& p, typename C::Stages& ring, int warp)
      : p_(p), ring_(ring), warp_(warp - C::kFirstGather) {}

  __device__ void run(TileQueue& queue) {
    for (RowTile tile; queue.take(tile);) {
      find_rows(tile);
      const uint32_t first = (row(0, 0) & 7) ^ chunk();  // under the swizzle
      const uint32_t to = row(0, 0) * 128 + (first << 4);
      const char* from = static_cast<const char*>(p_.x) + 16 * chunk();
      for (int kb = 0; kb < p_.k_blocks; ++kb, ring_.advance(), from += 2 * kTileK) {
        const bool inside = kb * kTileK + 8 * chunk() < p_.k_size;
        ring_.wait_empty();
        if (all_present_ && (kb + 1) * kTileK <= p_.k_size)
          gather<true>(tile.rows, ring_.operand_n() + to, from, true);
        else
          gather<false>(tile.rows, ring_.operand_n() + to, from, inside);
        ptx::copy_async_arrive(ring_.full());
      }
    }
  }

 private:
  static constexpr uint32_t kAbsent = ~0u;
  static constexpr int kRowsAtOnce = 4, kCopies = 4, kGroupRows = kRowsAtOnce * kCopies;
  static constexpr int kWarps = C::kGatherWarps, kGroups = C::kMaxRows / kGroupRows;
  static constexpr int kMost = (kGroups + kWarps - 1) / kWarps;  // groups of a warp

  static __device__ int lane() { return int(threadIdx.x) & 31; }
  static __device__ int chunk() { return lane() & 7; }
  // Of copy i of this warp's group g.
  __device__ int row(int g, int i) const {
    return (g * kWarps + warp_) * kGroupRows + i * kRowsAtOnce + lane() / 8;
  }
  // Behind the tile's rows is the last one again: nothing of it is stored.
  __device__ void find_rows(const RowTile& tile) {
    all_present_ = true;
#pragma unroll
    for (int g = 0; g < kMost; ++g)
#pragma unroll
      for (int i = 0; i < kCopies; ++i) {
        const int from = tile.row_begin + min(row(g, i), tile.rows - 1);
        const int token = __ldg(p_.row_token + from);
        all_present_ &= token >= 0;
        at_[g][i] = token < 0 ? kAbsent : uint32_t(token) * uint32_t(p_.x_stride / 8);
      }
    all_present_ = __all_sync(~0u, all_present_);
  }
  // kAll: rows are of x, and their k inside.
  template <bool kAll>
  __device__ __forceinline__ void gather(int rows, uint32_t to, const char* from,
                                         bool inside) const {
    const uint32_t other = to ^ 1 << 6;
#pragma unroll
    for (int g = 0; g < kMost; ++g) {
      if ((g * kWarps + warp_) * kGroupRows >= rows) break;
#pragma unroll
      for (int i = 0; i < kCopies; ++i) {
        const uint32_t place =
            (i & 1 ? other : to) + (g * kWarps * kGroupRows + i * kRowsAtOnce) * 128;
        const char* const source = from + uint64_t(at_[g][i]) * 16;
        if constexpr (kAll)
          ptx::copy_async_if(true, place, source, keep_);
        else
          ptx::copy_async(place, source, at_[g][i] != kAbsent && inside ? 16 : 0, keep_);
      }
    }
  }

  const Params& p_;
  typename C::Stages& ring_;
  const int warp_;
  const uint64_t keep_ = ptx::policy_keep();
  uint32_t at_[kMost][kCopies];
  bool all_present_ = false;
};

}  // namespace moec::cuda
