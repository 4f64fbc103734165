// SPDX-License-Identifier: Apache-2.0
// The values of some experts' codes that lie in lines, on the device.
#pragma once

#include "backend/cuda/sm90/row_gemm_problem.h"
#include "backend/cuda/weights/decode_experts.h"

namespace moec::cuda {

// lines: of set_decoded_lines().
cudaError_t launch_decode_lines(const DecodeArgs& args, const CodedLines& lines,
                                int multiprocessors, cudaStream_t stream);

}  // namespace moec::cuda
