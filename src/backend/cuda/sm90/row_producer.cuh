// SPDX-License-Identifier: Apache-2.0
// The warps that bring the operands of a row GEMM into its stages (row_gemm.cuh): one that loads
// weights, codes and rows not gathered, and those that gather rows.
#pragma once

#include "backend/cuda/sm90/pace.cuh"
#include "backend/cuda/sm90/row_gemm_config.cuh"
#include "backend/cuda/sm90/weight_decoder.cuh"

namespace moec::cuda {

// Until all rows of the tile's expert are in memory, for bulk copies too. By a whole warp; a warp
// that takes the tile from it by a barrier need not look again.
template <typename C>
__device__ __forceinline__ void wait_done(const RowGemmParams& p, const RowTile& tile) {
  const int rows = p.group_offsets[tile.expert + 1] - p.group_offsets[tile.expert];
  const unsigned all = unsigned(rows) * p.done_tiles;
  if (ptx::elect_one()) {
    while (ptx::load_acquire(p.done + tile.expert) < all) __nanosleep(64);
    ptx::fence_proxy_async_all();
  }
  __syncwarp();
}

// Of a tile that is gathered: the row past an odd end is the last one again, so that the two rows
// of a register never differ in being defined.
__device__ __forceinline__ int copied_rows(const RowTile& tile) {
  return (tile.rows + 1) & ~1;
}

template <typename C>
class RowProducer {
 public:
  using Params = typename C::Params;
  // pair_barrier: for the arrivals of the two loaders. codes: the memory of decoders.
  __device__ RowProducer(const Params& p, typename C::Stages& ring, uint32_t pair_barrier,
                         uint32_t codes)
      : p_(p), ring_(ring), pair_barrier_(pair_barrier), codes_(codes) {}

  // The next tile, and where its rows come from, are looked up early in this one.
  template <bool kGathers>
  __device__ void run(TileReader tiles) {
    RowTile tile, next;
    bool more = tiles.next(tile);
    if (kGathers && more) find_tokens(tile);
    const int ask = min(6, p_.k_blocks - 1);
    int ahead = 0;  // k-blocks whose weights are on their way
    Pace pace(kGathers ? nullptr : p_.steps);
    if constexpr (!C::kGather) {
      if (p_.early == Early::kWeights) {
        if (more) ahead = load_first_weights(tile);
        if (!p_.done) ptx::grid_dependency_wait();
        if (p_.done && more) wait_done<C>(p_, tile);
      }
    }
    for (; more; tile = next) {
      if constexpr (kGathers) find_rows();
      for (int kb = 0; kb < p_.k_blocks; ++kb) {
        pace.keep(kb);
        if (!kGathers && !shared(tile) && kb % kMeet == 0) meet();
        ring_.wait_empty();
        if (!kGathers && ptx::elect_one()) {
          if (kb >= ahead) load_operand(ring_, tile, kb);
          load_rows(tile, kb);
        }
        if constexpr (kGathers) gather(tile, kb);
        ring_.advance();
        if (kb == 0) tiles.prepare();
        if (kb == ask) {
          more = tiles.next(next);
          if (kGathers && more) find_tokens(next);
        }
      }
      ahead = 0;
    }
    pace.leave();
    __syncwarp();
  }

 private:
  static constexpr int kMeet = 8;  // k-blocks
  // The two loaders of a pair wait for each other: what both want, they shall want at once. Each
  // arrives at its own barrier, too: or the one that comes first could be a whole phase late when
  // it looks, the other one having come to the next meeting, and would wait for ever.
  __device__ void meet() {
    if (ptx::elect_one()) {
      for (int rank = 0; rank < kClusterSize; ++rank) {
        ptx::barrier_arrive_cluster(ptx::cluster_address(pair_barrier_, rank));
      }
    }
    ptx::barrier_wait(pair_barrier_, pair_phase_);
    pair_phase_ ^= 1;
  }
  __device__ bool shared(const RowTile& tile) const { return p_.shares && tile.together; }
  __device__ int load_first_weights(const RowTile& tile) const {
    const int count = min(p_.k_blocks, C::kStages);
    typename C::Stages ring = ring_;
    for (int kb = 0; kb < count; ++kb, ring.advance()) {
      if (ptx::elect_one()) load_operand(ring, tile, kb);
    }
    return count;
  }
  __device__ int part(int kb) const { return kb >= p_.k_blocks_of_part; }
  __device__ int k(int kb) const { return (kb - part(kb) * p_.k_blocks_of_part) * kTileK; }
  static __device__ int units(const RowTile& tile) { return (tile.rows + kRowUnit - 1) / kRowUnit; }

