// SPDX-License-Identifier: Apache-2.0
#include "backend/cuda/sm90/row_gemm_alternating.cuh"
#include "backend/cuda/sm90/row_gemm_coded.cuh"

namespace moec::cuda {

cudaError_t launch_coded_up_alternating(const RowGemmProblem& problem,
                                        const CodedRowGemmParams& params, int ctas,
                                        cudaStream_t stream) {
  return with_codes(problem, [&]<class Element, class Codes>() {
    return launch_alternating<Element, CodedWeights<Codes, Major::kMN>,
                              StoreActivatedAtOnce<Element, SigmoidGated, false>,
                              StoreActivatedAtOnce<Element, SigmoidGated, true>>(params, ctas,
                                                                                 stream);
  });
}

}  // namespace moec::cuda
