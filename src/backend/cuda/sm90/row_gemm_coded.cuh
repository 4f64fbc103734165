// SPDX-License-Identifier: Apache-2.0
// The row GEMMs of coded weights. One form of the activation serves all kinds, and fewer instances
// are compiled.
#pragma once

#include "backend/cuda/sm90/epilogue_gradient.cuh"
#include "backend/cuda/sm90/epilogue_tall.cuh"
#include "backend/cuda/sm90/row_gemm_alternating.cuh"

namespace moec::cuda {

template <class Codes>
struct CodedWeightsOf {
  template <Major kMajor>
  using Of = CodedWeights<Codes, kMajor>;
};

template <class Codes>
cudaError_t launch_coded_up(const RowGemmProblem& problem, const CodedRowGemmParams& params,
                            int ctas, cudaStream_t stream) {
  return with_element(problem, [&]<class Element>() {
    using Bare = StoreActivated<Element, SigmoidGated>;
    using Kept = StoreActivatedAndPre<Element, SigmoidGated>;
    return params.pre ? launch_major<Element, true, Kept, CodedWeightsOf<Codes>::template Of>(
                            problem, params, ctas, stream)
                      : launch_major<Element, true, Bare, CodedWeightsOf<Codes>::template Of>(
                            problem, params, ctas, stream);
  });
}

template <class Codes>
cudaError_t launch_coded_up_alternating(const RowGemmProblem& problem,
                                        const CodedRowGemmParams& params, int ctas,
                                        cudaStream_t stream) {
  return with_element(problem, [&]<class Element>() {
    return launch_alternating<Element, CodedWeights<Codes, Major::kMN>>(params, ctas, stream);
  });
}

template <class Codes>
cudaError_t launch_coded_down(const RowGemmProblem& problem, const CodedRowGemmParams& params,
                              int ctas, cudaStream_t stream) {
  return with_element(problem, [&]<class Element>() {
    return launch_major<Element, false, StoreRows<Element>, CodedWeightsOf<Codes>::template Of>(
        problem, params, ctas, stream);
  });
}

template <class Codes>
cudaError_t launch_coded_grad_down(const RowGemmProblem& problem, const CodedRowGemmParams& params,
                                   int ctas, cudaStream_t stream) {
  return with_element(problem, [&]<class Element>() {
    using Epilogue = StoreGradient<Element, SigmoidGated>;
    return launch_major<Element, true, Epilogue, CodedWeightsOf<Codes>::template Of>(
        problem, params, ctas, stream);
  });
}

}  // namespace moec::cuda
