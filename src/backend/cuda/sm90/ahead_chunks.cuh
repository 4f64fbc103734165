// SPDX-License-Identifier: Apache-2.0
// How chunks of weights that are decoded ahead (ahead.h) come to the warp that loads: one warp of
// the CTA looks whether they are ready, some chunks early, and says where they are. The loader
// announces what has been read.
#pragma once

#include "backend/cuda/sm90/ahead.h"
#include "backend/cuda/sm90/row_producer.cuh"

namespace moec::cuda {

// 16 bytes a chunk: its first line in the ring, and its note. Behind the ring there are zeros, for
// tiles outside of the matrix.
using AheadQueue = SlotRing<8, 16>;

// What is announced when a chunk has been read: its slot, and what its tile adds.
constexpr int kNoteShift = 17;

// The warp that looks for the chunks of its CTA's tiles.
template <typename C>
class AheadWatcher {
 public:
  __device__ AheadWatcher(const AheadRowGemmParams& p, uint32_t chunks) : p_(p), chunks_(chunks) {}

  __device__ void run(TileQueue& queue) {
    const unsigned of_tile = unsigned(p_.parts * p_.chunks_of_part);
    for (RowTile tile; queue.take(tile);) {
      const bool outside = tile.feature_tile >= p_.feature_tiles;
      const Weights weights = weights_of(tile);
      for (unsigned i = 0; i < of_tile; ++i, chunks_.advance()) {
        const unsigned number = weights.number * of_tile + i;
        const unsigned slot = outside ? unsigned(p_.slots) : number & unsigned(p_.slots - 1);
        chunks_.wait_empty();
        if (ptx::elect_one()) {
          if (!outside) wait_ready(number, slot);
          const unsigned note = outside ? 0 : slot << kNoteShift | weights.reads;
          ptx::shared_store(chunks_.slot(), uint4{slot * kAheadLines, note});
          chunks_.arrive_full();
        }
        __syncwarp();
      }
    }
  }

 private:
  using Scheduler = typename C::Scheduler;
  struct Weights {
    unsigned number, reads;  // in the order of all; what the tile adds for a chunk that it has read
  };

  // The inverse of RowScheduler::find().
  __device__ Weights weights_of(const RowTile& tile) {
    const int begin = p_.group_offsets[tile.expert];
    const int rows = p_.group_offsets[tile.expert + 1] - begin;
    const unsigned m = Scheduler::row_tiles(rows), twos = m / 2, length = p_.band_length;
    const unsigned steps = unsigned(rows + kRowStep - 1) / kRowStep;
    const unsigned each = steps / m, extra = steps % m;
    const unsigned first = unsigned(tile.row_begin - begin) / kRowStep, longer = extra * (each + 1);
    const unsigned part = first < longer ? first / (each + 1) : (first - extra) / each;
    const unsigned last_band = Scheduler::bands(rows, length) - 1;
    const unsigned band = part == 2 * twos ? last_band : part / 2 / length;
    const unsigned readers =
        2 * min(length, twos - band * length) + (band == last_band ? m % 2 : 0);
    count_bands(tile.expert);
    const bool leads = part == 2 * band * length;
    return {(bands_before_ + band) * unsigned(p_.feature_tiles) + unsigned(tile.feature_tile),
            leads ? kAllRead - (readers - 1) : 1};
  }
  // Of all experts in front of this one.
  __device__ void count_bands(int expert) {
    for (; counted_ < expert; counted_ = min(counted_ + 32, expert)) {
      const int e = counted_ + (int(threadIdx.x) & 31);
      const int rows = e < expert ? p_.group_offsets[e + 1] - p_.group_offsets[e] : 0;
      bands_before_ += __reduce_add_sync(~0u, Scheduler::bands(rows, unsigned(p_.band_length)));
    }
  }
  __device__ void wait_ready(unsigned number, unsigned slot) const {
    const unsigned all = ((number >> p_.slots_shift) + 1) * kAheadBlocks;
    while (ptx::load_acquire(p_.counters->ready + slot) < all) __nanosleep(64);
    ptx::fence_proxy_async_all();
  }

  const AheadRowGemmParams& p_;
  AheadQueue chunks_;
  int counted_ = 0;
  unsigned bands_before_ = 0;
};

// The warp that loads, where weights are decoded ahead: in the place of RowProducer::run().
template <typename C>
class AheadLoader : RowProducer<C> {
  using Base = RowProducer<C>;
  using Base::p_, Base::ring_;

