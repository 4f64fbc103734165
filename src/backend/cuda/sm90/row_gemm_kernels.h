// SPDX-License-Identifier: Apache-2.0
// One launch function per instantiation file, so that the build compiles them side by side.
#pragma once

#include "backend/cuda/sm90/row_gemm.h"

namespace moec::cuda {

using RowGemmLaunch = cudaError_t(const RowGemmParams& params, bool bf16, bool weights_mn_major,
                                  int grid, cudaStream_t stream);
RowGemmLaunch launch_up, launch_up_pairs, launch_down, launch_grad_down;

}  // namespace moec::cuda
