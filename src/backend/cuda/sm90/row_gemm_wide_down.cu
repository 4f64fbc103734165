// SPDX-License-Identifier: Apache-2.0
#include "backend/cuda/sm90/row_gemm_wide.cuh"

namespace moec::cuda {

cudaError_t launch_wide_down(const RowGemmProblem& problem, const CodedRowGemmParams& params,
                             int ctas, cudaStream_t stream) {
  return with_wide_codes(problem.lines, [&]<LineDecode kDecode, bool kWholeLines>() {
    return down_of_wide<kDecode, kWholeLines>(params, ctas, stream);
  });
}

}  // namespace moec::cuda
