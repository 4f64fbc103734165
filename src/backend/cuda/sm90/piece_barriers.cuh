// SPDX-License-Identifier: Apache-2.0
// How a finished block of results leaves a consumer group: the group's four warps write it into a
// staging buffer, and a warp of its own sends it to memory by bulk copies. The buffer, of which a
// group has one, goes to and fro by two named barriers of all 160 threads:
//   free     the sender arrives when a copy has read the buffer, the group waits
//   staged   the group arrives, the sender waits
#pragma once

#include "backend/cuda/device/ptx.cuh"

namespace moec::cuda {

constexpr int kGroupThreads = 128;  // of a consumer group

class PieceBarriers {
 public:
  __device__ explicit PieceBarriers(int group) : group_(group) {}
  __device__ void wait_free() const { ptx::named_barrier(kFree + group_, kHandOverThreads); }
  __device__ void free() const { ptx::named_barrier_arrive(kFree + group_, kHandOverThreads); }
  __device__ void wait_staged() const { ptx::named_barrier(kStaged + group_, kHandOverThreads); }
  __device__ void staged() const { ptx::named_barrier_arrive(kStaged + group_, kHandOverThreads); }

 private:
  static constexpr int kFree = 3, kStaged = 5, kHandOverThreads = kGroupThreads + 32;
  int group_;
};

}  // namespace moec::cuda
