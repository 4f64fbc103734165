// SPDX-License-Identifier: Apache-2.0
// The row GEMMs of a forward of few rows an expert, of codes along k: those who multiply decode.
// Memory is waited for, not the tensor cores, so tiles are low, and two CTAs on a multiprocessor
// have more codes on their way and more warps that decode.
#pragma once

#include "backend/cuda/sm90/activation.cuh"
#include "backend/cuda/sm90/epilogue_at_once.cuh"
#include "backend/cuda/sm90/row_gemm_launch.cuh"

namespace moec::cuda {

// body<Element, Weights>() of the problem's type and scales. Powers of two are those of bf16
// (line_words.h), and each of half a line; what few lines want is not in the loop of the others.
template <LineDecode kDecode, class Body>
cudaError_t with_decoded(const RowGemmProblem& problem, const Body& body) {
  using Parts = RegisterWeights<kDecode, false>;
  if constexpr (kDecode == LineDecode::kPowers) {
    return body.template operator()<__nv_bfloat16, Parts>();
  } else {
    return with_element(problem, [&]<class Element>() {
      if constexpr (kDecode != LineDecode::kSigned) {
        const ExpertScales& scales = problem.lines.scales[0];
        if (kTileK >> scales.shift <= 1 &&
            (kDecode == LineDecode::kIntegers || scales.dtype == MOEC_F32))
          return body.template operator()<Element, RegisterWeights<kDecode, true>>();
      }
      return body.template operator()<Element, Parts>();
    });
  }
}

template <LineDecode kDecode>
cudaError_t launch_few_up(const RowGemmProblem& problem, const CodedRowGemmParams& params, int ctas,
                          cudaStream_t stream) {
  return with_decoded<kDecode>(problem, [&]<class Element, class Weights>() {
    using Epilogue = StoreActivatedAtOnce<Element, SigmoidGated, true, kFewRows>;
    return launch_config<RowGemmConfig<Element, Weights, true, Epilogue>>(params, ctas, stream);
  });
}

template <LineDecode kDecode>
cudaError_t launch_few_down(const RowGemmProblem& problem, const CodedRowGemmParams& params,
                            int ctas, cudaStream_t stream) {
  return with_decoded<kDecode>(problem, [&]<class Element, class Weights>() {
    using Epilogue = StoreRowsAtOnce<Element, kFewRows>;
    return launch_config<RowGemmConfig<Element, Weights, false, Epilogue>>(params, ctas, stream);
  });
}

}  // namespace moec::cuda
