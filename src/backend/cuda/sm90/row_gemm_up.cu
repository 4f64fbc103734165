// SPDX-License-Identifier: Apache-2.0
#include "backend/cuda/sm90/activation.cuh"
#include "backend/cuda/sm90/epilogue_tall.cuh"
#include "backend/cuda/sm90/row_gemm_launch.cuh"

namespace moec::cuda {

namespace {

template <typename Element, typename Activation>
cudaError_t launch_pre(const RowGemmParams& p, bool mn_major, int grid, cudaStream_t stream) {
  return p.pre ? launch_major<Element, true, StoreActivatedAndPre<Element, Activation>>(
                     p, mn_major, grid, stream)
               : launch_major<Element, true, StoreActivated<Element, Activation>>(p, mn_major, grid,
                                                                                  stream);
}

template <typename Element>
cudaError_t launch_element(const RowGemmParams& p, bool mn_major, int grid, cudaStream_t stream) {
  return p.activation.kind == MOEC_ACT_SWIGLU
             ? launch_pre<Element, Swiglu>(p, mn_major, grid, stream)
             : launch_pre<Element, SigmoidGated>(p, mn_major, grid, stream);
}

}  // namespace

cudaError_t launch_up(const RowGemmParams& params, bool bf16, bool mn_major, int grid,
                      cudaStream_t stream) {
  return bf16 ? launch_element<__nv_bfloat16>(params, mn_major, grid, stream)
              : launch_element<__half>(params, mn_major, grid, stream);
}

}  // namespace moec::cuda
