// SPDX-License-Identifier: Apache-2.0
#include "backend/cuda/sm90/epilogue_gradient.cuh"
#include "backend/cuda/sm90/row_gemm_launch.cuh"

namespace moec::cuda {

cudaError_t launch_grad_down(const RowGemmProblem& problem, const RowGemmParams& params, int ctas,
                             cudaStream_t stream) {
  return with_activation(problem, [&]<class Element, class Activation>() {
    return launch_major<Element, true, StoreGradient<Element, Activation>>(problem, params, ctas,
                                                                           stream);
  });
}

}  // namespace moec::cuda
