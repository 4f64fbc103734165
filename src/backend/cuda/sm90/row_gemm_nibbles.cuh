// SPDX-License-Identifier: Apache-2.0
// The row GEMMs of weights of four bits, in bf16: one set of kernels for all formats whose values
// are looked up in pairs, one for those that are rounded from fp32.
#pragma once

#include "backend/cuda/sm90/epilogue_gradient.cuh"
#include "backend/cuda/sm90/epilogue_tall.cuh"
#include "backend/cuda/sm90/row_gemm_alternating.cuh"

namespace moec::cuda {

template <bool kPairs>
struct NibbleWeightsOf {
  template <Major kMajor>
  using Of = NibbleWeights<kPairs, kMajor>;
};

template <bool kPairs>
cudaError_t launch_nibble_up(const RowGemmProblem& problem, const NibbleRowGemmParams& params,
                             int ctas, cudaStream_t stream) {
  using Element = __nv_bfloat16;
  using Bare = StoreActivated<Element, SigmoidGated>;
  using Kept = StoreActivatedAndPre<Element, SigmoidGated>;
  return params.pre ? launch_major<Element, true, Kept, NibbleWeightsOf<kPairs>::template Of>(
                          problem, params, ctas, stream)
                    : launch_major<Element, true, Bare, NibbleWeightsOf<kPairs>::template Of>(
                          problem, params, ctas, stream);
}

template <bool kPairs>
cudaError_t launch_nibble_up_alternating(const RowGemmProblem&, const NibbleRowGemmParams& params,
                                         int ctas, cudaStream_t stream) {
  return launch_alternating<__nv_bfloat16, NibbleWeights<kPairs, Major::kMN>>(params, ctas, stream);
}

template <bool kPairs>
cudaError_t launch_nibble_down(const RowGemmProblem& problem, const NibbleRowGemmParams& params,
                               int ctas, cudaStream_t stream) {
  using Element = __nv_bfloat16;
  return launch_major<Element, false, StoreRows<Element>, NibbleWeightsOf<kPairs>::template Of>(
      problem, params, ctas, stream);
}

template <bool kPairs>
cudaError_t launch_nibble_grad_down(const RowGemmProblem& problem,
                                    const NibbleRowGemmParams& params, int ctas,
                                    cudaStream_t stream) {
  using Element = __nv_bfloat16;
  using Epilogue = StoreGradient<Element, SigmoidGated>;
  return launch_major<Element, true, Epilogue, NibbleWeightsOf<kPairs>::template Of>(
      problem, params, ctas, stream);
}

}  // namespace moec::cuda
