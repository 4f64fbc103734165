// SPDX-License-Identifier: Apache-2.0
#include "backend/cuda/sm90/row_gemm_wide.cuh"

namespace moec::cuda {

cudaError_t launch_wide_grad(const RowGemmProblem& problem, const CodedRowGemmParams& params,
                             int ctas, cudaStream_t stream) {
  return with_wide_columns(problem.lines, [&]<LineDecode kDecode, bool kF32Scales>() {
    return grad_of_wide<kDecode, kF32Scales>(params, ctas, stream);
  });
}

}  // namespace moec::cuda