  __device__ bool narrow(int kb) const { return kb >= p_.narrow_from; }
  __device__ int narrow_k(int kb) const { return (kb - p_.narrow_from) * kTileK; }
  // Announces the bytes of the m operand and of rows that are not gathered; where the m operand's
  // are to arrive.
  template <typename Weights>
  __device__ uint32_t announce(const typename C::Stages& ring, const RowTile& tile) const {
    const uint32_t row_bytes = C::kGather ? 0 : units(tile) * kRowUnit * 128;
    if constexpr (C::kCoded) {
      ptx::barrier_arrive_expect(codes_.of(ring), Weights::bytes(p_));
      if (C::kAnnounces) ptx::barrier_arrive_expect(ring.full(), row_bytes);
      return codes_.of(ring);
    } else {
      ptx::barrier_arrive_expect(ring.full(), Weights::bytes(p_) + row_bytes);
      return ring.full();
    }
  }
  template <typename Weights>
  __device__ void load(const typename C::Stages& ring, const RowTile& tile,
                       const OperandM& from) const {
    const uint32_t arrived = announce<Weights>(ring, tile);
    load_operand_m<Weights, C::kBlocks>(p_, ring.operand_m(), arrived, from);
  }
  __device__ void load_operand(const typename C::Stages& ring, const RowTile& tile, int kb) const {
    const int feature = first_feature(p_, tile.feature_tile);
    if (narrow(kb)) {
      const int expert = p_.one_factor ? 0 : tile.expert;
      return load<PlainWeights<C::kMajor>>(
          ring, tile, {p_.factor_maps, 0, feature, narrow_k(kb), expert, shared(tile)});
    }
    load<typename C::Weights>(
        ring, tile, {p_.weight_maps, part(kb), feature, k(kb), tile.expert, shared(tile)});
  }
  // Behind the tile's rows are zeros, whose products take less energy than those of any rows.
  __device__ void load_rows(const RowTile& tile, int kb) const {
    if constexpr (!C::kGather) {
      const RowMaps& maps = narrow(kb) ? p_.narrow_rows : p_.rows;
      const int at = narrow(kb) ? narrow_k(kb) : k(kb), of_part = narrow(kb) ? 0 : part(kb);
      ptx::tensor_load(
          ring_.operand_n(), &maps.of_units[units(tile) - 1], ring_.full(),
          ptx::Coordinate4{at, of_part, kWindowRows - tile.rows, tile.row_begin + tile.rows});
    }
  }

  // Thread t copies chunk t % 8 of rows row0 + kRowsAtOnce * i, zeros for padding rows. Past the
  // tile's end the operand keeps what it held: what comes of that is never stored.
  __device__ void find_tokens(const RowTile& tile) {
    if constexpr (C::kGather) {
#pragma unroll
      for (int i = 0; i < kCopies; ++i) {
        const int row = row0_ + C::kRowsAtOnce * i;
        const int from = tile.row_begin + min(row, tile.rows - 1);
        token_[i] = row < copied_rows(tile) ? __ldg(p_.row_token + from) : 0;
      }
    }
  }
  __device__ void find_rows() {
    const char* const x = static_cast<const char*>(p_.x) + (threadIdx.x & 7) * 16;
    const uint32_t stride = uint32_t(p_.x_stride * 2);
    present_ = 0;
#pragma unroll
    for (int i = 0; i < kCopies; ++i) {
      from_[i] = x + uint64_t(uint32_t(max(token_[i], 0))) * stride;
      present_ |= (token_[i] >= 0) << i;
    }
    padded_ = __any_sync(~0u, present_ != (1u << kCopies) - 1);
  }
  // This loop feeds the tensor cores: an address is kept for each row and only advanced, and unless
  // there are padding rows or k ends, a copy is decided by the number of rows alone.
  __device__ void gather(const RowTile& tile, int kb) {
    const uint32_t to = ring_.operand_n() + swizzled(row0_, threadIdx.x & 7);
    const int left = copied_rows(tile) - row0_;
    if (padded_ || (kb + 1) * kTileK > p_.k_size) {
      if (narrow(kb)) {
        copy_narrow(tile, left, kb, to);
      } else {
        gather_padded(left, kb, to);
      }
    } else {
#pragma unroll
      for (int i = 0; i < kCopies; ++i) {
        const int row = C::kRowsAtOnce * i;
        ptx::copy_async_if(left > row, to + row * 128, from_[i], keep_);
        from_[i] += kTileK * 2;
      }
    }
    ptx::copy_async_arrive(C::kFences ? ring_.full() : ring_.landed());
  }
  __device__ void gather_padded(int left, int kb, uint32_t to) {
    const bool inside = kb * kTileK + (threadIdx.x & 7) * 8 < p_.k_size;
    const uint32_t present = inside ? present_ : 0;
#pragma unroll
    for (int i = 0; i < kCopies; ++i) {
      const int row = C::kRowsAtOnce * i;
      if (left > row) {
        ptx::copy_async(to + row * 128, from_[i], present & (1u << i) ? 16 : 0, keep_);
      }
      from_[i] += kTileK * 2;
    }
  }

  // Narrow rows lie in the order of the tile's.
  __device__ void copy_narrow(const RowTile& tile, int left, int kb, uint32_t to) const {
    const int k = narrow_k(kb) + (threadIdx.x & 7) * 8;
    const char* const rows = static_cast<const char*>(p_.narrow) + 2 * k;
    const uint32_t stride = 2 * p_.rank, bytes = k < p_.rank ? 16 : 0;
#pragma unroll 1
    for (int row = 0; row < left; row += C::kRowsAtOnce) {
      const int from = tile.row_begin + min(row0_ + row, tile.rows - 1);
      ptx::copy_async(to + row * 128, rows + uint64_t(uint32_t(from)) * stride, bytes, keep_);
    }
  }

  const Params& p_;
  typename C::Stages& ring_;
  uint32_t pair_barrier_, pair_phase_ = 0;
  const CodeBarriers<C::kStages> codes_;
  uint64_t keep_ = ptx::policy_keep();
  static constexpr int kCopies = C::kGather ? C::kMaxRows / C::kRowsAtOnce : 1;
  const int row0_ = int(threadIdx.x) / 8 - 4 * C::kFirstGather;  // the first row of this lane
  const char* from_[kCopies];
  int token_[kCopies];
  uint32_t present_;  // bit i: row i is one of x
  bool padded_;       // not all are
};

}  // namespace moec::cuda
