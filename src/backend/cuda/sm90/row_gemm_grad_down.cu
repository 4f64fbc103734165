// SPDX-License-Identifier: Apache-2.0
#include "backend/cuda/sm90/activation.cuh"
#include "backend/cuda/sm90/epilogue_gradient.cuh"
#include "backend/cuda/sm90/row_gemm_launch.cuh"

namespace moec::cuda {

namespace {

template <typename Element>
cudaError_t launch_element(const RowGemmParams& p, bool mn_major, int grid, cudaStream_t stream) {
  return p.activation.kind == MOEC_ACT_SWIGLU
             ? launch_major<Element, true, StoreGradient<Element, Swiglu>>(p, mn_major, grid,
                                                                           stream)
             : launch_major<Element, true, StoreGradient<Element, SigmoidGated>>(p, mn_major, grid,
                                                                                 stream);
}

}  // namespace

cudaError_t launch_grad_down(const RowGemmParams& params, bool bf16, bool mn_major, int grid,
                             cudaStream_t stream) {
  return bf16 ? launch_element<__nv_bfloat16>(params, mn_major, grid, stream)
              : launch_element<__half>(params, mn_major, grid, stream);
}

}  // namespace moec::cuda
