// SPDX-License-Identifier: Apache-2.0
// What the warps of the weight gradient kernel hand each other: tiles, tokens and stages. Rows are
// the k of a weight gradient.
#pragma once

#include "backend/cuda/tile_ring.cuh"
#include "backend/cuda/weight_grad.h"

namespace moec::cuda {

constexpr int kGradThreads = 512;  // gatherers, two consumer warpgroups, the rest
constexpr int kGatherWarps = 4;
// Of the tile queue: all warps but the one that finds.
constexpr int kTileReaders = kGradThreads / 32 - 1;

struct GradTile {
  int expert, row_begin, rows;  // all rows of the expert
  int m_tile, n_tile;
  bool together;  // the other CTA of the pair has the same m tile
};

// k-blocks of a tile, and the rows of the first one; all others have kTileK.
__device__ __forceinline__ int grad_k_blocks(int rows) {
  return (rows + kTileK - 1) / kTileK;
}
__device__ __forceinline__ int first_rows(int rows) {
  return (rows - 1) % kTileK + 1;
}

// Tiles of one CTA, from runs of kRun n tiles of one m tile, for which a few k-blocks of m are
// loaded once. Runs come from a counter, where there is one, so that a CTA with small experts takes
// more of them.
class RunScheduler {
 public:
  __device__ explicit RunScheduler(const WeightGradParams& p)
      : walk_(p.group_offsets, p.num_experts),
        counter_(p.work_counter),
        n_tiles_(p.n_tiles),
        runs_((p.n_tiles + kRun - 1) / kRun),
        units_(p.m_tiles * runs_),
        next_(blockIdx.x) {}

  __device__ bool next(GradTile& tile) {
    if (n_tile_ == n_end_ && !begin_run()) return false;
    tile = {walk_.expert, walk_.row_begin, walk_.rows, m_tile_, n_tile_++, false};
    return true;
  }

 private:
  static constexpr int kRun = 4;

  __device__ bool begin_run() {
    const int units = units_, unit = __shfl_sync(~0u, next_, 0);
    if (!walk_.seek(unit, [units](int) { return units; })) return false;
    m_tile_ = int(unsigned(walk_.index) / unsigned(runs_));
    const int run = walk_.index - m_tile_ * runs_;
    n_tile_ = int(unsigned(run * n_tiles_) / unsigned(runs_));
    n_end_ = int(unsigned((run + 1) * n_tiles_) / unsigned(runs_));
    // Used a run later, so that nobody waits for it.
    next_ = next_number(counter_, unit, int(gridDim.x));
    return true;
  }

  ExpertWalk walk_;
  unsigned* counter_;
  int n_tiles_, runs_, units_, next_;
  int m_tile_, n_tile_ = 0, n_end_ = 0;
};

// Tiles of a pair of CTAs: two neighbouring n tiles of one m tile, or, of the last one where
// n_tiles is odd, two m tiles, the second of which may lie outside.
class PairScheduler {
 public:
  __device__ PairScheduler(const WeightGradParams& p, const WorkNumbers& numbers)
      : walk_(p.group_offsets, p.num_experts),
        numbers_(numbers),
        n_pairs_(p.n_tiles / kClusterSize),
        together_(p.m_tiles * n_pairs_),
        units_(together_ + p.n_tiles % kClusterSize * ((p.m_tiles + 1) / kClusterSize)) {}

  __device__ bool next(GradTile& tile) {
    int unit;
    if (begun_) {
      numbers_.hand_out();
      unit = numbers_.next();
    } else {
      unit = numbers_.first();
      begun_ = true;
    }
    const int units = units_;
    if (!walk_.seek(unit, [units](int) { return units; })) return false;
    tile = {walk_.expert, walk_.row_begin, walk_.rows, 0, 0, walk_.index < together_};
    if (tile.together) {
      tile.m_tile = int(unsigned(walk_.index) / unsigned(n_pairs_));
      tile.n_tile = kClusterSize * (walk_.index - tile.m_tile * n_pairs_) + pair_rank();
    } else {
      tile.m_tile = kClusterSize * (walk_.index - together_) + pair_rank();
      tile.n_tile = kClusterSize * n_pairs_;
    }
    return true;
  }

 private:
  ExpertWalk walk_;
  WorkNumbers numbers_;
  int n_pairs_, together_, units_;  // units of an expert: the first are those together
  bool begun_ = false;
};

class GradQueue : public SlotQueue<8> {
 public:
  using SlotQueue::SlotQueue;

  // Past the last tile: one with expert -1.
  __device__ void put(const GradTile& tile) {
    put_words([&] {
      return uint4{
          uint32_t(tile.expert), uint32_t(tile.row_begin), uint32_t(tile.rows),
          uint32_t(tile.m_tile) << 16 | uint32_t(tile.n_tile) << 1 | uint32_t(tile.together)};
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
    tile.m_tile = int(at >> 16);
    tile.n_tile = int(at >> 1 & 0x7fff);
    tile.together = at & 1;
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

// Stages whose m and n operands lie apart. A tile of the same m as the one before it, and of no
// more k-blocks than there are stages, finds its m operand as that one left it, and the n operands
// go on in turn. Nobody need ask whether a place for an m operand is free: it was last used kStages
// k-blocks ago, as the stage's n operand was, or earlier.
template <int kStages>
class GradRing : public StageBarriers<kStages> {
 public:
  static constexpr int kBytes = kStages * kStageBytes<kMaxTileN>;

  __device__ GradRing(uint32_t memory, uint32_t barriers)
      : StageBarriers<kStages>(barriers), memory_(memory) {}

  // In front of the first k-block of each tile of a run.
  __device__ void begin(const GradTile& tile) {
    const int of = tile.expert << 16 | tile.m_tile;
    held_ = of == of_ && grad_k_blocks(tile.rows) <= kStages;
    of_ = of;
    if (held_) {
      place_ = first_;
    } else {
      first_ = place_;
    }
  }
  __device__ bool held() const { return held_; }
  __device__ void advance() {
    StageBarriers<kStages>::advance();
    place_ = place_ + 1 == kStages ? 0 : place_ + 1;
  }
  __device__ uint32_t operand_m() const { return memory_ + place_ * kOperandMBytes; }
  __device__ uint32_t operand_n() const {
    return memory_ + kStages * kOperandMBytes + this->stage_ * 2 * kBlockBytes;
  }

 private:
  uint32_t memory_;
  int place_ = 0, first_ = 0;  // of the m operand: this k-block's, and the tile's first
  int of_ = -1;                // expert and m tile of the tile before
  bool held_ = false;          // the tile's m operand is there
};

}  // namespace moec::cuda
