// SPDX-License-Identifier: Apache-2.0
// The experts of one token, whose time is that of reading the weights of the experts hit. Two
// launches, each of one CTA on every multiprocessor, and both fit beside each other:
//   up    x -> act [slots with a row, I], slots in order
//   down  act -> y; a CTA owns columns of y, over all slots
#pragma once

#include "backend/cuda/few_tokens/small_gemm.h"

namespace moec::cuda {

// The plan is that of down.combine; up.pre and the rows of down are not written.
const char* one_token_refuses(const SmallArgs& up, const SmallArgs& down);
cudaError_t launch_one_token(const SmallArgs& up, const SmallArgs& down, int multiprocessors,
                             cudaStream_t stream);

}  // namespace moec::cuda
