// SPDX-License-Identifier: Apache-2.0
// The row GEMMs of a forward of few rows an expert, of codes along k: those who multiply decode.
// Memory is waited for, not the tensor cores, so tiles are low, and two CTAs on a multiprocessor
// have more codes on their way and more warps that decode.
#pragma once

#include "backend/cuda/sm90/activation.cuh"
#include "backend/cuda/sm90/epilogue_at_once.cuh"
#include "backend/cuda/sm90/row_gemm_launch.cuh"

namespace moec::cuda {

template <LineDecode kDecode>
cudaError_t launch_few_up(const RowGemmProblem&, const CodedRowGemmParams& params, int ctas,
                          cudaStream_t stream) {
  using Epilogue = StoreActivatedAtOnce<__nv_bfloat16, SigmoidGated, false, kFewRows>;
  return launch_config<RowGemmConfig<__nv_bfloat16, RegisterWeights<kDecode>, true, Epilogue>>(
      params, ctas, stream);
}

template <LineDecode kDecode>
cudaError_t launch_few_down(const RowGemmProblem&, const CodedRowGemmParams& params, int ctas,
                            cudaStream_t stream) {
  using Epilogue = StoreRowsAtOnce<__nv_bfloat16, kFewRows>;
  return launch_config<RowGemmConfig<__nv_bfloat16, RegisterWeights<kDecode>, false, Epilogue>>(
      params, ctas, stream);
}

}  // namespace moec::cuda
