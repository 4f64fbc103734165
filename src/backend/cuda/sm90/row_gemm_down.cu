// SPDX-License-Identifier: Apache-2.0
#include "backend/cuda/sm90/epilogue_tall.cuh"
#include "backend/cuda/sm90/row_gemm_launch.cuh"

namespace moec::cuda {

cudaError_t launch_down(const RowGemmProblem& problem, const RowGemmParams& params, int ctas,
                        cudaStream_t stream) {
  return with_element(problem, [&]<class Element>() {
    return launch_major<Element, false, StoreRows<Element>>(problem, params, ctas, stream);
  });
}

}  // namespace moec::cuda
