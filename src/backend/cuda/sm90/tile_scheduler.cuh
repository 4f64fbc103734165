// SPDX-License-Identifier: Apache-2.0
// Tile number -> work of a CTA or of a cluster of two. Sizes are read on the device, from
// group_offsets alone: one warp of a CTA walks the list, 32 experts at a time with the running sums
// in registers, and hands the tiles to all others.
#pragma once

#include "backend/cuda/device/ptx.cuh"

namespace moec::cuda {

constexpr int kClusterSize = 2;
constexpr int kRowUnit = 16;  // granularity of rows in copies
constexpr int kRowStep = 8;   // and in tiles and products

// The work list both schedulers share: expert e owns units(e) consecutive numbers.
class ExpertWalk {
 public:
  // rehearsed: as if each expert had one row, group_offsets not being there yet.
  __device__ ExpertWalk(const int32_t* group_offsets, int num_experts, bool rehearsed = false)
      : offsets_(group_offsets),
        experts_(num_experts),
        lane_(threadIdx.x & 31),
        rehearsed_(rehearsed) {}

  // Find the expert of work number `unit` (non-decreasing from call to call). False past the end.
  // units_of(expert, rows) gives the number of units of an expert.
  template <typename UnitsOf>
  __device__ bool seek(int unit, UnitsOf units_of) {
    if (first_ < 0) load(0, units_of);
    while (unit - before_ >= total_) {
      if (first_ + 32 >= experts_) return false;
      before_ += total_;
      load(first_ + 32, units_of);
    }
    const unsigned past = __ballot_sync(~0u, inclusive_ > unit - before_);
    const int owner = __ffs(past) - 1;
    expert = first_ + owner;
    row_begin = __shfl_sync(~0u, begin_, owner);
    rows = __shfl_sync(~0u, end_, owner) - row_begin;
    index = unit - before_ - __shfl_sync(~0u, inclusive_ - units_, owner);
    return true;
  }

  __device__ void restart(bool rehearsed) { *this = ExpertWalk(offsets_, experts_, rehearsed); }

  int expert, row_begin, rows;  // the expert found and its rows
  int index;                    // unit within the expert

 private:
  template <typename UnitsOf>
  __device__ void load(int first, UnitsOf units_of) {
    first_ = first;
    const int e = first + lane_;
    begin_ = e;
    end_ = e + 1;
    if (!rehearsed_ && e < experts_) {
      begin_ = offsets_[e];
      end_ = offsets_[e + 1];
    }
    units_ = e < experts_ ? units_of(e, end_ - begin_) : 0;
    inclusive_ = units_;
    for (int step = 1; step < 32; step *= 2) {
      const int other = __shfl_up_sync(~0u, inclusive_, step);
      if (lane_ >= step) inclusive_ += other;
    }
    total_ = __shfl_sync(~0u, inclusive_, 31);
  }

  const int32_t* offsets_;
  int experts_, lane_;
  bool rehearsed_;
  int first_ = -1, before_ = 0, total_ = 0;
  int begin_, end_, units_, inclusive_;
};

// The number of a worker's next work, for lane 0 of a warp; without a counter workers take turns.
__device__ __forceinline__ int next_number(unsigned* counter, int before, int workers) {
  if (!counter || (threadIdx.x & 31) != 0) return before + workers;
  return workers + int(atomicAdd(counter, 1u));
}

// The work numbers of a cluster. All but the first come from a counter in global memory, so that a
// cluster that is done early takes more. The dealing warp of the leading CTA fetches a number while
// the one before it is worked on and hands it to those of both CTAs.
//   full    one store into the slot     empty    of the leading CTA: one arrival of each CTA
class WorkNumbers {
 public:
  static constexpr int kBytes = 80;

  __device__ WorkNumbers(uint32_t memory, unsigned* counter)
      : memory_(memory), counter_(counter), leads_(ptx::cluster_rank() == 0) {}

  __device__ void init() const {
    for (int s = 0; s < kSlots; ++s) {
      ptx::barrier_init(full(s), 1);
      ptx::barrier_init(empty(s), kClusterSize);
    }
  }
  static __device__ int cluster() { return int(blockIdx.x) / kClusterSize; }
  __device__ int first() {
    fetch(cluster());
    return cluster();
  }
  // The number that was handed out last.
  __device__ int next() {
    const int s = read_ % kSlots;
    ptx::barrier_wait(full(s), read_ / kSlots & 1);
    const int number = int(ptx::shared_load_word(slot(s)));
    __syncwarp();
    if ((threadIdx.x & 31) == 0) ptx::barrier_arrive_cluster(ptx::cluster_address(empty(s), 0));
    ++read_;
    return number;
  }
  // Once before each next(), some time earlier.
  __device__ void hand_out() {
    if (!leads_) return;
    const int s = read_ % kSlots;
    ptx::barrier_wait(empty(s), (read_ / kSlots & 1) ^ 1);
    if ((threadIdx.x & 31) == 0) {
      for (int rank = 0; rank < kClusterSize; ++rank) {
        ptx::store_arrive_cluster(slot(s), full(s), rank, uint32_t(fetched_));
      }
    }
    __syncwarp();
    fetch(fetched_);
  }

