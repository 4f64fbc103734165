// SPDX-License-Identifier: Apache-2.0
// One launch function per instantiation file, so that the build compiles them side by side. Each
// finds its instance by the problem: element type, orientation of the weights, activation.
#pragma once

#include "backend/cuda/sm90/row_gemm.h"

namespace moec::cuda {

template <class Params>
using RowGemmLaunch = cudaError_t(const RowGemmProblem& problem, const Params& params, int ctas,
                                  cudaStream_t stream);
RowGemmLaunch<RowGemmParams> launch_up, launch_up_alternating, launch_down, launch_grad_down;

// Of few rows, by how codes are decoded: files that CMake writes from row_gemm_few.cu.in.
template <LineDecode kDecode>
RowGemmLaunch<CodedRowGemmParams> launch_few_up;
template <LineDecode kDecode>
RowGemmLaunch<CodedRowGemmParams> launch_few_down;

// Of coded weights: files that CMake writes from row_gemm_coded.cu.in, for each format of channels
// and one for LineFormats.
template <class Codes>
RowGemmLaunch<CodedRowGemmParams> launch_coded_up;
template <class Codes>
RowGemmLaunch<CodedRowGemmParams> launch_coded_up_alternating;
template <class Codes>
RowGemmLaunch<CodedRowGemmParams> launch_coded_down;
template <class Codes>
RowGemmLaunch<CodedRowGemmParams> launch_coded_grad_down;

}  // namespace moec::cuda
