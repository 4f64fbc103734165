// SPDX-License-Identifier: Apache-2.0
#include "backend/cuda/sm90/row_gemm_wide.cuh"

namespace moec::cuda {

cudaError_t launch_wide_up(const RowGemmProblem& problem, const CodedRowGemmParams& params,
                           int ctas, cudaStream_t stream) {
  return with_decoded<true>(problem, [&]<class Element, class Weights>() {
    return up_of_wide<Element, Weights>(params, ctas, stream);
  });
}

}  // namespace moec::cuda
