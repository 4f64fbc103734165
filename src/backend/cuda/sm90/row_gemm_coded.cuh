// SPDX-License-Identifier: Apache-2.0
// The row GEMMs of coded weights. One form of the activation serves all kinds, and fewer instances
// are compiled.
#pragma once

#include "backend/cuda/sm90/epilogue_gradient.cuh"
#include "backend/cuda/sm90/epilogue_tall.cuh"
#include "backend/cuda/sm90/row_gemm_alternating.cuh"

namespace moec::cuda {

// body<Element>() of the problem's type, where the kernels have the format; others are refused.
template <class Format, class Body>
cudaError_t with_decoded_element(const RowGemmProblem& problem, const Body& body) {
  if constexpr (row_gemm_decodes(Format::kInfo)) return with_element(problem, body);
  return cudaErrorNotSupported;
}

template <class Format>
struct CodedWeightsOf {
  template <Major kMajor>
  using Of = CodedWeights<Format, kMajor>;
};

template <class Format>
cudaError_t launch_coded_up(const RowGemmProblem& problem, const CodedRowGemmParams& params,
                            int ctas, cudaStream_t stream) {
  return with_decoded_element<Format>(problem, [&]<class Element>() {
    using Bare = StoreActivated<Element, SigmoidGated>;
    using Kept = StoreActivatedAndPre<Element, SigmoidGated>;
    return params.pre ? launch_major<Element, true, Kept, CodedWeightsOf<Format>::template Of>(
                            problem, params, ctas, stream)
                      : launch_major<Element, true, Bare, CodedWeightsOf<Format>::template Of>(
                            problem, params, ctas, stream);
  });
}

template <class Format>
cudaError_t launch_coded_up_alternating(const RowGemmProblem& problem,
                                        const CodedRowGemmParams& params, int ctas,
                                        cudaStream_t stream) {
  return with_decoded_element<Format>(problem, [&]<class Element>() {
    return launch_alternating<Element, CodedWeights<Format, Major::kMN>>(params, ctas, stream);
  });
}

template <class Format>
cudaError_t launch_coded_down(const RowGemmProblem& problem, const CodedRowGemmParams& params,
                              int ctas, cudaStream_t stream) {
  return with_decoded_element<Format>(problem, [&]<class Element>() {
    return launch_major<Element, false, StoreRows<Element>, CodedWeightsOf<Format>::template Of>(
        problem, params, ctas, stream);
  });
}

template <class Format>
cudaError_t launch_coded_grad_down(const RowGemmProblem& problem, const CodedRowGemmParams& params,
                                   int ctas, cudaStream_t stream) {
  return with_decoded_element<Format>(problem, [&]<class Element>() {
    using Epilogue = StoreGradient<Element, SigmoidGated>;
    return launch_major<Element, true, Epilogue, CodedWeightsOf<Format>::template Of>(
        problem, params, ctas, stream);
  });
}

}  // namespace moec::cuda
