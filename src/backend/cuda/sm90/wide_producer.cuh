// SPDX-License-Identifier: Apache-2.0
// The warps that bring codes and rows of wide tiles: each has one of both alone, since a warp takes
// as long for a hundred instructions as the tensor cores for a k-block.
#pragma once

#include "backend/cuda/sm90/row_producer.cuh"

namespace moec::cuda {

template <typename C>
__device__ __forceinline__ void load_wide_codes(const typename C::Params& p, TileQueue& queue,
                                                uint32_t memory) {
  using Weights = typename C::Weights;
  constexpr bool kPair = C::kBlocks == Blocks::kPair;
  constexpr int kStep = Weights::kLineBytes;  // of a k-block, in the map's bytes
  typename C::CodeRing codes(memory + C::kCodeRing, memory + C::kCodeBarriers);
  for (RowTile tile; queue.take(tile);) {
    const int first = first_feature(p, tile.feature_tile);
    const int second = first + (kPair ? 0 : kBlockFeatures);
    for (int kb = 0, k = 0; kb < p.narrow_from; ++kb, k += kStep, codes.advance()) {
      codes.wait_empty();
      if (ptx::elect_one()) {
        ptx::barrier_arrive_expect(codes.full(), codes.kStageBytes);
        ptx::tensor_load(codes.stage(), p.weight_maps, codes.full(),
                         ptx::Coordinate{k, first, tile.expert});
        ptx::tensor_load(codes.stage() + Weights::kBlockStride, p.weight_maps + kPair, codes.full(),
                         ptx::Coordinate{k, second, tile.expert});
      }
      __syncwarp();
    }
  }
}

// Behind a tile's rows are zeros up to a unit.
template <typename C>
class WideRowLoader {
 public:
  __device__ WideRowLoader(const typename C::Params& p, typename C::Stages& ring)
      : p_(p), ring_(ring) {}

  __device__ void run(TileReader tiles) {
    RowTile tile;
    bool more = tiles.next(tile);
    if (p_.early == Early::kWeights) {
      if (!p_.done) ptx::grid_dependency_wait();
      if (p_.done && more) wait_done<C>(p_, tile);
    }
    for (; more; more = tiles.next(tile)) {
      for (int kb = 0; kb < p_.narrow_from; ++kb) {
        load(p_.rows, tile, kb * kTileK);
        if (kb == 0) tiles.prepare();
      }
      for (int kb = p_.narrow_from; kb < p_.k_blocks; ++kb)
        load(p_.narrow_rows, tile, (kb - p_.narrow_from) * kTileK);
    }
  }

 private:
  static __device__ int units(int rows) { return (rows + kRowUnit - 1) / kRowUnit; }
  // A k-block, in two halves of the rows.
  __device__ __forceinline__ void load(const RowMaps& maps, const RowTile& tile, int k) {
    const int rows = min(tile.rows, kHalfWide), others = tile.rows - rows;
    const int end = tile.row_begin + rows;
    ring_.wait_empty();
    if (ptx::elect_one()) {
      ptx::barrier_arrive_expect(ring_.full(), units(tile.rows) * kRowUnit * 128);
      ptx::tensor_load(ring_.operand_n(), &maps.of_units[units(rows) - 1], ring_.full(),
                       ptx::Coordinate4{k, 0, kWindowRows - rows, end});
      if (others > 0)
        ptx::tensor_load(ring_.operand_n() + kHalfWide * 128, &maps.of_units[units(others) - 1],
                         ring_.full(), ptx::Coordinate4{k, 0, kWindowRows - others, end + others});
    }
    ring_.advance();
    __syncwarp();
  }
  const typename C::Params& p_;
  typename C::Stages& ring_;
};

}  // namespace moec::cuda
