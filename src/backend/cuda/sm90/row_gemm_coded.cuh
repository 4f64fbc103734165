// SPDX-License-Identifier: Apache-2.0
// The row GEMMs of coded weights. One form of the activation serves all kinds, and fewer instances
// are compiled. Registers decode that other kernels hold results in, so a tile leaves at once, and
// the gradient of the down projection is made in two kernels.
#pragma once

#include "backend/cuda/sm90/epilogue_at_once.cuh"
#include "backend/cuda/sm90/gradient_rows.cuh"
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
    using Bare = StoreActivatedAtOnce<Element, SigmoidGated, false>;
    using Kept = StoreActivatedAtOnce<Element, SigmoidGated, true>;
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
    return launch_alternating<Element, CodedWeights<Codes, Major::kMN>,
                              StoreActivatedAtOnce<Element, SigmoidGated, false>,
                              StoreActivatedAtOnce<Element, SigmoidGated, true>>(params, ctas,
                                                                                 stream);
  });
}

template <class Codes>
cudaError_t launch_coded_down(const RowGemmProblem& problem, const CodedRowGemmParams& params,
                              int ctas, cudaStream_t stream) {
  return with_element(problem, [&]<class Element>() {
    return launch_major<Element, false, StoreRowsAtOnce<Element>,
                        CodedWeightsOf<Codes>::template Of>(problem, params, ctas, stream);
  });
}

template <class Codes>
cudaError_t launch_coded_grad_down(const RowGemmProblem& problem, const CodedRowGemmParams& params,
                                   int ctas, cudaStream_t stream) {
  return with_element(problem, [&]<class Element>() {
    if (cudaError_t error =
            launch_major<Element, true, StoreRowsAtOnce<Element>,
                         CodedWeightsOf<Codes>::template Of>(problem, params, ctas, stream))
      return error;
    return launch_gradient_rows<Element, SigmoidGated>(params, ctas, stream);
  });
}

}  // namespace moec::cuda