 private:
  static constexpr int kSlots = 4;
  static __device__ int clusters() { return int(gridDim.x) / kClusterSize; }
  __device__ uint32_t full(int s) const { return memory_ + 8 * s; }
  __device__ uint32_t empty(int s) const { return memory_ + 8 * (kSlots + s); }
  __device__ uint32_t slot(int s) const { return memory_ + 16 * kSlots + 4 * s; }
  // Used a tile later, so that nobody waits for it.
  __device__ void fetch(int before) {
    if (leads_) fetched_ = next_number(counter_, before, clusters());
  }

  uint32_t memory_;
  unsigned* counter_;
  bool leads_;
  int read_ = 0, fetched_ = 0;
};

// Rows vary, k is fixed. An expert with n rows gets m = ceil(n / kMaxRows) nearly equal row tiles.
// The two CTAs of a cluster take two row tiles of one feature tile together; where m is odd, the
// last row tile is left, and they take two feature tiles of it, as soon as all others of the last
// band have had those two: weights of an expert can be more than L2 holds.
struct RowTile {
  int expert, row_begin, rows;  // rows of this CTA
  int feature_tile;
  bool together;  // the other CTA of the pair has the same features of other rows
};

// kStep: of rows; an expert's last tile has the rest.
template <int kMaxRows, int kStep = kRowStep>
class RowScheduler {
 public:
  // band_length: twos of row tiles that are walked for each feature tile in turn.
  __device__ RowScheduler(const int32_t* group_offsets, int num_experts, int feature_tiles,
                          int band_length)
      : walk_(group_offsets, num_experts),
        feature_tiles_(feature_tiles),
        rank_(int(ptx::cluster_rank())),
        band_length_(band_length) {}

  static __device__ unsigned row_tiles(int rows) {
    return (unsigned(rows) + kMaxRows - 1) / kMaxRows;
  }
  __device__ void restart(bool rehearsed) { walk_.restart(rehearsed); }
  // The tile of a work number, non-decreasing from call to call. False past the end.
  // 32-bit unsigned divisions only: this runs once a tile in the warps that feed the tensor cores.
  __device__ bool find(int number, RowTile& tile) {
    const unsigned features = feature_tiles_;
    const bool found = walk_.seek(number, [features](int, int rows) {
      const unsigned m = row_tiles(rows);
      return int(m / 2 * features + m % 2 * ((features + 1) / 2));
    });
    if (!found) return false;
    tile.expert = walk_.expert;
    const unsigned m = row_tiles(walk_.rows), twos = m / 2, index = walk_.index;
    const unsigned last_band = twos > band_length_ ? (twos - 1) / band_length_ : 0;
    const unsigned band = last_band ? min(index / (band_length_ * features), last_band) : 0;
    const unsigned length = min(band_length_, twos - band * band_length_);
    const unsigned each_two = 2 * length + (band == last_band ? m % 2 : 0);
    const unsigned rest = index - band * band_length_ * features, at = rest % each_two;
    const unsigned feature = rest / each_two * 2, width = min(2u, features - feature);
    tile.together = at < width * length;
    tile.feature_tile = int(feature + (tile.together ? at / length : rank_));
    const unsigned part = tile.together ? 2 * (band * band_length_ + at % length) + rank_ : m - 1;
    const unsigned steps = (walk_.rows + kStep - 1) / kStep;  // spread over m parts
    const unsigned each = steps / m, extra = steps % m;
    const int first = int(part * each + min(part, extra)) * kStep;
    const int last = first + int(each + (part < extra)) * kStep;
    tile.row_begin = walk_.row_begin + first;
    tile.rows = min(last, walk_.rows) - first;
    return true;
  }

 private:
  ExpertWalk walk_;
  int feature_tiles_, rank_;
  unsigned band_length_;
};

// Slots of kSlotBytes in shared memory that one warp fills for others, behind them two barriers for
// each: the full one counts `writes` arrivals, the empty one `reads`. Each user counts for itself.
template <int kSlots, int kSlotBytes>
class SlotRing {
 public:
  static constexpr int kBytes = kSlots * (kSlotBytes + 16);

  __device__ explicit SlotRing(uint32_t memory) : memory_(memory) {}

