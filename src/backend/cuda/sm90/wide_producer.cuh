// SPDX-License-Identifier: Apache-2.0
// The warps that bring codes and rows of wide tiles: each has one of both alone, since a warp takes
// as long for a hundred instructions as the tensor cores for a k-block.
#pragma once

#include "backend/cuda/sm90/row_producer.cuh"

namespace moec::cuda {

// Where the second of two parts of k begins: k starts anew there, and what belongs to the part is
// the one behind that of the first.
template <typename Params, typename Of>
__device__ __forceinline__ void next_part(const Params& p, int kb, int& k, Of& of) {
  if (kb != p.k_blocks_of_part) return;
  k = 0;
  ++of;
}

template <typename C>
__device__ __forceinline__ void load_wide_codes(const typename C::Params& p, TileQueue& queue,
                                                uint32_t memory) {
  using Weights = typename C::Weights;
  constexpr bool kPair = C::kBlocks == Blocks::kPair, kAlongK = C::kMajor == Major::kK;
  constexpr int kStep = kAlongK ? Weights::kLineBytes : kTileK;  // of a k-block, as the map has it
  typename C::CodeRing codes(memory + C::kCodeRing, memory + C::kCodeBarriers);
  for (RowTile tile; queue.take(tile);) {
    const int first = first_feature(p, tile.feature_tile);
    const int second = first + (kPair ? 0 : kBlockFeatures);
    const CUtensorMap* maps = p.weight_maps;
    for (int kb = 0, k = 0; kb < p.narrow_from; ++kb, k += kStep, codes.advance()) {
      if constexpr (!kAlongK) next_part(p, kb, k, maps);
      const auto at = [&](int feature) {
        return kAlongK ? ptx::Coordinate{k, feature, tile.expert}
                       : ptx::Coordinate{Weights::column(p, feature), k, tile.expert};
      };
      codes.wait_empty();
      if (ptx::elect_one()) {
        ptx::barrier_arrive_expect(codes.full(), codes.kStageBytes);
        ptx::tensor_load(codes.stage(), maps, codes.full(), at(first));
        ptx::tensor_load(codes.stage() + Weights::kBlockStride, maps + kPair, codes.full(),
                         at(second));
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
      int part = 0;
      for (int kb = 0, k = 0; kb < p_.narrow_from; ++kb, k += kTileK) {
        if constexpr (C::kMajor == Major::kMN) next_part(p_, kb, k, part);
        load(p_.rows, tile, k, part);
        if (kb == 0) tiles.prepare();
      }
      for (int kb = p_.narrow_from; kb < p_.k_blocks; ++kb)
        load(p_.narrow_rows, tile, (kb - p_.narrow_from) * kTileK, 0);
    }
  }

 private:
  static __device__ int units(int rows) { return (rows + kRowUnit - 1) / kRowUnit; }
  // A k-block, in two halves of the rows.
  __device__ __forceinline__ void load(const RowMaps& maps, const RowTile& tile, int k, int part) {
    const int rows = min(tile.rows, kHalfWide), others = tile.rows - rows;
    const int end = tile.row_begin + rows;
    ring_.wait_empty();
    if (ptx::elect_one()) {
      ptx::barrier_arrive_expect(ring_.full(), units(tile.rows) * kRowUnit * 128);
      ptx::tensor_load(ring_.operand_n(), &maps.of_units[units(rows) - 1], ring_.full(),
                       ptx::Coordinate4{k, part, kWindowRows - rows, end});
      if (others > 0)
        ptx::tensor_load(ring_.operand_n() + kHalfWide * 128, &maps.of_units[units(others) - 1],
                         ring_.full(),
                         ptx::Coordinate4{k, part, kWindowRows - others, end + others});
    }
    ring_.advance();
    __syncwarp();
  }
  const typename C::Params& p_;
  typename C::Stages& ring_;
};

}  // namespace moec::cuda
