// SPDX-License-Identifier: Apache-2.0
#include "backend/cuda/sm90/row_gemm_few.cuh"

namespace moec::cuda {

cudaError_t launch_few_up(const RowGemmProblem& problem, const CodedRowGemmParams& params, int ctas,
                          cudaStream_t stream) {
  return with_decoded(problem, [&]<class Element, class Weights>() {
    return up_of_few<Element, Weights>(params, ctas, stream);
  });
}

}  // namespace moec::cuda
