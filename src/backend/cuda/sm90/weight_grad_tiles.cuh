// SPDX-License-Identifier: Apache-2.0
// What the warps of the weight gradient kernel hand each other: tiles, tokens and stages. Rows are
// the k of a weight gradient.
#pragma once

#include "backend/cuda/sm90/tile_ring.cuh"
#include "backend/cuda/sm90/weight_grad.h"

namespace moec::cuda {

constexpr int kGradThreads = 512;  // gatherers, two consumer warpgroups, the rest
constexpr int kGatherWarps = 4;
// Of the tile queue: all warps but the one that finds.
constexpr int kTileReaders = kGradThreads / 32 - 1;

struct GradTile {
  int expert, row_begin, rows;  // all rows of the expert
  int m_tile, n_tile;
  bool together;  // the other CTA of the pair has the same m tile
  bool back;      // the last k-block comes first
  bool turns;     // at the k-block with which the tile before it ended, of the same n
};

// k-blocks of a tile, and the rows of the first one; all others have kTileK.
__device__ __forceinline__ int grad_k_blocks(int rows) {
  return (rows + kTileK - 1) / kTileK;
}
__device__ __forceinline__ int first_rows(int rows) {
  return (rows - 1) % kTileK + 1;
}
// The k-blocks of a tile, one after the other, by the row of its expert behind each.
class GradWalk {
 public:
  __device__ explicit GradWalk(const GradTile& tile)
      : rows_(tile.rows),
        end_(tile.back ? tile.rows : first_rows(tile.rows)),
        step_(tile.back ? -kTileK : kTileK) {}
  __device__ bool more() const { return unsigned(end_ - 1) < unsigned(rows_); }
  __device__ int end() const { return end_; }
  // How many of the kTileK rows in front of end() are another expert's.
  __device__ int outside() const { return (kTileK - end_) & (end_ - kTileK) >> 31; }
  __device__ void advance() { end_ += step_; }

 private:
  int rows_, end_, step_;
};

// m tiles of one n tile, one after the other. They walk the k-blocks forth and back, so that those
// of the n operand which one tile ends with are still there for the next one.
class GradRun {
 public:
  // Of how many runs of 2^log tiles at most `tiles` are made.
  static __device__ int count(int tiles, int log) { return (tiles + (1 << log) - 1) >> log; }

  // The run-th of `runs` nearly equal parts.
  __device__ void begin(int run, int runs, int tiles) {
    next_ = first_ = int(unsigned(run * tiles) / unsigned(runs));
    end_ = int(unsigned((run + 1) * tiles) / unsigned(runs));
  }
  __device__ bool more() const { return next_ < end_; }
  // The number of the next tile; it is told how it walks.
  __device__ int next(GradTile& tile) {
    tile.back = (next_ - first_) & 1;
    tile.turns = next_ > first_ && tile.rows > 0;
    return next_++;
  }

 private:
  int first_ = 0, next_ = 0, end_ = 0;
};

// Tiles of a pair of CTAs, in runs: two neighbouring n tiles of one m tile, or, of the last one
// where n_tiles is odd, two m tiles, the second of which may lie outside. Runs of neighbouring n
// tiles, whose gradients lie side by side in memory, begin together.
class GradScheduler {
 public:
  __device__ GradScheduler(const WeightGradParams& p, const WorkNumbers& numbers)
      : walk_(p.group_offsets, p.num_experts),
        numbers_(numbers),
        m_tiles_(p.m_tiles),
        m_pairs_((p.m_tiles + 1) / kClusterSize),
        n_pairs_(p.n_tiles / kClusterSize),
        odd_(p.n_tiles % kClusterSize),
        run_experts_(p.run_experts) {}

  __device__ bool next(GradTile& tile) {
    if (!run_.more() && !begin_run()) return false;
    tile = {walk_.expert, walk_.row_begin, walk_.rows};
    tile.together = together_;
    tile.m_tile = run_.next(tile);
    tile.n_tile = kClusterSize * n_pair_;
    if (together_) {
      tile.n_tile += pair_rank();
    } else {
      tile.m_tile = kClusterSize * tile.m_tile + pair_rank();
    }
    return true;
  }

 private:
  __device__ bool begin_run() {
    int unit;
    if (begun_) {
      numbers_.hand_out();
      unit = numbers_.next();
    } else {
      unit = numbers_.first();
      begun_ = true;
    }
    // Of an expert, first those together.
    const auto units_of = [this](int expert, int rows) {
      const int log = run_log(expert, rows);
      return GradRun::count(m_tiles_, log) * n_pairs_ + odd_ * GradRun::count(m_pairs_, log);
    };
    if (!walk_.seek(unit, units_of)) return false;
    const int log = run_log(walk_.expert, walk_.rows), runs = GradRun::count(m_tiles_, log);
    const int rest = walk_.index - runs * n_pairs_;
    together_ = rest < 0;
    if (together_) {
      const int run = int(unsigned(walk_.index) / unsigned(n_pairs_));
      n_pair_ = walk_.index - run * n_pairs_;
      run_.begin(run, runs, m_tiles_);
    } else {
      n_pair_ = n_pairs_;
      run_.begin(rest, GradRun::count(m_pairs_, log), m_pairs_);
    }
    return true;
  }
  __device__ int run_log(int expert, int rows) const {
    static_assert(kLongRun == 1 << 2 && kShortRun == 1 << 1);
    return expert >= run_experts_ ? 0 : rows <= kLongRunRows ? 2 : 1;
  }

