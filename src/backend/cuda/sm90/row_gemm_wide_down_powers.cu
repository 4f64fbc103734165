// SPDX-License-Identifier: Apache-2.0
#include "backend/cuda/sm90/row_gemm_wide.cuh"

namespace moec::cuda {

cudaError_t launch_wide_down_powers(const RowGemmProblem&, const CodedRowGemmParams& params,
                                    int ctas, cudaStream_t stream) {
  return down_of_wide<LineDecode::kPowers, false>(params, ctas, stream);
}

}  // namespace moec::cuda
