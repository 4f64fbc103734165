// SPDX-License-Identifier: Apache-2.0
#include "backend/cuda/sm90/epilogue_tall.cuh"
#include "backend/cuda/sm90/row_gemm_launch.cuh"

namespace moec::cuda {

template <typename Element>
using Epilogue = StoreRows<Element>;

cudaError_t launch_down(const RowGemmParams& params, bool bf16, bool mn_major, int grid,
                        cudaStream_t stream) {
  return bf16 ? launch_major<__nv_bfloat16, false, Epilogue<__nv_bfloat16>>(params, mn_major, grid,
                                                                            stream)
              : launch_major<__half, false, Epilogue<__half>>(params, mn_major, grid, stream);
}

}  // namespace moec::cuda
