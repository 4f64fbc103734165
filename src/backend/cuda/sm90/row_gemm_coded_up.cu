// SPDX-License-Identifier: Apache-2.0
#include "backend/cuda/sm90/row_gemm_coded.cuh"

namespace moec::cuda {

cudaError_t launch_coded_up(const RowGemmProblem& problem, const CodedRowGemmParams& params,
                            int ctas, cudaStream_t stream) {
  return with_codes(problem, [&]<class Element, class Codes>() {
    // In f16 both are one kernel.
    using Bare = StoreActivatedAtOnce<Element, SigmoidGated, std::is_same_v<Element, __half>>;
    using Kept = StoreActivatedAtOnce<Element, SigmoidGated, true>;
    return params.pre ? launch_major<Element, true, Kept, CodedWeightsOf<Codes>::template Of>(
                            problem, params, ctas, stream)
                      : launch_major<Element, true, Bare, CodedWeightsOf<Codes>::template Of>(
                            problem, params, ctas, stream);
  });
}

}  // namespace moec::cuda
