// SPDX-License-Identifier: Apache-2.0
#include "backend/cuda/sm90/row_gemm_coded.cuh"

namespace moec::cuda {

cudaError_t launch_coded_grad_down(const RowGemmProblem& problem, const CodedRowGemmParams& params,
                                   int ctas, cudaStream_t stream) {
  return with_codes(problem, [&]<class Element, class Codes>() {
    return launch_major<Element, true, StoreRowsAtOnce<Element>,
                        CodedWeightsOf<Codes>::template Of>(problem, params, ctas, stream);
  });
}

}  // namespace moec::cuda
