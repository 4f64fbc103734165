// SPDX-License-Identifier: Apache-2.0
// The codes of wide tiles, in a ring of their own: who multiplies has them in registers two
// k-blocks before their rows are wanted, so they are asked for earlier, and leave earlier.
//
//   full     one arrival announces the bytes
//   empty    one arrival for each consumer warp
#pragma once

#include "backend/cuda/sm90/weight_operand.cuh"

namespace moec::cuda {

template <int kStageBytes_>
class WideCodes {
 public:
  static constexpr int kStageBytes = kStageBytes_, kBytes = 32 << 10;
  static constexpr int kStages = kBytes / kStageBytes;
  static constexpr int kBarrierBytes = 2 * 8 * kStages;

  __device__ WideCodes(uint32_t memory, uint32_t barriers) : memory_(memory), barriers_(barriers) {}
  __device__ void init() const {
    for (int s = 0; s < kStages; ++s) {
      ptx::barrier_init(barriers_ + 8 * s, 1);
      ptx::barrier_init(barriers_ + 8 * (kStages + s), kConsumerWarps);
    }
  }
  __device__ uint32_t stage() const { return memory_ + stage_ * kStageBytes; }
  __device__ uint32_t full() const { return barriers_ + 8 * stage_; }
  __device__ uint32_t empty() const { return barriers_ + 8 * (kStages + stage_); }
  __device__ void wait_full() const { ptx::barrier_wait(full(), phase_); }
  __device__ void wait_empty() const { ptx::barrier_wait(empty(), phase_ ^ 1); }
  // By all lanes of a consumer warp. zero: made of what they have read (zero_of()): an arrival does
  // not wait for loads that are under way, and the next bulk copy may be in front of them.
  __device__ void release(uint32_t zero = 0) {
    __syncwarp();
    if ((threadIdx.x & 31) == 0) ptx::barrier_arrive(empty() + zero);
    advance();
  }
  __device__ void advance() {
    if (++stage_ == kStages) {
      stage_ = 0;
      phase_ ^= 1;
    }
  }

 private:
  uint32_t memory_, barriers_;
  int stage_ = 0;
  uint32_t phase_ = 0;
};

}  // namespace moec::cuda
