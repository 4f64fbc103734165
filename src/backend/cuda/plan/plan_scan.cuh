// SPDX-License-Identifier: Apache-2.0
// Sums over the CTA of a plan kernel. Apart from plan_tile.cuh: CUB's headers take seconds to
// compile, and kernels that add nothing up do without.
#pragma once

#include <cub/block/block_scan.cuh>

#include "backend/cuda/plan/plan_tile.cuh"

namespace moec::cuda {

// One barrier inside. The storage is free again after the caller's next one.
template <class T>
using PlanScan = cub::BlockScan<T, kPlanThreads, cub::BLOCK_SCAN_WARP_SCANS>;

}  // namespace moec::cuda
