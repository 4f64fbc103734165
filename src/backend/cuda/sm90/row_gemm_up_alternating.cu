// SPDX-License-Identifier: Apache-2.0
// The up projection of weights whose gate and up columns alternate, as gpt-oss has them.
#include "backend/cuda/sm90/row_gemm_alternating.cuh"

namespace moec::cuda {

cudaError_t launch_up_alternating(const RowGemmProblem& problem, const RowGemmParams& params,
                                  int ctas, cudaStream_t stream) {
  return with_element(problem, [&]<class Element>() {
    return launch_alternating<Element, PlainWeights<Major::kMN>,
                              StoreAlternating<Element, SigmoidGated>,
                              StoreActivatedAndPre<Element, SigmoidGated>>(params, ctas, stream);
  });
}

}  // namespace moec::cuda
