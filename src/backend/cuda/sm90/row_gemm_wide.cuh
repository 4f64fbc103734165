// SPDX-License-Identifier: Apache-2.0
// The row GEMMs of a forward of many rows an expert, of codes along k: tiles of 128 features x up
// to 256 rows, so that a code is decoded once for 256 rows, by the warps that multiply it, into
// wgmma's A operand. Shared memory moves rows and codes, and no elements.
#pragma once

#include "backend/cuda/sm90/epilogue_wide.cuh"
#include "backend/cuda/sm90/row_gemm_few.cuh"

namespace moec::cuda {

template <class Element, class Weights>
cudaError_t up_of_wide(const CodedRowGemmParams& params, int ctas, cudaStream_t stream) {
  using Epilogue = StoreWideActivated<Element, SigmoidGated>;
  return launch_config<RowGemmConfig<Element, Weights, true, Epilogue, Blocks::kPair>>(params, ctas,
                                                                                       stream);
}
template <class Element, class Weights>
cudaError_t down_of_wide(const CodedRowGemmParams& params, int ctas, cudaStream_t stream) {
  using Epilogue = StoreWideRows<Element>;
  return launch_config<RowGemmConfig<Element, Weights, false, Epilogue>>(params, ctas, stream);
}

}  // namespace moec::cuda