  __device__ void init(int writes, int reads) const {
    for (int s = 0; s < kSlots; ++s) {
      ptx::barrier_init(full(s), writes);
      ptx::barrier_init(empty(s), reads);
    }
  }
  __device__ uint32_t slot() const { return memory_ + kSlotBytes * (at_ % kSlots); }
  __device__ void wait_empty() const {
    ptx::barrier_wait(empty(at_ % kSlots), (at_ / kSlots & 1) ^ 1);
  }
  __device__ void wait_full() const { ptx::barrier_wait(full(at_ % kSlots), at_ / kSlots & 1); }
  __device__ void arrive_full() const { ptx::barrier_arrive(full(at_ % kSlots)); }
  __device__ void arrive_empty() const { ptx::barrier_arrive(empty(at_ % kSlots)); }
  __device__ void advance() { ++at_; }

 private:
  __device__ uint32_t full(int s) const { return memory_ + kSlots * kSlotBytes + 8 * s; }
  __device__ uint32_t empty(int s) const { return full(kSlots + s); }

  uint32_t memory_;
  unsigned at_ = 0;
};

// 16 bytes a tile, from the warp that finds them to all others.
template <int kSlots>
class SlotQueue {
 public:
  static constexpr int kBytes = SlotRing<kSlots, 16>::kBytes;

  __device__ explicit SlotQueue(uint32_t memory) : ring_(memory) {}

  __device__ void init(int readers) const { ring_.init(1, readers); }

 protected:
  // words(): by one lane, when there is room.
  template <typename Words>
  __device__ void put_words(Words words) {
    ring_.wait_empty();
    if (ptx::elect_one()) {
      ptx::shared_store(ring_.slot(), words());
      ring_.arrive_full();
    }
    __syncwarp();
    ring_.advance();
  }
  // By all lanes of a warp, when they have read.
  __device__ void release() {
    if ((threadIdx.x & 31) == 0) ring_.arrive_empty();
    ring_.advance();
  }

  SlotRing<kSlots, 16> ring_;
};

class TileQueue : public SlotQueue<4> {
 public:
  using SlotQueue::SlotQueue;

  // `more` is false past the last tile.
  __device__ void put(const RowTile& tile, bool more) {
    put_words([&] {
      return uint4{uint32_t(tile.expert), uint32_t(tile.row_begin), uint32_t(more ? tile.rows : 0),
                   uint32_t(tile.feature_tile) << 1 | uint32_t(tile.together)};
    });
  }
  __device__ bool take(RowTile& tile) {
    ring_.wait_full();
    const uint4 v = ptx::shared_load(ring_.slot());
    tile = {int(v.x), int(v.y), int(v.z), int(v.w >> 1), (v.w & 1) != 0};
    __syncwarp();
    release();
    return tile.rows > 0;
  }
};

// The warp that finds the tiles, for all others.
template <typename Scheduler>
class TileDealer {
 public:
  __device__ TileDealer(const Scheduler& scheduler, const WorkNumbers& numbers,
                        const TileQueue& queue)
      : scheduler_(scheduler), numbers_(numbers), queue_(queue) {}

  // All tiles, each when the loads of the one before it have begun, and ready(tile) has returned.
  // waits: the kernel before this one writes what tells the tiles. Meanwhile the look-up is
  // rehearsed, since its instructions come from memory the first time: 2 us.
  template <typename Ready>
  __device__ void run(uint32_t begun, bool waits, Ready ready) {
    RowTile tile;
    uint32_t tiles = 0;
    scheduler_.restart(waits);
    for (int number = waits ? numbers_.cluster() : numbers_.first();;) {
      const bool more = scheduler_.find(number, tile);
      if (waits) {
        waits = false;
        ptx::grid_dependency_wait();
        scheduler_.restart(false);
        number = numbers_.first();
        continue;
      }
      if (more && tiles > 0) ready(tile);
      queue_.put(tile, more);
      if (!more) return;
      ptx::barrier_wait(begun, tiles++ & 1);
      numbers_.hand_out();
      number = numbers_.next();
    }
  }

 private:
  Scheduler scheduler_;
  WorkNumbers numbers_;
  TileQueue queue_;
};

// Where a producer warp gets its tiles: next(), then for each tile prepare() in its k-block 0 and
// next() in a later one. The warp that loads tells the dealer, by `begun`, when to go on.
class TileReader {
 public:
  __device__ explicit TileReader(const TileQueue& queue, uint32_t begun = 0)
      : queue_(queue), begun_(begun) {}

  __device__ void prepare() {
    if (begun_ && ptx::elect_one()) ptx::barrier_arrive(begun_);
  }
  __device__ bool next(RowTile& tile) { return queue_.take(tile); }

 private:
  TileQueue queue_;
  uint32_t begun_;
};

}  // namespace moec::cuda
