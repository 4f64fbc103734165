// SPDX-License-Identifier: Apache-2.0
// The row GEMMs of a forward of few rows an expert, of codes along k: those who multiply decode.
// Memory is waited for, not the tensor cores, so tiles are low, and two CTAs on a multiprocessor
// have more codes on their way and more warps that decode.
#pragma once

#include "backend/cuda/sm90/epilogue_at_once.cuh"
#include "backend/cuda/sm90/row_gemm_launch.cuh"

namespace moec::cuda {

template <class Element, class Weights>
cudaError_t up_of_few(const CodedRowGemmParams& params, int ctas, cudaStream_t stream) {
  using Epilogue = StoreActivatedAtOnce<Element, SigmoidGated, true, kFewRows>;
  return launch_config<RowGemmConfig<Element, Weights, true, Epilogue>>(params, ctas, stream);
}
template <class Element, class Weights>
cudaError_t down_of_few(const CodedRowGemmParams& params, int ctas, cudaStream_t stream) {
  using Epilogue = StoreRowsAtOnce<Element, kFewRows>;
  return launch_config<RowGemmConfig<Element, Weights, false, Epilogue>>(params, ctas, stream);
}

// body<Element, Weights>() of the problem's type and scales; what few lines want is not in the loop
// of the others.
template <LineDecode kDecode, class Body>
cudaError_t with_scales(const RowGemmProblem& problem, const Body& body) {
  return with_element(problem, [&]<class Element>() {
    if constexpr (kDecode != LineDecode::kSigned)
      if (has_whole_lines(problem.lines))
        return body.template operator()<Element, RegisterWeights<kDecode, true>>();
    return body.template operator()<Element, RegisterWeights<kDecode, false>>();
  });
}

// And of how its codes are decoded, but for PowersWeights.
template <class Body>
cudaError_t with_decoded(const RowGemmProblem& problem, const Body& body) {
  switch (problem.lines.decode) {
    case LineDecode::kTable:
      return with_scales<LineDecode::kTable>(problem, body);
    case LineDecode::kIntegers:
      return with_scales<LineDecode::kIntegers>(problem, body);
    case LineDecode::kBytes:
      return with_scales<LineDecode::kBytes>(problem, body);
    case LineDecode::kSigned:
      return with_scales<LineDecode::kSigned>(problem, body);
    case LineDecode::kPowers:
      break;
  }
  return cudaErrorInvalidValue;
}

// Powers of two are those of bf16 (line_words.h), and each of half a line. Their kernels, of one
// type alone, are compiled alone.
using PowersWeights = RegisterWeights<LineDecode::kPowers, false>;

}  // namespace moec::cuda
