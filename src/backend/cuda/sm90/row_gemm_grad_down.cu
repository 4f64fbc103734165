// SPDX-License-Identifier: Apache-2.0
#include "backend/cuda/sm90/activation.cuh"
#include "backend/cuda/sm90/epilogue_gradient.cuh"
#include "backend/cuda/sm90/row_gemm_launch.cuh"

namespace moec::cuda {

cudaError_t launch_grad_down(const RowGemmProblem& problem, const RowGemmParams& params, int ctas,
                             cudaStream_t stream) {
  return with_element(problem, [&]<class Element>() {
    return problem.activation.kind == MOEC_ACT_SWIGLU
               ? launch_major<Element, true, StoreGradient<Element, Swiglu>>(problem, params, ctas,
                                                                             stream)
               : launch_major<Element, true, StoreGradient<Element, SigmoidGated>>(problem, params,
                                                                                   ctas, stream);
  });
}

}  // namespace moec::cuda
