// SPDX-License-Identifier: Apache-2.0
// The gradient of the down projection, in two kernels.
#include "backend/cuda/sm90/gradient_rows.cuh"
#include "backend/cuda/sm90/row_gemm_coded.cuh"

namespace moec::cuda {

cudaError_t launch_coded_grad_down(const RowGemmProblem& problem, const CodedRowGemmParams& params,
                                   int ctas, cudaStream_t stream) {
  return with_codes(problem, [&]<class Element, class Codes>() {
    if (cudaError_t error =
            launch_major<Element, true, StoreRowsAtOnce<Element>,
                         CodedWeightsOf<Codes>::template Of>(problem, params, ctas, stream))
      return error;
    return launch_gradient_rows<Element, SigmoidGated>(params, ctas, stream);
  });
}

}  // namespace moec::cuda
