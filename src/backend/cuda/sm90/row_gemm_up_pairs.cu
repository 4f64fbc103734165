// SPDX-License-Identifier: Apache-2.0
// The up projection of weights whose gate and up columns alternate, as gpt-oss has them.
#include "backend/cuda/sm90/activation.cuh"
#include "backend/cuda/sm90/epilogue_pairs.cuh"
#include "backend/cuda/sm90/row_gemm_launch.cuh"

namespace moec::cuda {
namespace {

template <typename Element, template <typename, typename> typename Epilogue>
using Config = RowGemmConfig<Element, Major::kMN, true, Epilogue<Element, SigmoidGated>,
                             Blocks::kPairs, PairGroup>;

template <typename Element>
cudaError_t launch_element(const RowGemmParams& p, int grid, cudaStream_t stream) {
  return p.pre ? launch_config<Config<Element, StoreActivatedAndPre>>(p, grid, stream)
               : launch_config<Config<Element, StorePairs>>(p, grid, stream);
}

}  // namespace

cudaError_t launch_up_pairs(const RowGemmParams& params, bool bf16, bool, int grid,
                            cudaStream_t stream) {
  return bf16 ? launch_element<__nv_bfloat16>(params, grid, stream)
              : launch_element<__half>(params, grid, stream);
}

}  // namespace moec::cuda