  ExpertWalk walk_;
  WorkNumbers numbers_;
  int m_tiles_, m_pairs_, n_pairs_, odd_, run_experts_;
  bool begun_ = false;
  bool together_;  // of the current run
  int n_pair_;
  GradRun run_;
};

class GradQueue : public SlotQueue<8> {
 public:
  using SlotQueue::SlotQueue;

  // Past the last tile: one with expert -1.
  __device__ void put(const GradTile& tile) {
    put_words([&] {
      return uint4{uint32_t(tile.expert), uint32_t(tile.row_begin), uint32_t(tile.rows),
                   uint32_t(tile.m_tile) << 17 | uint32_t(tile.n_tile) << 3 |
                       uint32_t(tile.together) << 2 | uint32_t(tile.back) << 1 |
                       uint32_t(tile.turns)};
    });
  }
  // Shuffles, so that the compiler knows each word to be the same in all lanes.
  __device__ bool take(GradTile& tile) {
    ring_.wait_full();
    const uint32_t word = ptx::shared_load_word(ring_.slot() + 4 * (threadIdx.x & 3));
    tile.expert = int(__shfl_sync(~0u, word, 0));
    tile.row_begin = int(__shfl_sync(~0u, word, 1));
    tile.rows = int(__shfl_sync(~0u, word, 2));
    const uint32_t at = __shfl_sync(~0u, word, 3);
    tile.m_tile = int(at >> 17);
    tile.n_tile = int(at >> 3 & 0x3fff);
    tile.together = at & 4;
    tile.back = at & 2;
    tile.turns = at & 1;
    release();
    return tile.expert >= 0;
  }
};

// The tokens of k-blocks, -1 for padding rows and past a tile's rows, from the warp that finds them
// to those that gather. Thread t of these has rows t / 16, t / 16 + 8, ..: their tokens lie
// together.
class TokenRing {
 public:
  static constexpr int kEach = kTileK / 8;  // rows of a thread
  using Slots = SlotRing<4, 4 * kTileK>;
  static constexpr int kBytes = Slots::kBytes;

  __device__ explicit TokenRing(uint32_t memory) : ring_(memory) {}

  // Each lane of the finder writes. One lane in each half of a gathering warp reads, and says so:
  // racecheck takes no account of what a warp does in step.
  __device__ void init() const { ring_.init(32, 2 * kGatherWarps); }
  // Lane l has those of rows l and 32 + l.
  __device__ void put(int low, int high) {
    const int lane = threadIdx.x & 31;
    ring_.wait_empty();
    const uint32_t to = ring_.slot() + 4 * (lane % 8 * kEach + lane / 8);
    ptx::shared_store(to, __int_as_float(low));
    ptx::shared_store(to + 4 * (32 / 8), __int_as_float(high));
    ring_.arrive_full();
    __syncwarp();
    ring_.advance();
  }
  __device__ void take(int (&token)[kEach]) {
    const bool reads = (threadIdx.x & 15) == 0;
    uint4 words[kEach / 4] = {};
    ring_.wait_full();
    if (reads) {
#pragma unroll
      for (int i = 0; i < kEach / 4; ++i) {
        words[i] = ptx::shared_load(ring_.slot() + 4 * (threadIdx.x / 16 * kEach + 4 * i));
      }
      ring_.arrive_empty();
    }
    ring_.advance();
    __syncwarp();
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const uint4 v = words[i / 4];
      const uint32_t word = i % 4 == 0 ? v.x : i % 4 == 1 ? v.y : i % 4 == 2 ? v.z : v.w;
      token[i] = int(__shfl_sync(~0u, word, 0, 16));
    }
  }

 private:
  Slots ring_;
};

// Stages whose m and n operands lie apart. The places of n operands are walked as the k-blocks of a
// run's tiles are, forth and back: at a turn the last kStages of them are there, and each place has
// the k-block that is wanted next. Nobody need ask whether a place is free: it was last used
// kStages k-blocks ago, as the stage's m operand was, or earlier.
template <int kStages>
class GradRing : public StageBarriers<kStages> {
 public:
  static constexpr int kBytes = kStages * kStageBytes<kMaxTileN>;

  __device__ GradRing(uint32_t memory, uint32_t barriers)
      : StageBarriers<kStages>(barriers), memory_(memory) {}

  // In front of the first k-block of each tile.
  __device__ void begin(const GradTile& tile) {
    there_ = tile.turns ? kStages : 0;
    if (!tile.turns) return;
    move(-step_);
    // A single k-block goes no way: the place behind it may still be read.
    if (tile.rows > kTileK) step_ = -step_;
  }
  // Whether this k-block's n operand is there from the tile before.
  __device__ bool holds_n() const { return there_ > 0; }
  __device__ void advance() {
    StageBarriers<kStages>::advance();
    move(step_);
    --there_;
  }
  __device__ uint32_t operand_m() const { return memory_ + this->stage_ * kOperandMBytes; }
  __device__ uint32_t operand_n() const {
    return memory_ + kStages * kOperandMBytes + place_ * 2 * kBlockBytes;
  }

 private:
  static_assert((kStages & (kStages - 1)) == 0);
  __device__ void move(int places) { place_ = (place_ + places) & (kStages - 1); }

  uint32_t memory_;
  int place_ = 0, step_ = 1;  // of n operands
  int there_ = 0;             // k-blocks that are there from the tile before
};

}  // namespace moec::cuda
