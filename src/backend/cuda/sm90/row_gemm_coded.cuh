// SPDX-License-Identifier: Apache-2.0
// The row GEMMs of coded weights. One form of the activation serves all kinds, and fewer instances
// are compiled. Registers decode that other kernels hold results in, so a tile leaves at once.
#pragma once

#include "backend/cuda/sm90/epilogue_at_once.cuh"
#include "backend/cuda/sm90/row_gemm_launch.cuh"
#include "quant/format.h"

namespace moec::cuda {

template <class Codes>
struct CodedWeightsOf {
  template <Major kMajor>
  using Of = CodedWeights<Codes, kMajor>;
};

// body<Element, Codes>() of the problem's type and codes: LineFormats, or a format of channels.
template <class Body>
cudaError_t with_codes(const RowGemmProblem& problem, const Body& body) {
  return with_element(problem, [&]<class Element>() {
    if (has_lines(problem.scheme)) return body.template operator()<Element, LineFormats>();
    cudaError_t error = cudaErrorInvalidValue;
    quant::ChannelFormats::with(problem.scheme, [&]<class Format>() {
      error = body.template operator()<Element, Format>();
    });
    return error;
  });
}

}  // namespace moec::cuda
