// SPDX-License-Identifier: Apache-2.0
#include "backend/cuda/sm90/epilogue_tall.cuh"
#include "backend/cuda/sm90/row_gemm_launch.cuh"

namespace moec::cuda {

cudaError_t launch_up(const RowGemmProblem& problem, const RowGemmParams& params, int ctas,
                      cudaStream_t stream) {
  return with_activation(problem, [&]<class Element, class Activation>() {
    using Bare = StoreActivated<Element, Activation>;
    using Kept = StoreActivatedAndPre<Element, Activation>;
    return params.pre ? launch_major<Element, true, Kept>(problem, params, ctas, stream)
                      : launch_major<Element, true, Bare>(problem, params, ctas, stream);
  });
}

}  // namespace moec::cuda
