// SPDX-License-Identifier: Apache-2.0
// The ring of shared-memory stages between the producer warps and the two consumer warpgroups of a
// CTA.
//
//   stage    m operand: four blocks of [64 x 64], 32 KiB of elements or the codes of as many; n
//            operand: kRows rows of 64 k, or two panels of 64 k x 64 n
//   full     one arrival announces the TMA bytes; with gathered rows one more: of the warp that
//            relays, or of each thread that gathers, when its cp.async copies have landed. Coded
//            weights: one of each warp that decodes
//   landed   where a warp relays: one arrival for each thread that gathers
//   empty    one arrival for each consumer warp, of both CTAs where a pair shares (PairRing)
#pragma once

#include "backend/cuda/device/ptx.cuh"
#include "backend/cuda/sm90/tile_scheduler.cuh"
#include "backend/cuda/sm90/wgmma.cuh"

namespace moec::cuda {

constexpr int kTileK = 64;
constexpr int kBlockBytes = 64 * kTileK * 2;
constexpr int kOperandMBytes = 4 * kBlockBytes;
template <int kRows, int kBytesM = kOperandMBytes>
constexpr int kStageBytes = kBytesM + kRows * kTileK * 2;
constexpr int kThreads = 384;  // producer warpgroup, then two consumer warpgroups
constexpr int kProducers = 128, kConsumerWarps = 8;

// A 16-byte chunk of row `row` under the 128-byte swizzle.
__device__ __forceinline__ uint32_t swizzled(uint32_t row, uint32_t chunk) {
  return row * 128 + ((chunk ^ (row & 7)) << 4);
}

// The barriers of a ring's stages, and where in it a warp is.
template <int kStages>
class StageBarriers {
 public:
  static constexpr int kBarrierBytes = (3 * 8 * kStages + 15) / 16 * 16;
  __device__ explicit StageBarriers(uint32_t barriers) : barriers_(barriers) {}

  // landed_arrivals: none where nobody relays.
  __device__ void init(int full_arrivals, int landed_arrivals, int ctas = 1) const {
    for (int s = 0; s < kStages; ++s) {
      ptx::barrier_init(full_barrier(s), full_arrivals);
      ptx::barrier_init(empty_barrier(s), ctas * kConsumerWarps);
      if (landed_arrivals > 0) ptx::barrier_init(landed_barrier(s), landed_arrivals);
    }
  }
  __device__ uint32_t full() const { return full_barrier(stage_); }
  __device__ uint32_t landed() const { return landed_barrier(stage_); }
  __device__ int stage() const { return stage_; }
  __device__ uint32_t phase() const { return phase_; }
  __device__ void wait_full() const { ptx::barrier_wait(full_barrier(stage_), phase_); }
  __device__ void wait_empty() const { ptx::barrier_wait(empty_barrier(stage_), phase_ ^ 1); }
  // Called by all lanes of a consumer warp: the stage before the current one is no longer read.
  __device__ void release_previous(int lane) const {
    if (lane == 0) ptx::barrier_arrive(empty_barrier(previous()));
  }
  // What cp.async has written needs a proxy fence, as ordinary stores do, before wgmma reads it. A
  // fence waits for all that its warp has under way, copies and staged results. So a warp without
  // any does it for those that gather and those that multiply, when the rows have landed.
  __device__ void relay() {
    ptx::barrier_wait(landed(), phase_);
    if (ptx::elect_one()) {
      ptx::fence_proxy_async();
      ptx::barrier_arrive(full());
    }
    __syncwarp();
    advance();
  }
  __device__ void advance() {
    if (++stage_ == kStages) {
      stage_ = 0;
      phase_ ^= 1;
    }
  }

 protected:
  __device__ int previous() const { return (stage_ == 0 ? kStages : stage_) - 1; }
  __device__ uint32_t full_barrier(int s) const { return barriers_ + 8 * s; }
  __device__ uint32_t empty_barrier(int s) const { return barriers_ + 8 * (kStages + s); }
  __device__ uint32_t landed_barrier(int s) const { return barriers_ + 8 * (2 * kStages + s); }

  uint32_t barriers_;
  int stage_ = 0;
  uint32_t phase_ = 0;
};

// Both operands of a stage lie together.
template <int kStages, int kRows_, int kBytesM = kOperandMBytes>
class Ring : public StageBarriers<kStages> {
 public:
  static constexpr int kRows = kRows_;
  __device__ Ring(uint32_t memory, uint32_t barriers)
      : StageBarriers<kStages>(barriers), memory_(memory) {}

  __device__ uint32_t operand_m() const { return memory_ + this->stage_ * kBytes; }
  __device__ uint32_t operand_n() const { return operand_m() + kBytesM; }
  // For descriptors, which count in 16 bytes: the first stage's m operand, and how far from it the
  // current one's is, so that nothing but a sum stands between a full stage and its products.
  __device__ uint32_t first_m() const { return memory_; }
  __device__ uint32_t ahead() const { return ahead_; }
  __device__ void advance() {
    StageBarriers<kStages>::advance();
    ahead_ = this->stage_ == 0 ? 0 : ahead_ + kBytes / 16;
  }

 private:
  static constexpr int kBytes = kStageBytes<kRows, kBytesM>;
  uint32_t memory_, ahead_ = 0;
};

// Of this CTA in its pair. Not from the cluster's registers: for the compiler those differ between
// lanes, and with them the addresses of copies.
__device__ __forceinline__ int pair_rank() {
  return int(blockIdx.x) % kClusterSize;
}

// Where the CTAs of a pair load m operands for each other, a stage is empty when both have read it.
template <typename Stages>
class PairRing : public Stages {
 public:
  __device__ PairRing(uint32_t memory, uint32_t barriers, bool shared = true)
      : Stages(memory, barriers),
        sharers_(shared ? kClusterSize : 1),
        told_(ptx::cluster_address(this->empty_barrier(0),
                                   (pair_rank() + threadIdx.x) % kClusterSize)) {}

  __device__ void init(int full_arrivals, int landed_arrivals) const {
    Stages::init(full_arrivals, landed_arrivals, sharers_);
  }
  __device__ void release_previous(int lane) const {
    if (lane < sharers_) ptx::barrier_arrive_cluster(told_ + 8 * this->previous());
  }

 private:
  int sharers_;
  uint32_t told_;  // the first empty barrier of this CTA, or, in odd lanes, of the other one
};

// shared: into both CTAs of the pair.
template <typename Coordinate>
__device__ __forceinline__ void load_block(uint32_t dst, const CUtensorMap* map, uint32_t barrier,
                                           Coordinate at, bool shared) {
  if (shared) {
    ptx::tensor_load_pair(dst, map, barrier, at);
  } else {
    ptx::tensor_load(dst, map, barrier, at);
  }
}

}  // namespace moec::cuda
