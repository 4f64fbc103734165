// SPDX-License-Identifier: Apache-2.0
// One launch function per instantiation file, so that the build compiles them side by side. Each
// finds its instance by the problem: element type, orientation of the weights, activation, codes.
// Kernels that differ only in their codes share a file: a fat binary is compressed file by file.
#pragma once

#include "backend/cuda/sm90/row_gemm.h"

namespace moec::cuda {

template <class Params>
using RowGemmLaunch = cudaError_t(const RowGemmProblem& problem, const Params& params, int ctas,
                                  cudaStream_t stream);
RowGemmLaunch<RowGemmParams> launch_up, launch_up_alternating, launch_down, launch_grad_down;

// Of coded weights: of a format of channels, or of LineFormats.
RowGemmLaunch<CodedRowGemmParams> launch_coded_up, launch_coded_up_alternating, launch_coded_down,
    launch_coded_grad_down;

// Of few rows: of PowersWeights, and of all others.
RowGemmLaunch<CodedRowGemmParams> launch_few_up, launch_few_down, launch_few_up_powers,
    launch_few_down_powers;

// Of many rows, of codes along k: of PowersWeights, and of all others; of gradients of the same.
RowGemmLaunch<CodedRowGemmParams> launch_wide_up, launch_wide_down, launch_wide_up_powers,
    launch_wide_down_powers, launch_wide_grad;

// What follows kGradDown of coded weights (gradient_rows.cu).
cudaError_t launch_gradient_rows(const RowGemmProblem& problem, const RowGemmParams& params,
                                 cudaStream_t stream);

}  // namespace moec::cuda
