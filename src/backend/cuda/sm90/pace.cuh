// SPDX-License-Identifier: Apache-2.0
// Clusters that keep pace. Those that multiply the same rows, or by the same weights, read them
// from memory once if they are at about the same k. But tiles have unlike numbers of rows, and
// where a tile has many k-blocks, clusters that began together drift further apart than L2 reaches:
// then each reads for itself. So they count their steps together, and who is ahead of the mean
// waits. Results do not depend on it. Clusters that cannot come up, as another kernel holds their
// multiprocessors, hold the mean back: the first that has waited for long ends it for all.
#pragma once

#include "backend/cuda/sm90/tile_ring.cuh"

namespace moec::cuda {

class Pace {
 public:
  // For the warp that loads. steps: of all clusters together, 0 before the kernel; null: no pace.
  __device__ explicit Pace(unsigned* steps) : steps_(pair_rank() == 0 ? steps : nullptr) {}

  // In front of k-block kb.
  __device__ void keep(int kb) {
    if (steps_ && kb % kStep == 0) step();
  }
  // No more steps: nobody waits for this cluster, and for a long time not for another either.
  __device__ void leave() {
    if (steps_ && ptx::elect_one()) atomicAdd(steps_, kGone);
    steps_ = nullptr;
  }

 private:
  static constexpr int kStep = 8;  // k-blocks
  static constexpr unsigned kMost = 1u << 19, kGone = 1u << 20;
  static constexpr int kLooks = 200;  // about 0.2 ms

  __device__ void step() {
    const unsigned clusters = gridDim.x / kClusterSize;
    bool late = false;
    if (ptx::elect_one()) {
      const unsigned due = (max(mine_, 1u) - 1) * clusters;  // one step ahead of the mean
      // What was asked for at the last step is here by now.
      for (int look = 0; seen_ < due && look < kLooks; ++look) {
        __nanosleep(100);
        seen_ = ptx::load_relaxed(steps_);
      }
      late = seen_ < due;
      atomicAdd(steps_, 1u);
      seen_ = ptx::load_relaxed(steps_);
    }
    if (__any_sync(~0u, late) || ++mine_ == kMost) leave();
  }

  unsigned* steps_;
  unsigned mine_ = 0, seen_ = 0;
};

}  // namespace moec::cuda
