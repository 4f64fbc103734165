// SPDX-License-Identifier: Apache-2.0
#include "backend/cuda/few_tokens/small_kernel.cuh"

namespace moec::cuda {

cudaError_t launch_small_up(const SmallArgs& args, int multiprocessors, cudaStream_t stream) {
  return launch_small<true>(args, multiprocessors, stream);
}

}  // namespace moec::cuda