 public:
  __device__ AheadLoader(const AheadRowGemmParams& p, typename C::Stages& ring,
                         uint32_t pair_barrier, uint32_t chunks)
      : Base(p, ring, pair_barrier, chunks), chunks_(chunks) {}

  __device__ void run(TileReader tiles) {
    RowTile tile, next;
    bool more = tiles.next(tile);
    Pace pace(p_.steps);
    for (; more; tile = next) {
      const bool shared = Base::shared(tile);
      const uint32_t units = Base::units(tile);
      const Rows rows = {p_.rows.of_units + units - 1, tile.rows, tile.row_begin + tile.rows,
                         kOperandMBytes + units * kRowUnit * 128};
      bool asked = false;
      int chunk = 0;
      for (int part = 0; part < p_.parts; ++part) {
        for (int k = 0; k < p_.k_blocks_of_part; k += kAheadBlocks, ++chunk) {
          if (chunk % kChunksOfStep == 0) {
            pace.keep(0);
            if (!shared) Base::meet();
          }
          const uint4 place = take(chunk > 0);
          load_chunk(rows, int(place.x), part, k, shared);
          note(place.y);
          if (chunk == 0) tiles.prepare();
          if (chunk == 1) {
            more = tiles.next(next);
            asked = true;
          }
        }
      }
      for (int kb = p_.narrow_from; kb < p_.k_blocks; ++kb) {
        ring_.wait_empty();
        if (ptx::elect_one()) {
          Base::load_operand(ring_, tile, kb);
          Base::load_rows(tile, kb);
        }
        ring_.advance();
        ++time_;
      }
      if (!asked) more = tiles.next(next);
    }
    for (int s = 0; s < C::kStages; ++s, ring_.advance()) ring_.wait_empty();
    while (pending_ > 0) announce();
    pace.leave();
    __syncwarp();
  }

 private:
  static constexpr int kChunksOfStep = 2;
  struct Rows {
    const CUtensorMap* map;
    int rows, end;
    uint32_t bytes;  // of a stage
  };

  // The next chunk's place and note. Before this warp waits for others, it announces: they may wait
  // for what it has read. Inside of a tile the last k-block is given back when the next one is
  // multiplied.
  __device__ uint4 take(bool inside) {
    if (!chunks_.is_full()) {
      typename C::Stages ring = ring_;
      for (int s = 0; s < C::kStages - inside; ++s, ring.advance()) {
        ring.wait_empty();
        if (pending_ > 0 && due_[0] <= time_ + s) announce();
      }
    }
    chunks_.wait_full();
    const uint4 place = ptx::shared_load(chunks_.slot());
    __syncwarp();
    if (ptx::elect_one()) chunks_.arrive_empty();
    chunks_.advance();
    return place;
  }
  __device__ __forceinline__ void load_chunk(const Rows& rows, int line, int part, int k,
                                             bool shared) {
    const int blocks = min(kAheadBlocks, p_.k_blocks_of_part - k);
#pragma unroll 1
    for (int i = 0; i < blocks; ++i) {
      ring_.wait_empty();
      if (ptx::elect_one()) {
        ptx::barrier_arrive_expect(ring_.full(), rows.bytes);
        load_ahead<C::kMajor>(p_, ring_.operand_m(), ring_.full(), line, i, shared);
        ptx::tensor_load(
            ring_.operand_n(), rows.map, ring_.full(),
            ptx::Coordinate4{(k + i) * kTileK, part, kWindowRows - rows.rows, rows.end});
      }
      ring_.advance();
    }
    time_ += blocks;
  }
  // A chunk whose loads are all on their way; it has been read when its last stage is empty again.
  __device__ void note(unsigned note) {
    while (pending_ > 0 && due_[0] < time_) announce();
    const bool first = pending_++ == 0;
    const unsigned due = time_ - 1 + C::kStages;
    notes_[0] = first ? note : notes_[0];
    due_[0] = first ? due : due_[0];
    notes_[1] = note;
    due_[1] = due;
  }
  // Nothing of this warp's has to be seen with it: the bytes have been read.
  __device__ void announce() {
    if (notes_[0] && ptx::elect_one())
      ptx::add_relaxed(p_.counters->read + (notes_[0] >> kNoteShift),
                       notes_[0] & ((1u << kNoteShift) - 1));
    __syncwarp();
    notes_[0] = notes_[1];
    due_[0] = due_[1];
    --pending_;
  }

  AheadQueue chunks_;
  int pending_ = 0;    // notes
  unsigned time_ = 0;  // k-blocks so far
  unsigned notes_[2] = {}, due_[2] = {};
};

}  // namespace moec::cuda
