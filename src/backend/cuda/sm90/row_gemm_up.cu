// SPDX-License-Identifier: Apache-2.0
#include "backend/cuda/sm90/activation.cuh"
#include "backend/cuda/sm90/epilogue_tall.cuh"
#include "backend/cuda/sm90/row_gemm_launch.cuh"

namespace moec::cuda {

namespace {

template <typename Element, typename Activation>
cudaError_t launch_pre(const RowGemmProblem& problem, const RowGemmParams& params, int ctas,
                       cudaStream_t stream) {
  return params.pre ? launch_major<Element, true, StoreActivatedAndPre<Element, Activation>>(
                          problem, params, ctas, stream)
                    : launch_major<Element, true, StoreActivated<Element, Activation>>(
                          problem, params, ctas, stream);
}

}  // namespace

cudaError_t launch_up(const RowGemmProblem& problem, const RowGemmParams& params, int ctas,
                      cudaStream_t stream) {
  return with_element(problem, [&]<class Element>() {
    return problem.activation.kind == MOEC_ACT_SWIGLU
               ? launch_pre<Element, Swiglu>(problem, params, ctas, stream)
               : launch_pre<Element, SigmoidGated>(problem, params, ctas, stream);
  });
}

}  // namespace moec::cuda
