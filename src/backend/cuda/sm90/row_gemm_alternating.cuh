// SPDX-License-Identifier: Apache-2.0
// The up projection where columns of gate and up alternate, for weights of one kind. Bare and Kept:
// epilogues without and with pre-activations.
#pragma once

#include "backend/cuda/sm90/epilogue_alternating.cuh"
#include "backend/cuda/sm90/row_gemm_launch.cuh"

namespace moec::cuda {

template <typename Element, typename Weights, typename Bare, typename Kept>
cudaError_t launch_alternating(const typename Weights::Params& params, int ctas,
                               cudaStream_t stream) {
  constexpr Blocks kBlocks = Blocks::kAlternating;
  using Group = AlternatingGroup;
  return params.pre ? launch_config<RowGemmConfig<Element, Weights, true, Kept, kBlocks, Group>>(
                          params, ctas, stream)
                    : launch_config<RowGemmConfig<Element, Weights, true, Bare, kBlocks, Group>>(
                          params, ctas, stream);
}

}  // namespace moec::cuda
