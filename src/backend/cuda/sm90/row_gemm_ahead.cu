// SPDX-License-Identifier: Apache-2.0
// Row GEMMs whose weights are decoded ahead of the tiles.
#include "backend/cuda/sm90/epilogue_at_once.cuh"
#include "backend/cuda/sm90/epilogue_tall.cuh"
#include "backend/cuda/sm90/gradient_rows.cuh"
#include "backend/cuda/sm90/row_gemm_launch.cuh"

namespace moec::cuda {

cudaError_t launch_ahead(const RowGemmProblem& problem, const AheadRowGemmParams& params, int ctas,
                         cudaStream_t stream) {
  using Element = __nv_bfloat16;
  if (form_of(problem.op).gated) {
    using Bare = RowGemmConfig<Element, AheadWeights<Major::kK>, false,
                               StoreActivatedAtOnce<Element, SigmoidGated, false>>;
    using Kept = RowGemmConfig<Element, AheadWeights<Major::kK>, false,
                               StoreActivatedAtOnce<Element, SigmoidGated, true>>;
    return params.pre ? launch_config<Kept>(params, ctas, stream)
                      : launch_config<Bare>(params, ctas, stream);
  }
  if (cudaError_t error = launch_major<Element, false, StoreRowsAtOnce<Element>, AheadWeights>(
          problem, params, ctas, stream))
    return error;
  if (!has_gradient_rows(problem)) return cudaSuccess;
  return launch_gradient_rows<Element, SigmoidGated>(params, ctas, stream);
}

}  // namespace moec::cuda
