// SPDX-License-Identifier: Apache-2.0
#include "backend/cuda/sm90/row_gemm_few.cuh"

namespace moec::cuda {

cudaError_t launch_few_up_powers(const RowGemmProblem&, const CodedRowGemmParams& params, int ctas,
                                 cudaStream_t stream) {
  return up_of_few<__nv_bfloat16, PowersWeights>(params, ctas, stream);
}

}  // namespace moec::cuda
